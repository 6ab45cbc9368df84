"""What the parts of a drafter are worth: heads, depth, block size and how to train, on the same answers for the same blocks.

    python benchmarks/study.py --data answers.jsonl --states states   # trains what is missing in benchmarks/results/study.json
    python benchmarks/study.py --table                                # renders it into docs/study.md

Every configuration differs from the first one in what its name says, and from nothing else: the same answers in the same
order, the same number of blocks, the same held-out blocks. τ and acceptance are the trainer's own, on answers held out and
teacher-forced: what the accepted length would be if the text went on as it does. Costs are processor seconds of one thread,
which a busy machine stretches less than the clock. A run that is stopped loses the configuration it was at. The last line
of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import about
from table import ROOT, replace_section
from torch.utils.data import Subset
from transformers import PreTrainedModel, set_seed
from transformers.utils import logging

from hf_dspark import DSparkDraftModel
from hf_dspark.cache import SlotCache
from hf_dspark.formats.files import write_text
from hf_dspark.loading import target_by_name
from hf_dspark.training.data import most_used_tokens, read_examples, token_list
from hf_dspark.training.initialization import config_for_target, start_from_target, start_head_from_text
from hf_dspark.training.regression_start import start_from_regression
from hf_dspark.training.run import find_mask_token
from hf_dspark.training.state_cache import cache_target_states
from hf_dspark.training.trainer import DSparkTrainer, DSparkTrainingArguments

DRAFTER = {"num_hidden_layers": 2, "block_size": 5, "markov_rank": 64, "draft_vocab_size": 8192}
TRAINING = {"learning_rate": 2e-3, "muon_learning_rate": 0.02, "loss_decay": 2.5, "cross_entropy_weight": 0.3}
DFLASH = {"cross_entropy_weight": 1.0, "distance_weight": 0.0, "confidence_weight": 0.0}
PARALLEL = {"markov_rank": 0, "confidence_head_with_markov": False}

# What differs from DRAFTER and TRAINING, by importance: time may run out.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "vanilla head": {},
    "no head, cross-entropy only (DFlash)": {"drafter": PARALLEL | {"enable_confidence_head": False}, "training": DFLASH},
    "gated head": {"drafter": {"markov_head_type": "gated"}},
    "rnn head": {"drafter": {"markov_head_type": "rnn"}},
    "1 layer": {"drafter": {"num_hidden_layers": 1}},
    "3 layers": {"drafter": {"num_hidden_layers": 3}},
    "no head": {"drafter": PARALLEL},
    "K = 7": {"drafter": {"block_size": 7}},
    "K = 7, no head": {"drafter": PARALLEL | {"block_size": 7}},
    "K = 3": {"drafter": {"block_size": 3}},
    "no head, 3 layers": {"drafter": PARALLEL | {"num_hidden_layers": 3}},
    "cold start": {"start": False},
    "AdamW": {"training": {"optimizer": "host"}},
    "whole vocabulary": {"drafter": {"draft_vocab_size": None}},
    "K = 15": {"drafter": {"block_size": 15}},
    "K = 15, no head": {"drafter": PARALLEL | {"block_size": 15}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", help="JSONL of the target's answers")
    parser.add_argument("--states", type=Path, help="folder of the target's states; made where it is missing")
    parser.add_argument("--target", default="default", help="folder or repo id")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps; a step has 4 answers")
    parser.add_argument("--anchors", type=int, default=64, help="blocks of each answer")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/study.json")
    parser.add_argument("--table", action="store_true", help="only render the page")
    arguments = parser.parse_args()
    if arguments.table:
        replace_section(
            ROOT / "docs/study.md", "study table: python benchmarks/study.py --table", render(read(arguments.output))
        )
        return
    if not arguments.data or arguments.states is None:
        parser.error("--data and --states are needed to train.")

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    report = read(arguments.output)
    settings = {"steps": arguments.steps, "anchors": arguments.anchors}
    if report.setdefault("settings", settings) != settings:
        parser.error(f"{arguments.output} holds a study with {report['settings']}; name another file.")
    report |= about()
    target, tokenizer = target_by_name(arguments.target)
    examples = [example for path in arguments.data for example in read_examples(path, tokenizer)]
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    examples = [examples[i] for i in order]
    mask = find_mask_token(tokenizer, examples, target.config)
    layers = config_for_target(target, mask).target_layer_ids
    data = cache_target_states(target, examples, layers, arguments.states)
    for name in arguments.only:
        if any(row["name"] == name for row in report.setdefault("rows", [])):
            continue
        row = {"name": name} | study(target, data, mask, settings, **CONFIGURATIONS[name])
        report["rows"].append(row)
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")
        print(json.dumps(row), flush=True)
    print(json.dumps(report))


def read(path: Path) -> dict[str, Any]:
    """The study so far."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def study(
    target: PreTrainedModel,
    data: Any,
    mask: int,
    settings: dict[str, int],
    drafter: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    start: bool = True,
) -> dict[str, Any]:
    """Trains one configuration and measures it on the last 32 examples."""
    train, held_out = Subset(data, range(len(data) - 32)), Subset(data, range(len(data) - 32, len(data)))
    texts = data.examples[: len(train)]
    set_seed(0)
    config = config_for_target(target, mask, **(DRAFTER | (drafter or {})))
    model = DSparkDraftModel(config)
    if config.draft_vocab_size is not None:
        model.set_draft_vocabulary(most_used_tokens(texts, config.draft_vocab_size, token_list(config.eos_token_id)))
    model.bind(target)
    began = time.process_time()
    if start:  # as `start_drafter` does, on fewer tokens
        start_from_target(model, target)
        if config.markov_rank and config.markov_head_type != "rnn":
            start_head_from_text(model, target, texts, steps=80)
        start_from_regression(model, target, train, max_anchors=3000)
    start_seconds = time.process_time() - began
    with tempfile.TemporaryDirectory() as folder:
        args = DSparkTrainingArguments(
            folder, max_steps=settings["steps"], num_anchors=settings["anchors"], per_device_train_batch_size=4,
            per_device_eval_batch_size=8, lr_scheduler_type="cosine", warmup_steps=max(1, settings["steps"] // 8),
            max_logit_positions=1024, save_strategy="no", logging_steps=settings["steps"], report_to=[], use_cpu=True,
            disable_tqdm=True, **(TRAINING | (training or {})),
        )  # fmt: skip
        trainer = DSparkTrainer(model, target, args, train_dataset=train, eval_dataset=held_out)
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
        args.num_anchors = 24  # of each answer held out
        after = trainer.evaluate()
    return {
        "anchors": trainer.trained_anchors,
        "tau": after["eval_tau"],
        "tau_greedy": after["eval_tau_greedy"],
        "acceptance": [after[f"eval_acceptance_{k}"] for k in range(1, config.num_draft_tokens + 1)],
        "confidence_error": after["eval_confidence_error"] if args.confidence_weight else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "draft_share": draft_share(model.eval(), target),
        "anchors_per_second": round(trainer.trained_anchors / seconds, 1),
        "start_seconds": round(start_seconds, 1),
    }


@torch.no_grad()
def draft_share(model: DSparkDraftModel, target: PreTrainedModel, context: int = 256, repeats: int = 12) -> float:
    """Processor time of a draft (parallel stage and greedy head) over that of a plain step of the target, alternating."""
    config, vocabulary = model.config, target.config.vocab_size
    tokens = torch.randint(vocabulary, (1, context + 1))
    target_cache, draft_cache = SlotCache(target.config), SlotCache(config)
    target_cache.place(0, context)
    target(input_ids=tokens[:, :context], cache=target_cache, logits_to_keep=1)
    states = model.project_context(torch.randn(1, context, len(config.target_layer_ids) * config.target_hidden_size))
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[:, 0] = 0

    def draft(new: int, first: int) -> None:
        draft_cache.place(first, new + config.block_size)
        positions = torch.arange(first, first + new + config.block_size)[None]
        hidden = model(model.embed(block), states[:, :new], positions, None, draft_cache).last_hidden_state
        logits, previous, state = model.base_logits(hidden), block[:, 0], None
        for k in range(config.block_size):
            bias: Any = 0.0
            if model.markov_head is not None:
                latent, state = model.markov_head.latent(model.markov_head.markov_w1(previous), hidden[:, k], state)
                bias = model.markov_head.markov_w2(latent)
            previous = (logits[:, k] + bias).argmax(-1)

    draft(context, 0)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        began = time.process_time()
        draft(2, context)
        between = time.process_time()
        target_cache.place(context, 1)
        target(input_ids=tokens[:, context:], cache=target_cache)
        times[0].append(between - began)
        times[1].append(time.process_time() - between)
    return round(median(times[0]) / median(times[1]), 3)


def render(report: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "| configuration | τ sampled | τ greedy | acceptance by position | parameters | draft / plain step | blocks/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        acceptance = " ".join(f"{value:.2f}" for value in row["acceptance"])
        lines.append(
            f"| {row['name']} | {row['tau']:.2f} | {row['tau_greedy']:.2f} | {acceptance} | "
            f"{row['parameters'] / 1e6:.1f} M | {row['draft_share']:.2f} | {row['anchors_per_second']:.0f} |"
        )
    settings = report["settings"]
    missing = [name for name in CONFIGURATIONS if all(row["name"] != name for row in report["rows"])]
    lines += [
        "",
        f"{settings['steps']} steps of 4 answers with up to {settings['anchors']} blocks each, {report['date']}, "
        f"{report['machine']}." + (f" Not run: {', '.join(missing)}." if missing else ""),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
