"""What the sequential head costs: its share of a round, by kind of head, vocabulary and how the next token is found.

    python benchmarks/head_cost.py --output benchmarks/results/head_cost.json

A round is the draft (parallel stage), the head with its scheduler, and the verification of K + 1 tokens. The target and the
drafters have the sizes of the embedded pair and random weights, which cost the same time; K = 7. "restricted" is
`drafter.head_candidates = 64`: only the tokens that the backbone finds likeliest are biased, and drawn among. One thread;
everything that is compared takes turns, and seconds are processor seconds, which a busy machine stretches less than the
clock. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from common import about, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from hf_dspark import DSparkDraftModel, LoadProfile
from hf_dspark.cache import RowLayout, SlotCache
from hf_dspark.candidate_generator import DSparkCandidateGenerator
from hf_dspark.training.initialization import config_for_target

CONTEXT, BLOCK_SIZE, RANK, CANDIDATES = 256, 7, 64, 64


def build_target(vocabulary: int) -> LlamaForCausalLM:
    """A target of the embedded one's shape."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def build_drafter(target: LlamaForCausalLM, head: str, draft_vocabulary: int | None) -> DSparkDraftModel:
    """A drafter of the embedded one's shape."""
    config = config_for_target(
        target, 3, num_hidden_layers=2, block_size=BLOCK_SIZE, num_key_value_heads=9, markov_rank=RANK, markov_head_type=head,
        draft_vocab_size=draft_vocabulary,
    )  # fmt: skip
    drafter = DSparkDraftModel(config).eval()
    if draft_vocabulary is not None:
        drafter.set_draft_vocabulary(torch.arange(draft_vocabulary))
    drafter.load_profile = LoadProfile({1: 20.0, 8: 10.0, 16: 9.0})
    drafter.bind(target)
    return drafter


def draft(drafter: DSparkDraftModel, do_sample: bool, candidates: int | None) -> Callable[[], dict[str, float]]:
    """Drafts a block and returns the seconds of its parts."""
    generator = DSparkCandidateGenerator(drafter, LogitsProcessorList(), do_sample)
    generator.start(RowLayout(torch.arange(CONTEXT + 1)[None], None))
    tokens = torch.randint(4, 1000, (CONTEXT + 1,))

    def states(count: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, count, 576) for _ in range(31))

    generator.observe(states(CONTEXT), [0], [CONTEXT])
    generator.propose([tokens], [0], [CONTEXT], [BLOCK_SIZE])
    few = states(2)

    def once() -> dict[str, float]:
        generator.observe(few, [CONTEXT - 2], [2])
        drafter.head_candidates = candidates
        before = dict(generator.statistics.seconds)
        generator.propose([tokens], [0], [CONTEXT], [BLOCK_SIZE])
        return {phase: seconds - before[phase] for phase, seconds in generator.statistics.seconds.items()}

    return once


def target_step(target: LlamaForCausalLM, count: int) -> Callable[[], float]:
    """A forward of `count` tokens behind the context."""
    cache = SlotCache(target.config)
    tokens = torch.randint(4, 1000, (1, CONTEXT + count))
    cache.place(0, CONTEXT)
    target(input_ids=tokens[:, :CONTEXT], cache=cache, logits_to_keep=1)

    def once() -> float:
        cache.place(CONTEXT, count)
        began = time.process_time()
        target(input_ids=tokens[:, CONTEXT:], cache=cache)
        return time.process_time() - began

    return once


@torch.no_grad()
def measure(vocabulary: int, repeats: int) -> dict[str, Any]:
    """Seconds of the steps of one target, and of every kind of draft for it."""
    torch.manual_seed(0)
    target = build_target(vocabulary)
    steps = {"plain": target_step(target, 1), "verify": target_step(target, BLOCK_SIZE + 1)}
    drafters = {
        (head, size or vocabulary): build_drafter(target, head, size)
        for head in ("vanilla", "gated", "rnn")
        for size in (None, 8192)
    }
    # Never two of the same drafter in a row: the second would find its matrices in the processor's cache.
    drafts = {
        (mode, way, head, size): draft(drafter, mode == "sampled", candidates)
        for mode in ("greedy", "sampled")
        for way, candidates in (("all", None), ("restricted", CANDIDATES))
        for (head, size), drafter in drafters.items()
    }
    times: dict[Any, list[Any]] = {key: [] for key in (*steps, *drafts)}
    for repeat in range(repeats + 1):
        found = {name: run() for name, run in (steps | drafts).items()}
        for name, value in found.items():
            if repeat:  # the first round warms up
                times[name].append(value)

    plain, verify = median(times["plain"]), median(times["verify"])
    rows = []
    for mode, way, head, size in drafts:
        runs = times[mode, way, head, size]
        parts = {phase: median(run[phase] for run in runs) for phase in ("draft", "head", "schedule")}
        extra = parts["head"] + parts["schedule"]
        rows.append(
            {
                "head": head, "draft_vocabulary": size, "decoding": mode, "candidates": way,
                **{f"{phase}_over_plain_step": round(seconds / plain, 4) for phase, seconds in parts.items()},
                "share_of_round": round(extra / (extra + parts["draft"] + verify), 4),
            }
        )  # fmt: skip
        print(vocabulary, rows[-1], flush=True)
    return {"plain_seconds": round(plain, 4), "verify_over_plain_step": round(verify / plain, 3), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        **about(),
        "block_size": BLOCK_SIZE, "markov_rank": RANK, "candidates": CANDIDATES, "vocabularies": {},
    }  # fmt: skip
    with patch("hf_dspark.statistics.time.perf_counter", time.process_time):  # the phases of a draft by processor seconds
        for vocabulary in arguments.vocabularies:
            report["vocabularies"][str(vocabulary)] = measure(vocabulary, arguments.repeats)
            save(report, arguments)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
