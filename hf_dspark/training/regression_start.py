"""Where a new drafter starts: what least squares can tell it before the first gradient.

A drafter first has to find out that the context row right before the anchor matters most, then what to make of it. By
gradients alone this takes most of a small budget. Both have a closed form. The first layer's queries and keys are set so that
most heads read the last context row and the others the anchor, whatever the tokens: per-head normalisation turns a
projection of rank one into a constant vector, of which rotary embedding makes a function of the distance alone. Values, output
and context projection then are a linear map from (target states before the anchor, anchor) to the state that the target
will have at the anchor, which ridge regression gives. Everything else of a layer starts silent (zero output projections).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDraftModel
from .data import CACHED_STATES, collate
from .state_cache import captured_states

_SELECTIVITY = 16.0  # how far, in log-probability, keys of the wrong kind stand behind
_LOUDNESS = 0.4  # of the backbone's logits: the sequential head has already said what the anchor alone tells
_RIDGE = 1e-3  # relative to the mean variance of the inputs


def require_qwen3_layers(drafter: DSparkDraftModel) -> None:
    """Raises ValueError for layers whose weights mean other things than those that a start sets."""
    if drafter.config.backbone_type != "qwen3":
        raise ValueError(
            "`backbone_type` must be 'qwen3' to start a drafter's layers from its target, got "
            f"{drafter.config.backbone_type!r}. Train it from random weights or from a checkpoint."
        )


@torch.no_grad()
def start_from_regression(
    drafter: DSparkDraftModel, target: PreTrainedModel, examples: Any, max_anchors: int = 60_000
) -> float:
    """Sets the backbone of a new drafter by least squares on the target's states.

    Args:
        drafter ([`DSparkDraftModel`]): new, bound to the target; changed in place. Its sequential head is left alone.
        target (`PreTrainedModel`): the target.
        examples (sequence of `dict`): from [`~hf_dspark.training.data.read_examples`], or a
            [`~hf_dspark.training.state_cache.CachedExamples`], which saves running the target.
        max_anchors (`int`, defaults to 60,000): answer tokens to fit on.

    Returns:
        `float`: share of the variance of the target's states that is explained.

    Raises:
        ValueError: the draft layers are not Qwen3's.
    """
    require_qwen3_layers(drafter)
    config, head_dim = drafter.config, drafter.config.head_dim
    states, anchors, following = _anchors(drafter, target, examples, max_anchors)
    final_norm = _final_norm(target, following)
    drafter.norm.weight.copy_(_LOUDNESS * final_norm)
    goal = following / final_norm
    embedded = drafter.embed(anchors)
    tokens = _unit(embedded)
    # The last norm takes any length, so the guess may be as long as it takes to outweigh the anchor's own embedding.
    goal = _unit(goal) * max(1.0, 4 * float(embedded.square().mean().sqrt()))

    # Context projection: the target states' part of the best linear guess.
    both = _ridge(torch.cat([_unit(states), tokens], dim=1), goal)
    drafter.fc.weight.copy_(both[: states.shape[1]].T)
    drafter.hidden_norm.weight.fill_(1.0)
    rows = drafter.project_context(states)

    for layer in drafter.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    first: Any = drafter.layers[0].self_attn
    drafter.layers[0].input_layernorm.weight.fill_(1.0)
    mask = _unit(drafter.embed(torch.tensor([config.mask_token_id], device=anchors.device)))
    distances = _distance_weights(drafter)
    constant = torch.zeros(head_dim, device=rows.device)
    constant[head_dim // 2 - 1] = 1.0  # the slowest rotation: the same at every distance
    unit_query = torch.zeros(head_dim, device=rows.device)
    unit_query[: head_dim // 2] = 1.0
    query_scale = 2**0.5  # of each of its entries, after the norm

    groups = config.num_attention_heads // config.num_key_value_heads
    readers = max(1, round(config.num_key_value_heads * 2 / 3))  # key-value heads that read the context
    wanted_key = head_dim**0.5 / query_scale
    keys_of_context = wanted_key * (distances + _SELECTIVITY * constant)
    keys_of_anchor = wanted_key * _SELECTIVITY * constant
    see_context = _separator([(rows, 1.0), (tokens, -1.0), (mask, -1.0)])
    see_anchor = _separator([(rows, -1.0), (tokens, 1.0), (mask, -1.0)])
    ask = _separator([(tokens, 1.0), (mask, 1.0)])
    # One norm weight serves all heads, so all keys get the size of the larger kind.
    size = max(float(keys_of_context.norm()), float(keys_of_anchor.norm()))
    first.q_norm.weight.fill_(1.0)
    first.k_norm.weight.fill_(size / head_dim**0.5)
    for head in range(config.num_key_value_heads):
        here = slice(head * head_dim, (head + 1) * head_dim)
        key, see = (keys_of_context, see_context) if head < readers else (keys_of_anchor, see_anchor)
        first.k_proj.weight[here] = torch.outer(key / key.norm() * head_dim**0.5, see)
    for head in range(config.num_attention_heads):
        first.q_proj.weight[head * head_dim : (head + 1) * head_dim] = torch.outer(unit_query, ask)

    # Values and output: a map of rank (readers · head_dim) for the context, of the remaining heads for the anchor.
    fit = _ridge(torch.cat([rows, tokens], dim=1), goal - embedded)
    first.v_proj.weight.zero_()
    width, back = rows.shape[1], torch.zeros(rows.shape[1], config.num_key_value_heads, 1, head_dim, device=rows.device)
    guess = embedded.clone()
    for source, weights, heads in (
        (rows, fit[:width], range(readers)),
        (tokens, fit[width:], range(readers, config.num_key_value_heads)),
    ):
        rank = min(len(heads) * head_dim, min(weights.shape))
        if not rank:
            continue
        # Principal directions of what the map makes of its inputs, not of the map itself.
        outputs = source @ weights
        _, directions = torch.linalg.eigh(outputs.T @ outputs)
        out = directions[:, -rank:]
        into = weights @ out
        scale = float(into.norm() / out.norm()) ** 0.5
        start = heads[0] * head_dim
        first.v_proj.weight[start : start + rank] = (into / scale).T
        back.flatten(1)[:, start : start + rank] = out * scale / groups
        guess += source @ into @ out.T
    # Query heads of a group read alike, and share the way back.
    first.o_proj.weight.copy_(back.expand(-1, -1, groups, -1).flatten(1))
    return 1 - float((goal - guess).square().sum() / (goal - goal.mean(0)).square().sum())


def norm_multipliers(decoder: nn.Module) -> dict[str, Tensor]:
    """A decoder's floating-point parameters by name, those of RMSNorms in the form we keep them.

    What such a norm multiplies by is what it makes of ones: its weight in most families, one more than its weight in
    Gemma.
    """
    found: dict[str, Tensor] = {
        name: parameter for name, parameter in decoder.named_parameters() if parameter.is_floating_point()
    }
    for name, module in decoder.named_modules():
        weight = found.get(f"{name}.weight")
        is_norm = name == "norm" or name.endswith(("_norm", "layernorm"))
        if is_norm and weight is not None and not isinstance(module, nn.LayerNorm):
            found[f"{name}.weight"] = module(torch.ones_like(weight))
    return found


def _anchors(drafter: DSparkDraftModel, target: PreTrainedModel, examples: Any, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of up to `limit` anchors: target states of the row before, the anchor token, the target's state at the anchor."""
    states, anchors, following = [], [], []
    count = 0
    for index in range(len(examples)):
        example = examples[index]
        start, ids = example["prompt_length"], torch.tensor(example["input_ids"])
        if start == 0:
            continue
        if CACHED_STATES[0] in example:
            context, last = (example[name] for name in CACHED_STATES)
        else:
            batch = {name: value.to(target.device) for name, value in collate([example], 0).items()}
            context, last = captured_states(
                target, batch["input_ids"], batch["attention_mask"], drafter.config.target_layer_ids
            )
            context, last = context[0], last[0]
        end = min(len(ids) - 1, start + limit - count)
        states.append(context[start - 1 : end - 1].to(drafter.device, torch.float32))
        anchors.append(ids[start:end].to(drafter.device))
        following.append(last[start:end].to(drafter.device, torch.float32))
        count += end - start
        if count >= limit:
            break
    return torch.cat(states), torch.cat(anchors), torch.cat(following)


def _unit(values: Tensor) -> Tensor:
    """Rows of root mean square one."""
    return values / values.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)


def _final_norm(target: PreTrainedModel, like: Tensor) -> Tensor:
    """What the target's last norm multiplies by, so that dividing gives the normalised state; ones if it has no RMSNorm."""
    found = norm_multipliers(target.get_decoder()).get("norm.weight")
    if found is None:
        return torch.ones(like.shape[-1], device=like.device)
    found = found.detach().to(like)
    return torch.where(found.abs() < 1e-3, torch.full_like(found, 1e-3), found)


def _ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    """W of the least squares fit `outputs ≈ inputs @ W`, `(n, p)` and `(n, q)` to `(p, q)`."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, inputs.T @ outputs)


def _separator(kinds: list[tuple[Tensor, float]]) -> Tensor:
    """The direction along which rows of each kind come closest to that kind's value; every kind weighs the same."""
    weighted = [rows * len(rows) ** -0.5 for rows, _ in kinds]
    values = [rows.new_full((len(rows), 1), value * len(rows) ** -0.5) for rows, value in kinds]
    return _ridge(torch.cat(weighted), torch.cat(values))[:, 0]


def _distance_weights(drafter: DSparkDraftModel) -> Tensor:
    """A key κ for which Σ_i (κ_i cos Δω_i + κ_{i+d/2} sin Δω_i) falls with the distance Δ between query and key.

    That sum is the attention score, up to a constant, of the query that is one in the first half. It is fitted to a curve that
    falls by several units a token at first and stays low for the rest of the context.
    """
    frequencies = drafter.rotary_emb.inv_freq.float()
    distance = torch.arange(1, 2048).to(frequencies)
    angles = distance[:, None] * frequencies
    basis = torch.cat([angles.cos(), angles.sin()], dim=1)
    curve = 30.0 * (torch.exp(-(distance - 1) / 6) - 1)
    weight = ((8.0 / (distance + 7)) ** 0.7)[:, None]
    return _ridge(basis * weight, curve[:, None] * weight)[:, 0]
