"""Calibration: confidences that promise what the target will keep (arXiv 2607.05147, on calibration).

The scheduler multiplies confidences, c_1 ⋯ c_k, so that product is what must be right, on rollouts that were not trained on.
The paper's sequential temperature scaling goes from position to position and, with the earlier ones fixed, chooses the
temperature under which the product is best calibrated. A temperature alone leaves 1/2 where it is; with an offset beside it,
both by maximum likelihood, a confidence that was trained on how far two laws overlap can also be read as the chance that
their first choices agree, which is what greedy decoding asks. There the drafter's own probability of the token it chose is a
third regressor, and tells more than the confidence does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..formats.files import write_text
from ..modeling_dspark import DSparkDraftModel
from .reliability import Block, expected_calibration_error

_GRID = np.geomspace(0.25, 4.0, 49)  # symmetric about 1 on a logarithmic scale, which it contains
_SLOPES = (0.1, 10.0)  # of 1 / temperature; beyond, a few blocks have been over-fitted


@dataclass(frozen=True)
class Calibration:
    """Temperatures and what they did to the prefix survival; without offsets, the fields of SGLang's STS file.

    Args:
        temperatures (`list[float]` of length K): c_k = σ(logit_k / temperature_k + offset_k).
        dataset (`str`): what they were fitted on.
        num_samples (`int`): blocks.
        ece_before, ece_after (`list[float | None]` of length K): expected calibration error of c_1 ⋯ c_k, on the same blocks;
            `None` where no block is that long.
        offsets (`list[float]` of length K, *optional*): 0 when not given.
        log_odds_weights (`list[float]` of length K, *optional*): of o_k, the log-odds the drafter gives its own token, in
            greedy decoding; 0 when not given.
    """

    temperatures: list[float]
    dataset: str
    num_samples: int
    ece_before: list[float | None]
    ece_after: list[float | None]
    offsets: list[float] | None = None
    log_odds_weights: list[float] | None = None

    def save(self, path: str | Path) -> None:
        """Writes SGLang's STS JSON.

        Args:
            path (`str` or `Path`): file to write; an existing one is replaced.

        Raises:
            ValueError: there are offsets, which that file cannot say.
        """
        values = asdict(self)
        if [values.pop(name) for name in ("offsets", "log_odds_weights")] != [None, None]:
            raise ValueError("an STS file holds temperatures alone; fit without offsets.")
        write_text(Path(path), json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads SGLang's STS JSON; fields other than the temperatures may be missing.

        Args:
            path (`str` or `Path`): file to read.

        Raises:
            ValueError: the file is no such JSON, or its temperatures are not positive numbers.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            temperatures = values["temperatures"]
            if not temperatures or not all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures):
                raise ValueError
            count = int(values.get("num_samples", 0))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}: expected a JSON object with "temperatures", a list of positive numbers, one per draft position.'
            ) from error
        return cls(
            [float(t) for t in temperatures],
            str(values.get("dataset", "")),
            count,
            values.get("ece_before", []),
            values.get("ece_after", []),
        )


def set_calibration(
    drafter: DSparkDraftModel, sampled: Calibration | None = None, greedy: Calibration | None = None, keep: bool = False
) -> None:
    """Replaces a drafter's calibration; without values for a way of decoding, its confidences are raw again.

    Args:
        drafter ([`DSparkDraftModel`]): its configuration is changed, and saved with it.
        sampled ([`Calibration`], *optional*): for sampling, and for greedy decoding too unless that has its own.
        greedy ([`Calibration`], *optional*): for greedy decoding.
        keep (`bool`, defaults to `False`): leave a way of decoding without values as it is.

    Raises:
        ValueError: there is not one value for each draft position, or sampling is to weigh log-odds.
    """
    count = drafter.config.num_draft_tokens
    if sampled is not None and sampled.log_odds_weights is not None:
        raise ValueError(
            "a calibration with `log_odds_weights` is for greedy decoding; fit that of sampling to sampled blocks."
        )
    for values in (sampled, greedy):
        if values is not None and len(values.temperatures) != count:
            raise ValueError(f"a calibration of this drafter needs {count} temperatures, got {len(values.temperatures)}.")
    for prefix, values in (("", sampled), ("greedy_", greedy)):
        if values is not None or not keep:
            setattr(drafter.config, f"{prefix}confidence_temperatures", None if values is None else values.temperatures)
            setattr(drafter.config, f"{prefix}confidence_offsets", None if values is None else values.offsets)
    if greedy is not None or not keep:
        drafter.config.greedy_confidence_log_odds_weights = None if greedy is None else greedy.log_odds_weights


def fit_calibration(blocks: Sequence[Block], drafter: DSparkDraftModel, dataset: str = "", offsets: bool = True) -> Calibration:
    """Fits temperatures, offsets and, for greedy drafts, weights of their log-odds to what became of them.

    Args:
        blocks (sequence of [`Block`]): of rollouts with this drafter, uncalibrated, see
            [`~hf_dspark.evaluation.recorded_blocks`]; all greedy or all sampled, since the two keep different drafts.
        drafter ([`DSparkDraftModel`]): whose blocks they are; its configuration is left as it is.
        dataset (`str`, *optional*): name of what the blocks were made on.
        offsets (`bool`, defaults to `True`): fit all of them by maximum likelihood on the blocks that reach a position; else
            temperatures alone, by the paper's search.

    Returns:
        [`Calibration`]: positions that no block reaches get the values of the one before.

    Raises:
        ValueError: the drafter has no confidence head or is calibrated already, or there are no blocks.
    """
    if drafter.confidence_head is None:
        raise ValueError("this drafter has no confidence head, so there is nothing to calibrate.")
    if drafter.config.is_calibrated:
        raise ValueError(
            "this drafter is calibrated already, and the blocks are not those of its raw confidences: clear that with "
            "`set_calibration(drafter)` and roll out again."
        )
    blocks = [block for block in blocks if block.confidence]
    if not blocks:
        raise ValueError("no draft was recorded; let the target answer more, or longer.")
    weighs = offsets and all(len(block.log_odds) == len(block.confidence) for block in blocks)
    found: list[tuple[float, float, float]] = []  # slope, which is 1 / temperature, offset, weight of the log-odds
    before: list[float | None] = []
    after: list[float | None] = []
    for position in range(drafter.config.num_draft_tokens):
        long = [block for block in blocks if len(block.confidence) > position]
        if not long:
            found.append(found[-1])
            before.append(None)
            after.append(None)
            continue
        confidence = np.array([block.confidence[: position + 1] for block in long]).clip(1e-6, 1 - 1e-6)
        logits = np.log(confidence / (1 - confidence))
        log_odds = np.array([block.log_odds[: position + 1] for block in long]) if weighs else np.zeros_like(logits)
        accepted = np.array([block.accepted for block in long])
        kept = (accepted > position).astype(float)
        earlier = np.ones(len(long))
        for place, (slope, offset, weight) in enumerate(found):
            earlier *= _sigmoid(slope * logits[:, place] + offset + weight * log_odds[:, place])
        if offsets:
            reached = accepted >= position
            regressors = logits[reached, -1], log_odds[reached, -1]
            found.append(_logistic_regression(*regressors, kept[reached]) if reached.any() else found[-1])
        else:
            errors = [expected_calibration_error(earlier * _sigmoid(logits[:, -1] / t), kept) for t in _GRID]
            # Among equals the one closest to 1: bins make plateaus.
            best = min(range(len(_GRID)), key=lambda index: (errors[index], abs(math.log(_GRID[index]))))
            found.append((1 / float(_GRID[best]), 0.0, 0.0))
        slope, offset, weight = found[-1]
        before.append(expected_calibration_error(confidence.prod(1), kept))
        promised = earlier * _sigmoid(slope * logits[:, -1] + offset + weight * log_odds[:, -1])
        after.append(expected_calibration_error(promised, kept))
    return Calibration(
        [round(1 / slope, 4) for slope, _, _ in found],
        dataset,
        len(blocks),
        before,
        after,
        [round(offset, 4) for _, offset, _ in found] if offsets else None,
        [round(weight, 4) for _, _, weight in found] if weighs else None,
    )


def _logistic_regression(logits: np.ndarray, log_odds: np.ndarray, kept: np.ndarray) -> tuple[float, float, float]:
    """Slope, offset, weight of σ(slope · logit + offset + weight · log_odds) by maximum likelihood; weak belief in 1, 0, 0."""
    from scipy.optimize import minimize

    def cost(values: np.ndarray) -> float:
        z = values[0] * logits + values[1] + values[2] * log_odds
        # All alike, or a handful of blocks, must not run off to infinity.
        prior = (values[0] - 1) ** 2 + values[1] ** 2 + values[2] ** 2
        return float((np.logaddexp(0, z) - kept * z).sum() + prior)

    bounds = (_SLOPES, (None, None), (None, None))
    slope, offset, weight = minimize(cost, (1.0, 0.0, 0.0), method="L-BFGS-B", bounds=bounds).x
    return float(slope), float(offset), float(weight)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
