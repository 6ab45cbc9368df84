"""The stage: one thread that runs the models for all visitors at once.

Requests of one kind share a server-like loop, and so its forwards and its verification budget: one loop decodes plainly, one
as the scheduler likes, one verifies every drafted token. The loops take turns, and whichever has used less time goes next. So
the two columns of a race have had the machine for the same time at any moment, whoever else is there.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from pair import Pair
from torch import Tensor
from visitors import Refused

from hf_dspark import Event, Request, ServingLoop

PLACES = 8  # visitors at once, and so rows in a forward; others wait in line
LOOPS = ("plain", "scheduled", "full")
_FULL = "full", lambda _: None  # scheduling, and a listener: with one, events say all that the page of a block shows


@dataclass(frozen=True)
class Turn:
    """What one step of a loop brought for one visitor.

    Args:
        loop (`str`): one of `LOOPS`.
        events (list of [`Event`]s): one for each forward of the target.
        seconds (`float`): time that the step took.
    """

    loop: str
    events: list[Event]
    seconds: float


class Stage:
    """Serves visitors.

    Args:
        pair ([`Pair`]): the models. Nothing else may run them while there is a visitor.

    Attributes:
        pair ([`Pair`]): as given.
        loops (`dict[str, ServingLoop]`): by name.
    """

    def __init__(self, pair: Pair):
        self.pair = pair
        pair.drafter.load_profile = pair.profile
        self.loops = {name: ServingLoop(pair.target, None if name == "plain" else pair.drafter, PLACES) for name in LOOPS}
        self._clocks = dict.fromkeys(self.loops, 0.0)
        self._told: dict[object, SimpleQueue[Turn]] = {}
        self._thread = ThreadPoolExecutor(1)
        self._door = threading.Lock()
        self._stepping = False

    def serve(self, loops: Sequence[str], prompt: Tensor, **options: Any) -> Iterator[list[Turn]]:
        """Has a prompt answered, and yields what has happened since the last time. To close this cancels the rest.

        Args:
            loops (sequence of `str`): names of the loops that each give an answer.
            prompt (`torch.LongTensor` of shape `(P,)`): token ids.
            options: further fields of [`Request`].

        Raises:
            Refused: an answer failed.
        """
        visit, told = object(), SimpleQueue()
        self._told[visit] = told
        going = set(loops)
        try:
            for name in loops:
                self.loops[name].submit(Request(visit, prompt, **options))
            self._go_on()
            while going:
                turns = [told.get()]
                while not told.empty():
                    turns.append(told.get())
                for turn in turns:
                    if turn.events[-1].error:
                        raise Refused(f"This run has failed: {turn.events[-1].error}")
                    if turn.events[-1].finished:
                        going.discard(turn.loop)
                yield turns
        finally:
            for name in going:
                self.loops[name].cancel(visit)
            del self._told[visit]

    def call(self, function: Callable, *args: Any) -> Any:
        """Result of a function that runs the models or draws random numbers, which then nobody else does."""
        return self._thread.submit(function, *args).result()

    def _go_on(self) -> None:
        with self._door:
            if not self._stepping:
                self._stepping = True
                self._thread.submit(self._step)

    def _step(self) -> None:
        """Gives a loop its turn, and queues the next one: behind any call that waits."""
        busy = [name for name, loop in self.loops.items() if not loop.idle]
        if busy:
            self._run(min(busy, key=self._clocks.__getitem__), busy)
        with self._door:
            self._stepping = not all(loop.idle for loop in self.loops.values())
            if self._stepping:
                self._thread.submit(self._step)

    def _run(self, name: str, busy: Sequence[str]) -> None:
        self.pair.drafter.scheduling, self.pair.drafter.on_round = _FULL if name == "full" else (None, None)
        started, events = time.perf_counter(), defaultdict(list)
        for event in self.loops[name].step():
            events[event.id].append(event)
        seconds = time.perf_counter() - started
        self._clocks[name] += seconds
        for other in self.loops.keys() - set(busy):  # who had nothing to do has not saved up time
            self._clocks[other] = self._clocks[name]
        for visit, its_events in events.items():
            if (told := self._told.get(visit)) is not None:
                told.put(Turn(name, its_events, seconds))
