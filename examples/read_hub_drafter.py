"""A drafter in whatever packaging it was published in: how its files are read, and what it does.

    python examples/read_hub_drafter.py
    python examples/read_hub_drafter.py --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7

The second line downloads both models. A file that could be misread is refused with the reason.
"""

import argparse

from hf_dspark.demo import DRAFTER_FOLDER
from hf_dspark.evaluation import encode_prompts
from hf_dspark.formats import packaging_of
from hf_dspark.formats.files import find_folder
from hf_dspark.formats.inspection import inspect_checkpoint
from hf_dspark.loading import drafter_by_name, target_by_name

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default="default", help="folder or repo id of a drafter for it")
parser.add_argument("--prompt", default="Write a Python function that returns the n-th prime number.")
parser.add_argument("--max-new-tokens", type=int, default=64)


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    folder = DRAFTER_FOLDER if args.drafter == "default" else find_folder(args.drafter, check=packaging_of)
    report = inspect_checkpoint(folder)
    print(f"{report['packaging']}, {report['parameters']:,} parameters, {report['draft_tokens']} tokens a block")
    for decision in report["decisions"]:
        print(f"  {decision}")

    target, tokenizer = target_by_name(args.target)
    drafter = drafter_by_name(folder, target)
    drafter.bind(target)  # raises ValueError where the pair does not fit; generate does the same
    inputs = encode_prompts(tokenizer, [args.prompt]).to(target.device)
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=args.max_new_tokens, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(drafter.statistics)


if __name__ == "__main__":
    main()
