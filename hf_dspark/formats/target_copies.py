"""Embedding and LM head of the target inside a drafter's file: compared with the target's own, never loaded.

A drafter reads the target's thoughts, so it only fits the very target it was trained for, and a file that carries that
target's embedding can prove it. The comparison is exact and goes through the tensors in pieces, so that it needs no
memory to speak of. A target in another dtype than the file is still the same one if converting either gives the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ..errors import CheckpointError
from .checks import FLOAT_DTYPES
from .files import TensorHeader, opened

COMPARED = ("embed_tokens.weight", "lm_head.weight")
_PIECE = 2**18  # elements compared at a time: 1 MB in float32


class TargetCopies:
    """Where the copies are.

    Args:
        headers (mapping): headers of the [`COMPARED`] tensors that are there.
    """

    def __init__(self, headers: Mapping[str, TensorHeader]):
        self.headers = dict(headers)

    def compare(self, target: PreTrainedModel, token_ids: torch.Tensor | None = None) -> None:
        """Reads the file once and compares it with `target`.

        Weights that cannot be compared (quantised, split over processes, or offloaded and not in memory) are taken on trust.

        Args:
            target (`PreTrainedModel`): a target of the same vocabulary and width.
            token_ids (`torch.LongTensor` of shape `(Vd,)`, *optional*): the rows of the LM head that are in the file; all
                when not given.

        Raises:
            CheckpointError: an embedding or LM head differs, or the file is no longer there.
        """
        modules = {
            "embed_tokens.weight": target.get_input_embeddings(),
            "lm_head.weight": target.get_output_embeddings(),
        }
        for name, header in self.headers.items():
            weight = modules[name].weight.detach()
            if type(weight) is not torch.Tensor or weight.dtype not in FLOAT_DTYPES.values() or weight.is_meta:
                continue
            rows = token_ids if token_ids is not None and name == "lm_head.weight" else torch.arange(len(weight))
            if (len(rows), weight.shape[1]) != header.shape or not _same(header, weight, rows):
                raise CheckpointError(
                    f"this drafter was trained for another target: `{name}` in {header.file} is not the one of "
                    f"{target.name_or_path or type(target).__name__}. Load the drafter of this target."
                )


def _same(header: TensorHeader, weight: torch.Tensor, rows: torch.Tensor) -> bool:
    pieces = rows.split(max(1, _PIECE // header.shape[1]))
    starts = itertools.accumulate((len(piece) for piece in pieces[:-1]), initial=0)
    return all(_same_piece(header, weight, piece, start) for piece, start in zip(pieces, starts, strict=True))


def _same_piece(header: TensorHeader, weight: torch.Tensor, rows: torch.Tensor, start: int) -> bool:
    with opened(header.file) as file:  # anew for each piece: what was read of a mapped file counts until it is closed
        ours = file.get_slice(header.name)[start : start + len(rows)].to(weight.device)
        theirs = weight[rows.to(weight.device)]
        return torch.equal(theirs.to(ours.dtype), ours) or torch.equal(ours.to(theirs.dtype), theirs)
