"""The packaging of this library: `config.json` is a [`DSparkConfig`], the tensors have the model's own names.

Only the fields that describe a drafter are taken. A configuration of the host may hold more, and some of it chooses
what code runs (an attention kernel from the Hub, a quantiser): a file does not get to choose that.

transformers can run code from a model's folder when the user trusts it: `AutoModel` the file that `auto_map` names,
`generate(custom_generate=…)` the file `custom_generate/generate.py`. Both are saved beside the weights (`own_files`) and
only import this package. A copy of its code in every folder would age there, and without the hook no drafter drafts.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError
from .backbone import SAVED_TOGETHER, Converted, require_rope
from .files import CONFIG_NAME, read_json, write_text

NAME = "hf_dspark"
TARGET_COPIES: tuple[str, ...] = ()
RENAMED: dict[str, str] = {}
AUTO_MAP = {"AutoConfig": "modeling_hf_dspark.DSparkConfig", "AutoModel": "modeling_hf_dspark.DSparkDraftModel"}
CODE_FILES = ("modeling_hf_dspark.py", "custom_generate/generate.py", "custom_generate/requirements.txt")

_HOST_FIELDS = {field.name for field in fields(PreTrainedConfig)}
DRAFTER_FIELDS = {field.name for field in fields(DSparkConfig)} - _HOST_FIELDS
# Later than the first files, for which the defaults hold.
_LATER = {
    "backbone_type", "attention_k_eq_v", "final_logit_softcapping", "confidence_offsets", "greedy_confidence_temperatures",
    "greedy_confidence_offsets", "greedy_confidence_log_odds_weights",
}  # fmt: skip
# Written by the host, its trainer or its Hub tools; says nothing about the drafter.
_BOOKKEEPING = _HOST_FIELDS | {"model_type", "torch_dtype", "use_cache", "_name_or_path", "auto_map"}
_CHOOSES_CODE = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
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


def write_code_files(folder: Path) -> None:
    """Writes the files that load and run a drafter where nobody has imported this package."""
    (folder / "custom_generate").mkdir(exist_ok=True)
    for name in CODE_FILES:
        shutil.copyfile(Path(__file__).parent / "own_files" / name, folder / name)


def complete_folder(folder: Path) -> None:
    """Adds those files to a drafter saved before there were any; a folder in another packaging is left as it is."""
    raw = read_json(folder / CONFIG_NAME)
    if recognises(raw):
        write_code_files(folder)
        write_text(folder / CONFIG_NAME, json.dumps(raw | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n")
