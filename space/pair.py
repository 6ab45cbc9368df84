"""The pair of models on stage."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from visitors import Refused

from hf_dspark import DSparkDraftModel, LoadProfile, pack_linears
from hf_dspark.loading import drafter_by_name, target_by_name

PROMPT_TOKEN_LIMIT = 512
_BATCH_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Pair:
    """A target with its tokenizer and drafter, and what a forward of the target costs on this machine."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DSparkDraftModel
    profile: LoadProfile
    name: str

    def encode(self, prompt: str) -> Tensor:
        """Token ids `(P,)` of a prompt, as a user's turn where the tokenizer knows turns.

        Raises:
            Refused: the prompt has too many tokens.
        """
        if self.tokenizer.chat_template:
            turns = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
        else:
            ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"][0]
        if len(ids) > PROMPT_TOKEN_LIMIT:
            raise Refused(f"The prompt has {len(ids)} tokens. Please keep it to {PROMPT_TOKEN_LIMIT}.")
        return ids

    def word(self, token: int) -> str:
        """A token as one can see it: with its spaces and line breaks."""
        text = self.tokenizer.decode([token])
        if "\ufffd" in text:
            return "(part of a character)"
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
