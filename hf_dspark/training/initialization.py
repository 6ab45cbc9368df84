"""A new drafter for a target: its configuration, and weights to start from.

Three sources, none needed for correctness, all saving training. The target: a draft layer has its shape, and starts as one
of its last layers. The text: the sequential head is fitted to which token follows which. Least squares: what the first
layer should read, and what to make of it, see [`~hf_dspark.training.regression_start`].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig, spread_layer_ids
from ..heads import MarkovHead
from ..modeling_dspark import DSparkDraftModel
from .regression_start import norm_multipliers, require_qwen3_layers, start_from_regression


def config_for_target(target: PreTrainedModel, mask_token_id: int, **overrides: Any) -> DSparkConfig:
    """Configuration of a drafter for a target: its widths, rope and special tokens.

    Args:
        target (`PreTrainedModel`): a decoder-only causal language model.
        mask_token_id (`int`): an unused token of the target.
        overrides: fields of [`DSparkConfig`] to set otherwise, e.g. `num_hidden_layers=2`.

    Returns:
        [`DSparkConfig`].
    """
    config = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": _plain_rope(getattr(config, "rope_parameters", None)),
        "num_target_layers": config.num_hidden_layers,
        "target_layer_ids": spread_layer_ids(config.num_hidden_layers, 5),
        "mask_token_id": mask_token_id,
        **{name: getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    return DSparkConfig(**(fields | overrides))


def start_drafter(drafter: DSparkDraftModel, target: PreTrainedModel, examples: Sequence[dict[str, Any]]) -> None:
    """Gives a new drafter its starting weights.

    Args:
        drafter ([`DSparkDraftModel`]): new, its draft vocabulary chosen; changed in place and bound to the target.
        target (`PreTrainedModel`): the target.
        examples (sequence of `dict`): training text, from [`~hf_dspark.training.data.read_examples`], with cached states
            where there are some.
    """
    drafter.bind(target)
    start_from_target(drafter, target)
    if drafter.markov_head is not None and drafter.config.markov_head_type != "rnn":
        start_head_from_text(drafter, target, examples)
    start_from_regression(drafter, target, examples)


def _plain_rope(rope: dict | None) -> dict | None:
    """A target's rope for heads that are rotated whole: of several entries that of full attention."""
    if rope is None:
        return None
    rope = dict(rope.get("full_attention", rope))
    if rope.pop("partial_rotary_factor", 1.0) == 1.0:
        return rope
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}  # other kinds list factors for the part alone


@torch.no_grad()
def start_from_target(drafter: DSparkDraftModel, target: PreTrainedModel) -> list[str]:
    """Copies what fits from the target into a new drafter; the rest keeps its random weights.

    Args:
        drafter ([`DSparkDraftModel`]): changed in place.
        target (`PreTrainedModel`): source of layers and embedding directions.

    Returns:
        `list[str]`: names of the parameters that were set.

    Raises:
        ValueError: the draft layers are not Qwen3's.
    """
    require_qwen3_layers(drafter)
    available = norm_multipliers(target.get_decoder())
    first = drafter.config.num_target_layers - len(drafter.layers)
    copied: list[str] = []

    def copy(name: str, value: Tensor | None) -> None:
        parameter = drafter.get_parameter(name)
        if value is not None and value.shape == parameter.shape:
            parameter.copy_(value)
            copied.append(name)

    for index, layer in enumerate(drafter.layers):
        mine, theirs = f"layers.{index}.", f"layers.{first + index}."
        if f"{theirs}pre_feedforward_layernorm.weight" in available:
            continue  # a layer that also normalises what its parts put out (Gemma) means other things by its weights
        for name, _ in layer.named_parameters():
            copy(mine + name, available.get(theirs + name))
        for part in ("q", "k"):
            projection = available.get(f"{theirs}self_attn.{part}_proj.weight")
            if f"{theirs}self_attn.{part}_norm.weight" not in available and projection is not None:
                # A target without query and key norms: keep the size its queries and keys have on average.
                scaled = projection.float() * available[f"{theirs}input_layernorm.weight"]
                size = scaled.square().sum(1).mean().sqrt()
                copy(f"{mine}self_attn.{part}_norm.weight", size.expand(drafter.config.head_dim))
    if drafter.markov_head is not None:
        _start_markov(drafter.markov_head, target.get_input_embeddings().weight.detach())
        copied += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    return copied


def start_head_from_text(
    drafter: DSparkDraftModel,
    target: PreTrainedModel,
    examples: Sequence[dict[str, Any]],
    steps: int = 300,
    batch_size: int = 1024,
    learning_rate: float = 0.01,
) -> float:
    """Fits the sequential head to which token follows which in the answers, before any other training.

    Predecessors enter through a linear map of the target's embedding, so that tokens the text never shows start like their
    neighbours.

    Args:
        drafter ([`DSparkDraftModel`]): with a vanilla or gated sequential head; changed in place. The recurrent head does not
            pass W1 on as it is, so there is nothing to fit ahead of its recurrence.
        target (`PreTrainedModel`): source of the embedding.
        examples (list of `dict`): from [`~hf_dspark.training.data.read_examples`].
        steps (`int`, defaults to 300): updates of the fit.
        batch_size (`int`, defaults to 1024): token pairs per update.
        learning_rate (`float`, defaults to 0.01): first step size, falling to zero.

    Returns:
        `float`: cross-entropy of the last updates, in nats per token.
    """
    head = drafter.markov_head
    device = head.markov_w1.weight.device
    previous, following = (
        torch.tensor([token for example in examples for token in _answer(example, shift)], device=device) for shift in (0, 1)
    )
    if (token_ids := drafter.draft_token_ids) is not None:
        place = torch.full((drafter.config.vocab_size,), -1, device=device)
        place[token_ids] = torch.arange(len(token_ids), device=device)
        following = place[following]
        previous, following = previous[following >= 0], following[following >= 0]
    size = head.markov_w2.weight.shape[0]
    log_unigram = (torch.bincount(following, minlength=size).float() + 0.1).log()
    log_unigram -= log_unigram.mean()

    embedding = target.get_input_embeddings().weight.detach().to(device, torch.float32)
    embedding = (embedding - embedding.mean(0)) / embedding.std()
    width = head.rank - 1  # one direction is the constant that carries the unigram
    into = (torch.randn(embedding.shape[1], width, device=device) / embedding.shape[1] ** 0.5).requires_grad_()
    out = torch.zeros(size, width, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([into, out], lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    recent = 0.0
    for _ in range(steps):
        pairs = torch.randint(len(previous), (batch_size,)).to(device)
        logits = log_unigram + (embedding[previous[pairs]] @ into) @ out.T
        loss = nn.functional.cross_entropy(logits, following[pairs])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        recent = float(loss.detach()) if not recent else 0.9 * recent + 0.1 * float(loss.detach())
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.cat([torch.ones(len(embedding), 1, device=device), embedding @ into], dim=1))
        # A gate that knows nothing yet lets half of W1 through.
        gain = 2.0 if drafter.config.markov_head_type == "gated" else 1.0
        head.markov_w2.weight.copy_(gain * torch.cat([log_unigram[:, None], out], dim=1))
    return recent


def _answer(example: dict[str, Any], shift: int) -> list[int]:
    """Answer tokens without the last one, or (shift 1) without the first."""
    ids, start = example["input_ids"], example["prompt_length"]
    return ids[start : len(ids) - 1] if shift == 0 else ids[start + 1 :]


def _start_markov(head: MarkovHead, embedding: Tensor) -> None:
    """W1: each token's place along the main directions of the embedding, so that similar ones start alike; W2: zero."""
    centred = embedding.float() - embedding.float().mean(0)
    rank = min(head.rank, centred.shape[1])
    _, directions = torch.linalg.eigh(centred.T @ centred)
    coordinates = centred @ directions[:, -rank:]
    head.markov_w1.weight.zero_()
    head.markov_w1.weight[:, :rank] = coordinates / coordinates.std()
    head.markov_w2.weight.zero_()
