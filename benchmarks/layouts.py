"""Verification of rows of different lengths, padded against packed: ratio of their processor times, by number of rows.

    python benchmarks/layouts.py --output benchmarks/results/layouts.json

The embedded default target verifies R rows behind contexts of random lengths; the draft lengths are geometric and cut at K = 5.
Both layouts run one after the other, in turns, on the same rows, tokens and cache, with one thread, and are timed by the
processor time that they use, so that other work on the machine says little. Reported are medians of the single ratios: what
they say of many threads or of an accelerator is only that packing does less work. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from common import about, save
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from hf_dspark.demo import load_target
from hf_dspark.target import TargetForward

BLOCK = 5  # K


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 3, 4, 8, 16, 32])
    parser.add_argument("--mean-lengths", type=float, nargs="+", default=[1.5], help="before they are cut at K")
    parser.add_argument("--context", type=int, default=64, help="longest context, in tokens; the shortest has half of it")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    target, _ = load_target()
    results: dict = {
        **about(),
        "measured": "processor time of one verification forward, padded / packed, one thread; above 1 packed is faster",
        "results": [],
    }
    for rows in arguments.rows:
        for mean in arguments.mean_lengths:
            result = compare(target, rows, mean, arguments.context, arguments.repeats)
            results["results"].append(result)
            print(result, flush=True)
            save(results, arguments)
    print(json.dumps(results))


@torch.no_grad()
def compare(target, rows: int, mean: float, context: int, repeats: int) -> dict:
    """Times both layouts on drafts of `rows` rows, a new draw of lengths in every repeat."""
    torch.manual_seed(0)
    vocabulary = target.config.vocab_size
    prompts = torch.randint(vocabulary, (rows, context))
    inputs = {"cache": DynamicCache(config=target.config), "position_ids": torch.arange(context)[None], "logits_to_keep": 1}
    forward = TargetForward(target, GenerationConfig(), [0], inputs)
    forward.prefill(prompts, lambda *states: None)
    draws, seconds = [], {True: [], False: []}
    for repeat in range(repeats + 1):
        slots = torch.randint(context // 2, context + 1, (rows,)).tolist()
        chance = 1 / (1 + mean)
        lengths = torch.distributions.Geometric(torch.full((rows,), chance)).sample().long().clamp(max=BLOCK).tolist()
        if len(set(lengths)) == 1:  # nothing to pack
            lengths[0] = (lengths[0] + 1) % (BLOCK + 1)
        tokens = torch.randint(vocabulary, (rows, 1 + max(lengths)))
        sequences = [prompt[:slot] for prompt, slot in zip(prompts, slots, strict=True)]
        spent = {}
        for packed in (True, False) if repeat % 2 else (False, True):
            forward.packs = packed
            start = time.process_time()
            forward.verify(sequences, tokens, slots, lengths)
            spent[packed] = time.process_time() - start
        if repeat:  # the first warms up
            draws.append((rows + sum(lengths), tokens.numel(), round(spent[False] / spent[True], 3)))
            for packed, time_spent in spent.items():
                seconds[packed].append(time_spent)
    packed_tokens, padded_tokens, ratios = zip(*draws, strict=True)
    return {
        "rows": rows,
        "mean_length": mean,
        "tokens_packed": median(packed_tokens),
        "tokens_padded": median(padded_tokens),
        "ratio_median": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "milliseconds_packed": round(1e3 * median(seconds[True]), 1),
        "milliseconds_padded": round(1e3 * median(seconds[False]), 1),
        "draws": draws,  # tokens packed, tokens padded, ratio
    }


if __name__ == "__main__":
    main()
