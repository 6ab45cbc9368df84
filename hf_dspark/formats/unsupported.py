"""Packagings that are recognised and refused by name.

Each of them differs from the others in something silent: what the first slot predicts, how layers are counted, which
rope or norm is meant. A reader that guesses still gives correct text and loses most of the speed, so a packaging is
either read by a module of its own or named here, with what such a module has to mind.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def refusal(raw: dict[str, Any], tensors: Collection[str]) -> str:
    """Why a checkpoint is not read.

    Args:
        raw (`dict`): its `config.json`.
        tensors (collection of `str`): names of its tensors, as far as they are known.

    Returns:
        `str`: a sentence that names the packaging, or says that it is unknown.
    """
    architectures, model_type = raw.get("architectures"), str(raw.get("model_type", ""))
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    label = f"{architecture} {model_type}".lower()
    keys = {*raw, *(key for value in raw.values() if isinstance(value, dict) for key in value)}
    # What is special comes before what is common: a drafter for Nemotron may well be packed by SpecForge.
    known = (
        ("an EAGLE-3 drafter", "eagle" in label, "it drafts one token at a time, which is another method"),
        (
            "a drafter inside of a DeepSeek-V4 checkpoint",
            "deepseek" in label
            or any(key.startswith("dspark_") for key in raw)
            or any(name.startswith("mtp.") for name in tensors),
            "its layers are mixtures of experts with an embedding of their own",
        ),
        ("an LFM2 drafter", "lfm2" in label or "rope_is_neox_style" in keys, "its rope is interleaved"),
        (
            "an Ornith or Qwen3.5 drafter",
            "ornith" in label or "qwen3_5" in label or "qwen3.5" in label,
            "its norms are offset by one and its queries gated",
        ),
        ("a Nemotron drafter", "nemotron" in label, "its attention has sinks and its blocks are causal"),
        (
            "a Model-Optimizer export",
            any(name.startswith(("markov_w1", "confidence_proj")) for name in tensors),
            "without `shift_label` in its `dflash_config` it does not say whether its first slot predicts",
        ),
        (
            "a language model",
            architecture.endswith(("ForCausalLM", "ForConditionalGeneration")),
            "it can be the target; pass the drafter that was trained for it",
        ),
    )
    readable = (
        "Readable are this library's own packaging, DeepSpec for Qwen3 and Gemma4 targets, speculators, SpecForge, DFlash, "
        "muse_glimmer_assistant and Model-Optimizer."
    )
    for name, found, why in known:
        if found:
            return f"this is {name}, which is not read: {why}. {readable}"
    return f"config.json is of no known drafter (architectures {architectures!r}, model_type {model_type!r}). {readable}"
