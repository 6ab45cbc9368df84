"""Target states on disk, for training that passes over the same text more than once.

By default the target runs inside every training step and nothing is stored. With a cache it runs once over the text; every
later epoch, and every further drafter with the same `target_layer_ids`, reads what it said. The price is
`2 · (m · target_hidden_size + hidden_size)` bytes a token in float16: 7 KB for five layers of width 576 (SmolLM2-135M),
49 KB for five of width 4,096. Files are safetensors shards, each complete or absent, so an interrupted run goes on where it
stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .data import CACHED_STATES, collate

_EXAMPLES_PER_SHARD = 64


class CachedExamples(Dataset):
    """Examples together with the target's states of their tokens.

    Args:
        folder (`str` or `Path`): where the shards are.
        examples (list of `dict`): from [`~hf_dspark.training.data.read_examples`], those that the shards were made of.

    An item is the example with `context_states` `(S, m · target_hidden_size)` and `last_states` `(S, D)` added.
    """

    def __init__(self, folder: str | Path, examples: list[dict[str, Any]]):
        self.folder, self.examples = Path(folder), examples
        self._shards: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard = index // _EXAMPLES_PER_SHARD
        if shard not in self._shards:
            self._shards[shard] = safe_open(_shard_path(self.folder, shard), framework="pt")
        tensors = self._shards[shard]
        return self.examples[index] | {name: tensors.get_tensor(f"{index}.{name}") for name in CACHED_STATES}


def cache_target_states(
    target: PreTrainedModel,
    examples: list[dict[str, Any]],
    layer_ids: list[int],
    folder: str | Path,
    *,
    batch_tokens: int = 4096,
    dtype: torch.dtype = torch.float16,
    progress: bool = True,
) -> CachedExamples:
    """Runs the target over examples and stores the states that training reads; shards that exist are kept.

    The processes of a distributed run begin at different shards, and make what they find missing.

    Args:
        target (`PreTrainedModel`): the target.
        examples (list of `dict`): from [`~hf_dspark.training.data.read_examples`].
        layer_ids (`list[int]`): the drafter's `target_layer_ids`.
        folder (`str` or `Path`): made if it does not exist; every machine may have its own.
        batch_tokens (`int`, defaults to 4096): tokens of a forward, padding included.
        dtype (`torch.dtype`, defaults to `torch.float16`): of the stored states.
        progress (`bool`, defaults to `True`): whether to show a progress bar.

    Returns:
        [`CachedExamples`].

    Raises:
        ValueError: a shard in the folder belongs to other text, another target or other layers; or a state does not fit
            into `dtype`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    distributed = dist.is_available() and dist.is_initialized()
    rank, processes = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    starts = list(range(0, len(examples), _EXAMPLES_PER_SHARD))
    first = len(starts) * rank // processes
    order, unit = starts[first:] + starts[:first], f" × {_EXAMPLES_PER_SHARD} answers"
    for start in tqdm(order, desc="target states", unit=unit, disable=not progress or rank > 0):
        part = examples[start : start + _EXAMPLES_PER_SHARD]
        fingerprint = _fingerprint(target, part, layer_ids, dtype)
        path = _shard_path(folder, start // _EXAMPLES_PER_SHARD)
        if path.exists():
            _check_shard(path, fingerprint)
        else:
            tensors = _states(target, part, layer_ids, start, batch_tokens, dtype)
            temporary = path.with_suffix(f".tmp{rank}")
            save_file(tensors, temporary, metadata={"fingerprint": fingerprint})
            os.replace(temporary, path)
    return CachedExamples(folder, examples)


def captured_states(
    target: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, layer_ids: list[int]
) -> tuple[Tensor, Tensor]:
    """The states a drafter reads `(B, S, m · target_hidden_size)`, and those behind the target's last norm `(B, S, D)`."""
    with torch.no_grad():
        states = target.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            output_hidden_states=[layer + 1 for layer in layer_ids],
            use_cache=False,
        )
    return torch.cat([states.hidden_states[layer + 1] for layer in layer_ids], dim=-1), states.last_hidden_state


def _states(
    target: PreTrainedModel,
    examples: list[dict[str, Any]],
    layer_ids: list[int],
    first: int,
    batch_tokens: int,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The tensors of a shard: neighbours in length share a forward, so that little of it is padding."""
    tensors = {}
    order = sorted(range(len(examples)), key=lambda index: len(examples[index]["input_ids"]))
    while order:
        longest = len(examples[order[-1]]["input_ids"])
        count = max(1, batch_tokens // longest)
        order, chosen = order[:-count], order[-count:]
        batch = collate([examples[index] for index in chosen], pad_token_id=0)
        found = captured_states(
            target, batch["input_ids"].to(target.device), batch["attention_mask"].to(target.device), layer_ids
        )
        for name, values in zip(CACHED_STATES, found, strict=True):
            for index, row in zip(chosen, values, strict=True):
                stored = row[: len(examples[index]["input_ids"])].to("cpu", dtype, copy=True)
                if not bool(stored.isfinite().all()):
                    raise ValueError(
                        f"a state of the target does not fit into {dtype}; cache in torch.bfloat16 or torch.float32, or "
                        "train without a cache."
                    )
                tensors[f"{first + index}.{name}"] = stored
    return tensors


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"states-{shard:05d}.safetensors"


def _fingerprint(target: PreTrainedModel, examples: list[dict[str, Any]], layer_ids: list[int], dtype: torch.dtype) -> str:
    """Tells apart texts, layers and targets; of a target's weights, a few values of its embedding."""
    sample = target.get_input_embeddings().weight.detach().flatten()[:64].float().tolist()
    config = target.config.get_text_config(decoder=True)
    shape = [config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size]
    facts = [[example["input_ids"] for example in examples], layer_ids, str(dtype), shape, sample]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _check_shard(path: Path, fingerprint: str) -> None:
    try:
        with safe_open(path, framework="pt") as shard:
            found = (shard.metadata() or {}).get("fingerprint")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to have it made anew.") from error
    if found != fingerprint:
        raise ValueError(
            f"{path} holds states of other text, of another target or of other layers. Name another folder, or delete this one."
        )
