"""Inside a block: what each stage said about each position. And the table of habits behind the sequential head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pair import Pair
from stage import Stage
from visitors import Refused, escape

from hf_dspark import Event, LoadProfile
from hf_dspark.scheduling import global_search

SHOWN = 8  # blocks
LENGTH = 24  # tokens generated to get them


@dataclass(frozen=True)
class Position:
    """One position of a block.

    Args:
        base (`int`): likeliest token of the parallel stage.
        draft (`int`): token after the sequential head.
        confidence, survival (`float`, *optional*): c_k and a_k; `None` without a confidence head.
        scheduled (`bool`): whether the scheduler would have had it verified.
        target (`int`, *optional*): the target's own choice there; `None` behind the first disagreement.
    """

    base: int
    draft: int
    confidence: float | None
    survival: float | None
    scheduled: bool
    target: int | None


def record(stage: Stage, prompt: str, length: int = LENGTH) -> Iterator[list[Event]]:
    """Generates greedily, verifying every drafted token, and yields the passes with a draft so far."""
    passes: list[Event] = []
    for turns in stage.serve(["full"], stage.pair.encode(prompt), max_new_tokens=length):
        passes += [event for turn in turns for event in turn.events if event.drafted]
        yield passes


def positions(one: Event, profile: LoadProfile) -> list[Position]:
    """What happened at each position of a fully verified greedy pass."""
    drafted, accepted = one.drafted, one.accepted
    confidence = None if one.confidence is None else one.confidence[: len(drafted)]
    length, survival, result = len(drafted), 1.0, []
    if confidence is not None:
        length = int(global_search(torch.tensor([confidence]), profile))
    for k, token in enumerate(drafted):
        if confidence is not None:
            survival *= confidence[k]
        said = None
        if k < accepted:
            said = token
        elif k == accepted and len(one.tokens) > k:
            said = one.tokens[k]
        c, a = (None, None) if confidence is None else (confidence[k], survival)
        result.append(Position(one.base[k], token, c, a, k < length, said))
    return result


def page(pair: Pair, passes: Sequence[Event]) -> str:
    """The first blocks as tables, the first one open."""
    blocks = []
    for number, one in enumerate(passes[:SHOWN], start=1):
        table = positions(one, pair.profile)
        length = sum(position.scheduled for position in table)
        body = "".join(_row(pair, k, position, k == length) for k, position in enumerate(table, start=1))
        bonus = ""
        if one.accepted == len(table) and len(one.tokens) > len(table):
            bonus = f'<p class="hint">All survived; the target added {_code(pair, one.tokens[-1])}.</p>'
        blocks.append(
            f"<details{' open' if number == 1 else ''}><summary>Block {number}: {one.accepted} of {len(table)} survived, "
            f'the scheduler would verify {length}</summary><div class="wide" tabindex="0"><table><thead><tr><th>#</th>'
            "<th>base guess</th><th>after the habits</th><th>confidence</th><th>all so far</th><th>scheduler</th>"
            f"<th>target said</th></tr></thead><tbody>{body}</tbody></table></div>{bonus}</details>"
        )
    return "".join(blocks)


def _row(pair: Pair, k: int, position: Position, last: bool) -> str:
    changed = " <small>changed</small>" if position.base != position.draft else ""
    scheduler = "verify" if position.scheduled else '<span class="faint">cut</span>'
    if position.target is None:
        said = '<span class="faint">not reached</span>'
    elif position.target == position.draft:
        said = '<span class="accepted">✓ the same</span>'
    else:
        said = f'<span class="wrong">✗</span> {_code(pair, position.target)}'
    numbers = "".join(
        f"<td>{'–' if value is None else f'{value:.2f}'}</td>" for value in (position.confidence, position.survival)
    )
    return (
        f'<tr class="{"cut-here" if last else ""}"><td>{k}</td><td>{_code(pair, position.base)}</td>'
        f"<td>{_code(pair, position.draft)}{changed}</td>{numbers}"
        f"<td>{scheduler}</td><td>{said}</td></tr>"
    )


def _code(pair: Pair, token: int) -> str:
    return f"<code>{escape(pair.word(token))}</code>"


def habits(pair: Pair, text: str, count: int = 8) -> tuple[int, list[tuple[int, float]], list[tuple[int, float]]]:
    """Which tokens the sequential head makes likelier and unlikelier behind a token.

    Args:
        pair ([`Pair`]): the models.
        text (`str`): checked text; its last token counts.
        count (`int`): entries of each list.

    Returns:
        `tuple`: the token; the most boosted successors and the most suppressed ones, each with its bias against the mean.

    Raises:
        Refused: the drafter has no such table, or the text makes no token.
    """
    head, drafter = pair.drafter.markov_head, pair.drafter
    if head is None or drafter.config.markov_head_type == "rnn":
        raise Refused("This drafter has no table of habits: its head is missing, or remembers more than one token.")
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise Refused("The text makes no token. Please type something else.")
    with torch.no_grad():
        bias = head.markov_w2(head.markov_w1(torch.tensor(ids[-1:], device=drafter.device)))[0].float()
    bias = bias - bias.mean()
    lists = []
    for sign in (1, -1):
        places = (sign * bias).topk(min(count, len(bias))).indices
        tokens = places if drafter.draft_token_ids is None else drafter.draft_token_ids[places]
        lists.append(list(zip(tokens.tolist(), bias[places].tolist(), strict=True)))
    return ids[-1], *lists


def habits_page(pair: Pair, text: str) -> str:
    """Both lists side by side, as bars."""
    token, boosted, suppressed = habits(pair, text)
    widest = max(abs(value) for _, value in [*boosted, *suppressed]) or 1.0
    columns = "".join(
        f"<div><h4>{title}</h4><ul class='habits'>"
        + "".join(
            f'<li>{_code(pair, one)}<span class="{kind}" style="width:{70 * abs(value) / widest:.0f}px"></span>'
            f"{value:+.1f}</li>"
            for one, value in entries
        )
        + "</ul></div>"
        for title, kind, entries in (("most boosted", "up", boosted), ("most suppressed", "down", suppressed))
    )
    gated = " In this drafter a gate weighs the table by the context; here it is open." * (
        pair.drafter.config.markov_head_type == "gated"
    )
    return (
        f'<p role="status">Behind {_code(pair, token)}:</p><div class="pair">{columns}</div><p class="hint">Added to '
        "the next position's logits, against the mean over the drafter's vocabulary: +2.3 makes a token ten times as likely "
        f"as before.{gated}</p>"
    )
