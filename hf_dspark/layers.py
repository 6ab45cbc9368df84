"""The draft layers: a decoder layer whose attention goes from the block to `[context ; block]`, without a causal mask.

The context is projected target states, the same for all layers; each layer makes its own keys and values from it. Drafters
come with the layers of the model family they draft for, of which two are in use: Qwen3's, and Gemma4's, which normalises
what attention and MLP put out as well, scales the whole layer, normalises values and may have no projection for them.
Parameter names are those of the DeepSpec checkpoints; norms, MLP and rope are the library's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward, rotate_half

from .configuration_dspark import DSparkConfig


class DSparkAttention(nn.Module):
    """Attention from the block to `[context ; block]`, no causal mask, with per-head query and key norms."""

    norm_class: type[nn.Module] = Qwen3RMSNorm

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        if not config.attention_k_eq_v:
            self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = self.norm_class(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = self.norm_class(self.head_dim, eps=config.rms_norm_eps)

    def keys_and_values(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        """Of `(R, S, D)`, each `(R, S, H, head_dim)`, keys before the rope."""
        keys, values = (
            projection(sources).view(*sources.shape[:2], -1, self.head_dim) for projection in (self.k_proj, self.v_proj)
        )
        return self.k_norm(keys), values

    def forward(
        self,
        hidden_states: Tensor,
        context_hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
    ) -> Tensor:
        rows, block_length = hidden_states.shape[:2]
        sources = torch.cat([context_hidden_states, hidden_states], dim=1)  # (R, C + Q, D)
        queries = self.q_norm(self.q_proj(hidden_states).view(rows, block_length, -1, self.head_dim)).transpose(1, 2)
        keys, values = (states.transpose(1, 2) for states in self.keys_and_values(sources))

        cos, sin = (table[:, None] for table in position_embeddings)  # (R, 1, C + Q, head_dim)
        keys = keys * cos + rotate_half(keys) * sin
        cos, sin = cos[:, :, -block_length:], sin[:, :, -block_length:]
        queries = queries * cos + rotate_half(queries) * sin

        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
        )
        return self.o_proj(output.reshape(rows, block_length, -1))


class DSparkDecoderLayer(GradientCheckpointingLayer):
    """A Qwen3 layer whose attention also reads the projected target states."""

    norm_class: type[nn.Module] = Qwen3RMSNorm
    attention_class = DSparkAttention

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        context_hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
    ) -> Tensor:
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), context_hidden_states, position_embeddings, attention_mask, cache
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Gemma4DSparkAttention(DSparkAttention):
    """With normalised values, which may be the keys as they were before their norm, and no scale of its own."""

    norm_class = Gemma4RMSNorm

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scaling = 1.0  # the query and key norms have learnt it
        self.v_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps, with_scale=False)

    def keys_and_values(self, sources: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.k_proj(sources).view(*sources.shape[:2], -1, self.head_dim)
        values = keys if self.config.attention_k_eq_v else self.v_proj(sources).view_as(keys)
        return self.k_norm(keys), self.v_norm(values)


class Gemma4DSparkDecoderLayer(DSparkDecoderLayer):
    """A Gemma4 layer whose attention also reads the projected target states."""

    norm_class = Gemma4RMSNorm
    attention_class = Gemma4DSparkAttention

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        hidden_states: Tensor,
        context_hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Cache | None = None,
    ) -> Tensor:
        attended = self.self_attn(
            self.input_layernorm(hidden_states), context_hidden_states, position_embeddings, attention_mask, cache
        )
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        passed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(passed)) * self.layer_scalar


BACKBONES: dict[str, type[DSparkDecoderLayer]] = {"qwen3": DSparkDecoderLayer, "gemma4": Gemma4DSparkDecoderLayer}
