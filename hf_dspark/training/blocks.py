"""Training blocks: anchors drawn from a sequence, and what each slot of their blocks sees and should say.

Inference drafts one block at a time behind a growing context. Training lays many blocks over one finished sequence:
block inputs are the token at the anchor and masks, labels are the tokens that followed, and every block attends to the
target's states strictly before its anchor and to itself (arXiv 2607.05147, section on training). One forward of the
target serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def sample_anchors(loss_mask: Tensor, num_anchors: int) -> tuple[Tensor, Tensor]:
    """Draws anchors without replacement, from the default generator of the processor.

    Args:
        loss_mask (`torch.BoolTensor` of shape `(B, S)`): answer tokens.
        num_anchors (`int`): anchors wanted per sequence, A.

    Returns:
        `tuple[torch.LongTensor, torch.BoolTensor]`: positions `(B, A)`, and which of them are real `(B, A)`; the real ones
            come first, ascending, and the others are 0. A position qualifies when its token and the next one are answer
            tokens. A is smaller than asked for where no sequence has as many.
    """
    eligible = torch.zeros_like(loss_mask)
    eligible[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:]
    count = min(num_anchors, max(int(eligible.sum(1).max()), 1))
    order = torch.rand(loss_mask.shape).to(loss_mask.device).masked_fill(~eligible, 2.0)
    chosen = order.topk(count, dim=1, largest=False).indices
    keep = eligible.gather(1, chosen)
    chosen, order = chosen.masked_fill(~keep, loss_mask.shape[1]).sort(dim=1)
    keep = keep.gather(1, order)
    return chosen.masked_fill(~keep, 0), keep


@dataclass(frozen=True)
class Blocks:
    """A blocks over each of B sequences, with Q inputs and K labels each.

    Args:
        inputs (`torch.LongTensor` of shape `(B, A, Q)`): anchor token and masks.
        positions (`torch.LongTensor` of shape `(B, A, Q)`): rope positions of the inputs.
        previous (`torch.LongTensor` of shape `(B, A, K)`): the true predecessors x_{k-1}.
        labels (`torch.LongTensor` of shape `(B, A, K)`): the tokens to draft.
        sources (`torch.LongTensor` of shape `(B, A, K)`): positions whose target state predicts each label.
        supervised (`torch.BoolTensor` of shape `(B, A, K)`): labels inside the sequence and the loss mask, up to the
            first that is not.
    """

    inputs: Tensor
    positions: Tensor
    previous: Tensor
    labels: Tensor
    sources: Tensor
    supervised: Tensor


def build_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    block_size: int,
    mask_token_id: int,
    anchor_first: bool,
) -> Blocks:
    """Lays blocks over sequences.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, S)`): right-padded sequences.
        loss_mask (`torch.BoolTensor` of shape `(B, S)`): answer tokens.
        anchors, keep (`(B, A)`): from `sample_anchors`.
        block_size (`int`): inputs per block, Q.
        mask_token_id (`int`): the mask token.
        anchor_first (`bool`): whether the anchor's own slot predicts, K = Q; otherwise K = Q − 1.

    Returns:
        [`Blocks`].
    """
    length = input_ids.shape[1]
    inputs = torch.full((*anchors.shape, block_size), mask_token_id, dtype=torch.long, device=input_ids.device)
    inputs[..., 0] = input_ids.gather(1, anchors)
    steps = torch.arange(block_size, device=input_ids.device)
    positions = anchors[..., None] + steps

    sources = positions if anchor_first else positions[..., :-1]
    targets = sources + 1
    inside = targets < length
    flat = targets.clamp(max=length - 1).flatten(1)
    labels = input_ids.gather(1, flat).view(targets.shape)
    in_mask = loss_mask.gather(1, flat).view(targets.shape)
    supervised = (inside & in_mask & keep[..., None]).long().cumprod(-1).bool()
    sources = sources.clamp(max=length - 1)
    previous = input_ids.gather(1, sources.flatten(1)).view(targets.shape)
    return Blocks(inputs, positions, previous, labels, sources, supervised)


def block_visibility(anchors: Tensor, block_size: int, context_length: int, window: int | None) -> Tensor:
    """What each slot of each block attends to.

    Args:
        anchors (`(B, A)`): from `sample_anchors`.
        block_size (`int`): inputs per block, Q.
        context_length (`int`): context rows, S.
        window (`int`, *optional*): sliding window of the drafter.

    Returns:
        `torch.BoolTensor` of shape `(B, 1, A·Q, S + A·Q)`: context strictly before the anchor (within the window), and
        the slot's own block.
    """
    batch, count = anchors.shape
    slots = torch.arange(context_length, device=anchors.device)
    context = slots < anchors[..., None]  # (B, A, S)
    context = context[:, :, None].expand(-1, -1, block_size, -1)
    if window is not None:
        positions = anchors[..., None] + torch.arange(block_size, device=anchors.device)
        context = context & (slots > positions[..., None] - window)
    block = torch.arange(count * block_size, device=anchors.device) // block_size
    own = (block[:, None] == block[None, :]).expand(batch, -1, -1)
    return torch.cat([context.reshape(batch, count * block_size, -1), own], dim=-1)[:, None]
