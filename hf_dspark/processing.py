"""The host's logits processors, on rows of different lengths.

Plain `generate` calls the processors once per step with a rectangular batch. Here each row has its own length and several
positions at once, and the drafter must apply them too, so that the law it reports is the law its tokens were drawn from.
Processors that only look at the scores run on everything in one call; the others run row by row and position by position,
with the prefix that plain decoding would have shown them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as host


class GreedyLaw(LogitsProcessor):
    """Greedy decoding as a law: all probability on the best score. For greedy rows that share a round with sampled ones."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `(N, V)`: 0 for the best token of each row, −∞ for the others; a row with NaN stays NaN."""
        best, index = scores.max(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, index, best - best)


# Look at one row of scores and nothing else: also right on a part of the vocabulary.
_SCORES_ONLY = (
    host.TemperatureLogitsWarper,
    host.TopKLogitsWarper,
    host.TopPLogitsWarper,
    host.TopHLogitsWarper,
    host.MinPLogitsWarper,
    host.TypicalLogitsWarper,
    host.EpsilonLogitsWarper,
    host.EtaLogitsWarper,
    host.InfNanRemoveLogitsProcessor,
    host.LogitNormalization,
    GreedyLaw,
)
# Read the row's own prefix but not which row of the batch it is.
_PREFIX_ONLY = (
    host.MinLengthLogitsProcessor,
    host.MinNewTokensLengthLogitsProcessor,
    host.NoRepeatNGramLogitsProcessor,
    host.SequenceBiasLogitsProcessor,
    host.NoBadWordsLogitsProcessor,
    host.ForcedBOSTokenLogitsProcessor,
    host.ForcedEOSTokenLogitsProcessor,
    host.ExponentialDecayLengthPenalty,
    host.SuppressTokensAtBeginLogitsProcessor,
    host.SuppressTokensLogitsProcessor,
    host.WatermarkLogitsProcessor,
)
# Keep a state between calls that assumes one new token per call.
_STATEFUL = (
    host.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    host.ClassifierFreeGuidanceLogitsProcessor,
    host.SynthIDTextWatermarkLogitsProcessor,
    host.AlternatingCodebooksLogitsProcessor,
    host.WhisperTimeStampLogitsProcessor,
    host.WhisperNoSpeechDetection,
    host.BarkEosPrioritizerLogitsProcessor,
    host.DiaClassifierFreeGuidanceLogitsProcessor,
    host.DiaEOSChannelFilterLogitsProcessor,
    host.DiaEOSDelayPatternLogitsProcessor,
)


class RowProcessors:
    """A `LogitsProcessorList` that can be applied to ragged rows.

    Args:
        processors (`LogitsProcessorList`): as prepared by `generate`.
        batch_size (`int`): rows of the call.
        end_tokens (collection of `int`s, *optional*): tokens that end a row; processors are never shown what is behind one,
            since plain decoding would not show it to them.

    Attributes:
        scores_only (`bool`): whether no processor reads the tokens before a position.

    Raises:
        ValueError: one of the processors keeps a state, so that speculative decoding could not be exact.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int, end_tokens: Collection[int] = ()):
        for processor in processors:
            if isinstance(processor, _STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} keeps a state from token to token, which a draft would corrupt: generate "
                    "without `assistant_model`, or without the option that adds it (`guidance_scale`, `watermarking_config` "
                    "of SynthID, ...)."
                )
        self.scores_only = all(type(processor) in _SCORES_ONLY for processor in processors)
        self._ends = [frozenset(end_tokens)] * batch_size
        self.of_rows: list[Any] = [processors] * batch_size
        if batch_size > 1 and not self.scores_only:
            self.of_rows = [
                LogitsProcessorList(_of_row(processor, row, batch_size) for processor in processors)
                for row in range(batch_size)
            ]

    @classmethod
    def joined(cls, calls: list[RowProcessors]) -> RowProcessors:
        """Those of one-row calls, as rows `0 … R − 1` of one batch. Rows may share a list, and are then processed together."""
        rows = copy.copy(calls[0])
        rows.of_rows = [processors for call in calls for processors in call.of_rows]
        rows._ends = [ends for call in calls for ends in call._ends]
        rows.scores_only = all(call.scores_only for call in calls)
        return rows

    def ends(self, row: int, token: int) -> bool:
        """Whether a token ends a row of the call."""
        return token in self._ends[row]

    def __bool__(self) -> bool:
        return any(len(processors) for processors in self.of_rows)

    def __call__(self, logits: Tensor, sequences: list[Tensor], rows: list[int]) -> Tensor:
        """Scores of one position per row.

        Args:
            logits (`torch.Tensor` of shape `(N, V)`): float32; may be changed in place.
            sequences (list of N `torch.LongTensor`s, 1-D): the tokens before that position; not read if `scores_only`.
            rows (list of N `int`s): number of each row in the batch of the call.

        Returns:
            `torch.Tensor` of shape `(N, V)`.
        """
        if not self:
            return logits
        if self.scores_only:
            return self._on_scores(logits[:, None], rows)[:, 0]
        return torch.cat(
            [
                self.of_rows[row](ids[None], row_logits[None])
                for ids, row_logits, row in zip(sequences, logits, rows, strict=True)
            ]
        )

    def over_block(
        self, logits: Tensor, sequences: list[Tensor], rows: list[int], tokens: Tensor, lengths: list[int]
    ) -> Tensor:
        """Scores of every position of a verification forward.

        Args:
            logits (`torch.Tensor` of shape `(N, L + 1, V)`): float32; left as it is.
            sequences (list of N `torch.LongTensor`s, 1-D): tokens up to and including the anchor.
            rows (list of N `int`s): number of each row in the batch of the call.
            tokens (`torch.LongTensor` of shape `(N, L)`): draft tokens, right-padded.
            lengths (list of N `int`s): valid draft tokens; the positions behind them, or behind an end, are not processed.

        Returns:
            `torch.Tensor` of shape `(N, L + 1, V)`.
        """
        if not self:
            return logits
        if self.scores_only:
            return self._on_scores(logits, rows)
        scores = logits.clone()
        drafts = tokens.tolist()
        for index, length in enumerate(lengths):
            for position in range(length + 1):
                if position and self.ends(rows[index], drafts[index][position - 1]):
                    break
                prefix = torch.cat([sequences[index], tokens[index, :position]])
                scores[index, position] = self(scores[index, position][None], [prefix], [rows[index]])[0]
        return scores

    def _on_scores(self, logits: Tensor, rows: list[int]) -> Tensor:
        """Scores of logits `(N, Q, V)` from processors that read nothing else and do not work in place."""
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(id(self.of_rows[row]), []).append(place)
        if len(places) == 1:
            return _apply(self.of_rows[rows[0]], logits)
        scores = torch.empty_like(logits)
        for alike in places.values():
            scores[alike] = _apply(self.of_rows[rows[alike[0]]], logits[alike])
        return scores


def _apply(processors: Any, logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return processors(torch.zeros(len(flat), 1, dtype=torch.long, device=flat.device), flat).view(logits.shape)


def _of_row(processor: Any, row: int, batch_size: int) -> LogitsProcessor:
    """The processor as one row of the batch meets it, to be called with that row alone."""
    if type(processor) in _SCORES_ONLY + _PREFIX_ONLY:
        return processor
    narrow = copy.copy(processor)
    if type(processor) is host.RepetitionPenaltyLogitsProcessor:
        if isinstance(processor.prompt_ignore_length, Tensor):
            narrow.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    elif type(processor) is host.EncoderRepetitionPenaltyLogitsProcessor:
        narrow.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
    elif type(processor) is host.EncoderNoRepeatNGramLogitsProcessor:
        narrow.generated_ngrams, narrow.batch_size = processor.generated_ngrams[row : row + 1], 1
    elif type(processor) is host.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        narrow._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    else:
        return _InBatch(processor, row, batch_size)
    return narrow


class _InBatch(LogitsProcessor):
    """Shows a processor of the user a full batch, every row of it this one: it may look at the row's number."""

    def __init__(self, processor: LogitsProcessor, row: int, batch_size: int):
        self.processor, self.row, self.batch_size = processor, row, batch_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = self.processor(input_ids.expand(self.batch_size, -1), scores.repeat(self.batch_size, 1))
        return scores[self.row : self.row + 1]
