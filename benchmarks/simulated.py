"""Simulated against real: does the simulated server tell how fast the real one is, and does the budget follow the load?

    python benchmarks/simulated.py --prompts ../shared/prompts --output benchmarks/results/simulated.json

For R = 1, 4, 16 rows of the embedded default, greedy:
1. drafts of some prompts, each verified to its end, give the traces;
2. rounds of fixed draft lengths, for half as many tokens, give the seconds of a forward by its tokens, of a draft, and of all
   else, in the very layout of these rows (other prompts are longer or shorter): a load profile for R;
3. in turn with 2, the prompts are answered for real, plainly, with fixed lengths and with the drafter's own schedule by that
   profile, live as it is by default; and simulated.

What is compared is tokens per second behind the prefill. Beyond that, the budget of the real scheduler under loads of 1 … 256
is taken from real rounds of one row, and servers of 1 … 256 requests are simulated from the traces, with the pictures that come
of it. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import about, add_options, chosen_prompts, save
from transformers.utils import logging

from hf_dspark import DSparkDraftModel, LoadProfile, pack_linears
from hf_dspark.evaluation import draw_simulation, encode_prompts
from hf_dspark.loading import drafter_by_name, target_by_name
from hf_dspark.simulation import Trace, policies, record_traces, simulate, sweep

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def decode(target: Any, inputs: Any, drafter: DSparkDraftModel, new_tokens: int, **settings: Any) -> dict[str, float]:
    """One call: seconds behind the prefill and by phase, tokens, and counts. Settings are those of the drafter.

    Plain decoding is this loop with nothing drafted (`length=0`), so that both sides are timed alike.
    """
    length = settings.pop("length", None)
    before = {name: getattr(drafter, name) for name in settings}
    for name, value in settings.items():
        setattr(drafter, name, value)
    options = {} if length is None else {"num_assistant_tokens": length}
    started = time.perf_counter()
    try:
        target.generate(
            **inputs, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, **options
        )
    finally:
        for name, value in before.items():
            setattr(drafter, name, value)
    counts = drafter.statistics
    seconds = time.perf_counter() - started - counts.seconds["prefill"]
    return {
        "seconds": seconds,
        "tokens": counts.tokens,
        "throughput": counts.tokens / seconds,
        "tau": counts.tau,
        "budget": counts.verified / max(1, counts.cycles),
        "rounds": counts.rounds,
        "drafts": counts.drafts,
        "verify": counts.seconds["verify"] / max(1, counts.rounds),
        "draft": (counts.seconds["draft"] + counts.seconds["head"]) / max(1, counts.drafts),
        "else": (seconds - sum(counts.seconds[phase] for phase in ("draft", "head", "verify"))) / max(1, counts.rounds),
        "tokens_per_forward": (counts.cycles + counts.verified) / max(1, counts.rounds),
    }


class RowCosts:
    """What rounds of some rows cost, from rounds of fixed lengths: each pass measures all of them once."""

    def __init__(self, target: Any, drafter: DSparkDraftModel, inputs: Any, new_tokens: int):
        self._target, self._drafter, self._inputs, self._new_tokens = target, drafter, inputs, new_tokens
        self._steps: dict[int, list[float]] = {}
        self._drafts: list[float] = []
        self._others: list[float] = []

    def measure(self) -> None:
        for length in (0, 1, 2, 3, self._drafter.config.num_draft_tokens):
            found = decode(self._target, self._inputs, self._drafter, self._new_tokens, length=length, scheduling="full")
            self._steps.setdefault(round(found["tokens_per_forward"]), []).append(found["verify"])
            self._others.append(found["else"])
            if length:
                self._drafts.append(found["draft"])

    @property
    def profile(self) -> LoadProfile:
        steps = {size: 1 / statistics.mean(seconds) for size, seconds in self._steps.items()}
        return LoadProfile(steps, statistics.median(self._drafts))

    @property
    def overhead(self) -> float:
        """Seconds of a round that are neither draft nor target."""
        return statistics.median(self._others)


def compare_rows(
    target: Any, tokenizer: Any, drafter: DSparkDraftModel, prompts: Sequence[Any], rows: int, new_tokens: int, passes: int
) -> tuple[dict[str, Any], list[Trace]]:
    """Real and simulated throughput of R rows, by policy; and the traces."""
    prompts = (list(prompts) * rows)[:rows]
    inputs = encode_prompts(tokenizer, prompts)
    decode(target, inputs, drafter, 4, length=2, scheduling="full")  # warms up
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    traces = record_traces(target, tokenizer, drafter, prompts, batch_size=rows, **options)
    costs = RowCosts(target, drafter, inputs, max(8, new_tokens // 2))
    longest = drafter.config.num_draft_tokens
    settings: dict[str, dict[str, Any]] = {
        "plain": {"length": 0, "scheduling": "full"},
        "fixed 2": {"length": 2, "scheduling": "full"},
        f"fixed {longest}": {"scheduling": "full"},
        "scheduled": {"scheduling": None},
    }
    simulated = {
        "plain": {"mode": "plain"},
        "fixed 2": {"mode": "full", "draft_tokens": 2},
        f"fixed {longest}": {"mode": "full"},
        "scheduled": {"mode": "presampled"},
    }
    real: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for number in range(passes):  # costs and policies in turn, since the machine's speed drifts
        costs.measure()
        settings["scheduled"]["load_profile"] = costs.profile.live()
        order = list(settings) if number % 2 == 0 else list(settings)[::-1]
        for name in order:
            real[name].append(decode(target, inputs, drafter, new_tokens, **settings[name]))
    profile, overhead = costs.profile, costs.overhead
    policies_found = {}
    for name, runs in real.items():
        expected = simulate(traces, profile, rows, drains=True, overhead_seconds=overhead, **simulated[name])
        throughput = sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)
        policies_found[name] = {
            "real": throughput,
            "simulated": expected.throughput,
            "ratio": expected.throughput / throughput,
            "real_tau": runs[0]["tau"],
            "simulated_tau": expected.tau,
            "real_budget": runs[0]["budget"],
            "simulated_budget": expected.budget,
        }
    static = max(found["real"] for name, found in policies_found.items() if name != "scheduled")
    found = {
        "rows": rows,
        "milliseconds": {str(size): 1e3 / rate for size, rate in profile.steps_per_second.items()},
        "draft_milliseconds": 1e3 * profile.draft_seconds,
        "overhead_milliseconds": 1e3 * overhead,
        "policies": policies_found,
        "scheduled_over_best_static": policies_found["scheduled"]["real"] / static,
        "within_10_percent": all(abs(found["ratio"] - 1) <= 0.1 for found in policies_found.values()),
    }
    return found, traces


def budgets_under_load(
    target: Any, tokenizer: Any, drafter: DSparkDraftModel, prompts: Sequence[Any], new_tokens: int
) -> dict[str, float]:
    """Verified tokens per round of one real row, planned for so many requests alike on a smooth machine."""
    smooth = LoadProfile({1: 1 / 0.0505, 2: 1 / 0.051, 2048: 1 / 1.074}, draft_seconds=0.005)  # 50 ms, and 0.5 ms a token
    budgets = {}
    for load in LOADS[::2]:
        runs = [
            decode(
                target, encode_prompts(tokenizer, [prompt]), drafter, new_tokens, scheduling=None,
                load_profile=smooth.with_load(load),
            )
            for prompt in prompts
        ]  # fmt: skip
        budgets[str(load)] = statistics.mean(run["budget"] for run in runs)
    return budgets


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, count=8)
    parser.add_argument("--target", default="default", help="folder or repo id")
    parser.add_argument("--drafter", default="default", help="folder or repo id")
    parser.add_argument("--as-loaded", action="store_true", help="do not pack the target's linear layers")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--passes", type=int, default=2, help="measurements of the costs and real runs of each policy")
    parser.add_argument("--load-prompts", type=int, default=2, help="prompts for the budgets under load")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    arguments = parser.parse_args(argv)

    logging.set_verbosity_error()
    prompts = chosen_prompts(arguments)
    prompts = prompts[::4] + prompts[1::4] + prompts[2::4] + prompts[3::4]  # of all sets from the start
    target, tokenizer = target_by_name(arguments.target)
    drafter = drafter_by_name(arguments.drafter, target)
    if not arguments.as_loaded:
        pack_linears(target)
    report: dict[str, Any] = {
        **about(),
        "linears": "as loaded" if arguments.as_loaded else "packed",
        "rows": [],
    }
    traces: list[Trace] = []
    for rows in arguments.rows:
        found, recorded = compare_rows(target, tokenizer, drafter, prompts, rows, arguments.max_new_tokens, arguments.passes)
        traces += recorded
        report["rows"].append(found)
        for name, values in found["policies"].items():
            print(
                f"R = {rows:<3} {name:<10} real {values['real']:7.2f} t/s  simulated {values['simulated']:7.2f} t/s  "
                f"ratio {values['ratio']:.2f}  tau {values['real_tau']:.2f} and {values['simulated_tau']:.2f}",
                flush=True,
            )
        save(report, arguments)
    few = prompts[: arguments.load_prompts]
    report["budget_by_load"] = budgets_under_load(target, tokenizer, drafter, few, min(24, arguments.max_new_tokens))
    budgets = list(report["budget_by_load"].values())
    report["budget_falls"] = all(after <= before for before, after in pairwise(budgets))
    print("budget by load", {load: round(budget, 2) for load, budget in report["budget_by_load"].items()}, flush=True)

    # Hundreds of requests carry thousands of tokens; beyond the largest size the curve goes on as its last line.
    curve = LoadProfile.measure(target, drafter, batch_tokens=(1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256), repeats=3)
    named = policies(drafter.config.num_draft_tokens)
    report["sweep"] = sweep(traces, curve, LOADS, named, rounds=200)
    folder = arguments.pictures
    if folder is None and arguments.output is not None:
        folder = arguments.output.parent / arguments.output.stem
    if folder is not None:
        for path in draw_simulation(report["sweep"], folder):
            print(path)
    save(report, arguments)
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
