"""One answer with a drafter, and what the drafter was worth.

    python examples/quickstart.py
    python examples/quickstart.py --target path/or/repo --drafter path/or/repo --prompt "Why is the sea salty?"

Without options it runs the embedded pair: SmolLM2-135M-Instruct and its small drafter.
"""

import argparse

from hf_dspark.loading import drafter_by_name, target_by_name

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default="default", help="folder or repo id of a drafter for it")
parser.add_argument("--prompt", default="Explain in a few sentences why the sky is blue.")
parser.add_argument("--max-new-tokens", type=int, default=64)


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    target, tokenizer = target_by_name(args.target)
    drafter = drafter_by_name(args.drafter, target)

    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(target.device)
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=args.max_new_tokens, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(drafter.statistics)


if __name__ == "__main__":
    main()
