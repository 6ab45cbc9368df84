"""The load slider: how many draft tokens are worth verifying when the machine is shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from drawing import bars, curve

from hf_dspark import Event, LoadProfile
from hf_dspark.scheduling import early_stop, expected_throughput, global_search

STEPS = 9  # of the slider: 1, 2, 4, … 256 requests
_NAMES = (
    "quiet night",
    "quiet night",
    "early morning",
    "morning",
    "noon",
    "afternoon",
    "evening",
    "Friday evening",
    "Saturday rush",
)
IMAGINED = "an imagined, well-trained drafter (0.85 each)"


@dataclass(frozen=True)
class Budget:
    """What the scheduler makes of one block under one load.

    Args:
        requests (`int`): requests alike that share the machine.
        length (`int`): ℓ, draft tokens worth verifying in this block.
        early (`int`): where the paper's early stop would have ended.
        throughput (`list[float]`): expected tokens per second over all requests, for ℓ = 0 … K.
    """

    requests: int
    length: int
    early: int
    throughput: list[float]


def budget(profile: LoadProfile, confidence: Sequence[float], requests: int) -> Budget:
    """Asks the scheduler about a block with these confidences."""
    loaded, block = profile.with_load(requests), torch.tensor([list(confidence)])
    throughput = [expected_throughput(block, torch.tensor([length]), loaded) for length in range(block.shape[1] + 1)]
    return Budget(requests, int(global_search(block, loaded)), int(early_stop(block, loaded)), throughput)


def blocks_to_choose(passes: Sequence[Event], positions: int) -> dict[str, list[float]]:
    """Confidences to put under load: of an ordinary and of the surest block of a run, and imagined ones."""
    known = [one.confidence for one in passes if one.confidence and len(one.drafted) == positions]
    known.sort(key=math.prod)
    choices = {}
    if known:
        choices[f"an ordinary block of this drafter ({_listed(known[len(known) // 2])})"] = known[len(known) // 2]
        choices[f"the surest block of this drafter ({_listed(known[-1])})"] = known[-1]
    return choices | {IMAGINED: [0.85] * positions}


def _listed(confidence: Sequence[float]) -> str:
    return ", ".join(f"{c:.2f}" for c in confidence)


def page(profile: LoadProfile, confidence: Sequence[float], step: int) -> str:
    """Everything that the slider shows at one of its steps, 0 … 8."""
    loads = [2**n for n in range(STEPS)]
    step = min(max(int(step), 0), STEPS - 1)
    budgets = [budget(profile, confidence, requests) for requests in loads]
    now, positions = budgets[step], len(confidence)
    cells = "".join(
        f'<li class="{"verify" if k < now.length else "cut"}">{k + 1}<small>{c:.2f}</small></li>'
        for k, c in enumerate(confidence)
    )
    plural = "request" if now.requests == 1 else "requests at once"
    return (
        f'<p class="big" role="status"><b>{now.requests}</b> {plural} <span>({_NAMES[step]})</span>: '
        f'verify <b class="budget">{now.length}</b> of {positions} draft tokens</p>'
        f'<ol class="draft-block">{cells}</ol>'
        '<p class="hint">A draft block; under each token its confidence. Filled: worth verifying. Crossed out: cut.</p>'
        f'<div class="charts"><figure>{_throughput_chart(now)}<figcaption>{_throughput_words(now)}</figcaption></figure>'
        f"<figure>{_budget_chart(budgets, step, positions)}<figcaption>The same block at every load.</figcaption></figure>"
        f"<figure>{_step_chart(profile, now)}<figcaption>{_step_words(profile, now)}</figcaption></figure></div>"
    )


def _throughput_chart(now: Budget) -> str:
    return curve(
        list(enumerate(now.throughput)),
        "ℓ, draft tokens verified",
        "expected tokens/s",
        chosen=(now.length, now.throughput[now.length]),
        description=f"Expected throughput along the draft length; the best length is {now.length}.",
    )


def _throughput_words(now: Budget) -> str:
    gain = now.throughput[now.length] / now.throughput[0] - 1
    words = f"Best at ℓ = {now.length}"
    words += (
        f", {gain:+.0%} against a draft of which nothing is verified."
        if now.length
        else ": verifying would cost more than it brings."
    )
    if now.early != now.length:
        words += f" Stopping at the first step that does not pay would have ended at ℓ = {now.early}."
    return words


def _budget_chart(budgets: Sequence[Budget], step: int, positions: int) -> str:
    return bars(
        [str(one.requests) for one in budgets],
        [one.length for one in budgets],
        "requests at once",
        "tokens to verify",
        top=positions + 0.5,
        chosen=step,
        description="Tokens to verify at each load: " + ", ".join(f"{b.length} at {b.requests}" for b in budgets) + ".",
    )


def _step_chart(profile: LoadProfile, now: Budget) -> str:
    def milliseconds(size: int) -> float:
        return 1e3 * profile.step_seconds(size)

    measured = sorted(profile.steps_per_second)
    asked = [now.requests * (1 + length) for length in range(len(now.throughput))]
    beyond = [size for size in asked if size > measured[-1]]
    return curve(
        [(size, milliseconds(size)) for size in measured],
        "tokens in one pass of the target",
        "ms a pass",
        chosen=(asked[now.length], milliseconds(asked[now.length])),
        others=[(size, milliseconds(size)) for size in asked],
        beyond=[(size, milliseconds(size)) for size in beyond],
        log_x=True,
        description="Measured milliseconds of a pass by its number of tokens.",
    )


def _step_words(profile: LoadProfile, now: Budget) -> str:
    largest = max(profile.steps_per_second)
    beyond = now.requests * len(now.throughput) > largest
    dashed = f" Dashed: beyond the largest size measured ({largest} tokens)." * beyond
    return (
        "What a pass costs here, as it was measured, jagged. Rings: ℓ = 0, 1, 2 … at this load; filled: the choice."
        f"{dashed} Drafting adds {1e3 * profile.draft_seconds:.1f} ms."
    )
