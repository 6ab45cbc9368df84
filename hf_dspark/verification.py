"""Acceptance: which draft tokens the target keeps, and the token it adds.

Greedy decoding keeps a token while it is the target's own first choice. Sampling keeps x with probability
min(1, p(x) / q(x)) and, at the first refusal, draws from the normalised residual max(0, p − q); the output then has exactly
the target's distribution p, whatever q is (Leviathan et al., arXiv 2211.17192, theorem 1), as long as q is the law x was
really drawn from and the decision to verify x did not depend on x.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_greedy(draft_tokens: Tensor, lengths: Tensor, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy acceptance.

    Args:
        draft_tokens (`torch.LongTensor` of shape `(R, L)`): proposed tokens, right-padded.
        lengths (`torch.LongTensor` of shape `(R,)`): how many of them are to be judged.
        target_tokens (`torch.LongTensor` of shape `(R, L + 1)`): the target's choice after the anchor and after each draft.

    Returns:
        `tuple[torch.LongTensor, torch.LongTensor]`: accepted counts `(R,)` and the target's own next token `(R,)`.
    """
    agree = (draft_tokens == target_tokens[:, :-1]) & _judged(draft_tokens, lengths)
    accepted = agree.long().cumprod(dim=1).sum(dim=1)
    return accepted, target_tokens.gather(1, accepted[:, None])[:, 0]


def accept_sampled(
    draft_tokens: Tensor, lengths: Tensor, draft_logits: Tensor, target_logits: Tensor, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rejection sampling (step 6 of the cycle).

    Args:
        draft_tokens (`torch.LongTensor` of shape `(R, L)`): proposed tokens, right-padded.
        lengths (`torch.LongTensor` of shape `(R,)`): how many of them are to be judged.
        draft_logits (`torch.Tensor` of shape `(R, L, Vd)`): logits of the law each token was drawn from, after every
            processor, float32.
        target_logits (`torch.Tensor` of shape `(R, L + 1, V)`): the target's logits after the same processors, float32.
        token_ids (`torch.LongTensor` of shape `(Vd,)`, *optional*): target token of each draft logit, ascending; the
            vocabularies are the same when not given.

    Returns:
        `tuple[torch.LongTensor, torch.LongTensor]`: accepted counts `(R,)` and the next token `(R,)`, drawn from the residual
        after a rejection and from the target when every judged token was kept.
    """
    rows = torch.arange(len(lengths), device=draft_tokens.device)
    draft_index = draft_tokens if token_ids is None else torch.searchsorted(token_ids, draft_tokens.contiguous())
    q = draft_logits.log_softmax(-1).gather(2, draft_index[..., None])[..., 0].exp()  # (R, L)
    p = target_logits[:, :-1].log_softmax(-1).gather(2, draft_tokens[..., None])[..., 0].exp()
    # u·q < p is u < p/q without the division: a q of 0 cannot have been drawn, a p of 0 is never accepted.
    agree = (torch.rand_like(p) * q < p) & _judged(draft_tokens, lengths)
    accepted = agree.long().cumprod(dim=1).sum(dim=1)

    refused = accepted < lengths
    distribution = target_logits[rows, accepted].softmax(-1)  # p behind the accepted prefix, (R, V)
    law = draft_logits[rows, accepted.clamp(max=draft_logits.shape[1] - 1)].softmax(-1)  # q of the refused token
    residual = distribution.clone()
    if token_ids is None:
        residual -= law
    else:
        residual[:, token_ids] -= law
    residual.clamp_min_(0)
    # Where q equals p the residual is all rounding; a refusal then had probability 0, and p itself is as good.
    usable = refused & (residual.sum(-1) > 0)
    distribution = torch.where(usable[:, None], residual, distribution)
    return accepted, torch.multinomial(distribution, 1)[:, 0]


def _judged(draft_tokens: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(draft_tokens.shape[1], device=draft_tokens.device) < lengths[:, None]
