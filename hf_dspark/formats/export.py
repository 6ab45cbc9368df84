"""Writing a drafter in the packaging of another program, so that vLLM, SGLang or DeepSpec can serve it.

Each packaging that is written has a module with `describe(config, target)`: the content of `config.json`, and the
target's tensors that belong into the file. What a packaging cannot express is refused there rather than dropped, since
a drafter that has lost a head or a layout still drafts, only badly. Calibration alone is left out with a word: no packaging has
a place for it, it changes no draft, and SGLang takes it from a file of its own.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import CheckpointError
from . import deepspec, dflash, speculators
from .files import CONFIG_NAME, is_occupied, replaced_files

if TYPE_CHECKING:
    from ..configuration_dspark import DSparkConfig
    from ..modeling_dspark import DSparkDraftModel

logger = logging.get_logger(__name__)

WRITTEN: dict[str, ModuleType] = {"deepspec": deepspec, "speculators": speculators, "dflash": dflash}


def _completed(config: DSparkConfig, target: PreTrainedModel | None) -> DSparkConfig:
    """A configuration with what its own packaging did not say of the target, and others must."""
    config = copy.deepcopy(config)
    if target is not None:
        of_target = target.config.get_text_config(decoder=True)
        config.vocab_size = config.vocab_size or of_target.vocab_size
        config.num_target_layers = config.num_target_layers or of_target.num_hidden_layers
    if config.vocab_size is None:
        raise CheckpointError(
            "this drafter's files do not say its target's `vocab_size`: pass the target (`target=`, --target) that it was "
            "trained for."
        )
    return config


def export_checkpoint(
    drafter: DSparkDraftModel, folder: str | os.PathLike, packaging: str, target: PreTrainedModel | None = None
) -> None:
    """Writes `config.json` and `model.safetensors` in another packaging.

    Both are completed in a hidden folder and then moved into place. The same drafter and target give the same bytes.

    Args:
        drafter ([`DSparkDraftModel`]): what to write, in its own dtype; bound to `target`, and else left as it is.
        folder (`str` or `os.PathLike`): new or empty folder.
        packaging (`str`): `"deepspec"`, `"speculators"` or `"dflash"`.
        target (`PreTrainedModel`, *optional*): the drafter's target, which `"deepspec"` and `"speculators"` need: for its
            name and configuration, and for the tensors of it that they hold, which are written in the drafter's dtype.

    Raises:
        CheckpointError: the packaging is unknown or cannot express this drafter, the target is missing, or the folder
            holds something.
        ValueError: the target is not the drafter's.
    """
    if packaging not in WRITTEN:
        raise CheckpointError(f"`packaging` must be one of {', '.join(WRITTEN)}, got {packaging!r}.")
    folder = Path(folder)
    if is_occupied(folder):
        raise CheckpointError(f"{folder} holds something already, and mixed checkpoints are misread. Pass a new folder.")
    if target is not None:
        drafter.bind(target)
    described, copies = WRITTEN[packaging].describe(_completed(drafter.config, target), target)
    if drafter.config.is_calibrated:
        logger.warning(
            f"The {packaging} packaging has no place for calibration: the confidences in {folder} are the raw ones. "
            "`hf-dspark calibrate --sts` writes temperatures for SGLang."
        )
    described["dtype"] = str(drafter.dtype).removeprefix("torch.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    for name, weight in copies.items():
        if name == "lm_head.weight" and drafter.draft_token_ids is not None:
            weight = weight[drafter.draft_token_ids.to(weight.device)]
        if weight.is_meta or not weight.is_floating_point():
            raise CheckpointError(f"`{name}` of the target is quantised or not in memory. Load the target without that.")
        # Its own memory: embedding and head may be one tensor, which safetensors would not store twice.
        tensors[name] = weight.detach().to("cpu", drafter.dtype, copy=True).contiguous()
    with replaced_files(folder) as staged:
        save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})
        (staged / CONFIG_NAME).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
