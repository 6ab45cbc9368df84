"""What one target step costs, by the number of tokens it carries: the measured side of the scheduler.

Verifying one more draft token is nearly free while the machine is idle and dear once it is busy. The paper (arXiv
2607.05147, section 3) writes this as SPS(B), the target steps per second when one forward carries B tokens over all
requests; whether a token is worth verifying is then a matter of expected tokens against seconds. Real curves are
stairs, some with a step that leads down, so they are kept exactly as measured: nothing is smoothed or made monotone.

Between two measured sizes the *seconds* are interpolated, because costs add up in seconds and not in rates. Drafting
costs its seconds in every round. The load, the number of requests alike that share the machine, is part of the profile
too: what pays for one request may not pay for sixty-four, and `with_load` asks that question of the same curve. `live`
lets the rounds correct it, so that the budget breathes with what else the machine does.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from .cache import SlotCache
from .formats.files import write_text
from .live_correction import LiveCorrection
from .machine import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORMAT, _VERSION = "hf_dspark.load_profile", 1
_BATCH_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 128)
_DRAFT_RUN = 32  # tokens generated to time the drafter


@dataclass(frozen=True)
class LoadProfile:
    """Step time of a target against the tokens of one forward, the drafting time, and the load to plan for.

    Args:
        steps_per_second (`dict[int, float]`): SPS(B), target forwards per second when one forward carries B tokens in
            all, by B; any order. One point, or equal rates, make a flat profile.
        draft_seconds (`float`, defaults to 0.0): seconds of drafting in every round, whatever is verified afterwards.
        concurrent_requests (`int` or `Callable[[], int]`, defaults to 1): requests alike that share the machine; a
            callable is asked at every scheduling.
        interpolation (`"linear"` or `"floor"`, defaults to `"linear"`): between two measured sizes, the straight line
            through their seconds, or the seconds of the smaller one. Above the largest size the last line goes on, but
            never downwards; `"floor"` stays level. Below the smallest size both give its seconds.
        request_seconds (`dict[int, float]`, *optional*): seconds to add to a step for the number of requests in it,
            whatever their tokens, by that number; interpolated, level outside. Nothing if left out.
        measured_on (`dict[str, str]`, *optional*): on what it was measured, see [`~hf_dspark.machine.fingerprint`], and
            behind how long a context; empty for a curve from elsewhere.
        is_live (`bool`, defaults to `False`): whether rounds that are over correct the times; see [`~LoadProfile.live`].

    Raises:
        ValueError: a field is empty, of the wrong type or out of its range.
    """

    steps_per_second: dict[int, float]
    draft_seconds: float = 0.0
    concurrent_requests: int | Callable[[], int] = 1
    interpolation: str = "linear"
    request_seconds: dict[int, float] = field(default_factory=dict)
    measured_on: dict[str, str] = field(default_factory=dict)
    is_live: bool = False

    # The curve, three float64 tensors (number of points,): slope i holds between point i and the next.
    _sizes: Tensor = field(init=False, repr=False, compare=False)
    _seconds: Tensor = field(init=False, repr=False, compare=False)
    _slopes: Tensor = field(init=False, repr=False, compare=False)
    _correction: LiveCorrection | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.steps_per_second == {}:
            raise ValueError("`steps_per_second` must hold a point, got {}. Use LoadProfile.measure(target).")
        steps = _curve("steps_per_second", self.steps_per_second, "positive")
        extra = _curve("request_seconds", self.request_seconds)
        draft_seconds = _number("draft_seconds", self.draft_seconds, "non-negative")
        load = self.concurrent_requests
        if not callable(load):
            load = _size("concurrent_requests", load)
        if self.interpolation not in ("linear", "floor"):
            raise ValueError(f"`interpolation` must be 'linear' or 'floor', got {self.interpolation!r}. Name either.")
        if not isinstance(self.measured_on, dict) or not all(isinstance(value, str) for value in self.measured_on.values()):
            raise ValueError(f"`measured_on` must be a dict of strings, got {self.measured_on!r}. Leave it out.")
        if not isinstance(self.is_live, bool):
            raise ValueError(f"`is_live` must be True or False, got {self.is_live!r}. Leave it out.")
        if 1 / max(steps.values()) + min(extra.values(), default=0.0) <= 0:
            raise ValueError(
                f"`request_seconds` must leave every step longer than 0 s, got {min(extra.values())} s for a step of "
                f"{1 / max(steps.values())} s. Measure both again."
            )
        sizes = torch.tensor(list(steps), dtype=torch.float64)
        seconds = torch.tensor([1 / rate for rate in steps.values()], dtype=torch.float64)
        slopes = torch.zeros_like(seconds)
        if self.interpolation == "linear" and len(steps) > 1:
            slopes[:-1] = seconds.diff() / sizes.diff()
            slopes[-1] = slopes[-2].clamp(min=0)  # a last segment that falls must not lead to times below zero
        for name, value in (
            ("steps_per_second", steps),
            ("draft_seconds", draft_seconds),
            ("concurrent_requests", load),
            ("request_seconds", extra),
            ("_sizes", sizes),
            ("_seconds", seconds),
            ("_slopes", slopes),
            ("_correction", LiveCorrection(list(steps), draft_seconds) if self.is_live else None),
        ):
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @overload
    def step_seconds(self, batch_tokens: int, requests: int | None = None) -> float: ...

    @overload
    def step_seconds(self, batch_tokens: Tensor, requests: int | None = None) -> Tensor: ...

    def step_seconds(self, batch_tokens: int | Tensor, requests: int | None = None) -> float | Tensor:
        """Seconds of one target step, 1 / SPS(B), without the drafting.

        Args:
            batch_tokens (`int` or `torch.LongTensor` of any shape): tokens B of one forward, over all requests.
            requests (`int`, *optional*, defaults to the load): requests in that forward; `request_seconds` asks, and a live
                profile, for which a forward of as many tokens is a plain step.

        Returns:
            `float`, or `torch.DoubleTensor` of the shape and on the device of `batch_tokens`.
        """
        tokens = torch.as_tensor(batch_tokens, dtype=torch.float64, device="cpu").contiguous()
        point = (torch.searchsorted(self._sizes, tokens, right=True) - 1).clamp(min=0)
        beyond = (tokens - self._sizes[point]).clamp(min=0)  # 0 below the smallest size
        seconds = self._seconds[point] + self._slopes[point] * beyond
        count = self.requests() if requests is None else requests
        if self.request_seconds:
            seconds += float(np.interp(count, list(self.request_seconds), list(self.request_seconds.values())))
        if self._correction is not None:
            seconds = seconds * torch.from_numpy(np.asarray(self._correction.factor(tokens.numpy(), count)))
        return seconds.to(batch_tokens.device) if isinstance(batch_tokens, Tensor) else seconds.item()

    @overload
    def round_seconds(self, batch_tokens: int, requests: int | None = None) -> float: ...

    @overload
    def round_seconds(self, batch_tokens: Tensor, requests: int | None = None) -> Tensor: ...

    def round_seconds(self, batch_tokens: int | Tensor, requests: int | None = None) -> float | Tensor:
        """Seconds of a round with a draft: those of [`~LoadProfile.step_seconds`], and the drafting.

        Args:
            batch_tokens (`int` or `torch.Tensor`): tokens in the forward.
            requests (`int`, *optional*): requests that share it.
        """
        drafting = self.draft_seconds if self._correction is None else self._correction.draft_seconds
        return drafting + self.step_seconds(batch_tokens, requests)

    def requests(self) -> int:
        """Requests alike that share the machine now.

        Raises:
            ValueError: the callable given as `concurrent_requests` did not return an integer of at least 1.
        """
        if callable(self.concurrent_requests):
            return _size("concurrent_requests()", self.concurrent_requests())
        return self.concurrent_requests

    def with_load(self, concurrent_requests: int | Callable[[], int]) -> LoadProfile:
        """The same machine under another load.

        Args:
            concurrent_requests (`int` or `Callable[[], int]`): requests alike that share the machine, at least 1.

        Returns:
            `LoadProfile`: a new profile; this one is unchanged. A live one shares what the rounds have told so far.

        Raises:
            ValueError: `concurrent_requests` is less than 1 or not an integer.
        """
        profile = replace(self, concurrent_requests=concurrent_requests)
        object.__setattr__(profile, "_correction", self._correction)  # it is the same machine
        return profile

    def live(self) -> LoadProfile:
        """The same profile, corrected from now on by the rounds that are decoded with it.

        The curve keeps its shape and gets factors, see [`~hf_dspark.live_correction`]. The loops of `generate` and of
        [`ServingLoop`] enter every round that is over. What is saved is the measured curve and that it was live.

        Returns:
            `LoadProfile`: a new profile that has seen no round; this one is unchanged.
        """
        return replace(self, is_live=True)

    def record(self, batch_tokens: int, requests: int, step_seconds: float, draft_seconds: float | None = None) -> None:
        """Enters a round that is over; only a live profile learns from it.

        Args:
            batch_tokens (`int`): tokens B of its forward, over all requests.
            requests (`int`): requests in it.
            step_seconds (`float`): what the forward took; 0 where it was not timed, which is left out.
            draft_seconds (`float`, *optional*): what drafting took, if there was a draft.
        """
        if self._correction is None:
            return
        if step_seconds > 0:
            expected = self.step_seconds(batch_tokens, requests)
            self._correction.record_step(batch_tokens, requests, step_seconds, expected)
        if draft_seconds is not None and draft_seconds > 0:
            self._correction.record_draft(draft_seconds)

    def differences(self, target: PreTrainedModel) -> dict[str, tuple[str, str]]:
        """In what the target and the machine at hand differ from those that were measured.

        Args:
            target (`PreTrainedModel`): as it will serve.

        Returns:
            `dict[str, tuple[str, str]]`: measured and present value, by what it is of; empty where all is alike, and for a
            profile that does not say what it was measured on.
        """
        here = fingerprint(target) if self.measured_on else {}
        return {
            name: (self.measured_on.get(name, "unknown"), value)
            for name, value in here.items()
            if self.measured_on.get(name) != value
        }

    @property
    def is_flat(self) -> bool:
        """`bool`: no two step times differ, so verifying more never costs more and nothing would be truncated."""
        return len(set(self.steps_per_second.values())) == 1

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        target: PreTrainedModel,
        drafter: PreTrainedModel | None = None,
        *,
        context_length: int = 256,
        batch_tokens: Sequence[int] | None = None,
        repeats: int = 5,
    ) -> LoadProfile:
        """Times the target on this machine, and the drafter if one is given.

        One row of random tokens: every forward writes its B new tokens behind the same cached context. That is also how rows
        of different lengths are verified, packed into one, except that each then reads a context of its own. The sizes are
        interleaved, so that a machine that warms up or slows down favours none of them, and each counts by its median.

        Args:
            target (`PreTrainedModel`): the model that verifies, on the device and in the dtype it will serve in.
            drafter (`DSparkDraftModel`, *optional*): gives `draft_seconds`, from a short greedy generation: the median draft
                behind the first, which alone has a whole prompt to take in.
            context_length (`int`, defaults to 256): cached tokens before the timed ones; fewer where the target's
                `max_position_embeddings` leaves less room.
            batch_tokens (`Sequence[int]`, *optional*): sizes B to time; when not given, 1 to 8, 12, 16, 24, 32, 48, 64 and
                128, those that leave room for as much context. What lies beyond the largest is taken from the line through
                the last two.
            repeats (`int`, defaults to 5): timed passes over all sizes; one more comes before them and is not counted.

        Returns:
            `LoadProfile`: for one request; use [`~LoadProfile.with_load`] for more.

        Raises:
            ValueError: a size, `repeats` or `context_length` is less than 1, or the target has no room for the sizes.
        """
        config = target.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None)  # some position encodings know no limit
        if batch_tokens is None:
            batch_tokens = [size for size in _BATCH_TOKENS if positions is None or 2 * size <= positions] or [1]
        sizes = sorted({_size("batch_tokens", size) for size in batch_tokens})
        if not sizes:
            raise ValueError(f"`batch_tokens` must name a size, got {batch_tokens!r}. Leave it out for the default.")
        _size("repeats", repeats)
        _size("context_length", context_length)
        longest = sizes[-1] if drafter is None else max(sizes[-1], _DRAFT_RUN + drafter.config.block_size)
        context = context_length if positions is None else min(context_length, positions - longest)
        if context < 1:
            raise ValueError(
                f"`batch_tokens` must leave room for a cached context: {longest} new tokens fill the target's "
                f"max_position_embeddings={positions}. Time smaller sizes."
            )

        device = target.device
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab_size, (1, context + sizes[-1]), generator=generator).to(device)
        cache = SlotCache(config)
        cache.place(0, context)
        target(input_ids=tokens[:, :context], cache=cache)
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for repeat in range(repeats + 1):
            first = repeat % len(sizes)
            for size in sizes[first:] + sizes[:first]:
                cache.place(context, size)  # over the slots of the forward before: the rollback is free
                start = _clock(device)
                target(input_ids=tokens[:, context : context + size], cache=cache)
                times[size].append(_clock(device) - start)
        steps = {size: 1 / median(seconds[1:]) for size, seconds in times.items()}  # the first pass warmed up
        measured_on = fingerprint(target) | {"layout": "one row", "context_length": str(context)}
        if drafter is None:
            return cls(steps, measured_on=measured_on)

        prompt = tokens[:, :context]
        draft_model: Any = drafter
        mode, listener = drafter.scheduling, drafter.on_round
        spent: list[float] = []  # on drafting so far, after every round
        draft_model.scheduling = "full"  # a draft in every round, whatever the profile so far
        draft_model.on_round = lambda _: spent.append(draft_model.statistics.spent("draft", "head"))
        try:
            for _ in range(2):  # the first warms up
                spent.clear()
                target.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    assistant_model=drafter,
                    max_new_tokens=_DRAFT_RUN,
                    eos_token_id=None,  # random text may end before anything is drafted; a minimum would be a processor
                    do_sample=False,
                )
        finally:
            draft_model.scheduling, draft_model.on_round = mode, listener
        # The prefill's report comes first, then the draft that takes in the whole prompt, once; the last ones have no room.
        drafts = [after - before for before, after in pairwise(spent[: draft_model.statistics.drafts + 1])]
        return cls(steps, median(drafts[1:] or drafts), measured_on=measured_on)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the profile as JSON: completely, or not at all.

        Args:
            path (`str` or `os.PathLike`): file to write; an existing one is replaced. A callable load is stored as the
                number it returns now.

        Raises:
            ValueError: the callable given as `concurrent_requests` did not return an integer of at least 1.
        """
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "steps_per_second": self.steps_per_second,
            "draft_seconds": self.draft_seconds,
            "concurrent_requests": self.requests(),
            "interpolation": self.interpolation,
            "request_seconds": self.request_seconds,
            "measured_on": self.measured_on,
            "is_live": self.is_live,
        }
        write_text(Path(path), json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> LoadProfile:
        """Reads a saved profile, or one of SGLang's two SPS files, whose look-ups it reproduces exactly.

        SGLang's table `{sample_batch_tokens, sample_steps_per_sec}` gives the rate of the largest sample not above B:
        that is `interpolation="floor"`. Its fit `{bias_seconds, bs_probes, alpha_seconds, m_probes, theta_seconds}` is
        bias + alpha(requests) + theta(B) seconds, both interpolated and level outside their probes: bias + theta become
        the curve and alpha `request_seconds`. Neither file tells drafting apart (alpha includes it), so `draft_seconds`
        is 0; neither holds a load, so set it with [`~LoadProfile.with_load`].

        Args:
            path (`str` or `os.PathLike`): JSON file.

        Returns:
            `LoadProfile`: the profile; for one request where the file holds no load.

        Raises:
            ValueError: the file is not JSON, of no known form, or holds a value that is not allowed.
        """
        try:
            return cls(**_fields(json.loads(Path(path).read_text(encoding="utf-8"))))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must hold JSON, got other content ({error}). Save the profile again.") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} holds no usable load profile: {error}") from error


def _fields(content: Any) -> dict:
    """Arguments of [`LoadProfile`] from the content of a file, in any of the three forms."""
    names = sorted(content) if isinstance(content, dict) else []
    if "format" in names:
        found = content.pop("format"), content.pop("version", None)
        if found != (_FORMAT, _VERSION):
            raise ValueError(f"`format`, `version` must be {(_FORMAT, _VERSION)}, got {found}. Measure and save again.")
        for name in ("steps_per_second", "request_seconds"):  # JSON has made strings of the sizes
            if isinstance(content.get(name), dict):
                content[name] = {int(key) if key.isdecimal() else key: value for key, value in content[name].items()}
        return content
    if {"sample_batch_tokens", "sample_steps_per_sec"} <= set(names):
        steps = _points(content, "sample_batch_tokens", "sample_steps_per_sec")
        return {"steps_per_second": steps, "interpolation": "floor"}
    if {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"} <= set(names):
        bias = _number("bias_seconds", content["bias_seconds"])
        theta = _points(content, "m_probes", "theta_seconds", least=0)  # probes are centres of bins: the first may be 0
        probes, values = list(theta), list(theta.values())
        # Moving a probe from 0 to 1 changes nothing for B >= 1; one more point keeps the line level behind the last.
        seconds = {size: bias + float(np.interp(size, probes, values)) for size in {*probes[1:], max(probes[0], 1)}}
        seconds[max(seconds) + 1] = seconds[max(seconds)]
        return {
            "steps_per_second": {
                size: 1 / _number(f"bias_seconds + theta_seconds({size})", value, "positive") for size, value in seconds.items()
            },
            "request_seconds": _points(content, "bs_probes", "alpha_seconds"),
        }
    raise ValueError(
        f"a saved LoadProfile or one of SGLang's SPS files was expected, got {names or type(content).__name__}. "
        "Write the file with LoadProfile.save."
    )


def _points(content: dict, sizes: str, values: str, least: int = 1) -> dict[int, float]:
    x, y = content[sizes], content[values]
    if not isinstance(x, list) or not isinstance(y, list) or not len(x) == len(y) > 0:
        raise ValueError(f"`{sizes}` and `{values}` must be lists of one length, got {x!r} and {y!r}. Profile again.")
    if [_size(sizes, size, least) for size in x] != sorted(set(x)):
        raise ValueError(f"`{sizes}` must rise strictly, got {x}. Sort the points and keep one for each size.")
    return {size: _number(f"{values}[{size}]", value) for size, value in zip(x, y, strict=True)}


def _curve(name: str, points: object, kind: str = "") -> dict[int, float]:
    if not isinstance(points, dict):
        raise ValueError(f"`{name}` must be a dict of numbers by size, got {points!r}. Write {{1: 40.0, 8: 38.5}}.")
    checked = {_size(name, size): _number(f"{name}[{size}]", value, kind) for size, value in points.items()}
    return dict(sorted(checked.items()))


def _size(name: str, value: object, least: int = 1) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` counts in integers of at least {least}, got {value!r}. Give such a number.")
    return int(value)


def _number(name: str, value: Any, kind: str = "") -> float:
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (kind == "positive" and value <= 0) or (kind == "non-negative" and value < 0):
        expected = f"finite {kind} number".replace("  ", " ")
        raise ValueError(f"`{name}` must be a {expected}, got {value!r}. Measure it again.")
    return float(value)


def _clock(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # a kernel is only queued when its call returns
    return time.perf_counter()
