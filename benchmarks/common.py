"""What the benchmarks share: which prompts they run on, and the JSON they leave."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dspark.demo.show import PROMPTS
from hf_dspark.evaluation import read_prompt_sets
from hf_dspark.formats.files import write_text


def add_options(parser: argparse.ArgumentParser, count: int) -> None:
    """Adds `--prompts`, `--count` and `--output` to a parser."""
    parser.add_argument(
        "--prompts", type=Path, help="folder of JSONL files with a `prompt` each line; built-in ones if not given"
    )
    parser.add_argument("--count", type=int, default=count, help="prompts per set")
    parser.add_argument("--output", type=Path, help="JSON file for the results")


def chosen_sets(arguments: argparse.Namespace) -> dict[str, Sequence[Any]]:
    """The prompts asked for, by set."""
    if arguments.prompts is None:
        return {"built-in": PROMPTS}
    return dict(read_prompt_sets([arguments.prompts], arguments.count))


def chosen_prompts(arguments: argparse.Namespace) -> list[Any]:
    """The prompts asked for, of all sets."""
    return [prompt for texts in chosen_sets(arguments).values() for prompt in texts]


def save(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Writes a report to the file asked for, if there is one."""
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")
