"""Sequential temperature scaling: confidences that promise what the target will keep (arXiv 2607.05147, on calibration).

The scheduler multiplies confidences, c_1 ⋯ c_k, so that product is what must be right. Position by position, with the earlier
ones fixed, a temperature is chosen under which the product is best calibrated on held-out rollouts.
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


@dataclass(frozen=True)
class Calibration:
    """Temperatures and what they did to the prefix survival; the fields of SGLang's STS file.

    Args:
        temperatures (`list[float]` of length K): c_k = σ(logit_k / T_k).
        dataset (`str`): what they were fitted on.
        num_samples (`int`): blocks.
        ece_before, ece_after (`list[float]` of length K): expected calibration error of c_1 ⋯ c_k, on the same blocks.
    """

    temperatures: list[float]
    dataset: str
    num_samples: int
    ece_before: list[float]
    ece_after: list[float]

    def save(self, path: str | Path) -> None:
        """Writes SGLang's STS JSON."""
        write_text(Path(path), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads SGLang's STS JSON; fields other than the temperatures may be missing.

        Raises:
            ValueError: the file is no such JSON, or its temperatures are not positive numbers.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            temperatures = values["temperatures"]
            if not temperatures or not all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures):
                raise ValueError
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}: expected a JSON object with "temperatures", a list of positive numbers, one per draft position.'
            ) from error
        return cls(
            [float(t) for t in temperatures],
            str(values.get("dataset", "")),
            int(values.get("num_samples", 0)),
            values.get("ece_before", []),
            values.get("ece_after", []),
        )


def fit_temperatures(blocks: Sequence[Block], drafter: DSparkDraftModel, dataset: str = "") -> Calibration:
    """Chooses temperatures for a drafter; its configuration is left as it is.

    Args:
        blocks (sequence of [`Block`]): of rollouts with this drafter, see [`~hf_dspark.evaluation.recorded_blocks`].
        drafter ([`DSparkDraftModel`]): whose present temperatures are taken out of the recorded confidences first.
        dataset (`str`, *optional*): name of what the blocks were made on.

    Returns:
        [`Calibration`]: positions that no block reaches get the temperature of the one before.

    Raises:
        ValueError: the drafter has no confidence head, or there are no blocks.
    """
    if drafter.confidence_head is None:
        raise ValueError("this drafter has no confidence head, so there is nothing to calibrate.")
    blocks = [block for block in blocks if block.confidence]
    if not blocks:
        raise ValueError("no draft was recorded; let the target answer more, or longer.")
    count = drafter.config.num_draft_tokens
    present = drafter.config.confidence_temperatures or [1.0] * count
    temperatures: list[float] = []
    before: list[float] = []
    after: list[float] = []
    for position in range(count):
        long = [block for block in blocks if len(block.confidence) > position]
        if not long:
            temperatures.append(temperatures[-1])
            before.append(math.nan)
            after.append(math.nan)
            continue
        confidence = np.array([block.confidence[: position + 1] for block in long]).clip(1e-6, 1 - 1e-6)
        logits = np.log(confidence / (1 - confidence)) * np.array(present[: position + 1])
        kept = np.array([block.accepted > position for block in long], dtype=float)
        earlier = _sigmoid(logits[:, :-1] / np.array(temperatures)).prod(1)
        errors = [expected_calibration_error(earlier * _sigmoid(logits[:, -1] / t), kept) for t in _GRID]
        # Among equals the one closest to 1: bins make plateaus.
        best = min(range(len(_GRID)), key=lambda index: (errors[index], abs(math.log(_GRID[index]))))
        temperatures.append(round(float(_GRID[best]), 4))
        before.append(expected_calibration_error(confidence.prod(1), kept))
        after.append(errors[best])
    return Calibration(temperatures, dataset, len(blocks), before, after)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))
