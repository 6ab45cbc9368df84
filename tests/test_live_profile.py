"""A load profile that learns from the rounds: on a clock of its own, with neighbours that come and go."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from test_sampling import IMPOSSIBLE, PROMPT, drafter_for, law, p_value, sample, tally
from test_sampling import target as few_tokens  # noqa: F401
from tiny import PAD, jagged_profile, one_thread, padded_prompts, tiny_drafter, tiny_target  # noqa: F401

from hf_dspark import DSparkCandidateGenerator, DSparkDraftModel, LoadProfile, Request, ServingLoop
from hf_dspark.machine import fingerprint
from hf_dspark.scheduling import global_search, survival

CURVE = {1: 50.0, 2: 49.0, 4: 47.0, 8: 44.0, 16: 38.0}  # about 20 ms, and 0.4 ms a token


def live_rounds(profile, count, round_seconds, draft_seconds, seed=0):
    """Plays rounds of all kinds of confidences under `profile`, which is told that a forward took `round_seconds(tokens)`.

    Returns the mean budget of the second half, and its expected throughput as a share of the best possible.
    """
    dice, budgets, reached, possible = random.Random(seed), [], 0.0, 0.0
    for number in range(count):
        confidence = torch.full((1, 7), dice.uniform(0.5, 0.95))
        chosen = int(global_search(confidence, profile))
        profile.record(1 + chosen, 1, round_seconds(1 + chosen), draft_seconds)
        if number >= count // 2:
            gained = [1.0, *(1 + survival(confidence)[0].cumsum(0)).tolist()]
            rates = [gained[n] / (draft_seconds + round_seconds(1 + n)) for n in range(8)]
            budgets.append(chosen)
            reached, possible = reached + rates[chosen], possible + max(rates)
    return sum(budgets) / len(budgets), reached / possible


@pytest.mark.parametrize(("curve", "extra"), [("smooth", 0.01), ("jagged", 0.003)])
def test_a_neighbour_that_makes_tokens_dear_shortens_the_budget_until_it_goes(curve, extra):
    measured = LoadProfile(CURVE, draft_seconds=0.004) if curve == "smooth" else jagged_profile()
    profile, draft_seconds = measured.live(), measured.draft_seconds
    calm, _ = live_rounds(profile, 60, measured.step_seconds, draft_seconds)
    slow, reached = live_rounds(profile, 60, lambda tokens: measured.step_seconds(tokens) + extra * (tokens - 1), draft_seconds)
    assert slow < 0.8 * calm and reached > 0.92
    again, reached = live_rounds(profile, 100, measured.step_seconds, draft_seconds)
    assert again > 0.9 * calm and reached > 0.98


def test_what_slows_down_everything_leaves_the_choice_alone():
    measured = jagged_profile()
    profile = measured.live()
    before, _ = live_rounds(profile, 40, measured.step_seconds, 0.001)
    slowed, reached = live_rounds(profile, 60, lambda tokens: 3 * measured.step_seconds(tokens), 0.003)
    assert abs(slowed - before) < 1 and reached > 0.95
    for size in (4, 5, 6, 8):
        assert 2.3 < profile.step_seconds(size) / measured.step_seconds(size) < 3.1
    assert profile.round_seconds(5) - profile.step_seconds(5) == pytest.approx(0.003, rel=0.05)
    assert profile.step_seconds(64) > 1.2 * measured.step_seconds(64)


def test_the_stairs_stay():
    """What one size shows reaches its neighbours, and makes no line of the curve."""
    measured = LoadProfile({1: 100.0, 2: 60.0, 3: 90.0, 4: 50.0, 6: 80.0, 8: 40.0})
    profile = measured.live()
    for _ in range(100):
        profile.record(3, 1, 2 * measured.step_seconds(3))
    assert profile.step_seconds(3) == pytest.approx(2 * measured.step_seconds(3), rel=0.1)
    for curve in (measured, profile):
        seconds = [curve.step_seconds(size) for size in measured.steps_per_second]
        assert [after > before for before, after in pairwise(seconds)] == [True, False, True, False, True]


def test_a_hiccup_counts_little_and_unknown_times_not_at_all():
    profile = LoadProfile(CURVE, draft_seconds=0.004).live()
    usual = profile.step_seconds(8)
    profile.record(8, 1, 100.0, 100.0)
    assert usual < profile.step_seconds(8) < 1.3 * usual
    assert profile.round_seconds(8) - profile.step_seconds(8) < 0.006
    profile = LoadProfile(CURVE).live()
    profile.record(8, 1, 0.0)
    assert profile.step_seconds(8) == usual
    profile.record(8, 1, 0.0, 0.01)  # the first draft time there is
    assert profile.round_seconds(8) == pytest.approx(usual + 0.01)


def test_loads_share_what_the_rounds_tell_and_a_fixed_profile_learns_nothing():
    profile = LoadProfile(CURVE).live()
    busy = profile.with_load(4)
    busy.record(2, 1, 1.0)
    assert profile.step_seconds(2) == busy.step_seconds(2) > LoadProfile(CURVE).step_seconds(2)
    assert profile.live().step_seconds(2) == LoadProfile(CURVE).step_seconds(2)  # starts anew
    fixed = LoadProfile(CURVE)
    fixed.record(2, 1, 1.0, 1.0)
    assert fixed.step_seconds(2) == LoadProfile(CURVE).step_seconds(2)


def test_what_is_saved_is_the_measured_curve(tmp_path):
    profile = LoadProfile(CURVE, measured_on={"device": "a machine"}).live()
    for _ in range(10):
        profile.record(8, 1, 1.0)
    profile.save(tmp_path / "profile.json")
    again = LoadProfile.load(tmp_path / "profile.json")
    assert again == profile and again.is_live and again.measured_on == {"device": "a machine"}
    assert again.step_seconds(8) == LoadProfile(CURVE).step_seconds(8)


# ---- fed by the loops ----


@pytest.fixture
def clock(monkeypatch):
    """Time as the statistics see it stands still but for what a test adds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("hf_dspark.statistics.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def takes(clock, model, seconds):
    """Every forward of `model` takes as long as `seconds` says, given its input tokens or embeddings."""

    def spend(module, arguments, kwargs, output):
        inputs = kwargs["input_ids"] if "input_ids" in kwargs else arguments[0]
        clock.now += seconds(inputs)

    return model.register_forward_hook(spend, with_kwargs=True)


def pair():
    target = tiny_target("qwen3")
    return target, tiny_drafter(target)


def lengths_drafted(target, drafter, rows):
    """Draft tokens per round and row of a call of `generate`."""
    rounds = []
    drafter.on_round = rounds.append
    inputs = padded_prompts([4] * rows)
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    drafter.on_round = None
    return sum(len(drafted) for one in rounds for drafted in one.drafted) / sum(len(one.rows) for one in rounds[1:])


def test_generate_feeds_it(clock):
    """Every round but the first is entered with its tokens, its rows, and its own seconds; prefill is none of them."""
    target, drafter = pair()
    drafter.load_profile = LoadProfile({1: 100.0, 4: 90.0, 64: 20.0}).live()
    seen = []
    object.__setattr__(drafter.load_profile, "record", lambda *values: seen.append(values))
    hooks = takes(clock, target, lambda ids: 0.01 * ids.numel()), takes(clock, drafter, lambda _: 0.5)
    rounds = []
    drafter.on_round = rounds.append
    inputs = padded_prompts([4])
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=30, do_sample=False, eos_token_id=None)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(rounds) - 2 > 8
    for (batch_tokens, requests, step, drafting), one in zip(seen, rounds[2:], strict=True):
        assert (batch_tokens, requests) == (1 + len(one.drafted[0]), 1)
        assert step == pytest.approx(0.01 * batch_tokens)
        assert drafting == pytest.approx(0.5) or (drafting is None and not one.drafted[0])
    assert any(drafting for *_, drafting in seen)


def test_a_crowded_machine_shortens_drafts_and_a_calm_one_lengthens_them(clock):
    rows, (target, drafter) = 3, pair()
    drafter.confidence_head.proj.bias.data.fill_(3.0)
    # What the forwards take when nobody else is there; the profile has been measured then.
    calm = {rows * size: seconds for size, seconds in {1: 0.0100, 2: 0.0102, 6: 0.0110, 30: 0.0160}.items()}
    measured = LoadProfile({1: 300.0} | {size: 1 / seconds for size, seconds in calm.items()}, draft_seconds=0.001)
    drafter.load_profile = measured.live()
    crowded = [False]

    def seconds(ids):
        return measured.step_seconds(ids.numel()) + crowded[0] * 0.02 * (ids.numel() - rows)

    takes(clock, target, seconds)
    takes(clock, drafter, lambda _: 0.001)
    before = lengths_drafted(target, drafter, rows)
    crowded[0] = True
    lengths_drafted(target, drafter, rows)
    during = lengths_drafted(target, drafter, rows)
    crowded[0] = False
    for _ in range(6):
        after = lengths_drafted(target, drafter, rows)
    assert during < 0.6 * before and after > 0.85 * before


def test_the_serving_loop_feeds_it(clock):
    target, drafter = pair()
    drafter.load_profile = jagged_profile().live()
    takes(clock, target, lambda ids: 1.0)
    loop = ServingLoop(target, drafter, 2)
    for number in range(3):
        loop.submit(Request(number, torch.tensor([5 + number, 9]), 12, eos_token_ids=()))
    while not loop.idle:
        loop.step()
    assert drafter.load_profile.step_seconds(4) > 3 * jagged_profile().step_seconds(4)


# ---- exactness ----


def single_rows(target, drafter, calls=80):
    """p-value of the second token of texts that are each a call of their own, under one profile that goes on learning."""
    texts, _ = sample(target, drafter, rows=1, calls=calls, tokens=3)
    exact = law(target, PROMPT[0], tokens=3)
    counts = tally(texts, 3)
    return min(p_value(counts.sum((0, 2)), exact.sum((0, 2))), p_value(counts.sum((0, 1)), exact.sum((0, 1))))


LEVEL = {1: 100.0, 2: 62.0, 3: 55.0, 4: 50.0}


@pytest.mark.parametrize("mode", ["early_stop", "presampled"])
def test_sampled_text_keeps_its_law(few_tokens, clock, mode):  # noqa: F811
    """Even where the time of a forward depends on the very tokens in it: by then the round is over."""
    drafter = drafter_for(few_tokens, mode)
    drafter.load_profile = LoadProfile(LEVEL, draft_seconds=0.001).live()
    with takes(clock, few_tokens, lambda ids: 0.012 * ids.shape[1] * (0.4 + int(ids[0, 0]) % 2 + int(ids[0, -1]) % 2)):
        p = single_rows(few_tokens, drafter)
    assert drafter.load_profile.step_seconds(2) != LoadProfile(LEVEL).step_seconds(2)
    assert p > IMPOSSIBLE


def test_a_time_that_is_entered_too_early_is_found_out(few_tokens, clock, monkeypatch):  # noqa: F811
    """The negative control: a time that depends on the drafted tokens, entered before it is decided whether to judge them."""
    draw = DSparkCandidateGenerator._sequential_stage

    def hasty(self, *arguments):
        tokens, *others = draw(self, *arguments)
        fresh = LoadProfile(LEVEL, draft_seconds=0.001).live()
        for _ in range(30):
            fresh.record(2, 1, 0.001 if int(tokens[0, 0]) in (0, 3) else 1.0)
        self.drafter.load_profile = fresh
        return tokens, *others

    monkeypatch.setattr(DSparkCandidateGenerator, "_sequential_stage", hasty)
    drafter = drafter_for(few_tokens, "early_stop")
    drafter.load_profile = LoadProfile(LEVEL, draft_seconds=0.001).live()
    texts, _ = sample(few_tokens, drafter, rows=1, calls=120, tokens=2)
    assert p_value(tally(texts, 2).sum(0), law(few_tokens, PROMPT[0], tokens=2).sum(0)) < IMPOSSIBLE


# ---- whose times they are ----


def test_a_measured_profile_says_on_what(tmp_path):
    target, _ = pair()
    profile = LoadProfile.measure(target, context_length=8, batch_tokens=(1, 2), repeats=1)
    assert profile.measured_on == fingerprint(target) | {"layout": "one row", "context_length": "8"}
    assert profile.measured_on.keys() >= {
        "target",
        "dtype",
        "device",
        "threads",
        "attention",
        "linears",
        "torch",
        "transformers",
    }
    assert profile.differences(target) == {} == LoadProfile(CURVE).differences(target)
    other = tiny_target("llama", attention="eager").to(torch.bfloat16)
    assert profile.differences(other).keys() == {"target", "dtype", "attention"}
    assert profile.differences(other)["dtype"] == ("float32", "bfloat16")


@pytest.mark.parametrize("foreign", [False, True])
def test_a_profile_from_elsewhere_is_used_only_when_asked_for(tmp_path, foreign):
    target, drafter = pair()
    known = fingerprint(target) | ({"device": "another processor"} if foreign else {})
    drafter.load_profile = LoadProfile(CURVE, measured_on=known)
    drafter.save_pretrained(tmp_path)

    along = DSparkDraftModel.from_pretrained(tmp_path)
    assert along.load_profile == drafter.load_profile
    along.bind(target)
    assert along.load_profile == (None if foreign else drafter.load_profile)
    along.save_pretrained(tmp_path)  # what is of no use here is not lost to the machine it is of
    assert LoadProfile.load(tmp_path / "load_profile.json") == drafter.load_profile

    asked = DSparkDraftModel.from_pretrained(tmp_path)
    asked.load_profile = LoadProfile.load(tmp_path / "load_profile.json")
    asked.bind(target)
    assert asked.load_profile == drafter.load_profile


@pytest.mark.parametrize("fields", [{"measured_on": {"threads": 2}}, {"measured_on": "here"}, {"is_live": "yes"}])
def test_bad_fields_are_refused(fields):
    with pytest.raises(ValueError, match=f"`{next(iter(fields))}` must be .* Leave it out"):
        LoadProfile(CURVE, **fields)
