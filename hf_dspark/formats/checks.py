"""Everything that can be known to be wrong with a drafter before its first token.

A wrong drafter is hard to notice: verification keeps the text right, only acceptance collapses, to a third with a
misread anchor slot and to almost nothing with a wrong rope or norm. So whatever configuration and weights say twice is
compared, and each contradiction has a sentence of its own.

The order is that of the cost: the configuration alone, then names, dtypes and shapes from the headers of the weights,
then the small tensors, then all values. Nothing is built or allocated by a number that has not been confirmed by then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..configuration_dspark import DSparkConfig
from ..errors import CheckpointError
from .files import TensorHeader

FLOAT_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}

_LONGEST_BLOCK = 1024  # no tensor confirms `block_size`, and buffers are as long as it says
_SAME_FILES = "Use config.json and weights that were saved together."


def check_config(config: DSparkConfig) -> None:
    """What a configuration can say that no drafter here can be.

    Raises:
        CheckpointError: an activation or rope type that transformers does not have, or a number out of its range.
    """
    for name, least, most in (
        ("block_size", 1, _LONGEST_BLOCK),
        ("max_position_embeddings", 1, 2**40),
        ("sliding_window", 1, 2**40),
        ("rms_norm_eps", 1e-30, 1.0),
        ("initializer_range", 0.0, 1e6),
        ("attention_dropout", 0.0, 1.0),
    ):
        value = getattr(config, name)
        if value is not None and not least <= value <= most:  # not a number is never within
            raise CheckpointError(f"`{name}` must lie between {least} and {most}, got {value}. Correct config.json.")
    if config.hidden_act not in ACT2FN:
        raise CheckpointError(f"`hidden_act` {config.hidden_act!r} is no activation of transformers. Correct config.json.")
    rope = config.rope_parameters
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"`rope_parameters` must describe one rope for all draft layers, got {rope}. Keep only theirs.")
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    if rope.get("rope_type") not in kinds:
        raise CheckpointError(
            f"`rope_type` must be one of {', '.join(kinds)}, which transformers implements, got "
            f"{rope.get('rope_type')!r}. A drafter run with another rope than it was trained with is worth nothing."
        )


def check_rope(config: DSparkConfig) -> None:
    """Computes the rope once, after the head width has been confirmed: its types need parameters of many kinds.

    Raises:
        CheckpointError: transformers cannot compute it, or it does not cover a head.
    """
    try:
        rope = Qwen3RotaryEmbedding(config)  # type: ignore[arg-type]  # reads only fields that both have
        cos, sin = rope(torch.zeros(1), torch.tensor([[0, config.max_position_embeddings - 1]]))
    except Exception as error:  # whatever the host's arithmetic raises on parameters that make no sense
        raise CheckpointError(
            f"`rope_parameters` {config.rope_parameters} cannot be computed ({type(error).__name__}: {error}). Correct "
            "config.json."
        ) from error
    finite = bool(cos.isfinite().all() and sin.isfinite().all())
    if cos.shape[-1] != config.head_dim or not finite:
        raise CheckpointError(
            f"`rope_parameters` {config.rope_parameters} must give {config.head_dim} finite values, as `head_dim` "
            f"says, got {cos.shape[-1]}{'' if finite else ', not all finite'}. Correct config.json."
        )


def expected_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a drafter, by name; those of [`DSparkDraftModel`]."""
    hidden, inner, head, rank = config.hidden_size, config.intermediate_size, config.head_dim, config.markov_rank
    width, kv_width = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    linear = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config.attention_k_eq_v:
        del linear["self_attn.v_proj"]
    norms = {
        "self_attn.q_norm": head,
        "self_attn.k_norm": head,
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
    }
    if config.backbone_type == "gemma4":
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    for layer in range(config.num_hidden_layers):
        for name, shape in linear.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if config.attention_bias and name.startswith("self_attn"):
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
        shapes |= {f"layers.{layer}.{name}.weight": (size,) for name, size in norms.items()}
        if config.backbone_type == "gemma4":
            shapes[f"layers.{layer}.layer_scalar"] = (1,)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_logits_size, rank)
        if config.markov_head_type == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif config.markov_head_type == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.enable_confidence_head:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if config.confidence_head_with_markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if config.draft_vocab_size is not None:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def check_headers(config: DSparkConfig, headers: Mapping[str, TensorHeader], target_copies: tuple[str, ...] = ()) -> None:
    """Names, dtypes and shapes of the weights, against the configuration and both ways.

    Args:
        config ([`DSparkConfig`]): what the weights should be.
        headers (mapping): headers of all tensors, by name.
        target_copies (tuple of `str`): tensors of the target that may be there as well: its embedding
            `(vocab_size, hidden_size)`, LM heads `(draft_logits_size, hidden_size)` and final norm `(hidden_size,)`.

    Raises:
        CheckpointError: a tensor is missing, one too many, of another shape, or not made of floating point numbers.
    """
    layers = {match[1] for name in headers if (match := re.match(r"layers\.(\d+)\.", name))}
    if len(layers) != config.num_hidden_layers:
        raise CheckpointError(
            f"`num_hidden_layers` is {config.num_hidden_layers}, but the weights hold {len(layers)} draft layers. {_SAME_FILES}"
        )
    shapes = expected_shapes(config)
    _check_names(config, shapes.keys() - headers.keys(), headers.keys() - shapes.keys() - set(target_copies))
    copied = {"embed_tokens.weight": (config.vocab_size, config.hidden_size), "verifier_norm.weight": (config.hidden_size,)}
    head = (config.draft_logits_size, config.hidden_size)
    shapes |= {name: copied.get(name, head) for name in target_copies if name in headers}
    for name, shape in shapes.items():
        found = headers[name]
        if found.shape != shape:
            transposed = "; it is transposed" if len(shape) == 2 and found.shape == shape[::-1] else ""
            raise CheckpointError(
                f"`{name}` must have shape {list(shape)} by config.json, got {list(found.shape)}{transposed}. {_SAME_FILES}"
            )
        dtypes = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}.get(name, tuple(FLOAT_DTYPES))
        if found.dtype not in dtypes:
            raise CheckpointError(
                f"`{name}` must be stored as {' or '.join(dtypes)}, got {found.dtype}. Quantised drafters are not "
                "read; use the original."
            )


def _check_names(config: DSparkConfig, missing: set[str], surplus: set[str]) -> None:
    switches = (
        ("markov_head.", f"`markov_rank` is {config.markov_rank} and `markov_head_type` {config.markov_head_type!r}"),
        ("confidence_head.", f"`enable_confidence_head` is {config.enable_confidence_head}"),
        (("d2t", "t2d"), f"`draft_vocab_size` is {config.draft_vocab_size} for a `vocab_size` of {config.vocab_size}"),
        ("", "config.json describes another drafter"),
    )
    for prefix, setting in switches:
        for names, what in ((missing, "the weights lack"), (surplus, "the weights also hold")):
            concerned = sorted(name for name in names if name.startswith(prefix))
            if concerned:
                more = f" and {len(concerned) - 1} more" if len(concerned) > 1 else ""
                raise CheckpointError(f"{setting}, but {what} `{concerned[0]}`{more}. {_SAME_FILES}")


def norm_names(config: DSparkConfig) -> list[str]:
    """Names of all RMSNorm weights, a few numbers each."""
    return [name for name in expected_shapes(config) if name.endswith("norm.weight")]


def check_norms(norms: Mapping[str, Tensor]) -> None:
    """Tells a drafter that was never trained, whose norms are still what they were made as.

    Raises:
        CheckpointError: every norm weight is exactly one.
    """
    if all(bool((norm == 1).all()) for norm in norms.values()):
        raise CheckpointError(
            "every RMSNorm weight is exactly one: this drafter was never trained, or its norms were lost in a "
            "conversion. Use a trained checkpoint."
        )


def check_values(config: DSparkConfig, tensors: Mapping[str, Tensor]) -> None:
    """Values of the weights.

    Raises:
        CheckpointError: a value is not finite, or `d2t` and `t2d` describe no draft vocabulary or two different ones.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not all(bool(end.isfinite()) for end in tensor.aminmax()):  # without temporaries
            count = tensor.numel() - int(tensor.isfinite().sum())
            raise CheckpointError(
                f"`{name}` must be finite, got {count} infinite or undefined values. The training diverged: use an "
                "earlier checkpoint."
            )
    if config.draft_vocab_size is not None:
        _check_draft_vocabulary(tensors["d2t"], tensors["t2d"])


def _check_draft_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    token_ids = d2t + torch.arange(len(d2t))
    if bool((token_ids.diff() <= 0).any()):
        raise CheckpointError(
            "`d2t` must give strictly increasing target tokens i + d2t[i]; these repeat or fall. Export it again."
        )
    if token_ids[0] < 0 or token_ids[-1] >= len(t2d):
        raise CheckpointError(
            f"`d2t` must give target tokens from 0 to {len(t2d) - 1}, got {int(token_ids[0])} to {int(token_ids[-1])}. "
            "Export it again."
        )
    if not torch.equal(t2d.nonzero().flatten(), token_ids):
        raise CheckpointError(
            f"`t2d` must mark exactly the {len(d2t)} target tokens of `d2t`; it marks {int(t2d.sum())}, not the same. "
            "Export it again."
        )


def file_dtype(headers: Mapping[str, TensorHeader], names: list[str]) -> torch.dtype:
    """The dtype of the weights; of mixed ones the narrowest that holds them all."""
    dtype = FLOAT_DTYPES[headers[names[0]].dtype]
    for name in names[1:]:
        dtype = torch.promote_types(dtype, FLOAT_DTYPES[headers[name].dtype])
    return dtype
