"""What a pass of the target costs on this machine, and what that means for a draft.

    python examples/load_profile.py
    python examples/load_profile.py --target path/or/repo --drafter path/or/repo --output my-drafter/load_profile.json

A profile saved as `load_profile.json` in a drafter's folder is loaded with the drafter.
"""

import argparse

import torch

from hf_dspark import LoadProfile
from hf_dspark.loading import drafter_by_name, target_by_name
from hf_dspark.scheduling import expected_throughput, global_search

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default="default", help="folder or repo id of a drafter for it")
parser.add_argument("--confidence", type=float, default=0.85, help="of every token of the block to plan for")
parser.add_argument("--repeats", type=int, default=5, help="timed passes over all sizes")
parser.add_argument("--output", help="where to save the profile")


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    target, _ = target_by_name(args.target)
    drafter = drafter_by_name(args.drafter, target)

    profile = LoadProfile.measure(target, drafter, repeats=args.repeats)
    print("tokens in a pass, milliseconds:")
    for size, rate in profile.steps_per_second.items():
        print(f"{size:>6} {1e3 / rate:8.1f}")
    print(f" draft {1e3 * profile.draft_seconds:8.1f}")

    block = torch.full((1, drafter.config.num_draft_tokens), args.confidence)
    print(f"\ntokens to verify of a block with confidence {args.confidence} each:")
    for requests in (1, 2, 4, 8, 16, 32, 64):
        loaded = profile.with_load(requests)
        length = global_search(block, loaded)
        plain = requests / loaded.step_seconds(requests)
        gain = expected_throughput(block, length, loaded) / plain
        print(f"{requests:>4} requests: {int(length)} tokens, {gain:.2f} times the throughput of plain decoding")
    if args.output:
        profile.save(args.output)


if __name__ == "__main__":
    main()
