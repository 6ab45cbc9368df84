"""`hf-dspark demo`: an answer as it streams, then plain decoding and DSpark side by side on a few prompts."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from ..answering import answer_prompt
from ..evaluation.comparison import compare, summarise
from ..load_profile import LoadProfile
from . import load_default

PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether? Think step by step.",
    "Write a Python function that returns the sum of the even numbers in a list, with a short docstring.",
    "Explain in a few sentences why the sky is blue.",
    "List five tips for someone who wants to learn to cook.",
)


def run_demo(max_new_tokens: int = 128) -> dict[str, Any]:
    """Loads the embedded target and its drafter and shows them at work.

    Args:
        max_new_tokens (`int`, defaults to 128): length of each answer, in tokens.

    Returns:
        `dict`: what [`~hf_dspark.evaluation.summarise`] makes of the comparisons.
    """
    logging.set_verbosity_error()
    print("Loading SmolLM2-135M-Instruct and its drafter ...", flush=True)
    target, tokenizer, drafter = load_default()
    print("Measuring what a forward of 1, 2, ... tokens costs on this machine ...", flush=True)
    drafter.load_profile = LoadProfile.measure(target, drafter)
    steps = drafter.load_profile
    print(
        "  "
        + "   ".join(f"{size} tokens {1e3 * steps.step_seconds(size):.0f} ms" for size in (1, 2, 4, 8, 16))
        + f"   draft {1e3 * steps.draft_seconds:.1f} ms"
    )

    print(f"\n> {PROMPTS[2]}\n")
    answer_prompt(target, tokenizer, drafter, PROMPTS[2], max_new_tokens=max_new_tokens, do_sample=False)
    print(f"\n{drafter.statistics}\n")

    print("Plain decoding and DSpark in turn, greedy:\n")
    print(f"{'prompt':<44} {'plain':>9} {'DSpark':>9} {'ratio':>7} {'tau':>6} {'verified':>9} {'rejected':>9}  text")
    rows = []
    for prompt, row in zip(
        PROMPTS,
        compare(target, tokenizer, drafter, list(PROMPTS), max_new_tokens=max_new_tokens, do_sample=False),
        strict=True,
    ):
        rows.append(row)
        plain, fast = row.plain_tokens / row.plain_seconds, row.dspark_tokens / row.dspark_seconds
        print(
            f"{prompt[:42] + '..':<44} {plain:>5.1f} t/s {fast:>5.1f} t/s {row.ratio:>6.2f}x {row.tau:>6.2f} {row.verified:>9} "
            f"{row.rejected:>9}  {row.match}",
            flush=True,
        )
    total = summarise(rows)
    print(
        f"\nAll prompts: {total['ratio_total']:.2f}x plain decoding, tau {total['tau']:.2f}, texts "
        + ", ".join(f"{count} {name}" for name, count in total["match"].items())
        + f" ({torch.get_num_threads()} threads)."
    )
    return total
