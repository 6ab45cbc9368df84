"""Files of a checkpoint: found, read and written, and trusted with nothing.

A drafter may come from anybody. Only JSON and safetensors are read from its folder, because neither can run code; a
pickle is refused by name. Of the weights the headers come first: every name, dtype and shape is known before a byte of
data is touched, and safetensors has verified by then that the claimed sizes fill the file exactly. So nothing is ever
allocated on a mere claim, and a wrong checkpoint costs milliseconds.

Writing is the mirror image: everything is completed in a hidden folder and then moved into place file by file, so that
a crash leaves the old file or the new one under the final name, never half of one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import tqdm
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import logging

from ..errors import CheckpointError

CONFIG_NAME = "config.json"
LOAD_PROFILE_NAME = "load_profile.json"
DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD_NAME = re.compile(r"[\w.-]{1,200}\.safetensors")  # no separator: a shard lies beside its index or nowhere


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says about a tensor: where it is, and its shape and dtype (`"BF16"`, `"I64"`, …)."""

    file: Path
    name: str  # in that file
    shape: tuple[int, ...]
    dtype: str


class _LateBar(tqdm):
    """A progress bar for downloads that take seconds; what is in the cache already needs none."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"delay": 3, **kwargs})


def find_folder(name_or_path: str | os.PathLike, check: Callable[[Path], object], subfolder: str = "", **hub_kwargs) -> Path:
    """The folder of a checkpoint, downloaded where necessary.

    Args:
        name_or_path (`str` or `os.PathLike`): local folder or Hub repo id.
        check (callable): gets the folder once its small files are there; what it raises spares a download of weights.
        subfolder (`str`, defaults to `""`): folder inside of it that holds the checkpoint.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only` and `force_download` of `snapshot_download`.

    Raises:
        CheckpointError: it is a file, or neither a folder nor a repo id, or has no such subfolder.
    """
    path = Path(name_or_path)
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a drafter is a folder with {CONFIG_NAME} and its weights. Pass that.")
    if not path.is_dir():
        prefix = f"{subfolder}/" if subfolder else ""
        try:
            patterns = [f"{prefix}*.json", f"{prefix}*.md"]
            path = Path(snapshot_download(str(name_or_path), allow_patterns=patterns, tqdm_class=_LateBar, **hub_kwargs))
            check(path / subfolder)
            hub_kwargs["revision"] = path.name  # the commit: the weights belong to the configuration just read
            patterns = [f"{prefix}model*.safetensors"]
            snapshot_download(str(name_or_path), allow_patterns=patterns, tqdm_class=_LateBar, **hub_kwargs)
        except HFValidationError as error:
            raise CheckpointError(
                f"{str(name_or_path)!r} is neither a folder here nor the id of a repository on the Hub ({error}). "
                "Check the spelling."
            ) from error
    if not (path / subfolder).is_dir():
        raise CheckpointError(f"{path} has no folder {subfolder!r}. Check `subfolder`.")
    return path / subfolder


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON object.

    Raises:
        CheckpointError: the file is missing, is not JSON, holds a key twice or a number that is none, or is no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing. Pass the folder that the drafter was saved to.") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, NaN
        raise CheckpointError(f"{path.name} cannot be read as JSON ({error}). Fetch the file again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object, got a {type(content).__name__}. Fetch it again.")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"`{next(name for name in names if names.count(name) > 1)}` is there twice")
    return content


def read_headers(folder: Path, variant: str | None = None) -> dict[str, TensorHeader]:
    """Headers of all tensors in `model.safetensors`, or in the shards that its index names.

    Args:
        folder (`Path`): the checkpoint.
        variant (`str`, *optional*): the `fp16` of `model.fp16.safetensors`.

    Raises:
        CheckpointError: there are no weights, only a pickle, or two sets; a file is damaged; index and shards disagree.
    """
    single, index, _ = _weight_names(variant)
    if (folder / single).is_file() and (folder / index).is_file():
        raise CheckpointError(f"{single} and {index} both hold weights: one of them is left over. Remove it.")
    if (folder / single).is_file():
        return _file_headers(folder / single)
    if (folder / index).is_file():
        return _shard_headers(folder, index)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"the weights are in a pickle ({pickles[0]}), which can run code when opened; only safetensors is read. "
            "Ask for a safetensors export, or convert the file where you trust it."
        )
    raise CheckpointError(f"no weights: neither {single} nor {index} is there. Pass the folder that holds them.")


def _weight_names(variant: str | None) -> tuple[str, str, re.Pattern[str]]:
    """Names that the host gives to a single file, to an index and to its shards."""
    dotted = f".{variant}" if variant else ""
    shards = re.compile(rf"model{re.escape(dotted)}-\d{{5}}-of-\d{{5}}\.safetensors")
    return f"model{dotted}.safetensors", f"model.safetensors.index{dotted}.json", shards


def _file_headers(file: Path) -> dict[str, TensorHeader]:
    headers = {}
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                view = weights.get_slice(name)
                headers[name] = TensorHeader(file, name, tuple(view.get_shape()), view.get_dtype())
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: too large to be mapped
        raise CheckpointError(
            f"{file.name} is not a complete safetensors file ({error}): cut short, damaged, or only a git-lfs pointer. "
            "Fetch it again."
        ) from error
    return headers


def _shard_headers(folder: Path, index: str) -> dict[str, TensorHeader]:
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: `weight_map` must map tensors to file names. Fetch the index again.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(
                f"{index}: `weight_map` names {shard!r}, which is no .safetensors file of the same folder. It was not "
                "opened: do not trust this checkpoint."
            )
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index} names the shard {shard}, which is missing. Fetch it.")
    headers: dict[str, TensorHeader] = {}
    for shard in shards:
        found = _file_headers(folder / shard)
        strays = sorted(name for name in found if weight_map.get(name) != shard)
        if strays:
            raise CheckpointError(f"{shard} holds {_some(strays)}, which {index} places elsewhere. Fetch both again.")
        headers |= found
    absent = sorted(weight_map.keys() - headers.keys())
    if absent:
        raise CheckpointError(f"{index} places {_some(absent)} in a shard that does not hold it. Fetch both again.")
    return headers


def _some(names: Iterable[str]) -> str:
    """The first three names and how many more there are."""
    names = list(names)
    return ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def read_tensors(headers: dict[str, TensorHeader], names: Iterable[str]) -> dict[str, Tensor]:
    """Reads the named tensors, on the CPU and in the file's dtype.

    The file is mapped, not copied: pages come in when they are first used.

    Raises:
        CheckpointError: the file changed since its header was read.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(headers[name].file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, present in by_file.items():
        with opened(file) as weights:
            tensors |= {name: weights.get_tensor(headers[name].name) for name in present}
    return tensors


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file whose header was read before; `get_tensor` and `get_slice` read from it.

    Raises:
        CheckpointError: it was moved, replaced or damaged in the meantime.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} has changed since it was first read ({error}). Load the drafter again.") from error


def write_text(path: Path, text: str) -> None:
    """Writes a text file completely, or not at all; an existing one is replaced, and folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def is_occupied(folder: Path) -> bool:
    """Whether a folder to write to is anything but new or empty."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


@contextmanager
def replaced_files(folder: Path, variant: str | None = None) -> Iterator[Path]:
    """Gives an empty folder to write a checkpoint to; at the end its files replace those of `folder`, one by one.

    Args:
        folder (`Path`): the checkpoint to write; made if it does not exist, left as it is if the writing fails.
        variant (`str`, *optional*): as in [`read_headers`].

    Yields:
        `Path`: inside `folder`, since only a rename within one file system is atomic, and the parent may be on another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        yield staged
        files = [path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()]
        # The configuration goes last: without one, an unfinished new folder is not mistaken for a drafter.
        written = sorted(files, key=lambda name: (name == CONFIG_NAME, name))
        for name in written:
            with (staged / name).open("r+b") as file:
                os.fsync(file.fileno())  # a rename must not reach the disk before the content does
        for name in written:
            (folder / name).parent.mkdir(exist_ok=True)
            os.replace(staged / name, folder / name)
        single, index, shards = _weight_names(variant)
        if single in written or index in written:
            for name in os.listdir(folder):  # of an earlier save with another number of shards, or with a load profile
                earlier = name in (single, index, LOAD_PROFILE_NAME) or shards.fullmatch(name)
                if earlier and name not in written:
                    (folder / name).unlink()
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def progress_bars_off() -> Iterator[None]:
    """Silences transformers' progress bars and leaves the switch as it was found."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
