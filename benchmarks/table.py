"""Writes the README's tables from the benchmarks' JSON.

python benchmarks/table.py            # rewrites README.md between its markers
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import mean

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
    return "\n".join([*lines, *_sources([results])])


def render_peers(reports: list[dict]) -> str:
    """One table of several reports of `peers.py`: a line per decoding, number of rows and method."""
    lines = [
        "| decoding | rows | method | mean | speed over plain, by prompts | tokens per forward | texts |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple, list[dict]] = {}
    for report in reports:
        for row in report["rows"]:
            groups.setdefault((row["setting"], row["rows"], row["method"]), []).append(row)
    for (setting, rows, method), found in groups.items():
        if method == "plain":
            continue
        by_set = ", ".join(f"{row['prompts']} {row['ratio_total']:.2f}" for row in found)
        texts = sum((Counter(row["match"]) for row in found), Counter())
        lines.append(
            f"| {setting} | {rows} | {method} | {mean(row['ratio_total'] for row in found):.2f}× | {by_set} | "
            f"{mean(row['tokens_per_forward'] for row in found):.2f} | "
            f"{', '.join(f'{count} {name}' for name, count in texts.items())} |"
        )
    return "\n".join([*lines, *_sources(reports)])


def _sources(reports: list[dict]) -> list[str]:
    """By what and when each report was made, and what there is to know of it."""
    lines = []
    for report in reports:
        note = f" {report['note']}" if "note" in report else ""
        lines += ["", f"Measured {report['date']} by `{report['command']}` on {report['machine']}.{note}"]
    return lines


def replace_section(path: Path, title: str, body: str) -> None:
    """Puts `body` between `<!-- title -->` and the comment that begins with `end of` in a Markdown file."""
    start, end = f"<!-- {title} -->", f"<!-- end of {title.split(':')[0]} -->"
    text = path.read_text(encoding="utf-8")
    before, after = text.split(start)[0], text.split(end)[1]
    write_text(path, f"{before}{start}\n{body}\n{end}{after}")


def main() -> None:
    found = {
        name: json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        for name in ("speed", "peers", "peers_batch")
    }
    readme = ROOT / "README.md"
    replace_section(readme, "speed table: python benchmarks/table.py", render(found["speed"]))
    replace_section(readme, "peers table: python benchmarks/table.py", render_peers([found["peers"], found["peers_batch"]]))


if __name__ == "__main__":
    main()
