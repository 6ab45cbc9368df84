"""Prompts that the target makes up itself, for those who have none to train on.

A chat model has learnt what users write as well as what it answers: given its template up to where a user's text begins, it
writes one. Such prompts lie where the target expects its users, cost nothing but its time, and belong to nobody.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import end_last_line, read_prompts, token_list
from .regenerate import Request, answer_requests

_MARK = "Xq7vJ2kZ"  # stands for the user's text in a rendered template; nothing a template would write itself
_GRAM = 4
_MAX_REPEATED = 0.3  # share of 4-grams that occur before in the same text


def synthesize_file(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_path: str | Path,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 50,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    seed: int = 0,
    chat_template_kwargs: dict | None = None,
) -> dict[str, int]:
    """Lets the target write user turns until a file holds as many as wanted.

    Thrown away are turns that were cut at `max_new_tokens`, are empty, repeat themselves, or are there already (apart from
    case and spaces).

    Args:
        target (`PreTrainedModel`): a chat model, on the device it will run on.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        output_path (`str` or `Path`): JSONL of `{"prompt": str}`; an existing file is continued.
        count (`int`): prompts wanted in the file.
        temperature (`float`, defaults to 1.0): above 0.
        top_k (`int`, defaults to 50): tokens to sample from.
        max_new_tokens (`int`, defaults to 128): longest prompt, in tokens.
        batch_size (`int`, defaults to 64): prompts written at the same time.
        seed (`int`, defaults to 0): seed of the sampling; a file that is continued goes on from another one.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.

    Returns:
        `dict[str, int]`: how many were `"written"` now, and how many were `"cut"`, `"empty"`, `"repetitive"` or
        `"duplicate"`. At most four attempts per prompt wanted are made.

    Raises:
        ValueError: the temperature is 0, the file is not of that form, or the chat template hides where a user's text
            stands.
    """
    if temperature <= 0:
        raise ValueError(f"`temperature` must be above 0, got {temperature}: greedy decoding writes one prompt only.")
    output_path = Path(output_path)
    prefix, end = user_turn(tokenizer, chat_template_kwargs)
    known = set()
    if output_path.exists():
        known = {_plain(conversation[-1]["content"]) for conversation in read_prompts(output_path)}
    missing, start = count - len(known), len(known)
    counts = Counter(dict.fromkeys(("written", "cut", "empty", "repetitive", "duplicate"), 0))
    if missing <= 0:
        return dict(counts)
    turns = answer_requests(
        target,
        (Request(prefix, temperature) for _ in range(4 * missing)),
        eos_token_ids=[*end, *token_list(target.generation_config.eos_token_id), *token_list(tokenizer.eos_token_id)],
        max_new_tokens=max_new_tokens,
        batch_size=min(batch_size, 4 * missing),
        top_k=top_k,
        seed=seed + start,
    )
    end_last_line(output_path)
    with open(output_path, "ab", buffering=0) as file, tqdm(total=missing, unit="prompt") as progress:
        for text, verdict in _judged(turns, tokenizer, known):
            counts[verdict] += 1
            if verdict != "written":
                continue
            file.write(json.dumps({"prompt": text}).encode() + b"\n")
            progress.update()
            if counts["written"] == missing:
                break
    return dict(counts)


def user_turn(tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict | None = None) -> tuple[list[int], list[int]]:
    """Tokens up to where the first user's text begins, and the token that ends it (none where the template has no end).

    Raises:
        ValueError: the template does not show the text as it is.
    """
    rendered: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=False, **(chat_template_kwargs or {})
    )
    before, mark, after = rendered.partition(_MARK)
    if not mark:
        raise ValueError("the chat template does not show a user's text as it is, so none can be asked for.")
    prefix = tokenizer(before, add_special_tokens=False)["input_ids"]
    return list(prefix), list(tokenizer(after, add_special_tokens=False)["input_ids"])[:1]


def _judged(
    turns: Iterator[tuple[Request, list[int], bool]], tokenizer: PreTrainedTokenizerBase, known: set[str]
) -> Iterator[tuple[str, str]]:
    """Texts with `"written"` or what is wrong with them; `known` grows by those that are fine."""
    for _, ids, finished in turns:
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        if not finished:
            verdict = "cut"
        elif not text:
            verdict = "empty"
        elif is_repetitive(ids):
            verdict = "repetitive"
        elif _plain(text) in known:
            verdict = "duplicate"
        else:
            verdict = "written"
            known.add(_plain(text))
        yield text, verdict


def is_repetitive(ids: list[int]) -> bool:
    """Whether more than three in ten of a text's runs of four tokens occur in it before."""
    grams = [tuple(ids[start : start + _GRAM]) for start in range(len(ids) - _GRAM + 1)]
    return len(grams) > 0 and 1 - len(set(grams)) / len(grams) > _MAX_REPEATED


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
