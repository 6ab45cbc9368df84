"""Whether drafting pays at all.

The scheduler can shorten a draft to nothing, but the draft itself has been paid for by then. So the loop keeps a running
account of what its drafted rounds cost, in seconds by the load profile, against those that plain steps would have taken to
bring the rows as far. When drafting loses, it pauses for a growing number of rounds and probes again. It also compares how many
tokens the confidences promised with how many were accepted, and discounts the next promises accordingly: a drafter on
unfamiliar text is often sure and wrong. The account only holds rounds that are over, so neither decision can depend on tokens
that are still to be drawn, and exactness is untouched.

In a server every token is worth the same, since whoever has finished makes place for another. In a batch that nobody joins it
is not: a step for the last row alone takes nearly as long as one for all, so a token counts for more the likelier its row is
to end last. There the seconds of plain steps are expected ones, over where the rows may end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .load_profile import LoadProfile
from .statistics import Statistics

_MEMORY = 0.9  # weight of the past per drafted round: an account of about ten rounds
_FIRST_VERDICT = 2  # drafted rounds before the first pause
_MANY_ROWS = 8  # of which one round is verdict enough
_FIRST_PAUSE = 4  # or as many rounds as there are rows: of many rows, a round tells more and costs more
_LONGEST_PAUSE = 64
_ANSWER = 200  # tokens after which answers are taken to end on their own, on the average
_HORIZON = 5 * _ANSWER  # tokens; few answers get beyond
_GOES_ON = (1 - 1 / _ANSWER) ** np.arange(_HORIZON + 1)  # chance that an answer has not ended so many tokens on


class Profitability:
    """Running comparison of drafted rounds with plain steps.

    Args:
        profile ([`LoadProfile`], *optional*): prices. Without one, or with a flat one, drafting is always taken to pay.
    """

    def __init__(self, profile: LoadProfile | None):
        self.profile = profile
        self._cost = self._worth = 0.0  # in plain steps
        self._promised = self._accepted = 0.0
        self._rounds = 0
        self._pause = 0
        self._next_pause = 0  # the first one again
        self._rows = 0  # requests when drafting paused

    def should_draft(self, rows: int) -> bool:
        """Whether to draft in the coming round of so many requests; counts the round."""
        if rows <= self._rows / 4:  # what has been found out is of other rounds
            self._pause = self._next_pause = self._rows = self._rounds = 0
            self._cost = self._worth = 0.0
        if self._pause:
            self._pause -= 1
            return False
        return True

    @property
    def discount(self) -> float:
        """Accepted tokens per promised one, at most 1; drifts back to 1 while nothing is verified."""
        return min(1.0, (self._accepted + 1) / (self._promised + 1))

    def record(
        self,
        rows: int,
        verified: int,
        accepted: int,
        committed: Sequence[int],
        promised: float,
        room: Sequence[int] | None = None,
    ) -> None:
        """Books a drafted round.

        Args:
            rows (`int`): requests in the batch.
            verified (`int`): draft tokens in its verification forward, over all rows.
            accepted (`int`): how many of them the target agreed with.
            committed (sequence of `int`s): tokens it brought each row that had not finished before, the only ones that plain
                decoding would serve; at least one such row.
            promised (`float`): accepted tokens that the discounted confidences let expect. So the discount settles half way, at
                the square root of what is kept of the promises: all the way was no faster on recorded drafts.
            room (sequence of `int`s, *optional*): tokens that each of those rows may still get, 0 where it has ended now, in a
                batch that nobody joins. Without it, others are taken to follow.
        """
        self._promised = _MEMORY * self._promised + promised
        self._accepted = _MEMORY * self._accepted + accepted
        if self.profile is None or self.profile.is_flat:
            return
        requests = max(self.profile.requests(), rows)
        load = requests / rows  # the other requests are taken to be like these rows
        seconds = self.profile.round_seconds(round(load * (rows + verified)), requests)
        step = self.profile.step_seconds(round(load * rows), requests)
        alone = self.profile.step_seconds(round(load), round(load))
        self._cost = _MEMORY * self._cost + seconds / step
        self._worth = _MEMORY * self._worth + _worth(rows, alone / step, committed, room)
        self._rounds += 1
        if verified and self._rounds < _FIRST_VERDICT and rows < _MANY_ROWS:
            return  # but a draft not worth verifying needs no second one to say so
        if self._worth < self._cost * (1 - 1e-9):  # sums of one value may differ in their last digits
            self._pause = self._next_pause or min(max(_FIRST_PAUSE, rows), _LONGEST_PAUSE)
            self._next_pause, self._rows = min(2 * self._pause, _LONGEST_PAUSE), rows
        else:
            self._next_pause = 0

    @staticmethod
    def acceptance_rates(statistics: Statistics) -> list[float]:
        """P(token k accepted | those before it were), from the rounds so far: a schedule for drafters without confidence.

        Starts at an optimistic 0.8, so that every position gets tried.
        """
        return [
            (accepted + 1.6) / (reached + 2)
            for accepted, reached in zip(statistics.accepted_per_position, statistics.reached_per_position, strict=True)
        ]


def _worth(rows: int, alone: float, committed: Sequence[int], room: Sequence[int] | None) -> float:
    """Plain steps of all rows that take as long as those that bring them as far.

    A step costs so much as such, and so much for each row in it, which a step of one row, `alone` of one of all, tells.
    """
    if room is None or rows == 1:
        return sum(committed) / len(committed)
    of_row = (1 - alone) / (rows - 1)
    grown, left = np.asarray(committed), np.minimum(room, _HORIZON)
    steps = _steps(grown, left) - _steps(np.zeros_like(grown), left)
    return (1 - len(grown) * of_row) * steps + of_row * sum(committed)


def _steps(grown: np.ndarray, left: np.ndarray) -> float:
    """Plain steps, as expected, until the last row has got its `grown` tokens and those behind them, `left` at most."""
    step = np.arange((grown + left).max())[:, None]
    goes_on = np.where(step < grown + left, _GOES_ON[(step - grown).clip(0, _HORIZON)], 0.0)  # (steps, rows)
    return (1 - (1 - goes_on).prod(axis=1)).sum()
