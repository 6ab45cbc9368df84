"""What a drafter's confidences promise, what the target keeps, and the same after calibration.

    python examples/calibrate.py --output calibrated-drafter
    python examples/calibrate.py --target path/or/repo --drafter path/or/repo --prompts held_out.jsonl --output calibrated

The defaults only show the way: with a few short answers the fit is mostly noise, a hundred long ones are a beginning.
"""

import argparse
from pathlib import Path

from hf_dspark.evaluation import SETTINGS, fit_calibration, read_prompt_sets, roll_out, set_calibration
from hf_dspark.loading import drafter_by_name, target_by_name

PROMPTS = ("What is 17 times 23?", "Name three rivers in Europe.", "Write a Python function that reverses a string.")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default="default", help="folder or repo id of a drafter for it")
parser.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...}, not used in training; three when not given')
parser.add_argument("--max-new-tokens", type=int, default=96, help="length of an answer")
parser.add_argument("--output", type=Path, required=True, help="folder for the calibrated drafter")


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    target, tokenizer = target_by_name(args.target)
    drafter = drafter_by_name(args.drafter, target)
    set_calibration(drafter)  # back to the confidences as trained
    prompts = list(PROMPTS)
    if args.prompts is not None:
        prompts = [prompt for one in read_prompt_sets([args.prompts]).values() for prompt in one]

    found = {}
    for name, setting in (("greedy", "T=0"), ("sampled", "T=1")):
        blocks = roll_out(target, tokenizer, drafter, prompts, max_new_tokens=args.max_new_tokens, **SETTINGS[setting])
        found[name] = fit_calibration(blocks, drafter, dataset="example")
        print(f"{name}, {found[name].num_samples} blocks; expected calibration error by position, before and after:")
        for position, errors in enumerate(zip(found[name].ece_before, found[name].ece_after, strict=True), start=1):
            before, after = ("-" if error is None else f"{error:.3f}" for error in errors)  # no draft came that far
            print(f"{position:>4} {before:>8} {after:>8}")
    set_calibration(drafter, **found)
    drafter.save_pretrained(args.output)
    print(f"Drafter saved to {args.output}.")


if __name__ == "__main__":
    main()
