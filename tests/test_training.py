"""Training: the loss of the reference and of the formula, blocks that see what they should, runs that stop and go on.

The loss is checked twice, against values of the reference implementation and against a direct computation that holds
every probability of the whole vocabulary at once.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny import BOS, EOS, MASK, PAD, VOCABULARY, assert_same_text, padded_prompts, tiny_drafter, tiny_target
from tiny_tokenizer import ASSISTANT, FIRST_WORD, USER, text, tiny_tokenizer
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AddedToken, AutoModelForCausalLM, TrainerCallback

from hf_dspark import DSparkDraftModel, LoadProfile, pack_linears
from hf_dspark.training import trainer as trainer_module
from hf_dspark.training.averaging import average_drafters
from hf_dspark.training.blocks import block_visibility, build_blocks, sample_anchors
from hf_dspark.training.data import LengthGroupedSampler, collate, most_used_tokens, read_examples
from hf_dspark.training.initialization import config_for_target, start_from_target, start_head_from_text
from hf_dspark.training.loss import LossWeights, dspark_loss
from hf_dspark.training.muon import MuonWithAdamW, orthogonalise, parameter_groups
from hf_dspark.training.regenerate import Request, answer_requests
from hf_dspark.training.regression_start import start_from_regression
from hf_dspark.training.run import find_mask_token, last_checkpoint, train_drafter
from hf_dspark.training.state_cache import cache_target_states
from hf_dspark.training.trainer import DSparkTrainer, DSparkTrainingArguments

SHARED = Path(os.environ.get("HF_DSPARK_SHARED", Path(__file__).parents[2] / "shared"))
GOLDEN = SHARED / "golden"


def arguments(folder, **options):
    """Settings of a small run that prints nothing."""
    options = {
        "per_device_train_batch_size": 4,
        "num_anchors": 8,
        "learning_rate": 3e-3,
        "muon_learning_rate": 0.02,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    } | options
    return DSparkTrainingArguments(str(folder), **options)


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", seed=2)


@pytest.fixture(scope="module")
def examples(target):
    return answers_of(target)


def answers_of(target):
    """48 answers of the target to random prompts, 10 to 24 tokens long, none of them the mask token."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(FIRST_WORD, VOCABULARY, (128, 4), generator=generator).tolist()
    requests = [Request([BOS, USER, *prompt, EOS, ASSISTANT], key=10 + n % 15) for n, prompt in enumerate(prompts)]
    answers = answer_requests(target, requests, eos_token_ids=[], max_new_tokens=24, batch_size=128)
    found = [
        {"input_ids": request.prompt_ids + answer[: request.key], "prompt_length": len(request.prompt_ids)}
        for request, answer, _ in answers
    ]
    found = [example for example in found if MASK not in example["input_ids"]][:48]
    assert len(found) == 48
    return found


def new_drafter(target, seed=0, **config):
    config = {"num_hidden_layers": 2, "block_size": 5, "target_layer_ids": [0, 2], "markov_rank": 8} | config
    torch.manual_seed(seed)
    drafter = DSparkDraftModel(config_for_target(target, MASK, **config))
    if drafter.config.draft_vocab_size is not None:
        drafter.set_draft_vocabulary(torch.arange(0, 2 * drafter.config.draft_vocab_size, 2))
    return drafter


# ---- the loss ----


def test_loss_of_the_reference(tmp_path, monkeypatch):
    """Through the trainer's own step: terms, total, gradient norms, and the tensors the loss was made of."""
    if not GOLDEN.is_dir():
        pytest.skip(f"needs the reference values in {GOLDEN} (HF_DSPARK_SHARED names their folder)")
    reference = json.loads((GOLDEN / "dspark_vanilla/reference.json").read_text())["loss"]
    tensors = load_file(GOLDEN / "dspark_vanilla/reference_tensors.safetensors")
    target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32)
    drafter = DSparkDraftModel.from_pretrained(GOLDEN / "dspark_vanilla", dtype=torch.float32)
    anchors, keep = torch.tensor(reference["anchors"]), torch.tensor(reference["keep"]).bool()
    monkeypatch.setattr(trainer_module, "sample_anchors", lambda loss_mask, count: (anchors, keep))
    seen = {}

    def recording(drafter, hidden, previous, labels, supervised, *args):
        embeddings = drafter.markov_head.markov_w1(previous)
        seen["draft_logits"] = drafter.base_logits(hidden) + drafter.markov_head.markov_w2(embeddings)
        seen["confidence"], seen["eval_mask"] = drafter.confidence_head(hidden, embeddings), supervised
        return dspark_loss(drafter, hidden, previous, labels, supervised, *args)

    monkeypatch.setattr(trainer_module, "dspark_loss", recording)
    trainer = DSparkTrainer(drafter, target, arguments(tmp_path, loss_decay=reference["loss_decay_gamma"]))
    input_ids = torch.tensor(reference["input_ids"])
    batch = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "loss_mask": torch.tensor(reference["loss_mask"]).bool(),
    }
    output = trainer.block_loss(drafter.train(), batch)
    output.loss.backward()

    assert float(output.loss.detach()) == pytest.approx(reference["total"], rel=1e-3)
    for ours, theirs in (("cross_entropy", "ce"), ("distance", "l1"), ("confidence", "confidence")):
        assert float(output.terms[ours]) == pytest.approx(reference["terms"][f"{theirs}_loss_num"], rel=1e-3)
        assert float(output.normaliser) == pytest.approx(reference["terms"][f"{theirs}_loss_den"], rel=1e-3)
    norms = {name: float(p.grad.norm()) for name, p in drafter.named_parameters() if p.grad is not None}
    assert norms == pytest.approx(reference["grad_norms"], rel=1e-3)
    supervised = tensors["loss.eval_mask"][keep].bool()
    assert torch.equal(seen["eval_mask"], supervised)
    for name in ("draft_logits", "confidence"):
        expected = tensors[f"loss.{name}"][keep]
        torch.testing.assert_close(seen[name][supervised], expected[supervised], rtol=1e-3, atol=1e-3)


DRAFTERS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no sequential head": {"markov_rank": 0},
    "no confidence head": {"enable_confidence_head": False},
    "confidence without predecessor": {"confidence_head_with_markov": False},
    "reduced vocabulary": {"draft_token_ids": [token for token in range(VOCABULARY) if token % 3]},
}


def random_blocks(drafter, blocks=11, states=40):
    """Arguments of the loss: draft states that want a gradient, tokens, supervision that stops anywhere, states."""
    generator = torch.Generator().manual_seed(1)

    def tokens():
        return torch.randint(VOCABULARY, (blocks, 5), generator=generator)

    hidden = torch.randn(blocks, 5, 32, generator=generator).requires_grad_()
    lengths = torch.randint(0, 6, (blocks, 1), generator=generator)
    target_states = torch.randn(states, 32, generator=generator)
    sources = torch.randint(states, (blocks, 5), generator=generator)
    return hidden, tokens(), tokens(), torch.arange(5) < lengths, target_states, sources


def direct_loss(drafter, target, hidden, previous, labels, supervised, target_states, sources, weights):
    """The formula as it stands, over all positions and the whole vocabulary at once."""
    head = target.get_output_embeddings().weight
    target_law = (target_states @ head.T).double().softmax(-1)[sources]  # (N, K, V)
    embeddings = None if drafter.markov_head is None else drafter.markov_head.markov_w1(previous)
    ids = drafter.draft_token_ids
    ids = torch.arange(VOCABULARY) if ids is None else ids
    logits = (hidden @ head.T)[..., ids]
    if embeddings is not None:
        logits = logits + drafter.markov_head.markov_w2(drafter.markov_head(embeddings, hidden))
    wide = torch.full((*logits.shape[:-1], VOCABULARY), -torch.inf).index_copy(-1, ids, logits).double()
    draft_law = wide.softmax(-1)  # zero outside of the draft vocabulary

    at_label = wide.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    cross_entropy = -torch.where(torch.isin(labels, ids), at_label, 0.0)
    distance = (draft_law - target_law).abs().sum(-1)
    overlap = torch.minimum(draft_law, target_law).sum(-1).detach()  # the probability that rejection keeps the token
    total = weights.cross_entropy * cross_entropy + weights.distance * distance
    if drafter.confidence_head is not None:
        logit = drafter.confidence_head(hidden, embeddings).double()
        miss = -(overlap * F.logsigmoid(logit) + (1 - overlap) * F.logsigmoid(-logit))
        total = total + weights.confidence * miss
    w = torch.exp(-torch.arange(5) / weights.decay) * supervised
    return ((w * total).sum() / w.sum()).float(), (overlap * supervised).float()


def loss_and_gradients(drafter, function):
    drafter.zero_grad()
    arguments = random_blocks(drafter)
    loss, other = function(*arguments)
    loss.backward()
    grads = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return loss.detach(), grads | {"hidden": arguments[0].grad}, other


@pytest.mark.parametrize("variant", DRAFTERS)
def test_loss_of_the_formula_in_any_chunks(variant):
    target = tiny_target(seed=3)
    drafter = tiny_drafter(target, **DRAFTERS[variant]).train()
    drafter.bind(target.requires_grad_(False))
    weights = LossWeights(cross_entropy=0.3, distance=0.8, confidence=0.7, decay=2.0)
    expected, expected_grads, overlap = loss_and_gradients(drafter, lambda *a: direct_loss(drafter, target, *a, weights))
    assert {"hidden"} | {n for n in expected_grads if "head" in n} == set(expected_grads)
    for max_logit_positions in (1, 12, 25, 54, 10_000):  # 1, 2, 5, 10 and all of 11 blocks at a time

        def chunked(*args, most=max_logit_positions):
            output = dspark_loss(drafter, *args, weights, most)
            return output.loss, output.metrics

        loss, grads, metrics = loss_and_gradients(drafter, chunked)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(metrics["overlap"], overlap.sum(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(metrics["survive"], overlap.cumprod(1).sum(0), rtol=1e-5, atol=1e-5)


def test_metrics_count_first_choices_and_confidence():
    target = tiny_target(seed=3)
    drafter = tiny_drafter(target).train()
    drafter.bind(target)
    hidden, previous, labels, supervised, target_states, sources = random_blocks(drafter)
    metrics = dspark_loss(drafter, hidden, previous, labels, supervised, target_states, sources).metrics
    head = target.get_output_embeddings()
    embeddings = drafter.markov_head.markov_w1(previous)
    agree = (head(hidden) + drafter.markov_head.markov_w2(embeddings)).argmax(-1) == head(target_states)[sources].argmax(-1)
    confidence = drafter.confidence_head(hidden, embeddings).sigmoid() * supervised
    agree = (agree & supervised).float()
    assert torch.equal(metrics["count"], supervised.sum(0).float())
    assert torch.equal(metrics["agree"], agree.sum(0)) and 0 < agree.sum() < supervised.sum()
    assert torch.equal(metrics["agree_prefix"], agree.cumprod(1).sum(0))
    torch.testing.assert_close(metrics["confidence"], confidence.sum(0))


def test_loss_without_supervision_is_zero():
    target = tiny_target(seed=3)
    drafter = tiny_drafter(target).train()
    drafter.bind(target)
    hidden, previous, labels, supervised, target_states, sources = random_blocks(drafter)
    for few in (slice(0, 0), slice(0, 11)):
        args = (hidden[few], previous[few], labels[few], torch.zeros_like(supervised[few]), target_states, sources[few])
        output = dspark_loss(drafter, *args)
        output.loss.backward()
        assert float(output.loss.detach()) == 0.0
    assert all(not p.grad.any() for name, p in drafter.named_parameters() if "head" in name)


class WidestLogits(TorchDispatchMode):
    """Remembers the most rows of any tensor whose last dimension is one of some sizes."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes, self.rows = sizes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] in self.sizes:
                self.rows = max(self.rows, tensor.numel() // tensor.shape[-1])
        return output


@pytest.mark.parametrize("draft_vocab_size", [None, 45])
def test_logits_of_few_positions_exist_at_once(draft_vocab_size, examples, tmp_path):
    target = tiny_target(vocab_size=91)  # no other dimension has that size, nor 45
    drafter = new_drafter(target, draft_vocab_size=draft_vocab_size)
    args = arguments(tmp_path, num_anchors=12, max_logit_positions=50)
    trainer = DSparkTrainer(drafter, target, args)
    batch = collate(examples[:8], PAD)
    with WidestLogits(91, 45) as widest:
        trainer.block_loss(drafter.train(), batch).loss.backward()
    assert 45 <= widest.rows <= 50
    args.max_logit_positions = 10_000
    with WidestLogits(91, 45) as widest:
        trainer.block_loss(drafter, batch).loss.backward()
    assert widest.rows > 200


# ---- anchors and blocks ----

LOSS_MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0],  # anchors at 2, 3, 4, 8, 9
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],  # 3 to 10
        [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1],  # none
    ]
).bool()
ELIGIBLE = [{2, 3, 4, 8, 9}, set(range(3, 11)), set()]


@pytest.mark.parametrize("wanted", [1, 4, 100])
def test_anchors(wanted):
    seen = [set(), set(), set()]
    for seed in range(60):
        torch.manual_seed(seed)
        anchors, keep = sample_anchors(LOSS_MASK, wanted)
        assert anchors.shape == keep.shape == (3, min(wanted, 8))
        for row, (positions, kept) in enumerate(zip(anchors, keep, strict=True)):
            count = min(wanted, len(ELIGIBLE[row]))
            assert kept.tolist() == [True] * count + [False] * (keep.shape[1] - count)
            assert positions[~kept].eq(0).all()
            chosen = positions[kept].tolist()
            assert chosen == sorted(set(chosen)) and set(chosen) <= ELIGIBLE[row]
            seen[row] |= set(chosen)
    assert seen == ELIGIBLE  # every one of them is drawn some time

    torch.manual_seed(7)
    first = sample_anchors(LOSS_MASK, wanted)
    torch.manual_seed(7)
    assert all(torch.equal(a, b) for a, b in zip(first, sample_anchors(LOSS_MASK, wanted), strict=True))


@pytest.mark.parametrize("anchor_first", [True, False])
def test_blocks_by_hand(anchor_first):
    input_ids = torch.arange(100, 136).view(3, 12)
    anchors = torch.tensor([[2, 4, 8], [3, 9, 10], [0, 0, 0]])
    keep = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    blocks = build_blocks(input_ids, LOSS_MASK, anchors, keep, 4, MASK, anchor_first)
    for row in range(3):
        for number, anchor in enumerate(anchors[row].tolist()):
            place = (row, number)
            assert blocks.inputs[place].tolist() == [100 + 12 * row + anchor, MASK, MASK, MASK]
            assert blocks.positions[place].tolist() == [anchor, anchor + 1, anchor + 2, anchor + 3]
            going = bool(keep[place])
            for k in range(4 if anchor_first else 3):
                position = anchor + 1 + k  # of the label
                going = going and position < 12 and bool(LOSS_MASK[row, position])
                assert bool(blocks.supervised[place][k]) == going
                if going:
                    assert blocks.labels[place][k] == 100 + 12 * row + position
                    assert blocks.previous[place][k] == 100 + 12 * row + position - 1
                    assert blocks.sources[place][k] == position - 1
    assert blocks.labels.shape[-1] == (4 if anchor_first else 3)
    assert blocks.supervised.sum(-1).tolist() == [[3, 1, 2], [4 if anchor_first else 3, 2, 1], [0, 0, 0]]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_what_a_block_sees(window):
    anchors, _ = sample_anchors(LOSS_MASK, 4)
    visible = block_visibility(anchors, 3, 12, window)
    assert visible.shape == (3, 1, 12, 24)
    for row in range(3):
        for query in range(12):
            block, slot = divmod(query, 3)
            anchor = int(anchors[row, block])
            for key in range(24):
                if key < 12:
                    expected = key < anchor and (window is None or anchor + slot - key < window)
                else:
                    expected = (key - 12) // 3 == block
                assert bool(visible[row, 0, query, key]) == expected


@pytest.mark.parametrize("window", [None, 4])
def test_blocks_draft_as_if_alone(window, target, examples, tmp_path, monkeypatch):
    """Laid over one sequence, blocks have the states that inference gives each of them behind its own context."""
    drafter = tiny_drafter(target, own_share=1.0, sliding_window=window)
    seen = {}

    def recording(drafter, hidden, *args):
        seen["hidden"] = hidden
        return dspark_loss(drafter, hidden, *args)

    monkeypatch.setattr(trainer_module, "dspark_loss", recording)
    trainer = DSparkTrainer(drafter, target, arguments(tmp_path, num_anchors=100))
    example = examples[0]
    batch = collate([example], PAD)
    with torch.no_grad():
        trainer.block_loss(drafter, batch)
        states = target(**{name: batch[name] for name in ("input_ids", "attention_mask")}, output_hidden_states=True)
        context = torch.cat([states.hidden_states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
        context = drafter.project_context(context)
        anchors = range(example["prompt_length"], len(example["input_ids"]) - 1)
        assert len(seen["hidden"]) == len(anchors)
        for anchor, hidden in zip(anchors, seen["hidden"], strict=True):
            block = torch.tensor([[example["input_ids"][anchor], *[MASK] * 4]])
            positions = torch.arange(anchor + 5)[None]
            mask = None
            if window is not None:
                keys, queries = torch.arange(anchor + 5), torch.arange(anchor, anchor + 5)
                mask = ((queries[:, None] - keys < window) | (keys >= anchor))[None, None]
            alone = drafter(drafter.embed(block), context[:, :anchor], positions, mask).last_hidden_state[0]
            torch.testing.assert_close(hidden, alone, rtol=1e-4, atol=1e-5)


# ---- data ----


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def conversation(prompt, answer, **fields):
    messages = [{"role": "user", "content": text(prompt)}, {"role": "assistant", "content": text(answer)}]
    return {"messages": messages} | fields


def test_examples(tmp_path):
    records = [
        conversation([7, 8], [9, 10]),
        conversation([7], [9], finished=False),  # one token is no answer
        conversation([7], [9, 10, 11], finished=False),
        conversation([7], [9], answer_ids=[30, 31, 32]),
        conversation([7] * 20, [9, 10]),  # does not fit
        conversation([7], [9] * 20),
        {"messages": [*conversation([7], [8])["messages"], *conversation([9], [10, 11])["messages"]]},
    ]
    found = read_examples(write(tmp_path / "data.jsonl", records), tiny_tokenizer(), max_length=15)
    one = [BOS, USER, 7, EOS, ASSISTANT]
    assert [(example["input_ids"], example["prompt_length"]) for example in found] == [
        ([BOS, USER, 7, 8, EOS, ASSISTANT, 9, 10, EOS], 6),
        ([*one, 9, 10, 11], 5),
        ([*one, 30, 31, 32], 5),
        ([*one, *[9] * 10], 5),
        ([*one, 8, EOS, USER, 9, EOS, ASSISTANT, 10, 11, EOS], 11),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "w7"}',
        '{"messages": [{"role": "assistant", "content": "w7"}]}',
        '{"messages": [{"role": "user", "content": "w7"}]}',
        '{"messages": [{"role": "user", "content": "w7"}, {"role": "assistant"}]}',
        json.dumps(conversation([7], [8], answer_ids="w8")),
        json.dumps(conversation([7], [8], answer_ids=[8, 48])),
        json.dumps(conversation([7], [8], answer_ids=[-100, 8])),
    ],
)
def test_bad_lines_are_named(line, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(conversation([7], [8, 9])) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r'data\.jsonl, line 2: expected \{"messages": .* token ids below 48, got: '):
        read_examples(path, tiny_tokenizer())


def test_data_without_answers_is_refused(tmp_path):
    path = write(tmp_path / "data.jsonl", [conversation([7] * 20, [8, 9])])
    with pytest.raises(ValueError, match="no conversation with an answer of at least two tokens within 10 tokens"):
        read_examples(path, tiny_tokenizer(), max_length=10)


def test_padding():
    batch = collate([{"input_ids": [5, 6, 7, 8], "prompt_length": 2}, {"input_ids": [9, 9], "prompt_length": 1}], PAD)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 9, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, False, True, True], [False, True, False, False]]


def test_batches_of_like_length():
    """Nearly no padding, other batches in every epoch, and every example once."""
    lengths = torch.randint(10, 300, (1202,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthGroupedSampler(lengths, 4, seed=3)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first == again and first != second
    assert sorted(first) == sorted(second) == list(range(1202))

    def padding(order):
        batches = [[lengths[i] for i in order[start : start + 4]] for start in range(0, 1202, 4)]
        return 1 - sum(lengths) / sum(len(batch) * max(batch) for batch in batches)

    assert padding(first) < 0.03 < 0.3 < padding(range(1202))
    longest = [max(lengths[i] for i in first[start : start + 4]) for start in range(0, 1200, 4)]
    assert longest != sorted(longest)


def test_draft_vocabulary():
    examples = [{"input_ids": [40, 40, 40, 9, 9, 9, 30, 30, 20], "prompt_length": 3}]
    assert most_used_tokens(examples, 2).tolist() == [9, 30]  # the prompt does not count
    assert most_used_tokens(examples, 3, always=[2]).tolist() == [2, 9, 30]
    assert most_used_tokens(examples, 6, always=[2]).tolist() == [0, 1, 2, 9, 20, 30]
    assert most_used_tokens(examples, 48).tolist() == list(range(48))


def test_mask_token():
    tokenizer, config = tiny_tokenizer(), tiny_target().config
    example = {"input_ids": [BOS, USER, 7, ASSISTANT, 8, EOS], "prompt_length": 4}
    assert find_mask_token(tokenizer, [example], config) == MASK
    assert find_mask_token(tokenizer, [{"input_ids": [7]}], config) == ASSISTANT  # the highest that is free
    tokenizer.add_special_tokens({"extra_special_tokens": ["<new>"]}, replace_extra_special_tokens=False)
    assert len(tokenizer) == 49
    assert find_mask_token(tokenizer, [example], config) == MASK  # <new> has no row in the target's embedding
    tokenizer.add_tokens(AddedToken("w9", special=False))
    used = {"input_ids": [*example["input_ids"], MASK]}
    with pytest.raises(ValueError, match=r"no unused special token .*--mask-token-id"):
        find_mask_token(tokenizer, [used], config)
    config.eos_token_id = [EOS, MASK]
    with pytest.raises(ValueError, match="no unused special token"):
        find_mask_token(tokenizer, [example], config)


# ---- a new drafter ----


@torch.no_grad()
def test_start_from_a_target_of_the_same_kind():
    target = tiny_target("qwen3", seed=4)
    for name, parameter in target.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 2.0)
    drafter = new_drafter(target)
    before = {name: value.clone() for name, value in drafter.named_parameters()}
    copied = start_from_target(drafter, target)
    after, source = dict(drafter.named_parameters()), dict(target.model.named_parameters())
    assert len(copied) == len(set(copied))
    assert {name for name in after if not torch.equal(before[name], after[name])} == set(copied)
    others = {"confidence_head.proj.weight", "confidence_head.proj.bias", "fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(after) - set(copied) == others
    for name in copied:
        if name.startswith("layers."):
            index, rest = name.removeprefix("layers.").split(".", 1)
            torch.testing.assert_close(after[name], source[f"layers.{int(index) + 2}.{rest}"])
    assert not after["markov_head.markov_w2.weight"].any()
    # W1 is where the embeddings lie along the 8 directions that leave the least of them unexplained.
    table, embedding = after["markov_head.markov_w1.weight"], target.get_input_embeddings().weight
    centred = embedding - embedding.mean(0)
    explained = (table @ torch.linalg.lstsq(table, centred).solution).square().sum()
    torch.testing.assert_close(explained, torch.linalg.svdvals(centred)[:8].square().sum())
    torch.testing.assert_close(table.std(), torch.tensor(1.0))


@torch.no_grad()
def test_start_from_a_target_without_query_norms():
    target = tiny_target("llama", seed=4)
    drafter = new_drafter(target)
    copied = start_from_target(drafter, target)
    assert "layers.0.self_attn.q_norm.weight" in copied and "layers.1.self_attn.k_norm.weight" in copied
    states = F.normalize(torch.randn(2000, 32), dim=-1) * 32**0.5
    for index in (0, 1):
        attention, source = drafter.layers[index].self_attn, target.model.layers[index + 2].self_attn
        for part in ("q", "k"):
            plain = getattr(source, f"{part}_proj")(states).unflatten(-1, (-1, 8))
            normed = getattr(attention, f"{part}_norm")(getattr(attention, f"{part}_proj")(states).unflatten(-1, (-1, 8)))
            assert float(normed.square().mean()) == pytest.approx(float(plain.square().mean()), rel=0.1)


def test_start_from_a_target_of_another_kind():
    """Gemma's layers work differently and are left alone."""
    target = tiny_target("gemma3", seed=4)
    drafter = new_drafter(target)
    copied = start_from_target(drafter, target)
    assert not any(name.startswith("layers.") for name in copied)
    moe = tiny_target("qwen3_moe")
    copied = start_from_target(new_drafter(moe), moe)
    assert "layers.0.self_attn.q_proj.weight" in copied and not any("mlp" in name for name in copied)


def test_targets_that_rotate_a_part_of_their_heads():
    """The drafter rotates whole heads, and a long-context rope whose factors are for that part does not fit them."""
    rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
    for rope_parameters in (rope, rope | factors | {"original_max_position_embeddings": 32}):
        target = tiny_target("llama")
        target.config.rope_parameters = rope_parameters
        drafter = new_drafter(target)
        assert drafter.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e4}
        start_from_target(drafter, target)


@pytest.mark.parametrize("config", [{}, {"markov_head_type": "gated"}, {"draft_vocab_size": 24}])
def test_head_starts_from_which_token_follows_which(config, target):
    """Each token has one successor here: what the head says alone is that successor, sooner than any training."""
    generator = torch.Generator().manual_seed(0)
    after = torch.randperm(VOCABULARY, generator=generator)
    starts = torch.randint(VOCABULARY, (200,), generator=generator).tolist()
    examples = [{"input_ids": [0, token, int(after[token]), int(after[after[token]])], "prompt_length": 1} for token in starts]
    drafter = new_drafter(target, markov_rank=40, **config)
    loss = start_head_from_text(drafter, target, examples)
    assert loss < 0.5
    seen = torch.tensor(sorted({token for example in examples for token in example["input_ids"][1:3]}))
    head, ids = drafter.markov_head, drafter.draft_token_ids
    with torch.no_grad():
        states = torch.zeros(1, len(seen), 32)
        favourite = head.markov_w2(head(head.markov_w1(seen)[None], states))[0].argmax(-1)
    known = torch.ones_like(seen, dtype=torch.bool) if ids is None else torch.isin(after[seen], ids)
    favourite = favourite if ids is None else ids[favourite]
    assert float((favourite == after[seen])[known].float().mean()) > 0.9


@pytest.mark.parametrize(("kind", "config"), [("qwen3", {}), ("llama", {"num_key_value_heads": 4})])
def test_a_drafter_that_starts_from_least_squares_knows_something(kind, config, tmp_path):
    target = tiny_target(kind, seed=2)
    with torch.no_grad():
        target.get_input_embeddings().weight.mul_(0.1)  # what follows now depends on more than the current token
    texts = answers_of(target)
    drafter = new_drafter(target, markov_rank=0, confidence_head_with_markov=False, **config)
    trainer = DSparkTrainer(drafter, target, arguments(tmp_path), train_dataset=texts, eval_dataset=texts[:16])
    before = trainer.evaluate()["eval_tau_greedy"]
    explained = start_from_regression(drafter, target, texts)
    after = trainer.evaluate()["eval_tau_greedy"]
    assert explained > 0.4
    assert after > before + 0.3, (before, after)


def test_the_first_layer_reads_the_last_context_row_and_the_anchor(tmp_path):
    """What older context says makes little difference at the start."""
    target = tiny_target("qwen3", hidden_size=128, head_dim=64)
    examples = answers_of(target)
    drafter = new_drafter(target, markov_rank=0, confidence_head_with_markov=False)
    drafter.bind(target)
    texts = cache_target_states(target, examples, [0, 2], tmp_path, dtype=torch.float32, progress=False)
    start_from_regression(drafter, target, texts)
    context, elsewhere = (drafter.project_context(texts[index]["context_states"][None, :16]) for index in (0, 1))

    def first_state(context, anchor):
        embeds = drafter.embed(torch.tensor([[anchor, MASK, MASK, MASK, MASK]]))
        with torch.no_grad():
            return drafter(embeds, context, torch.arange(21)[None]).last_hidden_state[0, 0]

    anchor = examples[0]["input_ids"][16]
    base = first_state(context, anchor)
    older, last = context.clone(), context.clone()
    older[:, :12], last[:, 15] = elsewhere[:, :12], elsewhere[:, 15]
    moved = [float((first_state(*inputs) - base).norm()) for inputs in ((older, anchor), (last, anchor), (context, anchor + 1))]
    assert moved[0] < 0.2 * moved[1], moved
    assert moved[2] > 2 * moved[0], moved


# ---- target states on disk ----


def test_cached_states_train_as_fresh_ones(target, data_file, tmp_path):
    weights, losses = [], []
    for folder in (None, tmp_path / "states", tmp_path / "states"):
        options = arguments(tmp_path / "run", max_steps=4)
        drafter, trainer = train_drafter(
            target,
            tiny_tokenizer(),
            [data_file],
            options,
            mask_token_id=MASK,
            cache_folder=folder,
            num_hidden_layers=2,
            block_size=5,
            target_layer_ids=[0, 2],
            markov_rank=8,
        )
        weights.append(weights_of(drafter))
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)  # float16 states, which may turn the factors of a matrix
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[2].items())


def test_a_cache_is_continued_and_never_mistaken_for_another(target, examples, tmp_path):
    texts = (examples * 3)[:100]  # two shards
    layers = [0, 2]
    full = cache_target_states(target, texts, layers, tmp_path / "a", dtype=torch.float32, progress=False)
    first, second = sorted((tmp_path / "a").iterdir())
    second.unlink()
    kept = first.stat().st_mtime_ns
    again = cache_target_states(target, texts, layers, tmp_path / "a", dtype=torch.float32, progress=False)
    assert first.stat().st_mtime_ns == kept and second.exists()
    for index in (0, 64, 99):
        ids = torch.tensor([texts[index]["input_ids"]])
        with torch.no_grad():
            states = target.model(ids, output_hidden_states=True)
        expected = torch.cat([states.hidden_states[layer + 1] for layer in layers], dim=-1)[0]
        torch.testing.assert_close(again[index]["context_states"], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(full[index]["last_states"], states.last_hidden_state[0], atol=1e-5, rtol=1e-5)

    for changed in (
        dict(examples=texts[::-1]),
        dict(layer_ids=[1, 2]),
        dict(target=tiny_target("qwen3", seed=9)),
        dict(dtype=torch.float16),
    ):
        wanted = dict(target=target, examples=texts, layer_ids=layers, dtype=torch.float32) | changed
        with pytest.raises(ValueError, match="states of other text, of another target or of other layers"):
            cache_target_states(folder=tmp_path / "a", progress=False, **wanted)
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"is damaged .* delete it"):
        cache_target_states(target, texts, layers, tmp_path / "a", dtype=torch.float32, progress=False)


def test_states_that_do_not_fit_are_refused(examples, tmp_path):
    target = tiny_target("qwen3")
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(1e6)
    with pytest.raises(ValueError, match=r"does not fit into torch\.float16"):
        cache_target_states(target, examples, [0, 2], tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


# ---- the optimizer ----


def test_orthogonalise():
    torch.manual_seed(0)
    for shape in ((32, 96), (96, 32), (5, 200), (1, 7)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape) * 1e-3))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    left, right = (torch.linalg.qr(torch.randn(64, 64)).Q for _ in range(2))
    matrix = left @ torch.diag(torch.logspace(0, -2, 64)) @ right
    result = orthogonalise(matrix)
    assert float(torch.linalg.svdvals(result).min()) > 0.6
    # The directions stay: the nearest orthogonal matrix is left @ right.
    off_diagonal = left.T @ result @ right.T
    off_diagonal.fill_diagonal_(0)
    assert float(off_diagonal.abs().max()) < 1e-3


def optimizer_for(model, **options):
    return MuonWithAdamW(parameter_groups(model, 1e-2, 2e-2), **options)


def set_gradients(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_adamw_part_is_torchs(target):
    model, reference = (new_drafter(target, markov_head_type="gated") for _ in range(2))
    optimizer = optimizer_for(model, weight_decay=0.1)
    muon = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in muon}
    assert names == {
        name for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and ("proj" in name or name == "fc.weight") and "confidence" not in name
    }  # fmt: skip
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(5):
        for network, method in ((model, optimizer), (reference, adamw)):
            set_gradients(network, step)
            method.step()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name not in names:
            torch.testing.assert_close(ours, theirs)


def test_muon_moves_by_its_learning_rate(target):
    model = new_drafter(target)
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = optimizer_for(model)
    set_gradients(model, 0)
    optimizer.step()
    for name in ("layers.0.mlp.down_proj.weight", "layers.0.mlp.up_proj.weight"):
        parameter = model.get_parameter(name)
        values = torch.linalg.svdvals((parameter - before[name]).detach()) / 2e-2
        values /= max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        assert 0.5 < float(values.median()) < 1.3


def test_optimizer_state_goes_to_a_file_and_back(target, tmp_path):
    def run(model, optimizer, steps):
        for step in steps:
            set_gradients(model, step)
            optimizer.step()

    straight = new_drafter(target)
    run(straight, optimizer_for(straight, weight_decay=0.1), range(6))
    model = new_drafter(target)
    first = optimizer_for(model, weight_decay=0.1)
    run(model, first, range(3))
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = optimizer_for(model)  # other settings, which the file overrides
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    run(model, second, range(3, 6))
    for ours, theirs in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---- runs ----


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def data_file(examples, tmp_path_factory):
    """The examples as the file that a user would have."""
    records = []
    for example in examples:
        prompt, answer = example["input_ids"][2:6], example["input_ids"][example["prompt_length"] :]
        records.append(conversation(prompt, [], answer_ids=answer, finished=False))
    return write(tmp_path_factory.mktemp("data") / "answers.jsonl", records)


def test_training_raises_acceptance_and_keeps_the_text(target, data_file, tmp_path):
    """From a file to a drafter that speeds up its target, which is left as it was."""
    before = weights_of(target)
    args = arguments(tmp_path, max_steps=60, eval_strategy="steps", eval_steps=20, per_device_train_batch_size=8)
    drafter, trainer = train_drafter(
        target, tiny_tokenizer(), [data_file], args, validation_examples=8,
        num_hidden_layers=2, block_size=5, target_layer_ids=[0, 2], markov_rank=16,
    )  # fmt: skip
    assert drafter.config.mask_token_id == MASK and not drafter.training
    assert len(trainer.eval_dataset) == 4 and len(trainer.train_dataset) == 44
    curve = [entry["eval_tau"] for entry in trainer.state.log_history if "eval_tau" in entry]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(curve) == 3 and curve[-1] > 1.6
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    entry = trainer.state.log_history[-3]
    assert {"tau", "tau_greedy", "acceptance_1", "acceptance_5", "confidence_error", "confidence_bias"} <= entry.keys()
    assert trainer.trained_anchors == entry["anchors"] == 10 * 44 * 8  # ten epochs

    assert weights_of(target).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(target).items())
    assert all(parameter.grad is None for parameter in target.parameters())
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == {name for name, _ in drafter.named_parameters()}  # nothing of the target

    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    inputs = padded_prompts([5, 3])
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    plain = target.generate(**inputs, **options)
    untrained = tiny_drafter(target, own_share=1.0, markov_rank=0)
    taus = []
    for model in (loaded, drafter, untrained):
        assert_same_text(target, inputs, plain, target.generate(**inputs, **options, assistant_model=model))
        taus.append(model.statistics.tau)
    assert taus[0] == taus[1] > 1.3


@pytest.mark.parametrize(
    "config, optimizer",
    [
        ({"markov_head_type": "gated"}, "muon"),
        ({"markov_head_type": "rnn"}, "host"),
        ({"markov_rank": 0}, "muon"),
        ({"sample_from_anchor": False}, "host"),
        ({"enable_confidence_head": False}, "muon"),
        ({"draft_vocab_size": 24}, "host"),
        ({"sliding_window": 4}, "muon"),
    ],
)
def test_every_drafter_trains(config, optimizer, target, data_file, tmp_path):
    args = arguments(tmp_path, max_steps=8, optimizer=optimizer, learning_rate=1e-2)
    drafter, trainer = train_drafter(target, tiny_tokenizer(), [data_file], args, start=False, block_size=4, **config)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and sum(losses[-2:]) < sum(losses[:2])
    trained = weights_of(drafter)
    assert all(torch.isfinite(value).all() for value in trained.values())


def test_no_confidence_loss_leaves_the_head(target, examples, tmp_path):
    drafter = new_drafter(target)
    before = weights_of(drafter)
    trainer = DSparkTrainer(drafter, target, arguments(tmp_path, max_steps=2, confidence_weight=0.0), train_dataset=examples)
    trainer.train()
    changed = {name for name, value in weights_of(drafter).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not name.startswith("confidence_head")}
    assert not [name for entry in trainer.state.log_history for name in entry if "confidence" in name]


@pytest.mark.parametrize("options", [{}, {"bf16": True, "activation_checkpointing": True}])
def test_target_in_half_precision(options, examples, tmp_path):
    """The target's dtype is not the drafter's, whose weights stay in float32 even where its products are not."""
    target = tiny_target("qwen3", seed=2).to(torch.bfloat16)
    drafter = new_drafter(target)
    trainer = DSparkTrainer(drafter, target, arguments(tmp_path, max_steps=12, **options), train_dataset=examples)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradient_checkpointing_and_attention_change_nothing(attention, target, examples, tmp_path):
    grads = []
    for checkpointing in (False, True):
        drafter = new_drafter(target, attn_implementation=attention)
        trainer = DSparkTrainer(drafter, target, arguments(tmp_path, num_anchors=100))
        if checkpointing:
            drafter.activation_checkpointing_enable()
            assert drafter.is_activation_checkpointing
        trainer.block_loss(drafter.train(), collate(examples[:3], PAD)).loss.backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()]))
    torch.testing.assert_close(*grads)


def test_evaluation_does_not_touch_training(target, examples, tmp_path):
    """The same anchors at every evaluation, and the same training with and without."""
    ends = []
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        drafter = new_drafter(target)
        args = arguments(tmp_path, max_steps=4, num_anchors=3, **options)
        trainer = DSparkTrainer(drafter, target, args, train_dataset=examples[:40], eval_dataset=examples[40:])
        trainer.train()
        ends.append(weights_of(drafter))
        found = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        assert found[0] == found[1]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_the_best_checkpoint_is_kept(target, data_file, tmp_path, monkeypatch):
    """Not the last one, where the accepted length fell again."""
    taus = iter([1.1, 1.9, 1.3, 1.2])
    log = DSparkTrainer.log

    def prescribed(self, logs, *args, **kwargs):
        log(self, logs, *args, **kwargs)
        if "eval_tau" in logs:
            logs["eval_tau"] = next(taus)

    monkeypatch.setattr(DSparkTrainer, "log", prescribed)
    options = arguments(
        tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="tau", greater_is_better=True,
    )  # fmt: skip
    train_drafter(
        target,
        tiny_tokenizer(),
        [data_file],
        options,
        num_hidden_layers=2,
        block_size=5,
        target_layer_ids=[0, 2],
        markov_rank=8,
    )
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    best, last = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint-2", "checkpoint-4"))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in best.items())
    assert not all(torch.equal(saved[name], value) for name, value in last.items())


def test_a_finished_drafter_is_uploaded(target, data_file, tmp_path, monkeypatch):
    """By the host's own arguments: the folder that goes to the hub holds the drafter."""
    sent = []

    class Hub:
        def create_repo(self, name, **kwargs):
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, repo_id, folder_path, **kwargs):
            sent.append((repo_id, DSparkDraftModel.from_pretrained(folder_path).state_dict(), set(os.listdir(folder_path))))

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    args = arguments(tmp_path, max_steps=1, push_to_hub=True, hub_model_id="user/drafter", hub_strategy="end")
    drafter, _ = train_drafter(target, tiny_tokenizer(), [data_file], args, num_hidden_layers=1, markov_rank=4, start=False)
    [(repo, weights, files)] = sent
    assert repo == "user/drafter" and {"README.md", "config.json", "tokenizer.json"} <= files
    assert all(torch.equal(value, weights[name]) for name, value in drafter.state_dict().items())


def test_few_examples_are_not_evaluated(target, data_file, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data_file.read_text().splitlines(keepends=True)[:6]))
    args = arguments(tmp_path / "out", max_steps=1, eval_strategy="steps", eval_steps=1)
    _, trainer = train_drafter(target, tiny_tokenizer(), [few], args, num_hidden_layers=1, markov_rank=4)
    assert trainer.eval_dataset is None and len(trainer.train_dataset) == 6
    assert args.eval_strategy == "steps"  # the caller's own settings stay


def test_prompts_are_held_out_with_all_of_their_answers(target, data_file, tmp_path):
    """Also when text is added: what was trained on once is never evaluated on."""
    lines = data_file.read_text().splitlines(keepends=True)
    trained = set()
    for count in (40, 48):
        text = tmp_path / f"{count}.jsonl"
        text.write_text("".join(lines[:count] * 3))  # three answers a prompt, which happen to be the same
        args = arguments(tmp_path / f"run{count}", max_steps=1, eval_strategy="steps", eval_steps=1)
        _, trainer = train_drafter(
            target, tiny_tokenizer(), [text], args, validation_examples=4, num_hidden_layers=1, markov_rank=4, start=False
        )
        assert len(trainer.eval_dataset) == 6 and len(trainer.train_dataset) == 3 * count - 6
        trained |= {tuple(example["input_ids"][:8]) for example in trainer.train_dataset}
        assert not trained & {tuple(example["input_ids"][:8]) for example in trainer.eval_dataset}
    only = tmp_path / "only.jsonl"
    only.write_text(lines[0] * 20)
    args = arguments(tmp_path / "only", max_steps=1, eval_strategy="steps", eval_steps=1)
    _, trainer = train_drafter(target, tiny_tokenizer(), [only], args, num_hidden_layers=1, markov_rank=4, start=False)
    assert trainer.eval_dataset is None and len(trainer.train_dataset) == 20


def test_mask_token_in_the_text_is_refused(target, data_file, tmp_path):
    with pytest.raises(ValueError, match=r"`mask_token_id` 5 \('<assistant>'\) occurs in the training text"):
        train_drafter(target, tiny_tokenizer(), [data_file], arguments(tmp_path), mask_token_id=ASSISTANT)


def test_a_packed_drafter_is_refused(target, examples, tmp_path):
    drafter = pack_linears(new_drafter(target))
    with pytest.raises(ValueError, match="the linear layers of this drafter are packed"):
        DSparkTrainer(drafter, target, arguments(tmp_path), train_dataset=examples)


def test_unknown_optimizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`optimizer` must be 'muon' or 'host', got 'adam'"):
        arguments(tmp_path, optimizer="adam")


# ---- averaging ----


def test_the_mean_of_drafters(target):
    """A drafter of its own, bound to nothing, not calibrated; the others stay as they are."""
    first, second = (new_drafter(target, seed=seed, draft_vocab_size=24) for seed in (0, 1))
    first.config.confidence_temperatures = [2.0] * 5
    first.bind(target)
    before = weights_of(first)
    mean = average_drafters([first, second.bfloat16()], [1, 3])
    other = weights_of(second)
    for name, value in mean.named_parameters():
        torch.testing.assert_close(value.detach(), (before[name] + 3 * other[name].float()) / 4)
    assert mean.dtype == torch.float32 and not mean.training and not mean.config.is_calibrated
    assert torch.equal(mean.draft_token_ids, first.draft_token_ids)
    assert first.config.is_calibrated and all(torch.equal(value, before[name]) for name, value in weights_of(first).items())
    with pytest.raises(RuntimeError, match="not bound"):
        mean.embed(torch.tensor([[7]]))
    mean.bind(target)
    equal = weights_of(average_drafters([first, first, first]))
    assert all(torch.equal(value, before[name]) for name, value in equal.items())

    for drafters, weights, message in (
        ([first], None, "at least two drafters, got 1"),
        ([first, second], [1.0], "`weights` must be 2 positive numbers"),
        ([first, second], [1.0, 0.0], "`weights` must be 2 positive numbers"),
        ([first, new_drafter(target, draft_vocab_size=24, markov_rank=4)], None, "`markov_rank` of these is 8 and 4"),
    ):
        with pytest.raises(ValueError, match=message):
            average_drafters(drafters, weights)
    second.set_draft_vocabulary(torch.arange(1, 25))
    with pytest.raises(ValueError, match="draft from different tokens"):
        average_drafters([first, second])


# ---- stopping and going on ----


class Killed(Exception):
    """Stands for the end of a process."""


class Interruption(TrainerCallback):
    """Does something at the beginning of a step, counted from 0."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action(kwargs["model"])


def kill(model):
    raise Killed


def resumable_run(target, data_file, folder, resume=True, **options):
    """Eight steps, four an epoch, with a checkpoint after three and after six; goes on from the last one."""
    settings = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 4, "draft_vocab_size": 20, "resume": resume}
    options |= {"save_strategy": "steps", "save_steps": 3, "num_anchors": 3, "lr_scheduler_type": "cosine"}
    args = arguments(folder, max_steps=8, per_device_train_batch_size=12, **options)
    return train_drafter(target, tiny_tokenizer(), [data_file], args, validation_examples=0, **settings)[0]


@pytest.mark.parametrize("optimizer", ["muon", "host"])
def test_a_killed_run_goes_on_where_it_was(optimizer, target, data_file, tmp_path, monkeypatch):
    """The final weights are those of a run that nobody interrupted, though the data file has grown since."""
    straight = resumable_run(target, data_file, tmp_path / "straight", optimizer=optimizer)
    monkeypatch.setattr(DSparkTrainer, "train", interrupted_train(7, kill))
    with pytest.raises(Killed):
        resumable_run(target, data_file, tmp_path / "killed", optimizer=optimizer)
    monkeypatch.undo()
    newest = tmp_path / "killed/checkpoint-6"
    assert last_checkpoint(tmp_path / "killed") == str(newest)
    assert not (tmp_path / "killed/model.safetensors").exists()
    with pytest.raises(ValueError, match=r"holds checkpoints of an earlier run \(checkpoint-6\)"):
        resumable_run(target, data_file, tmp_path / "killed", optimizer=optimizer, resume=False)
    unfinished = tmp_path / "killed/checkpoint-7"  # killed again while it wrote this one
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"torn")
    assert last_checkpoint(tmp_path / "killed") == str(newest)
    profile = LoadProfile({1: 40.0})
    profile.save(tmp_path / "killed/load_profile.json")  # of a shorter run that ended, say
    # What the draft vocabulary would be chosen from now must not matter.
    monkeypatch.setattr("hf_dspark.training.run.most_used_tokens", lambda *args: torch.arange(20, 40))
    resumed = resumable_run(target, data_file, tmp_path / "killed", optimizer=optimizer)
    assert_same_weights(resumed, straight)
    assert DSparkDraftModel.from_pretrained(tmp_path / "killed").load_profile == profile
    assert resumed.config.to_dict() | {"_name_or_path": ""} == straight.config.to_dict() | {"_name_or_path": ""}


def assert_same_weights(model, other):
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


_KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
import test_training as tests

kill = lambda model: os.kill(os.getpid(), signal.SIGKILL)
tests.DSparkTrainer.train = tests.interrupted_train(int(sys.argv[5]), kill)
target = tests.tiny_target("qwen3", seed=2)
tests.resumable_run(target, sys.argv[3], sys.argv[4], train_sampling_strategy="group_by_length")
"""


def test_a_run_killed_at_any_step_goes_on_where_it_was(target, data_file, tmp_path):
    """Killed for good, in a process of its own; with batches of like length, which are drawn anew every epoch."""
    step = random.SystemRandom().randint(3, 7)
    command = [sys.executable, "-c", _KILLED, str(Path(__file__).parent), str(Path(__file__).parents[1])]
    killed = subprocess.run([*command, str(data_file), str(tmp_path / "killed"), str(step)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert last_checkpoint(tmp_path / "killed") == str(tmp_path / f"killed/checkpoint-{3 if step < 6 else 6}")
    straight, resumed = (
        resumable_run(target, data_file, tmp_path / name, train_sampling_strategy="group_by_length")
        for name in ("straight", "killed")
    )
    assert_same_weights(resumed, straight)


def interrupted_train(step, action):
    """A `DSparkTrainer.train` with something that happens at a step."""
    train = DSparkTrainer.train

    def interrupted(self, *args, **kwargs):
        self.add_callback(Interruption(step, action))
        return train(self, *args, **kwargs)

    return interrupted


def spoil_weight(model):
    with torch.no_grad():
        model.norm.weight[0] = torch.nan


def spoil_gradient(model):
    model.norm.weight.register_hook(lambda grad: grad * torch.inf)


def spoil_confidence(model):
    with torch.no_grad():
        model.confidence_head.proj.bias -= 100


@pytest.mark.parametrize(
    "action, step, message",
    [
        (spoil_weight, 3, r"the loss is nan at step 3, on a batch of \(4, \d+\) tokens that starts with \[1, 4, "),
        (spoil_gradient, 3, r"a gradient is not finite at step 3"),
        (spoil_confidence, 9, r"the loss is \S+, \S+ times its usual \S+, at step 9, on a batch .* `spike_factor` to 0; the"),
    ],
)
def test_a_loss_out_of_bounds_stops_the_run(action, step, message, target, examples, tmp_path):
    drafter = new_drafter(target)
    args = arguments(tmp_path, max_steps=11, save_strategy="steps", save_steps=step)
    trainer = DSparkTrainer(drafter, target, args, train_dataset=examples, callbacks=[Interruption(step, action)])
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    newest = Path(last_checkpoint(tmp_path))
    assert newest.name == f"checkpoint-{step}"
    kept = DSparkDraftModel.from_pretrained(newest)
    assert all(torch.isfinite(value).all() for value in kept.state_dict().values())
    assert float(kept.confidence_head.proj.bias.detach()) > -10


def test_spikes_pass_where_they_are_meant_to(target, examples, tmp_path):
    args = arguments(tmp_path, max_steps=11, spike_factor=0)
    callbacks = [Interruption(9, spoil_confidence)]
    trainer = DSparkTrainer(new_drafter(target), target, args, train_dataset=examples, callbacks=callbacks)
    trainer.train()
    assert trainer.state.global_step == 11
    with pytest.raises(ValueError, match=r"`spike_factor` must be above 1, or 0 to let every loss pass, got 1\.0"):
        arguments(tmp_path, spike_factor=1.0)


def test_no_checkpoint_to_go_on_from(tmp_path):
    assert last_checkpoint(tmp_path) is None and last_checkpoint(tmp_path / "missing") is None


# ---- several processes ----


class KeepGradients(TrainerCallback):
    """Takes a copy of the gradients before they are used."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.grads = {name: parameter.grad.clone() for name, parameter in kwargs["model"].named_parameters()}


def one_step(folder, target, examples, batch_size, processes):
    """Gradients of one training step, the weights it led to, and what was logged. Called in every process."""
    drafter, keep = new_drafter(target, markov_head_type="rnn"), KeepGradients()
    options = {"max_steps": 1, "num_anchors": 100, "max_grad_norm": 0.0, "per_device_train_batch_size": batch_size}
    args = arguments(folder, **options)
    assert args.world_size == processes
    trainer = DSparkTrainer(drafter, target, args, train_dataset=examples, eval_dataset=examples, callbacks=[keep])
    trainer.train()
    evaluated = trainer.evaluate()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    numbers = {"loss": logged["loss"], "tau": logged["tau"], "eval_loss": evaluated["eval_loss"]}
    return keep.grads, drafter.state_dict(), numbers


def stopped_step(folder, target, examples):
    """A step that is bad in the first of two processes ends the training of both."""
    callbacks = [Interruption(0, spoil_weight)] if torch.distributed.get_rank() == 0 else []
    args = arguments(folder, max_steps=1, per_device_train_batch_size=4)
    trainer = DSparkTrainer(new_drafter(target), target, args, train_dataset=examples, callbacks=callbacks)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        trainer.train()


def shared_work(folder, target, examples, processes):
    """Cached states, by whichever process finds them missing; and batches, gone on with in the middle of an epoch."""
    cached = cache_target_states(target, (examples * 20)[:150], [0, 2], folder / "states", progress=False)
    assert len(list((folder / "states").glob("*.safetensors"))) == 3
    assert all(cached[index]["last_states"].shape[0] == len(examples[index % 8]["input_ids"]) for index in range(150))

    class Recording(DSparkTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    batches = []
    for steps in ([8], [6, 8]):
        seen, run = [], folder / f"run{len(steps)}"
        for count in steps:
            options = {"save_strategy": "steps", "save_steps": 6, "train_sampling_strategy": "group_by_length"}
            args = arguments(run, max_steps=count, per_device_train_batch_size=4 // processes, **options)
            trainer = Recording(new_drafter(target), target, args, train_dataset=examples * 2)
            trainer.train(resume_from_checkpoint=last_checkpoint(run))
        batches.append(seen)
    assert batches[0] == batches[1] and batches[0][4:] != batches[0][:4]


_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:3]
import torch
import test_training as tests

examples = torch.load(sys.argv[3] + "/examples.pt")
result = tests.one_step(sys.argv[3], tests.tiny_target("qwen3", seed=2), examples, 4, 2)
torch.save(result, f"{sys.argv[3]}/result_{torch.distributed.get_rank()}.pt")
tests.shared_work(tests.Path(sys.argv[3]), tests.tiny_target("qwen3", seed=2), examples, 2)
tests.stopped_step(sys.argv[3], tests.tiny_target("qwen3", seed=2), examples)
torch.distributed.destroy_process_group()
"""


def test_two_processes_train_as_one(target, examples, tmp_path):
    """Half the batch each, with blocks of their own number: gradients and new weights are those of the whole batch."""
    torch.save(examples[:8], tmp_path / "examples.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    tests = Path(__file__).parent
    command = [sys.executable, "-c", _PROCESS, str(tests), str(tests.parent), str(tmp_path)]
    workers = [
        subprocess.Popen(
            command, env=os.environ | address | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    expected, expected_weights, expected_numbers = one_step(tmp_path, target, examples[:8], 8, 1)
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    for rank in range(2):
        grads, weights, numbers = torch.load(tmp_path / f"result_{rank}.pt")
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-4)
        assert numbers == pytest.approx(expected_numbers, rel=1e-3)
