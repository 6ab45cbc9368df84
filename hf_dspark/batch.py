"""A round of draft, schedule, verify, for rows that share every forward: the core of both loops.

`decoding.py` runs the rows of one `generate` call, `serving.py` those of requests that come and go. They differ in who joins,
who leaves and what becomes of the tokens; what happens between two commits is written down here, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from .candidate_generator import CandidateBlock, DSparkCandidateGenerator
from .target import TargetForward
from .verification import accept_greedy, accept_sampled


@dataclass(frozen=True)
class Outcome:
    """What one forward of the target decided for R rows.

    Args:
        block ([`CandidateBlock`]): what was drafted and verified; an empty one after a prefill or a plain step.
        candidates (`torch.LongTensor` of shape `(R, L)`): its tokens, on the device of the sequences.
        lengths (list of R `int`s): how many of them were verified.
        accepted (list of R `int`s): how many of them the target agreed with.
        following (`torch.LongTensor` of shape `(R,)`): the target's own token behind them.
        faulty (list of R `bool`s): rows whose scores leave no choice (NaN, infinite, or every token banned): what stands
            here for them means nothing. Looked for only where faults are isolated.
        slots (list of R `int`s): slot of each row's first query.
        outputs (`CausalLMOutputWithPast`): of the forward.
        scores, logits (`torch.FloatTensor` of shape `(R, 1 + L, V)`): processed and raw.
    """

    block: CandidateBlock
    candidates: Tensor
    lengths: list[int]
    accepted: list[int]
    following: Tensor
    faulty: list[bool]
    slots: list[int]
    outputs: CausalLMOutputWithPast
    scores: Tensor
    logits: Tensor


class Batch:
    """Rows that share their forwards.

    Args:
        forward ([`TargetForward`]): of the target.
        generator ([`DSparkCandidateGenerator`]): drafts for the same rows.
        isolates_faults (`bool`, defaults to `False`): whether a row without a usable score is marked instead of failing the
            forward of all. It costs a look at every score.
    """

    def __init__(self, forward: TargetForward, generator: DSparkCandidateGenerator, isolates_faults: bool = False):
        self.forward, self.generator = forward, generator
        generator.packs = forward.packs
        self._isolates_faults = isolates_faults

    def prefill(self, input_ids: Tensor) -> Outcome:
        """Runs the prompts `(R, S)`, shows their states to the drafter and chooses the first token of every row."""
        forward, generator = self.forward, self.generator
        generator.start(forward.layout, forward.past_length)
        outputs = forward.prefill(input_ids, observe=generator.observe)
        logits = outputs.logits[:, -1:].to(input_ids.device, torch.float32)
        slots = [forward.prompt_length - 1] * len(input_ids)
        return self._judge(outputs, logits, _no_draft(input_ids), list(input_ids), forward.cache_rows, slots)

    def round(self, sequences: list[Tensor], running: list[int], limits: list[int]) -> Outcome:
        """Drafts, schedules and verifies; follow it by [`~Batch.observe`] if there is a next round.

        Args:
            sequences (list of R `torch.LongTensor`s, 1-D): committed tokens of each row.
            running (list of R `int`s): number of each row, by which its processors are found.
            limits (list of R `int`s): longest draft each row has room for.
        """
        slots = [len(ids) - 1 + self.forward.slot_offset for ids in sequences]
        anchors = torch.stack([ids[-1] for ids in sequences])[:, None]
        block = self.generator.propose(sequences, running, slots, limits)
        if block is None:
            block = _no_draft(anchors)
        with self.generator.statistics.timed("verify"):
            tokens = torch.cat([anchors, block.tokens.to(anchors.device)], dim=1)
            outputs = self.forward.verify(sequences, tokens, slots, block.lengths.tolist())
            logits = outputs.logits.to(anchors.device, torch.float32)
        return self._judge(outputs, logits, block, sequences, running, slots)

    def observe(self, outcome: Outcome) -> None:
        """Shows the drafter what the target thought about anchors and accepted drafts."""
        counts = [count + 1 for count in outcome.accepted]
        with self.generator.statistics.timed("draft"):
            self.generator.observe(outcome.outputs.hidden_states, outcome.slots, counts)

    def select_rows(self, places: list[int]) -> None:
        """Keeps only the rows at the given places, in that order."""
        kept = torch.tensor(places, device=self.forward.layout.position_ids.device)
        self.forward.select_rows(kept)
        self.generator.select_rows(kept)

    def join(self, other: Batch, length: int) -> None:
        """Takes over the rows of another batch as further, last rows; they must not have drafted yet.

        Args:
            other ([`Batch`]): of the same target and drafter; it must not be used again.
            length (`int`): committed tokens of the longest row of both.
        """
        self.forward.join(other.forward, length)
        self.generator.join(other.generator, length)

    def _judge(
        self,
        outputs: CausalLMOutputWithPast,
        logits: Tensor,
        block: CandidateBlock,
        sequences: list[Tensor],
        running: list[int],
        slots: list[int],
    ) -> Outcome:
        lengths, candidates = block.lengths.tolist(), block.tokens.to(logits.device)
        scores = self.generator.processors.over_block(logits, sequences, running, candidates, lengths)
        faulty = [False] * len(lengths)
        if self._isolates_faults:
            scores, faulty = _without_faults(scores, block.lengths.to(scores.device))
        agreed, following = _accept(block, candidates, scores, self.generator.do_sample)
        return Outcome(block, candidates, lengths, agreed.tolist(), following, faulty, slots, outputs, scores, logits)


def _no_draft(ids: Tensor) -> CandidateBlock:
    return CandidateBlock(ids.new_empty(len(ids), 0), torch.zeros(len(ids), dtype=torch.long))


def _without_faults(scores: Tensor, lengths: Tensor) -> tuple[Tensor, list[bool]]:
    """Scores `(R, 1 + L, V)` with those that leave no choice levelled out, and which rows have such up to their length."""
    unusable = ~scores.amax(-1).isfinite()  # (R, 1 + L); NaN is larger than everything here
    unusable &= torch.arange(scores.shape[1], device=scores.device) <= lengths[:, None]
    faulty = unusable.any(dim=1).tolist()
    return (scores.masked_fill(unusable[..., None], 0.0) if any(faulty) else scores), faulty


def _accept(block: CandidateBlock, candidates: Tensor, scores: Tensor, sample: bool) -> tuple[Tensor, Tensor]:
    lengths = block.lengths.to(scores.device)
    if candidates.shape[1] == 0:  # as plain `generate` chooses
        scores = scores[:, 0]
        return lengths, torch.multinomial(scores.softmax(-1), 1)[:, 0] if sample else scores.argmax(-1)
    if not sample:
        return accept_greedy(candidates, lengths, scores.argmax(-1))
    token_ids = None if block.token_ids is None else block.token_ids.to(scores.device)
    return accept_sampled(candidates, lengths, block.logits.to(scores.device), scores, token_ids)
