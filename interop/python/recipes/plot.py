"""Draws the curves of a recipe: the mean of the seeds as a line, their range as a band.

    python interop/python/recipes/plot.py curves.json curves.svg
"""

from __future__ import annotations

import json
import math
import sys

# Blue and orange, legible on light and dark backgrounds, as in docs/char_lm.svg.
COLOURS = {"dense": "#2f81f7", "experts": "#d9730d"}
INK = "#7d8590"
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 260, 52, 62, 70


def ticks(low: float, high: float) -> list[float]:
    """Returns round values from below low to above high."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4 or 1.0))
    step = next(power * f for f in (1, 2, 5, 10) if (high - low) / (power * f) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, last + 1)]


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK) -> str:
    """Returns an SVG text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def panel(models: dict, key: str, title: str, x0: float) -> list[str]:
    """Returns one panel: the curves of a key of each point."""
    curves = {
        name: [[run[at][key] for run in model["runs"]] for at in range(len(model["runs"][0]))]
        for name, model in models.items()
    }
    steps = [point["step"] for point in models["dense"]["runs"][0]]
    values = [value for curve in curves.values() for point in curve for value in point]
    marks = ticks(min(values), max(values))
    low, high = marks[0], marks[-1] if marks[-1] > marks[0] else marks[0] + 1

    def x(step: float) -> float:
        return x0 + WIDTH * step / steps[-1]

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    out = [text(x0, TOP - 12, title)]
    for mark in marks:
        out.append(f'<path d="M{x0} {y(mark):.1f}h{WIDTH}" stroke="{INK}" stroke-opacity="0.3"/>')
        out.append(text(x0 - 6, y(mark) + 4, f"{mark:.3g}", "end"))
    for step in ticks(0, steps[-1]):
        if step <= steps[-1]:
            out.append(text(x(step), TOP + HEIGHT + 18, f"{step:g}", "middle"))
    out.append(text(x0 + WIDTH / 2, TOP + HEIGHT + 36, "step", "middle"))
    for name, curve in curves.items():
        line = [f"{x(s):.1f} {y(sum(p) / len(p)):.1f}" for s, p in zip(steps, curve)]
        band = [f"{x(s):.1f} {y(max(p)):.1f}" for s, p in zip(steps, curve)]
        band += [f"{x(s):.1f} {y(min(p)):.1f}" for s, p in reversed(list(zip(steps, curve)))]
        colour = COLOURS[name]
        out.append(f'<path d="M{"L".join(band)}Z" fill="{colour}" fill-opacity="0.2"/>')
        out.append(f'<path d="M{"L".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return out


def svg(result: dict) -> str:
    """Returns the picture of a recipe's result."""
    models, title = result["models"], result["title"]
    body = [text(LEFT, 20, title)]
    for number, name in enumerate(models):
        body.append(text(LEFT + WIDTH + GAP + 170 + 80 * number, 20, name, colour=COLOURS[name]))
    body += panel(models, "loss", f"held-out loss, {result['unit']}", LEFT)
    body += panel(models, "accuracy", "held-out accuracy", LEFT + WIDTH + GAP)
    width, height = LEFT + 2 * WIDTH + GAP + 20, TOP + HEIGHT + 48
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13">\n<title>{title}</title>\n'
        + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as source:
        picture = svg(json.load(source))
    with open(sys.argv[2], "w", encoding="utf-8") as target:
        target.write(picture)
