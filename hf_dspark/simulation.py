"""Serving hundreds of requests without a machine for them: recorded drafts, a load profile, and the real scheduler.

A rollout that verifies every draft to its end leaves a trace: for each block the confidences and how many of its tokens the
target agreed with. From traces and from what a forward costs, a simulated server can be run at any number of concurrent
requests and under any policy: each round it takes the block recorded nearest to where a request stands, lets the scheduler of
this package choose lengths, and charges the round its seconds by the profile. So the paper's two questions (arXiv 2607.05147,
figures 7 and 8) have an answer for a machine at hand, or for one of which only the curve is known: how total throughput trades
against the speed of one user, and how the verification budget gives way as requests come in.

What it leaves out: prompts are free; rows are alike in context length; a draft after a shorter verification is taken to be as
good as the recorded one nearby. Recorded confidences have seen their predecessors; `presampled` reads slightly poorer ones.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import scheduling
from .candidate_generator import SCHEDULING_MODES
from .evaluation import encode_prompts
from .evaluation.reliability import verified_to_the_end
from .formats.files import write_text
from .load_profile import LoadProfile
from .modeling_dspark import DSparkDraftModel
from .profitability import Profitability
from .statistics import Round

MODES = ("plain", *SCHEDULING_MODES)


@dataclass(frozen=True)
class TracedBlock:
    """A draft that was verified to its end.

    Args:
        at (`int`): tokens of the answer before it, the first one not counted.
        confidence (`list[float]`): c_k of each draft token.
        accepted (`int`): how many of them the target agreed with.
    """

    at: int
    confidence: list[float]
    accepted: int


@dataclass(frozen=True)
class Trace:
    """One answer: its drafts in order.

    Args:
        tokens (`int`): tokens of the answer behind the first, which the prefill gives.
        blocks (list of [`TracedBlock`]): at least one.

    Raises:
        ValueError: there is no block, or they are not in order, or a number is out of its range.
    """

    tokens: int
    blocks: list[TracedBlock]
    _starts: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = [block.at for block in self.blocks]
        if not starts or starts != sorted(set(starts)) or starts[0] < 0 or self.tokens < 1:
            raise ValueError(
                f"a trace must have `tokens` and `blocks` with rising `at`, got {self.tokens} and {starts}. Record it again."
            )
        for block in self.blocks:
            in_range = all(isinstance(c, (int, float)) and 0 <= c <= 1 for c in block.confidence)
            if not in_range or not 0 <= block.accepted <= len(block.confidence):
                raise ValueError(
                    "`confidence` must hold probabilities, and `accepted` count some of them, got "
                    f"{block.confidence} and {block.accepted}. Record it again."
                )
        object.__setattr__(self, "_starts", starts)

    def near(self, at: int) -> TracedBlock:
        """The block recorded nearest to a place of the answer; the earlier of two."""
        place = bisect_left(self._starts, at)
        candidates = self.blocks[max(0, place - 1) : place + 1]
        return min(candidates, key=lambda block: abs(block.at - at))


def record_traces(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDraftModel,
    prompts: Sequence[Any],
    *,
    batch_size: int = 1,
    seed: int = 0,
    **generate_kwargs: Any,
) -> list[Trace]:
    """Answers prompts with every draft verified to its end, and keeps what became of the drafts.

    Args:
        target (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        drafter ([`DSparkDraftModel`]): with a confidence head.
        prompts (sequence of `str` or `list[dict]`): user turns, or conversations that end with one.
        batch_size (`int`, defaults to 1): prompts per call.
        seed (`int`, defaults to 0): seed of the sampling.
        generate_kwargs: of `generate`, e.g. `max_new_tokens=128, do_sample=False`.

    Returns:
        `list` of [`Trace`]: one per answer with a draft in it.

    Raises:
        ValueError: the drafter has no confidence head.
    """
    if drafter.confidence_head is None:
        raise ValueError("traces need confidences, and this drafter has no confidence head. Train one with it.")
    traces = []
    rounds: list[Round] = []
    torch.manual_seed(seed)
    with verified_to_the_end(drafter, rounds.append):
        for start in range(0, len(prompts), batch_size):
            inputs = encode_prompts(tokenizer, prompts[start : start + batch_size]).to(target.device)
            rounds.clear()
            target.generate(**inputs, **generate_kwargs, assistant_model=drafter)
            traces += [trace for row in range(len(inputs["input_ids"])) if (trace := _trace(rounds, row)) is not None]
    return traces


def _trace(rounds: Sequence[Round], row: int) -> Trace | None:
    length, blocks = -1, list[TracedBlock]()  # the first token comes from the prefill
    for one in rounds:
        if row in one.rows:
            place = one.rows.index(row)
            if drafted := one.drafted[place]:
                blocks.append(TracedBlock(length, one.confidence[place][: len(drafted)], one.accepted[place]))
            length += len(one.committed[place])
    return Trace(length, blocks) if blocks else None


def write_traces(traces: Sequence[Trace], path: str | Path) -> None:
    """Writes traces as JSONL, one a line, with the fields of [`Trace`] and [`TracedBlock`].

    A line is `{"tokens": 3, "blocks": [{"at": 0, "confidence": [0.9, 0.4], "accepted": 1}, ...]}`.
    """
    lines = [{"tokens": trace.tokens, "blocks": [asdict(block) for block in trace.blocks]} for trace in traces]
    write_text(Path(path), "".join(json.dumps(line) + "\n" for line in lines))


def read_traces(path: str | Path) -> list[Trace]:
    """Reads what [`write_traces`] wrote.

    Raises:
        ValueError: a line is no trace, or there is none; the message names the line.
    """
    traces = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            content = json.loads(line)
            traces.append(Trace(content["tokens"], [TracedBlock(**block) for block in content["blocks"]]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: expected a trace as `write_traces` writes it ({error}).") from error
    if not traces:
        raise ValueError(f"{path} must hold a trace, got an empty file. Record some.")
    return traces


@dataclass(frozen=True)
class Simulated:
    """What a simulated server did.

    Args:
        requests (`int`): in each round; the most, where none came after.
        rounds, drafts (`int`): forwards of the target, and rounds of them with a draft.
        tokens (`int`): committed, over all requests.
        verified, accepted (`int`): draft tokens.
        cycles (`int`): rounds, counted for each request in them.
        seconds (`float`): by the profile.
    """

    requests: int
    rounds: int
    drafts: int
    tokens: int
    verified: int
    accepted: int
    cycles: int
    seconds: float

    @property
    def throughput(self) -> float:
        """Tokens per second over all requests."""
        return self.tokens / self.seconds

    @property
    def user_speed(self) -> float:
        """Tokens per second of one request."""
        return self.throughput * self.rounds / self.cycles

    @property
    def tau(self) -> float:
        """τ: tokens per request and round."""
        return self.tokens / self.cycles

    @property
    def budget(self) -> float:
        """Verified draft tokens per request and round."""
        return self.verified / self.cycles

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates, for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in ("throughput", "user_speed", "tau", "budget")}


@dataclass
class _Row:
    """A request that is being answered: where it stands, and how far it goes."""

    trace: Trace
    at: int
    end: int


def simulate(
    traces: Sequence[Trace],
    profile: LoadProfile,
    concurrency: int,
    mode: str = "presampled",
    *,
    draft_tokens: int | None = None,
    threshold: float = 0.5,
    threshold_on: str = "conditional",
    rounds: int = 300,
    drains: bool = False,
    overhead_seconds: float = 0.0,
    seed: int = 0,
) -> Simulated:
    """Serves requests whose drafts are those of the traces.

    Args:
        traces (sequence of [`Trace`]): requests are drawn from them.
        profile ([`LoadProfile`]): what a round costs; its load is not read.
        concurrency (`int`): requests that share every forward.
        mode (`str`, defaults to `"presampled"`): `"plain"` (no drafts), `"full"` (drafts of `draft_tokens`), or a scheduling
            mode of the drafter, with its pauses and discounts, see [`~hf_dspark.profitability`].
        draft_tokens (`int`, *optional*): longest draft; as long as recorded when not given.
        threshold (`float`, defaults to 0.5): for `"threshold"`.
        threshold_on (`str`, defaults to `"conditional"`): whether it applies to each confidence or to their product.
        rounds (`int`, defaults to 300): how many to simulate; whoever is done makes place for the next, and all start
            somewhere in their answers, as in a server that has run for long.
        drains (`bool`, defaults to `False`): instead, the first traces start together and nobody comes after them, as
            in a call of `generate`; ends with the last.
        overhead_seconds (`float`, defaults to 0.0): of a round, for all that is neither draft nor target.
        seed (`int`, defaults to 0): of the draws.

    Returns:
        [`Simulated`].

    Raises:
        ValueError: `mode` is none of these, there are too few traces, or a count is below 1.
    """
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(MODES)}, got {mode!r}. Name one.")
    needed = concurrency if drains else 1
    if concurrency < 1 or rounds < 1 or len(traces) < needed:
        raise ValueError(
            f"`concurrency` and `rounds` must be at least 1, with {needed} traces for this; got {concurrency}, {rounds} and "
            f"{len(traces)} traces. Ask for less, or record more."
        )
    longest = max(len(block.confidence) for trace in traces for block in trace.blocks)
    limit = longest if draft_tokens is None else min(draft_tokens, longest)
    dice, profile = random.Random(seed), profile.with_load(1)
    account = Profitability(profile) if mode not in ("plain", "full") else None
    if drains:
        rows = [_Row(trace, 0, trace.tokens) for trace in traces[:concurrency]]
    else:
        drawn = [dice.choice(traces) for _ in range(concurrency)]
        rows = [_Row(trace, dice.randrange(trace.tokens), trace.tokens) for trace in drawn]
    most = max(row.end for row in rows)
    older: list[torch.Tensor] = []  # confidences of the two latest drafted rounds, a row per request
    counts = dict.fromkeys(("rounds", "drafts", "tokens", "verified", "accepted", "cycles"), 0)
    seconds = 0.0
    while rows and (drains or counts["rounds"] < rounds):
        blocks = [row.trace.near(row.at) for row in rows]
        room = [
            max(0, min(limit, len(block.confidence), row.end - row.at - 1)) for row, block in zip(rows, blocks, strict=True)
        ]
        lengths, promised = [0] * len(rows), 0.0
        drafts = mode != "plain" and max(room) > 0 and (account is None or account.should_draft(len(rows)))
        if drafts:
            lengths, promised = _lengths(mode, blocks, room, profile, account, older, limit, threshold, threshold_on)
        batch_tokens = len(rows) + sum(lengths)
        spent = profile.round_seconds if drafts else profile.step_seconds
        seconds += overhead_seconds + spent(batch_tokens, len(rows))
        accepted = [min(length, block.accepted) for length, block in zip(lengths, blocks, strict=True)]
        counts["rounds"] += 1
        counts["drafts"] += drafts
        counts["tokens"] += len(rows) + sum(accepted)
        counts["verified"] += sum(lengths)
        counts["accepted"] += sum(accepted)
        counts["cycles"] += len(rows)
        for row, kept in zip(rows, accepted, strict=True):
            row.at += kept + 1
        if drafts and account is not None:
            left = [most - row.at if row.at < row.end else 0 for row in rows] if drains else None  # it cannot know their ends
            account.record(len(rows), sum(lengths), sum(accepted), [kept + 1 for kept in accepted], promised, left)
        going = [place for place, row in enumerate(rows) if row.at < row.end]
        if len(going) < len(rows):
            if drains:
                rows, older = [rows[place] for place in going], [confidence[going] for confidence in older]
            else:
                for place in set(range(len(rows))) - set(going):
                    trace = dice.choice(traces)
                    rows[place] = _Row(trace, 0, trace.tokens)
                    for confidence in older:
                        confidence[place] = confidence.mean(dim=0)  # as a request that joins is taken to be
    return Simulated(concurrency, seconds=seconds, **counts)


def _lengths(
    mode: str,
    blocks: Sequence[TracedBlock],
    room: Sequence[int],
    profile: LoadProfile,
    account: Profitability | None,
    older: list[torch.Tensor],
    limit: int,
    threshold: float,
    threshold_on: str,
) -> tuple[list[int], float]:
    """Lengths of a round, and the accepted tokens that the confidences promise; as the candidate generator does it."""
    if mode == "full":
        return list(room), 0.0
    padded = [[*block.confidence[:kept], *[0.0] * (limit - kept)] for block, kept in zip(blocks, room, strict=True)]
    confidence = torch.tensor(padded, dtype=torch.float64)
    if mode != "threshold":
        confidence[:, 0] *= account.discount
    before = None
    if mode == "two_step":
        before = older[0] if len(older) == 2 else None
        older[:] = [*older[-1:], confidence.clone()]
    lengths = scheduling.schedule(mode, confidence, profile, before, threshold, on=threshold_on)
    lengths = lengths.minimum(torch.tensor(room))
    admitted = torch.arange(limit) < lengths[:, None]
    return lengths.tolist(), float((scheduling.survival(confidence) * admitted).sum())


def policies(draft_tokens: int, fixed: Sequence[int] = (), threshold: float = 0.5) -> dict[str, dict[str, Any]]:
    """Arguments of [`simulate`] by name: plain, fixed lengths (all of them if none is named), and every exact mode."""
    return {
        "plain": {"mode": "plain"},
        **{f"fixed {n}": {"mode": "full", "draft_tokens": n} for n in fixed or range(1, draft_tokens + 1)},
        f"threshold {threshold:g}": {"mode": "threshold", "threshold": threshold},
        **{mode: {"mode": mode} for mode in ("early_stop", "two_step", "presampled")},
    }


def sweep(
    traces: Sequence[Trace],
    profile: LoadProfile,
    concurrencies: Sequence[int],
    named: Mapping[str, dict[str, Any]],
    rounds: int = 300,
) -> list[dict[str, Any]]:
    """Simulates every policy at every concurrency.

    Args:
        traces, profile, rounds: as for [`simulate`].
        concurrencies (sequence of `int`s): requests that share every forward.
        named (mapping of `str` to `dict`): of [`policies`].

    Returns:
        `list[dict]`: `policy`, `concurrency` and the values of [`Simulated`].
    """
    return [
        {"policy": name, "concurrency": count} | simulate(traces, profile, count, rounds=rounds, **options).to_dict()
        for name, options in named.items()
        for count in concurrencies
    ]
