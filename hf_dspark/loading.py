"""Targets and drafters by the name a user gives: a folder, a repo id, or `"default"` for the pair that comes along.

The command line, the examples and the Space all start here. In your own code `AutoModelForCausalLM.from_pretrained` and
`DSparkDraftModel.from_pretrained` do the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .demo import DRAFTER_FOLDER, load_target
from .modeling_dspark import DSparkDraftModel


def target_by_name(name: str = "default") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a target and its tokenizer, on the GPU where there is one.

    Args:
        name (`str`, defaults to `"default"`): folder or repo id of a causal language model; `"default"` is the embedded one.

    Returns:
        `tuple`: the target in evaluation mode, in float32 on a processor and in the dtype of its weights elsewhere, and its
        tokenizer.

    Raises:
        OSError: there is no such model.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "default":
        model, tokenizer = load_target()
    else:
        dtype = torch.float32 if device == "cpu" else "auto"
        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
            tokenizer = AutoTokenizer.from_pretrained(name)
        except OSError as error:
            raise OSError(f"the target {name!r} could not be loaded: {error}") from error
    return model.to(device), tokenizer  # type: ignore[arg-type]


def drafter_by_name(
    name: str | os.PathLike = "default", target: PreTrainedModel | None = None, **hub_kwargs: Any
) -> DSparkDraftModel:
    """Loads a drafter.

    Args:
        name (`str` or `os.PathLike`, defaults to `"default"`): folder or repo id; `"default"` is the one that comes along.
        target (`PreTrainedModel`, *optional*): gives precision and device; without one the drafter is as it is on disk.
        hub_kwargs: `revision`, `token`, … of [`DSparkDraftModel.from_pretrained`].

    Returns:
        [`DSparkDraftModel`], in evaluation mode.

    Raises:
        CheckpointError: it is no drafter, or a damaged one.
    """
    folder = DRAFTER_FOLDER if name == "default" else name
    if target is None:
        return DSparkDraftModel.from_pretrained(folder, **hub_kwargs)
    drafter = DSparkDraftModel.from_pretrained(folder, dtype=target.dtype, **hub_kwargs)
    if drafter.config.vocab_size is None:  # some packagings do not say it, and `generate` compares it before all else
        drafter.config.vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if target.device.type != "meta":  # offloaded weights have no place
        drafter = drafter.to(target.device)
    if name == "default":  # its profile may be of another machine: better than none, and soon corrected
        drafter.load_profile = drafter.load_profile.live()
    return drafter
