"""A plot as an SVG file, without a library: lines of numbers from 0 to 1, one for each step."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

_COLOURS = ("#d1495b", "#30638e", "#edae49", "#00798c")
_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 360, 50, 40


def write_plot(path: Path, title: str, lines: Mapping[str, Sequence[float]]) -> None:
    """lines: numbers of each step, by what they are; the first is drawn thick."""
    steps = max(len(numbers) for numbers in lines.values())
    right, bottom = _WIDTH - 130, _HEIGHT - 40

    def x(step: int) -> float:
        return _LEFT + (right - _LEFT) * step / max(1, steps - 1)

    def y(number: float) -> float:
        return bottom - (bottom - _TOP) * number

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>'
    ]
    for tick in range(6):
        at = y(tick / 5)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick / 5:.1f}</text>')
    every = max(1, steps // 8)
    for step in range(0, steps, every):
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
    for number, (name, values) in enumerate(lines.items()):
        colour, width = _COLOURS[number % len(_COLOURS)], 3 if number == 0 else 1.5
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        label = _TOP + 20 * number + 10
        parts.append(f'<line x1="{right + 12}" x2="{right + 32}" y1="{label}" y2="{label}" stroke="{colour}"/>')
        parts.append(f'<text x="{right + 38}" y="{label + 4}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
