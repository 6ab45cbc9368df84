"""The packaging of NVIDIA's Model-Optimizer: as SpecForge's, with the heads' tensors at the top level.

`shift_label` is its word for anchor first, and must be there: without it the two layouts cannot be told apart.
"""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError
from .backbone import LAYERS_AS_HERE, SAVED_TOGETHER, Converted, convert_layers, merge_dflash_config, require

NAME = "Model-Optimizer"
TARGET_COPIES: tuple[str, ...] = ()
RENAMED = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}

_REQUIRED = ("vocab_size", "block_size", "mask_token_id", "target_layer_ids", "markov_rank")


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging."""
    nested = raw.get("dflash_config")
    return isinstance(nested, dict) and any("shift_label" in keys for keys in (raw, nested))


def convert(raw: dict[str, Any]) -> Converted:
    """A `config.json` in our terms.

    Raises:
        CheckpointError: a key is missing, stands there twice with different values, or is not understood.
    """
    merged = merge_dflash_config(raw, NAME)
    require(merged, _REQUIRED, NAME)
    anchor = merged["shift_label"]
    if not isinstance(anchor, bool):
        raise CheckpointError(f"config.json: `shift_label` must be true or false, got {anchor!r}. Ask for a new export.")
    switches = {name: merged[name] for name in ("use_confidence_head", "enable_confidence_head") if name in merged}
    if len({str(value) for value in switches.values()}) != 1:
        raise CheckpointError(
            "config.json must say by `use_confidence_head` whether there is a confidence head, got "
            f"{switches or 'nothing'}. {SAVED_TOGETHER}"
        )
    fields = convert_layers(merged, NAME) | {name: merged[name] for name in _REQUIRED}
    fields |= {name: merged[name] for name in ("markov_head_type", "confidence_head_with_markov") if name in merged}
    fields |= {
        "num_target_layers": merged.get("num_target_layers"),
        "sample_from_anchor": anchor,
        "enable_confidence_head": next(iter(switches.values())),
    }
    decisions = [
        f"sample_from_anchor = {anchor}: `shift_label` says so",
        LAYERS_AS_HERE,
        "markov_w1, markov_w2, confidence_proj: read as markov_head.* and confidence_head.proj",
    ]
    return Converted(fields, decisions)
