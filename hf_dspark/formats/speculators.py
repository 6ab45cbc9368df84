"""The packaging of `speculators`, which vLLM serves: published as `*-speculator.dspark`.

The draft layers lie one level down in `transformer_layer_config`, a Qwen3 configuration whatever the target is. Three
things differ from ours. `aux_hidden_state_layer_ids` counts hidden states, with the embedding as 0, so an id is one more
than the number of the decoder layer that made it. `draft_vocab_size` is always there; smaller than the vocabulary, it
comes with `d2t` and `t2d` in the weights. And the anchor layout may go without saying: then the promised number of
tokens per block tells, and without one it is the bonus anchor.

How many layers the target has is not written. Full-vocabulary files hold nothing of the target, reduced ones the rows
of its LM head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError
from .backbone import (
    HEADS,
    NO_GEMMA4,
    SAVED_TOGETHER,
    Converted,
    convert_layers,
    describe_layers,
    is_integer,
    refuse_inexpressible,
    require,
    require_value,
)

NAME = "speculators"
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
RENAMED: dict[str, str] = {}

_LAYERS = "transformer_layer_config"
_IDS = "aux_hidden_state_layer_ids"
_REQUIRED = (_LAYERS, "draft_vocab_size", "block_size", "mask_token_id", _IDS, *HEADS)


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging. It has no `model_type` to go by."""
    marks = ("speculators_model_type", "speculators_config", _LAYERS)
    return any(mark in raw for mark in marks) or raw.get("architectures") == ["DSparkSpeculator"]


def convert(raw: dict[str, Any]) -> Converted:
    """A `config.json` in our terms.

    Raises:
        CheckpointError: it is of another method than DSpark, a key is missing, or two of them contradict each other.
    """
    require_value(raw, "speculators_model_type", "dspark")
    require(raw, _REQUIRED, NAME)
    layers, where = raw[_LAYERS], f"config.json, `{_LAYERS}`"
    if not isinstance(layers, dict):
        raise CheckpointError(f"config.json: `{_LAYERS}` must be an object, got {layers!r}. {SAVED_TOGETHER}")
    require_value(layers, "model_type", "qwen3", where)
    require(layers, ("vocab_size",), NAME, where)
    fields = convert_layers(layers, NAME, where)
    if fields["sliding_window"] is not None and raw.get("sliding_window_non_causal") is not True:
        raise CheckpointError(
            "config.json: `sliding_window_non_causal` must be true for sliding layers, got "
            f"{raw.get('sliding_window_non_causal')!r}: their slots do not see the later ones of their block, which is not "
            "implemented here."
        )
    anchor, why, notes = _anchor(raw)
    ids = _layer_ids(raw[_IDS])
    fields |= {name: raw[name] for name in ("draft_vocab_size", "block_size", "mask_token_id", *HEADS)}
    fields |= {
        "vocab_size": layers["vocab_size"],
        "target_hidden_size": raw.get("target_hidden_size"),
        "sample_from_anchor": anchor,
        "target_layer_ids": ids,
        "num_target_layers": None,
    }
    decisions = [
        f"sample_from_anchor = {anchor}: {why}",
        f"target_layer_ids = {ids}: `{_IDS}` {raw[_IDS]} minus one, since there the embedding is 0",
        "num_target_layers: not written in this packaging; that the layers exist is checked when a target is bound",
    ]
    return Converted(fields, decisions, notes)


def _layer_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(map(is_integer, ids)) or any(number < 0 for number in ids):
        raise CheckpointError(
            f"config.json: `{_IDS}` must be a list of whole numbers from 0, the embedding, upwards, got {ids!r}. "
            f"{SAVED_TOGETHER}"
        )
    return [number - 1 for number in ids]


def _anchor(raw: dict[str, Any]) -> tuple[bool, str, list[str]]:
    """Whether the first slot predicts, why that is known, and a warning where it is hardly known."""
    block, said, promised = raw["block_size"], raw.get("sample_from_anchor"), _promised_tokens(raw)
    if said is not None and not isinstance(said, bool):
        raise CheckpointError(f"config.json: `sample_from_anchor` must be true or false, got {said!r}. {SAVED_TOGETHER}")
    if promised is None:
        if said is not None:
            return said, "so it says", []
        why = "neither `sample_from_anchor` nor `speculative_tokens` is there; such drafters have the bonus anchor"
        return False, why, [f"config.json: {why}. If it accepts hardly anything, load it with sample_from_anchor=True."]
    if not is_integer(block):
        raise CheckpointError(f"config.json: `block_size` must be a whole number, got {block!r}. {SAVED_TOGETHER}")
    sentence = f"`speculative_tokens` is {promised} for a `block_size` of {block}"
    if said is None:
        if block - promised not in (0, 1):
            raise CheckpointError(
                f"config.json: {sentence}, which is neither an anchor that predicts (as many) nor a bonus anchor (one less), "
                "and `sample_from_anchor` is missing. Add it."
            )
        return promised == block, sentence, []
    drafted = block if said else block - 1
    if promised > drafted or (said and promised == block - 1):
        raise CheckpointError(
            f"config.json contradicts itself: {sentence}, but by `sample_from_anchor` {said} a block drafts {drafted}. "
            f"{SAVED_TOGETHER}"
        )
    return said, f"so it says, and {sentence}", []


def _promised_tokens(raw: dict[str, Any]) -> int | None:
    """`speculative_tokens` of the proposal methods, which must agree; `None` where there is none."""
    settings = raw.get("speculators_config") or {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json: `speculators_config` must be an object, got {settings!r}. {SAVED_TOGETHER}")
    if "algorithm" in settings:
        require_value(settings, "algorithm", "dspark", "config.json, `speculators_config`")
    methods = settings.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise CheckpointError(f"config.json: `proposal_methods` must be a list of objects, got {methods!r}. {SAVED_TOGETHER}")
    counts = [method["speculative_tokens"] for method in methods if method.get("speculative_tokens") is not None]
    if not counts:
        return None
    if not all(is_integer(count) and count > 0 for count in counts) or len(set(counts)) > 1:
        raise CheckpointError(f"config.json: `speculative_tokens` must be one positive number, got {counts}. {SAVED_TOGETHER}")
    return counts[0]


def describe(config: DSparkConfig, target: PreTrainedModel | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of `config.json` and the target's tensors that belong into the file, before their rows are chosen.

    Raises:
        CheckpointError: there is no target, or the drafter has what this packaging cannot express.
    """
    refuse_inexpressible(NAME, (config.backbone_type != "qwen3", "backbone_type", config.backbone_type, NO_GEMMA4))
    if target is None:
        raise CheckpointError(
            f"the {NAME} packaging names its target, and with a reduced vocabulary holds rows of the target's LM head: pass "
            "the target (`target=`, --target) that this drafter was trained for."
        )
    described = {name: getattr(config, name) for name in ("block_size", "mask_token_id", "sample_from_anchor", *HEADS)}
    described |= {
        _IDS: [number + 1 for number in config.target_layer_ids],
        "architectures": ["DSparkDraftModel"],
        "confidence_head_with_markov": config.confidence_head_with_markov and config.markov_rank > 0,
        "draft_vocab_size": config.draft_logits_size,
        "sliding_window_non_causal": config.sliding_window is not None,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {
                "architectures": target.config.architectures or [type(target).__name__],
                "name_or_path": target.name_or_path,
            },
        },
        "speculators_model_type": "dspark",
        "target_hidden_size": config.target_hidden_size,
        _LAYERS: describe_layers(config),
    }
    if config.draft_vocab_size is None:
        return described, {}
    return described, {"lm_head.weight": target.get_output_embeddings().weight}
