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
        drafted.append(account.should_draft(1))
        if drafted[-1]:
            account.record(rows=1, verified=5, accepted=accepted, committed=[accepted + 1], promised=4.0)
    return drafted


def test_losing_rounds_are_paused_for_longer_and_longer():
    drafted = play(Profitability(DEAR), 200, accepted=0)
    at = [number for number, yes in enumerate(drafted) if yes]
    assert at == [0, 1, 6, 15, 32, 65, 130, 195]  # pauses of 4, 8, 16, 32, 64, 64


def test_a_draft_not_worth_verifying_pauses_at_once():
    account = Profitability(DEAR)
    assert account.should_draft(1)
    account.record(rows=1, verified=0, accepted=0, committed=[1], promised=0.0)
    assert [account.should_draft(1) for _ in range(5)] == [False] * 4 + [True]


def test_winning_rounds_are_never_paused():
    assert all(play(Profitability(DEAR), 50, accepted=4))


def test_rows_that_have_finished_are_not_missed():
    """They stay in the forward where the caller wants the cache, and plain decoding would bring nothing for them either."""
    account = Profitability(DEAR)
    for _ in range(20):
        assert account.should_draft(8)
        account.record(rows=8, verified=4, accepted=4, committed=[3, 3], promised=4.0)


def pauses(committed: list[int], room: list[int] | None) -> bool:
    """Whether rounds are paused that bring two rows so much in 450 ms, where a plain step takes 130 ms."""
    account = Profitability(DEAR)
    for _ in range(2):
        account.record(2, verified=10, accepted=sum(committed) - 2, committed=committed, promised=0.0, room=room)
    return not account.should_draft(2)


def test_in_a_batch_that_nobody_joins_the_last_row_counts():
    assert not pauses([6, 1], room=None)  # in a server 3.5 steps of two rows
    assert pauses([6, 1], room=[40, 45])  # here the second row has most steps to go, and has been brought one of them
    assert pauses([6, 1], room=[0, 45])  # even more so where the first has ended
    assert not pauses([1, 6], room=[0, 45])
    assert not pauses([4, 4], room=[40, 40])


def test_rows_far_from_their_limit_may_end_in_any_order():
    """Then the tokens of the faster row may be those of the last one."""
    assert pauses([7, 2], room=[20, 25])
    assert not pauses([7, 2], room=[9995, 10000])


def test_a_round_of_many_rows_is_verdict_enough_for_a_long_pause():
    account = Profitability(DEAR)
    account.record(16, verified=80, accepted=0, committed=[1] * 16, promised=0.0)
    assert [account.should_draft(16) for _ in range(17)] == [False] * 16 + [True]


def test_a_pause_does_not_outlive_the_rows_that_it_was_about():
    account = Profitability(DEAR)
    for _ in range(5):
        account.record(16, verified=80, accepted=0, committed=[1] * 16, promised=0.0)
    assert not account.should_draft(16) and not account.should_draft(5)
    assert account.should_draft(4)
    account.record(4, verified=20, accepted=20, committed=[6] * 4, promised=20.0)
    assert account.should_draft(4)


def test_a_pause_is_never_longer_than_the_longest():
    account = Profitability(DEAR)
    account.record(200, verified=1000, accepted=0, committed=[1] * 200, promised=0.0)
    assert [account.should_draft(200) for _ in range(65)] == [False] * 64 + [True]


def test_a_draft_that_costs_nothing_is_not_paused():
    account = Profitability(LoadProfile({1: 10.0, 6: 4.0}))
    for left in range(300, 0, -1):
        account.record(3, verified=0, accepted=0, committed=[1, 1, 1], promised=0.0, room=[left, left + 7, left + 90])
        assert account.should_draft(3)


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
    account.record(rows=1, verified=5, accepted=1, committed=[2], promised=4.0)
    assert account.discount == pytest.approx(2 / 5)
    for _ in range(120):
        account.record(rows=1, verified=0, accepted=0, committed=[1], promised=0.0)
    assert account.discount == pytest.approx(1.0, abs=1e-3)
    account.record(rows=1, verified=5, accepted=5, committed=[6], promised=1.0)
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
