"""`muse_glimmer_assistant`, the drafter that transformers itself has: DFlash under other names.

The projection of the context is `encoder.fc` and its norm `encoder.output_norm_enc`. The layers slide over a window. As
with DFlash, the first slot only carries the anchor and there are no heads. Vocabulary and number of layers of the target
are not written; layer ids count as ours do.
"""

from __future__ import annotations

from typing import Any

from .backbone import BONUS_ANCHOR, LAYERS_AS_HERE, PARALLEL_ONLY, Converted, convert_layers, require

NAME = "muse_glimmer_assistant"
TARGET_COPIES: tuple[str, ...] = ()
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}

_REQUIRED = ("block_size", "mask_token_id", "target_layer_ids", "layer_types")


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this packaging."""
    return raw.get("model_type") == NAME


def convert(raw: dict[str, Any]) -> Converted:
    """A `config.json` in our terms.

    Raises:
        CheckpointError: a key is missing, or the layers' attention is of a kind that no drafter here has.
    """
    require(raw, _REQUIRED, NAME)
    fields = convert_layers(raw, NAME) | {name: raw[name] for name in _REQUIRED[:-1]}
    fields |= {"vocab_size": raw.get("vocab_size"), "num_target_layers": None, **PARALLEL_ONLY}
    decisions = [
        BONUS_ANCHOR,
        LAYERS_AS_HERE,
        f"sliding_window = {fields['sliding_window']}: by `layer_types`",
        "vocab_size, num_target_layers: not written in this packaging; what can be is checked when a target is bound",
    ]
    note = (
        f"config.json: `vocab_size` is not written by {NAME}, but generate() compares it with the target's. Pass that one: "
        "from_pretrained(..., vocab_size=target.config.vocab_size)."
    )
    return Converted(fields, decisions, [note] if fields["vocab_size"] is None else [])
