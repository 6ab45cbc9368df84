"""What happened in a call of `generate`: tokens per round, acceptance per position, where the seconds went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PHASES = ("prefill", "draft", "head", "schedule", "verify", "rest")


@dataclass(frozen=True)
class Round:
    """What one forward of the target brought, for each of the N rows that still generated.

    Args:
        rows (`list[int]`): their numbers in the batch of the call.
        drafted (`list[list[int]]`): draft tokens that were verified; none in the prefill and in plain steps.
        accepted (`list[int]`): how many of them the target agreed with.
        committed (`list[list[int]]`): tokens the row has grown by: the accepted ones and the target's own, less what lies
            behind a stop. Without an end token the rows of a call run on until the last one stops, and what some of them had
            beyond that is cut off only then.
        confidence (`list[list[float]]`, *optional*): what the scheduler read, or with `scheduling="full"` would have read;
            `None` without a confidence head and in rounds without a draft.
        base (`list[list[int]]`, *optional*): likeliest tokens before the sequential head, for each token of `drafted`.
        log_odds (`list[list[float]]`, *optional*): log p/(1 − p) of the drafter's own probability p of each token of `drafted`,
            in greedy decoding; `None` in sampling and in rounds without a draft.
    """

    rows: list[int]
    drafted: list[list[int]]
    accepted: list[int]
    committed: list[list[int]]
    confidence: list[list[float]] | None = None
    base: list[list[int]] | None = None
    log_odds: list[list[float]] | None = None


class Statistics:
    """Counts of one `generate` call; a new one replaces it at every call.

    Args:
        num_draft_tokens (`int`): K, the longest draft.
        device (`torch.device`, *optional*): of the drafter. On a CUDA device phases are timed by events, because a call
            returns before its kernels have run.
        target_device (`torch.device`, *optional*): of the target; the drafter's when not given.

    Attributes:
        cycles (`int`): verification forwards, summed over rows.
        tokens (`int`): tokens committed by those forwards (the one that the prefill gives is not among them).
        drafts (`int`): forwards of the drafter, each for all rows.
        rounds (`int`): forwards of the target after the prefill, each for all rows.
        drafted (`int`): tokens the drafter had room for; behind the scheduled length it may not have gone to the last step.
        scheduled (`int`): of those, tokens the scheduler let through to verification.
        accepted (`int`): of those, tokens the target agreed with.
        scheduled_per_position (`list[int]`): K counts of scheduled tokens by position in the block.
        reached_per_position (`list[int]`): how often the target judged position k: all before it had been accepted.
        accepted_per_position (`list[int]`): how often it agreed.
        seconds (`dict[str, float]`): time in `prefill`, `draft` (drafter forward and its context), `head` (sequential stage),
            `schedule`, `verify` (target forward) and `rest`.
    """

    def __init__(self, num_draft_tokens: int, device: torch.device | None = None, target_device: torch.device | None = None):
        self.cycles = self.tokens = self.drafts = self.rounds = self.drafted = self.scheduled = self.accepted = 0
        self.scheduled_per_position = [0] * num_draft_tokens
        self.reached_per_position = [0] * num_draft_tokens
        self.accepted_per_position = [0] * num_draft_tokens
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._devices = dict.fromkeys(PHASES, device) | dict.fromkeys(("prefill", "verify"), target_device or device)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def tau(self) -> float:
        """τ: tokens per verification forward and row, the target's own token included; 0.0 before the first."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def verified(self) -> int:
        """Draft tokens the target judged: the scheduled ones."""
        return self.scheduled

    @property
    def rejected(self) -> int:
        """Verified draft tokens that were thrown away."""
        return self.scheduled - self.accepted

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(token k accepted | tokens before it accepted), `nan` where a position was never judged."""
        return [
            accepted / reached if reached else float("nan")
            for accepted, reached in zip(self.accepted_per_position, self.reached_per_position, strict=True)
        ]

    def count(self, scheduled: int, accepted: int, committed: int) -> None:
        """Adds one row's round.

        Args:
            scheduled (`int`): draft tokens verified.
            accepted (`int`): how many of them the target agreed with.
            committed (`int`): tokens the row has grown by.
        """
        self.cycles += 1
        self.tokens += committed
        self.scheduled += scheduled
        self.accepted += accepted
        for k in range(scheduled):
            self.scheduled_per_position[k] += 1
            if k <= accepted:
                self.reached_per_position[k] += 1
            if k < accepted:
                self.accepted_per_position[k] += 1

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent inside to a phase.

        Args:
            phase (`str`): a key of `seconds`.
        """
        device = self._devices[phase]
        if device is not None and device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(device))
            yield
            end.record(torch.cuda.current_stream(device))
            self._events.append((phase, start, end))
            return
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def spent(self, *phases: str) -> float:
        """Seconds of some phases so far; on a CUDA device it waits for what has been timed.

        Args:
            phases (`str`): names of phases.
        """
        for phase, start, end in self._events:
            end.synchronize()
            self.seconds[phase] += start.elapsed_time(end) / 1000  # from milliseconds
        self._events.clear()
        return sum(self.seconds[phase] for phase in phases)

    def close(self, seconds: float) -> None:
        """Ends the account of a call: what no phase claims is `rest`. May be called repeatedly.

        Args:
            seconds (`float`): that the call took in all.
        """
        self.spent()
        self.seconds["rest"] = 0.0
        self.seconds["rest"] = max(0.0, seconds - sum(self.seconds.values()))

    def to_dict(self) -> dict:
        """Everything above as plain numbers and lists, for JSON; `None` where nothing was judged."""
        return {
            "tau": self.tau,
            "verified": self.verified,
            "rejected": self.rejected,
            "conditional_acceptance": [None if rate != rate else rate for rate in self.conditional_acceptance],
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
        }

    def __repr__(self) -> str:
        total = sum(self.seconds.values()) or 1.0
        split = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in self.seconds.items() if seconds)
        return (
            f"Statistics(tau={self.tau:.2f}, tokens={self.tokens}, cycles={self.cycles}, drafted={self.drafted}, "
            f"verified={self.verified}, rejected={self.rejected}; {split or 'no time spent'})"
        )
