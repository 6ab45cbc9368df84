"""The DSpark loss, without ever holding the vocabulary for all positions.

L = 0.1·CE + 0.9·‖p_d − p_t‖₁ + 1.0·BCE(confidence logit, c*), weighted means over all supervised slots with
w_k = exp(−(k−1)/γ_w); p_t is the target's own distribution at the same position, c* = 1 − ½‖p_d − p_t‖₁ the probability
that rejection sampling keeps the token (arXiv 2607.05147, section on training). The L1 term is thus trained on what
inference is paid for.

Logits are `positions × vocabulary` and would be the largest tensors of training by far. They are made for
`max_logit_positions` positions at a time, and their gradients with respect to the small inputs (draft states, head
latents, `markov_w2`) are taken on the spot, so that nothing of size V outlives its chunk. Neighbouring blocks predict
the same positions; the target's logits are computed once per distinct position of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modeling_dspark import DSparkDraftModel


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms.

    Args:
        cross_entropy (`float`, defaults to 0.1): weight of the cross-entropy with the true tokens.
        distance (`float`, defaults to 0.9): weight of ‖p_d − p_t‖₁.
        confidence (`float`, defaults to 1.0): weight of the confidence term; 0 trains no confidence head.
        decay (`float`, defaults to 4.0): γ_w; later slots of a block count exp(−(k−1)/γ_w).
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass
class LossOutput:
    """Loss and what was learnt on the way.

    Args:
        loss (`torch.Tensor`, scalar): to be minimised.
        terms (`dict[str, torch.Tensor]`): weighted sums of the three terms before their weights.
        normaliser (`torch.Tensor`, scalar): Σ w over supervised slots; the terms' denominator.
        metrics (`dict[str, torch.Tensor]`): sums over supervised slots per draft position, each `(K,)`: `count`,
            `overlap` (Σ c*), `agree` (draft and target have the same first choice), `confidence` (Σ c_k),
            `confidence_error` (Σ |c_k − c*|); and over blocks `(K,)`: `survive` (Σ ∏_{i≤k} c*_i) and `agree_prefix` (how
            many blocks agree up to k).
    """

    loss: Tensor
    terms: dict[str, Tensor]
    normaliser: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def dspark_loss(
    drafter: DSparkDraftModel,
    hidden: Tensor,
    previous: Tensor,
    labels: Tensor,
    supervised: Tensor,
    target_states: Tensor,
    sources: Tensor,
    weights: LossWeights = LossWeights(),
    max_logit_positions: int = 1024,
    normaliser: Tensor | None = None,
) -> LossOutput:
    """Loss of N blocks.

    Args:
        drafter ([`DSparkDraftModel`]): bound to its target; its heads are applied here.
        hidden (`torch.Tensor` of shape `(N, K, D)`): draft states.
        previous, labels (`torch.LongTensor` of shape `(N, K)`): true predecessors and tokens to draft.
        supervised (`torch.BoolTensor` of shape `(N, K)`): slots that count.
        target_states (`torch.Tensor` of shape `(T, D)`): the target's last hidden states (after its final norm).
        sources (`torch.LongTensor` of shape `(N, K)`): row of `target_states` that predicts each label.
        weights ([`LossWeights`]): weights of the terms.
        max_logit_positions (`int`, defaults to 1024): most positions whose logits exist at once.
        normaliser (`torch.Tensor`, *optional*): denominator of the weighted means; Σ w of these blocks when not given.
            Several processes pass their common one.

    Returns:
        [`LossOutput`].
    """
    weight_of_slot = slot_weights(supervised, weights.decay)
    normaliser = weight_of_slot.sum() if normaliser is None else normaliser
    embeddings = latents = None
    if drafter.markov_head is not None:
        embeddings = drafter.markov_head.markov_w1(previous)
        latents = drafter.markov_head(embeddings, hidden)
    confidence = None
    if drafter.confidence_head is not None and weights.confidence:
        confidence = drafter.confidence_head(hidden, embeddings)

    blocks_per_chunk = max(1, max_logit_positions // hidden.shape[1])
    chunks = _Chunks(drafter, labels, supervised, weight_of_slot, target_states, sources, weights, blocks_per_chunk)
    w2 = None if drafter.markov_head is None else drafter.markov_head.markov_w2.weight
    total = _ChunkedLoss.apply(chunks, hidden, latents, w2, confidence)
    return LossOutput(total / normaliser.clamp_min(1e-6), chunks.terms, normaliser, chunks.metrics)


def slot_weights(supervised: Tensor, decay: float) -> Tensor:
    """w_k = exp(−(k−1)/γ_w) at the supervised slots of `(N, K)`, 0 at the others."""
    return torch.exp(-torch.arange(supervised.shape[1], device=supervised.device) / decay) * supervised


class _Chunks:
    """The loss of one chunk of blocks at a time, with running sums."""

    def __init__(
        self,
        drafter: DSparkDraftModel,
        labels: Tensor,
        supervised: Tensor,
        slot_weights: Tensor,
        target_states: Tensor,
        sources: Tensor,
        weights: LossWeights,
        blocks_per_chunk: int,
    ):
        self.drafter, self.labels, self.supervised, self.slot_weights = drafter, labels, supervised, slot_weights
        self.target_states, self.sources, self.weights = target_states, sources, weights
        self.size = blocks_per_chunk
        zero = labels.new_zeros((), dtype=torch.float32)
        self.terms = {name: zero.clone() for name in ("cross_entropy", "distance", "confidence")}
        names = ("count", "overlap", "agree", "confidence", "confidence_error", "survive", "agree_prefix")
        self.metrics = {name: zero.repeat(labels.shape[1]) for name in names}
        self.token_ids = drafter.draft_token_ids
        self.to_draft: Tensor | None = None  # place of each token in the draft vocabulary, -1 outside, (V,)
        if self.token_ids is not None:
            self.to_draft = labels.new_full((drafter.config.vocab_size,), -1)
            self.to_draft[self.token_ids] = torch.arange(len(self.token_ids), device=labels.device)

    def __len__(self) -> int:
        return -(-len(self.labels) // self.size)

    def rows(self, index: int) -> slice:
        return slice(index * self.size, (index + 1) * self.size)

    def target_law(self, rows: slice) -> tuple[Tensor, Tensor]:
        """p_t over the draft vocabulary `(n, Vd)` at a chunk's supervised slots, and the likeliest tokens `(n,)`."""
        distinct, place = self.sources[rows][self.supervised[rows]].unique(return_inverse=True)
        logits = self.drafter.bound_target.full_logits(self.target_states[distinct])
        law = logits.softmax(-1)
        best = logits.argmax(-1)
        if self.token_ids is not None:
            law = law[:, self.token_ids]
        return law[place], best[place]

    def loss(self, rows: slice, hidden: Tensor, latents: Tensor | None, w2: Tensor | None, confidence: Tensor | None) -> Tensor:
        """Weighted sum of the terms over the chunk, not normalised; adds to the running sums."""
        supervised = self.supervised[rows]
        if not bool(supervised.any()):
            return hidden.sum() * 0.0
        slot_weights = self.slot_weights[rows][supervised]  # (n,)
        with torch.no_grad():
            target_law, target_best = self.target_law(rows)
        logits = self.drafter.base_logits(hidden[supervised])
        if latents is not None:
            logits = logits + F.linear(latents[supervised], w2).float()
        log_law = logits.log_softmax(-1)  # (n, Vd)

        labels = self.labels[rows][supervised]
        known = torch.ones_like(labels, dtype=torch.bool)
        if self.to_draft is not None:
            labels = self.to_draft[labels]
            known = labels >= 0  # a token outside the draft vocabulary teaches the other two terms only
        nll = -log_law.gather(1, labels.clamp_min(0)[:, None])[:, 0] * known
        # Tokens that the drafter does not have: all of their mass is distance.
        missing = (1 - target_law.sum(-1)).clamp_min(0) if self.token_ids is not None else 0.0
        distance = (log_law.exp() - target_law).abs().sum(-1) + missing
        terms = {"cross_entropy": nll, "distance": distance}
        overlap = (1 - 0.5 * distance).detach().clamp(0, 1)
        if confidence is not None:
            terms["confidence"] = F.binary_cross_entropy_with_logits(confidence[supervised], overlap, reduction="none")
        total = hidden.new_zeros((), dtype=torch.float32)
        for name, values in terms.items():
            value = (slot_weights * values).sum()
            self.terms[name] += value.detach()
            total = total + getattr(self.weights, name) * value
        self._measure(supervised, overlap, logits, target_best, confidence)
        return total

    @torch.no_grad()
    def _measure(
        self, supervised: Tensor, overlap: Tensor, logits: Tensor, target_best: Tensor, confidence: Tensor | None
    ) -> None:
        best = logits.argmax(-1)
        if self.token_ids is not None:
            best = self.token_ids[best]

        def spread(values: Tensor) -> Tensor:  # back to (n blocks, K), zero where not supervised
            return torch.zeros(supervised.shape, device=values.device).masked_scatter_(supervised, values.float())

        overlap, agree = spread(overlap), spread(best == target_best)
        self.metrics["count"] += supervised.sum(0)
        self.metrics["overlap"] += overlap.sum(0)
        self.metrics["agree"] += agree.sum(0)
        self.metrics["survive"] += overlap.cumprod(1).sum(0)
        self.metrics["agree_prefix"] += agree.cumprod(1).sum(0)
        if confidence is not None:
            guess = spread(confidence[supervised].sigmoid())
            self.metrics["confidence"] += guess.sum(0)
            self.metrics["confidence_error"] += (guess - overlap).abs().sum(0)


class _ChunkedLoss(torch.autograd.Function):
    """Sums chunk losses; the gradients of each chunk are taken before the next one starts."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, *inputs: Tensor | None) -> Tensor:
        hidden, latents, w2, confidence = inputs
        needs = [value is not None and value.requires_grad for value in inputs]
        grads = [
            torch.zeros_like(value, dtype=torch.float32) if need else None for value, need in zip(inputs, needs, strict=True)
        ]
        total = hidden.new_zeros((), dtype=torch.float32)
        for index in range(len(chunks)):
            rows = chunks.rows(index)
            pieces = [None if value is None else value[rows] for value in (hidden, latents)]
            pieces += [w2, None if confidence is None else confidence[rows]]
            pieces = [
                piece if piece is None else piece.detach().requires_grad_(need)
                for piece, need in zip(pieces, needs, strict=True)
            ]
            with torch.set_grad_enabled(any(needs)):
                loss = chunks.loss(rows, *pieces)
            total += loss.detach()
            wanted = [piece for piece, need in zip(pieces, needs, strict=True) if need]
            found = iter(torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ())
            for place, need in enumerate(needs):
                if not need or (grad := next(found)) is None:
                    continue
                if place == 2:
                    grads[place] += grad
                else:
                    grads[place][rows] += grad
        ctx.save_for_backward(*[grad for grad in grads if grad is not None])
        ctx.dtypes = [None if grad is None else value.dtype for value, grad in zip(inputs, grads, strict=True)]
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        return (None, *[None if dtype is None else (next(saved) * grad_outputs[0]).to(dtype) for dtype in ctx.dtypes])
