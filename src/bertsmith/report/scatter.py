"""A log-log plot of counts as an SVG, written by hand: no plotting library is needed."""

import math
from collections.abc import Sequence
from pathlib import Path

from bertsmith.report.run_folder import write_text

WIDTH, HEIGHT, MARGIN = 640, 440, 60
MOST_POINTS = 4000
"""Points that fall onto each other are drawn once, and of more than this only some."""


def write_scatter(
    file: Path, xs: Sequence[int], ys: Sequence[int], *, x_name: str, y_name: str
) -> None:
    """Draw a point for each pair of counts; a count of 0 lies below 1, where no logarithm is.

    Args:
        file: To write.
        xs: Counts, one a point.
        ys: As many.
        x_name: What they count.
        y_name: What they count.
    """
    decades_x, decades_y = (math.ceil(math.log10(max([*values, 10]))) for values in (xs, ys))

    def across(x: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (_log(x) + 0.5) / (decades_x + 0.5)

    def up(y: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (_log(y) + 0.5) / (decades_y + 0.5)

    points = sorted({(round(across(x), 1), round(up(y), 1)) for x, y in zip(xs, ys, strict=True)})
    points = points[:: -(-len(points) // MOST_POINTS) or 1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in (0, *(10**d for d in range(decades_x + 1))):
        x = across(value)
        parts.append(
            f'<path d="M{x:.1f} {MARGIN}V{HEIGHT - MARGIN}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{value:,}</text>'
        )
    for value in (0, *(10**d for d in range(decades_y + 1))):
        y = up(value)
        parts.append(
            f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>'
            f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,}</text>'
        )
    parts += [f'<circle cx="{x}" cy="{y}" r="2" fill="#1f77b4"/>' for x, y in points]
    parts += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">{x_name}</text>',
        f'<text x="{MARGIN}" y="{MARGIN - 20}">{y_name}</text>',
        "</svg>",
    ]
    write_text(file, "\n".join(parts) + "\n")


def _log(value: float) -> float:
    return math.log10(value) if value >= 1 else -0.5
