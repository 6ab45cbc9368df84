"""One drafter from several: the mean of their weights.

Runs that went on from a common drafter end at different places of one valley, and the mean of their weights lies lower than
any of them (Wortsman et al., "Model soups", 2022). It takes no training, and costs nothing when drafting.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch

from ..configuration_dspark import CALIBRATION_FIELDS
from ..evaluation.calibration import set_calibration
from ..formats.own import DRAFTER_FIELDS
from ..modeling_dspark import DSparkDraftModel


@torch.no_grad()
def average_drafters(drafters: Sequence[DSparkDraftModel], weights: Sequence[float] | None = None) -> DSparkDraftModel:
    """Averages drafters that come from one: of several runs, or checkpoints of a run.

    Args:
        drafters (sequence of [`DSparkDraftModel`]): of the same shape and draft vocabulary; left as they are.
        weights (sequence of `float`, *optional*): of each; taken relative to their sum. Equal when not given.

    Returns:
        [`DSparkDraftModel`]: in float32 and evaluation mode, neither calibrated nor with a load profile.

    Raises:
        ValueError: there are less than two drafters, they differ in shape or draft vocabulary, or the weights do not fit.
    """
    if len(drafters) < 2:
        raise ValueError(f"an average takes at least two drafters, got {len(drafters)}.")
    weights = [1.0] * len(drafters) if weights is None else list(weights)
    if len(weights) != len(drafters) or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"`weights` must be {len(drafters)} positive numbers, one for each drafter, got {weights}.")
    first, *others = drafters
    for other in others:
        for name in sorted(DRAFTER_FIELDS - set(CALIBRATION_FIELDS)):
            values = getattr(first.config, name), getattr(other.config, name)
            if values[0] != values[1]:
                raise ValueError(f"drafters of one shape can be averaged; `{name}` of these is {values[0]} and {values[1]}.")
        mine, theirs = first.draft_token_ids, other.draft_token_ids
        if mine is not None and not torch.equal(mine, theirs):
            raise ValueError("drafters of one draft vocabulary can be averaged; these draft from different tokens.")
    mean = DSparkDraftModel(copy.deepcopy(first.config)).float().eval()
    set_calibration(mean)
    states, total = [drafter.state_dict() for drafter in drafters], sum(weights)
    for name, value in mean.state_dict().items():
        if value.is_floating_point():
            value.copy_(sum(weight * state[name].double() for weight, state in zip(weights, states, strict=True)) / total)
        else:
            value.copy_(states[0][name])
    return mean
