"""The one place where this package touches private parts of transformers: it must be small, reversible, and pinned.

The host's own loop also takes our candidate generator. It is reached here by putting only that loop back in place.
"""

import inspect

import pytest
import torch
from test_greedy import recorded_drafts
from test_sampling import IMPOSSIBLE, drafter_for, generate, law, p_value, profile, tally
from tiny import (
    PAD,
    assert_same_text,
    assert_some_accepted,
    jagged_profile,
    one_thread,  # noqa: F401
    padded_prompts,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from transformers import AttentionInterface, Cache, GenerationMixin, PreTrainedModel, pipeline
from transformers.generation import CandidateGenerator, logits_process
from transformers.masking_utils import create_masks_for_generate

import hf_dspark
from hf_dspark import DSparkCandidateGenerator

WRAPPED = [
    (GenerationMixin, "_assisted_decoding"),
    (GenerationMixin, "_get_candidate_generator"),
    (AttentionInterface, "get_interface"),
]


@pytest.fixture
def stock_loop(monkeypatch):
    """The host's loop, which asks our hook for its candidate generator."""
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", GenerationMixin._assisted_decoding.__wrapped__)


def greedy(target, inputs, drafter=None, **options):
    options = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": PAD} | options
    return target.generate(**inputs, do_sample=False, assistant_model=drafter, **options)


# ---- the host's own loop ----


@pytest.mark.parametrize("mode", ["full", "threshold", "two_step", None])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_stock_loop_greedy(stock_loop, kind, mode):
    target = tiny_target(kind)
    drafter = tiny_drafter(target)
    drafter.load_profile, drafter.scheduling = jagged_profile(), mode
    inputs = padded_prompts([6])
    assert_same_text(target, inputs, greedy(target, inputs), greedy(target, inputs, drafter))
    assert_some_accepted(drafter)


@pytest.mark.parametrize("config", [{"draft_token_ids": [*range(4, 30), 35, 40]}, {"sample_from_anchor": False}])
def test_stock_loop_other_drafters(stock_loop, config):
    target = tiny_target()
    drafter = tiny_drafter(target, **config)
    inputs = padded_prompts([3])
    options = {"repetition_penalty": 1.2, "return_dict_in_generate": True, "output_scores": True}
    plain, drafted = greedy(target, inputs, **options), greedy(target, inputs, drafter, **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    torch.testing.assert_close(torch.cat(plain.scores), torch.cat(drafted.scores), atol=1e-4, rtol=1e-4)
    assert_some_accepted(drafter)


def test_stock_loop_drafts_like_ours(monkeypatch):
    """Both loops tell the drafter the same: it proposes, and has accepted, the same tokens."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, own_share=0.5)
    inputs = padded_prompts([6])
    drafts, accounts = recorded_drafts(monkeypatch), []
    for loop in (GenerationMixin._assisted_decoding, GenerationMixin._assisted_decoding.__wrapped__):
        monkeypatch.setattr(GenerationMixin, "_assisted_decoding", loop)
        drafts.clear()
        greedy(target, inputs, drafter)
        account = drafter.statistics.to_dict()
        del account["seconds"]
        accounts.append((dict(drafts), account))
    assert accounts[0] == accounts[1]


@pytest.mark.parametrize(
    "config, options", [({}, {"repetition_penalty": 1.5}), ({"draft_token_ids": [0, 1, 3]}, {"temperature": 0.7})]
)
def test_stock_loop_sampling(stock_loop, config, options):
    target = tiny_target("qwen3", seed=1, vocab_size=4, num_hidden_layers=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)
    drafter = drafter_for(target, **config)
    drafter.load_profile = profile(rows=1)
    torch.manual_seed(0)
    prompt, accepted, scheduled = [1, 2, 0], 0, 0
    texts = []
    for _ in range(200):
        texts.append(generate(target, [prompt], drafter, max_new_tokens=5, **options)[:, len(prompt) :])
        accepted += drafter.statistics.accepted
        scheduled += drafter.statistics.scheduled
    assert 0 < accepted < scheduled
    exact = law(target, prompt, tokens=3, **options)
    counts = tally(torch.cat(texts), 3)
    for others in ([0, 1], [0, 2], [2]):
        assert p_value(counts.sum(others), exact.sum(others)) > IMPOSSIBLE


def test_stock_loop_is_told_the_law_of_a_reduced_vocabulary(stock_loop, monkeypatch):
    """Over the whole vocabulary, what the drafter cannot say is impossible, and the rest is what it drew from."""
    target, kept = tiny_target(), [*range(4, 30), 35, 40]
    drafter = tiny_drafter(target, draft_token_ids=kept)
    propose, get_candidates = DSparkCandidateGenerator.propose, DSparkCandidateGenerator.get_candidates
    blocks, told = [], []

    def recording_propose(self, *arguments):
        blocks.append(propose(self, *arguments))
        return blocks[-1]

    def recording_candidates(self, *arguments, **options):
        candidates, logits = get_candidates(self, *arguments, **options)
        if logits is not None:
            told.append((blocks[-1], logits))
        return candidates, logits

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", recording_propose)
    monkeypatch.setattr(DSparkCandidateGenerator, "get_candidates", recording_candidates)
    torch.manual_seed(0)
    inputs = padded_prompts([4])
    target.generate(**inputs, do_sample=True, assistant_model=drafter, max_new_tokens=12, eos_token_id=None)
    assert told
    others = [token for token in range(48) if token not in kept]
    for block, logits in told:
        assert torch.equal(logits[..., kept], block.logits)
        assert logits[..., others].isneginf().all()


# ---- everybody else ----


def test_other_assistants_still_work():
    target = tiny_target()
    assistant = tiny_target(num_hidden_layers=1)
    inputs = padded_prompts([6])
    plain = greedy(target, inputs)
    assert_same_text(target, inputs, plain, greedy(target, inputs, assistant))
    assert_same_text(target, inputs, plain, greedy(target, inputs, prompt_lookup_num_tokens=3))
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        greedy(target, padded_prompts([2, 3]), assistant)


def test_pipeline():
    target, tokenizer = tiny_target("qwen3"), tiny_tokenizer()
    drafter = tiny_drafter(target)
    options = {"max_new_tokens": 12, "do_sample": False}
    answers = []
    for assistant in ({}, {"assistant_model": drafter}):
        generator = pipeline("text-generation", model=target, tokenizer=tokenizer, **assistant)
        answers.append([generator("hello", **options), generator(["so", "long"], batch_size=2, **options)])
    assert answers[0] == answers[1]
    assert drafter.statistics.tokens


# ---- in and out ----


def test_install_and_uninstall():
    ours = [getattr(*place) for place in WRAPPED]
    hf_dspark.install()
    assert [getattr(*place) for place in WRAPPED] == ours
    try:
        hf_dspark.uninstall()
        assert [getattr(*place) for place in WRAPPED] == [wrapper.__wrapped__ for wrapper in ours]
        hf_dspark.uninstall()
    finally:
        hf_dspark.install()
    assert [getattr(*place).__wrapped__ for place in WRAPPED] == [wrapper.__wrapped__ for wrapper in ours]


# ---- what is relied on, so that a new release of transformers fails here and in words ----

SIGNATURES = {
    GenerationMixin._assisted_decoding: [
        "self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer",
        "inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer", "model_kwargs",
    ],
    GenerationMixin._get_candidate_generator: [
        "self", "generation_config", "input_ids", "inputs_tensor", "logits_processor", "model_kwargs", "assistant_model",
        "target_tokenizer", "assistant_tokenizer",
    ],
    GenerationMixin.prepare_inputs_for_generation: [
        "self", "input_ids", "next_sequence_length", "cache", "attention_mask", "inputs_embeds", "is_first_iteration", "kwargs",
    ],
    AttentionInterface.get_interface: ["self", "attn_implementation", "default"],
    PreTrainedModel._can_set_attn_implementation: [],
    PreTrainedModel.is_custom_code: [],
    CandidateGenerator.get_candidates: ["self", "input_ids", "kwargs"],
    CandidateGenerator.update_candidate_strategy: ["self", "input_ids", "scores", "num_matches"],
    Cache.update: ["self", "key_states", "value_states", "layer_idx", "args", "kwargs"],
    Cache.get_mask_sizes: ["self", "query_length", "layer_idx"],
    Cache.get_seq_length: ["self", "layer_idx"],
    Cache.get_query_offset: ["self", "layer_idx"],
    create_masks_for_generate: [
        "config", "inputs_embeds", "attention_mask", "cache", "position_ids", "or_mask_function", "and_mask_function",
        "block_sequence_ids", "kwargs",
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures(function):
    names = list(inspect.signature(function).parameters)
    if "cache" in SIGNATURES[function]:  # from 5.25 on some also show its former name
        names = [name for name in names if name != "past_key_values"]
    assert names == SIGNATURES[function]


def test_private_attributes():
    """Those of processors, which are narrowed to one row of a batch."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 8]])
    penalty = logits_process.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=torch.tensor([1, 0]))
    assert penalty.prompt_ignore_length.tolist() == [1, 0]
    encoder = logits_process.EncoderRepetitionPenaltyLogitsProcessor(1.5, ids)
    assert torch.equal(encoder.encoder_input_ids, ids)
    ngrams = logits_process.EncoderNoRepeatNGramLogitsProcessor(2, ids)
    assert len(ngrams.generated_ngrams) == ngrams.batch_size == 2
    constrained = logits_process.PrefixConstrainedLogitsProcessor(lambda row, prefix: [row], num_beams=1)
    assert constrained._prefix_allowed_tokens_fn(3, ids) == [3]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "qwen3_moe"])
def test_captured_states(kind):
    """A list of indices captures just these: 0 is the embedding, k + 1 the output of decoder layer k."""
    target = tiny_target(kind, attention="eager")
    outputs = {}
    hooks = [
        layer.register_forward_hook(lambda module, args, output, index=index: outputs.update({index: output}))
        for index, layer in enumerate(target.model.layers)
    ]
    with torch.no_grad():
        states = target(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=[0, 1, 3]).hidden_states
    for hook in hooks:
        hook.remove()
    assert [state is None for state in states] == [False, False, True, False, True]
    for index in (0, 2):
        expected = outputs[index][0] if isinstance(outputs[index], tuple) else outputs[index]
        assert torch.equal(states[index + 1], expected)
