"""What the benchmarks share: which prompts they run on, on what machine, and the JSON they leave."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_dspark
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
        return {"built-in": PROMPTS[: arguments.count]}
    return dict(read_prompt_sets([arguments.prompts], arguments.count))


def chosen_prompts(arguments: argparse.Namespace) -> list[Any]:
    """The prompts asked for, of all sets."""
    return [prompt for texts in chosen_sets(arguments).values() for prompt in texts]


def about(threads: int | None = None) -> dict[str, Any]:
    """By what command, when and on what a report is made; `threads` are this process's if not given."""
    count = threads or torch.get_num_threads()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {count} thread{'s' if count > 1 else ''}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, hf_dspark {hf_dspark.__version__}",
    }


def save(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Writes a report to the file asked for, if there is one."""
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, json.dumps(report, indent=1) + "\n")
