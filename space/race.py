"""The race: plain decoding and DSpark on one prompt, in turn on one machine, each by its own clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from pair import Pair, Runner, draft, take_stage
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from visitors import escape

from hf_dspark import Round
from hf_dspark.evaluation.comparison import match_texts

LENGTH_LIMIT = 128  # new tokens

VERDICTS = {
    "same": "Same text, token for token.",
    "near-tie": "The texts part where the target itself was undecided: two words with the same score, up to rounding.",
    "differs": "The texts differ. That should not happen in greedy mode: please report it.",
    "sampled": "Sampled: two draws from the same law, so the texts need not agree.",
}


class Lane:
    """One of the two texts as it grows.

    Attributes:
        ids (`list[int]`): new tokens.
        spans (`list[tuple[str, str, int]]`): kind (`"accepted"`, `"rejected"` or `"own"`), text, and number of the pass.
        passes (`int`): forwards of the target, the one over the prompt included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.ids: list[int] = []
        self.spans: list[tuple[str, str, int]] = []
        self.passes = 0
        self._tokenizer, self._shown = tokenizer, ""

    def add(self, one: Round) -> None:
        """Adds what a pass of the target brought."""
        drafted, committed = one.drafted[0], one.committed[0]
        kept = min(one.accepted[0], len(committed))
        self.passes += 1
        self._append("accepted", committed[:kept])
        if len(committed) > kept:  # not where the text ended inside the draft
            rejected = drafted[kept:]
            if rejected:
                imagined = self._tokenizer.decode(self.ids + rejected, skip_special_tokens=True)
                self.spans.append(("rejected", imagined[len(self._shown) :], self.passes))
            self._append("own", committed[kept:])

    def add_token(self, token: int) -> None:
        """Adds the one token of a plain pass."""
        self.passes += 1
        self._append("own", [token])

    def _append(self, kind: str, tokens: list[int]) -> None:
        for token in tokens:
            self.ids.append(token)
            text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # else a character whose last bytes are still to come
                self.spans.append((kind, text[len(self._shown) :], self.passes))
                self._shown = text

    @property
    def text(self) -> str:
        """The text without what was rejected."""
        return "".join(text for kind, text, _ in self.spans if kind != "rejected")

    def html(self) -> str:
        """The text with each token's origin marked; rejected tokens fade once the next pass is over."""
        marked = []
        for (kind, number), spans in groupby(self.spans, key=lambda span: (span[0], span[2] if span[0] != "own" else 0)):
            text = "".join(text for _, text, _ in spans)
            if kind == "rejected":
                text = text.replace("\n", "⏎")  # what was thrown away must not tear the text apart
                kind += " old" if number < self.passes else ""
            marked.append(f'<span class="{kind}">{escape(text)}</span>')
        return f'<div class="lane">{"".join(marked) or "…"}</div>'


class Race:
    """State of a race; [`run`] moves it on.

    Attributes:
        plain, dspark ([`Lane`]): the two texts.
        plain_seconds, dspark_seconds (`float`): time in which it was each one's turn.
        verdict (`str`): a key of `VERDICTS` once both are done; empty before.
    """

    def __init__(self, pair: Pair):
        self.plain, self.dspark = Lane(pair.tokenizer), Lane(pair.tokenizer)
        self.plain_seconds = self.dspark_seconds = 0.0
        self.verdict = ""

    @property
    def tau(self) -> float:
        """τ: tokens per pass of the target after the one over the prompt; 0.0 before the first."""
        return (len(self.dspark.ids) - 1) / (self.dspark.passes - 1) if self.dspark.passes > 1 else 0.0

    @property
    def saved(self) -> int:
        """Passes of the target that plain decoding would have needed on top for DSpark's text."""
        return len(self.dspark.ids) - self.dspark.passes


def run(pair: Pair, prompt: str, length: int = 64, sample: bool = False, verify_all: bool = False) -> Iterator[Race]:
    """Runs a race and yields it after every forward of the target.

    Whichever lane has used less time goes next, so at any moment both have had the machine for the same time.

    Args:
        pair ([`Pair`]): the models.
        prompt (`str`): checked text.
        length (`int`): new tokens, at most.
        sample (`bool`): draw tokens instead of taking the likeliest.
        verify_all (`bool`): verify every drafted token instead of asking the scheduler.
    """
    inputs = pair.encode(prompt)
    options: dict[str, Any] = {"max_new_tokens": min(max(int(length), 1), LENGTH_LIMIT), "do_sample": sample}
    race = Race(pair)

    def plain(pause) -> Tensor:
        return pair.target.generate(**inputs, **options, streamer=_EveryToken(race.plain, pause))

    def dspark(pause) -> Tensor:
        return draft(pair, inputs, race.dspark.add, pause, verify_all, **options)

    runners = Runner(plain), Runner(dspark)
    take_stage(*runners)
    try:
        while waiting := [runner for runner in runners if not runner.finished]:
            min(waiting, key=lambda runner: runner.seconds).step()
            race.plain_seconds, race.dspark_seconds = (runner.seconds for runner in runners)
            yield race
        outputs = [runner.output for runner in runners]
        if any(output is None for output in outputs):  # another visitor took the stage
            return
        race.verdict = "sampled"
        if not sample:
            with torch.no_grad():
                race.verdict = match_texts(pair.target, *(out[0] for out in outputs), inputs["attention_mask"][0])
        yield race
    finally:
        for runner in runners:
            runner.cancel()


class _EveryToken(BaseStreamer):
    """Hands each new token of plain decoding to its lane."""

    def __init__(self, lane: Lane, pause):
        self.lane, self.pause, self.seen_prompt = lane, pause, False

    def put(self, value: Tensor) -> None:
        if self.seen_prompt:
            self.lane.add_token(int(value))
            self.pause()
        self.seen_prompt = True

    def end(self) -> None:
        pass


def column(race: Race, name: str) -> str:
    """A lane under its title and numbers, `name` being `"plain"` or `"dspark"`."""
    title = "DSpark" if name == "dspark" else "Plain decoding"
    return f"<h3>{title}</h3>{figures(race, name)}{getattr(race, name).html()}"


def figures(race: Race, name: str) -> str:
    """The numbers of a lane, `name` being `"plain"` or `"dspark"`."""
    lane, seconds = getattr(race, name), getattr(race, f"{name}_seconds")
    items = [
        (f"{len(lane.ids) / seconds:.1f}" if seconds else "–", "tokens/s"),
        (str(len(lane.ids)), "tokens"),
        (str(lane.passes), "target passes"),
    ]
    if name == "dspark":
        share = race.saved / len(lane.ids) if lane.ids else 0.0
        items += [
            (f"{race.tau:.2f}" if race.tau else "–", "τ, tokens per pass"),
            (f"{race.saved} ({share:.0%})", "passes saved"),
        ]
    cells = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in items)
    return f'<div class="figures">{cells}</div>'


def verdict(race: Race) -> str:
    """The closing words: whether the texts agree, and what the race took."""
    if not race.verdict:
        return ""
    per_token = [
        seconds / max(len(lane.ids), 1)
        for seconds, lane in ((race.plain_seconds, race.plain), (race.dspark_seconds, race.dspark))
    ]
    ratio = per_token[0] / max(per_token[1], 1e-9)
    speed = "about as fast as" if 0.97 <= ratio <= 1.03 else f"{ratio:.2f}× as fast as"
    good = "good" if race.verdict in ("same", "near-tie", "sampled") else "bad"
    return (
        f'<p class="verdict {good}" role="status"><b>{VERDICTS[race.verdict]}</b> DSpark was {speed} plain decoding per token '
        f"and saved {race.saved} {'pass' if race.saved == 1 else 'passes'} of the target.</p>"
    )
