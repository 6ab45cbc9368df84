"""A soak of the serving loop: requests come, go and fail for a long time, and every answer is checked.

    python benchmarks/soak.py --minutes 60 --output benchmarks/results/soak.json

A tiny target and drafter serve random arrivals in waves, so that the queue fills and runs dry. Clients cancel, or raise where
they consume tokens; requests are too long, hold foreign tokens, or run into NaN: one token of the target has an embedding of
NaN, and whoever writes it, or has it in the prompt, must fail behind it, and nobody else. Mode and load of the drafter change
on the way, and now and then a `generate` of the same pair, with a streamer that raises, comes in between. Every greedy answer,
and every sampled one with `top_k=1`, must be what plain `generate` writes for that prompt alone. The last line of stdout is
JSON.

`--duty 0.25` takes a quarter of one core and leaves the rest to others. Exits with 1 when anything was lost, mixed up or failed
without a reason, or when memory grew.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from common import about, save
from transformers.utils import logging

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from tiny import EOS, MASK, VOCABULARY, jagged_profile, padded_prompts, tiny_drafter, tiny_target

from hf_dspark import Request, ServingLoop
from hf_dspark.candidate_generator import SCHEDULING_MODES
from hf_dspark.evaluation import match_texts

LONGEST = 64  # tokens of an answer
KINDS = {  # share of requests
    "greedy": 50,
    "sampled": 8,
    "sampled, top-k 1": 6,
    "cancelled": 14,
    "consumer raises": 10,
    "too long": 4,
    "foreign token": 3,
    "NaN in the prompt": 5,
}
REFUSED = {"too long": "max_position_embeddings", "foreign token": "must be tokens in", "NaN in the prompt": "behind token 0"}
MAY_GROW = 0.02  # of the memory after the warm-up


@dataclass
class Case:
    """A request, what came of it so far, and what must come of it (`None` where that is a matter of chance)."""

    kind: str
    request: Request
    expected: list[int] | None
    finish: str | None
    patience: int  # events after which the client cancels or raises
    tokens: list[int] = field(default_factory=list)
    events: int = 0


class Silent:
    """A streamer that raises at its fifth token."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count > 5:
            raise ConnectionResetError("the client has gone")

    def end(self) -> None:
        pass


class Soak:
    """A pair of models, prompts with their plain answers, and an account of everything that was asked and answered."""

    def __init__(self, max_rows: int, prompts: int, seed: int):
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        self.clean, self.target = tiny_target("qwen3"), tiny_target("qwen3")  # the same weights
        self.poison: int | None = None
        trial = Counter(token for _, text in self._answers(40) for token in set(text))
        # The poison: a token that about every twentieth answer holds.
        self.poison = min(range(MASK + 1, VOCABULARY), key=lambda t: (abs(trial[t] - 2), t))
        self.pool = self._answers(prompts)
        with torch.no_grad():
            self.target.model.embed_tokens.weight[self.poison] = torch.nan
        # A drafter that never says it: a refused draft would otherwise poison its row's forward.
        self.drafter = tiny_drafter(self.clean, draft_token_ids=[t for t in range(VOCABULARY) if t != self.poison])
        self.drafter.load_profile = jagged_profile()
        self.loop = ServingLoop(self.target, self.drafter, max_rows)
        self.open: dict[Any, Case] = {}
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.rows: Counter[int] = Counter()
        self.number = 0

    def _answers(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Prompts without the poison, and what plain `generate` writes behind each."""
        answers = []
        for start in range(0, count, 40):
            # Now and then a long one, for which the caches of short ones have to grow.
            lengths = [
                self.dice.randint(*self.dice.choices([(1, 40), (200, 400)], [19, 1])[0]) for _ in range(min(40, count - start))
            ]
            inputs = padded_prompts(lengths, seed=start + 1)
            inputs["input_ids"][inputs["input_ids"] == self.poison] = EOS
            texts = self.clean.generate(**inputs, do_sample=False, max_new_tokens=LONGEST, eos_token_id=None)
            width = inputs["input_ids"].shape[1]
            for ids, mask, text in zip(inputs["input_ids"], inputs["attention_mask"], texts, strict=True):
                answers.append((ids[mask.bool()].tolist(), text[width:].tolist()))
        return answers

    # ---- clients ----

    def arrive(self) -> None:
        """One more request, of a random kind."""
        dice, self.number = self.dice, self.number + 1
        kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
        prompt, text = dice.choice(self.pool)
        new, ends = dice.randint(1, LONGEST), dice.choice([None, ()])
        if kind == "too long":
            new = 512 - len(prompt) + 1
        elif kind == "foreign token":
            prompt = [*prompt, VOCABULARY]
        elif kind == "NaN in the prompt":
            prompt = [*prompt[: len(prompt) // 2], self.poison, *prompt[len(prompt) // 2 :]]
        options: dict[str, Any] = {}
        if kind.startswith("sampled"):
            options = {"do_sample": True, "temperature": dice.choice([0.7, 1.0, 1.5]), "top_k": 1 if "1" in kind else None}
        request = Request(self.number, torch.tensor(prompt), new, eos_token_ids=ends, **options)
        if kind in REFUSED:
            expected, finish = [], "error"
        elif kind == "sampled":
            expected, finish = None, None
        else:
            expected, finish = self._expected(text, new, ends is None)
        self.open[self.number] = Case(kind, request, expected, finish, dice.randint(1, 12))
        self.counts[kind] += 1
        self.loop.submit(request)

    def _expected(self, text: list[int], new: int, ends: bool) -> tuple[list[int], str]:
        for length, token in enumerate(text[:new], start=1):
            if ends and token == EOS:
                return text[:length], "stop"
            if length == new:
                return text[:length], "length"
            if token == self.poison:
                return text[:length], "error"
        raise AssertionError("an answer is at least as long as the longest request")

    def consume(self, event: Any) -> None:
        """What the client of an event does with it; one that raises takes its request with it."""
        case = self.open.get(event.id)
        if case is None:
            self.problems.append(f"an event for request {event.id}, which had ended: {event}")
            return
        case.tokens += event.tokens
        case.events += 1
        if event.finished is not None:
            del self.open[event.id]
            self._judge(case, event)
        elif case.kind == "consumer raises" and case.events >= case.patience:
            raise BrokenPipeError(f"the client of request {event.id} has gone")

    def _judge(self, case: Case, event: Any) -> None:
        self.outcomes[event.finished] += 1
        request, finished, tokens = case.request, event.finished, case.tokens
        what = f"request {request.id} ({case.kind}) ended with {finished!r} ({event.error}) after {tokens}"
        if finished == "cancelled":
            if case.kind not in ("cancelled", "consumer raises"):
                self.problems.append(f"{what}, and nobody cancelled it")
            if tokens != case.expected[: len(tokens)]:
                self._near_tie(case, what)
        elif case.expected is None:
            last = tokens[-1] if tokens else None
            right = {
                "error": last == self.poison,
                "stop": last == EOS and request.eos_token_ids is None,
                "length": len(tokens) == request.max_new_tokens,
            }
            if not right[finished]:
                self.problems.append(what)
        elif (tokens, finished) != (case.expected, case.finish):
            self._near_tie(case, f"{what}, expected {case.finish!r} after {case.expected}")
        elif finished == "error" and REFUSED.get(case.kind, "NaN") not in event.error:
            self.problems.append(f"{what}, for the wrong reason")

    def _near_tie(self, case: Case, what: str) -> None:
        """A text may part from the plain one where the target itself is undecided; not before, and not for other reasons."""
        ids = case.request.input_ids
        plain, drafted = (torch.cat([ids, torch.tensor(tokens)]) for tokens in (case.expected[: len(case.tokens)], case.tokens))
        if match_texts(self.clean, plain, drafted, torch.ones_like(ids)) == "near-tie":
            self.counts["near-ties"] += 1
        else:
            self.problems.append(what)

    # ---- the loop ----

    def step(self, steps: int) -> None:
        """Arrivals, changes of mind and one step of the loop; every client gets its events."""
        dice, loop = self.dice, self.loop
        if dice.random() < 0.3 * (1 + math.sin(steps / 150)) and len(self.open) < 40:
            self.arrive()
        for case in list(self.open.values()):
            if case.kind == "cancelled" and case.events >= case.patience:
                loop.cancel(case.request.id)
        if steps % 300 == 0:
            self.drafter.scheduling = dice.choice([None, *SCHEDULING_MODES])
            self.drafter.load_profile = self.drafter.load_profile.with_load(dice.choice([1, 4, 16, 64]))
        if steps % 500 == 250:
            self._interrupt()
        for event in loop.step():
            try:
                self.consume(event)
            except BrokenPipeError:
                loop.cancel(event.id)  # what a server does when the connection is gone
        self.rows[len(loop._running)] += 1

    def _interrupt(self) -> None:
        """A call of `generate` in between, with a streamer that raises; then one that works."""
        prompt, text = self.dice.choice([(p, t) for p, t in self.pool if self.poison not in t])
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": LONGEST, "do_sample": False, "eos_token_id": None}
        try:
            self.target.generate(ids, assistant_model=self.drafter, streamer=Silent(), **options)
            self.problems.append("a streamer raised and `generate` did not")
        except ConnectionResetError:
            self.counts["streamers that raised"] += 1
        output = self.target.generate(ids, assistant_model=self.drafter, **options)[0]
        plain = torch.tensor([*prompt, *text])
        if match_texts(self.clean, plain, output, torch.ones_like(ids[0])) == "differs":
            self.problems.append(f"`generate` in between wrote {output.tolist()} instead of {plain.tolist()}")


def run_soak(
    seconds: float,
    max_rows: int = 8,
    prompts: int = 200,
    duty: float = 1.0,
    seed: int = 0,
    most_steps: int | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Soaks for so long, then lets what is open end.

    Args:
        seconds (`float`): wall time of the arrivals.
        max_rows (`int`, defaults to 8): of the loop.
        prompts (`int`, defaults to 200): different ones.
        duty (`float`, defaults to 1.0): largest share of one processor core to use; the rest is slept.
        seed (`int`, defaults to 0): of everything random.
        most_steps (`int`, *optional*): steps after which arrivals end in any case.
        progress (callable, *optional*): gets the report so far, about a hundred times.

    Returns:
        `dict`: counts of requests and outcomes, memory over time, and `problems`, empty if all went well.
    """
    soak, process = Soak(max_rows, prompts, seed), psutil.Process()
    memory: list[tuple[float, float]] = []  # minutes, MiB
    started, steps, busy, noted = time.monotonic(), 0, 0.0, 0.0

    def report() -> dict[str, Any]:
        minutes = (time.monotonic() - started) / 60
        settled = [size for at, size in memory if minutes / 10 <= at <= minutes / 5]
        last = [size for at, size in memory if at >= 0.9 * minutes]
        growth = statistics.median(last) - statistics.median(settled) if settled and last else 0.0
        problems = list(soak.problems)
        if settled and growth > MAY_GROW * statistics.median(settled):
            problems.append(f"memory grew by {growth:.1f} MiB after the warm-up")
        counts = soak.loop.statistics
        return {
            "minutes": round(minutes, 2),
            "processor_minutes": round(busy / 60, 2),
            "steps": steps,
            "requests": sum(soak.counts[kind] for kind in KINDS),
            "kinds": dict(soak.counts),
            "outcomes": dict(soak.outcomes),
            "tokens": counts.tokens,
            "tau": round(counts.tau, 3),
            "verified": counts.verified,
            "rejected": counts.rejected,
            "rows_running": {str(rows): soak.rows[rows] for rows in sorted(soak.rows)},
            "memory_mib": {"settled": round(statistics.median(settled), 1), "end": round(statistics.median(last), 1)}
            if settled and last
            else {},
            "memory_growth_mib": round(growth, 2),
            "memory_curve": [[round(at, 2), round(size, 1)] for at, size in memory],
            "still_open": len(soak.open),
            "problems": problems[:20],
        }

    while time.monotonic() - started < seconds and (most_steps is None or steps < most_steps):
        before = time.process_time()
        soak.step(steps)
        steps += 1
        spent = time.process_time() - before
        busy += spent
        time.sleep(spent * (1 / duty - 1))
        if time.monotonic() - noted > seconds / 100:
            noted = time.monotonic()
            memory.append(((noted - started) / 60, process.memory_info().rss / 2**20))
            if progress is not None:
                progress(report())
    for _ in range(100 * (LONGEST + len(soak.open))):
        if soak.loop.idle:
            break
        for event in soak.loop.step():
            try:
                soak.consume(event)
            except BrokenPipeError:
                soak.loop.cancel(event.id)
    soak.problems += [f"request {id} was lost" for id in soak.open]
    return report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--duty", type=float, default=1.0, help="largest share of one core to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the report; written all along")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    facts = {
        **about(),
        "duty": arguments.duty,
        "max_rows": arguments.max_rows,
    }

    def keep(report: dict[str, Any]) -> None:
        save(facts | report, arguments)

    report = run_soak(60 * arguments.minutes, arguments.max_rows, duty=arguments.duty, seed=arguments.seed, progress=keep)
    keep(report)
    print(json.dumps(facts | report))
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
