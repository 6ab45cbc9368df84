"""Rows of different lengths in one forward, without padding: all tokens side by side in a single row.

Everything in a transformer but its attention treats each token alone. So the tokens of R rows, 1 + ℓ_r of row r, are given
to the target as one row of Σ(1 + ℓ_r): linear layers, norms, experts and the LM head then do no work for padding. Only
attention has to know whose token is whose. Keys and values go to their own row's slots in [`~hf_dspark.cache.SlotCache`],
which returns those of all rows, and the attention function that the model asks transformers' attention interface for is
called with one row of queries per row, as it would be without packing. With SDPA, query heads that share a key head then go
as further queries of that head: the library would copy every key and value as often as it is shared, in each layer.

The model itself is not touched. What the interface hands out changes for the thread that is inside
[`~PackedRows.attending`], and for no other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_current: ContextVar[PackedRows | None] = ContextVar("packed_rows", default=None)
_lock = threading.Lock()
_forwards = 0  # packed ones under way, in all threads; a number of the module, which torch.compile sees change


class PackedRows:
    """Which token of the packed row belongs to which row of the batch.

    Args:
        counts (`list[int]`): tokens of each of the R rows, at least 1; T in all, Q in the longest.
        device (`torch.device`): of the tokens.

    Attributes:
        rows (`torch.LongTensor` of shape `(1, T)`): row of each token.
    """

    def __init__(self, counts: list[int], device: torch.device):
        self._alike = (len(counts), counts[0]) if len(set(counts)) == 1 else None  # (R, Q) where nothing is padding
        lengths = torch.tensor(counts)
        places = torch.arange(int(lengths.max())).expand(len(counts), -1)  # (R, Q)
        valid = places < lengths[:, None]
        first = lengths.cumsum(0) - lengths
        # Behind the end of a row stands its last token again, as padding that nobody reads.
        self._tokens = (first[:, None] + places.minimum(lengths[:, None] - 1)).to(device)  # (R, Q), in 0 … T − 1
        rows, place = valid.nonzero(as_tuple=True)
        self.rows, self._places = rows[None].to(device), place[None].to(device)  # (1, T)

    def pack(self, padded: Tensor) -> Tensor:
        """`(R, Q, ...)` to `(1, T, ...)`: what is padding is left out."""
        if self._alike:
            return padded.reshape(1, -1, *padded.shape[2:])
        return padded[self.rows.to(padded.device), self._places.to(padded.device)]

    def unpack(self, packed: Tensor) -> Tensor:
        """`(1, T, ...)` to `(R, Q, ...)`, every row padded with its own last token."""
        if self._alike:
            return packed.view(*self._alike, *packed.shape[2:])
        return packed[0][self._tokens.to(packed.device)]

    @contextmanager
    def attending(self) -> Iterator[None]:
        """While open, attention of this thread takes packed queries `(1, H, T, head_dim)` and keys `(R, H, S, head_dim)`."""
        global _forwards
        token = _current.set(self)
        with _lock:
            _forwards += 1
        try:
            yield
        finally:
            with _lock:
                _forwards -= 1
            _current.reset(token)


def can_pack(target: PreTrainedModel) -> bool:
    """Whether a target's attention does nothing with rows but what the attention interface is asked for.

    So it is in the library's own models that use the interface, with SDPA or eager attention. Code from elsewhere is not
    known, Doge makes a mask of its own out of the values of all rows, and GPT-2 can be set to bypass the interface.
    """
    models = [module for module in target.modules() if isinstance(module, PreTrainedModel)]
    return (
        hasattr(AttentionInterface.get_interface, "takes_packed_rows")  # not so after `uninstall`
        and target.config.get_text_config(decoder=True)._attn_implementation in ("sdpa", "eager")
        and all(model._can_set_attn_implementation() and not model.is_custom_code() for model in models)
        and not any(model.config.model_type == "doge" for model in models)
        and not any(getattr(model.config, "reorder_and_upcast_attn", False) for model in models)
    )


def wrap_interface(original: Any) -> Any:
    """`AttentionInterface.get_interface` with packed rows in mind; for [`~hf_dspark.hooks`]."""

    @functools.wraps(original)
    def get_interface(self, *args, **kwargs):
        function = original(self, *args, **kwargs)
        return functools.partial(_attend, function) if _forwards else function

    get_interface.takes_packed_rows = True  # type: ignore[attr-defined]
    return get_interface


@torch.compiler.disable  # a compiled graph would keep the rows it has been made for
def _attend(function: Callable, module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """An attention function on queries `(1, H, T, head_dim)`, if this thread has packed them; weights stay by row."""
    packed = _current.get()
    if packed is None:
        return function(module, query, *args, **kwargs)
    queries = packed.unpack(query.transpose(1, 2)).transpose(1, 2)  # (R, H, Q, head_dim)
    if function is sdpa_attention_forward:
        output, weights = _sdpa_by_key_head(module, queries, *args, **kwargs)
    else:
        output, weights = function(module, queries, *args, **kwargs)  # (R, Q, H, head_dim)
    return packed.pack(output), weights


def _sdpa_by_key_head(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:  # names as in the library: some models hand their mask over by name
    """SDPA of `(R, H, Q, head_dim)` on keys of fewer heads, without a copy of a key for each head that shares it."""
    shared = getattr(module, "num_key_value_groups", 1)
    rows, heads, length, size = query.shape
    one_mask = attention_mask is not None and attention_mask.shape[1] == 1  # for all heads
    if shared == 1 or length == 1 or not one_mask or kwargs.get("position_bias") is not None:  # copies nothing, or has to
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    ungrouped: Any = SimpleNamespace(num_key_value_groups=1, is_causal=False)
    queries, mask = query.reshape(rows, -1, shared * length, size), attention_mask.repeat(1, 1, shared, 1)
    output, weights = sdpa_attention_forward(ungrouped, queries, key, value, mask, *args, **kwargs)
    # (R, shared · Q, H / shared, head_dim)
    output = output.view(rows, shared, length, -1, value.shape[-1]).permute(0, 2, 3, 1, 4)
    return output.reshape(rows, length, heads, -1), weights
