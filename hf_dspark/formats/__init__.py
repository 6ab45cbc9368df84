"""Checkpoints of drafters as they are found: told apart, converted to one convention, checked, or refused by name.

Drafters are published in many packagings that share most tensor names and agree on little else: whether the first slot
predicts, how target layers are counted, whose fields `config.json` describes. Every misreading is silent, because
verification keeps the text right while acceptance collapses.

A packaging is a module with `recognises(raw)` and `convert(raw)`, both on the content of `config.json`, with its
`NAME`, with `RENAMED`, our names of the tensors it calls otherwise, and with `TARGET_COPIES`, the tensors that belong to
the target. [`PACKAGINGS`] lists those that are read; `unsupported` names the others. The checks are common to all, on the
converted configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..configuration_dspark import CALIBRATION_FIELDS, DSparkConfig
from ..errors import CheckpointError
from . import checks, deepspec, dflash, modelopt, muse_glimmer, own, specforge, speculators, unsupported
from .files import CONFIG_NAME, TensorHeader, read_headers, read_json, read_tensors
from .target_copies import COMPARED, TargetCopies

# In this order: speculators and Model-Optimizer use architectures of others.
PACKAGINGS: tuple[ModuleType, ...] = (own, deepspec, speculators, modelopt, specforge, dflash, muse_glimmer)


def packaging_of(folder: Path) -> tuple[ModuleType, dict[str, Any]]:
    """The packaging of a checkpoint and the content of its `config.json`; needs no weights.

    Raises:
        CheckpointError: `config.json` cannot be read, or its packaging is not among [`PACKAGINGS`].
    """
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf and not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"{folder}: {gguf[0]} is a GGUF file, which is not read. Use the safetensors it was made from.")
    try:
        raw = read_json(folder / CONFIG_NAME)
        for packaging in PACKAGINGS:
            if packaging.recognises(raw):
                return packaging, raw
        try:
            tensors = list(read_headers(folder))
        except CheckpointError:  # not downloaded, or not readable either: then config.json has to do
            tensors = []
        raise CheckpointError(unsupported.refusal(raw, tensors))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error.__cause__


def read_checkpoint(
    folder: Path,
    *,
    config: PreTrainedConfig | None = None,
    overrides: dict[str, Any] | None = None,
    variant: str | None = None,
) -> tuple[DSparkConfig, dict[str, Tensor], list[str]]:
    """Reads and checks a drafter in any known packaging.

    Args:
        folder (`Path`): the checkpoint.
        config ([`DSparkConfig`], *optional*): to be used instead of `config.json`.
        overrides (`dict`, *optional*): fields to change in the configuration of `config.json`.
        variant (`str`, *optional*): the `fp16` of `model.fp16.safetensors`.

    Returns:
        `tuple[DSparkConfig, dict[str, torch.Tensor], list[str]]`: the configuration, whose `dtype` is that of the
        weights; the tensors under the names of [`DSparkDraftModel`], without those of the target; notes for the user.

    Raises:
        CheckpointError: anything is wrong with it; the message says what, and what to do.
    """
    packaging, raw = packaging_of(folder)
    try:
        converted = packaging.convert(raw)
        trained = _build_config(converted.fields)
        if config is not None and not isinstance(config, DSparkConfig):
            raise CheckpointError(f"`config` must be a DSparkConfig, got a {type(config).__name__}. Leave it out.")
        if config is not None:
            given = config
            config = _checked(lambda: _given(given, trained), "`config`")
        else:
            config = _build_config(_overridden(converted.fields, overrides, trained)) if overrides else trained
        if config.block_size > trained.block_size:
            raise CheckpointError(
                f"`block_size` {config.block_size} was asked for, but the drafter was trained with "
                f"{trained.block_size}: the slots behind that would draft noise. Ask for no more."
            )
        checks.check_config(config)
        headers = _own_names(read_headers(folder, variant), packaging.RENAMED)
        checks.check_headers(config, headers, packaging.TARGET_COPIES)
        checks.check_rope(config)
        norms = checks.norm_names(config)
        checks.check_norms(read_tensors(headers, norms))
        names = [name for name in headers if name not in packaging.TARGET_COPIES]
        tensors = read_tensors(headers, names)
        if config.draft_vocab_size is not None:
            tensors["d2t"] = tensors["d2t"].long()  # some are stored in 32 bits
        checks.check_values(config, tensors)
        config.dtype = checks.file_dtype(headers, [name for name in names if name not in ("d2t", "t2d")])
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error.__cause__
    return config, tensors, converted.notes


def _overridden(fields: dict[str, Any], overrides: dict[str, Any], trained: DSparkConfig) -> dict[str, Any]:
    """Fields with some replaced; of a calibration a shorter block keeps the values of the positions that are left."""
    fields = fields | overrides
    return fields | {name: value for name, value in _left_of_calibration(fields, trained).items() if name not in overrides}


def _given(config: DSparkConfig, trained: DSparkConfig) -> DSparkConfig:
    """A copy of a configuration, whose fields may have been set since it was checked."""
    config = copy.deepcopy(config)
    for name, values in _left_of_calibration(vars(config), trained).items():
        setattr(config, name, values)
    config.validate()
    return config


def _left_of_calibration(fields: dict[str, Any], trained: DSparkConfig) -> dict[str, list[float]]:
    """What a block shorter than the trained one keeps of a calibration: the values of its positions."""
    size = fields["block_size"]
    left = trained.num_draft_tokens - (trained.block_size - size) if isinstance(size, int) else 0
    if not 0 < left < trained.num_draft_tokens:
        return {}
    return {name: values[:left] for name in CALIBRATION_FIELDS if isinstance(values := fields.get(name), list)}


def find_target_copies(folder: Path, variant: str | None = None) -> TargetCopies | None:
    """The target's tensors inside a checkpoint that [`read_checkpoint`] has accepted; `None` if it carries none."""
    packaging, _ = packaging_of(folder)
    headers = read_headers(folder, variant)
    copies = {name: headers[name] for name in COMPARED if name in packaging.TARGET_COPIES and name in headers}
    return TargetCopies(copies) if copies else None


def _own_names(headers: dict[str, TensorHeader], renamed: dict[str, str]) -> dict[str, TensorHeader]:
    """The headers under the names of [`DSparkDraftModel`].

    Raises:
        CheckpointError: a tensor is there under both names.
    """
    for theirs, ours in renamed.items():
        if theirs in headers and ours in headers:
            raise CheckpointError(f"the weights hold both `{theirs}` and `{ours}`, which are the same. Remove one of them.")
    return {renamed.get(name, name): header for name, header in headers.items()}


def _build_config(fields: dict[str, Any]) -> DSparkConfig:
    return _checked(lambda: DSparkConfig(**fields), CONFIG_NAME)


def _checked(make: Callable[[], DSparkConfig], name: str) -> DSparkConfig:
    try:
        return make()
    except Exception as error:  # the host validates with whatever its arithmetic raises on values that make no sense
        cause = error.__cause__ or error
        raise CheckpointError(f"{name} describes no drafter: {str(cause).rstrip('.')}. Correct it.") from error
