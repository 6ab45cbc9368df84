"""Where a round's time goes, what drafts must bring to pay here, and what would help.

A drafter that does not speed things up has one of a few reasons: the machine verifies dearly, the drafts are too short or too
long for it, a mode does not suit its curve, or the drafts are refused because the drafter was made for something else: another
target, chat template or thinking mode. The text is right in every case, so nothing complains. Here a few prompts are
answered, everything is measured, and each suspicion is put to the test where it can be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from .candidate_generator import SCHEDULING_MODES
from .evaluation import encode_prompts
from .evaluation.comparison import left_padded
from .evaluation.reliability import verified_to_the_end
from .evaluation.rollouts import ALL
from .load_profile import LoadProfile
from .modeling_dspark import DSparkDraftModel
from .packing import is_packed
from .simulation import Trace, record_traces, simulate
from .statistics import Statistics

_FAR_BELOW = 0.6  # of the acceptance at position 1 that the card states
_SUSPICIOUS = 0.25  # where there is no card: less than this is seldom the text's fault
_CLEARLY = 1.5  # times the acceptance that another form of the prompt must bring to be blamed
_ROUNDS = 200  # simulated to compare modes


def examine(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDraftModel,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 64,
    profile: LoadProfile | None = None,
) -> dict[str, Any]:
    """Answers prompts with a drafter, greedily, and says what was found.

    Args:
        target (`PreTrainedModel`): the target, as it will serve.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        drafter ([`DSparkDraftModel`]): with a confidence head; its settings are put back.
        prompts (sequence of `str` or `list[dict]`): user turns, or conversations that end with one; at least one.
        max_new_tokens (`int`, defaults to 64): longest answer, in tokens.
        profile ([`LoadProfile`], *optional*): measured when not given.

    Returns:
        `dict`: `seconds` (share of each phase in the drafter's own mode), `tau` there, `acceptance` (by position, given those
        before it), `promised` (mean confidence of the first), `stated` (acceptance at position 1 by the card, or `None`),
        `lengths` (for each draft length: `break_even` τ, `tau` that drafts of it bring, and `ratio` of speed to plain),
        `modes` (expected ratio of speed to plain by scheduling mode), and `findings`: `name` and `text` of each.

    Raises:
        ValueError: no prompt, or the drafter has no confidence head.
    """
    if not prompts:
        raise ValueError("`prompts` must hold a prompt, got none. Leave it out for the built-in ones.")
    if drafter.confidence_head is None:
        raise ValueError("a diagnosis needs confidences, and this drafter has no confidence head. Train one with it.")
    along = drafter.load_profile
    drafter.bind(target)  # which sets one aside that was measured elsewhere
    kept = drafter.load_profile
    if profile is None:
        profile = LoadProfile.measure(target, drafter)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    drafter.load_profile = profile
    try:
        traces = record_traces(target, tokenizer, drafter, prompts, **options)
        counts = [
            _statistics(target, drafter, encode_prompts(tokenizer, [prompt]).to(target.device), options) for prompt in prompts
        ]
        acceptance, promised = _acceptance(traces, drafter.config.num_draft_tokens)
        seconds = {phase: sum(one.seconds[phase] for one in counts) for phase in counts[0].seconds}
        total = sum(seconds.values())
        report: dict[str, Any] = {
            "seconds": {phase: value / total for phase, value in seconds.items()},
            "tau": sum(one.tokens for one in counts) / max(1, sum(one.cycles for one in counts)),
            "acceptance": acceptance,
            "promised": promised,
            "stated": stated_acceptance(drafter),
            "lengths": _lengths(acceptance, profile),
            "modes": _ratios_by_mode(traces, profile, drafter),
        }
        report["findings"] = [
            {"name": name, "text": text}
            for name, text in [
                *_mismatch(report, target, tokenizer, drafter, prompts, options),
                *_prices(report, target, drafter, along, acceptance, profile),
            ]
        ]
    finally:
        drafter.load_profile = kept
    return report


def _statistics(target: PreTrainedModel, drafter: DSparkDraftModel, inputs: BatchEncoding, options: dict) -> Statistics:
    target.generate(**inputs, **options, assistant_model=drafter)
    return drafter.statistics


def _acceptance(traces: Sequence[Trace], draft_tokens: int) -> tuple[list[float | None], float]:
    """P(token k accepted | those before it were), `None` where none was judged, and the mean confidence of the first token."""
    blocks = [block for trace in traces for block in trace.blocks]
    rates: list[float | None] = []
    for k in range(1, draft_tokens + 1):
        reached = [block for block in blocks if len(block.confidence) >= k and block.accepted >= k - 1]
        rates.append(sum(block.accepted >= k for block in reached) / len(reached) if reached else None)
    return rates, sum(block.confidence[0] for block in blocks) / max(1, len(blocks))


def _lengths(acceptance: Sequence[float | None], profile: LoadProfile) -> list[dict[str, float]]:
    """For drafts of 1 … K tokens: the τ at which they take as long as plain steps, the τ they have, the ratio of both."""
    rows: list[dict[str, float]] = []
    tau = survival = 1.0
    for length, rate in enumerate(acceptance, start=1):
        survival *= rate or 0.0
        tau += survival
        break_even = profile.round_seconds(1 + length) / profile.step_seconds(1)
        rows.append({"length": length, "break_even": break_even, "tau": tau, "ratio": tau / break_even})
    return rows


def _ratios_by_mode(traces: Sequence[Trace], profile: LoadProfile, drafter: DSparkDraftModel) -> dict[str, float]:
    """Expected speed over plain decoding of one request, by the simulated scheduler."""
    if not traces:
        return {}
    options: dict[str, Any] = {"threshold": drafter.confidence_threshold, "threshold_on": drafter.threshold_on}
    plain = simulate(traces, profile, 1, "plain", rounds=_ROUNDS).throughput
    return {mode: simulate(traces, profile, 1, mode, rounds=_ROUNDS, **options).throughput / plain for mode in SCHEDULING_MODES}


def stated_acceptance(drafter: DSparkDraftModel) -> float | None:
    """Acceptance at position 1 in greedy decoding by the drafter's card, if there is one as `hf-dspark card` writes it."""
    folder = drafter.folder or drafter.name_or_path
    if not folder or not (path := Path(folder, "README.md")).is_file():
        return None
    row = rf"^\| T=0 \|(?! {ALL} \|)[^|]*\| [\d.]+ \| ([\d.]+) \|"
    rows = re.findall(row, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return sum(map(float, rows)) / len(rows) if rows else None


def _mismatch(
    report: dict[str, Any],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDraftModel,
    prompts: Sequence[Any],
    options: dict[str, Any],
) -> list[tuple[str, str]]:
    """Whether the drafter seems made for something else, and for what."""
    if report["acceptance"][0] is None:
        return [("no drafts", "The answers ended before anything was drafted: give prompts with longer answers.")]
    first, stated, promised = report["acceptance"][0] or 0.0, report["stated"], report["promised"]
    if first >= (_SUSPICIOUS if stated is None else _FAR_BELOW * stated):
        if abs(promised - first) > 0.1:
            way = "more" if promised > first else "less"
            text = f"Confidences promise {promised:.2f} at position 1 and {first:.2f} is kept, {way} than true: run `hf-dspark"
            return [("calibration", f"{text} calibrate` on prompts like yours.")]
        return []
    against = "which is little" if stated is None else f"and its card states {stated:.2f}"
    findings = [("mismatch", f"The target agrees with {first:.2f} of the drafts' first tokens, {against}.")]
    for name, inputs in _other_forms(tokenizer, prompts).items():
        with verified_to_the_end(drafter):
            counts = [_statistics(target, drafter, one.to(target.device), options) for one in inputs]
        reached = sum(one.reached_per_position[0] for one in counts)
        other = sum(one.accepted_per_position[0] for one in counts) / max(1, reached)
        if other > max(_CLEARLY * first, 0.05):
            text = f"{name[0].upper()}{name[1:]} it agrees with {other:.2f} of them: the drafter was made for such prompts. Use"
            text += " that form, or train on answers to prompts as you send them."
            findings.append(("prompt form", text))
    if len(findings) == 1:
        text = "No other form of the prompts helps: suspect another target than the one it was trained for (a base, instruct or"
        findings.append(("target", f"{text} later version of it), or text unlike its training."))
    return findings


def _other_forms(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any]) -> dict[str, list[BatchEncoding]]:
    """The prompts without a chat template, and with thinking switched either way where the template knows of it."""
    turns = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    forms = {"without the chat template": [left_padded([tokenizer(turn)["input_ids"]], None) for turn in turns]}
    if "enable_thinking" in str(tokenizer.chat_template):
        for thinks in (True, False):
            name = f"with `enable_thinking={thinks}`"
            forms[name] = [encode_prompts(tokenizer, [prompt], enable_thinking=thinks) for prompt in prompts]
    return forms


def _prices(
    report: dict[str, Any],
    target: PreTrainedModel,
    drafter: DSparkDraftModel,
    along: LoadProfile | None,
    acceptance: Sequence[float | None],
    profile: LoadProfile,
) -> list[tuple[str, str]]:
    """What the machine's times say."""
    findings: list[tuple[str, str]] = []
    best = max(report["lengths"], key=lambda row: row["ratio"])
    if best["ratio"] < 1 and report["modes"]:
        text = f"Drafts of {best['length']} come closest, with {best['tau']:.2f} tokens a round where {best['break_even']:.2f}"
        findings.append(("does not pay", f"{text} would break even: on such text most rounds will be plain steps."))
    length = len(acceptance)
    last = next((rate for rate in reversed(acceptance) if rate is not None), 0.0)
    if best["length"] == length and best["ratio"] > 1:
        longer = _lengths([*acceptance, last, last], profile)[-1]
        if longer["ratio"] > 1.02 * best["ratio"]:
            text = (
                f"All {length} tokens pay, and {length + 2} would bring {longer['ratio']:.2f}× instead of {best['ratio']:.2f}×"
            )
            findings.append(("longer block", f"{text}: train with a longer `--block-size`."))
    own = drafter.scheduling
    if own is not None and report["modes"]:
        mode = max(report["modes"], key=report["modes"].__getitem__)
        if report["modes"][mode] > 1.03 * report["modes"].get(own, 0.0):
            text = f"Scheduling {own!r} is expected to give {report['modes'][own]:.2f}×, {mode!r} {report['modes'][mode]:.2f}×"
            findings.append(("other mode", f"{text}: set `drafter.scheduling`, or leave it at None."))
    if (
        not is_packed(target)
        and target.device.type == "cpu"
        and target.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    ):
        text = (
            "The target's linear layers are not packed; `pack_linears(target)` makes plain steps faster and verification much"
        )
        findings.append(("pack", f"{text} faster, for twice the memory of the weights."))
    if along is not None and (differences := along.differences(target)):
        text = "; ".join(f"{name} {there!r} there, {here!r} here" for name, (there, here) in differences.items())
        findings.append(
            ("foreign profile", f"The drafter's load profile is of another machine or target: {text}. Measure one.")
        )
    if along is None:
        text = "The drafter has no load profile, so every draft is verified to its end:"
        findings.append(("no profile", f"{text} set `drafter.load_profile = LoadProfile.measure(target, drafter)`."))
    loop = sum(report["seconds"][phase] for phase in ("head", "schedule", "rest"))
    if loop > 0.1:
        findings.append(
            ("loop", f"{loop:.0%} of the time is neither target nor draft forward: the models are small for this machine.")
        )
    return findings


def describe(report: dict[str, Any]) -> str:
    """A report of [`examine`] as lines of text."""
    acceptance = " ".join("-" if rate is None else f"{rate:.2f}" for rate in report["acceptance"])
    stated = "" if report["stated"] is None else f" (its card states {report['stated']:.2f} at the first)"
    lines = [
        "Time: " + ", ".join(f"{phase} {share:.0%}" for phase, share in report["seconds"].items()),
        f"τ {report['tau']:.2f} in the drafter's own mode",
        f"Acceptance by position, given those before: {acceptance}{stated}",
        "Draft length   break-even τ   τ here   speed over plain",
        *(
            f"{row['length']:>12} {row['break_even']:>14.2f} {row['tau']:>8.2f} {row['ratio']:>17.2f}×"
            for row in report["lengths"]
        ),
        "Expected by mode: " + ", ".join(f"{mode} {ratio:.2f}×" for mode, ratio in report["modes"].items()),
        *(f"- {finding['text']}" for finding in report["findings"]),
    ]
    return "\n".join(lines if report["findings"] else [*lines, "Nothing to mend was found."])
