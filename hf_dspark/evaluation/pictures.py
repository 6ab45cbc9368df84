"""Pictures of an evaluation: acceptance along the block, static thresholds, promises kept; and of a simulated server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_evaluation(results: Sequence[dict[str, Any]], folder: str | Path) -> list[Path]:
    """Draws the results of [`~hf_dspark.evaluation.evaluate`].

    Args:
        results (sequence of `dict`): its rows.
        folder (`str` or `Path`): made if it does not exist.

    Returns:
        `list[Path]`: `acceptance.png` (conditional acceptance by position, a line per set), and for a drafter with a
        confidence head `thresholds.png` (accepted against verified tokens along static thresholds) and
        `reliability.png` (promised and observed survival by position).
    """
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = list(dict.fromkeys(row["setting"] for row in results))
    written = []

    def panels(title: str, name: str, draw: Any, xlabel: str, ylabel: str) -> None:
        figure = Figure(figsize=(4.6 * len(settings), 3.8), layout="constrained")
        for axes, setting in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings, strict=True):
            for row in results:
                if row["setting"] == setting:
                    draw(axes, row)
            axes.set(title=setting, xlabel=xlabel, ylabel=ylabel)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        figure.suptitle(title)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
        written.append(path)

    def acceptance(axes: Any, row: dict[str, Any]) -> None:
        known = [entry for entry in row["reliability"] if entry["conditional"] is not None]
        axes.plot(
            [entry["position"] for entry in known],
            [entry["conditional"] for entry in known],
            marker="o",
            label=f"{row['prompts']} (τ {row['tau']:.2f})",
        )
        axes.set_ylim(0, 1)
        axes.set_xticks([entry["position"] for entry in row["reliability"]])

    def sweep(axes: Any, row: dict[str, Any]) -> None:
        axes.plot(
            [entry["verified"] for entry in row["thresholds"]],
            [entry["tau"] for entry in row["thresholds"]],
            marker=".",
            label=row["prompts"],
        )

    def promises(axes: Any, row: dict[str, Any]) -> None:
        known = [entry for entry in row["reliability"] if entry["blocks"]]
        axes.plot(
            [entry["promised"] for entry in known], [entry["survival"] for entry in known], marker="o", label=row["prompts"]
        )
        axes.axline((0, 0), (1, 1), color="grey", linewidth=0.8, zorder=0)
        axes.set(xlim=(0, 1), ylim=(0, 1))

    panels("Acceptance, given that all before it was accepted", "acceptance", acceptance, "draft position", "acceptance")
    if any(row["thresholds"] for row in results):
        panels("Static thresholds on each confidence", "thresholds", sweep, "verified tokens per block", "τ")
        panels("Survival by position: promised and observed", "reliability", promises, "promised", "observed")
    return written


def draw_simulation(results: Sequence[dict[str, Any]], folder: str | Path) -> list[Path]:
    """Draws the results of [`~hf_dspark.simulation.sweep`].

    Args:
        results (sequence of `dict`): its rows.
        folder (`str` or `Path`): made if it does not exist.

    Returns:
        `list[Path]`: `throughput.png` (total throughput against the speed of one user, a line per policy along the number of
        concurrent requests) and `budget.png` (verified draft tokens per request and round against that number).
    """
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    axes_of = {
        "throughput": ("user_speed", "throughput", "tokens per second of one user", "tokens per second, all users"),
        "budget": ("concurrency", "budget", "concurrent requests", "verified draft tokens per request and round"),
    }
    written = []
    for name, (x, y, xlabel, ylabel) in axes_of.items():
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.subplots()
        for policy in dict.fromkeys(row["policy"] for row in results):
            rows = sorted((row for row in results if row["policy"] == policy), key=lambda row: row["concurrency"])
            static = policy == "plain" or policy.startswith("fixed")
            axes.plot(
                [row[x] for row in rows], [row[y] for row in rows], marker="o", markersize=3.5, label=policy,
                linestyle="--" if static else "-", alpha=0.6 if static else 1.0,
            )  # fmt: skip
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if name == "budget":
            axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
    return written
