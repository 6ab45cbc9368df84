"""Writes the README's speed table from the benchmark's JSON.

python benchmarks/table.py            # rewrites README.md between its markers
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- speed table: python benchmarks/table.py -->", "<!-- end of speed table -->"


def render(results: dict) -> str:
    """The table in Markdown, with the command, machine and date it was measured on."""
    lines = [
        "| target | decoding | prompts | speed over plain | τ | verified | rejected | texts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        match = ", ".join(f"{count} {name}" for name, count in row["match"].items())
        lines.append(
            f"| {row['target']} | {row['setting']} | {row['prompts']} | {row['ratio_total']:.2f}× | {row['tau']:.2f} | "
            f"{row['verified']} | {row['rejected']} | {match} |"
        )
    lines += ["", f"Measured {results['date']} by `{results['command']}` on {results['machine']}."]
    return "\n".join(lines)


def main() -> None:
    results = json.loads((ROOT / "benchmarks/results/speed.json").read_text(encoding="utf-8"))
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    readme.write_text(f"{before}{START}\n{render(results)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
