"""What the packagings share: draft layers described in the words of a Qwen3 configuration.

Outside of this library a drafter's `config.json` speaks as a Qwen3 model does, at its top level or one level down, and
the drafter's own keys lie beside or below. The readers differ in where they look and in what a key means; what they do
with the layers' shape, rope and window is here, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError

SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_OPTIONAL = (
    "attention_bias", "attention_dropout", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
NO_GEMMA4 = "its draft layers are Qwen3's; write deepspec"
SAVED_TOGETHER = "Use the config.json that was saved with the weights."
# Fields and decisions that several packagings share.
PARALLEL_ONLY = {"sample_from_anchor": False, "markov_rank": 0, "enable_confidence_head": False}
BONUS_ANCHOR = "sample_from_anchor = False: always so in this packaging, the first slot only carries the anchor"
LAYERS_AS_HERE = "target_layer_ids: counted as here, id k is the output of decoder layer k"
# Settings of related drafters that change the network without changing a tensor: name, what it is here, what else it means.
_FOREIGN = (
    ("rope_is_neox_style", True, "the rope of LFM2 drafters is interleaved"),
    ("causal", False, "its slots do not see the later ones of their block"),
    ("attention_mode", "gqa", "its attention is of another kind"),
    ("use_swa", False, "how that window counts is not known"),
    ("confidence_temperatures", None, "they come with Ornith drafters, whose norms are offset by one"),
)


@dataclass(frozen=True)
class Converted:
    """A foreign `config.json` in our terms.

    Args:
        fields (`dict`): of a [`DSparkConfig`].
        decisions (`list[str]`): what was read from what, where a packaging leaves it open or counts otherwise.
        notes (`list[str]`): what the user should know even without asking.
    """

    fields: dict[str, Any]
    decisions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def require(raw: dict[str, Any], names: Iterable[str], packaging: str, where: str = "config.json") -> None:
    """Raises CheckpointError for the first of the keys that is missing or null."""
    for name in names:
        if raw.get(name) is None:
            raise CheckpointError(f"{where} has no `{name}`, which a {packaging} checkpoint needs. {SAVED_TOGETHER}")


def require_value(raw: dict[str, Any], name: str, expected: str, where: str = "config.json") -> None:
    """Raises CheckpointError if a key does not have the one value that is understood."""
    if raw.get(name) != expected:
        raise CheckpointError(
            f"{where}: `{name}` must be {expected!r}, got {raw.get(name)!r}. The layers of other kinds are not implemented "
            "here; use a drafter of this kind."
        )


def is_integer(value: Any) -> bool:
    """Whether a value of JSON is a whole number; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def convert_layers(raw: dict[str, Any], packaging: str, where: str = "config.json") -> dict[str, Any]:
    """Fields of a [`DSparkConfig`] that a Qwen3-like description of the draft layers gives.

    Args:
        raw (`dict`): the description.
        packaging (`str`): whose it is, for messages.
        where (`str`, defaults to `"config.json"`): where it was found, for messages.

    Raises:
        CheckpointError: a key is missing, or speaks of attention or rope that no drafter here has.
    """
    for name, ours, why in _FOREIGN:
        if raw.get(name) not in (None, ours):
            raise CheckpointError(
                f"{where}: `{name}` is {raw[name]!r}, which is not implemented: {why}. This drafter cannot be run here."
            )
    require(raw, SHAPE, packaging, where)
    fields = {name: raw[name] for name in SHAPE}
    fields |= {name: raw[name] for name in _OPTIONAL if raw.get(name) is not None}
    return fields | {"rope_parameters": _rope(raw, where), "sliding_window": _sliding_window(raw, where)}


def _rope(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Rope settings, in the present form or in that of transformers 4 (`rope_theta` beside `rope_scaling`)."""
    rope = raw.get("rope_parameters")
    if rope is None and raw.get("rope_theta") is not None:
        rope = raw.get("rope_scaling") or {}
        if isinstance(rope, dict):
            rope = {"rope_type": rope.get("type", "default"), **rope, "rope_theta": raw["rope_theta"]}
            rope.pop("type", None)
    return require_rope(rope, where)


def require_rope(rope: Any, where: str = "config.json") -> dict[str, Any]:
    """Rope settings as they are. The host would fill in a `rope_theta` that is missing, and it would not show.

    Raises:
        CheckpointError: they are none, or without `rope_theta`.
    """
    if not isinstance(rope, dict) or rope.get("rope_theta") is None:
        raise CheckpointError(
            f"{where}: `rope_parameters` must be an object with a `rope_theta`, got {rope!r}. {SAVED_TOGETHER}"
        )
    return dict(rope)


def _sliding_window(raw: dict[str, Any], where: str) -> int | None:
    """The window of the draft layers: of all of them or of none."""
    if not raw.get("layer_types") and raw.get("use_sliding_window"):
        raise CheckpointError(
            f"{where}: `use_sliding_window` is {raw['use_sliding_window']!r}, but `layer_types` does not say which layers "
            "slide. Add it."
        )
    kinds = raw.get("layer_types") or ["full_attention"]
    kind = kinds[0] if isinstance(kinds, list) and kinds.count(kinds[0]) == len(kinds) else None
    if kind == "full_attention":
        return None
    if kind != "sliding_attention" or raw.get("sliding_window") is None:
        raise CheckpointError(
            f"{where}: `layer_types` must be all full_attention, or all sliding_attention with a `sliding_window`, got "
            f"{kinds} and {raw.get('sliding_window')}. This drafter cannot be run."
        )
    return raw["sliding_window"]


def merge_dflash_config(raw: dict[str, Any], packaging: str) -> dict[str, Any]:
    """The top level of `config.json` together with its `dflash_config`; writers differ in where they put a key.

    Raises:
        CheckpointError: `dflash_config` is missing, or a key stands in both with different values.
    """
    nested = raw.get("dflash_config")
    if not isinstance(nested, dict):
        raise CheckpointError(
            f"config.json: `dflash_config` must be an object in a {packaging} checkpoint, got {nested!r}. {SAVED_TOGETHER}"
        )
    for name, value in nested.items():
        if raw.get(name) is not None and raw[name] != value:
            raise CheckpointError(
                f"config.json contradicts itself: `{name}` is {raw[name]!r}, and {value!r} in `dflash_config`. {SAVED_TOGETHER}"
            )
    require_value(raw, "model_type", "qwen3")
    return raw | nested


def describe_layers(config: DSparkConfig) -> dict[str, Any]:
    """The inverse of [`convert_layers`], in the present form of transformers: keys for a `config.json`."""
    window = config.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    described = {name: getattr(config, name) for name in (*SHAPE, *_OPTIONAL)}
    return described | {
        "layer_types": [kind] * config.num_hidden_layers,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "rope_parameters": dict(config.rope_parameters),
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_sliding_window": window is not None,
        "vocab_size": config.vocab_size,
    }


def refuse_inexpressible(packaging: str, *reasons: tuple[bool, str, Any, str]) -> None:
    """Raises CheckpointError for the first thing that a packaging cannot say.

    Args:
        packaging (`str`): the one to be written.
        reasons (tuples of `bool`, `str`, any, `str`): whether it applies, the field, its value, and why or what to do.
    """
    for applies, name, value, why in reasons:
        if applies:
            raise CheckpointError(f"the {packaging} packaging cannot express `{name}` {value!r}: {why}.")
