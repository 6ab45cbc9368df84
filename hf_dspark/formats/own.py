"""The packaging of this library: `config.json` is a [`DSparkConfig`], the tensors have the model's own names.

Only the fields that describe a drafter are taken. A configuration of the host may hold more, and some of it chooses
what code runs (an attention kernel from the Hub, a quantiser): a file does not get to choose that.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError
from .backbone import SAVED_TOGETHER, Converted, require_rope

NAME = "hf_dspark"
TARGET_COPIES: tuple[str, ...] = ()
RENAMED: dict[str, str] = {}

_HOST_FIELDS = {field.name for field in fields(PreTrainedConfig)}
DRAFTER_FIELDS = {field.name for field in fields(DSparkConfig)} - _HOST_FIELDS
_LATER = {"backbone_type", "attention_k_eq_v", "final_logit_softcapping"}  # than the first files; there, the defaults hold
# Written by the host, its trainer or its Hub tools; says nothing about the drafter.
_BOOKKEEPING = _HOST_FIELDS | {"model_type", "torch_dtype", "use_cache", "_name_or_path", "auto_map"}
_CHOOSES_CODE = (
    "attn_implementation",
    "experts_implementation",
    "quantization_config",
    "fusion_config",
    "kernel_config",
)


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging."""
    return raw.get("model_type") == DSparkConfig.model_type


def convert(raw: dict[str, Any]) -> Converted:
    """The drafter's fields of a `config.json`, and a note on those that are unknown.

    Raises:
        CheckpointError: a field is missing, or asks for other code than the drafter's own.
    """
    for name in sorted(DRAFTER_FIELDS - _LATER - raw.keys()):  # its default would be another drafter, and would not show
        raise CheckpointError(f"config.json has no `{name}`, which this packaging always writes. {SAVED_TOGETHER}")
    for name in _CHOOSES_CODE:
        if raw.get(name) is not None:
            raise CheckpointError(
                f"config.json sets `{name}`, which a checkpoint may not choose. Remove it there, and pass it to "
                "from_pretrained if you want it."
            )
    require_rope(raw["rope_parameters"])
    unknown = sorted(raw.keys() - DRAFTER_FIELDS - _BOOKKEEPING)
    notes = [f"config.json: {', '.join(unknown)} is not known to this version of hf_dspark and was ignored."]
    fields = {name: raw[name] for name in DRAFTER_FIELDS if name in raw}
    return Converted(fields, notes=notes if unknown else [])
