"""Answers of the target, in bulk: the text a drafter is trained on.

A drafter learns what *this* target says, so its training text must be the target's own (off-policy text costs a third
of the acceptance, arXiv 2607.05147, section on training). Plain `generate` holds a batch until its longest row is done;
here a finished row leaves at once and the next request takes its place in the cache, so the matrix kernels always see a
full batch.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import SlotCache
from ..target import ragged_mask, refuse_unplaced_rows
from .data import end_last_line, is_conversation, read_prompts, read_records, render_prompt, token_list

_INSTEAD = 'write its answers with `target.generate`, as {"messages": [...]} lines'


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Args:
        prompt_ids (`list[int]`): the rendered prompt.
        temperature (`float`, defaults to 1.0): 0 is greedy.
        key (`Any`, *optional*): handed back with the answer.
    """

    prompt_ids: list[int]
    temperature: float = 1.0
    key: Any = field(default=None, compare=False)


def regenerate_file(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts_path: str | Path,
    output_path: str | Path,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int = 50,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    chat_template_kwargs: dict | None = None,
) -> int:
    """Answers the prompts of a file or a data set, or those that an earlier call has not come to.

    Every answer is appended as one line, `{"messages": [..., answer], "answer_ids", "temperature", "finished",
    "sample"}`. Prompt and sample number say which answers are there already, whatever the settings they were written
    with; a last line without its end, left by a process that was killed, is removed first.

    Args:
        target (`PreTrainedModel`): the target, on the device it will run on.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        prompts_path (`str` or `Path`): JSONL file or data set of prompts, see [`~hf_dspark.training.data.read_prompts`].
            A prompt that occurs twice gets twice as many answers.
        output_path (`str` or `Path`): JSONL to write or to continue; what [`~hf_dspark.training.data.read_examples`]
            reads.
        samples (`int`, defaults to 1): answers per prompt.
        temperature (`float`, defaults to 1.0): 0 is greedy.
        top_k (`int`, defaults to 50): tokens to sample from.
        max_new_tokens (`int`, defaults to 256): longest answer, in tokens.
        batch_size (`int`, defaults to 64): answers written at the same time.
        seed (`int`, defaults to 0): seed of the sampling.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.

    Returns:
        `int`: answers added.

    Raises:
        ValueError: a record of either is not of its form, or a prompt leaves no room for an answer.
    """
    conversations = list(read_prompts(prompts_path))
    done = _read_done(Path(output_path))
    requests, numbers = [], Counter[str]()
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for messages in conversations:
        prompt = json.dumps(messages)
        prompt_ids = render_prompt(tokenizer, messages, chat_template_kwargs)
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            raise ValueError(
                f"{prompts_path}: a prompt has {len(prompt_ids)} tokens, which leaves no room for {max_new_tokens} "
                f"more in the target's {limit} positions. Leave it out or lower max_new_tokens (--max-new-tokens). It "
                f"starts with {prompt[:80]}"
            )
        for sample in range(numbers[prompt], numbers[prompt] + samples):
            if (prompt, sample) not in done:
                requests.append(Request(prompt_ids, temperature, (messages, sample)))
        numbers[prompt] += samples

    answers = answer_requests(
        target,
        _by_length(requests, 16 * batch_size),
        eos_token_ids=token_list(target.generation_config.eos_token_id) + token_list(tokenizer.eos_token_id),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        top_k=top_k,
        seed=seed + len(done),  # further samples of a prompt must not repeat the earlier ones
    )
    tokens, started = 0, time.perf_counter()
    end_last_line(output_path)
    with open(output_path, "ab", buffering=0) as file, tqdm(total=len(requests), unit="answer") as progress:
        for request, answer_ids, finished in answers:
            messages, sample = request.key
            content = tokenizer.decode(answer_ids, skip_special_tokens=True)
            record = {
                "messages": [*messages, {"role": "assistant", "content": content}],
                "answer_ids": answer_ids,
                "temperature": request.temperature,
                "finished": finished,
                "sample": sample,
            }
            file.write(json.dumps(record).encode() + b"\n")  # unbuffered: one write a line
            tokens += len(answer_ids)
            progress.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
            progress.update()
    return len(requests)


def _read_done(path: Path) -> set[tuple[str, int]]:
    """Prompt and sample number of each answer in an output file; a torn last one is cut off, in a file of nothing else."""
    if not path.exists():
        return set()

    def accepts(record: Any) -> bool:
        return isinstance(record, dict) and is_conversation(record.get("messages"))

    records = []
    try:
        for record in read_records(path, accepts, 'an earlier answer, {"messages": [...], "sample": ...}'):
            records.append(record)
    except ValueError:
        whole, begins = path.read_bytes(), b'{"messages": '
        *lines, last = whole.split(b"\n")
        torn = last.startswith(begins) or begins.startswith(last)
        if not last or not torn or len(records) < sum(bool(line.strip()) for line in lines):
            raise
        os.truncate(path, len(whole) - len(last))
    return {(json.dumps(record["messages"][:-1]), record.get("sample", 0)) for record in records}


def _by_length(requests: list[Request], window: int) -> Iterator[Request]:
    """Requests with neighbours of similar length: a forward costs as much for every row as for its longest one.

    Sorted within windows only, so that what an interrupted run leaves is a fair part of the file; every second window
    runs backwards, so that there is no jump from the longest to the shortest.
    """
    for start in range(0, len(requests), window):
        part = sorted(requests[start : start + window], key=lambda request: (len(request.prompt_ids), request.prompt_ids))
        yield from part if (start // window) % 2 == 0 else reversed(part)


@torch.inference_mode()
def answer_requests(
    target: PreTrainedModel,
    requests: Iterable[Request],
    *,
    eos_token_ids: Iterable[int],
    max_new_tokens: int = 256,
    batch_size: int = 64,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[tuple[Request, list[int], bool]]:
    """Answers requests with the target alone, as many at a time as `batch_size`.

    Consecutive requests with the same prompt share one prefill.

    Args:
        target (`PreTrainedModel`): a decoder-only model with full or sliding attention, eager or SDPA.
        requests (iterable of [`Request`]): consumed lazily.
        eos_token_ids (iterable of `int`): tokens that end an answer (kept as its last token).
        max_new_tokens (`int`, defaults to 256): longest answer, in tokens.
        batch_size (`int`, defaults to 64): rows per forward.
        top_k (`int`, defaults to 50): sampling is restricted to this many tokens; ignored where the temperature is 0.
        seed (`int`, defaults to 0): seed of the sampling.

    Yields:
        `(request, answer_ids, finished)` in order of completion; `finished` is False when cut at `max_new_tokens`.

    Raises:
        ValueError: the target's attention cannot run rows of different lengths.
    """
    refuse_unplaced_rows(target, _INSTEAD)
    stop, waiting = frozenset(eos_token_ids), iter(requests)
    generator = torch.Generator(target.device).manual_seed(seed)
    cache = SlotCache(target.config, batch_size)
    idle = _Row(Request([], 0.0), [0])
    rows = [idle] * batch_size
    prompt: list[int] | None = None
    exhausted = False

    while True:
        for place, row in enumerate(rows):
            if row is not idle or exhausted:
                continue
            if (request := next(waiting, None)) is None:
                exhausted = True
            else:
                if request.prompt_ids != prompt:
                    prompt = request.prompt_ids
                    prefilled, first_logits = _prefill(target, prompt)
                cache.replace_rows(torch.tensor([place], device=target.device), prefilled)
                first = _sample(first_logits, [request.temperature], top_k, generator)
                rows[place] = _Row(request, first)

        for place, row in enumerate(rows):
            finished = row.answer[-1] in stop
            if row is not idle and (finished or len(row.answer) >= max_new_tokens):
                yield row.request, row.answer, finished
                rows[place] = idle
        busy = [place for place, row in enumerate(rows) if row is not idle]
        if not busy:
            if exhausted:
                return
            continue  # every row ended with its first token
        if exhausted and 2 * len(busy) <= len(rows):  # the tail: carry few idle rows along, without copying too often
            cache.select_rows(torch.tensor(busy, device=target.device))
            rows = [rows[place] for place in busy]

        logits = _step(target, cache, rows)
        tokens = _sample(logits, [row.request.temperature for row in rows], top_k, generator)
        for row, token in zip(rows, tokens, strict=True):
            if row is not idle:
                row.answer.append(token)


@dataclass
class _Row:
    """A place in the batch: a request, and its answer as far as it goes. The newest token is not in the cache yet."""

    request: Request
    answer: list[int]

    @property
    def slot(self) -> int:
        """Where the newest token goes in the cache."""
        return len(self.request.prompt_ids) + len(self.answer) - 1


def _prefill(target: PreTrainedModel, prompt_ids: list[int]) -> tuple[SlotCache, Tensor]:
    """A cache of one row that holds the prompt, and the logits `(1, V)` behind it."""
    cache = SlotCache(target.config)
    cache.place(0, len(prompt_ids))
    input_ids = torch.tensor([prompt_ids], device=target.device)
    return cache, target(input_ids=input_ids, cache=cache, logits_to_keep=1).logits[:, -1]


def _step(target: PreTrainedModel, cache: SlotCache, rows: list[_Row]) -> Tensor:
    """Runs the newest token of every row, each at its own slot; logits `(R, V)`."""
    slots = torch.tensor([[row.slot] for row in rows], device=target.device)  # (R, 1)
    length = max(row.slot for row in rows) + 1
    cache.place_rows(slots, length)
    seen = torch.arange(length, device=target.device) <= slots[..., None]  # (R, 1, S): itself and what is before it
    return target(
        input_ids=torch.tensor([row.answer[-1:] for row in rows], device=target.device),
        position_ids=slots,
        attention_mask=ragged_mask(target, slots, seen, _INSTEAD),
        cache=cache,
    ).logits[:, -1]


def _sample(logits: Tensor, temperatures: list[float], top_k: int, generator: torch.Generator) -> list[int]:
    """Next tokens from logits `(R, V)`: top-k sampling, greedy where the temperature is 0."""
    values, indices = logits.float().topk(min(top_k, logits.shape[-1]), dim=-1)  # (R, top_k), best first
    heat = values.new_tensor(temperatures)[:, None]
    chosen = torch.multinomial((values / heat.clamp_min(1e-6)).softmax(-1), 1, generator=generator)
    return indices.gather(1, chosen.masked_fill(heat == 0, 0))[:, 0].tolist()
