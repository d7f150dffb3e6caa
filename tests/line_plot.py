"""A line plot as SVG."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 40, 90
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


def line_plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[float]]) -> str:
    """Up to five lines by name over 0, 1, 2, ..., on a logarithmic axis; values must be positive."""
    values = [value for line in lines.values() for value in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    num_points = max(len(line) for line in lines.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, "middle", size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 38, x_label, "middle"),
        f'<g transform="rotate(-90 18 {HEIGHT / 2})">{_text(18, HEIGHT / 2, y_label, "middle")}</g>',
        *_axes(num_points, low, max(high, low + 1)),
    ]
    for (name, line), colour, place in zip(lines.items(), COLOURS, range(len(lines)), strict=False):
        points = " ".join(
            f"{_x(i, num_points):.1f},{_y(value, low, max(high, low + 1)):.1f}" for i, value in enumerate(line)
        )
        # Lines that run over each other show both.
        dashes = ' stroke-dasharray="6 6"' if place % 2 else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        parts += _legend(name, colour, place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(num_points: int, low: int, high: int) -> Iterator[str]:
    for exponent in range(low, high + 1):
        for digit in (1, 2, 5) if exponent < high else (1,):
            y = _y(digit * 10.0**exponent, low, high)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            if digit == 1 or high - low <= 3:
                yield _text(LEFT - 8, y + 4, f"{digit}e{exponent}", "end")
    for i in range(0, num_points, max(1, num_points // 10)):
        yield _text(_x(i, num_points), HEIGHT - BOTTOM + 18, str(i), "middle")


def _legend(name: str, colour: str, place: int) -> Iterator[str]:
    x, y = LEFT + place % 2 * (WIDTH - LEFT) / 2, HEIGHT - 36 + place // 2 * 18
    yield f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
    yield _text(x + 30, y + 4, name)


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _x(i: int, num_points: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * i / max(num_points - 1, 1)


def _y(value: float, low: int, high: int) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(value) - low) / (high - low)
