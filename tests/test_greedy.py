"""Greedy text with a drafter is the target's own, token for token, whatever the target, the drafter and the schedule."""

import logging
from types import SimpleNamespace

import pytest
import torch
from tiny import (
    BOS,
    EOS,
    PAD,
    VOCABULARY,
    assert_same_text,
    assert_some_accepted,
    jagged_profile,
    one_thread,  # noqa: F401
    padded_prompts,
    tiny_drafter,
    tiny_target,
)
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_dspark import DSparkCandidateGenerator, LoadProfile, decoding, scheduling

PROMPTS = {"one row": [5], "three rows": [2, 7, 4]}
MODES = ("full", "threshold", "early_stop", "two_step", "presampled", None)
DRAFTERS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no head": {"markov_rank": 0},
    "bonus anchor": {"sample_from_anchor": False},
    "reduced vocabulary": {"draft_token_ids": [token for token in range(48) if token % 7]},
    "confidence without predecessor": {"confidence_head_with_markov": False},
    "calibrated": {"confidence_temperatures": [0.5, 1.0, 1.5, 2.0, 3.0]},
    "no confidence": {"enable_confidence_head": False},
    "sliding window": {"sliding_window": 4},
    "backbone aloud": {"own_share": 0.5},
}


def generate(target, inputs, drafter=None, **options):
    options = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": PAD} | options
    return target.generate(**inputs, do_sample=False, assistant_model=drafter, **options)


def recorded_drafts(monkeypatch):
    """Lists that fill with what is proposed: for each row of the batch, the scheduled tokens of every round."""
    drafts = {}
    propose = DSparkCandidateGenerator.propose

    def recording(self, sequences, rows, slots, limits):
        block = propose(self, sequences, rows, slots, limits)
        if block is not None:
            for row, tokens, length, limit in zip(rows, block.tokens, block.lengths, limits, strict=True):
                if limit:
                    drafts.setdefault(row, []).append(tokens[:length].tolist())
        return block

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", recording)
    return drafts


@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize(
    "kind, attention",
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen3", "sdpa"),
        ("qwen3", "eager"),
        ("mistral", "sdpa"),
        ("mistral", "eager"),
        ("gemma2", "eager"),  # caps attention weights, which SDPA cannot
        ("gemma3", "sdpa"),
        ("gemma3", "eager"),
        ("qwen3_moe", "sdpa"),
    ],
)
def test_targets(kind, attention, rows):
    target = tiny_target(kind, attention=attention)
    drafter = tiny_drafter(target)
    drafter.load_profile = jagged_profile()
    inputs = padded_prompts(PROMPTS[rows])
    drafted = generate(target, inputs, drafter)
    assert_same_text(target, inputs, generate(target, inputs), drafted)
    assert_some_accepted(drafter)
    assert drafter.statistics.scheduled < drafter.statistics.drafted


@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize("mode", MODES)
def test_scheduling_modes(mode, rows):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    drafter.load_profile, drafter.scheduling = jagged_profile(), mode
    inputs = padded_prompts(PROMPTS[rows])
    drafted = generate(target, inputs, drafter)
    assert_same_text(target, inputs, generate(target, inputs), drafted)
    assert_some_accepted(drafter)
    assert (drafter.statistics.scheduled < drafter.statistics.drafted) == (mode != "full")


@pytest.mark.parametrize("on", ["conditional", "cumulative"])
def test_thresholds(on):
    target = tiny_target()
    drafter = tiny_drafter(target)
    inputs = padded_prompts([2, 7, 4])
    plain, scheduled = generate(target, inputs), []
    drafter.scheduling, drafter.threshold_on = "threshold", on
    for drafter.confidence_threshold in (0.2, 0.6, 0.95):
        assert_same_text(target, inputs, plain, generate(target, inputs, drafter))
        scheduled.append(drafter.statistics.scheduled / drafter.statistics.drafted)
    assert scheduled == sorted(scheduled, reverse=True) and scheduled[0] > scheduled[-1]


@pytest.mark.parametrize("place, warned", [("cuda:0", True), ("cpu", False), ("meta", False)])
def test_a_drafter_left_behind_on_the_processor_is_told_of(place, warned, caplog):
    logging.Logger.warning_once.cache_clear()
    decoding.warn_of_a_drafter_left_behind(tiny_drafter(tiny_target()), SimpleNamespace(device=torch.device(place)))
    assert ("with `drafter.to(target.device)`" in caplog.text) == warned


@pytest.mark.parametrize(
    "name, value", [("confidence_threshold", 1.5), ("confidence_threshold", None), ("threshold_on", "both")]
)
def test_bad_thresholds_are_refused_before_anything_is_written(name, value):
    target = tiny_target()
    drafter, streamed = tiny_drafter(target), []
    drafter.scheduling = "threshold"
    setattr(drafter, name, value)
    streamer = SimpleNamespace(put=streamed.append, end=lambda: None)
    with pytest.raises(ValueError, match=f"`{name}` must be .*, got {value!r}"):
        target.generate(**padded_prompts([3]), assistant_model=drafter, streamer=streamer, max_new_tokens=4)
    assert len(streamed) == 1  # the prompt


@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize("variant", DRAFTERS)
def test_drafters(variant, rows):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, **DRAFTERS[variant])
    inputs = padded_prompts(PROMPTS[rows])
    plain = generate(target, inputs)
    for drafter.load_profile in (None, jagged_profile()):
        assert_same_text(target, inputs, plain, generate(target, inputs, drafter))
        assert_some_accepted(drafter)


@pytest.mark.parametrize("variant", ["vanilla", "rnn", "reduced vocabulary"])
def test_few_candidates_for_the_head(variant, monkeypatch):
    """One candidate is the backbone's own choice, as many as the vocabulary are all; the text is the target's either way."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, **(DRAFTERS[variant] | {"own_share": 0.5}))
    drafter.scheduling = "full"
    inputs, drafts, rounds = padded_prompts([2, 7, 4]), recorded_drafts(monkeypatch), []
    plain = generate(target, inputs)
    seen = {}
    for drafter.head_candidates in (None, VOCABULARY, 8, 1):
        drafts.clear()
        assert_same_text(target, inputs, plain, generate(target, inputs, drafter))
        assert_some_accepted(drafter)
        seen[drafter.head_candidates] = dict(drafts)
    assert seen[None] == seen[VOCABULARY] != seen[1]
    assert seen[8] != seen[1]

    drafter.on_round = rounds.append
    generate(target, inputs, drafter)
    drafted = [one for one in rounds if one.base]
    assert drafted and all(one.base == one.drafted for one in drafted)
    drafter.head_candidates = None
    rounds.clear()
    generate(target, inputs, drafter)
    assert any(one.base not in (None, one.drafted) for one in rounds)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_rows_draft_as_if_alone(kind, monkeypatch):
    """Neither padding nor the pace of other rows changes what a row is offered, nor does another row's leaving."""
    target = tiny_target(kind)
    drafter = tiny_drafter(target, own_share=0.5)  # the backbone, which reads the context, has a say
    lengths, inputs = [2, 9, 6, 5], padded_prompts([2, 9, 6, 5])
    plain = generate(target, inputs, max_new_tokens=30)
    # An end token that one row meets at once and others later.
    new = plain[:, inputs["input_ids"].shape[1] :]
    end = int(new[2, 0])
    drafts = recorded_drafts(monkeypatch)
    drafted = generate(target, inputs, drafter, max_new_tokens=30, eos_token_id=end)
    assert torch.equal(drafted, generate(target, inputs, max_new_tokens=30, eos_token_id=end))
    together = dict(drafts)
    assert 2 not in together and len({len(rounds) for rounds in together.values()}) > 1
    for row, length in enumerate(lengths):
        drafts.clear()
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        generate(target, alone, drafter, max_new_tokens=30, eos_token_id=end)
        assert drafts.get(0) == together.get(row), f"row {row}"


class StopsOthers(StoppingCriteria):
    """Ends every row after four tokens, except the one whose prompt ends in a given token."""

    def __init__(self, prompt_length, token):
        self.prompt_length, self.token = prompt_length, token

    def __call__(self, input_ids, scores, **kwargs):
        others = input_ids[:, self.prompt_length - 1] != self.token
        return others & (input_ids.shape[1] >= self.prompt_length + 4)


@pytest.mark.parametrize("last", range(3))
def test_last_row_goes_on_alone(last):
    target = tiny_target("mistral")
    drafter = tiny_drafter(target)
    inputs = padded_prompts([3, 8, 5])
    prompt_length = inputs["input_ids"].shape[1]
    criteria = [StopsOthers(prompt_length, inputs["input_ids"][last, -1])]
    options = {"stopping_criteria": StoppingCriteriaList(criteria), "eos_token_id": EOS}
    plain = generate(target, inputs, **options)
    assert (plain[:, prompt_length + 4] == PAD).tolist() == [row != last for row in range(3)]
    assert torch.equal(generate(target, inputs, drafter, **options), plain)


@pytest.mark.parametrize("mode", ["threshold", "early_stop", "two_step", "presampled", None])
def test_lengths_are_those_of_the_schedule(mode, monkeypatch):
    """Every round, from the confidences of that round; a finished row that stays for its cache takes nobody's place."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    drafter.load_profile, drafter.scheduling = jagged_profile(), mode
    propose, rounds = DSparkCandidateGenerator.propose, []

    def recording(self, sequences, rows, slots, limits):
        block = propose(self, sequences, rows, slots, limits)
        if block is not None:
            room = torch.tensor(limits).clamp(max=drafter.config.num_draft_tokens)
            places = torch.arange(block.confidence.shape[1])
            rounds.append((block.lengths, block.confidence.where(places < room[:, None], 0.0), room))
        return block

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", recording)
    inputs = padded_prompts([2, 7, 4])
    end = int(generate(target, inputs)[1, 7 + 6])
    generate(target, inputs, drafter, eos_token_id=end, return_dict_in_generate=True)
    assert any(0 in room.tolist() for _, _, room in rounds) and len(rounds) > 4
    for number, (lengths, confidence, room) in enumerate(rounds):
        if mode == "threshold":
            expected = scheduling.threshold(confidence, drafter.confidence_threshold)
        elif mode == "early_stop":
            expected = scheduling.early_stop(confidence, drafter.load_profile)
        elif mode == "two_step":
            older = rounds[number - 2][1] if number >= 2 else torch.full_like(confidence, 0.8)  # a guess to begin with
            expected = scheduling.within_capacity(confidence, scheduling.capacity(older, drafter.load_profile))
        else:
            expected = scheduling.global_search(confidence, drafter.load_profile)
        assert lengths.tolist() == expected.minimum(room).tolist(), f"round {number}"


def test_drafting_pauses_where_it_does_not_pay():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.load_profile = LoadProfile({1: 100.0, 2: 99.0, 8: 90.0}, draft_seconds=1.0)
    inputs = padded_prompts([4])
    drafted = generate(target, inputs, drafter)
    assert_same_text(target, inputs, generate(target, inputs), drafted)
    assert 0 < drafter.statistics.drafts < drafter.statistics.rounds / 2


def test_room_is_never_exceeded(monkeypatch):
    """A draft ends before max_length, so a cache of exactly that size is enough."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    inputs = padded_prompts([3, 6])
    drafts = recorded_drafts(monkeypatch)
    for new_tokens in (1, 2, 3, 7):
        drafts.clear()
        drafted = generate(target, inputs, drafter, max_new_tokens=new_tokens)
        assert torch.equal(drafted, generate(target, inputs, max_new_tokens=new_tokens))
        assert all(len(tokens) <= max(0, new_tokens - 2) for rounds in drafts.values() for tokens in rounds)


def test_model_defaults_apply():
    """End, padding and length come from the model's own generation configuration."""
    target = tiny_target()
    target.generation_config.max_new_tokens = 12
    drafter = tiny_drafter(target)
    inputs = {"input_ids": torch.tensor([[BOS, 7, 9]])}
    plain = target.generate(**inputs, do_sample=False)
    assert torch.equal(target.generate(**inputs, do_sample=False, assistant_model=drafter), plain)
