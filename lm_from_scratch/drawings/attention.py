"""Drawings of chapter 3: one query and its keys, a softmax in tiles, documents in a row."""

import math
import operator
from collections.abc import Iterator, Sequence

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid, slides
from lm_from_scratch.drawings.colours import BLUE, COLOURS, INK, ORANGE, RED
from lm_from_scratch.drawings.labels import minus, printable


def vector(
    canvas: Canvas, x: float, y: float, wide: float, numbers: Sequence[float], largest: float,
    high: float = 12, faint: bool = False,
) -> None:  # fmt: skip
    """A vector as bars from a line at y: upwards for positive numbers, downwards for negative
    ones, ``high`` for the ``largest``."""
    step = wide / len(numbers)
    canvas.line(x, y, x + wide, y, 0.6, opacity=0.35)
    for colour, sign in ((BLUE, 1), (ORANGE, -1)):
        lines = "".join(
            f"M{at:.1f} {y:g}L{at:.1f} {y - high * number / largest:.1f}"
            for at, number in zip((x + step * (i + 0.5) for i in range(len(numbers))), numbers)
            if sign * number > 0
        )
        if lines:
            canvas.marks.append(
                f'<path d="{lines}" stroke="{colour}" stroke-width="{0.72 * step:.1f}" '
                f'stroke-opacity="{0.3 if faint else 1}"/>'
            )


def query_steps(
    words: Sequence[str], query: Sequence[float], keys: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]], compared: int,
) -> Drawing:  # fmt: skip
    """Attention for the ``query`` of the last word, a frame for each step: the keys, the product
    with the key ``compared``, all scores, their softmax, and the mixture of the values.

    A vector is a row of bars, upwards for positive features and downwards for negative ones.
    """
    asks, names = printable(words[-1]), [printable(word) for word in words]
    products = [[a * b for a, b in zip(query, key, strict=True)] for key in keys]
    root = len(query) ** 0.5
    scores = [sum(each) / root for each in products]
    powers = [math.exp(score) for score in scores]
    weights = [power / sum(powers) for power in powers]
    mixture = [sum(map(operator.mul, weights, column)) for column in zip(*values, strict=True)]
    best = weights.index(max(weights))
    largest, of_values = (
        max(abs(number) for vector in vectors for number in vector)
        for vectors in ([query, *keys], values)
    )
    row, top, left, wide = 27, 52, 88, 150
    right, end = left + wide, top + 27 * len(words)

    def sheet(title: str, says: str) -> Canvas:
        canvas = Canvas(WIDTH, end + 46, says)
        canvas.title(8, title)
        return canvas

    def rows(canvas: Canvas, bold: int) -> Iterator[tuple[int, float]]:
        for j, name in enumerate(names):
            y = top + row * (j + 0.5)
            canvas.text(left - 8, y, name, 11, "end", bold=j == bold)
            yield j, y

    first = sheet(f"The query of {asks}, and {len(keys)} keys", "a query and its keys as bars")
    first.note(left - 8, 34, f"query {asks}", "end")
    vector(first, left, 34, WIDTH - left, query, largest)
    for j, y in rows(first, len(words) - 1):
        vector(first, left, y, WIDTH - left, keys[j], largest)
    first.note(2, end + 16, f"A vector of {len(query)} numbers: up is positive, down is negative.")
    first.note(2, end + 34, f"Which keys fit the query of {asks}?")

    sum_of = sum(products[compared])
    second = sheet(
        f"q · k: {asks} meets {names[compared]}",
        f"the products with {names[compared]} sum to {_one(sum_of)}",
    )
    third_of = (end - 30) / 3
    for i, (name, numbers) in enumerate(
        (("query", query), ("key", keys[compared]), ("product", products[compared]))
    ):
        y = 26 + third_of * (i + 0.5)
        second.text(54, y, name, 12, "end", bold=i == 2)
        vector(second, 62, y, WIDTH - 62, numbers, max(map(abs, numbers)), third_of * 0.42)
    second.text(
        2, end + 16, f"The sum of the {len(query)} products is {_one(sum_of)}.", 12, "start"
    )
    divided = f"Divided by √{len(query)} it is the score: {_one(scores[compared])}"
    second.text(2, end + 34, divided, 12, "start", bold=True)

    third = sheet(f"A score for each of the {len(keys)} keys", "scores")
    third.note(left, 34, "products")
    third.note(right + 34, 34, "score", "end")
    low, high = min(0.0, *scores), max(0.0, *scores)
    zero = right + 42 - low * (WIDTH - right - 44) / (high - low)
    third.line(zero, top, zero, end, 0.8, opacity=0.5)
    for j, y in rows(third, best):
        vector(third, left, y, wide, products[j], max(map(abs, products[best])))
        third.text(right + 34, y, _one(scores[j]), 12, "end", bold=j == best)
        long = scores[j] * (WIDTH - right - 44) / (high - low)
        third.box(
            min(zero, zero + long),
            y - 7,
            abs(long),
            14,
            BLUE if long > 0 else ORANGE,
            0.6,
            radius=1,
        )
    third.note(2, end + 16, "More bars up than down: a high score.")
    says = ", ".join(f"{name} {_one(score)}" for name, score in zip(names, scores))

    fourth = sheet("Softmax makes weights of the scores", "weights")
    columns = left + 30, left + 106, left + 158
    for x, name in zip(columns, ("score", "exponential", "weight")):
        fourth.note(x, 34, name, "end")
    for j, y in rows(fourth, best):
        for x, number in zip(columns, (_one(scores[j]), _signed(powers[j]), _signed(weights[j]))):
            fourth.text(x, y, number, 12, "end", bold=j == best)
        fourth.box(
            columns[2] + 8, y - 7, (WIDTH - columns[2] - 10) * weights[j], 14, BLUE, 0.6, radius=1
        )
    fourth.text(columns[1], end + 16, f"{sum(powers):.2f}", 12, "end", bold=True)
    fourth.text(columns[2], end + 16, "1.00", 12, "end", bold=True)
    fourth.note(left - 8, end + 16, "sum", "end")
    fourth.note(2, end + 34, f"Each number, divided by the sum {sum(powers):.2f}, is a weight.")
    of_all = ", ".join(f"{name} {weight:.2f}" for name, weight in zip(names, weights))

    fifth = sheet(f"What {asks} receives: a mixture of the values", "the weighted values")
    fifth.note(left + 32, 34, "weight", "end")
    fifth.note(left + 46, 34, "× value")
    for j, y in rows(fifth, best):
        fifth.text(left + 32, y, _signed(weights[j]), 12, "end", bold=j == best)
        vector(fifth, left + 46, y, WIDTH - left - 46, values[j], of_values, 12, True)
        share = [weights[j] * number for number in values[j]]
        vector(fifth, left + 46, y, WIDTH - left - 46, share, of_values)
    fifth.line(left + 46, end + 3, WIDTH, end + 3, 0.8, opacity=0.5)
    fifth.text(left + 32, end + 22, "sum", 12, "end", bold=True)
    vector(fifth, left + 46, end + 22, WIDTH - left - 46, mixture, of_values)
    frames = (
        first.drawing(), second.drawing(), third.drawing(says),
        fourth.drawing(of_all), fifth.drawing(f"{asks} receives the weighted sum"),
    )  # fmt: skip
    return slides("Step", frames, ["keys", "q · k", "scores", "softmax", "mixture"])


def online_softmax_frames(
    words: Sequence[str], scores: Sequence[float], values: Sequence[float], tile: int
) -> Drawing:
    """A softmax in tiles, one frame per tile of keys: the scores it reads, the factor that corrects
    what was added up before, and m, l, a after it. ``values`` is one feature of each key."""
    high, top, left = 163, 4, 44
    count = -(-len(words) // tile)
    canvas = Canvas(WIDTH, top + count * high + 16)
    columns = 44.0, 155.0, 279.0
    meanings = "largest score", "sum of exponentials", "weighted values"
    for x, name, meaning in zip(columns, "mla", meanings):
        canvas.text(x, 8, name, 13, bold=True)
        canvas.note(x, 23, meaning, "middle")
    m, l, a, captions = -math.inf, 0.0, 0.0, []
    for i in range(count):
        keys = range(i * tile, min((i + 1) * tile, len(words)))
        y = top + i * high + (0 if i else 30)  # the first frame corrects nothing: it is lower
        canvas.line(0, y + 4, WIDTH, y + 4, opacity=0.3)
        canvas.title(y + 20, f"tile {i + 1}", size=12)
        strip = Grid(canvas, WIDTH - 241, y + 14, 240 / len(words), 15)
        for j in range(len(words)):  # read and forgotten, in work, not yet read
            look = (INK, 0.15) if j < keys[0] else (BLUE, 0.6) if j in keys else ("none", 0.0)
            strip.cell(0, j, "", 0, *look, INK)
        for j in keys:
            x = left + (WIDTH - left) * (j - keys[0] + 0.5) / tile
            canvas.text(x, y + 46, printable(words[j]), 12, bold=True)
            canvas.text(x, y + 63, _signed(scores[j]), 12)
            canvas.text(x, y + 80, _signed(values[j]), 12)
        for k, row in enumerate(("key", "score", "value")):
            canvas.note(2, y + 46 + 17 * k, row)
        top_score = max(m, *(scores[j] for j in keys))
        weights = [math.exp(scores[j] - top_score) for j in keys]
        new = sum(weights), sum(w * values[j] for w, j in zip(weights, keys))
        factor = math.exp(m - top_score)
        if i:
            power = f"{_signed(m)} − {_signed(top_score)}".replace("− −", "+ ")
            canvas.text(2, y + 103, f"factor  exp({power}) = {factor:.2f}", 12, "start", RED)
            sums = (
                f"{factor:.2f} × {_signed(before)} + {_signed(more)}".replace("+ −", "− ")
                for before, more in zip((l, a), new)
            )
            for x, text in zip(columns, (f"{_signed(m)} → {_signed(top_score)}", *sums)):
                canvas.text(x, y + 123, text, 11)
        m, l, a = top_score, factor * l + new[0], factor * a + new[1]
        captions.append(f"m = {m:.1f}, l = {l:.2f}, a = {a:.2f}")
        for x, name, number in zip(columns, "mla", (m, l, a)):
            canvas.text(x, y + (143 if i else 113), f"{name} = {_signed(number)}", 13, bold=True)
    canvas.text(columns[2], top + count * high + 6, f"a / l = {_signed(a / l)}", 13, bold=True)
    return canvas.drawing(f"{count} tiles of keys; after each, " + "; ".join(captions))


def _one(number: float) -> str:
    return minus(f"{number:.1f}")


def _signed(number: float) -> str:
    return minus(f"{number:.2f}")


def packed_row(pieces: Sequence[Sequence[str]], width: int, a_line: int = 6) -> Drawing:
    """Documents, each a list of pieces, end to end in a row of ``width`` slots. Under each slot are
    its position, the number of its document, and the piece that it is to predict. The row is broken
    into lines of ``a_line`` slots."""
    slots = [(piece, p, d) for d, each in enumerate(pieces) for p, piece in enumerate(each)]
    targets = [target for each in pieces for target in [*each[1:], "–"]]
    empty = width - len(slots)
    canvas = Canvas(
        WIDTH, 94 * -(-width // a_line) - 14,
        f"{len(pieces)} documents in a row of {width} slots, {empty} of them empty. Positions "
        "start again at 0 in each document, each has a number, and its last token has no target",
    )  # fmt: skip
    for i, (piece, position, number) in enumerate([*slots, *[("", -1, -1)] * empty]):
        line, column = divmod(i, a_line)
        grid = Grid(canvas, 63, 94 * line + 2, (WIDTH - 62) / a_line, 26, 2)
        if column == 0:
            for k, name in enumerate(("position", "document", "target")):
                canvas.note(56, 94 * line + 38 + 16 * k, name, "end")
        fill = COLOURS[number % 5] if piece else "none"
        grid.cell(0, column, piece.strip(), 11, fill, 0.25, INK, 4)
        x, y = grid.middle(0, column)
        canvas.text(x, y + 24, minus(position), 12)
        canvas.text(x, y + 40, minus(number), 12)
        if piece:
            canvas.note(x, y + 56, targets[i].strip(), "middle")
    return canvas.drawing()
