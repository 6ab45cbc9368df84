"""Pictures of an evaluation: acceptance along the block, static thresholds, promises and what became of them."""

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
