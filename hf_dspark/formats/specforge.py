"""The packaging of SpecForge, which trains for SGLang: DSpark drafters as `DSparkDraftModel`.

`config.json` is that of a Qwen3 model of the drafter's own shape, its rope included. Mask token, layers and heads are
in `dflash_config`; some releases have the heads at the top level instead. The drafters are anchor first, which no key
says. Nothing of the target is in the file. Layer ids count as ours do.
"""

from __future__ import annotations

from typing import Any

from .backbone import HEADS, LAYERS_AS_HERE, Converted, convert_layers, merge_dflash_config, require, require_value

NAME = "SpecForge"
TARGET_COPIES: tuple[str, ...] = ()
RENAMED: dict[str, str] = {}

_REQUIRED = ("vocab_size", "block_size", "mask_token_id", "target_layer_ids", *HEADS)


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging."""
    return raw.get("architectures") == ["DSparkDraftModel"] and "dflash_config" in raw


def convert(raw: dict[str, Any]) -> Converted:
    """A `config.json` in our terms.

    Raises:
        CheckpointError: a key is missing, or stands there twice with different values.
    """
    merged = merge_dflash_config(raw, NAME)
    if merged.get("projector_type") is not None:
        require_value(merged, "projector_type", "dspark", "config.json, `dflash_config`")
    if merged.get("sample_from_anchor") not in (None, True):
        require_value(merged, "sample_from_anchor", "true")
    require(merged, _REQUIRED, NAME)
    fields = convert_layers(merged, NAME) | {name: merged[name] for name in _REQUIRED}
    fields |= {"num_target_layers": merged.get("num_target_layers"), "sample_from_anchor": True}
    decisions = [
        "sample_from_anchor = True: always so in this packaging",
        LAYERS_AS_HERE,
    ]
    return Converted(fields, decisions)
