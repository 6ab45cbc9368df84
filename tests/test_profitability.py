"""The running account of drafted rounds: pauses, probes and broken promises."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_drafter, tiny_target
from transformers import LogitsProcessorList

from hf_dspark import DSparkCandidateGenerator, LoadProfile
from hf_dspark.profitability import Profitability

DEAR = LoadProfile({1: 10.0, 6: 4.0}, draft_seconds=0.02)  # a block costs 2.7 plain steps


def play(account: Profitability, rounds: int, accepted: int) -> list[bool]:
    """Which rounds draft, when each draft of five keeps `accepted` tokens and promises four."""
    drafted = []
    for _ in range(rounds):
        drafted.append(account.should_draft())
        if drafted[-1]:
            account.record(rows=1, going=1, verified=5, accepted=accepted, committed=accepted + 1, promised=4.0)
    return drafted


def test_losing_rounds_are_paused_for_longer_and_longer():
    drafted = play(Profitability(DEAR), 200, accepted=0)
    at = [number for number, yes in enumerate(drafted) if yes]
    assert at == [0, 1, 6, 15, 32, 65, 130, 195]  # pauses of 4, 8, 16, 32, 64, 64


def test_a_draft_not_worth_verifying_pauses_at_once():
    account = Profitability(DEAR)
    assert account.should_draft()
    account.record(rows=1, going=1, verified=0, accepted=0, committed=1, promised=0.0)
    assert [account.should_draft() for _ in range(5)] == [False] * 4 + [True]


def test_winning_rounds_are_never_paused():
    assert all(play(Profitability(DEAR), 50, accepted=4))


def test_rows_that_have_finished_are_not_missed():
    """They stay in the forward where the caller wants the cache, and plain decoding would bring nothing for them either."""
    account = Profitability(DEAR)
    for _ in range(20):
        assert account.should_draft()
        account.record(rows=8, going=2, verified=4, accepted=4, committed=6, promised=4.0)


def test_a_change_of_text_is_noticed_both_ways():
    account = Profitability(DEAR)
    play(account, 30, accepted=4)
    assert not all(play(account, 30, accepted=0))
    assert all(play(account, 400, accepted=5)[-50:])


def test_without_prices_drafting_is_taken_to_pay():
    assert all(play(Profitability(None), 20, accepted=0))


def test_broken_promises_are_discounted_and_forgiven():
    account = Profitability(None)
    assert account.discount == 1.0
    account.record(rows=1, going=1, verified=5, accepted=1, committed=2, promised=4.0)
    assert account.discount == pytest.approx(2 / 5)
    for _ in range(120):
        account.record(rows=1, going=1, verified=0, accepted=0, committed=1, promised=0.0)
    assert account.discount == pytest.approx(1.0, abs=1e-3)
    account.record(rows=1, going=1, verified=5, accepted=5, committed=6, promised=1.0)
    assert account.discount == 1.0  # never a bonus


def test_the_discount_goes_half_way():
    """Rounds that promise 2 and keep 1, through the generator, whose confidences are discounted before they are summed."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.load_profile = LoadProfile({1: 100.0, 8: 99.0})
    drafter.bind(target)
    generator = DSparkCandidateGenerator(drafter, LogitsProcessorList(), do_sample=False)
    confidence = torch.tensor([[1.0, 1.0, 0.0]])
    for _ in range(60):
        lengths = generator._schedule(generator._discounted(confidence), torch.tensor([3]))
        generator._drafted = True
        generator.book(lengths.tolist(), [1], [2])
    assert generator.profitability.discount == pytest.approx(0.5**0.5, abs=0.06)
