"""Decoding with a drafter by name, where nobody has imported this package: `target.generate(..., custom_generate=name)`.

A drafter's folder has a file `custom_generate/generate.py` that only imports this function. Where the package is not
installed, transformers says so and how to install it.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from .formats.files import DOWNLOAD_OPTIONS
from .loading import drafter_by_name
from .modeling_dspark import DSparkDraftModel

_loaded: WeakKeyDictionary[PreTrainedModel, tuple[Any, DSparkDraftModel]] = WeakKeyDictionary()


def generate(model: PreTrainedModel, assistant_model: DSparkDraftModel | str | os.PathLike | None = None, **arguments: Any):
    """What `target.generate(..., custom_generate="user/drafter", trust_remote_code=True)` runs.

    Args:
        model (`PreTrainedModel`): the target.
        assistant_model ([`DSparkDraftModel`], `str` or `os.PathLike`): the drafter, or its folder or repo id; by name it is
            loaded in the target's dtype, to its device, on the first call and kept for the next.
        arguments: those of `generate`; `revision`, `token`, `cache_dir`, `local_files_only` and `force_download` go to the
            loading of the drafter.

    Returns:
        What `generate` returns.

    Raises:
        ValueError: there is no drafter, or it is no DSpark drafter.
        CheckpointError: the drafter cannot be loaded.
    """
    download = {name: arguments.pop(name) for name in DOWNLOAD_OPTIONS if name in arguments}
    if isinstance(assistant_model, (str, os.PathLike)):
        wanted = (os.fspath(assistant_model), download, model.device, model.dtype)
        known = _loaded.get(model)
        if known is None or known[0] != wanted:
            known = _loaded[model] = (wanted, drafter_by_name(assistant_model, model, **download))
        assistant_model = known[1]
    if not isinstance(assistant_model, DSparkDraftModel):
        raise ValueError(
            f"`assistant_model` must be a DSpark drafter, or its folder or repo id, got {type(assistant_model).__name__}. Pass "
            "the same name as `custom_generate`: this code is not told from where it was loaded."
        )
    # By class: the instance's own `generate` may be a custom one that leads back here.
    return type(model).generate(model, assistant_model=assistant_model, **arguments)  # type: ignore[attr-defined]
