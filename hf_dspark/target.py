"""Forwards of the target inside the loop: prefill and verification, with every token at its own slot.

Every forward goes through the model's own `prepare_inputs_for_generation`, and one row through the library's own masks, so
any decoder-only target works as it does without a drafter. Several rows of different lengths need what no library mask
expresses: each row's queries start at its own slot. For them the mask is built here, one per attention type, in the form
the library itself passes around. Their tokens run packed, wherever the target allows it, so that its work follows the tokens
admitted and not the longest draft.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from .cache import RowLayout, SlotCache, format_mask, slot_ranges
from .packed_rows import PackedRows, can_pack

logger = logging.get_logger(__name__)

# Inputs as long as the sequence, of which every forward takes its own part.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Inputs that are made anew for every forward, or belong to the prefill alone.
_MADE_HERE = ("attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache", "logits_to_keep", *_TOKEN_TYPES)
_FILLED_AT_ONCE = 64  # columns of padding that finished rows are given in one forward


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
        slot_offset (`int`): columns before the first of `input_ids`: a cached text, or a prompt given as embeddings.
        cache_rows (`list[int]`): number in the batch of each row that is still in the cache.
        keeps_rows (`bool`): whether finished rows stay, because the caller wants the cache back.
        packs (`bool`): whether several rows are verified without padding.

    Raises:
        ValueError: the target's attention cannot run rows of different lengths, its cache cannot be rolled back, or it does
            not use the cache that it is given.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        captured_states: list[int],
        model_kwargs: dict[str, Any],
    ):
        mask = model_kwargs.get("attention_mask")
        total_length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        if model_kwargs.get("position_ids") is None and _takes_positions(target):
            # `generate` has read the signature of a wrapper around it. Plain decoding then counts columns; so must every row.
            model_kwargs = {**model_kwargs, "position_ids": torch.arange(total_length, device=target.device)[None]}
        self.target, self.model_kwargs = target, model_kwargs
        self.user_cache: Cache = model_kwargs["cache"]
        self.past_length = int(self.user_cache.get_seq_length())
        positions = model_kwargs.get("position_ids")
        if positions is not None and total_length is not None and 0 < self.past_length == total_length - positions.shape[-1]:
            # Those of the new tokens alone; nobody asks for the others'.
            model_kwargs["position_ids"] = torch.nn.functional.pad(positions, (self.past_length, 0))
        returns_dict = bool(generation_config.return_dict_in_generate)
        self.keeps_rows = returns_dict or getattr(self.user_cache, "_is_user_defined", False)
        self._output_attentions = returns_dict and bool(generation_config.output_attentions)
        self._routes = hasattr(target.config.get_text_config(decoder=True), "output_router_logits")
        # A user who wants all states gets them from the same forward; the indices mean the same.
        wants_states = returns_dict and bool(generation_config.output_hidden_states)
        self._capture: Any = True if wants_states else captured_states
        # Images are encoded for the whole prompt at once; a part of the prompt would not find its own.
        whole = model_kwargs.get("mm_encoder_outputs")
        self._chunk_size: int | None = None if whole else generation_config.prefill_chunk_size
        self._total_length = total_length
        self._others = {name: value for name, value in model_kwargs.items() if name not in _MADE_HERE}
        self._token_types = {name: model_kwargs[name] for name in _TOKEN_TYPES if model_kwargs.get(name) is not None}

        implementation = target.config.get_text_config(decoder=True)._attn_implementation
        if self._output_attentions and implementation != "eager":
            raise ValueError(
                '`output_attentions=True` needs a target loaded with attn_implementation="eager"; this one runs '
                f"{implementation!r}, which does not return attention weights."
            )
        if self.user_cache.offloading:
            logger.warning_once(
                "An offloaded cache does not save memory with a DSpark drafter: keys and values stay on the target's device."
            )
        self.cache = SlotCache(target.config)
        if self.past_length:
            self.cache.read_from(self.user_cache, self.past_length)
        self.layout = self._lay_out()
        self.prompt_length = self.layout.prompt_length
        if self.prompt_length <= self.past_length:
            raise ValueError(
                f"`cache` already holds {self.past_length} tokens, and the prompt has {self.prompt_length} with them: there is "
                "nothing to go on from. Pass the whole text so far, its last token not in the cache, or only what is new "
                "together with an `attention_mask` over everything."
            )
        self.slot_offset = 0
        self.cache_rows: list[int] = []
        # A token can leave its row where nothing but its position comes with it.
        positions = model_kwargs.get("position_ids")
        self.packs = positions is not None and positions.ndim == 2 and not self._row_inputs() and can_pack(target)

    def _lay_out(self) -> RowLayout:
        """Positions and padding of the whole prompt, cached part included."""
        position_ids, attention_mask = (self.model_kwargs.get(name) for name in ("position_ids", "attention_mask"))
        if position_ids is None:  # a target whose forward takes none: only its mask says where tokens are
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
            else:
                position_ids = torch.arange(self._total_length, device=self.target.device)[None]
        return RowLayout(position_ids, attention_mask)

    def _row_inputs(self) -> list[str]:
        """Names of the inputs that belong to a row, besides its tokens and their positions."""
        inputs = {**self._others, **self._token_types}
        return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim]

    # ---- prefill ----

    def prefill(
        self, input_ids: Tensor, observe: Callable[[tuple[Tensor, ...], list[int], list[int]], None]
    ) -> CausalLMOutputWithPast:
        """Runs the part of the prompt that is not in the cache yet.

        Args:
            input_ids (`torch.LongTensor` of shape `(R, S)`): the prompt, or what follows the cached part, or empty when the
                prompt was given as `inputs_embeds`.
            observe (callable): gets the captured states, first slots and counts of each chunk.

        Returns:
            `CausalLMOutputWithPast`: of the last chunk; its last logits are those of the first new token.
        """
        embeds: Tensor | None = self.model_kwargs.get("inputs_embeds")
        attention_mask, position_ids = (self.model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        new_length = self.prompt_length - self.past_length
        prompt = (input_ids if embeds is None else embeds)[:, -new_length:]
        rows = prompt.shape[0]
        if rows > 1:
            refuse_unplaced_rows(self.target)
        self.cache_rows = list(range(rows))
        self.slot_offset = self.prompt_length - input_ids.shape[1]

        outputs = None
        chunk_size = self._chunk_size or new_length
        for start in range(0, new_length, chunk_size):
            end = min(start + chunk_size, new_length)
            first, last = self.past_length + start, self.past_length + end
            self.cache.place(first, end - start)
            kwargs = dict(self._others, cache=self.cache, use_cache=True)
            if "logits_to_keep" in self.model_kwargs:
                kwargs["logits_to_keep"] = 1
            if embeds is not None:
                kwargs["inputs_embeds"] = prompt[:, start:end]
            if attention_mask is not None:
                kwargs["attention_mask"] = attention_mask[:, :last]
            if position_ids is not None:
                kwargs["position_ids"] = position_ids[..., first:last]
            for name, types in self._token_types.items():
                kwargs[name] = types[..., :last]
            tokens = input_ids if embeds is not None else prompt[:, start:end]
            inputs = self._prepared(tokens, is_first_iteration=True, **kwargs)
            outputs = self._call(inputs)
            observe(outputs.hidden_states, [first] * rows, [end - start] * rows)
        return outputs

    # ---- verification ----

    def verify(self, sequences: list[Tensor], tokens: Tensor, slots: list[int], lengths: list[int]) -> CausalLMOutputWithPast:
        """One forward over anchor and draft of every row.

        Several rows are packed: the target sees Σ (1 + ℓ_r) tokens. Where it cannot take them so, it sees R · (1 + L), the
        padding included.

        Args:
            sequences (list of R `torch.LongTensor`s, 1-D): committed tokens of each row, the anchor included.
            tokens (`torch.LongTensor` of shape `(R, 1 + L)`): anchor and draft tokens, right-padded.
            slots (`list[int]`): slot of each anchor.
            lengths (`list[int]`): draft tokens of each row without the padding.

        Returns:
            `CausalLMOutputWithPast` with `logits` `(R, 1 + L, V)` and the captured `hidden_states`.
        """
        length = tokens.shape[1]
        token_slots = slot_ranges(slots, length, tokens.device)  # (R, Q)
        kwargs = dict(self._others, cache=self.cache, use_cache=True)
        if "position_ids" in self.model_kwargs:
            # Padding stays at the last position of its row: those behind it may be more than the target has.
            ends = [slot + length for slot, length in zip(slots, lengths, strict=True)]
            placed = token_slots if len(slots) == 1 else token_slots.minimum(slot_ranges(ends, 1, tokens.device))
            kwargs["position_ids"] = self.layout.positions(placed)
        for name, types in self._token_types.items():  # as `generate` goes on: the last type, or text among images
            kwargs[name] = types[..., -1:].expand_as(tokens) if name == "token_type_ids" else torch.zeros_like(tokens)
        packed = None
        if len(slots) > 1:
            input_ids, end = tokens, max(slots) + length
            slots_of_cache = torch.arange(end, device=tokens.device)
            causal = self.layout.hide_padding(slots_of_cache <= token_slots[..., None])  # (R, Q, S)
            kwargs["attention_mask"] = ragged_mask(self.target, token_slots, causal)
            counts = [length + 1 for length in lengths]
            if self.packs and length > 1:  # single tokens are packed as they are
                packed = PackedRows(counts, tokens.device)
                input_ids, kwargs["position_ids"] = packed.pack(tokens), packed.pack(kwargs["position_ids"])
                length = input_ids.shape[1]
                self.cache.place_rows(packed.pack(token_slots), end, packed.rows)
            else:
                # Padding behind a short draft writes to slots that the row will fill later; nobody looks at them until then.
                self.cache.place_rows(token_slots, end)
        else:
            self.cache.place(slots[0], length)
            if (padded := self.layout.padded) is not None:
                after = padded.new_ones(1, slots[0] + length - padded.shape[1])
                kwargs["attention_mask"] = torch.cat([~padded, after], dim=1).long()
            input_ids = torch.cat([sequences[0][None, :-1], tokens], dim=1)  # some models find their own part of the text
        if "logits_to_keep" in self.model_kwargs:
            kwargs["logits_to_keep"] = length
        inputs = self._prepared(input_ids, next_sequence_length=length, **kwargs)
        if packed is None:
            return self._call(inputs)
        with packed.attending():
            outputs = self._call(inputs)
        outputs.logits = packed.unpack(outputs.logits)
        outputs.hidden_states = tuple(None if states is None else packed.unpack(states) for states in outputs.hidden_states)
        return outputs

    def _prepared(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """What the target makes of tokens and cache for its forward."""
        inputs = self.target.prepare_inputs_for_generation(input_ids, **kwargs)
        if not any(value is self.cache for value in inputs.values()):
            raise ValueError(
                f"{type(self.target).__name__} starts over with a cache of its own here, as some models do where a text "
                "outgrows their original context; a drafter cannot follow. Generate without `assistant_model`, or keep prompt "
                "and answer shorter."
            )
        return inputs

    def _call(self, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
        inputs["output_hidden_states"] = self._capture
        if self._output_attentions:
            inputs["output_attentions"] = True
        if self._routes:  # for a loss that nobody asks for here, and that takes masks of plain decoding only
            inputs["output_router_logits"] = False
        return self.target(**inputs, return_dict=True)

    # ---- rows and cache ----

    @property
    def sliding_windows(self) -> list[int | None]:
        """Attention window of each layer; `None` where it sees everything."""
        return [getattr(layer, "sliding_window", None) for layer in self.cache.layers]

    def select_rows(self, places: Tensor) -> None:
        """Keeps only the rows at the given places in the cache."""
        rows = len(self.cache_rows)
        for inputs in (self._others, self._token_types):
            for name, value in inputs.items():
                if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows:
                    inputs[name] = value.index_select(0, places.to(value.device))
        self.cache.select_rows(places)
        self.layout.select_rows(places)
        self.cache_rows = [self.cache_rows[place] for place in places.tolist()]

    def join(self, other: TargetForward, length: int) -> None:
        """Takes over the rows of another forward of the same target as further, last rows, and numbers all anew.

        Args:
            other ([`TargetForward`]): after its prefill; both with a text in every row and nothing else.
            length (`int`): committed tokens of the longest row of both.

        Raises:
            ValueError: a prompt has padding, positions of its own, or inputs besides its tokens.
        """
        for forward in (self, other):
            extra = forward._row_inputs()
            if extra or forward.slot_offset or not forward.layout.counts_slots:
                raise ValueError(
                    "rows can only join where every token sits at its own position 0, 1, 2, … and the target is given nothing "
                    f"but tokens; got {', '.join(extra) or 'padding or other positions'}. Use `generate` for such prompts."
                )
        self.cache.append_rows(other.cache, length)
        self.cache_rows = list(range(len(self.cache_rows) + len(other.cache_rows)))

    def hand_back(self, sequences: Tensor, lengths: list[int]) -> None:
        """Fills the cache that `generate` was called with, if the caller can see it, as plain decoding would have done.

        Args:
            sequences (`torch.LongTensor` of shape `(R, S)`): all tokens, finished rows padded.
            lengths (`list[int]`): tokens of each row without that padding.
        """
        if not self.keeps_rows:
            return
        longest = max(lengths)
        if min(lengths) < longest:
            # Plain decoding goes on feeding padding to the rows that have finished. Not all at once, because of the logits; a
            # row that has come to the end waits at the first slot that is not handed back.
            padded = torch.nn.functional.pad(sequences, (0, _FILLED_AT_ONCE))
            for start in range(0, longest - min(lengths), _FILLED_AT_ONCE):
                firsts = [min(n - 1 + start, longest - 1) for n in lengths]
                counts = [max(1, min(longest - 1 - first, _FILLED_AT_ONCE)) for first in firsts]
                tokens = torch.stack([ids[first : first + max(counts)] for ids, first in zip(padded, firsts, strict=True)])
                slots = [first + self.slot_offset for first in firsts]
                self.verify(list(sequences), tokens, slots, [count - 1 for count in counts])
        self.cache.write_to(self.user_cache, self.past_length, longest - 1 + self.slot_offset)


def _takes_positions(target: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(type(target).forward).parameters  # a wrapper around it may hide them


def refuse_unplaced_rows(target: PreTrainedModel, instead: str = "generate one row at a time") -> None:
    """Raises ValueError for a target that counts positions itself, for all rows alike.

    Args:
        target (`PreTrainedModel`): the target.
        instead (`str`): what the error tells to do.
    """
    if not _takes_positions(target):
        raise ValueError(
            f"{type(target).__name__} takes no `position_ids`, so rows at different positions cannot share a forward: "
            f"{instead}."
        )


def ragged_mask(
    target: PreTrainedModel, token_slots: Tensor, causal: Tensor, instead: str = "generate one row at a time"
) -> Any:
    """Masks of rows at different slots: by layer type where the target has several, else one.

    The choice follows transformers' `create_masks_for_generate`.

    Args:
        target (`PreTrainedModel`): whose attention will read them.
        token_slots (`torch.LongTensor` of shape `(R, Q)`): slot of each query.
        causal (`torch.BoolTensor` of shape `(R, Q, S)`): slots that full attention lets it see.
        instead (`str`): what the error tells to do.

    Raises:
        ValueError: the target's attention implementation, or the type of one of its layers, cannot be masked so.
    """
    config = target.config.get_text_config(decoder=True)
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{type(target).__name__} makes its ALiBi positions from a mask of columns, which rows of different lengths do not "
            f"have in common: {instead}."
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        raise ValueError(
            f"{type(target).__name__} measures the windows of its local layers from the last column, which rows of different "
            f"lengths do not have in common: {instead}."
        )
    window = getattr(config, "sliding_window", None)

    def build(kind: str) -> Any:
        if kind == "full_attention":
            visible = causal
        elif kind == "sliding_attention":
            visible = causal & (torch.arange(causal.shape[-1], device=causal.device) > token_slots[..., None] - window)
        else:
            raise ValueError(
                f"the target has layers of type {kind!r}, for which rows of different lengths cannot be masked: {instead}."
            )
        return format_mask(visible[:, None], config._attn_implementation, target.dtype)

    if getattr(config, "layer_types", None) is not None:
        return {kind: build(kind) for kind in set(config.layer_types)}
    if getattr(config, "attention_chunk_size", None) is not None:
        return build("chunked_attention")
    return build("full_attention" if window is None else "sliding_attention")
