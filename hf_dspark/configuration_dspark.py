"""Configuration of a DSpark drafter.

One class describes every drafter this package runs: DSpark itself (anchor first, sequential head, confidence head) and the
purely parallel DFlash family (no head, either anchor layout). Conventions are fixed here so that no code has to guess: layer
ids count decoder layers (id k is `hidden_states[k + 1]` of the target), the anchor layout is explicit, rope and attention
settings are the drafter's own.
"""

# Annotations must stay objects here (no `from __future__ import annotations`): @strict does not check strings.
import itertools
import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

BACKBONE_TYPES = ("qwen3", "gemma4")
HEAD_TYPES = ("vanilla", "gated", "rnn")
CALIBRATION_FIELDS = (
    "confidence_temperatures",
    "confidence_offsets",
    "greedy_confidence_temperatures",
    "greedy_confidence_offsets",
    "greedy_confidence_log_odds_weights",
)


@strict
class DSparkConfig(PreTrainedConfig):
    r"""
    Args:
        vocab_size (`int` or `None`, defaults to 151936): vocabulary of the target, padding rows included; `None` if not known,
            for a drafter without sequential head and reduced vocabulary.
        backbone_type (`str`, defaults to `"qwen3"`): whose layers the draft layers are, `"qwen3"` or `"gemma4"`.
        hidden_size (`int`, defaults to 2560): width D of the drafter; equal to the target's, whose embedding and head it uses.
        intermediate_size (`int`, defaults to 9728): width of the MLP.
        num_hidden_layers (`int`, defaults to 5): draft layers.
        num_attention_heads (`int`, defaults to 32): query heads.
        num_key_value_heads (`int`, *optional*): key and value heads; as many as query heads when not given.
        head_dim (`int`, *optional*): width of one head; `hidden_size // num_attention_heads` when not given.
        hidden_act (`str`, defaults to `"silu"`): activation of the MLP.
        max_position_embeddings (`int`, defaults to 40960): positions the rope is set up for.
        rms_norm_eps (`float`, defaults to 1e-6): epsilon of every RMSNorm.
        rope_parameters (`dict`, *optional*): `rope_type`, `rope_theta` and what the type needs; the drafter's own.
        attention_bias (`bool`, defaults to `False`): whether the attention projections have a bias.
        attention_k_eq_v (`bool`, defaults to `False`): whether values are made of the key projection, without one of their
            own; only with `"gemma4"` layers.
        attention_dropout (`float`, defaults to 0.0): dropout on attention weights while training.
        sliding_window (`int`, *optional*): a block sees only this many positions back; everything when not given.
        initializer_range (`float`, defaults to 0.02): standard deviation of new weights.
        block_size (`int`, defaults to 7): inputs of one draft block. Anchor first, all of them predict a token; bonus anchor,
            the first does not.
        sample_from_anchor (`bool`, defaults to `True`): anchor-first layout (DSpark); `False` is the bonus anchor of DFlash.
        mask_token_id (`int`, defaults to 151669): input of the slots behind the anchor; not pad, bos or eos.
        target_layer_ids (`list[int]`, defaults to `[1, 9, 17, 25, 33]`): decoder layers of the target whose output feeds the
            drafter, strictly increasing; -1 is the embedding. The last layer is not allowed.
        num_target_layers (`int` or `None`, defaults to 36): decoder layers of the target; `None` if not known, with
            `target_layer_ids` given.
        target_hidden_size (`int`, *optional*): width of the target's hidden states; `hidden_size` when not given.
        markov_rank (`int`, defaults to 256): rank r of the sequential head; 0 for none.
        markov_head_type (`str`, defaults to `"vanilla"`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`, defaults to `True`): whether the drafter estimates the survival of its tokens.
        confidence_head_with_markov (`bool`, defaults to `True`): whether that estimate also sees W1 of the previous token.
        confidence_temperatures, confidence_offsets (`list[float]`, *optional*): calibration of the confidences, K values
            each, one per draft position: c_k = σ(logit_k / temperature_k + offset_k).
        greedy_confidence_temperatures, greedy_confidence_offsets (`list[float]`, *optional*): the same for greedy
            decoding, where a draft survives if it is the target's first choice, not in proportion to how much two laws
            overlap; the values above serve for both when these are not given.
        greedy_confidence_log_odds_weights (`list[float]`, *optional*): K weights of o_k = log p_k/(1 − p_k), for the
            probability p_k that the drafter gives the token it drafts at k, in greedy decoding: c_k = σ(logit_k / temperature_k
            + weight_k · o_k + offset_k). A confidence head has not seen how sure the drafter is of its choice.
        final_logit_softcapping (`float`, *optional*): what the target caps its logits at, and thereby those of the drafter;
            compared with the target's own unless it is `None`.
        draft_vocab_size (`int`, *optional*): size of a reduced draft vocabulary; the whole vocabulary when not given.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): the target's special tokens.
        tie_word_embeddings (`bool`, defaults to `False`): not used; a drafter has no embedding or head of its own.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a field has the wrong type, or a value contradicts another one.
    """

    model_type = "hf_dspark"

    vocab_size: int | None = 151936
    backbone_type: str = "qwen3"
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    attention_dropout: float | int = 0.0
    sliding_window: int | None = None
    initializer_range: float = 0.02
    block_size: int = 7
    sample_from_anchor: bool = True
    mask_token_id: int = 151669
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = 36
    target_hidden_size: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: list[float] | None = None
    confidence_offsets: list[float] | None = None
    greedy_confidence_temperatures: list[float] | None = None
    greedy_confidence_offsets: list[float] | None = None
    greedy_confidence_log_odds_weights: list[float] | None = None
    final_logit_softcapping: float | int | None = None
    draft_vocab_size: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = spread_layer_ids(self.num_target_layers, 5)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing. `AutoConfig` calls it after loading with `trust_remote_code`; each save would then copy this file."""

    @property
    def num_draft_tokens(self) -> int:
        """K: tokens drafted per block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def draft_logits_size(self) -> int:
        """Width of the draft logits: the reduced vocabulary where there is one."""
        return self.draft_vocab_size or self.vocab_size

    def calibration(self, greedy: bool) -> tuple[list[float] | None, list[float] | None, list[float] | None]:
        """Calibration of the confidences for one way of decoding.

        Args:
            greedy (`bool`): for greedy decoding, which has the values of sampling unless it has its own.

        Returns:
            `tuple`: K temperatures, K offsets and K weights of the log-odds, each a `list[float]`, or `None` for 1, 0
                and 0.
        """
        greedy_values = (
            self.greedy_confidence_temperatures,
            self.greedy_confidence_offsets,
            self.greedy_confidence_log_odds_weights,
        )
        if greedy and greedy_values != (None, None, None):
            return greedy_values
        return self.confidence_temperatures, self.confidence_offsets, None

    @property
    def is_calibrated(self) -> bool:
        """Whether the confidences of any way of decoding are calibrated."""
        return any(getattr(self, name) is not None for name in CALIBRATION_FIELDS)

    def validate_sizes(self):
        """Every count is positive and the heads divide."""
        smallest = {"block_size": 1 if self.sample_from_anchor else 2, "markov_rank": 0}
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "block_size", "num_target_layers", "target_hidden_size", "markov_rank",
        ):  # fmt: skip
            value, least = getattr(self, name), smallest.get(name, 1)
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        if self.num_key_value_heads is not None and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.vocab_size is None and (self.markov_rank or self.draft_vocab_size is not None):
            raise ValueError(
                f"`vocab_size` must be given with a `markov_rank` ({self.markov_rank}) or a `draft_vocab_size` "
                f"({self.draft_vocab_size})."
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must lie between 1 and `vocab_size` ({self.vocab_size}), got {self.draft_vocab_size}."
            )

    def validate_target_layers(self):
        """Captured layers exist, in order, and are not the last one, whose state the host normalises."""
        ids, count = self.target_layer_ids, self.num_target_layers
        if ids is None and count is None:
            raise ValueError("`target_layer_ids` or `num_target_layers` must be given; both are None.")
        if ids is None:  # filled in by __post_init__
            return
        if not ids or any(a >= b for a, b in itertools.pairwise(ids)):
            raise ValueError(f"`target_layer_ids` must be a strictly increasing list of at least one layer, got {ids}.")
        if ids[0] < -1 or (count is not None and ids[-1] >= count):
            raise ValueError(
                "`target_layer_ids` must lie between -1 (the embedding) and the target's last layer but one"
                f"{'' if count is None else f' ({count - 2}, since `num_target_layers` is {count})'}, got {ids}."
            )
        if count is not None and ids[-1] == count - 1:  # if not known, seen when a target is bound
            raise ValueError(
                f"`target_layer_ids` names the target's last layer ({ids[-1]}, since `num_target_layers` is {count}): "
                "transformers returns that state after the final norm, which is not what a drafter was trained on. Use an "
                "earlier layer."
            )

    def validate_backbone(self):
        """The layers are of a known family, and values have a projection where that family wants one."""
        if self.backbone_type not in BACKBONE_TYPES:
            raise ValueError(f"`backbone_type` must be one of {', '.join(BACKBONE_TYPES)}, got {self.backbone_type!r}.")
        if self.attention_k_eq_v and self.backbone_type != "gemma4":
            raise ValueError(
                f"`attention_k_eq_v` is for `backbone_type` 'gemma4', whose values are normalised, not {self.backbone_type!r}."
            )
        if self.final_logit_softcapping is not None and not self.final_logit_softcapping > 0:
            raise ValueError(f"`final_logit_softcapping` must be positive or None, got {self.final_logit_softcapping}.")

    def validate_heads(self):
        """The sequential head is of a known type and the calibration fits the block."""
        if self.markov_head_type not in HEAD_TYPES:
            raise ValueError(f"`markov_head_type` must be one of {', '.join(HEAD_TYPES)}, got {self.markov_head_type!r}.")
        for name in CALIBRATION_FIELDS:
            lowest = 0.0 if name.endswith("temperatures") else -math.inf
            values = getattr(self, name)
            if values is not None and (
                len(values) != self.num_draft_tokens or not all(lowest < value < math.inf for value in values)
            ):
                raise ValueError(
                    f"`{name}` must be {self.num_draft_tokens} {'positive' if lowest == 0 else 'finite'} numbers, one per "
                    f"draft position, got {values}."
                )

    def validate_special_tokens(self):
        """The mask token is a token of its own."""
        if self.mask_token_id < 0 or (self.vocab_size is not None and self.mask_token_id >= self.vocab_size):
            raise ValueError(f"`mask_token_id` must lie below `vocab_size` ({self.vocab_size}), got {self.mask_token_id}.")
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        for name, ids in (("pad", [self.pad_token_id]), ("bos", [self.bos_token_id]), ("eos", eos)):
            if self.mask_token_id in ids:
                raise ValueError(
                    f"`mask_token_id` ({self.mask_token_id}) is also the {name} token: the drafter would take the end or the "
                    "padding of a text for a slot to fill. Use an unused special token."
                )


def spread_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """Layers of the target to read, evenly from the second to the fourth last, as in the released checkpoints.

    Args:
        num_target_layers (`int`): decoder layers of the target.
        count (`int`): layers wanted; fewer where the target has not as many.

    Returns:
        `list[int]`: strictly increasing, e.g. `[1, 9, 17, 25, 33]` for 36 layers and a count of 5.
    """
    first, last = (1, num_target_layers - 3) if num_target_layers > 4 else (-1, num_target_layers - 2)
    steps = max(count - 1, 1)
    return sorted({round(first + (last - first) * i / steps) for i in range(count)})
