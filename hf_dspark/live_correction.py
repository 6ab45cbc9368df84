"""What the rounds themselves say about the cost of a forward: a load profile that breathes with the machine.

A profile is measured once, often on an idle machine. Then a neighbour starts, the processor grows warm, contexts get longer.
Every verified round is a measurement too: so many tokens took so many seconds. The measured curve keeps its stairs and gets a
factor for each of its sizes. What a round shows about its own size counts fully, for sizes close by nearly so, and for those
far away a part, because most disturbances slow down everything. Factors that nothing confirms fade back to 1, so that a size
which was dear for a while is tried again.

Plain steps, of one token per request, and forwards with drafts have factors of their own, and share that part. Attention runs
the two differently, which a curve measured with one row does not know, and whether to draft at all compares just these two.

Only rounds that are over are entered, so no decision can depend on a token that is still to be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_RATE = 0.15  # weight of a round: a memory of about seven
_SHARED = 0.3  # of what a round shows, for sizes far from its own
_FADE = 1 / 100  # per round
_LARGEST_SURPRISE = math.log(4)  # a hiccup of the machine is no new price


class LiveCorrection:
    """Running factors on a measured curve, and the running time of drafts.

    Args:
        sizes (sequence of N `int`s): batch tokens at which the curve was measured, rising.
        draft_seconds (`float`): where the drafting time starts.

    Attributes:
        draft_seconds (`float`): seconds of drafting in a round, as of late.
    """

    def __init__(self, sizes: Sequence[int], draft_seconds: float):
        self.draft_seconds = draft_seconds
        self._octaves = np.log2(np.asarray(sizes, dtype=float))
        self._logs = np.zeros((2, len(sizes)))  # of the factors: with drafts, and of plain steps

    def factor(self, batch_tokens: np.ndarray, requests: int) -> np.ndarray:
        """How many times the measured seconds a forward of so many tokens takes as of late, elementwise."""
        octaves = np.log2(np.maximum(batch_tokens, 1))
        drafted, plain = (np.interp(octaves, self._octaves, logs) for logs in self._logs)
        return np.exp(np.where(batch_tokens == requests, plain, drafted))

    def record_step(self, batch_tokens: int, requests: int, seconds: float, expected: float) -> None:
        """Enters a forward.

        Args:
            batch_tokens (`int`): tokens in it.
            requests (`int`): requests in it.
            seconds (`float`): what it took.
            expected (`float`): seconds by the curve as corrected so far.
        """
        surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, math.log(seconds / expected)))
        closeness = np.exp(-np.abs(self._octaves - math.log2(batch_tokens)))
        kind = int(batch_tokens == requests)
        self._logs[kind] += _RATE * surprise * (1 - _SHARED) * closeness
        self._logs += _RATE * surprise * _SHARED
        self._logs *= 1 - _FADE

    def record_draft(self, seconds: float) -> None:
        """Enters the drafting of a round."""
        if self.draft_seconds > 0:
            seconds = min(seconds, math.exp(_LARGEST_SURPRISE) * self.draft_seconds)
            seconds = self.draft_seconds + _RATE * (seconds - self.draft_seconds)
        self.draft_seconds = seconds
