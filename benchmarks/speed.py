"""Plain decoding against DSpark on the embedded default: ratio, accepted length and match, per prompt set.

    python benchmarks/speed.py --prompts ../shared/prompts --output benchmarks/results/speed.json

Each prompt is decoded both ways in alternating order by the same target object, as loaded and again with pre-packed linears,
greedy and sampled (temperature 1, top-k 50). The load profile is measured first, for each form of the target. Without
`--prompts` a few built-in prompts are used. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json

from common import about, add_options, chosen_sets, save
from transformers.utils import logging

from hf_dspark import LoadProfile, pack_linears
from hf_dspark.demo import load_default
from hf_dspark.evaluation import SETTINGS, compare, summarise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, count=10)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--forms", nargs="+", default=["as loaded", "packed"], choices=["as loaded", "packed"])
    parser.add_argument("--scheduling", help="mode to force, such as 'full'; the default is the drafter's own")
    arguments = parser.parse_args()

    logging.set_verbosity_error()
    prompts = chosen_sets(arguments)
    target, tokenizer, drafter = load_default()
    drafter.scheduling = arguments.scheduling
    results: dict = {
        **about(),
        "profiles": {},
        "rows": [],
    }
    for form in arguments.forms:
        if form == "packed":
            pack_linears(target)
        profile = drafter.load_profile = LoadProfile.measure(target, drafter)
        results["profiles"][form] = {
            "milliseconds": {str(size): round(1e3 / rate, 1) for size, rate in profile.steps_per_second.items()},
            "draft_milliseconds": round(1e3 * profile.draft_seconds, 1),
        }
        for setting, options in SETTINGS.items():
            for name, texts in prompts.items():
                runs = list(
                    compare(
                        target,
                        tokenizer,
                        drafter,
                        texts,
                        batch_size=arguments.batch_size,
                        max_new_tokens=arguments.max_new_tokens,
                        **options,
                    )
                )
                row = {"target": form, "setting": setting, "prompts": name, **summarise(runs)}
                results["rows"].append(row)
                print(
                    f"{form:<10} {setting} {name:<10} ratio {row['ratio_total']:.2f} (median {row['ratio_median']:.2f}) "
                    f"tau {row['tau']:.2f} verified {row['verified']} rejected {row['rejected']} {row['match']}",
                    flush=True,
                )
                save(results, arguments)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
