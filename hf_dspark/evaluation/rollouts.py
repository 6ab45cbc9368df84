"""Real rollouts of a drafter over sets of prompts: accepted length, acceptance per position, what its confidences are worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import require_extra
from ..modeling_dspark import DSparkDraftModel
from ..training.data import read_prompts
from .comparison import Comparison, compare, encode_prompts, summarise
from .reliability import Block, recorded_blocks, reliability, threshold_sweep

SETTINGS: dict[str, dict[str, Any]] = {
    "T=0": {"do_sample": False},
    "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 1.0},  # whatever the target's own
}


ALL = "all"  # name of the row over all sets


def read_prompt_sets(paths: Sequence[str | Path], count: int | None = None) -> dict[str, list[list[dict[str, str]]]]:
    """Conversations to continue, by the name of their file.

    Args:
        paths (sequence of paths): JSONL files of `{"prompt": str}` or `{"messages": [...]}`, or folders of such.
        count (`int`, *optional*): how many of each file; all when not given.

    Returns:
        `dict[str, list]`: messages of each conversation.

    Raises:
        ValueError: a path holds no JSONL file, two files have one name, one is empty, or a line is not of that form.
    """
    sets = {}
    for path in map(Path, paths):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f'{path}: no .jsonl file in this folder; name one with lines of {{"prompt": ...}}.')
        for file in files:
            if file.stem in sets:
                raise ValueError(f"{file}: there is a file {file.name} before it, and results go by that name; rename one.")
            sets[file.stem] = list(read_prompts(file))[:count]
            if not sets[file.stem]:
                raise ValueError(f'{file} is empty; write lines of {{"prompt": ...}} into it, or leave it out.')
    return sets


def roll_out(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDraftModel,
    prompts: Sequence[Any],
    *,
    batch_size: int = 1,
    seed: int = 0,
    **generate_kwargs: Any,
) -> list[Block]:
    """Answers prompts with every draft verified to its end.

    Args:
        target, tokenizer, drafter: as in [`evaluate`].
        prompts (sequence of `str` or `list[dict]`): user turns, or conversations that end with one.
        batch_size (`int`, defaults to 1): prompts per call.
        seed (`int`, defaults to 0): of sampling.
        generate_kwargs: of `generate`, e.g. `max_new_tokens=128, do_sample=False`.

    Returns:
        `list` of [`Block`]: the drafts.
    """
    torch.manual_seed(seed)
    with recorded_blocks(drafter) as blocks:
        for start in range(0, len(prompts), batch_size):
            inputs = encode_prompts(tokenizer, prompts[start : start + batch_size]).to(target.device)
            target.generate(**inputs, **generate_kwargs, assistant_model=drafter)
    return blocks


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDraftModel,
    prompt_sets: Mapping[str, Sequence[Any]],
    *,
    settings: Mapping[str, dict[str, Any]] = SETTINGS,
    batch_size: int = 1,
    max_new_tokens: int = 128,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Answers prompts plainly and with every draft verified to its end, and says what came of it.

    Args:
        target (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        drafter ([`DSparkDraftModel`]): its drafter.
        prompt_sets (mapping of `str` to sequences): prompts or lists of messages by set, see [`read_prompt_sets`].
        settings (mapping of `str` to `dict`): arguments of `generate` by name; greedy and temperature 1 by default.
        batch_size (`int`, defaults to 1): prompts per call.
        max_new_tokens (`int`, defaults to 128): longest answer, in tokens.
        seed (`int`, defaults to 0): of sampling.

    Yields:
        `dict` per setting and set, and one for all sets of a setting (`prompts` is `"all"`): the values of
        [`~hf_dspark.evaluation.summarise`], `reliability` per position and `thresholds`, see
        [`~hf_dspark.evaluation.reliability`]. The ratio is that of verifying everything; a scheduler does better.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: a set is called `"all"`.
    """
    require_extra("evaluate", "sklearn")
    if ALL in prompt_sets:
        raise ValueError(f"results over all prompts go by the name {ALL!r}; rename the set (the file) of that name.")
    for setting, options in settings.items():
        rows: list[Comparison] = []
        all_blocks: list[Block] = []
        for name, prompts in prompt_sets.items():
            with recorded_blocks(drafter) as blocks:
                found = list(
                    compare(
                        target,
                        tokenizer,
                        drafter,
                        list(prompts),
                        batch_size=batch_size,
                        seed=seed,
                        max_new_tokens=max_new_tokens,
                        **options,
                    )
                )
            yield _report(setting, name, found, blocks, drafter)
            rows += found
            all_blocks += blocks
        if len(prompt_sets) > 1:
            yield _report(setting, ALL, rows, all_blocks, drafter)


def _report(
    setting: str, prompts: str, rows: list[Comparison], blocks: list[Block], drafter: DSparkDraftModel
) -> dict[str, Any]:
    return {
        "setting": setting,
        "prompts": prompts,
        **summarise(rows),
        "reliability": reliability(blocks, drafter.config.num_draft_tokens),
        "thresholds": threshold_sweep(blocks),
    }
