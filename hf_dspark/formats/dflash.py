"""The packaging of z-lab's DFlash drafters: the parallel backbone alone, with the bonus anchor.

`config.json` is that of a Qwen3 model of the drafter's own shape, with `block_size` at its top level, and mask token and
layers in `dflash_config`. The first slot only carries the anchor, so a block of 16 drafts 15 tokens; no key says so.
There are no heads, and nothing of the target in the file. Layer ids count as ours do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError
from .backbone import (
    BONUS_ANCHOR,
    LAYERS_AS_HERE,
    NO_GEMMA4,
    PARALLEL_ONLY,
    SAVED_TOGETHER,
    Converted,
    convert_layers,
    describe_layers,
    merge_dflash_config,
    refuse_inexpressible,
    require,
)

NAME = "DFlash"
TARGET_COPIES: tuple[str, ...] = ()
RENAMED: dict[str, str] = {}

_ARCHITECTURE = "DFlashDraftModel"
_REQUIRED = ("vocab_size", "block_size", "mask_token_id", "target_layer_ids")


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging."""
    return raw.get("architectures") == [_ARCHITECTURE]


def convert(raw: dict[str, Any]) -> Converted:
    """A `config.json` in our terms.

    Raises:
        CheckpointError: a key is missing, stands there twice with different values, or speaks of heads.
    """
    merged = merge_dflash_config(raw, NAME)
    require(merged, _REQUIRED, NAME)
    for name in ("markov_rank", "enable_confidence_head", "projector_type", "sample_from_anchor", "shift_label"):
        if merged.get(name):
            raise CheckpointError(
                f"config.json names a {_ARCHITECTURE}, which has the bonus anchor and no heads, but `{name}` is "
                f"{merged[name]!r}. {SAVED_TOGETHER}"
            )
    fields = convert_layers(merged, NAME) | {name: merged[name] for name in _REQUIRED}
    fields |= {"num_target_layers": merged.get("num_target_layers"), **PARALLEL_ONLY}
    decisions = [
        BONUS_ANCHOR,
        LAYERS_AS_HERE,
        "markov_rank = 0, enable_confidence_head = False: there are no heads in this packaging",
    ]
    return Converted(fields, decisions)


def describe(config: DSparkConfig, target: PreTrainedModel | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of `config.json`; nothing of the target belongs into the file, and none is needed.

    Raises:
        CheckpointError: the drafter has what this packaging cannot express.
    """
    refuse_inexpressible(
        NAME,
        (config.backbone_type != "qwen3", "backbone_type", config.backbone_type, NO_GEMMA4),
        (config.markov_rank > 0, "markov_rank", config.markov_rank, "it has no sequential head; write speculators"),
        (config.enable_confidence_head, "enable_confidence_head", True, "it has no confidence head; write speculators"),
        (
            config.sample_from_anchor,
            "sample_from_anchor",
            True,
            "its first slot predicts nothing; write deepspec or speculators",
        ),
        (config.draft_vocab_size is not None, "draft_vocab_size", config.draft_vocab_size, "write speculators"),
    )
    described = describe_layers(config) | {
        "architectures": [_ARCHITECTURE],
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
    }
    if config.num_target_layers is not None:
        described["num_target_layers"] = config.num_target_layers
    return described, {}
