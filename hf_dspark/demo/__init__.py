"""The embedded default: a real target and a drafter trained for it, without a network.

Examples, tests and the command line need one pair of models that is always there. The target is SmolLM2-135M-Instruct,
read from an installed package (see [`load_target`]); the drafter is small enough to travel with this package, in the
folder next to this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .target import load_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_dspark import DSparkDraftModel

__all__ = ["DRAFTER_FOLDER", "load_default", "load_target"]

DRAFTER_FOLDER = Path(__file__).parent / "smollm2_135m_dspark"


def load_default(
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkDraftModel]:
    """Loads the default target, its tokenizer and the drafter that was trained for it.

    Args:
        dtype (`torch.dtype`, defaults to `torch.float32`): precision of both models.

    Returns:
        `tuple`: the target, its tokenizer and the drafter, both models in evaluation mode on the processor.

    Raises:
        ImportError: the package with the target is installed, but not `gguf`, which reads it.
        OSError: neither the package with the target nor a hub could be reached.
    """
    from ..modeling_dspark import DSparkDraftModel  # here, so that the target alone loads without the drafter's code
    from ..packing import pack_linears

    model, tokenizer = load_target(dtype)
    drafter = DSparkDraftModel.from_pretrained(DRAFTER_FOLDER, dtype=dtype).eval()
    drafter.load_profile = drafter.load_profile.live()  # of another machine, perhaps: better than none, and soon corrected
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        pack_linears(drafter, drafter.config.num_draft_tokens)
    return model, tokenizer, drafter
