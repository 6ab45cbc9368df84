"""The causality lesson: a scheduler that looks at a token before deciding about it bends the output.

The paper's example (arXiv 2607.05147, appendix). Two tokens, A and B. The target says A with 0.7, the drafter tosses a fair
coin. The second token's confidence, 0.9 behind A and 0 behind B, gives away what the first one is. Everything is done by the
package's own scheduling and verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dspark import LoadProfile
from hf_dspark.scheduling import early_stop, expected_throughput, global_search, within_capacity
from hf_dspark.verification import accept_sampled

TARGET, DRAFT = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
PROFILE = LoadProfile({1: 1.0, 2: 0.5, 3: 0.45})
DRAWS = 20_000
BLOCKS = torch.tensor([[first, second] for first in (0, 1) for second in (0, 1)])  # AA, AB, BA, BB: equally likely


@dataclass(frozen=True)
class Rule:
    """A way to choose how many tokens to verify, and what it is called on the page."""

    name: str
    lengths: Callable[[Tensor], Tensor]
    words: str


RULES = (
    Rule(
        "Peeking",
        lambda confidence: global_search(confidence, PROFILE),
        "looks at both confidences, and the second one betrays the first token",
    ),
    Rule(
        "The wall: early stop",
        lambda confidence: early_stop(confidence, PROFILE),
        "decides about a token before it looks at anything that token has touched",
    ),
    Rule(
        "The wall: old capacity",
        lambda confidence: within_capacity(confidence, 1),
        "how many tokens to verify was fixed two rounds ago; here one",
    ),
)


def confidences(blocks: Tensor) -> Tensor:
    """c₁ = 0.8 always; c₂ = 0.9 behind A and 0 behind B. `(N, 2)` of tokens `(N, 2)`."""
    return torch.stack([torch.full((len(blocks),), 0.8), torch.where(blocks[:, 0] == 0, 0.9, 0.0)], dim=1)


def simulate(rule: Rule, draws: int = DRAWS, seed: int = 0) -> float:
    """Share of outputs whose first token is A."""
    lengths = torch.cat([rule.lengths(confidences(block[None])) for block in BLOCKS])  # each a request of its own
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        which = torch.randint(len(BLOCKS), (draws,))
        blocks = BLOCKS[which]
        laws = DRAFT.log().expand(draws, 2, -1), TARGET.log().expand(draws, 3, -1)
        accepted, following = accept_sampled(blocks, lengths[which], *laws)
    return float((torch.where(accepted > 0, blocks[:, 0], following) == 0).float().mean())


def page(draws: int = DRAWS, seed: int = 0) -> str:
    """The shares of A under each rule, drawn now, and why."""
    noise = 2 * (0.7 * 0.3 / draws) ** 0.5
    rows = [("The target alone", 0.7, "what has to come out", "law")]
    for rule in RULES:
        share = simulate(rule, draws, seed)
        rows.append((rule.name, share, rule.words, "good" if abs(share - 0.7) < 2 * noise else "bad"))
    bars = "".join(
        f'<li class="{kind}"><b>{name}</b> <span class="value">{share:.3f}</span><div class="track"><div style="width:'
        f'{100 * share:.1f}%"></div></div><small>{words}</small></li>'
        for name, share, words, kind in rows
    )
    return (
        f'<ul class="shares" role="status">{bars}</ul><p class="hint">Share of A among {draws:,} first tokens, drawn just now; '
        f"chance moves it by about ±{noise:.3f}.</p>{_why()}"
    )


def _why() -> str:
    """Expected throughput of each choice in both cases: what the peeking rule saw."""
    rows = ""
    for name, block in (("A", BLOCKS[0]), ("B", BLOCKS[2])):
        confidence = confidences(block[None])
        values = [expected_throughput(confidence, torch.tensor([length]), PROFILE) for length in range(3)]
        best = values.index(max(values))
        rows += f"<tr><td>{name}</td>" + "".join(
            f"<td>{f'<b>{value:.2f} ←</b>' if length == best else f'{value:.2f}'}</td>" for length, value in enumerate(values)
        )
        rows += "</tr>"
    return (
        '<h4>What the peeking rule sees</h4><div class="wide" tabindex="0"><table><thead><tr><th>first token</th>'
        f"<th>verify 0</th><th>verify 1</th><th>verify 2</th></tr></thead><tbody>{rows}</tbody></table></div>"
        "<p>Expected tokens per second of each choice. Behind A it pays to verify both tokens, so a drafted A always stands: "
        "half of all cases. Behind B it pays to verify none, so the B is thrown away and the target draws afresh: A with 0.7. "
        "Together 0.5 + 0.5 × 0.7 = 0.85. Each step by itself is correct; only <em>when</em> to verify depended on "
        "<em>what</em> was drafted. The wall forbids just that.</p>"
    )
