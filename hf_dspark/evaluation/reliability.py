"""What confidences are worth: how often what they promise comes true, and how well they tell good drafts from bad ones.

Everything here works on [`Block`]s, the drafts of real rollouts and what the target made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..modeling_dspark import DSparkDraftModel
from ..statistics import Round

THRESHOLDS = tuple(float(value) for value in np.arange(20) / 20)


@dataclass(frozen=True)
class Block:
    """One draft that was verified to its end.

    Args:
        confidence (`list[float]`): c_k of each draft token, after calibration; empty without a confidence head.
        drafted (`int`): draft tokens.
        accepted (`int`): how many of them the target agreed with.
        log_odds (`list[float]`, *optional*): the log-odds that the drafter gives each draft token; empty in sampling.
    """

    confidence: list[float]
    drafted: int
    accepted: int
    log_odds: list[float] = field(default_factory=list)


@contextmanager
def verified_to_the_end(drafter: DSparkDraftModel, listener: Callable[[Round], None] | None = None) -> Iterator[None]:
    """Within this context every draft is verified to its end, whatever the scheduler would have picked.

    Args:
        drafter ([`DSparkDraftModel`]): its `scheduling` and `on_round` are put back afterwards.
        listener (callable, *optional*): hears of every round; the drafter's own if not given.
    """
    before = drafter.scheduling, drafter.on_round
    drafter.scheduling, drafter.on_round = "full", listener or drafter.on_round
    try:
        yield
    finally:
        drafter.scheduling, drafter.on_round = before


@contextmanager
def recorded_blocks(drafter: DSparkDraftModel) -> Iterator[list[Block]]:
    """Within this context every draft is verified to its end, and entered in the list that the context gives.

    Args:
        drafter ([`DSparkDraftModel`]): its `scheduling` and `on_round` are put back afterwards.

    Yields:
        `list` of [`Block`]: empty at first.
    """
    blocks: list[Block] = []

    def record(one: Round) -> None:
        for place, drafted in enumerate(one.drafted):
            if drafted:
                # Behind a stop inside the draft nothing counts, whatever the target would have agreed with.
                accepted = min(one.accepted[place], len(one.committed[place]))
                judged = accepted if len(one.committed[place]) <= one.accepted[place] else len(drafted)
                confidence = [] if one.confidence is None else one.confidence[place][:judged]
                log_odds = [] if one.log_odds is None else one.log_odds[place][:judged]
                blocks.append(Block(confidence, judged, accepted, log_odds))

    with verified_to_the_end(drafter, record):
        yield blocks


def expected_calibration_error(promised: np.ndarray, kept: np.ndarray, bins: int = 15) -> float:
    """Mean distance between a promise and how often it is kept, over equally wide bins of the promise.

    Args:
        promised (`np.ndarray` of shape `(N,)`): probabilities.
        kept (`np.ndarray` of shape `(N,)`): outcomes, 0 or 1.
        bins (`int`, defaults to 15): number of bins.

    Returns:
        `float`: weighted by the bins' counts; `nan` without any.
    """
    if len(promised) == 0:
        return float("nan")
    place = np.minimum((promised * bins).astype(int), bins - 1)
    gaps = np.bincount(place, weights=promised - kept, minlength=bins)
    return float(np.abs(gaps).sum() / len(promised))


def error_by_chance(promised: np.ndarray, draws: int = 100) -> float:
    """The calibration error that right promises would show on the average: the fewer outcomes, the further a bin's mean is off.

    Args:
        promised (`np.ndarray` of shape `(N,)`): probabilities, taken to be right and independent.
        draws (`int`, defaults to 100): simulated sets of N outcomes, always the same.

    Returns:
        `float`: mean of [`expected_calibration_error`] over them.
    """
    dice = np.random.default_rng(0)
    return float(np.mean([expected_calibration_error(promised, dice.random(len(promised)) < promised) for _ in range(draws)]))


def survival_promises(blocks: Sequence[Block], position: int) -> tuple[np.ndarray, np.ndarray]:
    """a_k = ∏_{i≤k} c_i and whether the first k tokens survived, for the blocks that have as many; k counts from 1."""
    long = [block for block in blocks if len(block.confidence) >= position]
    promised = np.array([np.prod(block.confidence[:position]) for block in long])
    kept = np.array([block.accepted >= position for block in long], dtype=float)
    return promised, kept


def reliability(blocks: Sequence[Block], num_draft_tokens: int) -> list[dict[str, Any]]:
    """Quality of the confidences per draft position.

    Args:
        blocks (sequence of [`Block`]): of rollouts.
        num_draft_tokens (`int`): K.

    Returns:
        `list[dict]` of K: `position`, `blocks`, `survival` (share of blocks that survive to it), `promised` (mean a_k),
        `ece` and `brier` of the prefix survival a_k, `ece_by_chance` ([`error_by_chance`]), `auc` (ROC; `None` where all blocks
        end alike), and `conditional`, the acceptance at this position given that those before it were accepted (`None` where
        none were).
    """
    from sklearn.metrics import brier_score_loss, roc_auc_score

    rows = []
    for position in range(1, num_draft_tokens + 1):
        reached = [block for block in blocks if block.drafted >= position and block.accepted >= position - 1]
        row: dict[str, Any] = {
            "position": position,
            "conditional": sum(block.accepted >= position for block in reached) / len(reached) if reached else None,
        }
        promised, kept = survival_promises(blocks, position)
        row["blocks"] = len(promised)
        if len(promised):
            mixed = 0 < kept.mean() < 1
            row |= {
                "survival": float(kept.mean()),
                "promised": float(promised.mean()),
                "ece": expected_calibration_error(promised, kept),
                "ece_by_chance": error_by_chance(promised),
                "brier": float(brier_score_loss(kept, promised)),
                "auc": float(roc_auc_score(kept, promised)) if mixed else None,
            }
        rows.append(row)
    return rows


def threshold_sweep(blocks: Sequence[Block], thresholds: Sequence[float] = THRESHOLDS) -> list[dict[str, Any]]:
    """What static thresholds on each c_k would have verified and kept of the recorded drafts.

    The rollouts verified every draft to its end, so blocks start where those rounds ended, not where a shorter round would
    have.

    Args:
        blocks (sequence of [`Block`]): of rollouts; those without confidences are left out.
        thresholds (sequence of `float`): a draft ends before the first confidence below.

    Returns:
        `list[dict]`: `threshold`, `verified` and `accepted` (tokens per block), `acceptance` (accepted of verified; `None`
        where nothing is verified), `tau`.
    """
    rows = []
    known = [block for block in blocks if block.confidence]
    for threshold in thresholds if known else ():
        lengths = [
            next((place for place, c in enumerate(block.confidence) if c < threshold), len(block.confidence)) for block in known
        ]
        verified = sum(lengths)
        accepted = sum(min(length, block.accepted) for length, block in zip(lengths, known, strict=True))
        rows.append(
            {
                "threshold": threshold,
                "verified": verified / len(known),
                "accepted": accepted / len(known),
                "acceptance": accepted / verified if verified else None,
                "tau": 1 + accepted / len(known),
            }
        )
    return rows
