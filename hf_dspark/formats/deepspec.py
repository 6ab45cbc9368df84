"""The packaging of DeepSpec, the reference code, for Qwen3 targets: DSpark drafters and their DFlash siblings.

`config.json` is a copy of the *target's* configuration with the drafter's keys on top, so `model_type` is "qwen3", some
fields describe the target (`max_window_layers`, `tie_word_embeddings`) and some the training (`num_anchors`); neither
is taken. All of these drafters are anchor first, which no key says: slot 1, whose input is the anchor, predicts too.
Layer ids count as ours do. The siblings without a sequential head are written as rank 0.

The weights carry the target's embedding and LM head. They are most of the bytes and no part of the drafter: they are
not loaded, but compared with the target's own when it is bound.
"""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError

TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")

_DSPARK, _DFLASH = "Qwen3DSparkModel", "Qwen3DFlashModel"
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "block_size", "mask_token_id",
    "target_layer_ids", "num_target_layers",
)  # fmt: skip
_HEADS = ("markov_rank", "enable_confidence_head")
_OPTIONAL = (
    "attention_bias", "attention_dropout", "initializer_range", "markov_head_type", "confidence_head_with_markov",
    "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging."""
    return raw.get("architectures") in ([_DSPARK], [_DFLASH])


def convert(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a [`DSparkConfig`] from the content of `config.json`, and notes for the user (none here).

    Raises:
        CheckpointError: a key is missing, or the layers' attention is of a kind that no drafter here has.
    """
    parallel = raw["architectures"] == [_DFLASH]
    if parallel:
        raw = {"markov_rank": 0, "enable_confidence_head": False, **raw}
    missing = [name for name in (*_REQUIRED, *_HEADS) if raw.get(name) is None]
    if missing:
        raise CheckpointError(
            f"config.json has no `{missing[0]}`, which a DeepSpec checkpoint needs. Use the one saved with the weights."
        )
    if parallel and (raw["markov_rank"] != 0 or raw["enable_confidence_head"]):
        raise CheckpointError(
            f"config.json names a {_DFLASH}, which has no heads, but sets `markov_rank` to {raw['markov_rank']} and "
            f"`enable_confidence_head` to {raw['enable_confidence_head']}. Use the one saved with the weights."
        )
    fields = {name: raw[name] for name in (*_REQUIRED, *_HEADS)}
    fields |= {name: raw[name] for name in _OPTIONAL if raw.get(name) is not None}
    fields |= {"sample_from_anchor": raw.get("sample_from_anchor", True)}
    fields |= {"rope_parameters": _rope(raw), "sliding_window": _sliding_window(raw)}
    return fields, []


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rope settings, in the present form or in that of transformers 4 (`rope_theta` beside `rope_scaling`)."""
    rope = raw.get("rope_parameters")
    if rope is None and raw.get("rope_theta") is not None:
        rope = raw.get("rope_scaling") or {}
        if isinstance(rope, dict):
            rope = {"rope_type": rope.get("type", "default"), **rope, "rope_theta": raw["rope_theta"]}
            rope.pop("type", None)
    if not isinstance(rope, dict):
        raise CheckpointError(
            f"config.json: `rope_parameters` must be an object, got {rope!r}. Use the one saved with the weights."
        )
    return dict(rope)


def _sliding_window(raw: dict[str, Any]) -> int | None:
    """The window of the draft layers: of all of them or of none."""
    kinds = raw.get("layer_types") or ["full_attention"]
    kind = kinds[0] if isinstance(kinds, list) and kinds.count(kinds[0]) == len(kinds) else None
    if kind == "full_attention":
        return None
    if kind != "sliding_attention" or raw.get("sliding_window") is None:
        raise CheckpointError(
            "config.json: `layer_types` must be all full_attention, or all sliding_attention with a `sliding_window`, "
            f"got {kinds} and {raw.get('sliding_window')}. This drafter cannot be run."
        )
    return raw["sliding_window"]
