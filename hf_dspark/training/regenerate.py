"""Answers of the target, in bulk: the text a drafter is trained on.

A drafter learns what *this* target says, so its training text must be the target's own (off-policy text costs a third of
the acceptance, spec of arXiv 2607.05147). Plain `generate` holds a batch until its longest row is done; here a finished row
leaves at once and the next request takes its place in the cache, so the matrix kernels always see a full batch.
"""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import SlotCache


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


def _sample(logits: Tensor, temperatures: Tensor, top_k: int, generator: torch.Generator) -> Tensor:
    """Next tokens `(R,)` from logits `(R, V)`: top-k sampling, greedy where the temperature is 0."""
    values, indices = logits.float().topk(top_k, dim=-1)  # (R, top_k), best first
    probabilities = (values / temperatures.clamp_min(1e-6)[:, None]).softmax(dim=-1)
    chosen = torch.multinomial(probabilities, 1, generator=generator)
    chosen = torch.where(temperatures[:, None] > 0, chosen, torch.zeros_like(chosen))
    return indices.gather(1, chosen)[:, 0]


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
    """
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    stop = frozenset(eos_token_ids)
    waiting = iter(requests)
    next_request = next(waiting, None)
    window = getattr(target.config.get_text_config(), "sliding_window", None)
    if window is not None and hasattr(target.config.get_text_config(), "layer_types"):
        raise ValueError(
            "answer_requests does not build the several masks that a hybrid sliding-window target needs; generate the "
            "answers with `target.generate` and pass them as messages."
        )

    rows: list[Request | None] = [None] * batch_size
    answers: list[list[int]] = [[] for _ in rows]
    lengths = torch.zeros(batch_size, dtype=torch.long)  # tokens in the cache of each row
    tokens = torch.zeros(batch_size, 1, dtype=torch.long)
    temperatures = torch.zeros(batch_size)
    cache = SlotCache(target.config, batch_size)

    def prefill(request: Request) -> tuple[SlotCache, Tensor]:
        row = SlotCache(target.config)
        row.place(0, len(request.prompt_ids))
        logits = target(input_ids=torch.tensor([request.prompt_ids], device=device), cache=row, logits_to_keep=1).logits
        return row, logits[:, -1]

    shared: tuple[list[int], SlotCache, Tensor] | None = None
    while True:
        for row in [index for index, request in enumerate(rows) if request is None]:
            if next_request is None:
                break
            if shared is None or shared[0] != next_request.prompt_ids:
                shared = (next_request.prompt_ids, *prefill(next_request))
            cache.replace_rows(torch.tensor([row]), shared[1])
            rows[row], answers[row] = next_request, []
            lengths[row], temperatures[row] = len(next_request.prompt_ids), next_request.temperature
            tokens[row] = _sample(shared[2].cpu(), temperatures[row : row + 1], top_k, generator)
            answers[row].append(int(tokens[row]))
            next_request = next(waiting, None)

        for row, request in enumerate(rows):
            if request is not None and (answers[row][-1] in stop or len(answers[row]) >= max_new_tokens):
                yield request, answers[row], answers[row][-1] in stop
                rows[row], lengths[row] = None, 0
        active = torch.tensor([index for index, request in enumerate(rows) if request is not None])
        if len(active) == 0 and next_request is None:
            return
        if next_request is None and len(active) <= len(rows) // 2:  # the tail: do not carry empty rows along
            cache.select_rows(active)
            rows, answers = [rows[i] for i in active.tolist()], [answers[i] for i in active.tolist()]
            lengths, tokens, temperatures = lengths[active], tokens[active], temperatures[active]

        slots = lengths[:, None]  # (R, 1)
        length = int(lengths.max()) + 1
        cache.place_rows(slots, length)
        mask = torch.arange(length)[None, :] <= slots  # (R, S)
        if window is not None:
            mask &= torch.arange(length)[None, :] > slots - window
        logits = target(
            input_ids=tokens.to(device), position_ids=slots.to(device), attention_mask=mask[:, None, None].to(device), cache=cache
        ).logits[:, -1]
        lengths += 1
        tokens = _sample(logits.cpu(), temperatures, top_k, generator)[:, None]
        for row, token in enumerate(tokens[:, 0].tolist()):
            answers[row].append(token)
