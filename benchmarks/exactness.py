"""Greedy text of the embedded default with and without its drafter, in every scheduling mode, at batch 1 and 8.

    python benchmarks/exactness.py --prompts ../shared/prompts --max-new-tokens 24 --batch-sizes 8 \\
        --output benchmarks/results/exactness_batch_8.json
    python benchmarks/exactness.py --prompts ../shared/prompts --max-new-tokens 16 --batch-sizes 1 \\
        --output benchmarks/results/exactness_batch_1.json

Counts texts that are the same, that part at a float32 near-tie (the target's two best logits within 1e-3), and that differ; a
text that differs is a bug. A jagged load profile makes sure that drafts really are shortened. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from common import about, add_options, chosen_prompts, save
from transformers.utils import logging

from hf_dspark import LoadProfile
from hf_dspark.candidate_generator import SCHEDULING_MODES
from hf_dspark.demo import load_default
from hf_dspark.evaluation import encode_prompts, match_texts

# Relative costs of a forward by its number of tokens, jagged like a processor's.
PROFILE = LoadProfile({1: 20.0, 2: 12.0, 3: 10.0, 4: 11.0, 5: 12.5, 6: 11.5, 8: 11.0, 16: 9.5, 32: 7.0, 64: 4.5}, 0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, count=10)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--modes", nargs="+", default=["default", *SCHEDULING_MODES])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--head-candidates", type=int, help="tokens that the sequential head chooses among; all when not given")
    arguments = parser.parse_args()

    logging.set_verbosity_error()
    prompts = chosen_prompts(arguments)
    target, tokenizer, drafter = load_default()
    drafter.load_profile, drafter.head_candidates = PROFILE, arguments.head_candidates
    counts: dict[str, Counter[str]] = {}
    lengths: dict[str, list[float]] = {}
    for batch_size in arguments.batch_sizes:
        for start in range(0, len(prompts), batch_size):
            inputs = encode_prompts(tokenizer, prompts[start : start + batch_size])
            options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
            plain = target.generate(**inputs, **options)
            for mode in arguments.modes:
                drafter.scheduling = None if mode == "default" else mode
                drafted = target.generate(**inputs, **options, assistant_model=drafter)
                key = f"batch {batch_size}, {mode}"
                counts.setdefault(key, Counter()).update(
                    match_texts(target, plain[row], drafted[row], inputs["attention_mask"][row], tokenizer.pad_token_id)
                    for row in range(len(plain))
                )
                lengths.setdefault(key, []).append(drafter.statistics.tau)
    results = {key: dict(counter) | {"tau": round(sum(lengths[key]) / len(lengths[key]), 3)} for key, counter in counts.items()}
    for key, counter in results.items():
        print(f"{key:<24} {counter}")
    report = {**about(), "prompts": len(prompts), "max_new_tokens": arguments.max_new_tokens, "results": results}
    save(report, arguments)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
