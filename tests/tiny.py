"""Tiny targets and drafters that agree often, but not always.

A random drafter is refused nearly everywhere, so exactness would be tested on refusals alone. Here the target is made easy:
its embeddings outweigh its few layers, so the next token depends mostly on the current one, and a sequential head of rank V
holds that table (W1 the identity, W2 the target's own log-probabilities). The layers still say enough for a part of the
drafts to be refused. Dimensions are small, weights float32, nothing is downloaded.
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_dspark import DSparkConfig, DSparkDraftModel, LoadProfile

VOCABULARY, PAD, BOS, EOS, MASK = 48, 0, 1, 2, 3
WINDOW = 6  # shorter than every text of the tests


@pytest.fixture(autouse=True)
def one_thread():
    """For tiny models, threads only wait for each other. Applies to every test of a module that imports it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Of every tiny target, whatever its kind.
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "afmoe": (
        AfmoeConfig,
        AfmoeForCausalLM,
        {
            "sliding_window": WINDOW,
            "global_attn_every_n_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
        },
    ),
}


def tiny_target(
    kind: str = "llama", seed: int = 0, attention: str = "sdpa", vocab_size: int = VOCABULARY, **config
) -> PreTrainedModel:
    """A target of four layers whose next token depends mostly, but not only, on the current one.

    Args:
        kind (`str`): a key of the table above.
        seed (`int`): of its weights.
        attention (`str`): implementation, `"eager"` or `"sdpa"`.
        vocab_size (`int`): V.
        config: further fields of its configuration.

    Returns:
        `PreTrainedModel`: in evaluation mode, with PAD, BOS and EOS as special tokens.
    """
    config_class, model_class, fields = _KINDS[kind]
    shape = SHAPE | {"vocab_size": vocab_size, "attn_implementation": attention}
    torch.manual_seed(seed)
    model = model_class(config_class(**(shape | fields | config))).eval()
    draw_weights(model)
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel) -> None:
    """Random weights under which a model is far from sure and far from indifferent."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.6 / weight.shape[-1] ** 0.5)
    model.get_input_embeddings().weight.normal_()
    model.get_output_embeddings().weight.normal_(std=3 / 32**0.5)


@torch.no_grad()
def tiny_drafter(
    target: PreTrainedModel,
    seed: int = 0,
    draft_token_ids: list[int] | None = None,
    own_share: float = 0.25,
    teach: bool = True,
    **config,
) -> DSparkDraftModel:
    """A drafter that knows which token tends to follow which in `target`.

    Args:
        target (`PreTrainedModel`): of [`tiny_target`].
        seed (`int`): of the other weights.
        draft_token_ids (`list[int]`, *optional*): a reduced vocabulary, ascending.
        own_share (`float`): how loudly its untrained backbone speaks; 0 for the table alone.
        teach (`bool`): whether it knows the table at all; one of the wrong shape cannot.
        config: further fields of its configuration.

    Returns:
        `DSparkDraftModel`: in evaluation mode; K is 5.
    """
    text = target.config.get_text_config(decoder=True)
    size, shape = text.vocab_size, {}
    if draft_token_ids is not None:
        shape["draft_vocab_size"] = len(draft_token_ids)
    shape |= {
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 0, 2],
        "num_target_layers": text.num_hidden_layers,
        "markov_rank": size,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "attn_implementation": text._attn_implementation,
    }
    torch.manual_seed(seed)
    drafter = DSparkDraftModel(DSparkConfig(**(shape | config))).eval()
    for weight in drafter.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.65 / weight.shape[-1] ** 0.5)
    if drafter.config.markov_rank and teach:
        drafter.norm.weight.fill_(own_share)
        _teach_table(drafter.markov_head, table(target), draft_token_ids)
    else:  # only the backbone is left, which passes the anchor through
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    if draft_token_ids is not None:
        drafter.set_draft_vocabulary(torch.tensor(draft_token_ids))
    if drafter.confidence_head is not None:
        drafter.confidence_head.proj.weight.normal_()
        drafter.confidence_head.proj.bias.fill_(1.0)
    return drafter


@torch.no_grad()
def table(target: PreTrainedModel) -> Tensor:
    """Log-probability of every token behind every token, over random contexts, `(V, V)`."""
    size = target.config.get_text_config(decoder=True).vocab_size
    ids = torch.stack([torch.randperm(size, generator=torch.Generator().manual_seed(seed)) for seed in range(16)])
    log_probabilities = target(input_ids=ids).logits.log_softmax(-1)  # (16, V, V)
    return log_probabilities.new_zeros(size, size).index_add_(0, ids.flatten(), log_probabilities.flatten(0, 1)) / len(ids)


def _teach_table(head: torch.nn.Module, log_probabilities: Tensor, draft_token_ids: list[int] | None) -> None:
    if draft_token_ids is not None:
        log_probabilities = log_probabilities[:, draft_token_ids]
    rank = len(log_probabilities)
    head.markov_w1.weight.copy_(torch.eye(rank))
    head.markov_w2.weight.copy_(log_probabilities.T)
    if head.__class__.__name__ == "GatedMarkovHead":
        head.gate_proj.bias.fill_(3.0)  # nearly open
    if head.__class__.__name__ == "RNNMarkovHead":
        into_output = head.joint_proj.weight[2 * rank :]  # from [s ; W1 x ; h]
        into_output.mul_(0.1)
        into_output[:, rank : 2 * rank].copy_(3 * torch.eye(rank))


def jagged_profile(**fields) -> LoadProfile:
    """Step times of a machine on which some more tokens are cheap and some are dear, so that drafts are cut."""
    steps = {1: 100.0, 2: 95.0, 3: 80.0, 4: 84.0, 5: 83.0, 6: 60.0, 8: 64.0, 12: 50.0, 16: 52.0, 24: 25.0, 64: 10.0}
    return LoadProfile(steps, **({"draft_seconds": 0.001} | fields))


def padded_prompts(lengths: list[int], seed: int = 0, vocab_size: int = VOCABULARY) -> dict[str, Tensor]:
    """Random prompts of the given lengths, left-padded: `input_ids` and `attention_mask`, both `(R, longest)`."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(MASK + 1, vocab_size, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def assert_same_text(target: PreTrainedModel, inputs: dict[str, Tensor], plain: Tensor, drafted: Tensor) -> None:
    """Fails where greedy texts differ, unless the target itself was undecided.

    Several tokens in one forward round differently from one at a time. Where the target's two best logits at the first
    differing position lie within 1e-3, either is its choice; such places are printed, to be seen with `-s` or on failure.
    """
    start = inputs["input_ids"].shape[1]
    for row in range(len(plain)):
        ours, theirs = drafted[row], plain[row]
        shared = min(len(ours), len(theirs))
        differing = (ours[:shared] != theirs[:shared]).nonzero()
        if len(differing) == 0:
            assert len(ours) == len(theirs), f"row {row}: {len(ours)} tokens instead of {len(theirs)}"
            continue
        first = int(differing[0])
        mask = torch.cat([inputs["attention_mask"][row], torch.ones(first - start, dtype=torch.long)])
        positions = (mask.cumsum(0) - 1).clamp_min(0)
        with torch.no_grad():
            logits = target(input_ids=theirs[None, :first], attention_mask=mask[None], position_ids=positions[None]).logits[
                0, -1
            ]
        best, second = logits.topk(2).values.tolist()
        assert best - second < 1e-3, (
            f"row {row} differs at token {first - start}: {int(ours[first])} instead of {int(theirs[first])}, where the "
            f"target's two best logits are {best:.5f} and {second:.5f}"
        )
        print(f"row {row}: undecided at token {first - start}, logits {best:.6f} and {second:.6f}")


def assert_some_accepted(drafter: DSparkDraftModel) -> None:
    """Fails when everything or nothing was accepted: the comparison would then have shown little."""
    statistics = drafter.statistics
    assert 0 < statistics.accepted < statistics.scheduled, statistics


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token: ids 4 … 47 are `a` … `z` and `A` … `R`, behind the four special tokens."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQR"
    specials = ["<pad>", "<s>", "</s>", "<mask>"]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate([*specials, *letters])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
