"""A conversation in the terminal, streamed as it is verified. An empty line ends it.

    python examples/chat_streaming.py
    python examples/chat_streaming.py --target path/or/repo --drafter path/or/repo

With a drafter a stream comes in small bursts: all tokens that one pass of the target has confirmed.
"""

import argparse

from transformers import TextStreamer

from hf_dspark.loading import drafter_by_name, target_by_name

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default="default", help="folder or repo id of a drafter for it")
parser.add_argument("--max-new-tokens", type=int, default=256, help="length of an answer")


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    target, tokenizer = target_by_name(args.target)
    drafter = drafter_by_name(args.drafter, target)
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
        inputs = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(target.device)
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
