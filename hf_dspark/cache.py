"""A key-value cache whose slot is the token's column, so that a rollback is nothing at all.

Speculative decoding writes keys and values for tokens that may be rejected. A cache that only appends has to be cropped
afterwards, and cannot be cropped by a different amount in every row of a batch. Here each forward says at which slots its
tokens go: a rejected token's slot is simply written again, and until then no mask lets anyone look at it. Rows of a batch
advance at their own pace, and sliding-window layers keep every slot, so that the window counts positions and not whatever
happens to be stored.

The same class serves the target (slot = column of the left-padded sequence) and the drafter (context rows at their own
columns, the block behind them).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

_GROWTH = 256  # slots added at a time: a generation of 200 tokens copies the cache once


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, `(R, H, capacity, head_dim)`; written by [`SlotCache`] only."""

    def __init__(self, sliding_window: int | None = None, batch_size: int | None = None):
        super().__init__()
        self.rows = batch_size
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window

    def reserve(self, key_states: Tensor, value_states: Tensor, capacity: int) -> None:
        """Makes room for `capacity` slots, keeping what is stored. Slots never written hold zeros: no NaN to spread."""
        stored = self.keys.shape[2] if self.is_initialized else 0
        if stored >= capacity:
            return
        capacity = -(-capacity // _GROWTH) * _GROWTH
        # Packed states are one row, whatever is stored; the first ones, of the prompts, never are packed.
        rows = self.rows or (self.keys if stored else key_states).shape[0]
        for name, states in (("keys", key_states), ("values", value_states)):
            room = states.new_zeros(rows, states.shape[1], capacity, states.shape[3])
            if stored:
                room[:, :, :stored] = getattr(self, name)
            setattr(self, name, room)
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True


class SlotCache(Cache):
    """Cache with explicit write positions.

    Call [`~SlotCache.place`] before every forward. Rows are dense: the memory is `R × longest row`.

    Args:
        config (`PreTrainedConfig`): configuration of the model that writes here; gives the number and kind of the layers.
        batch_size (`int`, *optional*): number of rows, where the first write does not tell it.

    Raises:
        ValueError: the model keeps a recurrent or otherwise unsupported state in one of its layers.
    """

    def __init__(self, config: PreTrainedConfig, batch_size: int | None = None):
        layers: list = []
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if type(layer) is DynamicLayer:
                layers.append(SlotLayer(batch_size=batch_size))
            elif type(layer) is DynamicSlidingWindowLayer:
                layers.append(SlotLayer(layer.sliding_window, batch_size))
            elif isinstance(layer, DummyLayer):  # shares the keys and values of an earlier layer
                layers.append(layer)
            else:
                raise ValueError(
                    f"target layer {index} keeps a {type(layer).__name__}: its state cannot be rolled back to an earlier "
                    "token, which speculative decoding needs. Generate with this model without an assistant."
                )
        super().__init__(layers=layers)
        self.length = 0  # slots that the next forward attends over
        self._slots: Tensor | None = None  # (R, Q), or None when every row writes at [_start, _start + Q)
        self._rows: Tensor | None = None  # that each of them belongs to
        self._start = 0

    def place(self, start: int, query_length: int) -> None:
        """All rows write their next `query_length` tokens at slots `start, start + 1, …`."""
        self._slots, self._start, self.length = None, start, start + query_length

    def place_rows(self, slots: Tensor, length: int, rows: Tensor | None = None) -> None:
        """Row r writes token q at `slots[r, q]`; the forward attends over slots `< length`.

        Args:
            slots (`torch.LongTensor` of shape `(R, Q)`): write positions; `length` itself is a waste slot for padding.
            length (`int`): number of slots returned to the attention.
            rows (`torch.LongTensor` of shape `(1, T)`, *optional*): with packed tokens and `slots` of that shape, the row
                that each belongs to. Keys and values of all rows are returned all the same.
        """
        self._slots, self._start, self.length = slots, 0, length
        self._rows = torch.arange(len(slots), device=slots.device)[:, None] if rows is None else rows

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes keys and values `(R, H, Q, head_dim)`, or packed `(1, H, T, head_dim)`; returns all rows' below `length`."""
        layer = self.layers[layer_idx]
        if isinstance(layer, DummyLayer):
            return key_states, value_states
        layer.reserve(key_states, value_states, self.length + (self._slots is not None))
        if self._slots is None:
            end = self._start + key_states.shape[2]
            layer.keys[:, :, self._start : end] = key_states
            layer.values[:, :, self._start : end] = value_states
        else:
            slots = self._slots.to(key_states.device)
            rows = self._rows.to(slots.device)
            layer.keys[rows, :, slots] = key_states.transpose(1, 2)
            layer.values[rows, :, slots] = value_states.transpose(1, 2)
        return layer.keys[:, :, : self.length], layer.values[:, :, : self.length]

    def select_rows(self, rows: Tensor) -> None:
        """Keeps only the given rows, in that order."""
        for _, layer in self._slot_layers():
            if layer.rows is not None:
                layer.rows = len(rows)
            if layer.is_initialized:  # rows may leave before the first draft
                layer.keys = layer.keys.index_select(0, rows.to(layer.keys.device))
                layer.values = layer.values.index_select(0, rows.to(layer.values.device))

    @property
    def rows(self) -> int:
        """Number of rows stored."""
        return self._slot_layers()[0][1].keys.shape[0]

    def append_rows(self, other: SlotCache, length: int) -> None:
        """Takes over the rows of another cache of the same model as further, last rows.

        Args:
            other ([`SlotCache`]): written to before, as this one.
            length (`int`): slots of each row that are kept. The capacity is made anew from it, so that memory follows the
                rows at hand and not the longest there ever was.
        """
        capacity = -(-length // _GROWTH) * _GROWTH
        for index, theirs in other._slot_layers():
            mine = self.layers[index]
            for name in ("keys", "values"):
                parts = getattr(mine, name), getattr(theirs, name)
                rows = [part.shape[0] for part in parts]
                room = parts[0].new_zeros(sum(rows), parts[0].shape[1], capacity, parts[0].shape[3])
                for target, part in zip(room.split(rows), parts, strict=True):
                    kept = min(length, part.shape[2])  # a short row's cache may end before the longest row does
                    target[:, :, :kept] = part[:, :, :kept]
                setattr(mine, name, room)

    def replace_rows(self, rows: Tensor, other: SlotCache) -> None:
        """Overwrites the given rows, in place, by the rows of another cache of the same model."""
        for index, theirs in other._slot_layers():
            mine = self.layers[index]
            mine.reserve(theirs.keys, theirs.values, theirs.keys.shape[2])
            stored, places = theirs.keys.shape[2], rows.to(mine.keys.device)
            mine.keys[places, :, :stored] = theirs.keys
            mine.values[places, :, :stored] = theirs.values

    def read_from(self, cache: Cache, length: int) -> None:
        """Starts with the first `length` columns of a cache that `generate` was given.

        Raises:
            ValueError: a layer of that cache holds its states in a form that cannot be read column by column.
        """
        # A DynamicCache made without a configuration ends at the last layer that stores something.
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if isinstance(mine, DummyLayer):
                continue
            if not isinstance(theirs, DynamicLayer | StaticLayer) or (
                isinstance(theirs, StaticSlidingWindowLayer) and length >= theirs.max_cache_len
            ):
                raise ValueError(
                    f"`cache` holds a {type(theirs).__name__} that already contains tokens; a drafter can only go on from a "
                    "DynamicCache, or from a StaticCache whose sliding window has not been filled. Pass one of these."
                )
            # An offloaded layer waits on the processor; `device` is where it computes.
            keys, values = (states[:, :, :length].to(theirs.device) for states in (theirs.keys, theirs.values))
            first = length - keys.shape[2]  # a sliding layer has dropped what lies before its window
            mine.reserve(keys, values, length)
            mine.keys[:, :, first:length] = keys
            mine.values[:, :, first:length] = values
        self.length = length

    def write_to(self, cache: Cache, start: int, end: int) -> None:
        """Appends columns `start … end − 1` to a cache of the library, as a plain forward would have done."""
        for index, layer in self._slot_layers():
            cache.update(layer.keys[:, :, start:end], layer.values[:, :, start:end], index)

    def _slot_layers(self) -> list[tuple[int, SlotLayer]]:
        return [(index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, SlotLayer)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """First slot of the coming forward (valid when all rows write at the same slots)."""
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length, 0


def slot_ranges(first_slots: list[int], length: int, device: torch.device) -> Tensor:
    """Slots `first_slots[r] … first_slots[r] + length − 1` of every row, `(R, length)`."""
    if len(first_slots) == 1:  # no copy from the host
        return torch.arange(first_slots[0], first_slots[0] + length, device=device)[None]
    return torch.tensor(first_slots, device=device)[:, None] + torch.arange(length, device=device)


def format_mask(visible: Tensor, implementation: str, dtype: torch.dtype) -> object:
    """A boolean mask in the form that an attention implementation takes.

    Args:
        visible (`torch.BoolTensor` of shape `(R, 1, Q or 1, S)`): True where a query may look.
        implementation (`str`): `config._attn_implementation` of the model that will use it.
        dtype (`torch.dtype`): dtype of the queries (eager attention adds the mask to its scores).

    Returns:
        What the implementation expects: boolean for SDPA, additive for eager, a `BlockMask` for flex attention, `(R, S)` for
        flash attention where all queries of a row see the same.

    Raises:
        ValueError: the implementation cannot express this mask.
    """
    if implementation == "sdpa":
        return visible
    if implementation == "eager":
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        rows, _, queries, slots = visible.shape

        def look_up(row, head, query, slot):
            return visible[row, 0, query if queries > 1 else 0, slot]

        return create_block_mask(look_up, rows, None, queries, slots, device=str(visible.device))
    if implementation.startswith("flash") and visible.shape[2] == 1:
        return visible[:, 0, 0]
    raise ValueError(
        f"attention implementation {implementation!r} cannot run rows of different lengths in one forward: load the model with "
        'attn_implementation="sdpa", or generate one row at a time.'
    )


class RowLayout:
    """Where the tokens of each row sit: which slots of the prompt are real, and at which positions.

    Args:
        position_ids (`torch.LongTensor` of shape `(R, P)` or `(A, R, P)`): positions of the prompt, as `generate` prepared
            them; multimodal targets have several axes A.
        attention_mask (`torch.Tensor` of shape `(R, P)`, *optional*): zero at the padding of the prompt.
    """

    def __init__(self, position_ids: Tensor, attention_mask: Tensor | None):
        self.position_ids = position_ids
        self.padded = None if attention_mask is None else attention_mask == 0  # (R, P)

    @property
    def counts_slots(self) -> bool:
        """Whether every token sits at the position that its slot has, as in a text without padding."""
        slots = torch.arange(self.prompt_length, device=self.position_ids.device)
        return bool((self.position_ids == slots).all()) and (self.padded is None or not bool(self.padded.any()))

    @property
    def prompt_length(self) -> int:
        return self.position_ids.shape[-1]

    def positions(self, slots: Tensor) -> Tensor:
        """Rope positions of slots `(R, Q)`, in the target's own axes: `(R, Q)` or `(A, R, Q)`."""
        table = self.position_ids.expand(*self.position_ids.shape[:-2], slots.shape[0], -1)
        slots = slots.to(table.device).expand(*table.shape[:-2], -1, -1)
        inside = slots.clamp(max=self.prompt_length - 1)
        return table.gather(-1, inside) + (slots - inside)

    def text_positions(self, slots: Tensor) -> Tensor:
        """Positions of slots `(R, Q)` as a text-only model counts them, `(R, Q)`."""
        positions = self.positions(slots)
        return positions[0] if positions.ndim == 3 else positions

    def hide_padding(self, visible: Tensor, first_slot: int = 0) -> Tensor:
        """Clears the padding of the prompt in a mask `(R, ..., S)` whose column 0 is slot `first_slot`."""
        if self.padded is not None:
            padded = self.padded[:, first_slot : first_slot + visible.shape[-1]].to(visible.device)
            shape = (padded.shape[0], *[1] * (visible.ndim - 2), padded.shape[1])
            visible[..., : padded.shape[1]] &= ~padded.view(shape)
        return visible

    def select_rows(self, rows: Tensor) -> None:
        """Keeps only the given rows, in that order."""
        if self.position_ids.shape[-2] > 1:
            self.position_ids = self.position_ids.index_select(-2, rows)
        if self.padded is not None:
            self.padded = self.padded.index_select(0, rows)
