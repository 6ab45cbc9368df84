"""Whether drafting pays at all.

The scheduler can shorten a draft to nothing, but the draft itself has been paid for by then. So the loop keeps a running
account of what its drafted rounds really brought, tokens committed against seconds by the load profile, and compares it with
plain steps. When drafting loses, it pauses for a growing number of rounds and probes again. It also compares how many tokens
the confidences promised with how many were accepted, and discounts the next promises accordingly: a drafter on unfamiliar
text is often sure and wrong. The account only holds rounds that are over, so neither decision can depend on tokens that are
still to be drawn, and exactness is untouched.
"""

from __future__ import annotations

from .load_profile import LoadProfile
from .statistics import Statistics

_MEMORY = 0.9  # weight of the past per drafted round: an account of about ten rounds
_FIRST_VERDICT = 2  # drafted rounds before the first pause
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 64


class Profitability:
    """Running comparison of drafted rounds with plain steps.

    Args:
        profile ([`LoadProfile`], *optional*): prices. Without one, or with a flat one, drafting is always taken to pay.
    """

    def __init__(self, profile: LoadProfile | None):
        self.profile = profile
        self._tokens = self._seconds = self._plain_tokens = 0.0
        self._promised = self._accepted = 0.0
        self._rounds = 0
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def should_draft(self) -> bool:
        """Whether to draft in the coming round; counts the round."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    @property
    def discount(self) -> float:
        """Accepted tokens per promised one, at most 1; drifts back to 1 while nothing is verified."""
        return min(1.0, (self._accepted + 1) / (self._promised + 1))

    def record(self, rows: int, going: int, verified: int, accepted: int, committed: int, promised: float) -> None:
        """Books a drafted round.

        Args:
            rows (`int`): requests in the batch.
            going (`int`): those of them that had not finished before, the only ones that plain decoding would serve.
            verified (`int`): draft tokens in its verification forward, over all rows.
            accepted (`int`): how many of them the target agreed with.
            committed (`int`): tokens it brought, over all rows.
            promised (`float`): accepted tokens that the discounted confidences let expect. So the discount settles half way, at
                the square root of what is kept of the promises: all the way was no faster on recorded drafts.
        """
        self._promised = _MEMORY * self._promised + promised
        self._accepted = _MEMORY * self._accepted + accepted
        if self.profile is None or self.profile.is_flat:
            return
        requests = max(self.profile.requests(), rows)
        load = requests / rows  # the other requests are taken to be like these rows
        seconds = self.profile.round_seconds(round(load * (rows + verified)), requests)
        plain = self.profile.step_seconds(round(load * rows), requests)
        self._tokens = _MEMORY * self._tokens + committed
        self._seconds = _MEMORY * self._seconds + seconds
        # What plain decoding would have brought in the same time.
        self._plain_tokens = _MEMORY * self._plain_tokens + going * seconds / plain
        self._rounds += 1
        if verified and self._rounds < _FIRST_VERDICT:  # a draft not worth verifying needs no second one to say so
            return
        if self._tokens < self._plain_tokens:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        else:
            self._next_pause = _FIRST_PAUSE

    @staticmethod
    def acceptance_rates(statistics: Statistics) -> list[float]:
        """P(token k accepted | those before it were), from the rounds so far: a schedule for drafters without confidence.

        Starts at an optimistic 0.8, so that every position gets tried.
        """
        return [
            (accepted + 1.6) / (reached + 2)
            for accepted, reached in zip(statistics.accepted_per_position, statistics.reached_per_position, strict=True)
        ]
