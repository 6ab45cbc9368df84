"""From conversations to padded batches of tokens with a mask on the target's own answers.

Conversations come from JSONL files or from data sets of the hub. A record is `{"messages": [...]}` whose last message is the
assistant's. Where it carries `answer_ids`, the very tokens the target produced, they are used as they are: re-tokenising
an answer does not always give back the tokens it was made of.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

CACHED_STATES = ("context_states", "last_states")  # of a target, beside the tokens of an example


def read_records(source: str | Path, accepts: Callable[[Any], bool], expected: str) -> Iterator[dict[str, Any]]:
    """Reads a JSONL file, or a data set where there is no such file, and refuses the first record not as expected.

    Args:
        source (`str` or `Path`): a JSONL file, one JSON value a line, UTF-8, empty lines skipped; or what
            `datasets.load_dataset` takes, a repo id or a folder, with the split after a colon (`"train"` when not given)
            and a configuration before that: `name`, `name:split`, `name:configuration:split`, `name:train[:1000]`.
        accepts (callable): whether a value is of the expected form.
        expected (`str`): that form in words, for the message.

    Yields:
        `dict`: each record; columns of a data set that are empty in a record are left out.

    Raises:
        ValueError: a record is not of that form; the message says which.
        FileNotFoundError: the name ends in `.jsonl` and there is no such file.
        ImportError: it is no file, and the package `datasets` is not installed.
    """
    is_file = str(source).endswith((".json", ".jsonl")) or Path(source).is_file()
    for place, record, found in _lines(source) if is_file else _rows(str(source)):
        if not accepts(record):
            found = found if len(found) <= 80 else found[:80] + "…"
            raise ValueError(f"{source}, {place}: expected {expected}, got: {found}")
        yield record


def _lines(path: str | Path) -> Iterator[tuple[str, Any, str]]:
    """Place, value (`None` if it is no JSON) and text of each line of a JSONL file."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:  # not JSON, or not UTF-8
                record = None
            yield f"line {number}", record, line.decode("utf-8", "replace").strip()


def _rows(name: str) -> Iterator[tuple[str, Any, str]]:
    """Place, values and text of each row of a data set."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{name} is not a file, and reading it as a data set needs datasets: in a clone, pip install '.[datasets]'."
        ) from error
    # A colon inside brackets belongs to a split such as train[:1000].
    parts = re.fullmatch(r"([^:]+)(?::([^:\[]+)(?=:))?(?::(.+))?", name)
    if parts is None:
        raise ValueError(f"a data set is named as NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT, got {name!r}.")
    repo, config, split = parts.groups()
    for number, row in enumerate(load_dataset(repo, config, split=split or "train")):
        record = {column: value for column, value in row.items() if value is not None}
        yield f"row {number}", record, f"columns {', '.join(record)}"


def is_conversation(messages: Any) -> bool:
    """Whether a value is a non-empty list of messages with a role and a text each."""
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
            for message in messages
        )
    )


def read_prompts(source: str | Path) -> Iterator[list[dict[str, str]]]:
    """Conversations that wait for an answer.

    Args:
        source (`str` or `Path`): JSONL file or data set, see [`read_records`], of `{"messages": [...]}`, the latter
            without an answer, or `{"prompt": str}`, which counts where both are given.

    Yields:
        `list[dict[str, str]]`: the messages of each record.

    Raises:
        ValueError: a record is of neither form; the message says which.
    """

    def accepts(record: Any) -> bool:
        if not isinstance(record, dict):
            return False
        if isinstance(record.get("prompt"), str):
            return True
        return is_conversation(record.get("messages")) and record["messages"][-1]["role"] != "assistant"

    for record in read_records(source, accepts, '{"prompt": "..."} or {"messages": [...]} that ends before the answer'):
        prompt = record.get("prompt")
        yield [{"role": "user", "content": prompt}] if isinstance(prompt, str) else record["messages"]


def _is_answered(record: Any, vocab_size: int) -> bool:
    if not isinstance(record, dict) or not is_conversation(record.get("messages")):
        return False
    answer_ids = record.get("answer_ids", [])
    if not isinstance(answer_ids, list) or any(type(token) is not int or not 0 <= token < vocab_size for token in answer_ids):
        return False
    return len(record["messages"]) > 1 and record["messages"][-1]["role"] == "assistant"


def read_examples(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 1024,
    chat_template_kwargs: dict | None = None,
) -> list[dict[str, Any]]:
    """Reads and tokenises conversations.

    Args:
        source (`str` or `Path`): JSONL file or data set, see [`read_records`], of records with `messages` and optionally
            `answer_ids`; where these are missing, `"finished": false` says that the answer was cut and no end of turn
            follows.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template.
        max_length (`int`, defaults to 1024): longer conversations are cut at their end.
        chat_template_kwargs (`dict`, *optional*): passed to the template, e.g. `{"enable_thinking": False}`.

    Returns:
        `list[dict]`: `input_ids` (`list[int]`) and `prompt_length` (`int`), the number of tokens before the answer;
            records with less than two tokens of answer are left out.

    Raises:
        ValueError: a record is not of that form, or none is usable.
    """
    examples = []
    expected = (
        '{"messages": [..., {"role": "assistant", "content": "..."}]}, a conversation that ends with an answer of the '
        f'target, optionally with "answer_ids": [...], token ids below {len(tokenizer)}'
    )
    for record in read_records(source, lambda record: _is_answered(record, len(tokenizer)), expected):
        *prompt, answer = record["messages"]
        prompt_ids = render_prompt(tokenizer, prompt, chat_template_kwargs)
        answer_ids = record.get("answer_ids")
        if answer_ids is None:
            answer_ids = tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
            if record.get("finished", True) and tokenizer.eos_token_id is not None:
                answer_ids = [*answer_ids, tokenizer.eos_token_id]
        ids = [*prompt_ids, *answer_ids][:max_length]
        if len(ids) - len(prompt_ids) >= 2:
            examples.append({"input_ids": ids, "prompt_length": len(prompt_ids)})
    if not examples:
        raise ValueError(
            f"{source}: no conversation with an answer of at least two tokens within {max_length} tokens. Raise the "
            "longest length (--max-length), or check that these are answered conversations."
        )
    return examples


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], chat_template_kwargs: dict | None = None
) -> list[int]:
    """Token ids of a conversation up to the point where the assistant answers."""
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **(chat_template_kwargs or {})
    )
    return list(encoded["input_ids"])


def end_last_line(path: str | Path) -> None:
    """Gives the last line of a JSONL file its end if it has none, so that others can follow it."""
    if not Path(path).exists():
        return
    with open(path, "rb+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def token_list(ids: int | list[int] | None) -> list[int]:
    """Token ids of a configuration field that holds one, several or none."""
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]


def most_used_tokens(examples: Iterable[dict[str, Any]], size: int, always: Iterable[int] = ()) -> Tensor:
    """The draft vocabulary: the tokens that answers use most.

    Args:
        examples (iterable of `dict`): from `read_examples`.
        size (`int`): tokens wanted; filled up with the lowest other ids when the answers use fewer.
        always (iterable of `int`): tokens to include in any case, such as the end of a turn.

    Returns:
        `torch.LongTensor` of shape `(size,)`, ascending.
    """
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example["input_ids"][example["prompt_length"] :])
    ranked = [token for token, _ in counts.most_common()]
    # Among as many lowest ids as are wanted in all, enough are left to fill up with.
    chosen = list(dict.fromkeys([*always, *ranked, *range(size)]))[:size]
    return torch.tensor(sorted(chosen))


def collate(examples: list[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Right-pads examples to `input_ids`, `attention_mask` and `loss_mask`, each `(B, S)`; cached states to `(B, S, ·)`."""
    length = max(len(example["input_ids"]) for example in examples)
    input_ids = torch.full((len(examples), length), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(len(examples), length, dtype=torch.long)
    loss_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        end = len(example["input_ids"])
        input_ids[row, :end] = torch.tensor(example["input_ids"])
        attention_mask[row, :end] = 1
        loss_mask[row, example["prompt_length"] : end] = True
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
    for name in CACHED_STATES:
        if name in examples[0]:
            batch[name] = pad_sequence([example[name] for example in examples], batch_first=True)
    return batch


class LengthGroupedSampler(Sampler):
    """Batches of like length in random order, so that little of them is padding.

    As much is saved as by packing several examples into a row, while attention stays plain. The host's sampler of this name
    draws from whatever state the random numbers are in, and a run that is resumed gets other batches; here an epoch's order
    depends on seed and epoch alone.

    Args:
        lengths (`list[int]`): tokens of each example.
        batch_size (`int`): examples of a batch.
        seed (`int`): of the order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the host's loop before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        window = 50 * self.batch_size  # sorting all at once would make the same batches in every epoch
        for start in range(0, len(self), window):
            order[start : start + window] = sorted(order[start : start + window], key=self.lengths.__getitem__)
        batches = list(torch.tensor(order).split(self.batch_size))
        last = [batches.pop()] if len(batches[-1]) < self.batch_size else []  # an incomplete batch stays the last one
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        return iter(torch.cat(shuffled + last).tolist())
