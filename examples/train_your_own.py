"""A drafter for your own model, from nothing, on a processor: the target answers prompts, and the drafter learns from that.

    python examples/train_your_own.py --output my-drafter
    python examples/train_your_own.py --output my-drafter --target path/or/repo --prompts prompts.jsonl --steps 500
    python examples/train_your_own.py --output my-drafter --drafter earlier-drafter

The defaults only show the way: a drafter worth having takes thousands of prompts of the kind it will meet, and hours.
Running the command again with the same output keeps the answers that are there already.
"""

import argparse
import json
from pathlib import Path

import torch

from hf_dspark import DSparkDraftModel
from hf_dspark.loading import target_by_name
from hf_dspark.training.regenerate import regenerate_file
from hf_dspark.training.run import train_drafter
from hf_dspark.training.trainer import DSparkTrainingArguments

SUBJECTS = ("the moon", "bread", "a bicycle", "rivers", "a good night's sleep", "chess", "the number zero", "bees")
QUESTIONS = ("Explain {} to a child.", "Give me three facts about {}.", "Write a short poem about {}.")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output", type=Path, required=True, help="folder for answers and drafter")
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", help="drafter to go on from; a new one when not given")
parser.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...}; two dozen simple ones when not given')
parser.add_argument("--answer-tokens", type=int, default=96, help="longest answer")
parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
parser.add_argument("--layers", type=int, default=1)
parser.add_argument("--block-size", type=int, default=5, help="tokens drafted at once")
parser.add_argument("--draft-vocabulary", type=int, default=4096, help="most used tokens to draft from; 0 for all")


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    target, tokenizer = target_by_name(args.target)

    # 1. The target's own answers: nothing else teaches what this target will say.
    args.output.mkdir(parents=True, exist_ok=True)
    prompts, answers = args.prompts or args.output / "prompts.jsonl", args.output / "answers.jsonl"
    if args.prompts is None:
        texts = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    regenerate_file(target, tokenizer, prompts, answers, max_new_tokens=args.answer_tokens, batch_size=8)

    # 2. The drafter. The target is frozen and runs inside the training step.
    settings = DSparkTrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=2,
        num_anchors=64,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 25),
        logging_steps=max(1, args.steps // 8),
        save_strategy="no",
        report_to=[],
    )
    drafter, _ = train_drafter(
        target,
        tokenizer,
        [answers],
        settings,
        drafter=None if args.drafter is None else DSparkDraftModel.from_pretrained(args.drafter, dtype=torch.float32),
        num_hidden_layers=args.layers,
        block_size=args.block_size,
        markov_rank=32,
        draft_vocab_size=args.draft_vocabulary or None,
    )

    # 3. In use. The text is the target's, however little the drafter has learnt.
    first = json.loads(prompts.read_text(encoding="utf-8").splitlines()[0])["prompt"]
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": first}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(target.device)
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=args.answer_tokens, do_sample=False)
    print(f"> {first}\n{tokenizer.decode(output[0, inputs['input_ids'].shape[1] :], skip_special_tokens=True)}")
    print(drafter.statistics)
    print(f"Drafter saved to {args.output}.")


if __name__ == "__main__":
    main()
