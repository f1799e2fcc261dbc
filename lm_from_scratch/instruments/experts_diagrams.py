"""Drawings of mixtures of experts: who visits whom, and how busy each expert is."""

from collections.abc import Mapping, Sequence
from html import escape

from lm_from_scratch.instruments.canvas import BLUE, INK, ORANGE, Canvas, Drawing, tint
from lm_from_scratch.instruments.plot import COLOURS, printable


def visited(pieces: Sequence[str], experts: Sequence[int]) -> Drawing:
    """The pieces of a text, each in the colour of an expert and above its number."""
    boxes = [
        f'<span style="display: inline-block; margin: 0 2px 4px 0; padding: 1px 3px; '
        f"border-radius: 4px; text-align: center; white-space: pre; "
        f'background: {tint(COLOURS[e % 7], 0.35)}">{escape(printable(piece))}'
        f"<br><small>{e}</small></span>"
        for piece, e in zip(pieces, experts, strict=True)
    ]
    says = " ".join(f"{piece}[{e}]" for piece, e in zip(pieces, experts, strict=True))
    return Drawing(f'<div class="diagram tokens">{"".join(boxes)}</div>', says)


def mixture(word: str, scores: Sequence[float], weights: Mapping[int, float]) -> Drawing:
    """One token in a layer of experts: a bar for its score at each expert, arrows to those with a
    weight, and the sum of what these say. The others are empty: nothing is computed there."""
    E, left, right, size = len(scores), 8, 335, 20
    step = (right - left) / E
    low, high = min(0.0, *scores), max(scores)
    said = ", ".join(f"expert {e} with {w:.2f}" for e, w in weights.items())
    canvas = Canvas(343, 262, f"{word!r} visits {len(weights)} of {E} experts: {said}")
    canvas.text(left, 12, f"{printable(word)}: one score for each expert", 13, "start", bold=True)
    canvas.line(left, 84, right, 84, opacity=0.5)
    middle = (left + right) / 2
    canvas.box(middle - 46, 226, 92, 26, ORANGE, 0.3)
    canvas.text(middle, 239, "weighted sum", 13)
    for e, score in enumerate(scores):
        x, chosen = left + step * (e + 0.5), e in weights
        height = max(52 * (score - low) / (high - low or 1), 1)
        colour = ORANGE if chosen else BLUE
        canvas.box(x - 5, 84 - height, 10, height, colour, 0.55, colour, radius=1)
        canvas.text(x, 94, str(e), 11, bold=chosen)
        box = (x - min(size, step - 3) / 2, 134, min(size, step - 3), 40)
        canvas.box(*box, ORANGE if chosen else "none", 0.4, radius=3)
        if chosen:
            canvas.line(x, 103, x, 132, 1.6, ORANGE, arrow=True)
            end = middle + (x - middle) * 0.2
            canvas.line(x, 175, end, 224, 1.6, ORANGE, arrow=True)
            canvas.text(min(max(x, 26), 317), 122 - 8, f"{weights[e]:.2f}", 12, bold=True)
    canvas.text(left, 188, "MLPs", 12, "start", opacity=0.8)
    return canvas.drawing()


def loads(counts: Mapping[str, Sequence[float]]) -> Drawing:
    """How often each expert was visited, a row of bars for each name. The line is the mean."""
    row, left, right = 108, 8, 335
    canvas = Canvas(343, row * len(counts), "")
    says = []
    largest = max(max(values) / (sum(values) / len(values)) for values in counts.values())
    for r, (name, values) in enumerate(counts.items()):
        y, step, mean = row * r + 88, (right - left) / len(values), sum(values) / len(values)
        over = max(values) / mean
        canvas.text(left, row * r + 12, name, 13, "start", bold=True)
        for e, value in enumerate(values):
            height = max(62 * value / mean / largest, 1)
            colour = ORANGE if value == max(values) else BLUE
            canvas.box(left + step * e + 2, y - height, step - 4, height, colour, 0.55, colour, 1)
            canvas.text(left + step * (e + 0.5), y + 9, str(e), 11, opacity=0.8)
        level = y - 62 / largest
        canvas.line(left, level, right, level, 1.4, INK, dashes="5 3")
        says.append(f"{name}: the busiest expert has {over:.1f} times the mean")
    canvas.says = "; ".join(says)
    return canvas.drawing()
