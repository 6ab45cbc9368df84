"""Writes the README's speed table from the benchmark's JSON.

python benchmarks/table.py            # rewrites README.md between its markers
"""

from __future__ import annotations

import json
from pathlib import Path

from hf_dspark.formats.files import write_text

ROOT = Path(__file__).resolve().parent.parent


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


def replace_section(path: Path, title: str, body: str) -> None:
    """Puts `body` between `<!-- title -->` and the comment that begins with `end of` in a Markdown file."""
    start, end = f"<!-- {title} -->", f"<!-- end of {title.split(':')[0]} -->"
    text = path.read_text(encoding="utf-8")
    before, after = text.split(start)[0], text.split(end)[1]
    write_text(path, f"{before}{start}\n{body}\n{end}{after}")


def main() -> None:
    results = json.loads((ROOT / "benchmarks/results/speed.json").read_text(encoding="utf-8"))
    replace_section(ROOT / "README.md", "speed table: python benchmarks/table.py", render(results))


if __name__ == "__main__":
    main()
