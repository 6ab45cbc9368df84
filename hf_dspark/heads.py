"""The small heads on top of the parallel backbone.

A block drafted in one pass does not know its own earlier tokens. The sequential head repairs that: from the token just
chosen it adds a low-rank bias to the next position's logits, `B_k = W2 z_k` with `z_k` of width r (arXiv 2607.05147,
section 2). The confidence head turns the same inputs into the probability that a token survives verification, given that
those before it did.

All three sequential heads share one form: `latent` maps the previous token's embedding `W1[x_{k-1}]`, the backbone's state
`h_k` and a recurrent state to `z_k`; `markov_w2` maps `z_k` to the draft vocabulary. Parameter names follow the DeepSpec
checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """`vanilla`: z_k = W1[x_{k-1}], a table of habits: which token tends to follow which."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_logits_size, bias=False)

    def latent(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One position.

        Args:
            embedding (`torch.Tensor` of shape `(N, r)`): W1 of the previous token.
            hidden (`torch.Tensor` of shape `(N, D)`): backbone state of this position.
            state (`torch.Tensor` of shape `(N, r)`, *optional*): recurrent state; `None` at the first position.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: z `(N, r)` and the next recurrent state.
        """
        return embedding, None

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """z of whole blocks with known predecessors (training): `(N, K, r)` and `(N, K, D)` to `(N, K, r)`."""
        return self.latent(embeddings, hidden, None)[0]


class GatedMarkovHead(MarkovHead):
    """`gated`: z_k = σ(W_gate [h_k ; W1[x_{k-1}]] + b) ⊙ W1[x_{k-1}], habits weighed by the context."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.gate_proj(torch.cat([hidden, embedding], dim=-1)).sigmoid() * embedding, None


class RNNMarkovHead(MarkovHead):
    """`rnn`: a gated recurrence over [s_{k-1} ; W1[x_{k-1}] ; h_k]; remembers more than one token."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def latent(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if state is None:
            state = torch.zeros_like(embedding)
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        state, latents = None, []
        for k in range(embeddings.shape[1]):
            latent, state = self.latent(embeddings[:, k], hidden[:, k], state)
            latents.append(latent)
        return torch.stack(latents, dim=1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """Logit of c_k = σ(w·[h_k ; W1[x_{k-1}]] + b), the chance that draft token k survives if those before it did."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """Confidence logits, uncalibrated.

        Args:
            hidden (`torch.Tensor` of shape `(..., D)`): backbone states.
            embeddings (`torch.Tensor` of shape `(..., r)`, *optional*): W1 of the previous tokens; ignored by a head that
                was trained without them.

        Returns:
            `torch.Tensor` of shape `(...)`, float32.
        """
        inputs = torch.cat([hidden, embeddings], dim=-1) if self.with_markov else hidden
        return self.proj(inputs).squeeze(-1).float()
