"""The sequences of a call: tokens as they are committed, when each row stops, what is streamed and what is returned.

Plain `generate` looks at its stopping criteria after every token. A round commits several at once, so here the criteria are
asked about every prefix, and a row ends at the first token that any of them accepts, in the middle of a block if need be.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast


class Rows:
    """R sequences that grow at their own pace.

    Args:
        input_ids (`torch.LongTensor` of shape `(R, S)`): the prompts.
        stopping_criteria (`StoppingCriteriaList`): asked about every token of every row.
        generation_config (`GenerationConfig`): of this call.
        streamer (`BaseStreamer`, *optional*): gets one column at a time, as in plain `generate`.

    Attributes:
        sequences (list of R `torch.LongTensor`s, 1-D): committed tokens.
        active (`list[int]`): rows that still generate.
        max_length (`int`): longest sequence, in tokens.
        prompt_length (`int`): S.
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
        self.prompt_length = self._streamed = input_ids.shape[1]
        self._streamer = streamer
        self._ends: list[int | None] = [None] * len(input_ids)  # length at which each row stopped

        # The two criteria of nearly every call are answered from numbers: no wait for the device at every token.
        lengths = [criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
        # As in plain decoding, a criterion is first asked behind a new token, whatever it says of the prompt.
        self.max_length: int = max(min(lengths, default=generation_config.max_length), self.prompt_length + 1)
        ends = [criterion.eos_token_id for criterion in stopping_criteria if type(criterion) is EosTokenCriteria]
        self.end_tokens = {token for tokens in ends for token in tokens.reshape(-1).tolist()}
        others = [c for c in stopping_criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        # The library's own tell nothing from a row's place.
        self._time = StoppingCriteriaList(c for c in others if type(c) is MaxTimeCriteria)
        self._time_is_up = False
        self._criteria = StoppingCriteriaList(c for c in others if type(c) is StopStringCriteria)
        others = [c for c in others if type(c) not in (MaxTimeCriteria, StopStringCriteria)]
        self._criteria_of_user = StoppingCriteriaList(others)
        # Plain generate pads finished rows only if a criterion knows an end token; otherwise they run on with the others.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        pad = generation_config._pad_token_tensor
        self._pad_token_id = 0 if pad is None else int(pad)

        self._returns_dict = bool(generation_config.return_dict_in_generate)
        self._records: dict[str, list[list[Any]]] = {
            name: [[] for _ in self.sequences]
            for name in ("scores", "logits", "attentions", "hidden_states")
            if self._returns_dict and getattr(generation_config, f"output_{name}")
        }

    def commit(self, candidates: Tensor, accepted: list[int], following: Tensor, running: list[int]) -> list[int | None]:
        """Appends accepted draft tokens and the target's own, row by row, up to where a row stops.

        Args:
            candidates (`torch.LongTensor` of shape `(N, L)`): draft tokens.
            accepted (list of N `int`s): how many of them were accepted.
            following (`torch.LongTensor` of shape `(N,)`): the target's token behind them.
            running (list of N `int`s): rows these belong to.

        Returns:
            `list[int | None]`: by how many tokens each of them has grown; `None` for one that had finished before.
        """
        lengths: list[int | None] = []
        if self._time:  # asked once a round, and the same for all rows
            self._time_is_up = bool(self._time(self.sequences[0][None], None).any())
        followed = torch.cat([candidates, following[:, None]], dim=1)
        numbers = followed.tolist()  # one copy to the host for all rows
        for place, (row, count) in enumerate(zip(running, accepted, strict=True)):
            if row not in self.active:
                lengths.append(None)
                continue
            before = len(self.sequences[row])
            lengths.append(before)
            ids = torch.cat([self.sequences[row], followed[place, :count], followed[place, -1:]])
            end = self._stop(row, ids, before, [*numbers[place][:count], numbers[place][-1]])
            self.sequences[row] = ids[:end]
        self._retire()
        self._stream()
        return [
            None if before is None else len(self.sequences[row]) - before for row, before in zip(running, lengths, strict=True)
        ]

    def room(self, row: int) -> int:
        """Tokens that a row may still get; 0 once it has ended."""
        return self.max_length - len(self.sequences[row]) if row in self.active else 0

    def _stop(self, row: int, ids: Tensor, before: int, new: list[int]) -> int:
        """Length to which `ids` may stand: up to the first new token at which the row stops, if there is one."""
        scores = self._records.get("scores")
        if self._ends[row] is None:
            for end, token in enumerate(new, before + 1):
                stops = end >= self.max_length or token in self.end_tokens or self._time_is_up
                if not stops and (self._criteria or self._criteria_of_user):
                    seen = None if scores is None else tuple(s[None] for s in scores[row][: end - self.prompt_length])
                    stops = self._asked(row, ids[None, :end], seen)
                if stops:
                    self._ends[row] = end
                    if self._pads:
                        return end
                    break
        return min(len(ids), self.max_length)

    def _asked(self, row: int, ids: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        """Whether a criterion ends a row behind tokens `(1, S)`; one of a user's may know the rows by their places."""
        if bool(self._criteria(ids, scores).any()):
            return True
        if not self._criteria_of_user:
            return False
        rows = len(self.sequences)
        wide = None if scores is None else tuple(step.expand(rows, -1) for step in scores)
        return bool(self._criteria_of_user(ids.expand(rows, -1), wide)[row])

    def _retire(self) -> None:
        """Drops the rows that are done from `active`."""
        if self._pads:
            self.active = [row for row in self.active if self._ends[row] is None]
            return
        # No end token: rows run on with the others, to the length at which the last of them stops. Time ends all in one step.
        ends = [end for end in self._ends if end is not None]
        longest = max(ends) if len(ends) == len(self._ends) else self.max_length
        if self._time_is_up:
            longest = min(len(ids) for ids in self.sequences)
        self.sequences = [ids[:longest] for ids in self.sequences]
        self.active = [row for row in self.active if len(self.sequences[row]) < longest]

    def _stream(self) -> None:
        """Hands over every column that all rows have, finished ones counting as padded."""
        if self._streamer is None:
            return
        length = self.length
        ready = min((len(self.sequences[row]) for row in self.active), default=length)
        for column in self.padded()[:, self._streamed : ready].cpu().unbind(1):
            self._streamer.put(column.contiguous())
        self._streamed = max(self._streamed, ready)

    def finish_reason(self, row: int) -> str | None:
        """`None` while a row generates; then `"length"` where `max_length` alone has ended it, else `"stop"`."""
        if row in self.active:
            return None
        ids = self.sequences[row]
        return "length" if len(ids) == self.max_length and int(ids[-1]) not in self.end_tokens else "stop"

    def finish(self) -> None:
        """Ends the stream."""
        if self._streamer is not None:
            self._streamer.end()

    @property
    def length(self) -> int:
        """Length of the longest row."""
        return max(len(ids) for ids in self.sequences)

    def padded(self) -> Tensor:
        """All sequences as one tensor `(R, length)`, finished rows filled up with the padding token."""
        length = self.length
        return torch.stack(
            [torch.nn.functional.pad(ids, (0, length - len(ids)), value=self._pad_token_id) for ids in self.sequences]
        )

    # ---- return_dict_in_generate ----

    def record(
        self,
        outputs: CausalLMOutputWithPast,
        running: list[int],
        slots: list[int],
        scores: Tensor,
        logits: Tensor,
        accepted: list[int],
        sliding_windows: list[int | None],
    ) -> None:
        """Keeps what `return_dict_in_generate` asked for: one entry per token of each row.

        Args:
            outputs (`CausalLMOutputWithPast`): of the forward; `attentions` and `hidden_states` are read if asked for.
            running (list of N `int`s): row of each place in the forward.
            slots (list of N `int`s): slot of each row's first query whose logits are given.
            scores, logits (`torch.Tensor` of shape `(N, Q, V)`): processed and raw.
            accepted (list of N `int`s): accepted draft tokens; one more position belongs to each row.
            sliding_windows (list of `int` or `None`): of each layer; plain decoding shows no weights before the window.
        """
        for name, record in self._records.items():
            for place, row in enumerate(running):
                if row not in self.active:
                    continue
                for position in range(accepted[place] + 1):
                    # The first entry covers the prompt.
                    query = slice(position, position + 1) if record[row] else slice(None)
                    if name == "scores":
                        entry: Any = scores[place, position].clone()  # or all positions of the forward would stay in memory
                    elif name == "logits":
                        entry = logits[place, position].clone()
                    elif name == "hidden_states":
                        entry = tuple(layer[place, query] for layer in outputs.hidden_states)
                    else:
                        entry = tuple(
                            _visible(layer[place, :, query], slots[place] + position + 1, window)
                            for layer, window in zip(outputs.attentions, sliding_windows, strict=True)
                        )
                    record[row].append(entry)

    def result(self, cache: Cache) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns: padded sequences, alone or with everything that was recorded."""
        sequences = self.padded()
        if not self._returns_dict:
            return sequences
        counts = [len(ids) - self.prompt_length for ids in self.sequences]  # a block may have gone beyond the end
        recorded = {
            name: tuple(
                _stack_rows([record[step] if step < count else None for record, count in zip(rows, counts, strict=True)])
                for step in range(max(counts))
            )
            for name, rows in self._records.items()
        }
        return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences), cache=cache, **recorded)


def _visible(weights: Tensor, end: int, window: int | None) -> Tensor:
    """Attention weights `(H, Q, S)` of the slots that plain decoding would have had in its cache."""
    first = 0 if window is None else max(0, end - (window - 1 + weights.shape[1]))
    return weights[..., first:end]


def _stack_rows(entries: list[Any]) -> Any:
    """One step of all rows as a batch; rows that had finished are zero."""
    present = next(entry for entry in entries if entry is not None)
    if isinstance(present, tuple):  # one tensor per layer
        return tuple(
            _stack_rows([None if entry is None else entry[layer] for entry in entries]) for layer in range(len(present))
        )
    return torch.stack([torch.zeros_like(present) if entry is None else entry for entry in entries])
