"""The race: plain decoding and DSpark on one prompt, in turn on one machine, each by its own clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from stage import Stage
from transformers import PreTrainedTokenizerBase
from visitors import escape

from hf_dspark import Event
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
        seconds (`float`): time in which it was its turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.ids: list[int] = []
        self.spans: list[tuple[str, str, int]] = []
        self.passes, self.seconds = 0, 0.0
        self._tokenizer, self._shown = tokenizer, ""

    def add(self, event: Event) -> None:
        """Adds what a pass of the target brought."""
        kept = min(event.accepted, len(event.tokens))
        self.passes += 1
        self._append("accepted", event.tokens[:kept])
        if len(event.tokens) > kept:  # not where the text ended inside the draft
            rejected = event.drafted[kept:]
            if rejected:
                imagined = self._tokenizer.decode(self.ids + rejected, skip_special_tokens=True)
                self.spans.append(("rejected", imagined[len(self._shown) :], self.passes))
            self._append("own", event.tokens[kept:])

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
        verdict (`str`): a key of `VERDICTS` once both are done; empty before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.plain, self.dspark = Lane(tokenizer), Lane(tokenizer)
        self.verdict = ""

    @property
    def tau(self) -> float:
        """τ: tokens per pass of the target after the one over the prompt; 0.0 before the first."""
        return (len(self.dspark.ids) - 1) / (self.dspark.passes - 1) if self.dspark.passes > 1 else 0.0

    @property
    def saved(self) -> int:
        """Passes of the target that plain decoding would have needed on top for DSpark's text."""
        return len(self.dspark.ids) - self.dspark.passes


def run(stage: Stage, prompt: str, length: int = 64, sample: bool = False, verify_all: bool = False) -> Iterator[Race]:
    """Runs a race and yields it as it goes on.

    Args:
        stage ([`Stage`]): runs the models.
        prompt (`str`): checked text.
        length (`int`): new tokens, at most.
        sample (`bool`): draw tokens instead of taking the likeliest.
        verify_all (`bool`): verify every drafted token instead of asking the scheduler.

    Raises:
        Refused: the prompt is too long, or the models failed.
    """
    pair = stage.pair
    ids, race = pair.encode(prompt), Race(pair.tokenizer)
    loops = "plain", "full" if verify_all else "scheduled"
    for turns in stage.serve(loops, ids, max_new_tokens=min(max(int(length), 1), LENGTH_LIMIT), do_sample=sample):
        for turn in turns:
            lane = race.plain if turn.loop == "plain" else race.dspark
            lane.seconds += turn.seconds
            for event in turn.events:
                lane.add(event)
        yield race
    race.verdict = "sampled"
    if not sample:
        texts = (torch.cat([ids, torch.tensor(lane.ids)]) for lane in (race.plain, race.dspark))
        race.verdict = stage.call(match_texts, pair.target, *texts, torch.ones_like(ids))
    yield race


def column(race: Race, name: str) -> str:
    """A lane under its title and numbers, `name` being `"plain"` or `"dspark"`."""
    title = "DSpark" if name == "dspark" else "Plain decoding"
    return f"<h3>{title}</h3>{figures(race, name)}{getattr(race, name).html()}"


def figures(race: Race, name: str) -> str:
    """The numbers of a lane, `name` being `"plain"` or `"dspark"`."""
    lane = getattr(race, name)
    items = [
        (f"{len(lane.ids) / lane.seconds:.3g}" if lane.seconds else "–", "tokens/s"),
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
    plain, dspark = (lane.seconds / len(lane.ids) for lane in (race.plain, race.dspark))
    ratio = plain / dspark
    speed = "about as fast as" if 0.97 <= ratio <= 1.03 else f"{ratio:.2f}× as fast as"
    good = "good" if race.verdict in ("same", "near-tie", "sampled") else "bad"
    return (
        f'<p class="verdict {good}" role="status"><b>{VERDICTS[race.verdict]}</b> DSpark was {speed} plain decoding per token '
        f"and saved {race.saved} {'pass' if race.saved == 1 else 'passes'} of the target.</p>"
    )
