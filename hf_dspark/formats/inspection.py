"""What a checkpoint was read as, and why: the reader's decisions laid open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..load_profile import LoadProfile
from . import packaging_of, read_checkpoint
from .files import LOAD_PROFILE_NAME
from .own import DRAFTER_FIELDS


def inspect_checkpoint(folder: Path) -> dict[str, Any]:
    """Reads and checks a checkpoint as loading it does.

    Args:
        folder (`Path`): the checkpoint.

    Returns:
        `dict`: `packaging`, its name; `decisions`, what was read from what; `notes`; `config`, the fields of
        [`DSparkConfig`]; `dtype`; `parameters`, of the drafter alone; `draft_tokens`, K. All of it fits into JSON.

    Raises:
        CheckpointError: anything is wrong with it.
        ValueError: its load profile cannot be used.
    """
    packaging, raw = packaging_of(folder)
    decisions = packaging.convert(raw).decisions
    config, tensors, notes = read_checkpoint(folder)
    if (folder / LOAD_PROFILE_NAME).is_file():
        LoadProfile.load(folder / LOAD_PROFILE_NAME)
    return {
        "packaging": packaging.NAME,
        "decisions": decisions or ["none: config.json says everything in this library's own terms"],
        "notes": notes,
        "config": {name: getattr(config, name) for name in sorted(DRAFTER_FIELDS)},
        "dtype": str(config.dtype).removeprefix("torch."),
        "parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        "draft_tokens": config.num_draft_tokens,
    }
