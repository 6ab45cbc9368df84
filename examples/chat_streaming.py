"""A conversation in the terminal, streamed as it is verified. An empty line ends it.

    python examples/chat_streaming.py
    python examples/chat_streaming.py --target path/or/repo --drafter path/or/repo

With a drafter a stream comes in small bursts: all tokens that one pass of the target has confirmed.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_dspark import DSparkDraftModel
from hf_dspark.demo import DRAFTER_FOLDER, load_target

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default=DRAFTER_FOLDER, help="folder or repo id of a drafter for it")
parser.add_argument("--max-new-tokens", type=int, default=256, help="length of an answer")


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    if args.target is None:
        target, tokenizer = load_target()
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype=target.dtype)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    conversation: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ")
        except EOFError:
            break
        if not said.strip():
            break
        conversation.append({"role": "user", "content": said})
        inputs = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        output = target.generate(
            **inputs, assistant_model=drafter, streamer=streamer, max_new_tokens=args.max_new_tokens, do_sample=False
        )
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        conversation.append({"role": "assistant", "content": answer})
        statistics = drafter.statistics
        print(
            f"[{statistics.tau:.2f} tokens per pass; of {statistics.verified} drafted tokens verified, "
            f"{statistics.rejected} were rejected]"
        )


if __name__ == "__main__":
    main()
