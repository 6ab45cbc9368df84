"""Schedules against brute force over every length vector, and against the rules written out in plain Python."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from hf_dspark.load_profile import LoadProfile
from hf_dspark.scheduling import (
    capacity,
    early_stop,
    expected_throughput,
    global_search,
    schedule,
    survival,
    threshold,
    within_capacity,
)

# Seconds of a forward of SmolLM2-135M in float32 on two cores: a stair that leads up, down and up again.
STAIRS = {1: 0.053, 2: 0.091, 3: 0.115, 4: 0.102, 5: 0.089, 6: 0.091, 8: 0.091, 16: 0.107, 32: 0.138, 64: 0.208}


def profile_of(seconds: dict[int, float], **fields) -> LoadProfile:
    return LoadProfile({size: 1 / value for size, value in seconds.items()}, **fields)


def random_profile(dice: random.Random, kind: str) -> LoadProfile:
    base = dice.uniform(0.02, 0.06)
    slope = dice.uniform(0.001, 0.02)
    seconds = {size: base + slope * size for size in range(1, 40)}
    if kind == "jagged":
        seconds = {size: value * dice.uniform(0.5, 2.0) for size, value in seconds.items()}
    extra = {1: 0.0, 8: 0.01} if dice.random() < 0.3 else {}
    load = dice.choice([1, 1, 3, 7])
    return profile_of(seconds, draft_seconds=dice.choice([0.0, 0.02]), concurrent_requests=load, request_seconds=extra)


def products(confidence: list[list[float]]) -> list[list[float]]:
    return [list(itertools.accumulate((0.0 if c != c else c for c in row), lambda a, b: a * b)) for row in confidence]


def theta(confidence: list[list[float]], lengths: tuple[int, ...], profile: LoadProfile) -> float:
    """Expected tokens per second, term by term; only the step time comes from the profile."""
    rows = len(confidence)
    scale = max(1.0, profile.requests() / rows)
    gained = sum(sum(row[:length]) for row, length in zip(products(confidence), lengths, strict=True))
    batch_tokens = round(scale * (rows + sum(lengths)))
    seconds = profile.draft_seconds + profile.step_seconds(batch_tokens, max(rows, profile.requests()))
    return scale * (rows + gained) / seconds


def rank(confidence: list[list[float]]) -> list[tuple[int, int]]:
    """All (j, r) by survival, falling; ties by j, then r."""
    a = products(confidence)
    pairs = [(j, r) for r in range(len(a)) for j in range(len(a[0]))]
    return sorted(pairs, key=lambda pair: (-a[pair[1]][pair[0]], pair[0], pair[1]))


def algorithm_1(confidence: list[list[float]], profile: LoadProfile) -> list[int]:
    lengths = [0] * len(confidence)
    best = theta(confidence, tuple(lengths), profile)
    for j, r in rank(confidence):
        assert lengths[r] == j  # the order keeps prefixes prefixes
        lengths[r] += 1
        after = theta(confidence, tuple(lengths), profile)
        if not after > best:
            lengths[r] -= 1
            break
        best = after
    return lengths


def random_cases(kind: str, count: int, largest: int):
    dice = random.Random(kind)
    for _ in range(count):
        rows, block = dice.randint(1, 3), dice.randint(1, largest)
        low = dice.choice([0.0, 0.5, 0.8])
        confidence = [[dice.uniform(low, 1.0) for _ in range(block)] for _ in range(rows)]
        yield confidence, random_profile(dice, kind)


def lengths_of(result: torch.Tensor) -> list[int]:
    assert result.dtype == torch.int64
    return result.tolist()


# Survival and thresholds


def test_survival_is_the_running_product_and_nan_ends_it():
    a = survival(torch.tensor([[0.5, 0.5, 1.0], [0.9, math.nan, 1.0]]))
    assert a.dtype == torch.float64
    torch.testing.assert_close(a, torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.0, 0.0]], dtype=torch.float64), atol=1e-7, rtol=0)


# Confidences and lengths of single rounds of the reference implementation (DeepSpec), static threshold 0.6.
REFERENCE_ROUNDS = [
    ([0.6118, 0.6375, 0.4405, 0.4414, 0.4999, 0.4174, 0.3521], 2),
    ([0.9000, 0.8267, 0.8282, 0.6675, 0.3692, 0.3882, 0.5251], 4),
    ([0.5128, 0.6733, 0.4168, 0.4260, 0.5028, 0.2840, 0.4319], 0),
    ([0.6600, 0.4507, 0.5905, 0.4167, 0.2274, 0.3113, 0.3352], 1),
    ([0.9134, 0.6415, 0.4254, 0.4724, 0.6079, 0.4469, 0.4123], 2),
    ([0.7936, 0.8832, 0.7591, 0.6754, 0.5471, 0.6543, 0.6889], 4),
]


def test_threshold_on_each_confidence_agrees_with_the_reference():
    confidence, kept = zip(*REFERENCE_ROUNDS, strict=True)
    assert lengths_of(threshold(torch.tensor(confidence), 0.6)) == list(kept)


def test_threshold_on_the_product_keeps_less():
    confidence = torch.tensor([[0.9, 0.8267, 0.8282, 0.6675], [0.5, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    assert lengths_of(threshold(confidence, 0.6, on="cumulative")) == [3, 0, 4]  # 0.9, 0.744, 0.616, 0.411
    assert lengths_of(threshold(confidence, 0.6)) == [4, 0, 4]


@pytest.mark.parametrize("on", ["conditional", "cumulative"])
def test_threshold_keeps_a_confidence_equal_to_it(on):
    confidence = torch.tensor([[0.5, 1.0, 0.4999], [math.nan, 1.0, 1.0]])
    assert lengths_of(threshold(confidence, 0.5, on=on)) == [2, 0]
    assert lengths_of(threshold(confidence, 0.0, on=on)) == [3, 3]
    assert lengths_of(threshold(torch.ones(1, 3), 1.0, on=on)) == [3]


def test_threshold_refuses_what_is_no_probability_and_no_form():
    for value in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"`value` must be a probability in \[0, 1\], got .*Pass 0"):
            threshold(torch.ones(1, 2), value)
    with pytest.raises(ValueError, match=r"`on` must be 'conditional' .* or 'cumulative' .* got 'both'\. Name one"):
        threshold(torch.ones(1, 2), 0.5, on="both")


# Early stop


@pytest.mark.parametrize("kind", ["smooth", "jagged"])
def test_early_stop_is_algorithm_1(kind):
    seen = set()
    for confidence, profile in random_cases(kind, 60, 6):
        result = lengths_of(early_stop(torch.tensor(confidence, dtype=torch.float64), profile))
        assert result == algorithm_1(confidence, profile)
        seen.add(sum(result))
    assert len(seen) > 5  # from nothing to long prefixes


def test_early_stop_is_algorithm_1_where_everything_ties():
    # Powers of two, so that both sides compute the same numbers to the last bit and equal means equal.
    dice = random.Random(1)
    partly = 0
    for _ in range(80):
        rows, block = dice.randint(1, 4), dice.randint(1, 4)
        confidence = [[dice.choice([0.0, 0.5, 1.0, 1.0]) for _ in range(block)] for _ in range(rows)]
        seconds = {size: dice.choice([0.25, 0.5, 0.5, 1.0]) for size in range(1, 21)}
        profile = profile_of(seconds)
        result = lengths_of(early_stop(torch.tensor(confidence), profile))
        assert result == algorithm_1(confidence, profile)
        partly += 0 < sum(result) < rows * block
    assert partly > 5


def test_ties_go_to_the_earlier_position_then_to_the_earlier_row():
    confidence = torch.ones(3, 2)
    steps = {size: 1.0 if size <= 7 else 99.0 for size in range(1, 10)}  # room for three rows and four tokens
    for rule in (early_stop, global_search):
        assert lengths_of(rule(confidence, profile_of(steps))) == [2, 1, 1]
    assert [lengths_of(within_capacity(confidence, n)) for n in range(7)] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip


def test_a_token_that_leaves_throughput_as_it_is_is_not_admitted():
    profile = profile_of({1: 1.0, 2: 2.0, 3: 3.0})  # Θ = 1 throughout
    assert lengths_of(early_stop(torch.ones(1, 2), profile)) == [0]
    assert lengths_of(global_search(torch.ones(1, 2), profile)) == [0]
    assert lengths_of(global_search(torch.zeros(2, 2), profile_of({1: 1.0}))) == [0, 0]


def test_a_flat_profile_admits_every_token_that_may_survive():
    confidence = torch.tensor([[0.9, 0.5, 0.0, 0.9], [0.1, 0.1, 0.1, 0.1]])
    for rule in (early_stop, global_search):
        assert lengths_of(rule(confidence, LoadProfile({1: 20.0}, concurrent_requests=100))) == [2, 4]


# Global search


@pytest.mark.parametrize("kind", ["smooth", "jagged"])
def test_global_search_finds_the_best_of_all_length_vectors(kind):
    seen, better = set(), 0
    for confidence, profile in random_cases(kind, 40, 4):
        c = torch.tensor(confidence, dtype=torch.float64)
        choices = itertools.product(range(len(confidence[0]) + 1), repeat=len(confidence))
        best = max(choices, key=lambda lengths: (theta(confidence, lengths, profile), -sum(lengths)))
        result = lengths_of(global_search(c, profile))
        assert result == list(best)
        assert capacity(c, profile) == sum(best)
        stopped = lengths_of(early_stop(c, profile))
        assert theta(confidence, tuple(stopped), profile) <= theta(confidence, best, profile)
        better += stopped != result
        seen.add(sum(best))
    assert len(seen) > 4
    assert better > 5 if kind == "jagged" else better < 5


def test_global_search_goes_past_a_bad_step_of_a_measured_curve():
    confidence = torch.full((1, 7), 0.6)
    profile = profile_of(STAIRS)
    assert lengths_of(early_stop(confidence, profile)) == [0]  # 1.6 tokens in 91 ms are fewer than 1 in 53
    assert lengths_of(global_search(confidence, profile)) == [7]  # but 2.46 in 91 ms are more
    assert capacity(confidence, profile) == 7


def test_lengths_are_rounded_up_to_a_cheaper_batch():
    """Where four tokens take less time than two, hopeless ones are verified along: they cost less than nothing."""
    profile = profile_of({1: 0.05, 2: 0.09, 3: 0.1, 4: 0.06, 5: 0.09})
    for hope in (0.01, 0.0):
        confidence = torch.tensor([[0.6, hope, hope, hope]])
        assert lengths_of(global_search(confidence, profile)) == [3]
        assert lengths_of(early_stop(confidence, profile)) == [0]  # which cannot look past the bad step
        assert capacity(confidence, profile) == 3
        assert lengths_of(within_capacity(confidence, 3)) == [3]
    # Over rows: three rows of one token each fill a batch of four sooner than they leave it at three.
    stairs = profile_of({3: 0.1, 4: 0.14, 5: 0.14, 6: 0.11, 7: 0.2})
    confidence = torch.tensor([[0.9, 0.01], [0.05, 0.01], [0.04, 0.01]])
    assert lengths_of(global_search(confidence, stairs)) == [1, 1, 1]
    assert lengths_of(schedule("two_step", confidence, stairs, older=confidence)) == [1, 1, 1]


# Two steps


def test_within_capacity_admits_the_top_by_current_survival():
    dice = random.Random(2)
    for _ in range(30):
        rows, block = dice.randint(1, 4), dice.randint(1, 5)
        confidence = [[dice.choice([0.5, 1.0, dice.random()]) for _ in range(block)] for _ in range(rows)]
        for n in range(rows * block + 3):
            expected = [0] * rows
            for _, r in rank(confidence)[:n]:
                expected[r] += 1
            assert lengths_of(within_capacity(torch.tensor(confidence, dtype=torch.float64), n)) == expected


def test_two_steps_with_unchanged_confidences_are_the_global_search():
    for confidence, profile in random_cases("jagged", 20, 5):
        c = torch.tensor(confidence)
        assert lengths_of(within_capacity(c, capacity(c, profile))) == lengths_of(global_search(c, profile))


def test_within_capacity_refuses_a_negative_capacity():
    with pytest.raises(ValueError, match=r"`capacity` must be at least 0 tokens, got -1\. Pass"):
        within_capacity(torch.ones(1, 2), -1)


# Load


def test_the_budget_falls_as_the_load_rises():
    smooth = profile_of({1: 0.0202, 2: 0.0204, 512: 0.1224}, draft_seconds=0.004)  # 20 ms + 0.2 ms a token
    confidence = torch.full((1, 7), 0.8)
    for rule in (early_stop, global_search):
        budgets = [rule(confidence, smooth.with_load(2**n)).item() for n in range(9)]  # 1 to 256
        assert budgets == sorted(budgets, reverse=True)
        assert budgets[0] == 7 and 0 < budgets[-1] < 3


def test_a_load_below_the_number_of_rows_changes_nothing():
    confidence = torch.rand(6, 7, generator=torch.Generator().manual_seed(0))
    profile = profile_of(STAIRS, request_seconds={1: 0.0, 6: 0.02})
    assert 0 < global_search(confidence, profile).sum() < 42
    for rule in (early_stop, global_search):
        assert torch.equal(rule(confidence, profile), rule(confidence, profile.with_load(6)))


def test_one_row_of_many_is_scheduled_as_if_all_were_there():
    row = [0.95, 0.9, 0.7, 0.6, 0.5, 0.4, 0.3]
    profile = profile_of({1: 0.0202, 2: 0.0204, 512: 0.1224}, request_seconds={1: 0.0, 64: 0.01})
    alone = global_search(torch.tensor([row]), profile.with_load(32))
    together = global_search(torch.tensor([row] * 32), profile)
    assert 0 < alone.item() < 7
    assert together.sum().item() == pytest.approx(32 * alone.item(), abs=31)  # together, the last token may be split
    lengths = alone.expand(32)
    assert expected_throughput(torch.tensor([row]), alone, profile.with_load(32)) == pytest.approx(
        expected_throughput(torch.tensor([row] * 32), lengths, profile), rel=1e-12
    )


def test_expected_throughput_is_tokens_over_seconds():
    confidence = torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.25, 1.0]])
    profile = profile_of({1: 0.1, 11: 1.1}, draft_seconds=0.1)  # a tenth of a second per token, and for drafting
    assert expected_throughput(confidence, torch.tensor([0, 2]), profile) == pytest.approx((2 + 1.25) / 0.5)
    # Five requests: 2.5 times everything, and the 10 tokens of a round take 1 s.
    assert expected_throughput(confidence, torch.tensor([0, 2]), profile.with_load(5)) == pytest.approx(2.5 * 3.25 / 1.1)
    for random_confidence, random_load in random_cases("smooth", 20, 4):
        lengths = tuple(index % (len(random_confidence[0]) + 1) for index in range(len(random_confidence)))
        value = expected_throughput(torch.tensor(random_confidence).double(), torch.tensor(lengths), random_load)
        assert value == pytest.approx(theta(random_confidence, lengths, random_load), rel=1e-6)


# What may not crash or peek


def test_nan_counts_as_no_confidence():
    confidence = torch.tensor([[math.nan, 1.0, 1.0], [0.9, 0.9, math.nan]])
    clean = confidence.nan_to_num(0.0)
    profile = profile_of(STAIRS)
    for rule in (early_stop, global_search):
        assert lengths_of(rule(confidence, profile)) == lengths_of(rule(clean, profile))
    assert lengths_of(global_search(confidence, LoadProfile({1: 1.0}))) == [0, 2]
    assert lengths_of(within_capacity(confidence, 2)) == [0, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_floating_dtype_gives_the_same_lengths(dtype):
    confidence = torch.tensor([[0.75, 0.5, 0.25], [1.0, 0.875, 0.5]])  # exact in all of them
    profile = profile_of(STAIRS, concurrent_requests=8)
    for rule in (early_stop, global_search):
        assert torch.equal(rule(confidence.to(dtype), profile), rule(confidence, profile))


def outcome(rule) -> float:
    """P(first output token is A) for the paper's counterexample: p_t = (0.7, 0.3), p_d = (0.5, 0.5), K = 2."""
    profile = LoadProfile({1: 1.0, 2: 0.5, 3: 0.45}, interpolation="floor")
    p_t, total = (0.7, 0.3), 0.0
    for x1, c2 in ((0, 0.9), (1, 0.0)):  # the second confidence has seen x1
        length = rule(torch.tensor([[0.8, c2]]), profile).item()
        if length == 0:
            first_is_a = p_t[0]
        else:  # rejection sampling: accepted with min(1, p_t / p_d), else drawn from the residual, which is all A
            accepted = min(1.0, p_t[x1] / 0.5)
            first_is_a = accepted * (x1 == 0) + (1 - accepted)
        total += 0.5 * first_is_a
    return total


def test_early_stop_does_not_peek_and_a_fresh_global_search_does():
    assert outcome(early_stop) == pytest.approx(0.7)
    assert outcome(lambda confidence, profile: threshold(confidence, 0.5)) == pytest.approx(0.7)
    assert outcome(lambda confidence, profile: within_capacity(confidence, 1)) == pytest.approx(0.7)
    assert outcome(global_search) == pytest.approx(0.85)  # the negative control: wrong for sampling, and known to be
