"""Memory and speed of the loss in chunks, against the same loss with every logit at once.

    python benchmarks/training_memory.py --output benchmarks/results/training_memory.json

The sizes are those of training the default pair on its whole vocabulary: 49,152 tokens, 512 blocks (`--blocks`) of 7 tokens on
one answer, float32, loss and gradients. What differs between the two is all there is to see: target, backbone and
optimizer would be the same. Each form runs in a process of its own with one thread; they take turns, seconds are processor
seconds, and memory is the largest resident size of the process less what it held before its first loss. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import about, save
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark import DSparkDraftModel
from hf_dspark.training.blocks import build_blocks, sample_anchors
from hf_dspark.training.initialization import config_for_target
from hf_dspark.training.loss import LossWeights, dspark_loss, slot_weights
from hf_dspark.training.trainer import DSparkTrainingArguments

POSITIONS = DSparkTrainingArguments.max_logit_positions
WIDTH, PROMPT, BLOCK_SIZE, RANK = 576, 256, 7, 64
WEIGHTS = LossWeights()


def straightforward(
    drafter: DSparkDraftModel,
    hidden: Tensor,
    previous: Tensor,
    labels: Tensor,
    supervised: Tensor,
    target_states: Tensor,
    sources: Tensor,
) -> Tensor:
    """The loss of `dspark_loss`, written down as the formula stands."""
    with torch.no_grad():
        target_law = drafter.bound_target.full_logits(target_states).softmax(-1)[sources]  # (N, K, V)
    head = drafter.markov_head
    embeddings = head.markov_w1(previous)
    logits = drafter.base_logits(hidden) + head.markov_w2(head(embeddings, hidden))
    log_law = logits.log_softmax(-1)
    cross_entropy = -log_law.gather(-1, labels[..., None])[..., 0]
    distance = (log_law.exp() - target_law).abs().sum(-1)
    confidence = F.binary_cross_entropy_with_logits(
        drafter.confidence_head(hidden, embeddings), (1 - 0.5 * distance).detach().clamp(0, 1), reduction="none"
    )
    total = WEIGHTS.cross_entropy * cross_entropy + WEIGHTS.distance * distance + WEIGHTS.confidence * confidence
    weight = slot_weights(supervised, WEIGHTS.decay)
    return (weight * total).sum() / weight.sum()


def work(form: str, vocabulary: int, count: int) -> None:
    """One process: a line of JSON for every line of stdin."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=3, num_attention_heads=9,
            tie_word_embeddings=True,
        )
    ).requires_grad_(False)  # fmt: skip
    config = config_for_target(target, 3, num_hidden_layers=1, block_size=BLOCK_SIZE, markov_rank=RANK)
    drafter = DSparkDraftModel(config)
    drafter.bind(target)
    length = PROMPT + count * 3 // 2  # two in three tokens of the answer are anchors
    input_ids = torch.randint(4, vocabulary, (1, length))
    loss_mask = (torch.arange(length) >= PROMPT)[None]
    anchors, keep = sample_anchors(loss_mask, count)
    blocks = build_blocks(input_ids, loss_mask, anchors, keep, BLOCK_SIZE, 3, True)
    states = torch.randn(length, WIDTH)
    hidden = torch.randn(count, BLOCK_SIZE, WIDTH).requires_grad_()
    fixed = (blocks.previous[0], blocks.labels[0], blocks.supervised[0], states, blocks.sources[0])
    before = peak()
    for _ in sys.stdin:
        drafter.zero_grad()
        hidden.grad = None
        began = time.process_time()
        if form == "straightforward":
            loss = straightforward(drafter, hidden, *fixed)
        else:
            loss = dspark_loss(drafter, hidden, *fixed, WEIGHTS, int(form)).loss
        loss.backward()
        seconds = time.process_time() - began
        gradient = float(hidden.grad.norm() + drafter.markov_head.markov_w2.weight.grad.norm())
        report = {"loss": loss.item(), "gradient": gradient, "seconds": seconds, "bytes": peak() - before}
        print(json.dumps(report), flush=True)


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--blocks", type=int, default=512, help="blocks of the answer; all at once they need 11 MB each")
    parser.add_argument("--positions", type=int, nargs="+", default=[POSITIONS], help="values of max_logit_positions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.vocabulary, arguments.blocks)
        return

    forms = ["straightforward", *map(str, arguments.positions)]
    command = [
        sys.executable,
        __file__,
        "--vocabulary",
        str(arguments.vocabulary),
        "--blocks",
        str(arguments.blocks),
        "--worker",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = {
        form: subprocess.Popen(
            [*command, form], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for form in forms
    }
    rounds: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
    for repeat in range(arguments.repeats):
        for form in forms if repeat % 2 else forms[::-1]:
            workers[form].stdin.write("\n")
            rounds[form].append(json.loads(workers[form].stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    reference = rounds["straightforward"][0]
    for form, found in rounds.items():
        for name in ("loss", "gradient"):
            if abs(found[0][name] / reference[name] - 1) > 1e-3:
                raise SystemExit(f"{form}: {name} is {found[0][name]}, not {reference[name]}")

    results = {}
    for form, found in rounds.items():
        results[form] = {
            "gigabytes": round(found[-1]["bytes"] / 1e9, 2),
            "blocks_per_second": round(arguments.blocks / median(entry["seconds"] for entry in found), 2),
        }
        results[form]["memory_ratio"] = round(found[-1]["bytes"] / rounds["straightforward"][-1]["bytes"], 3)
        results[form]["speed_ratio"] = round(
            median(a["seconds"] / b["seconds"] for a, b in zip(rounds["straightforward"], found, strict=True)), 3
        )
        print(f"{form:>16}: {results[form]}", flush=True)
    report = {
        **about(threads=1),
        "vocabulary": arguments.vocabulary,
        "blocks": arguments.blocks,
        "block_size": BLOCK_SIZE,
        "forms": results,
    }
    save(report, arguments)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
