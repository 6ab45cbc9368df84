"""What a measured time depends on: the target as it runs, and the machine below it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from .packing import is_packed


def fingerprint(target: PreTrainedModel) -> dict[str, str]:
    """Everything that decides how long a forward of `target` takes here, as far as it can be known beforehand.

    Args:
        target (`PreTrainedModel`): on the device and in the dtype it will serve in.

    Returns:
        `dict[str, str]`: `target` (class and shape), `dtype`, `device`, `threads` (of a processor; else `"-"`), `attention`,
        `linears` (`"packed"` or `"plain"`), and the versions `torch`, `transformers` and `hf_dspark`.
    """
    from . import __version__  # defined after this module is read

    config = target.config.get_text_config(decoder=True)
    shape = f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.vocab_size} tokens"
    on_processor = target.device.type == "cpu"
    return {
        "target": f"{type(target).__name__}, {shape}, {target.num_parameters()} parameters",
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": _processor() if on_processor else _accelerator(target.device),
        "threads": str(torch.get_num_threads()) if on_processor else "-",
        "attention": str(config._attn_implementation),
        "linears": "packed" if is_packed(target) else "plain",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_dspark": __version__,
    }


def _accelerator(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()
