"""The host's logits processors, on rows of different lengths.

Plain `generate` calls the processors once per step with a rectangular batch. Here each row has its own length and several
positions at once, and the drafter must apply them too, so that the law it reports is the law its tokens were drawn from.
Processors that only look at the scores run on everything in one call; the others run position by position with the prefix
that plain decoding would have shown them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as host

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
)
# Read the row's own prefix but not which row of the batch it is.
_PREFIX_ONLY = (
    host.MinLengthLogitsProcessor,
    host.MinNewTokensLengthLogitsProcessor,
    host.RepetitionPenaltyLogitsProcessor,
    host.NoRepeatNGramLogitsProcessor,
    host.SequenceBiasLogitsProcessor,
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
        batch_size (`int`): rows of the call; processors that look at the row's number see the whole batch.

    Raises:
        ValueError: one of the processors keeps a state, so that speculative decoding could not be exact.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int):
        for processor in processors:
            if isinstance(processor, _STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} keeps a state from token to token, which a draft would corrupt: generate "
                    "without `assistant_model`, or without the option that adds it (`guidance_scale`, `watermarking_config` "
                    "of SynthID, ...)."
                )
        self.processors = processors
        self.batch_size = batch_size
        self.scores_only = all(type(processor) in _SCORES_ONLY for processor in processors)
        self._needs_batch = batch_size > 1 and not all(
            isinstance(processor, _SCORES_ONLY + _PREFIX_ONLY) for processor in processors
        )

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    def __call__(self, logits: Tensor, sequences: list[Tensor], rows: list[int]) -> Tensor:
        """Scores of one position per row.

        Args:
            logits (`torch.Tensor` of shape `(N, V)`): float32; may be changed in place.
            sequences (list of N `torch.LongTensor`s, 1-D): the tokens before that position.
            rows (`list[int]`): number of each row in the batch of the call.

        Returns:
            `torch.Tensor` of shape `(N, V)`.
        """
        if not self.processors:
            return logits
        if self.scores_only:
            return self.processors(torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device), logits)
        scores = []
        for ids, row_logits, row in zip(sequences, logits, rows, strict=True):
            if self._needs_batch:  # only this row of the answer is used
                ids, row_logits = ids.expand(self.batch_size, -1), row_logits.repeat(self.batch_size, 1)
                scores.append(self.processors(ids, row_logits)[row])
            else:
                scores.append(self.processors(ids[None], row_logits[None])[0])
        return torch.stack(scores)

    def over_block(self, logits: Tensor, sequences: list[Tensor], rows: list[int], tokens: Tensor, lengths: Tensor) -> Tensor:
        """Scores of every position of a verification forward.

        Args:
            logits (`torch.Tensor` of shape `(R, L + 1, V)`): float32.
            sequences (list of R `torch.LongTensor`s, 1-D): tokens up to and including the anchor.
            rows (`list[int]`): number of each row in the batch of the call.
            tokens (`torch.LongTensor` of shape `(R, L)`): draft tokens, right-padded.
            lengths (`torch.LongTensor` of shape `(R,)`): valid draft tokens; positions behind them are left as they are.

        Returns:
            `torch.Tensor` of shape `(R, L + 1, V)`.
        """
        if not self.processors:
            return logits
        if self.scores_only:
            return self(logits.flatten(0, 1), [], []).view(logits.shape)
        logits = logits.clone()
        for index, length in enumerate(lengths.tolist()):
            for position in range(length + 1):
                prefix = torch.cat([sequences[index], tokens[index, :position]])
                logits[index, position] = self(logits[index, position][None].clone(), [prefix], [rows[index]])[0]
        return logits
