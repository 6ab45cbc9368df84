"""The pair of models on stage, and the one place where they run: one visitor at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from visitors import Refused

from hf_dspark import DSparkDraftModel, LoadProfile, Round, pack_linears
from hf_dspark.loading import drafter_by_name, target_by_name

PROMPT_TOKEN_LIMIT = 512
_BATCH_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_PATIENCE = 120.0  # seconds after which a run that nobody continues gives up


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer and drafter, and what a forward of the target costs on this machine."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DSparkDraftModel
    profile: LoadProfile
    name: str

    def encode(self, prompt: str) -> dict[str, Tensor]:
        """Token ids and mask of a prompt, as a user's turn where the tokenizer knows turns.

        Raises:
            Refused: the prompt has too many tokens.
        """
        if self.tokenizer.chat_template:
            turns = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            inputs = self.tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        if length > PROMPT_TOKEN_LIMIT:
            raise Refused(f"The prompt has {length} tokens. Please keep it to {PROMPT_TOKEN_LIMIT}.")
        return {name: inputs[name].to(self.target.device) for name in ("input_ids", "attention_mask")}

    def word(self, token: int) -> str:
        """A token as one can see it: with its spaces and line breaks."""
        text = self.tokenizer.decode([token])
        return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "(nothing)"


def load_pair() -> Pair:
    """The pair that `TARGET_MODEL` and `DRAFTER_MODEL` name (folders or repo ids), or the embedded default.

    `LOAD_PROFILE` names a saved profile; without it the machine is measured, which takes a quarter of a minute or so.

    Raises:
        ValueError: only one of the two is set.
    """
    names = os.environ.get("TARGET_MODEL"), os.environ.get("DRAFTER_MODEL")
    if any(names) and not all(names):
        raise ValueError("set both TARGET_MODEL and DRAFTER_MODEL, or neither for the embedded default")
    target, tokenizer = target_by_name(names[0] or "default")
    drafter = drafter_by_name(names[1] or "default", target)
    if target.device.type == "cpu" and torch.backends.mkldnn.is_available():
        pack_linears(target, drafter.config.num_draft_tokens + 1)
        pack_linears(drafter, drafter.config.num_draft_tokens)
    if saved := os.environ.get("LOAD_PROFILE"):
        profile = LoadProfile.load(saved)
    else:
        profile = LoadProfile.measure(target, drafter, batch_tokens=_BATCH_TOKENS, repeats=3)
    return Pair(target, tokenizer, drafter, profile, target.name_or_path.rstrip("/").rpartition("/")[2])


class _Cancelled(Exception):
    """Ends a `generate` from inside, because nobody waits for it any more."""


class Runner(threading.Thread):
    """A call of `generate` that runs one forward of the target at a time, when it is told to.

    So two of them can take turns on one machine without disturbing each other, and a visitor who leaves stops the work.

    Args:
        generate (callable): gets a function to call after every forward, and returns the output.

    Attributes:
        seconds (`float`): time in which it was its turn.
        output: what `generate` returned; `None` before the end.
        finished (`bool`): no further step will follow.
    """

    def __init__(self, generate: Callable[[Callable[[], None]], Tensor]):
        super().__init__(daemon=True)
        self.seconds, self.output, self.finished = 0.0, None, False
        self._generate, self._error, self._cancelled = generate, None, False
        self._turn, self._stopped = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self._wait()
            self.output = self._generate(self._pause)
            self.seconds += time.perf_counter() - self._since
        except _Cancelled:
            pass
        except BaseException as error:  # it belongs to whoever takes the next step
            self._error = error
        self.finished = True
        self._stopped.set()

    def step(self) -> None:
        """Lets `generate` go on to the end of its next forward."""
        self._turn.set()
        self._stopped.wait()
        self._stopped.clear()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Ends the call, at once or after the forward that is under way, and waits for that."""
        self._cancelled = True
        self._turn.set()
        if self.is_alive():
            self.join()

    def _pause(self) -> None:
        self.seconds += time.perf_counter() - self._since
        self._stopped.set()
        self._wait()

    def _wait(self) -> None:
        called = self._turn.wait(_PATIENCE)
        self._turn.clear()
        if self._cancelled or not called:
            raise _Cancelled
        self._since = time.perf_counter()


_on_stage: list[Runner] = []
_door = threading.Lock()


def take_stage(*runners: Runner) -> None:
    """Starts runners in place of all earlier ones. The queue lets one visitor in at a time: those earlier ones were left."""
    with _door:
        for runner in _on_stage:
            runner.cancel()
        _on_stage[:] = runners
        for runner in runners:
            runner.start()


def draft(
    pair: Pair,
    inputs: dict[str, Tensor],
    heard: Callable[[Round], None],
    pause: Callable[[], None],
    verify_all: bool = False,
    **options: Any,
) -> Tensor:
    """`generate` with the drafter, for a [`Runner`]: `heard` is told of every round, and then it is `pause`."""

    def on_round(one: Round) -> None:
        heard(one)
        pause()

    drafter = pair.drafter
    drafter.on_round = on_round
    drafter.load_profile, drafter.scheduling = pair.profile, "full" if verify_all else None
    try:
        return pair.target.generate(**inputs, **options, assistant_model=drafter)
    finally:
        drafter.on_round = None
