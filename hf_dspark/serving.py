"""A server-like loop: requests arrive, join the running batch, and leave it when they are done.

Speculation and load meet here. All requests in the batch share one draft forward, one verification budget, which the load
profile sets for the number of rows at hand, and one target forward. A new request is prefilled alone; its keys and values
become a further row of the batch, which needs no realignment, as every token sits at the slot of its own position. What
happens in a round is the code that `generate` runs (`batch.py`), and how a request is decoded is what
`target.generate(...)` would have prepared for it alone, so its answer has the target's own law whoever else is served.

This is not a network server. For one, serve the same checkpoint with vLLM or SGLang.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .batch import Batch, Outcome
from .candidate_generator import DSparkCandidateGenerator
from .decoding import refuse_changing_rope, refuse_inexact, warn_of_a_drafter_left_behind
from .modeling_dspark import DSparkDraftModel
from .processing import GreedyLaw, RowProcessors
from .rows import Rows
from .statistics import Statistics
from .target import TargetForward, ragged_mask, refuse_unplaced_rows


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how to answer it. What is not said here comes from `target.generation_config`.

    Args:
        id (`Hashable`): names the request in its events; no two requests that are waiting or running may share one.
        input_ids (`torch.LongTensor` of shape `(P,)`): the prompt, at least one token, without padding.
        max_new_tokens (`int`): longest answer, in tokens, at least 1.
        arrival (`float`, defaults to 0.0): seconds after the start at which [`serve_batch`] submits it.
        do_sample (`bool`, defaults to `False`): sample, or take the best token each time.
        temperature (`float`, defaults to 1.0): divides the logits; only read when sampling, as the next two.
        top_k (`int`, *optional*): sample from this many best tokens; from all when `None` or 0.
        top_p (`float`, defaults to 1.0): sample from the best tokens that hold this much probability.
        eos_token_ids (sequence of `int`s, *optional*): tokens that end the answer; those of `target.generation_config` when
            not given, none when empty.

    Raises:
        ValueError: `arrival` is negative or not finite. All else is checked when the request is served, and ends it with an
            error of its own.
    """

    id: Hashable
    input_ids: Tensor
    max_new_tokens: int
    arrival: float = 0.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    eos_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise ValueError(f"`arrival` must be a number of seconds from 0 on, got {self.arrival!r}. Leave it out for now.")


@dataclass(frozen=True)
class Event:
    """What one forward of the target brought for one request. The tokens of all its events are its answer.

    Args:
        id (`Hashable`): of the request.
        tokens (`list[int]`): committed by this forward: accepted draft tokens and the target's own; an end token is kept.
        drafted (`list[int]`): draft tokens that were verified; none in the prefill and in plain steps.
        accepted (`int`): how many of them the target agreed with.
        confidence (`list[float]`, *optional*): what the scheduler read for this request; `None` where it read nothing.
        base (`list[int]`, *optional*): likeliest tokens before the sequential head, for each token of `drafted`; only for a
            drafter with a listener (`on_round`).
        finished (`str`, *optional*): `None` while the request goes on; in its last event `"stop"` (end token), `"length"`
            (`max_new_tokens` reached), `"cancelled"` or `"error"`.
        error (`str`, *optional*): with `finished="error"`, what was wrong.
    """

    id: Hashable
    tokens: list[int]
    drafted: list[int]
    accepted: int
    confidence: list[float] | None = None
    base: list[int] | None = None
    finished: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Row:
    """A request that is being answered."""

    request: Request
    text: Rows  # of one row
    processors: RowProcessors
    law: RowProcessors  # the same for rounds in which another row samples: a greedy row's law is all on its best token

    @property
    def ids(self) -> Tensor:
        return self.text.sequences[0]

    @property
    def settings(self) -> tuple:
        request = self.request
        return request.do_sample, request.temperature, request.top_k or 0, request.top_p


class _NoDrafts:
    """Stands where the candidate generator stands, in a loop without a drafter: every round is a plain step."""

    captured_states: list[int] = []

    def __init__(self, processors: RowProcessors, do_sample: bool, statistics: Statistics):
        self.processors, self.do_sample, self.statistics = processors, do_sample, statistics

    def decode_with(self, processors: RowProcessors, do_sample: bool) -> None:
        self.processors, self.do_sample = processors, do_sample

    def book(self, scheduled: list[int], accepted: list[int], committed: list[int | None]) -> None:
        self.statistics.rounds += 1
        for new in committed:
            if new is not None:
                self.statistics.count(0, 0, new)

    def _nothing(self, *_: Any) -> None:
        """There is no context to keep, and never a block."""

    start = observe = settle = select_rows = join = propose = _nothing


class ServingLoop:
    """Serves requests that come and go, up to `max_rows` at a time, in order of submission.

    `submit` and `cancel` may be called from any thread. One thread calls `step`, over and over, and hands the events on:

    ```python
    loop = ServingLoop(target, drafter)
    loop.submit(Request("a", input_ids, max_new_tokens=64))
    while not loop.idle:
        for event in loop.step():
            ...
    ```

    How drafts are scheduled is set on the drafter (`scheduling`, `load_profile`), as for `generate`. Its `on_round` listener
    is not called: the events say the same.

    Args:
        target ([`~transformers.PreTrainedModel`]): a decoder-only model, in evaluation mode.
        drafter ([`DSparkDraftModel`] or `None`): made for it; with `None` every token is decoded plainly.
        max_rows (`int`, defaults to 16): most requests in one forward; others wait.

    Attributes:
        statistics ([`Statistics`]): counts and seconds of all steps so far, `rest` being what no phase claims.

    Raises:
        ValueError: `max_rows` is not a positive integer; the pair does not belong together; the target keeps a recurrent
            state, or its `generation_config` asks for something that no drafter can assist; or, for more than one row,
            its forward takes no `position_ids`, or its attention implementation or one of its layer types cannot mask rows
            of different lengths.
    """

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel | None, max_rows: int = 16):
        if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
            raise ValueError(f"`max_rows` must be an integer of at least 1, got {max_rows!r}. Leave it out for 16.")
        if drafter is not None:
            drafter.bind(target)
            warn_of_a_drafter_left_behind(drafter, target)
        self.target, self.drafter, self.max_rows = target, drafter, max_rows
        longest = 0 if drafter is None else drafter.config.num_draft_tokens
        self.statistics = Statistics(longest, (drafter or target).device, target.device)
        if max_rows > 1:
            _refuse_what_cannot_join(target)
        self._open(Request(None, torch.zeros(1, dtype=torch.long), max_new_tokens=1))  # raises what every request would
        self._lock = threading.Lock()  # of the three collections that other threads reach
        self._waiting: deque[Request] = deque()
        self._live: dict[Hashable, None] = {}  # in the order in which they came
        self._cancelled: set[Hashable] = set()
        self._events: list[Event] = []  # not returned yet; at the beginning of a step, those of one that was interrupted
        self._stepping = threading.Lock()
        self._running: list[_Row] = []
        self._batch: Batch | None = None  # its rows are those of `_running`
        self._seconds = 0.0

    # ---- from any thread ----

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue; it is looked at in one of the coming steps.

        Args:
            request ([`Request`]): what to answer.

        Raises:
            ValueError: a request of the same id is waiting or running; their events could not be told apart.
        """
        with self._lock:
            if request.id in self._live:
                raise ValueError(f"`id` {request.id!r} belongs to a request that is still being served. Give another.")
            self._live[request.id] = None
            self._waiting.append(request)

    def cancel(self, id: Hashable) -> bool:
        """Ends a request before the next round, with an event that says so.

        Args:
            id (`Hashable`): of the request.

        Returns:
            `bool`: whether there was such a request. One that ends in the step going on keeps its own last event.
        """
        with self._lock:
            if id in self._live:
                self._cancelled.add(id)
            return id in self._live

    @property
    def idle(self) -> bool:
        """`bool`: nothing is waiting or running."""
        with self._lock:
            return not (self._live or self._events)

    # ---- the loop ----

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Drops what was cancelled, admits what waits while there are rows, and runs one round for all rows.

        Returns:
            list of [`Event`]s: one per request and forward, so two for a request that has just been admitted. A request that
            fails has one with `finished="error"`; where a forward that all rows share fails, every running request has. After
            an interrupt, which is passed on, the next call begins with the events that could not be returned.
        """
        with self._stepping:
            if self.drafter is not None:
                self.drafter.bind(self.target)  # it may have helped another one meanwhile
            started, events = time.perf_counter(), self._events
            try:
                self._drop_cancelled(events)
                self._admit(events)
                if self._running:
                    self._round(events)
            except BaseException as error:
                self._running, self._batch = [], None
                with self._lock:
                    waiting = {request.id for request in self._waiting}
                    lost = [id for id in self._live if id not in waiting]
                events += [self._failure(id, error) for id in lost]
                if not isinstance(error, Exception):  # Ctrl-C in a notebook, say
                    raise
            self._seconds += time.perf_counter() - started
            self.statistics.close(self._seconds)
            self._events = []
        return events

    def _drop_cancelled(self, events: list[Event]) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            gone = [request for request in self._waiting if request.id in cancelled]
            self._waiting = deque(request for request in self._waiting if request.id not in cancelled)
        events += [self._end(request.id, "cancelled") for request in gone]
        stays = [row.request.id not in cancelled for row in self._running]
        events += [self._end(row.request.id, "cancelled") for row, stay in zip(self._running, stays, strict=True) if not stay]
        self._keep([place for place, stay in enumerate(stays) if stay])

    def _admit(self, events: list[Event]) -> None:
        while len(self._running) < self.max_rows:
            with self._lock:
                if not self._waiting:
                    return
                request = self._waiting.popleft()
            try:
                with self.statistics.timed("prefill"):
                    row, batch, outcome = self._prefill(request)
            except Exception as error:
                events.append(self._failure(request.id, error))
                continue
            events.append(self._event(row, outcome, 0, 1))
            if row.text.active:
                self._join(row, batch)

    def _prefill(self, request: Request) -> tuple[_Row, Batch, Outcome]:
        """Runs the prompt of a request alone and commits its first token."""
        self._check(request)
        row, batch, input_ids = self._open(request)
        outcome = batch.prefill(input_ids)
        if outcome.faulty[0]:
            raise ValueError(_no_choice(row))
        row.text.commit(outcome.candidates, outcome.accepted, outcome.following, [0])
        if row.text.active:
            batch.generator.settle([row.ids], [len(row.ids) - 1])
        return row, batch, outcome

    def _check(self, request: Request) -> None:
        """Raises ValueError for what the target itself would stumble over, or answer with nonsense."""
        ids, config = request.input_ids, self.target.config.get_text_config(decoder=True)
        if not isinstance(ids, Tensor) or ids.dtype != torch.long or ids.ndim != 1 or len(ids) == 0:
            shape = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
            raise ValueError(f"`input_ids` must be a LongTensor of shape (P,) with P > 0, got {shape}. Pass one prompt.")
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= config.vocab_size:
            raise ValueError(
                f"`input_ids` must be tokens in 0 … {config.vocab_size - 1}, got {lowest if lowest < 0 else highest}. Use the "
                "target's tokenizer."
            )
        new = request.max_new_tokens
        if not isinstance(new, int) or isinstance(new, bool) or new < 1:
            raise ValueError(f"`max_new_tokens` must be an integer of at least 1, got {new!r}. Ask for a token.")
        room = getattr(config, "max_position_embeddings", None)  # some position encodings know no limit
        if room is not None and len(ids) + new > room:
            raise ValueError(
                f"`input_ids` and `max_new_tokens` must fit the target's max_position_embeddings={room} together, got "
                f"{len(ids)} + {new}. Shorten either."
            )
        # A forward is as long as its longest request.
        refuse_changing_rope(self.target, len(ids) if self.max_rows == 1 else 0, len(ids) + new)

    def _open(self, request: Request) -> tuple[_Row, Batch, Tensor]:
        """A row for a request, a batch for it alone, and its prompt `(1, P)`."""
        input_ids, processors, criteria, config, model_kwargs = _prepare(self.target, request)
        refuse_inexact(self.target, config, synced_gpus=False, cache=model_kwargs.get("cache"))
        if len(input_ids) != 1:
            raise ValueError(
                "`num_beams` and `num_return_sequences` of the target's `generation_config` must be 1 to serve requests, got a "
                f"product of {len(input_ids)}. Set both to 1."
            )
        laws = processors if request.do_sample else LogitsProcessorList([*processors, GreedyLaw()])
        rows = Rows(input_ids, criteria, config, None)
        row = _Row(request, rows, *(RowProcessors(those, 1, rows.end_tokens) for those in (processors, laws)))
        generator: Any
        if self.drafter is None:
            generator = _NoDrafts(row.processors, request.do_sample, self.statistics)
        else:
            self.drafter.statistics = self.statistics
            generator = DSparkCandidateGenerator(
                self.drafter, row.processors, request.do_sample, max_draft_tokens=config.num_assistant_tokens
            )
        forward = TargetForward(self.target, config, generator.captured_states, model_kwargs)
        return row, Batch(forward, generator, isolates_faults=True), input_ids

    def _join(self, row: _Row, batch: Batch) -> None:
        alike = next((other for other in self._running if other.settings == row.settings), None)
        if alike is not None and alike.law.scores_only and row.law.scores_only:  # one list: processed together
            row = _Row(row.request, row.text, alike.processors, alike.law)
        self._running.append(row)
        if self._batch is None:
            self._batch = batch
        else:
            self._batch.join(batch, max(len(other.ids) for other in self._running))

    def _round(self, events: list[Event]) -> None:
        rows, batch = self._running, self._batch
        sample = any(row.request.do_sample for row in rows)
        processors = RowProcessors.joined([row.law if sample else row.processors for row in rows])
        batch.generator.decode_with(processors, sample)
        limits = [max(0, row.text.room(0) - 1) for row in rows]  # less the target's own token
        outcome = batch.round([row.ids for row in rows], list(range(len(rows))), limits)

        committed: list[int | None] = []
        for place, row in enumerate(rows):
            if outcome.faulty[place]:
                committed.append(None)
                events.append(self._failure(row.request.id, ValueError(_no_choice(row))))
                continue
            own = slice(place, place + 1)
            committed += row.text.commit(outcome.candidates[own], outcome.accepted[own], outcome.following[own], [0])
            events.append(self._event(row, outcome, place, committed[-1]))
        batch.generator.book(outcome.lengths, outcome.accepted, committed)
        left = [place for place, row in enumerate(rows) if row.text.active and not outcome.faulty[place]]
        if left:
            batch.observe(outcome)
        self._keep(left)

    def _keep(self, places: list[int]) -> None:
        """Lets all rows go but those at the given places. Nothing is kept of an empty batch."""
        if len(places) < len(self._running):
            self._running = [self._running[place] for place in places]
            if places:
                self._batch.select_rows(places)
            else:
                self._batch = None

    # ---- events ----

    def _event(self, row: _Row, outcome: Outcome, place: int, new: int) -> Event:
        block, length = outcome.block, outcome.lengths[place]
        finished = row.text.finish_reason(0)
        if finished is not None:
            self._forget(row.request.id)
        return Event(
            row.request.id,
            tokens=row.ids[len(row.ids) - new :].tolist(),
            drafted=block.tokens[place, :length].tolist(),
            accepted=outcome.accepted[place],
            confidence=None if block.confidence is None else block.confidence[place].tolist(),
            base=None if block.base_tokens is None else block.base_tokens[place, :length].tolist(),
            finished=finished,
        )

    def _failure(self, id: Hashable, error: BaseException) -> Event:
        return self._end(id, "error", str(error) or type(error).__name__)

    def _end(self, id: Hashable, finished: str, error: str | None = None) -> Event:
        self._forget(id)
        return Event(id, [], [], 0, finished=finished, error=error)

    def _forget(self, id: Hashable) -> None:
        with self._lock:
            self._live.pop(id, None)
            self._cancelled.discard(id)


def serve_batch(
    target: PreTrainedModel, drafter: DSparkDraftModel | None, requests: Iterable[Request], max_rows: int = 16
) -> Iterator[Event]:
    """Serves requests as they arrive, for load experiments and displays.

    Args:
        target, drafter, max_rows: as for [`ServingLoop`].
        requests (iterable of [`Request`]s): by rising `arrival`, which counts from the first event asked for; read one
            ahead. One that is read late is submitted at once.

    Yields:
        [`Event`]: as tokens are committed, until every request has had its last one.

    Raises:
        ValueError: as for [`ServingLoop`], and when a request has the id of one that is still being served.
    """
    return _serve(ServingLoop(target, drafter, max_rows), iter(requests))


def _serve(loop: ServingLoop, upcoming: Iterator[Request]) -> Iterator[Event]:
    started = time.monotonic()
    following = next(upcoming, None)
    while following is not None or not loop.idle:
        while following is not None and following.arrival <= time.monotonic() - started:
            loop.submit(following)
            following = next(upcoming, None)
        if loop.idle and following is not None:
            time.sleep(max(0.0, following.arrival - (time.monotonic() - started)))
        else:
            yield from loop.step()


def _refuse_what_cannot_join(target: PreTrainedModel) -> None:
    """Raises ValueError where rows at different positions cannot share a forward of this target."""
    instead = "serve one at a time with `max_rows=1`"
    refuse_unplaced_rows(target, instead)
    slots = torch.zeros(2, 2, dtype=torch.long, device=target.device)  # of two rows with a draft token each
    ragged_mask(target, slots, slots[..., None] == 0, instead)


def _prepare(
    target: PreTrainedModel, request: Request
) -> tuple[Tensor, LogitsProcessorList, StoppingCriteriaList, GenerationConfig, dict[str, Any]]:
    """Everything `target.generate` prepares for a request before it decodes: prompt `(1, P)`, processors, and so on."""
    options: dict[str, Any] = {"do_sample": request.do_sample}
    if request.do_sample:
        options |= {"temperature": request.temperature, "top_k": request.top_k or 0, "top_p": request.top_p}
    if request.eos_token_ids is not None:
        options["eos_token_id"] = list(request.eos_token_ids) or None
    input_ids = request.input_ids[None].to(target.device)
    prepared: Any = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=request.max_new_tokens,
        return_dict_in_generate=False,
        custom_generate=_as_prepared,
        **options,
    )
    return prepared


def _as_prepared(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> tuple:
    return input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs


def _no_choice(row: _Row) -> str:
    place = len(row.ids) - row.text.prompt_length
    return (
        f"the target's scores behind token {place} of the answer must hold a finite best one, got NaN, infinity or nothing but "
        "banned tokens. Load the target in a wider dtype, or relax what bans tokens in its `generation_config`."
    )
