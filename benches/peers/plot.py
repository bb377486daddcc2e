"""A plot of what `cargo bench -p moesaic-benches --bench layer` printed: how many times longer each
peer takes than moesaic, by number of tokens. One panel per layer and type, of all runs
in the file.

    python3 benches/peers/plot.py benches/results/layer-fastest.txt docs/layer.svg
"""

import math
import sys

COLOURS = {
    "torch-eager": "#d9a441",
    "torch-grouped": "#c8553d",
    "torch-compiled": "#d98880",
    "torch-loop": "#8c4f9f",
    "torch-packed": "#3d6cb9",
    "gemm-inner": "#4f9d69",
    "gemm-outer": "#93c47d",
    "candle": "#777777",
}
WIDTH, HEIGHT, LEFT, TOP, ACROSS = 300, 190, 46, 46, 2


def read(path):
    """Panels: title, and per peer a list of (tokens, ratio) for uniform routing, forward."""
    panels, peers, lines = {}, [], {}
    for line in open(path):
        if " threads: " in line and not line.startswith("#"):
            lines = panels.setdefault(line.split(":")[0], {})
        elif line.startswith("routing "):
            peers = line.split("|")[1].split()
        elif line.startswith("uniform ") and " forward " in line and "|" in line:
            tokens = int(line.split()[1])
            for peer, ratio in zip(peers, line.split("|")[1].split()):
                if ratio != "-":
                    lines.setdefault(peer, []).append((tokens, float(ratio)))
    for lines in panels.values():
        for points in lines.values():
            points.sort()
    # One point is no line.
    long = lambda lines: any(len(points) > 1 for points in lines.values())
    return [(title, lines) for title, lines in panels.items() if long(lines)]


def scale(value, low, high, size):
    return size * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))


def panel(title, lines, x0, y0):
    """SVG of one panel; both axes are logarithmic."""
    tokens = sorted({t for points in lines.values() for t, _ in points})
    ratios = [r for points in lines.values() for _, r in points]
    low, high = min(0.5, *ratios), max(2.0, *ratios)
    first, last = tokens[0] * 0.8, tokens[-1] * 1.25
    at = lambda t, r: (
        x0 + scale(t, first, last, WIDTH),
        y0 + HEIGHT - scale(r, low, high, HEIGHT),
    )
    out = [
        f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{title}</text>',
        f'<rect x="{x0}" y="{y0}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
    ]
    for ratio in (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000):
        if low <= ratio <= high:
            y = at(tokens[0], ratio)[1]
            stroke = "#333" if ratio == 1 else "#ddd"
            out.append(f'<path d="M{x0} {y:.1f}h{WIDTH}" stroke="{stroke}"/>')
            out.append(f'<text x="{x0 - 5}" y="{y + 4:.1f}" text-anchor="end">{ratio:g}</text>')
    for t in tokens:
        x = at(t, 1)[0]
        out.append(f'<text x="{x:.1f}" y="{y0 + HEIGHT + 15}" text-anchor="middle">{t}</text>')
    for peer, points in lines.items():
        colour = COLOURS.get(peer, "#000")
        path = " ".join("{:.1f},{:.1f}".format(*at(t, r)) for t, r in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for t, r in points:
            x, y = at(t, r)
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    return out


def legend(peers, y):
    out, x = [], LEFT
    for peer in peers:
        out.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{COLOURS.get(peer, "#000")}"/>')
        out.append(f'<text x="{x + 8}" y="{y}">{peer}</text>')
        x += 98
    return out


def main():
    source, target = sys.argv[1:3]
    panels = read(source)
    peers = [name for name in COLOURS if any(name in lines for _, lines in panels)]
    rows = (len(panels) + ACROSS - 1) // ACROSS
    width = max(LEFT + ACROSS * (WIDTH + LEFT), LEFT + 98 * len(peers))
    height = TOP + rows * (HEIGHT + 60)
    body = legend(peers, 18)
    for i, (title, lines) in enumerate(panels):
        x0 = LEFT + i % ACROSS * (WIDTH + LEFT)
        body += panel(title, lines, x0, TOP + i // ACROSS * (HEIGHT + 60) + 12)
    text = "time of a peer over moesaic's, by tokens of a call; above 1 moesaic is faster"
    with open(target, "w") as file:
        file.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="12">\n<title>{text}</title>\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
        )


main()
