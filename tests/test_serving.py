"""Requests that join and leave a running batch: each gets the answer it would have got alone, and fails alone."""

import copy
import functools
import gc
import itertools
import random
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from test_packed_rows import is_packed
from test_sampling import IMPOSSIBLE, drafter_for, law, p_value, profile, tally
from test_sampling import VOCABULARY as FEW
from test_sampling import target as few_tokens  # noqa: F401
from tiny import (
    BOS,
    EOS,
    MASK,
    PAD,
    VOCABULARY,
    assert_same_text,
    jagged_profile,
    one_thread,  # noqa: F401
    tiny_drafter,
    tiny_target,
)
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, LogitsProcessorList

from hf_dspark import DSparkCandidateGenerator, Event, LoadProfile, Request, ServingLoop, cache, serve_batch, serving
from hf_dspark.processing import RowProcessors
from hf_dspark.profitability import Profitability
from hf_dspark.target import TargetForward

LONGEST = 25  # tokens of an answer
MODES = ("full", "threshold", "early_stop", "two_step", "presampled", None)


@functools.cache
def make_target(kind="qwen3", attention="sdpa"):
    return tiny_target(kind, attention=attention)


def make_pair(kind="qwen3", mode=None, attention="sdpa", **drafter_options):
    """A target, shared by all tests that do not change it, and a drafter whose backbone, which reads the context, has a say."""
    target = make_target(kind, attention)
    drafter = tiny_drafter(target, own_share=0.5, **drafter_options)
    drafter.load_profile, drafter.scheduling = jagged_profile(), mode
    return target, drafter


@functools.cache
def plain_text(target, *ids):
    """What plain `generate` writes behind a prompt, past any end token."""
    ids = torch.tensor([ids])
    return target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=min(LONGEST, target.config.max_position_embeddings - ids.shape[1]),
        eos_token_id=None,
    )


def prompt(length, seed=0):
    return torch.randint(MASK + 1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def some_requests(count):
    """Prompts and answers of all lengths, with and without an end token."""
    draw = random.Random(0)
    return [
        Request(number, prompt(draw.randint(1, 12), number), draw.randint(1, 18), eos_token_ids=draw.choice([None, ()]))
        for number in range(count)
    ]


def run(loop, arrivals=None, cancellations=None):
    """All events by request. `arrivals` and `cancellations` say before which step a request comes or is cancelled."""
    arrivals, cancellations, events, steps = dict(arrivals or {}), dict(cancellations or {}), {}, 0
    while arrivals or not loop.idle:
        for request in [request for request, step in arrivals.items() if step <= steps]:
            loop.submit(request)
            del arrivals[request]
        for id in [id for id, step in cancellations.items() if step == steps]:
            loop.cancel(id)
        for event in loop.step():
            events.setdefault(event.id, []).append(event)
        assert len(loop._running) <= loop.max_rows
        steps += 1
        assert steps < 2000
    return events


def answer(events):
    return [token for event in events for token in event.tokens]


def assert_well_formed(events):
    """Exactly the last event says how the request ended, and the tokens are the accepted ones and one of the target's."""
    assert [event.finished is None for event in events] == [True] * (len(events) - 1) + [False]
    for event in events:
        if event.finished not in ("cancelled", "error"):
            assert event.tokens[: event.accepted] == event.drafted[: event.accepted][: len(event.tokens)]
            assert len(event.tokens) == event.accepted + 1 or event.finished == "stop"
        assert (event.error is not None) == (event.finished == "error")


def assert_greedy_alone(target, request, events):
    """The answer is what plain `generate` gives to this request alone; so far as it goes, if it was cancelled."""
    assert_well_formed(events)
    start, finished = len(request.input_ids), events[-1].finished
    plain = plain_text(target, *request.input_ids.tolist())[:, : start + request.max_new_tokens]
    ends = (plain[0, start:] == EOS).nonzero() if request.eos_token_ids is None else []
    if len(ends):
        plain = plain[:, : start + int(ends[0]) + 1]
    answered = torch.cat([request.input_ids, torch.tensor(answer(events), dtype=torch.long)])
    if finished == "cancelled":
        plain = plain[:, : len(answered)]
    else:
        assert finished == ("stop" if len(ends) else "length")
    inputs = {"input_ids": request.input_ids[None], "attention_mask": torch.ones(1, start, dtype=torch.long)}
    assert_same_text(target, inputs, plain, answered[None])


def assert_all_greedy(target, requests, events):
    assert events.keys() == {request.id for request in requests}
    for request in requests:
        assert_greedy_alone(target, request, events[request.id])


# ---- the same answers as alone ----


@pytest.mark.parametrize("mode", MODES)
def test_greedy_answers_while_requests_come_and_go(mode):
    target, drafter = make_pair(mode=mode)
    requests, draw = some_requests(12), random.Random(1)
    arrivals = {request: draw.randint(0, 12) for request in requests}
    cancelled = draw.sample(range(12), 4)
    events = run(loop := ServingLoop(target, drafter, 4), arrivals, {id: draw.randint(2, 20) for id in cancelled})
    assert_all_greedy(target, requests, events)
    assert any(events[id][-1].finished == "cancelled" for id in cancelled)
    assert {events[id][-1].finished for id in range(12)} >= {"length", "cancelled"}
    counts = loop.statistics
    assert 0 < counts.accepted < counts.scheduled and counts.cycles > 1.5 * counts.rounds
    assert (counts.scheduled < counts.drafted) == (mode != "full")
    assert counts.tokens == sum(len(answer(answers)) for answers in events.values()) - sum(
        len(answers[0].tokens) for answers in events.values()
    )


@pytest.mark.parametrize(
    "kind, attention",
    [("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gemma3", "sdpa"), ("qwen3_moe", "sdpa")],
)
def test_targets(kind, attention, monkeypatch):
    """Sliding windows and layers of several types included: their window counts positions, which join unchanged.

    The target sees the tokens that were admitted, not the longest draft of every row.
    """
    (target, drafter), requests = make_pair(kind, "threshold", attention), some_requests(8)
    verify, given, rounds = TargetForward.verify, [], []

    def recording(self, sequences, tokens, slots, lengths):
        outputs = verify(self, sequences, tokens, slots, lengths)
        rounds.append(([1 + length for length in lengths], given[-1]))
        return outputs

    monkeypatch.setattr(TargetForward, "verify", recording)
    with target.register_forward_pre_hook(lambda module, _, kwargs: given.append(kwargs["input_ids"].shape), with_kwargs=True):
        events = run(ServingLoop(target, drafter, 4), {request: 2 * number for number, request in enumerate(requests)})
    assert_all_greedy(target, requests, events)
    for counts, shape in rounds:
        assert shape == ((1, sum(counts)) if is_packed(counts) else (len(counts), max(counts)))
    assert any(is_packed(counts) for counts, _ in rounds) and {len(counts) for counts, _ in rounds} == {1, 2, 3, 4}


def test_positions_end_with_the_request():
    """Beside a longer draft a row is padded, but not to positions that a target with a table of them does not have."""
    torch.manual_seed(0)
    shape = {"n_positions": 48, "n_embd": 32, "n_layer": 4, "n_head": 4, "tie_word_embeddings": False, "eos_token_id": EOS}
    target = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=BOS, pad_token_id=PAD, **shape)).eval()
    with torch.no_grad():
        for embedding in (target.transformer.wte, target.lm_head):
            embedding.weight.normal_()
    drafter = tiny_drafter(target)
    requests = [Request(number, prompt(28, number), 20, eos_token_ids=()) for number in range(3)]
    events = run(loop := ServingLoop(target, drafter), {request: number for number, request in enumerate(requests)})
    assert loop.statistics.accepted > 0
    assert_all_greedy(target, requests, events)


@pytest.mark.parametrize("config", [{"enable_confidence_head": False}, {"sliding_window": 4}])
def test_drafters(config):
    (target, drafter), requests = make_pair(**config), some_requests(6)
    events = run(ServingLoop(target, drafter, 3), {request: 2 * number for number, request in enumerate(requests)})
    assert_all_greedy(target, requests, events)


def test_without_a_drafter():
    (target, _), requests = make_pair(), some_requests(6)
    events = run(loop := ServingLoop(target, None, 3), {request: 2 * number for number, request in enumerate(requests)})
    assert_all_greedy(target, requests, events)
    counts = loop.statistics
    assert counts.drafts == counts.scheduled == 0 and counts.tau == 1.0 and counts.cycles > counts.rounds
    assert sum(map(len, events.values())) == counts.cycles + len(requests)


def test_a_listener_makes_events_complete():
    """With one, they hold what the parallel stage guessed, and the confidence also where everything is verified."""
    target, drafter = make_pair(mode="full")
    request, answers = Request("", prompt(6), 20, eos_token_ids=()), []
    for drafter.on_round in (None, pytest.fail):
        loop = ServingLoop(target, drafter)
        loop.submit(request)
        answers.append(run(loop)[""])
    without, complete = answers
    assert answer(without) == answer(complete)
    assert all(event.base is event.confidence is None for event in without)
    rounds = [event for event in complete if event.drafted]
    assert rounds and all(len(event.base) == len(event.confidence) == len(event.drafted) for event in rounds)
    assert any(event.base != event.drafted for event in rounds)


def drafts_by_place(events):
    """What was drafted behind so many tokens of the answer."""
    drafts, length = {}, 0
    for event in events:
        if event.drafted:
            drafts[length] = event.drafted
        length += len(event.tokens)
    return drafts


@pytest.mark.parametrize("pauses", [False, True])
def test_rows_draft_as_if_alone(pauses, monkeypatch):
    """The drafter's context joins as exactly as the target's, also what is queued while drafting pauses."""
    target, drafter = make_pair(mode="full")
    requests = [Request(number, prompt(3 + number, number), 8 + 4 * number, eos_token_ids=()) for number in range(4)]
    alone = {request.id: run(ServingLoop(target, drafter), {request: 0})[request.id] for request in requests}
    if pauses:
        asked = itertools.cycle([True, False, False, True, False, False, False, True])
        monkeypatch.setattr(Profitability, "should_draft", lambda self, rows: next(asked))
        monkeypatch.setattr(DSparkCandidateGenerator, "_choose_mode", lambda self: "presampled")
        monkeypatch.setattr(DSparkCandidateGenerator, "_schedule", lambda self, confidence, room: room)
    events = run(loop := ServingLoop(target, drafter, 3), {request: 2 * number for number, request in enumerate(requests)})
    assert_all_greedy(target, requests, events)
    assert (loop.statistics.drafts < loop.statistics.rounds - 4) == pauses
    compared = 0
    for id, drafts in ((id, drafts_by_place(answers)) for id, answers in alone.items()):
        for place, drafted in drafts_by_place(events[id]).items():
            if place in drafts:
                assert drafted == drafts[place]
                compared += 1
    assert compared > 8


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_rows_beside_sampled_ones(penalty):
    """Also with processors that read the text, which `generation_config` brings and every row applies to itself."""
    target = copy.deepcopy(make_target())
    target.generation_config.repetition_penalty = penalty
    drafter = tiny_drafter(target)
    drafter.load_profile = jagged_profile()
    requests, draw = some_requests(6), random.Random(5)
    noise = [
        Request(f"noise {number}", prompt(4, number), 15, do_sample=True, temperature=temperature, top_k=top_k, top_p=0.9)
        for number, (temperature, top_k) in enumerate([(1.0, None), (0.7, 5), (0.7, 5), (1.3, 0)])
    ]
    torch.manual_seed(0)
    events = run(ServingLoop(target, drafter, 4), {request: draw.randint(0, 8) for request in [*noise, *requests]})
    for request in requests:
        assert_greedy_alone(target, request, events[request.id])
    for request in noise:
        assert_well_formed(events[request.id])


# ---- the law of sampled answers ----


def sampled_answers(target, drafter, count=250):
    """First four tokens of requests that share their rounds with others of other lengths, laws and prompts."""
    torch.manual_seed(0)
    draw, requests = random.Random(0), []
    for number in range(count):
        requests.append(
            Request(("watched", number), torch.tensor([1, 2, 0]), 5, do_sample=True, temperature=0.5, eos_token_ids=())
        )
        if number % 3 == 0:
            ids = torch.randint(FEW, (draw.randint(1, 5),))
            own = {"do_sample": number % 2 == 0, "temperature": 1.6, "top_k": draw.choice([0, 2])}
            requests.append(Request(("other", number), ids, draw.randint(1, 8), eos_token_ids=(), **own))
    events = run(loop := ServingLoop(target, drafter, 16), {request: number // 4 for number, request in enumerate(requests)})
    assert 0 < loop.statistics.accepted < loop.statistics.scheduled < loop.statistics.drafted
    return torch.tensor([answer(events["watched", number])[:4] for number in range(count)])


def test_law(few_tokens, monkeypatch):  # noqa: F811
    exact = law(few_tokens, [1, 2, 0], tokens=4, temperature=0.5)
    for mode in (None, "two_step"):
        drafter = drafter_for(few_tokens, mode)
        drafter.load_profile = profile(rows=10)
        counts = tally(sampled_answers(few_tokens, drafter), 4)
        assert p_value(counts.sum(3), exact.sum(3)) > IMPOSSIBLE, mode
        assert p_value(counts.sum(0), exact.sum(0)) > IMPOSSIBLE, mode

    # Rows that lose their own law in company are found out.
    joined, none = RowProcessors.joined, RowProcessors(LogitsProcessorList(), 1)
    monkeypatch.setattr(RowProcessors, "joined", lambda calls: joined([none] * len(calls)))
    counts = tally(sampled_answers(few_tokens, drafter), 4)
    assert min(p_value(counts.sum(3), exact.sum(3)), p_value(counts.sum(0), exact.sum(0))) < IMPOSSIBLE


# ---- faults ----

FAULTS = {
    "empty": ({"input_ids": torch.zeros(0, dtype=torch.long)}, "`input_ids` must be a LongTensor"),
    "two prompts": ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, "`input_ids` must be a LongTensor"),
    "no tokens": ({"input_ids": torch.ones(3)}, "`input_ids` must be a LongTensor"),
    "no tensor": ({"input_ids": [5, 6]}, "`input_ids` must be a LongTensor"),
    "foreign token": ({"input_ids": torch.tensor([5, VOCABULARY])}, f"got {VOCABULARY}"),
    "negative token": ({"input_ids": torch.tensor([-1, 5])}, "got -1"),
    "too long": ({"max_new_tokens": 510}, "got 3 \\+ 510"),
    "nothing asked": ({"max_new_tokens": 0}, "`max_new_tokens` must be"),
    "no temperature": ({"do_sample": True, "temperature": -1.0}, "temperature"),
    "no probability": ({"do_sample": True, "top_p": -0.5}, "top_p"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_request_fails_alone(fault):
    target, drafter = make_pair()
    fields, message = FAULTS[fault]
    faulty = Request(**({"id": "faulty", "input_ids": prompt(3), "max_new_tokens": 4} | fields))
    requests = some_requests(3)
    events = run(ServingLoop(target, drafter, 2), dict.fromkeys([*requests[:2], faulty, requests[2]], 0))
    [event] = events.pop("faulty")
    assert event.finished == "error" and event.tokens == []
    assert re.search(message, event.error)
    assert_all_greedy(target, requests, events)


@pytest.mark.parametrize("sampled_neighbour", [False, True])
def test_nan_in_a_prompt_stays_in_its_row(sampled_neighbour):
    """From the embedding of one token NaN spreads to everything that attends to it: to nothing outside its row."""
    target = copy.deepcopy(make_target())
    with torch.no_grad():
        target.model.embed_tokens.weight[47] = torch.nan
    target.generation_config.suppress_tokens = [47]
    drafter = tiny_drafter(make_target())
    drafter.load_profile = jagged_profile()
    requests = [Request(number, prompt(4, number).clamp(max=46), 12) for number in range(4)]
    faulty = [Request(f"faulty {number}", torch.tensor([9, 47, 8]), 20) for number in range(3)]
    arrivals = dict.fromkeys([requests[0], faulty[0], requests[1]], 0) | dict.fromkeys([faulty[1], *requests[2:], faulty[2]], 4)
    if sampled_neighbour:
        arrivals[Request("noise", torch.tensor([9]), 30, do_sample=True)] = 0
    events = run(ServingLoop(target, drafter, 3), arrivals)
    events.pop("noise", None)
    for request in faulty:
        [event] = events.pop(request.id)
        assert event.finished == "error" and "behind token 0" in event.error
    assert_all_greedy(target, requests, events)


@pytest.mark.parametrize("sampled_neighbour", [False, True])
def test_nan_in_a_round_fails_its_row(sampled_neighbour, monkeypatch):
    target, drafter = make_pair()
    requests = [Request(number, prompt(4, number), 25, eos_token_ids=()) for number in range(5)]
    loop = ServingLoop(target, drafter, 6)

    def spoiled(self, *arguments):
        outputs, ids = verify(self, *arguments), [row.request.id for row in loop._running]
        if len(ids) > 1 and 2 in ids and len(loop._running[ids.index(2)].ids) > 9:
            outputs.logits[ids.index(2)] = torch.nan
        return outputs

    verify = TargetForward.verify
    monkeypatch.setattr(TargetForward, "verify", spoiled)
    noise = [Request("noise", prompt(3), 30, do_sample=True, eos_token_ids=())] if sampled_neighbour else []
    arrivals = dict.fromkeys([*noise, *requests], 0)
    events = run(loop, arrivals)
    events.pop("noise", None)
    failed = events.pop(2)
    assert_well_formed(failed)
    assert failed[-1].finished == "error" and "NaN" in failed[-1].error
    plain = plain_text(target, *requests[2].input_ids.tolist())[0, 4:].tolist()
    assert answer(failed) == plain[: len(answer(failed))] and len(answer(failed)) > 5
    assert_all_greedy(target, [request for request in requests if request.id != 2], events)


def test_nan_in_a_drafter_costs_only_drafts():
    target, drafter = make_pair(mode="full")
    with torch.no_grad():
        drafter.norm.weight.fill_(torch.nan)
    requests = some_requests(3)
    arrivals = dict.fromkeys([*requests, Request("noise", prompt(3), 10, do_sample=True, eos_token_ids=())], 0)
    events = run(ServingLoop(target, drafter), arrivals)
    assert len(answer(events.pop("noise"))) == 10
    assert_all_greedy(target, requests, events)


def test_failing_forward_ends_the_running_and_spares_the_waiting(monkeypatch):
    target, drafter = make_pair()
    requests = some_requests(4)
    loop = ServingLoop(target, drafter, 2)
    for request in requests:
        loop.submit(Request(request.id, request.input_ids, 20, eos_token_ids=()))
    loop.step()
    with monkeypatch.context() as broken:
        broken.setattr(serving.Batch, "round", lambda *arguments: 1 / 0)
        failed = loop.step()
    assert [(event.id, event.finished, event.error) for event in failed] == [(id, "error", "division by zero") for id in (0, 1)]
    events = run(loop)
    assert_all_greedy(target, [Request(id, requests[id].input_ids, 20, eos_token_ids=()) for id in (2, 3)], events)


@pytest.mark.parametrize("where", ["prefill", "round"])
def test_an_interrupt_loses_no_request(where, monkeypatch):
    """It ends what was running and is passed on; whoever goes on is told, and what waited is served."""
    target, drafter = make_pair()
    requests = some_requests(4)
    loop = ServingLoop(target, drafter, 2)
    for request in requests:
        loop.submit(Request(request.id, request.input_ids, 20, eos_token_ids=()))
    if where == "round":
        loop.step()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(serving.Batch, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    failed = (0, 1) if where == "round" else (0,)
    events = run(loop)
    for id in failed:
        assert [(event.finished, event.error) for event in events.pop(id)] == [("error", "KeyboardInterrupt")]
    served = [Request(id, requests[id].input_ids, 20, eos_token_ids=()) for id in range(4) if id not in failed]
    assert_all_greedy(target, served, events)
    for id in range(4):
        loop.submit(Request(id, requests[id].input_ids, 4))  # every id is free again
    assert len(run(loop)) == 4 and loop.idle


def test_a_drafter_that_helps_another_target_meanwhile():
    target, drafter = make_pair()
    other = tiny_target(seed=9)
    request = Request("one", prompt(5), 20, eos_token_ids=())
    loop = ServingLoop(target, drafter)
    loop.submit(request)
    events = loop.step()
    other.generate(
        prompt(4)[None], attention_mask=torch.ones(1, 4), assistant_model=drafter, max_new_tokens=4, pad_token_id=PAD
    )
    assert drafter.bound_target.model() is other
    events += run(loop)["one"]
    assert_greedy_alone(target, request, events)
    assert drafter.bound_target.model() is target


@pytest.mark.parametrize("lengths", [(20, 300), (300, 3)])
def test_short_and_long_rows_join(lengths):
    """The cache of one ends long before the other's."""
    target, drafter = make_pair()
    requests = [Request(number, prompt(length, number), 12, eos_token_ids=()) for number, length in enumerate(lengths)]
    events = run(ServingLoop(target, drafter), {requests[0]: 0, requests[1]: 2})
    assert_all_greedy(target, requests, events)


def test_settings_change_while_requests_run():
    """A draft in every round once everything is to be verified, and the verdict of another profile at once."""
    dear = LoadProfile({1: 100.0, 2: 2.0, 6: 1.0}, draft_seconds=1.0)
    target, drafter = make_pair()
    loop = ServingLoop(target, drafter, 1)
    drafter.load_profile = dear
    loop.submit(Request("one", prompt(5), 200, eos_token_ids=()))

    def drafts_in(rounds):
        before = loop.statistics.drafts
        for _ in range(rounds):
            loop.step()
        return loop.statistics.drafts - before

    assert drafts_in(30) < 15
    drafter.scheduling = "full"
    assert drafts_in(10) == 10
    drafter.scheduling = None
    assert drafts_in(30) < 15
    drafter.load_profile = LoadProfile({1: 100.0, 2: 99.0, 6: 98.0}, draft_seconds=0.0)
    assert drafts_in(2) == 2


# ---- cancelling, memory, threads, time ----


def test_cancelling_frees_the_row():
    target, drafter = make_pair()
    loop = ServingLoop(target, drafter, 1)
    long, waiting, last = (Request(name, prompt(3), LONGEST, eos_token_ids=()) for name in ("long", "waiting", "last"))
    for request in (long, waiting, last):
        loop.submit(request)
    assert {event.id for event in loop.step()} == {"long"}
    assert loop.cancel("long") and loop.cancel("waiting") and not loop.cancel("unknown")
    events = loop.step()
    assert events[:2] == [Event(id, [], [], 0, finished="cancelled") for id in ("waiting", "long")]
    assert {event.id for event in events[2:]} == {"last"} and loop._batch.generator.cache.rows == 1
    assert not loop.cancel("long")
    loop.submit(long)  # its id is free again
    events = run(loop)
    assert len(answer(events["long"])) == LONGEST


def test_memory_is_flat(monkeypatch):
    """Rows and slots follow the requests at hand, and nothing is left of those that have gone."""
    monkeypatch.setattr(cache, "_GROWTH", 16)
    target, drafter = make_pair()
    loop, alive = ServingLoop(target, drafter, 4), []
    loop.submit(Request("long", prompt(150), 3, eos_token_ids=()))  # the slots it took are given back
    for number in range(200):
        loop.submit(Request(number, prompt(3, number), 2 + number % 3, eos_token_ids=()))
        while len(loop._running) + len(loop._waiting) >= 4 or (number % 100 == 99 and not loop.idle):
            assert all(event.error is None for event in loop.step())
            for stored in [] if loop._batch is None else [loop._batch.forward.cache, loop._batch.generator.cache]:
                rows, _, slots, _ = stored.layers[0].keys.shape
                assert rows == len(loop._running) and (slots <= 32 or number < 6)
        if number % 100 == 99:
            assert loop._batch is None and not loop._live and not loop._waiting and not loop._cancelled
            del stored
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert alive[0] == alive[1]
    assert loop.statistics.cycles > 100 and not loop.statistics._events


def test_requests_from_other_threads():
    target, drafter = make_pair()
    loop, requests = ServingLoop(target, drafter, 3), some_requests(12)
    done = threading.Event()

    def send(share):
        for request in share:
            loop.submit(request)
            if request.id % 5 == 0:
                loop.cancel(request.id)

    def send_all():
        senders = [threading.Thread(target=send, args=(requests[start::3],)) for start in range(3)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        done.set()

    threading.Thread(target=send_all).start()
    events = {}
    while not done.is_set() or not loop.idle:
        for event in loop.step():
            events.setdefault(event.id, []).append(event)
    assert_all_greedy(target, requests, events)


def test_arrivals(monkeypatch):
    """On a clock of its own: every step takes a second, and nobody waits while something is running."""
    target, drafter = make_pair()
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    def step(self):
        now[0] += 1.0
        return ServingLoop_step(self)

    ServingLoop_step = ServingLoop.step
    monkeypatch.setattr(ServingLoop, "step", step)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, perf_counter=lambda: now[0])
    monkeypatch.setattr(serving, "time", clock)
    requests = [
        Request(number, prompt(3, number), 12, arrival, eos_token_ids=()) for number, arrival in enumerate([0, 1.5, 60])
    ]
    first, events = {}, {}
    for event in serve_batch(target, drafter, iter(requests)):
        first.setdefault(event.id, now[0])
        events.setdefault(event.id, []).append(event)
    assert first == {0: 1.0, 1: 3.0, 2: 61.0} and len(slept) == 1
    assert_all_greedy(target, requests, events)


# ---- refusals ----


def test_refusals():
    target = copy.deepcopy(make_target())
    drafter = tiny_drafter(target)
    for max_rows in (0, True, 2.0):
        with pytest.raises(ValueError, match="`max_rows`"):
            ServingLoop(target, drafter, max_rows)
    with pytest.raises(ValueError, match="`arrival`"):
        Request(0, prompt(3), 5, arrival=float("nan"))
    loop = ServingLoop(target, drafter)
    loop.submit(Request(0, prompt(3), 5))
    with pytest.raises(ValueError, match="`id` 0"):
        loop.submit(Request(0, prompt(4), 5))
    target.generation_config.num_beams = 2
    with pytest.raises(ValueError, match="num_beams"):
        serve_batch(target, drafter, [])


def test_targets_whose_rows_cannot_join():
    target = tiny_target("gemma3")
    drafter = tiny_drafter(target)
    target.config.layer_types = ["chunked_attention", *target.config.layer_types[1:]]
    with pytest.raises(ValueError, match="chunked_attention"):
        ServingLoop(target, drafter)

    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=4, n_head=4, pad_token_id=PAD)
    with pytest.raises(ValueError, match="takes no `position_ids`"):
        ServingLoop(BloomForCausalLM(config).eval(), drafter)

    target = copy.deepcopy(make_target())
    drafter = tiny_drafter(target)
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        ServingLoop(target, drafter)
    ServingLoop(target, drafter, max_rows=1)


def test_profile_given_while_serving():
    """A schedule that needs a profile starts with the next round after there is one."""
    target, drafter = make_pair()
    drafter.load_profile = LoadProfile({1: 1.0})
    loop = ServingLoop(target, drafter)
    requests = [Request(number, prompt(4, number), 20, eos_token_ids=()) for number in range(3)]
    for request in requests:
        loop.submit(request)
    events = {request.id: [] for request in requests}
    for event in loop.step():
        events[event.id].append(event)
    assert loop._batch.generator.mode == "full" and loop.statistics.scheduled == loop.statistics.drafted
    drafter.load_profile = jagged_profile()
    for id, later in run(loop).items():
        events[id] += later
    assert loop.statistics.scheduled < loop.statistics.drafted
    assert_all_greedy(target, requests, events)
