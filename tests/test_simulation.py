"""A simulated server: recorded drafts, the real scheduler, and seconds that only the profile knows."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tiny import jagged_profile, one_thread, tiny_drafter, tiny_target  # noqa: F401
from tiny_tokenizer import text, tiny_tokenizer

from hf_dspark import LoadProfile, scheduling
from hf_dspark.evaluation import draw_simulation
from hf_dspark.profitability import Profitability
from hf_dspark.simulation import (
    MODES,
    Trace,
    TracedBlock,
    policies,
    read_traces,
    record_traces,
    simulate,
    sweep,
    write_traces,
)

K = 5
# A processor-like machine: 20 ms, half a millisecond a token, drafts of 3 ms.
SMOOTH = LoadProfile({1: 1 / 0.0205, 2: 1 / 0.021, 2048: 1 / 1.044}, draft_seconds=0.003)
LOADS = (1, 4, 32, 256)


@pytest.fixture(scope="module")
def traces():
    """Answers of easy and hard places, with confidences that promise what is kept."""
    dice, found = random.Random(0), []
    for _ in range(40):
        blocks, at = [], 0
        while at < 200:
            ease = dice.uniform(0.3, 0.98)
            confidence = [min(1.0, max(0.0, ease + dice.uniform(-0.1, 0.1))) for _ in range(K)]
            accepted = next((k for k, c in enumerate(confidence) if dice.random() > c), K)
            blocks.append(TracedBlock(at, confidence, accepted))
            at += accepted + 1
        found.append(Trace(200, blocks))
    return found


def test_the_budget_falls_with_the_load_and_throughput_keeps_up_with_the_best_static_length(traces):
    budgets = {mode: [] for mode in ("early_stop", "two_step", "presampled")}
    for load in LOADS:
        rounds = 300 if load < 16 else 100
        static = [simulate(traces, SMOOTH, load, "full", draft_tokens=n, rounds=rounds).throughput for n in range(1, K + 1)]
        static.append(simulate(traces, SMOOTH, load, "plain", rounds=rounds).throughput)
        for mode, found in budgets.items():
            result = simulate(traces, SMOOTH, load, mode, rounds=rounds)
            found.append(result.budget)
            # Two rounds late is late for one request: what its capacity was made for has gone by. Among many it evens out.
            if mode != "two_step" or load >= 16:
                assert result.throughput > 0.98 * max(static), (mode, load)
    for mode, found in budgets.items():
        assert found == sorted(found, reverse=True), (mode, found)
        assert found[0] > 2 and found[-1] < 1


def test_the_load_of_a_profile_shortens_as_many_real_requests_do(traces):
    """Lengths of one request under `with_load` are those that as many requests alike would get."""
    confidence = torch.tensor([block.confidence for trace in traces for block in trace.blocks[:1]])
    budgets = [
        sum(int(scheduling.global_search(row[None], SMOOTH.with_load(2**n))) for row in confidence) / len(confidence)
        for n in range(0, 9, 2)
    ]
    assert budgets == sorted(budgets, reverse=True) and budgets[0] > 2 and budgets[-1] < 1


def test_a_round_is_accounted_for_by_hand():
    trace = Trace(7, [TracedBlock(0, [0.9, 0.9, 0.9], 2), TracedBlock(3, [0.9, 0.9, 0.9], 0), TracedBlock(4, [0.9, 0.9], 1)])
    profile = LoadProfile({1: 10.0, 2: 5.0}, draft_seconds=0.05)  # a tenth of a second a token
    result = simulate([trace], profile, 1, "full", drains=True, overhead_seconds=0.01)
    # 3 verified, 2 kept: 3 tokens. 3 verified, none kept: 1. 2 verified, 1 kept: 2. The last token has no room for a draft.
    assert (result.rounds, result.drafts, result.tokens, result.verified, result.accepted) == (4, 3, 7, 8, 3)
    assert result.seconds == pytest.approx(0.1 * (4 + 4 + 3 + 1) + 3 * 0.05 + 4 * 0.01)
    assert result.throughput == result.user_speed == pytest.approx(7 / result.seconds)
    assert (result.tau, result.budget) == (7 / 4, 2)
    plain = simulate([trace], profile, 1, "plain", drains=True)
    assert (plain.rounds, plain.tokens, plain.drafts) == (7, 7, 0) and plain.seconds == pytest.approx(0.7)
    shorter = simulate([trace], profile, 1, "full", draft_tokens=1, drains=True)
    assert shorter.verified == shorter.drafts and shorter.tokens == 7


@pytest.mark.parametrize("mode", MODES)
def test_every_request_is_served_to_its_end(traces, mode):
    result = simulate(traces, jagged_profile(), 12, mode, drains=True)
    assert result.tokens == pytest.approx(12 * 200, abs=12 * K)  # a last block may reach over the end
    assert result.cycles <= 12 * result.rounds and result.rounds >= 200 / (K + 1)
    assert (result.verified > 0) == (mode != "plain")
    again = simulate(traces, jagged_profile(), 12, mode, drains=True)
    assert again == result


def test_drafts_that_never_pay_are_paused(traces):
    hopeless = [Trace(200, [TracedBlock(0, [0.9] * K, 0)])]
    dear = LoadProfile({1: 10.0, 6: 4.0}, draft_seconds=0.02)
    result = simulate(hopeless, dear, 1, rounds=300)
    assert result.drafts < 12
    assert result.throughput > 0.95 * simulate(hopeless, dear, 1, "plain", rounds=300).throughput


def test_the_account_of_a_draining_batch_does_not_know_where_answers_end(monkeypatch):
    """As in `generate`: to the account a short answer may go on for as long as the others."""
    short, long = (Trace(tokens, [TracedBlock(0, [0.9] * K, K)]) for tokens in (2 * K, 90))
    rooms = []
    record = Profitability.record
    monkeypatch.setattr(Profitability, "record", lambda *args: rooms.append(args[-1]) or record(*args))
    simulate([short, long], SMOOTH, 2, "full", drains=True)
    assert not rooms  # every draft verified, and no account
    simulate([short, long], SMOOTH, 2, drains=True)
    assert rooms[0] == [90 - K - 1] * 2
    assert [0, 90 - 2 * (K + 1)] in rooms and len(rooms[-1]) == 1
    rooms.clear()
    simulate([short, long], SMOOTH, 2, rounds=20)
    assert set(rooms) == {None}


def test_files(tmp_path, traces):
    path = tmp_path / "traces.jsonl"
    write_traces(traces, path)
    assert read_traces(path) == traces
    good = path.read_text().splitlines()[0]
    for bad in ("{", "[]", '{"tokens": 3}', '{"tokens": 3, "blocks": []}', good.replace('"accepted": ', '"accepted": 9')):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=r"traces\.jsonl, line 2: expected a trace"):
            read_traces(path)
    path.write_text("")
    with pytest.raises(ValueError, match="must hold a trace"):
        read_traces(path)


def test_a_file_in_another_encoding(tmp_path, traces):
    path = tmp_path / "traces.jsonl"
    write_traces(traces[:1], path)
    path.write_bytes(path.read_bytes() + b'"caf\xe9"\n')
    with pytest.raises(ValueError, match=r"traces\.jsonl, line 2: expected a trace"):
        read_traces(path)


def test_bad_arguments(traces):
    with pytest.raises(ValueError, match="`mode` must be one of plain"):
        simulate(traces, SMOOTH, 1, "fast")
    for arguments in ({"concurrency": 0}, {"concurrency": 1, "rounds": 0}, {"concurrency": 41, "drains": True}):
        with pytest.raises(ValueError, match="`concurrency` and `rounds`"):
            simulate(traces, SMOOTH, **arguments)


def test_traces_are_what_generate_did():
    """A simulated call that verifies everything goes through the very rounds that were recorded."""
    target, tokenizer = tiny_target(seed=1), tiny_tokenizer()
    drafter = tiny_drafter(target)
    drafter.scheduling = "early_stop"
    prompts = [text([7 + n, 30, 9]) for n in range(4)]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    found = record_traces(target, tokenizer, drafter, prompts, batch_size=2, **options)
    assert drafter.scheduling == "early_stop" and drafter.on_round is None
    assert [trace.tokens for trace in found] == [29] * 4
    counts = drafter.statistics  # of the second call
    result = simulate(found[2:], SMOOTH, 2, "full", drains=True)
    assert (result.tokens, result.cycles) == (counts.tokens, counts.cycles)
    assert (result.verified, result.accepted) == (counts.scheduled, counts.accepted) and 0 < counts.accepted < counts.scheduled
    assert (result.rounds, result.drafts) == (counts.rounds, counts.drafts)
    with pytest.raises(ValueError, match="no confidence head"):
        record_traces(target, tokenizer, tiny_drafter(target, enable_confidence_head=False), prompts)


def test_pictures(tmp_path, traces):
    named = policies(K, fixed=[2])
    assert list(named) == ["plain", "fixed 2", "threshold 0.5", "early_stop", "two_step", "presampled"]
    assert len(policies(K)) == 5 + K
    results = sweep(traces, SMOOTH, [1, 8], named, rounds=8)
    assert len(results) == 12 and json.loads(json.dumps(results)) == results
    paths = draw_simulation(results, tmp_path / "pictures")
    assert [path.name for path in paths] == ["throughput.png", "budget.png"] and all(path.stat().st_size for path in paths)
