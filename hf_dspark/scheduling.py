"""How many draft tokens are worth verifying: from confidences and a load profile to one length per row.

The confidence head says how likely token k of row r is to survive if those before it did: c_{r,k}. Their product
a_{r,j} = ∏_{i≤j} c_{r,i} is the chance that token j counts. Lengths ℓ yield τ = Σ_r (1 + Σ_{j≤ℓ_r} a_{r,j}) tokens from
B = Σ_r (1 + ℓ_r) verified ones, at Θ = τ / (T_draft + T_step(B)) tokens per second (arXiv 2607.05147, section 3). As a
never rises with j, the n best tokens of a batch are prefixes of its rows, so one sorted list holds every choice worth
making.

Sampling stays exact only if admitting x_k does not depend on the value of x_k, and c_{k+1} may have seen x_k.
`threshold` and `early_stop` ask about no token before they have admitted it. `global_search` asks about all of them:
use it in greedy decoding, on confidences that saw no sampled token, or two rounds late: the old round's `capacity` says
how many tokens `within_capacity` may now admit by rank.
"""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from .load_profile import LoadProfile

_GUESS = 0.8  # confidence in a draft token of which nothing is known


def schedule(
    mode: str,
    confidence: Tensor,
    profile: LoadProfile | None,
    older: Tensor | None = None,
    value: float = 0.5,
    on: str = "conditional",
) -> Tensor:
    """Lengths by the rule of a mode.

    Args:
        mode (`str`): `"threshold"`, `"early_stop"`, `"two_step"`, or any other name for the global search.
        confidence (`torch.FloatTensor` of shape `(R, K)`): of this round.
        profile ([`LoadProfile`]): step and drafting times, and the load; a threshold reads none.
        older (`torch.FloatTensor` of shape `(R, K)`, *optional*): of two rounds ago, for `"two_step"`: the capacity that
            comes from it cannot know this round's tokens. In the first rounds there is none, and a fixed guess stands in.
        value, on: of [`threshold`].

    Returns:
        `torch.LongTensor` of shape `(R,)`: lengths in 0..K.
    """
    if mode == "threshold":
        return threshold(confidence, value, on)
    if mode == "early_stop":
        return early_stop(confidence, profile)
    if mode == "two_step":
        older = torch.full_like(confidence, _GUESS) if older is None else older
        return within_capacity(confidence, capacity(older, profile))
    return global_search(confidence, profile)


def survival(confidence: Tensor) -> Tensor:
    """Chance that each draft token and all before it are accepted, a_j = ∏_{i≤j} c_i.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`): conditional survival c in [0, 1]; NaN counts as 0.

    Returns:
        `torch.DoubleTensor` of shape `(R, K)`: never rising along K.
    """
    return confidence.double().nan_to_num(nan=0.0).cumprod(dim=1)


def threshold(confidence: Tensor, value: float, on: str = "conditional") -> Tensor:
    """Static rule: the longest prefix whose confidences all reach a value. It knows no load and may drop every token.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`): conditional survival c in [0, 1]; NaN counts as 0.
        value (`float`): smallest confidence that is kept, in [0, 1]; 0 keeps everything.
        on (`"conditional"` or `"cumulative"`, defaults to `"conditional"`): what has to reach it, each c_k (DeepSpec's
            threshold) or the product a_k (that of mlx-dspark).

    Returns:
        `torch.LongTensor` of shape `(R,)`: lengths in 0..K.

    Raises:
        ValueError: `value` is not in [0, 1], or `on` is neither form.
    """
    check_threshold(value, on)
    kept = survival(confidence) if on == "cumulative" else confidence.nan_to_num(nan=0.0)
    return (kept >= value).long().cumprod(dim=1).sum(dim=1)


def check_threshold(value: float, on: str, names: tuple[str, str] = ("value", "on")) -> None:
    """Raises ValueError for what [`threshold`] cannot go by.

    Args:
        value, on: of [`threshold`].
        names (`tuple[str, str]`): what its user calls them.
    """
    if not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"`{names[0]}` must be a probability in [0, 1], got {value!r}. Pass 0 to verify every token.")
    if on not in ("conditional", "cumulative"):
        raise ValueError(f"`{names[1]}` must be 'conditional' (each c_k) or 'cumulative' (the product), got {on!r}. Name one.")


def early_stop(confidence: Tensor, profile: LoadProfile) -> Tensor:
    """Algorithm 1: admit tokens by falling survival, and stop at the first that does not raise Θ.

    Exact under sampling with any confidences, but a profile that falls before it rises stops it at the first bad step.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`): conditional survival c in [0, 1]; NaN counts as 0.
        profile ([`LoadProfile`]): step and drafting times, and the load.

    Returns:
        `torch.LongTensor` of shape `(R,)`: lengths in 0..K.
    """
    order, theta = _choices(confidence, profile)
    raises = theta[1:] > theta[:-1]
    return _lengths(order, int(raises.long().cumprod(dim=0).sum()), confidence.shape[0])


def global_search(confidence: Tensor, profile: LoadProfile) -> Tensor:
    """The lengths with the largest Θ of all, past any bad step of the profile; among equals, the fewest tokens.

    Looks at the confidence of tokens that it then refuses: see the module's text for when sampling stays exact.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`): conditional survival c in [0, 1]; NaN counts as 0.
        profile ([`LoadProfile`]): step and drafting times, and the load.

    Returns:
        `torch.LongTensor` of shape `(R,)`: lengths in 0..K.
    """
    order, theta = _choices(confidence, profile)
    return _lengths(order, int(theta.argmax()), confidence.shape[0])  # argmax: the first of equals


def capacity(confidence: Tensor, profile: LoadProfile) -> int:
    """Number of tokens that [`global_search`] admits: the first half of the paper's two-step form.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`): conditional survival c of an earlier round; NaN counts as 0.
        profile ([`LoadProfile`]): step and drafting times, and the load.

    Returns:
        `int`: draft tokens worth verifying, over all rows, in 0..R·K.
    """
    return int(_choices(confidence, profile)[1].argmax())


def within_capacity(confidence: Tensor, capacity: int) -> Tensor:
    """Admits the `capacity` tokens of largest survival: the second half of the two-step form.

    Whether x_{r,j} is among them never depends on its own value: a_{r,j} has not seen it, and what has ranks behind.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`): conditional survival c of this round; NaN counts as 0.
        capacity (`int`): tokens to admit over all rows, at least 0; more than R·K admits all.

    Returns:
        `torch.LongTensor` of shape `(R,)`: lengths in 0..K.

    Raises:
        ValueError: `capacity` is negative.
    """
    if capacity < 0:
        raise ValueError(f"`capacity` must be at least 0 tokens, got {capacity!r}. Pass what `capacity(...)` returned.")
    return _lengths(_ranked(survival(confidence))[1], capacity, confidence.shape[0])


def expected_throughput(confidence: Tensor, lengths: Tensor, profile: LoadProfile) -> float:
    """Θ of one choice of lengths.

    Args:
        confidence (`torch.FloatTensor` of shape `(R, K)`): conditional survival c in [0, 1]; NaN counts as 0.
        lengths (`torch.LongTensor` of shape `(R,)`): draft tokens to verify in each row, in 0..K.
        profile ([`LoadProfile`]): step and drafting times, and the load.

    Returns:
        `float`: expected tokens per second over all requests of the load.
    """
    admitted = torch.arange(confidence.shape[1], device=confidence.device) < lengths[:, None]  # (R, K)
    gained = (survival(confidence) * admitted).sum()
    return _theta(gained, lengths.sum(), confidence.shape[0], profile).item()


def _choices(confidence: Tensor, profile: LoadProfile) -> tuple[Tensor, Tensor]:
    """Order of admission, (R·K,), and Θ after n = 0..R·K admissions, (R·K + 1,)."""
    ranked, order = _ranked(survival(confidence))
    gained = torch.cat([ranked.new_zeros(1), ranked.cumsum(dim=0)])
    return order, _theta(gained, torch.arange(len(gained), device=gained.device), confidence.shape[0], profile)


def _ranked(survival: Tensor) -> tuple[Tensor, Tensor]:
    """Survival in falling order and where each value was: entry j·R + r is token j of row r."""
    # Position-major and stable, so that ties go by j, then r: a row's token never overtakes the one before it.
    return survival.T.reshape(-1).sort(descending=True, stable=True)


def _lengths(order: Tensor, admitted: int, rows: int) -> Tensor:
    return torch.bincount(order[:admitted] % rows, minlength=rows)


def _theta(gained: Tensor, admitted: Tensor, rows: int, profile: LoadProfile) -> Tensor:
    """Θ for `admitted` draft tokens of which `gained` are expected to survive, elementwise."""
    requests = max(profile.requests(), rows)
    scale = requests / rows  # the other requests are taken to be like these rows
    tokens = (scale * (rows + admitted).double()).round().long()
    return scale * (rows + gained) / profile.round_seconds(tokens, requests)
