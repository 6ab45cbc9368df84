"""The packaging of DeepSpec, the reference code, for Qwen3 and Gemma4 targets: DSpark drafters and their DFlash siblings.

`config.json` is a copy of the *target's* configuration with the drafter's keys on top, so `model_type` is the target's, some
fields describe the target (`max_window_layers`, `tie_word_embeddings`) and some the training (`num_anchors`); neither
is taken. The draft layers are those of the target's family. All of these drafters are anchor first, which no key says:
slot 1, whose input is the anchor, predicts too. Layer ids count as ours do. The siblings without a sequential head are
written as rank 0.

The weights carry the target's embedding and LM head. They are most of the bytes and no part of the drafter: they are
not loaded, but compared with the target's own when it is bound.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError
from . import gemma4
from .backbone import (
    HEADS,
    LAYERS_AS_HERE,
    Converted,
    convert_layers,
    describe_layers,
    refuse_inexpressible,
    require,
)

NAME = "DeepSpec"
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
RENAMED: dict[str, str] = {}

_DSPARK = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}  # architectures
_DFLASH = "Qwen3DFlashModel"
_TARGETS = {"qwen3": ("qwen3",), "gemma4": ("gemma4_text", "gemma4_unified_text")}  # model types, by our `backbone_type`
_REQUIRED = ("vocab_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
_SWITCHES = ("markov_rank", "enable_confidence_head")


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging."""
    return raw.get("architectures") in [[name] for name in (*_DSPARK.values(), _DFLASH)]


def convert(raw: dict[str, Any]) -> Converted:
    """A `config.json` in our terms.

    Raises:
        CheckpointError: a key is missing, or the layers' attention is of a kind that no drafter here has.
    """
    parallel = raw["architectures"] == [_DFLASH]
    if parallel:
        raw = {"markov_rank": 0, "enable_confidence_head": False, **raw}
    require(raw, (*_REQUIRED, *_SWITCHES), NAME)
    if parallel and (raw["markov_rank"] != 0 or raw["enable_confidence_head"]):
        raise CheckpointError(
            f"config.json names a {_DFLASH}, which has no heads, but sets `markov_rank` to {raw['markov_rank']} and "
            f"`enable_confidence_head` to {raw['enable_confidence_head']}. Use the one saved with the weights."
        )
    anchor = raw.get("sample_from_anchor", True)
    if raw["architectures"] == [_DSPARK["gemma4"]]:
        layers = gemma4.convert_layers(raw, NAME)
    else:
        layers = convert_layers(raw, NAME)
    fields = layers | {name: raw[name] for name in _REQUIRED} | {"sample_from_anchor": anchor}
    fields |= {name: raw[name] for name in HEADS if raw.get(name) is not None}
    decisions = [
        f"sample_from_anchor = {anchor}: " + ("so it says" if "sample_from_anchor" in raw else "always so in this packaging"),
        LAYERS_AS_HERE,
        "embed_tokens, lm_head: the target's, not loaded, compared with the target's own when it is bound",
    ]
    return Converted(fields, decisions)


def describe(config: DSparkConfig, target: PreTrainedModel | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of `config.json` and the target's tensors that belong into the file.

    Raises:
        CheckpointError: there is no target, it is of another family than the draft layers, or the drafter has what this
            packaging cannot express.
    """
    refuse_inexpressible(
        NAME,
        (not config.sample_from_anchor, "sample_from_anchor", False, "it is always anchor first; write speculators or dflash"),
        (config.draft_vocab_size is not None, "draft_vocab_size", config.draft_vocab_size, "write speculators"),
    )
    if target is None:
        raise CheckpointError(
            f"the {NAME} packaging holds the target's configuration, embedding and LM head: pass the target "
            "(`target=`, --target) that this drafter was trained for."
        )
    target_config = target.config.get_text_config(decoder=True)
    if target_config.model_type not in _TARGETS[config.backbone_type]:
        raise CheckpointError(
            f"the {NAME} packaging is for targets of the drafter's own family: `backbone_type` is {config.backbone_type!r}, "
            f"and `model_type` of this target is {target_config.model_type!r}. Drafters with Qwen3 layers can be written as "
            "speculators."
        )
    described = {name: value for name, value in target_config.to_dict().items() if not name.startswith("_")}
    described.pop("quantization_config", None)  # the target's; what is written here is not quantised
    if config.backbone_type == "gemma4":
        described = gemma4.describe_layers(config, described)
    else:
        described |= describe_layers(config)
    described |= {name: getattr(config, name) for name in (*_REQUIRED, *HEADS)}
    # Training only, but a key of every released checkpoint.
    described |= {"architectures": [_DSPARK[config.backbone_type]], "num_anchors": 512}
    copies = {
        "embed_tokens.weight": target.get_input_embeddings().weight,
        "lm_head.weight": target.get_output_embeddings().weight,
    }
    return described, copies
