"""Rows of different lengths run without padding, where the target allows it, and nobody else notices."""

import threading

import pytest
import torch
from tiny import (
    PAD,
    assert_same_text,
    assert_some_accepted,
    jagged_profile,
    one_thread,  # noqa: F401
    padded_prompts,
    tiny_drafter,
    tiny_target,
)
from transformers import LlamaForCausalLM

from hf_dspark import DSparkCandidateGenerator
from hf_dspark.profitability import Profitability

TARGETS = [
    ("llama", "eager"),
    ("qwen3", "sdpa"),
    ("mistral", "sdpa"),
    ("gemma2", "eager"),
    ("gemma3", "sdpa"),
    ("qwen3_moe", "sdpa"),
]


class OfAUser(LlamaForCausalLM):
    """A model from outside the library, which may do with its rows what it likes."""


def generate(target, inputs, drafter=None, **options):
    options = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": PAD} | options
    return target.generate(**inputs, do_sample=False, assistant_model=drafter, **options)


def end_token(new):
    """Of the tokens `(R, N)` in all rows, the one that ends them at the most different places, late if it can be."""

    def places(token):
        return torch.where((new == token).any(dim=1), (new == token).int().argmax(dim=1), new.shape[1])

    return max(new.unique().tolist(), key=lambda token: (len(places(token).unique()), int(places(token).sum())))


def forwards(target):
    """A list that fills with the shape of what each forward of the target is given."""
    shapes = []
    target.register_forward_pre_hook(lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True)
    return shapes


def verified(drafter):
    """A list that fills with 1 + ℓ of every row of a round, for each round."""
    counts = []
    drafter.on_round = lambda round: counts.append([1 + len(drafted) for drafted in round.drafted])
    return counts


def is_packed(lengths):
    return len(lengths) > 1 and max(lengths) > 1


@pytest.mark.parametrize("rows", [2, 7, 32])
@pytest.mark.parametrize("kind, attention", TARGETS)
def test_target_sees_what_is_admitted(kind, attention, rows, monkeypatch):
    """Σ (1 + ℓ) tokens and not one of padding; the text is that of plain decoding.

    Rows finish at different times. Lengths are drawn, so that every model meets all sorts of them.
    """
    target = tiny_target(kind, attention=attention)
    drafter = tiny_drafter(target, own_share=0.5)
    drafter.scheduling, draw = "threshold", torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        DSparkCandidateGenerator,
        "_schedule",
        lambda self, confidence, room: (torch.rand(len(room), generator=draw) * (room + 1)).long(),
    )
    inputs = padded_prompts([2 + 5 * row % 9 for row in range(rows)])
    options = {"max_new_tokens": 12 if rows == 32 else 24}
    options["eos_token_id"] = end_token(generate(target, inputs, **options)[:, inputs["input_ids"].shape[1] :])
    plain = generate(target, inputs, **options)
    shapes, counts = forwards(target), verified(drafter)
    drafted = generate(target, inputs, drafter, **options)
    assert_same_text(target, inputs, plain, drafted)
    assert_some_accepted(drafter)
    prefill, *rounds = shapes
    counts = counts[1:]  # the first tokens come from the prefill
    assert prefill == inputs["input_ids"].shape and len(rounds) == len(counts)
    assert rounds == [(1, sum(lengths)) if is_packed(lengths) else (len(lengths), max(lengths)) for lengths in counts]
    assert any(map(is_packed, counts)) and len({len(lengths) for lengths in counts}) > 1


@pytest.mark.parametrize(
    "kind, lengths",
    [
        pytest.param("qwen3", [250, 236, 245], id="slots are added by the hundred, and here in the middle of the answers"),
        pytest.param("mistral", [250, 236, 245], id="and behind a window"),
        pytest.param("afmoe", [2, 7, 4], id="a mask that is handed over by name"),
    ],
)
def test_the_text_of_packed_rows(kind, lengths):
    target = tiny_target(kind)
    drafter = tiny_drafter(target, own_share=0.5)
    drafter.load_profile = jagged_profile()
    inputs = padded_prompts(lengths)
    plain = generate(target, inputs)
    shapes = forwards(target)
    assert_same_text(target, inputs, plain, generate(target, inputs, drafter))
    assert any(rows == 1 for rows, _ in shapes[1:])


def test_models_from_elsewhere_are_padded(monkeypatch):
    """And are priced so: the padding is paid for."""
    paid = []
    monkeypatch.setattr(Profitability, "record", lambda self, rows, verified, *_: paid.append(rows + verified))
    target = tiny_target()
    target.__class__ = OfAUser
    drafter = tiny_drafter(target)
    drafter.load_profile = jagged_profile()
    inputs = padded_prompts([2, 7, 4])
    plain = generate(target, inputs)
    shapes, counts = forwards(target), verified(drafter)
    assert_same_text(target, inputs, plain, generate(target, inputs, drafter))
    counts = counts[1:]
    assert any(map(is_packed, counts))
    assert shapes[1:] == [(len(lengths), max(lengths)) for lengths in counts]
    assert len(paid) > 3 and paid == [len(lengths) * max(lengths) for lengths in counts][: len(paid)]


def test_other_threads_are_not_disturbed():
    """Each layer of a packed forward is interrupted by a whole forward of the same target from another thread."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.load_profile = jagged_profile()
    inputs = padded_prompts([2, 7, 4])
    plain, alone = generate(target, inputs, max_new_tokens=8), target(**inputs).logits
    shapes, others, main = forwards(target), [], threading.current_thread()

    def interrupt(module, args):
        if threading.current_thread() is main and shapes[-1][0] == 1:
            thread = threading.Thread(target=lambda: others.append(target(**inputs).logits))
            thread.start()
            thread.join()
            shapes.pop()

    for layer in target.model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(interrupt)
    assert_same_text(target, inputs, plain, generate(target, inputs, drafter, max_new_tokens=8))
    assert len(others) > 4
    for logits in others:
        torch.testing.assert_close(logits, alone)
