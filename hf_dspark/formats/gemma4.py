"""Draft layers described in the words of a Gemma4 configuration, as DeepSpec does for Gemma4 targets.

All draft layers are of the kind that Gemma4 calls full attention, for which its configuration has words of its own: heads
are `global_head_dim` wide, the rope is `rope_parameters.full_attention`, and with `attention_k_eq_v` the key heads are
`num_global_key_value_heads`. `head_dim`, `sliding_window` and the other rope are those of the target's sliding layers. The
rest is said as a Qwen3 configuration says it, so that both directions go through [`~hf_dspark.formats.backbone`].
"""

from __future__ import annotations

from typing import Any

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError
from . import backbone
from .backbone import SAVED_TOGETHER, require, require_value

_REQUIRED = ("global_head_dim", "num_key_value_heads", "attention_k_eq_v", "hidden_activation", "rope_parameters")


def convert_layers(raw: dict[str, Any], packaging: str) -> dict[str, Any]:
    """Fields of a [`DSparkConfig`] that such a description gives.

    Raises:
        CheckpointError: a key is missing, or speaks of layers that no drafter here has.
    """
    require(raw, _REQUIRED, packaging)
    require_value(raw, "hidden_activation", "gelu_pytorch_tanh")
    heads = "num_key_value_heads"
    if raw["attention_k_eq_v"]:
        heads = "num_global_key_value_heads"
        require(raw, (heads,), packaging)
    ropes = raw["rope_parameters"]
    if not isinstance(ropes, dict) or not isinstance(ropes.get("full_attention"), dict):
        raise CheckpointError(
            f"config.json: `rope_parameters` must hold the rope of `full_attention`, got {ropes!r}. {SAVED_TOGETHER}"
        )
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp"):
        if raw.get(name):
            raise CheckpointError(
                f"config.json: `{name}` is {raw[name]!r}, which draft layers do not have here. This drafter cannot be run."
            )
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise CheckpointError(
            f"config.json: `layer_types` must be all full_attention for Gemma4 layers, got {raw['layer_types']}. This drafter "
            "cannot be run."
        )
    words = {
        "head_dim": raw["global_head_dim"],
        "hidden_act": raw["hidden_activation"],
        "num_key_value_heads": raw[heads],
        "rope_parameters": ropes["full_attention"],
    }
    return backbone.convert_layers(raw | words, packaging) | {
        "attention_k_eq_v": raw["attention_k_eq_v"],
        "backbone_type": "gemma4",
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
    }


def describe_layers(config: DSparkConfig, target: dict[str, Any]) -> dict[str, Any]:
    """The inverse of [`convert_layers`].

    Args:
        config ([`DSparkConfig`]): of a drafter with Gemma4 layers.
        target (`dict`): its target's configuration, as transformers writes it.

    Returns:
        `dict`: the target's configuration with the draft layers in the place of its own.
    """
    described = backbone.describe_layers(config)
    own_heads, head_dim = described.pop("num_key_value_heads"), described.pop("head_dim")
    for name in ("hidden_act", "max_window_layers", "sliding_window", "use_sliding_window"):
        del described[name]  # no words of Gemma4, or of the target's sliding layers
    described |= {
        "enable_moe_block": False,
        "attention_k_eq_v": config.attention_k_eq_v,
        "global_head_dim": head_dim,
        "hidden_activation": config.hidden_act,
        "hidden_size_per_layer_input": 0,
        "model_type": target["model_type"],
        "num_global_key_value_heads": own_heads if config.attention_k_eq_v else None,
        "num_key_value_heads": target["num_key_value_heads"] if config.attention_k_eq_v else own_heads,
        "rope_parameters": target["rope_parameters"] | {"full_attention": dict(config.rope_parameters)},
        "use_double_wide_mlp": False,
    }
    # `per_layer_config` is how this release of transformers keeps the global heads of the target's layers.
    return {name: value for name, value in target.items() if name != "per_layer_config"} | described
