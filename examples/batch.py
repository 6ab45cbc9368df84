"""Several prompts at once, and the same batch on a machine that is planned to be busy.

    python examples/batch.py
    python examples/batch.py --target path/or/repo --drafter path/or/repo --requests 64

The rows of a batch advance at their own pace. With `--requests`, the scheduler plans for that many requests alike: it
verifies fewer drafted tokens, and the text stays the same.
"""

import argparse

from hf_dspark import LoadProfile
from hf_dspark.evaluation import encode_prompts
from hf_dspark.loading import drafter_by_name, target_by_name

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default="default", help="folder or repo id of a drafter for it")
parser.add_argument("--requests", type=int, default=32, help="requests alike to plan for, in the second run")
parser.add_argument("--max-new-tokens", type=int, default=48)
parser.add_argument(
    "--prompts",
    nargs="+",
    default=[
        "What is 17 times 23?",
        "Write a Python function that reverses a string.",
        "Name three rivers in Europe.",
        "Why do leaves turn red in autumn? Answer in two sentences.",
    ],
)


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    target, tokenizer = target_by_name(args.target)
    drafter = drafter_by_name(args.drafter, target)

    inputs = encode_prompts(tokenizer, args.prompts).to(target.device)
    profile = LoadProfile.measure(target, drafter, repeats=3)
    for requests in (len(args.prompts), max(args.requests, len(args.prompts))):
        drafter.load_profile = profile.with_load(requests)
        output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=args.max_new_tokens, do_sample=False)
        print(f"planned for {requests} requests: {drafter.statistics}")
    for prompt, row in zip(args.prompts, output[:, inputs["input_ids"].shape[1] :], strict=True):
        print(f"\n> {prompt}\n{tokenizer.decode(row, skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
