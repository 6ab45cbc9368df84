"""The account of a call adds up: tokens, drafts, positions and seconds."""

import json
import math
import time
from itertools import pairwise

import pytest
import torch
from tiny import PAD, jagged_profile, one_thread, padded_prompts, tiny_drafter, tiny_target  # noqa: F401
from transformers import GenerationMixin, StoppingCriteria, StoppingCriteriaList

from hf_dspark import Statistics


def generate(target, inputs, drafter, **options):
    options = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": PAD, "do_sample": False} | options
    return target.generate(**inputs, assistant_model=drafter, **options)


def assert_consistent(statistics, generated):
    """`generated`: tokens of all rows, the first one of each, which the prefill gave, not counted."""
    assert statistics.tokens == generated
    assert statistics.tau == generated / statistics.cycles
    assert 0 < statistics.accepted < statistics.scheduled <= statistics.drafted
    assert statistics.verified == statistics.scheduled == statistics.accepted + statistics.rejected
    assert statistics.rounds <= statistics.cycles
    assert 0 < statistics.drafts <= statistics.rounds
    scheduled, reached, accepted = (
        getattr(statistics, f"{name}_per_position") for name in ("scheduled", "reached", "accepted")
    )
    assert sum(scheduled) == statistics.scheduled and sum(accepted) == statistics.accepted
    assert all(a >= b for counts in (scheduled, reached, accepted) for a, b in pairwise(counts))
    assert all(a <= r <= s for a, r, s in zip(accepted, reached, scheduled, strict=True))
    assert reached[0] == scheduled[0]
    assert all(reached[k] <= accepted[k - 1] for k in range(1, len(reached)))
    for rate, a, r in zip(statistics.conditional_acceptance, accepted, reached, strict=True):
        assert rate == a / r if r else math.isnan(rate)


@pytest.mark.parametrize("mode", ["full", "threshold", "two_step", "presampled", None])
@pytest.mark.parametrize("lengths", [[5], [2, 7, 4]])
def test_counts(mode, lengths):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    drafter.load_profile, drafter.scheduling = jagged_profile(), mode
    inputs = padded_prompts(lengths)
    generate(target, inputs, drafter)
    assert_consistent(drafter.statistics, generated=23 * len(lengths))
    if mode != "full":
        assert drafter.statistics.scheduled < drafter.statistics.drafted


@pytest.mark.parametrize("returns_dict", [False, True])
def test_rows_that_end(returns_dict):
    """Tokens behind an end token count neither as text nor as rounds."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    inputs = padded_prompts([2, 7, 4])
    start = inputs["input_ids"].shape[1]
    end = int(generate(target, inputs, None)[0, start + 5])
    output = generate(target, inputs, drafter, eos_token_id=end, return_dict_in_generate=returns_dict)
    rows = (output.sequences if returns_dict else output)[:, start:].tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in rows]
    assert len(set(lengths)) > 1
    assert_consistent(drafter.statistics, generated=sum(lengths) - 3)


class AfterEach(StoppingCriteria):
    """Ends the rows at different lengths, told apart by the last token of their prompts."""

    def __init__(self, ends, place):
        self.ends, self.place = ends, place

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(ids) >= self.ends[int(ids[self.place])] for ids in input_ids])


def test_rows_that_run_on():
    """Without an end token, rows go on until the last has stopped, and what is cut off again is not counted."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    inputs = padded_prompts([2, 7, 4])
    ends = {int(token): 11 + 4 * row for row, token in enumerate(inputs["input_ids"][:, -1])}
    criteria = StoppingCriteriaList([AfterEach(ends, place=6)])
    output = generate(target, inputs, drafter, stopping_criteria=criteria)
    assert output.shape[1] == 19
    assert drafter.statistics.tokens == 3 * (19 - 7 - 1)


def test_seconds_cover_the_call():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.load_profile = jagged_profile()
    inputs = padded_prompts([5])
    generate(target, inputs, drafter)
    started = time.perf_counter()
    generate(target, inputs, drafter)
    wall = time.perf_counter() - started
    seconds = drafter.statistics.seconds
    assert set(seconds) == {"prefill", "draft", "head", "schedule", "verify", "rest"}
    assert all(value > 0 for value in seconds.values())
    assert 0.3 * wall < sum(seconds.values()) <= wall  # the rest is spent in `generate`, before and after the loop


def test_a_call_starts_anew():
    target = tiny_target()
    drafter = tiny_drafter(target)
    inputs = padded_prompts([5])
    generate(target, inputs, drafter)
    first = drafter.statistics
    generate(target, inputs, drafter, max_new_tokens=6)
    assert drafter.statistics is not first and drafter.statistics.tokens == 5 and first.tokens == 23


def test_host_loop_counts_too(monkeypatch):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", GenerationMixin._assisted_decoding.__wrapped__)
    generate(target, padded_prompts([5]), drafter)
    assert_consistent(drafter.statistics, generated=23)


def test_export():
    target = tiny_target()
    drafter = tiny_drafter(target)
    generate(target, padded_prompts([5]), drafter)
    exported = drafter.statistics.to_dict()
    assert json.loads(json.dumps(exported)) == exported
    assert exported["tokens"] == 23 and exported["tau"] == drafter.statistics.tau
    assert f"tau={exported['tau']:.2f}" in repr(drafter.statistics) and "verify" in repr(drafter.statistics)
    assert "no time spent" in repr(Statistics(5)) and Statistics(5).tau == 0.0


def test_phases_on_an_accelerator_are_timed_by_events(monkeypatch):
    """On CUDA a call returns before its kernels have run; the clock of the stream counts, and is read once, at the end."""

    class Event:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            Event.clock += 250.0
            self.time = Event.clock

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.time - self.time

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    statistics = Statistics(5, torch.device("cuda:0"))
    for phase in ("draft", "verify", "draft"):
        with statistics.timed(phase):
            pass
    assert statistics.seconds["draft"] == 0.0
    statistics.close(2.0)
    assert statistics.seconds["draft"] == 0.5 and statistics.seconds["verify"] == 0.25
    assert statistics.seconds["rest"] == 1.25
    statistics.close(3.0)  # a loop that goes on closes its account after every step
    assert statistics.seconds["draft"] == 0.5 and statistics.seconds["rest"] == 2.25
    json.dumps(statistics.to_dict())
    statistics = Statistics(5, torch.device("cpu"), torch.device("cuda:0"))
    for phase in ("draft", "verify"):
        with statistics.timed(phase):
            pass
    assert 0 < statistics.spent("draft") < 0.25 == statistics.spent("verify")


@pytest.mark.parametrize("mode", ["full", "threshold", "presampled", None])
@pytest.mark.parametrize("lengths", [[5], [2, 7, 4]])
def test_a_listener_hears_every_token(mode, lengths):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    drafter.load_profile, drafter.scheduling = jagged_profile(), mode
    inputs = padded_prompts(lengths)
    silent = generate(target, inputs, drafter)
    rounds = []
    drafter.on_round = rounds.append
    heard = generate(target, inputs, drafter)
    assert torch.equal(silent, heard)

    texts = [[] for _ in lengths]
    for one in rounds:
        for place, row in enumerate(one.rows):
            texts[row] += one.committed[place]
            kept = min(one.accepted[place], len(one.committed[place]))
            assert one.committed[place][:kept] == one.drafted[place][:kept]
            assert one.base is None or len(one.base[place]) == len(one.drafted[place])
            assert one.confidence is None or all(0 <= c <= 1 for c in one.confidence[place])
    start = inputs["input_ids"].shape[1]
    assert texts == heard[:, start:].tolist()
    assert rounds[0].drafted == [[]] * len(lengths) and rounds[0].confidence is None
    statistics = drafter.statistics
    assert sum(len(drafted) for one in rounds for drafted in one.drafted) == statistics.scheduled
    assert sum(map(sum, (one.accepted for one in rounds))) == statistics.accepted
    assert any(one.confidence is not None for one in rounds)
