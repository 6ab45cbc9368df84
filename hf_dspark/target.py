"""Forwards of the target inside the loop: prefill and verification, with every token at its own slot.

One row goes through the model's own `prepare_inputs_for_generation` and the library's own masks, so any decoder-only target
works as it does without a drafter. Several rows of different lengths need what no library mask expresses: each row's queries
start at its own slot. For them the mask is built here, one per attention type, in the form the library itself passes around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .cache import RowLayout, SlotCache, format_mask

# Inputs as long as the prompt: consumed by the prefill, never passed on to a verification forward.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_PROMPT_ONLY = ("attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache", "logits_to_keep", *_TOKEN_TYPES)


class TargetForward:
    """Runs a target on a [`SlotCache`] of its own.

    Args:
        target (`PreTrainedModel`): the target.
        generation_config (`GenerationConfig`): of this call.
        captured_states (`list[int]`): indices into `hidden_states` that the drafter reads.
        model_kwargs (`dict`): as prepared by `generate`; `cache` may hold the start of the sequence already.

    Attributes:
        layout ([`RowLayout`]): positions and padding of the rows.
        past_length (`int`): columns that were in the cache passed in.
        prompt_length (`int`): columns of the whole prompt, those included.
        cache_rows (`list[int]`): number in the batch of each row that is still in the cache.
        keeps_rows (`bool`): whether finished rows stay, because the caller wants the cache back.

    Raises:
        ValueError: the target's attention cannot run rows of different lengths, or its cache cannot be rolled back.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        captured_states: list[int],
        model_kwargs: dict[str, Any],
    ):
        self.target, self.model_kwargs = target, model_kwargs
        self.user_cache: Cache = model_kwargs["cache"]
        self.past_length = int(self.user_cache.get_seq_length())
        self.chunk_size = generation_config.prefill_chunk_size
        self.output_attentions = bool(generation_config.output_attentions)
        self.keeps_rows = bool(generation_config.return_dict_in_generate) or getattr(
            self.user_cache, "_is_user_defined", False
        )
        self.output_hidden_states = bool(generation_config.output_hidden_states)
        # A user who wants all states gets them from the same forward; the indices mean the same.
        self._capture: Any = True if self.output_hidden_states else captured_states
        self.mask_length = getattr(generation_config, "_mask_length", None)
        self.cache = SlotCache(target.config)
        if self.past_length:
            self.cache.read_from(self.user_cache, self.past_length)

        if self.output_attentions and target.config._attn_implementation != "eager":
            raise ValueError(
                f"`output_attentions=True` needs a target loaded with attn_implementation=\"eager\"; this one runs "
                f"{target.config._attn_implementation!r}, which does not return attention weights."
            )
        self.layout = self._lay_out()
        self.prompt_length = self.layout.prompt_length
        self.cache_rows: list[int] = []

    def _lay_out(self) -> RowLayout:
        """Positions and padding of the whole prompt, cached part included."""
        position_ids, attention_mask = (self.model_kwargs.get(name) for name in ("position_ids", "attention_mask"))
        if position_ids is None:  # a target whose forward takes none: only its mask and cache say where tokens are
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
            else:
                position_ids = torch.arange(self.mask_length, device=self.target.device)[None]
        return RowLayout(position_ids, attention_mask)

    # ---- prefill ----

    def prefill(
        self, input_ids: Tensor, observe: Callable[[tuple[Tensor, ...], list[int], list[int]], None]
    ) -> ModelOutput:
        """Runs the part of the prompt that is not in the cache yet.

        Args:
            input_ids (`torch.LongTensor` of shape `(R, S)`): the prompt, or what follows the cached part, or empty when the
                prompt was given as `inputs_embeds`.
            observe (callable): gets the captured states, first slots and counts of each chunk.

        Returns:
            `ModelOutput`: of the last chunk; its last logits are those of the first new token.
        """
        kwargs = dict(self.model_kwargs)
        embeds: Tensor | None = kwargs.pop("inputs_embeds", None)
        attention_mask, position_ids = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
        token_types = {name: kwargs.pop(name) for name in _TOKEN_TYPES if kwargs.get(name) is not None}
        kwargs["cache"] = self.cache
        new_length = self.prompt_length - self.past_length
        prompt = input_ids[:, input_ids.shape[1] - new_length :] if embeds is None else embeds[:, -new_length:]
        rows = prompt.shape[0]
        self.cache_rows = list(range(rows))

        outputs = None
        for start in range(0, new_length, self.chunk_size or new_length):
            end = min(start + (self.chunk_size or new_length), new_length)
            first, last = self.past_length + start, self.past_length + end
            self.cache.place(first, end - start)
            chunk = dict(kwargs)
            if embeds is not None:
                chunk["inputs_embeds"] = prompt[:, start:end]
            if attention_mask is not None:
                chunk["attention_mask"] = attention_mask[:, :last]
            if position_ids is not None:
                chunk["position_ids"] = position_ids[..., first:last]
            for name, values in token_types.items():
                chunk[name] = values[..., -new_length:][..., start:end]
            inputs = self.target.prepare_inputs_for_generation(
                input_ids if embeds is not None else prompt[:, start:end], is_first_iteration=True, **chunk
            )
            outputs = self._call(inputs)
            observe(self.captured(outputs), [first] * rows, [end - start] * rows)
        return outputs

    # ---- verification ----

    def verify(self, sequences: list[Tensor], tokens: Tensor, slots: list[int]) -> ModelOutput:
        """One forward over anchor and draft of every row.

        Args:
            sequences (list of R `torch.LongTensor`s, 1-D): committed tokens of each row, the anchor included.
            tokens (`torch.LongTensor` of shape `(R, 1 + L)`): anchor and draft tokens, right-padded.
            slots (`list[int]`): slot of each anchor.

        Returns:
            `ModelOutput` with `logits` `(R, 1 + L, V)` and the captured `hidden_states`.
        """
        length = tokens.shape[1]
        first = torch.tensor(slots, device=tokens.device)[:, None]
        token_slots = first + torch.arange(length, device=tokens.device)  # (R, Q)
        kwargs: dict[str, Any] = {"cache": self.cache, "use_cache": True}
        if "position_ids" in self.model_kwargs:
            kwargs["position_ids"] = self.layout.positions(token_slots)
        if "logits_to_keep" in self.model_kwargs:
            kwargs["logits_to_keep"] = length
        if len(slots) > 1:
            # Padding behind a short draft writes to slots that the row will fill later; nobody may look at them until then.
            self.cache.place_rows(token_slots, max(slots) + length)
            kwargs |= {"input_ids": tokens, "attention_mask": self._ragged_mask(token_slots)}
            return self._call(kwargs)

        self.cache.place(slots[0], length)
        if (mask := self.model_kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(1, slots[0] + length - mask.shape[1])], dim=1)
        for name in _TOKEN_TYPES:
            if self.model_kwargs.get(name) is not None:
                kwargs[name] = tokens.new_zeros(tokens.shape)
        others = {name: value for name, value in self.model_kwargs.items() if name not in _PROMPT_ONLY}
        inputs = self.target.prepare_inputs_for_generation(
            torch.cat([sequences[0][None, :-1], tokens], dim=1), next_sequence_length=length, **others, **kwargs
        )
        return self._call(inputs)

    def _ragged_mask(self, token_slots: Tensor) -> Any:
        """Masks of rows at different slots: by layer type where the target has several, else one.

        The choice follows transformers' `create_masks_for_generate`.
        """
        config = self.target.config.get_text_config(decoder=True)
        implementation, dtype = config._attn_implementation, self.target.dtype
        slots = torch.arange(self.cache.length, device=token_slots.device)
        causal = slots <= token_slots[..., None]  # (R, Q, S)
        causal = self.layout.hide_padding(causal)
        window = getattr(config, "sliding_window", None)

        def build(kind: str) -> Any:
            if kind == "full_attention":
                visible = causal
            elif kind == "sliding_attention":
                visible = causal & (slots > token_slots[..., None] - window)
            else:
                raise ValueError(
                    f"the target has layers of type {kind!r}, for which rows of different lengths cannot be masked: generate "
                    "one row at a time."
                )
            return format_mask(visible[:, None], implementation, dtype)

        if getattr(config, "layer_types", None) is not None:
            return {kind: build(kind) for kind in set(config.layer_types)}
        if getattr(config, "attention_chunk_size", None) is not None:
            return build("chunked_attention")
        return build("full_attention" if window is None else "sliding_attention")

    def _call(self, inputs: dict[str, Any]) -> ModelOutput:
        inputs["output_hidden_states"] = self._capture
        if self.output_attentions:
            inputs["output_attentions"] = True
        return self.target(**inputs, return_dict=True)

    @staticmethod
    def captured(outputs: ModelOutput) -> tuple[Tensor, ...]:
        """Hidden states of a forward, indexed as the drafter's generator expects."""
        return outputs.hidden_states

    # ---- rows and cache ----

    def select_rows(self, places: Tensor) -> None:
        """Keeps only the rows at the given places in the cache."""
        self.cache.select_rows(places)
        self.layout.select_rows(places)
        self.cache_rows = [self.cache_rows[place] for place in places.tolist()]

    def hand_back(self, end: int) -> None:
        """Fills the cache that `generate` was called with, up to column `end`, if the caller can see it."""
        if self.keeps_rows:
            self.cache.write_to(self.user_cache, self.past_length, end)
