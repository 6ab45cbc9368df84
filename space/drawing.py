"""Small charts as inline SVG: they follow the page's colours, dark or light, and its width."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 14, 40


def curve(
    points: Sequence[tuple[float, float]],
    x_label: str,
    y_label: str,
    *,
    chosen: tuple[float, float] | None = None,
    others: Sequence[tuple[float, float]] = (),
    beyond: Sequence[tuple[float, float]] = (),
    log_x: bool = False,
    description: str = "",
) -> str:
    """Points joined by straight lines, as they are.

    Args:
        points: (x, y), ascending in x.
        x_label, y_label: names of the axes.
        chosen: a point to stress.
        others: points to mark lightly.
        beyond: points joined by a dashed line: not measured.
        log_x: whether x counts in powers of two.
        description: for those who cannot see the chart.
    """
    everything = [*points, *beyond, *others, *([chosen] if chosen else [])]
    place_x, place_y = (math.log2 if log_x else float), float
    low, high = (edge(place_x(x) for x, _ in everything) for edge in (min, max))
    top = max(y for _, y in everything) * 1.08 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        share = (place_x(x) - low) / ((high - low) or 1)
        rise = place_y(y) / top
        return _LEFT + 8 + share * (WIDTH - _LEFT - _RIGHT - 16), HEIGHT - _BOTTOM - rise * (HEIGHT - _TOP - _BOTTOM)

    def path(line: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))

    parts = [*_y_axis(top, y_label)]
    marks = _powers(low, high) if log_x else sorted({x for x, _ in points})
    for mark in marks:
        x, _ = at(mark, 0)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{mark:g}</text>')
    parts.append(_x_label(x_label))
    parts.append(f'<polyline class="line" points="{path(points)}"/>')
    if beyond:
        parts.append(f'<polyline class="line beyond" points="{path([points[-1], *beyond])}"/>')
    parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in (at(*point) for point in points)]
    parts += [f'<circle class="other" cx="{x:.1f}" cy="{y:.1f}" r="5"/>' for x, y in (at(*point) for point in others)]
    if chosen:
        x, y = at(*chosen)
        parts.append(f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
    return _svg(parts, description)


def bars(
    labels: Sequence[str],
    values: Sequence[float],
    x_label: str,
    y_label: str,
    *,
    top: float,
    chosen: int,
    description: str = "",
) -> str:
    """One bar a label, with its value above; `chosen` is the index of the one to stress."""
    parts, slot = [*_y_axis(top, y_label)], (WIDTH - _LEFT - _RIGHT) / len(labels)
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        height = value / top * (HEIGHT - _TOP - _BOTTOM)
        x, y = _LEFT + i * slot, HEIGHT - _BOTTOM - height
        kind = "bar chosen" if i == chosen else "bar"
        parts.append(
            f'<rect class="{kind}" x="{x + 4:.1f}" y="{y:.1f}" width="{slot - 8:.1f}" height="{height:.1f}"/>'
            f'<text class="tick" x="{x + slot / 2:.1f}" y="{y - 3:.1f}" text-anchor="middle">{value:g}</text>'
            f'<text class="tick" x="{x + slot / 2:.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{label}</text>'
        )
    return _svg([*parts, _x_label(x_label)], description)


def _svg(parts: Sequence[str], description: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{description}">{"".join(parts)}</svg>'


def _x_label(label: str) -> str:
    return f'<text class="axis" x="{(_LEFT + WIDTH) / 2}" y="{HEIGHT - 5}" text-anchor="middle">{label}</text>'


def _y_axis(top: float, label: str) -> list[str]:
    step = 10 ** math.floor(math.log10(top))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if top / s <= 5)
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts = [f'<text class="axis" transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{label}</text>']
    for n in range(int(top / step) + 1):
        y = HEIGHT - _BOTTOM - n * step / top * (HEIGHT - _TOP - _BOTTOM)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{n * step:g}</text>'
        )
    return parts


def _powers(low: float, high: float) -> list[int]:
    """Powers of two between two logarithms, at most nine."""
    exponents = range(math.ceil(low), math.floor(high) + 1)
    return [2**n for n in exponents[:: max(1, math.ceil(len(exponents) / 9))]]
