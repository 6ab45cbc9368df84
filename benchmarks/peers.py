"""DSpark against what transformers offers without it, on the embedded default, one prompt at a time.

    python benchmarks/peers.py --prompts ../shared/prompts --count 3 --output benchmarks/results/peers.json

Plain decoding, prompt lookup, DSpark with every drafted token verified, and DSpark with its scheduler: every prompt is decoded
by all of them in turn, in an order that rotates, greedily, by the same target. Quoted are seconds per token against plain
decoding and whether the text is the same. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter

from common import about, add_options, chosen_prompts, save
from transformers.utils import logging

from hf_dspark import LoadProfile, pack_linears
from hf_dspark.demo import load_default
from hf_dspark.evaluation import encode_prompts, match_texts

METHODS = ("plain", "prompt lookup", "DSpark, all verified", "DSpark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, count=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--lookup-tokens", type=int, default=10, help="draft length of prompt lookup, its default")
    parser.add_argument("--packed", action="store_true", help="pre-pack the target's linears first")
    arguments = parser.parse_args()

    logging.set_verbosity_error()
    prompts = chosen_prompts(arguments)
    target, tokenizer, drafter = load_default()
    if arguments.packed:
        pack_linears(target)
    drafter.load_profile = LoadProfile.measure(target, drafter)
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    extras = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": arguments.lookup_tokens},
        "DSpark, all verified": {"assistant_model": drafter},
        "DSpark": {"assistant_model": drafter},
    }
    per_token: dict[str, list[float]] = {method: [] for method in METHODS}
    matches: dict[str, Counter[str]] = {method: Counter() for method in METHODS}
    taus: dict[str, list[float]] = {method: [] for method in METHODS}
    for number, prompt in enumerate(prompts):
        inputs = encode_prompts(tokenizer, [prompt])
        length = inputs["input_ids"].shape[1]
        texts = {}
        for method in METHODS[number % len(METHODS) :] + METHODS[: number % len(METHODS)]:
            drafter.scheduling = "full" if method == "DSpark, all verified" else None
            started = time.perf_counter()
            texts[method] = target.generate(**inputs, **options, **extras[method])[0]
            per_token[method].append((time.perf_counter() - started) / (len(texts[method]) - length))
            if "assistant_model" in extras[method]:
                taus[method].append(drafter.statistics.tau)
        for method, text in texts.items():
            matches[method][match_texts(target, texts["plain"], text, inputs["attention_mask"][0])] += 1
        print(f"{number + 1} of {len(prompts)}", file=sys.stderr, flush=True)

    rows = []
    for method in METHODS:
        ratios = [plain / own for plain, own in zip(per_token["plain"], per_token[method], strict=True)]
        rows.append(
            {
                "method": method,
                "ratio_median": statistics.median(ratios),
                "ratio_mean": sum(per_token["plain"]) / sum(per_token[method]),
                "tau": statistics.mean(taus[method]) if taus[method] else None,
                "match": dict(matches[method]),
            }
        )
        tau = f"tau {rows[-1]['tau']:.2f}" if taus[method] else ""
        print(
            f"{method:<22} median {rows[-1]['ratio_median']:.2f} mean {rows[-1]['ratio_mean']:.2f} {tau:<9} {rows[-1]['match']}"
        )
    report = {
        **about(),
        "prompts": len(prompts),
        "packed": arguments.packed,
        "rows": rows,
    }
    save(report, arguments)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
