"""The sequences of a call: tokens as they are committed, when each row stops, what is streamed and what is returned.

Plain `generate` looks at its stopping criteria after every token. A round commits several at once, so here the criteria are
asked about every prefix, and a row ends at the first token that any of them accepts, in the middle of a block if need be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput


class Rows:
    """R sequences that grow at their own pace.

    Args:
        input_ids (`torch.LongTensor` of shape `(R, S)`): the prompts.
        stopping_criteria (`StoppingCriteriaList`): asked once per token and row.
        generation_config (`GenerationConfig`): of this call.
        streamer (`BaseStreamer`, *optional*): gets one column at a time, as in plain `generate`.

    Attributes:
        sequences (list of R `torch.LongTensor`s, 1-D): committed tokens.
        active (`list[int]`): rows that still generate.
    """

    def __init__(
        self,
        input_ids: Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.sequences = list(input_ids.unbind(0))
        self.active = list(range(len(input_ids)))
        self._prompt_length = self._streamed = input_ids.shape[1]
        self._criteria, self._config, self._streamer = stopping_criteria, generation_config, streamer
        self._ends: list[int | None] = [None] * len(input_ids)  # length at which each row stopped
        # Plain generate pads finished rows only if a criterion knows an end token; otherwise they run on with the others.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        pad = generation_config._pad_token_tensor
        self._pad_token_id = 0 if pad is None else int(pad)
        names = ("scores", "logits", "attentions", "hidden_states")
        wanted = [getattr(generation_config, f"output_{name}") for name in names]
        self._records: dict[str, list[list[Any]]] = {
            name: [[] for _ in self.sequences]
            for name, on in zip(names, wanted, strict=True)
            if on and generation_config.return_dict_in_generate
        }

    @property
    def length(self) -> int:
        """Length of the longest row."""
        return max(len(ids) for ids in self.sequences)

    def commit(
        self, candidates: Tensor, accepted: Tensor, following: Tensor, running: list[int] | None = None
    ) -> list[int]:
        """Appends accepted draft tokens and the target's own, row by row, up to where a row stops.

        Args:
            candidates (`torch.LongTensor` of shape `(N, L)`): draft tokens.
            accepted (`torch.LongTensor` of shape `(N,)`): how many of them were accepted.
            following (`torch.LongTensor` of shape `(N,)`): the target's token behind them.
            running (`list[int]`, *optional*): rows these belong to; all when not given.

        Returns:
            `list[int]`: tokens appended to each row.
        """
        kept = []
        for place, row in enumerate(range(len(self.sequences)) if running is None else running):
            if row not in self.active:
                kept.append(0)
                continue
            new = torch.cat([candidates[place, : int(accepted[place])], following[place : place + 1]])
            before = len(self.sequences[row])
            self.sequences[row] = self._until_stop(row, torch.cat([self.sequences[row], new]), before)
            kept.append(len(self.sequences[row]) - before)
        self._retire()
        self._stream()
        return kept

    def _until_stop(self, row: int, ids: Tensor, before: int) -> Tensor:
        """`ids` cut behind the first token at which the row stops."""
        if self._ends[row] is not None:  # runs on with the others
            return ids
        scores = self._records.get("scores")
        for end in range(before + 1, len(ids) + 1):
            seen = None if scores is None else tuple(step[None] for step in scores[row][: end - self._prompt_length])
            if bool(torch.as_tensor(self._criteria(ids[None, :end], seen)).all()):
                self._ends[row] = end
                return ids[:end] if self._pads else ids
        return ids

    def _retire(self) -> None:
        """Drops the rows that are done from `active`."""
        if self._pads:
            self.active = [row for row in self.active if self._ends[row] is None]
        elif None not in self._ends:
            longest = max(end for end in self._ends if end is not None)
            self.active = [row for row in self.active if len(self.sequences[row]) < longest]
            self.sequences = [ids[:longest] for ids in self.sequences]

    def _stream(self) -> None:
        """Hands over every column that all rows have, finished ones counting as padded."""
        if self._streamer is None:
            return
        ready = min((len(self.sequences[row]) for row in self.active), default=self.length)
        for column in range(self._streamed, ready):
            tokens = [int(ids[column]) if column < len(ids) else self._pad_token_id for ids in self.sequences]
            self._streamer.put(torch.tensor(tokens))
        self._streamed = max(self._streamed, ready)

    def finish(self) -> None:
        """Ends the stream."""
        if self._streamer is not None:
            self._streamer.end()

    # ---- return_dict_in_generate ----

    def record(
        self, outputs: ModelOutput, cache_rows: list[int], slots: list[int], scores: Tensor, logits: Tensor, accepted: Tensor
    ) -> None:
        """Keeps what `return_dict_in_generate` asked for: one entry per token of each row.

        Args:
            outputs (`ModelOutput`): of the forward; `attentions` and `hidden_states` are read if asked for.
            cache_rows (`list[int]`): row of each place in the forward.
            slots (`list[int]`): slot of each row's first query whose logits are given.
            scores, logits (`torch.Tensor` of shape `(N, Q, V)`): processed and raw.
            accepted (`torch.LongTensor` of shape `(N,)`): accepted draft tokens; one more position belongs to each row.
        """
        if not self._records:
            return
        for place, row in enumerate(cache_rows):
            if row not in self.active:
                continue
            for position in range(int(accepted[place]) + 1):
                first = not any(record[row] for record in self._records.values())
                query = slice(None) if first else slice(position, position + 1)  # the first step covers the prompt
                for name, record in self._records.items():
                    if name == "scores":
                        value: Any = scores[place, position]
                    elif name == "logits":
                        value = logits[place, position]
                    elif name == "hidden_states":
                        value = tuple(layer[place, query] for layer in outputs.hidden_states)
                    else:
                        end = slots[place] + position + 1
                        value = tuple(layer[place, :, query, :end] for layer in outputs.attentions)
                    record[row].append(value)

    def result(self, cache: Cache) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns: padded sequences, alone or with everything that was recorded."""
        length = self.length
        sequences = torch.stack(
            [torch.nn.functional.pad(ids, (0, length - len(ids)), value=self._pad_token_id) for ids in self.sequences]
        )
        if not self._config.return_dict_in_generate:
            return sequences
        steps = length - self._prompt_length
        recorded = {
            name: tuple(_stack_rows([record[step] if step < len(record) else None for record in rows]) for step in range(steps))
            for name, rows in self._records.items()
        }
        return GenerateDecoderOnlyOutput(sequences=sequences, cache=cache, **recorded)


def _stack_rows(entries: list[Any]) -> Any:
    """One step of all rows as a batch; rows that had finished are zero."""
    present = next(entry for entry in entries if entry is not None)
    if isinstance(present, tuple):  # one tensor per layer
        return tuple(
            _stack_rows([None if entry is None else entry[layer] for entry in entries]) for layer in range(len(present))
        )
    return torch.stack([torch.zeros_like(present) if entry is None else entry for entry in entries])
