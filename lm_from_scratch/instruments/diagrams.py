"""Drawings of how things work, as SVG and HTML: tokens, blocks, lines of attention.

Results are plotted (`plot`); here mechanisms are drawn. Ink is the colour of the text around a
drawing, and other colours are those of `plot`, as tints that hold on white and on black. A drawing
is at most 343 units wide where it can be, so that a phone shows it at its natural size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import exp

from lm_from_scratch.instruments.plot import COLOURS, printable

INK = "currentColor"
BLUE, ORANGE, GREEN, RED, PURPLE = COLOURS[:5]
FONT = "system-ui, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Drawing:
    """HTML that a notebook and a page show; ``says`` is the text in its place."""

    html: str
    says: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.says


@dataclass
class Canvas:
    """A sheet of ``width`` x ``height`` units, with (0, 0) at the top left.

    ``says`` is what the drawing shows, for readers who do not see it.
    """

    width: float
    height: float
    says: str
    marks: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: str, size: float = 13, anchor: str = "middle",
        colour: str = INK, bold: bool = False, opacity: float = 1.0,
    ) -> None:  # fmt: skip
        """Write ``text`` with its middle at the height y; ``anchor``: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.marks.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" dy="0.35em" '
            f'fill="{colour}" opacity="{opacity:g}"{weight}>{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none",
        tint: float = 0.2, edge: str = INK, radius: float = 4,
    ) -> None:  # fmt: skip
        """A box with its top left at (x, y). ``tint`` is the opacity of its colour ``fill``."""
        self.marks.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" fill-opacity="{tint:g}" stroke="{edge}"/>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, width: float = 1.2, colour: str = INK,
        opacity: float = 1.0, arrow: bool = False, dashes: str = "",
    ) -> None:  # fmt: skip
        """A line from (x1, y1) to (x2, y2), where an ``arrow`` may end."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.marks.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" '
            f'stroke-width="{width:g}" stroke-opacity="{opacity:g}"{dashed}/>'
        )
        if arrow:
            length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
            dx, dy = 7 * (x2 - x1) / length, 7 * (y2 - y1) / length
            left, right = (x2 - dx - dy / 2, y2 - dy + dx / 2), (x2 - dx + dy / 2, y2 - dy - dx / 2)
            points = f"{x2:g},{y2:g} {left[0]:g},{left[1]:g} {right[0]:g},{right[1]:g}"
            self.marks.append(f'<polygon points="{points}" fill="{colour}"/>')

    def circle(
        self, x: float, y: float, radius: float, fill: str = "none", tint: float = 0.2,
        edge: str = INK,
    ) -> None:  # fmt: skip
        self.marks.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" '
            f'fill-opacity="{tint:g}" stroke="{edge}"/>'
        )

    def begin_link(self, address: str) -> None:
        """What is drawn until `end_link` leads to an address, as "#attention" on the same page."""
        self.marks.append(f'<a href="{escape(address)}">')

    def end_link(self) -> None:
        self.marks.append("</a>")

    def drawing(self) -> Drawing:
        linked = any(mark.startswith("<a ") for mark in self.marks)
        role = "group" if linked else "img"  # the parts of an image cannot be links
        return Drawing(
            f'<div class="diagram"><svg xmlns="http://www.w3.org/2000/svg" role="{role}" '
            f'aria-label="{escape(self.says)}" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="{FONT}">'
            f"{''.join(self.marks)}</svg></div>",
            self.says,
        )


def tokens(pieces: Sequence[str], ids: Sequence[int] | None = None) -> Drawing:
    """The pieces of a text in coloured boxes, each above its number if ``ids`` are given."""
    boxes = []
    for i, piece in enumerate(pieces):
        r, g, b = (int(COLOURS[i % 5][k : k + 2], 16) for k in (1, 3, 5))
        number = "" if ids is None else f"<br><small>{ids[i]}</small>"
        boxes.append(
            f'<span style="display: inline-block; margin: 0 2px 4px 0; padding: 1px 3px; '
            f"border-radius: 4px; text-align: center; white-space: pre; "
            f'background: rgba({r}, {g}, {b}, 0.25)">{escape(printable(piece))}{number}</span>'
        )
    return Drawing(f'<div class="diagram tokens">{"".join(boxes)}</div>', " | ".join(pieces))


def lines(
    queries: Sequence[str], keys: Sequence[str], weights: Sequence[Sequence[float]],
    chosen: int | None = None,
) -> Drawing:  # fmt: skip
    """Who looks at whom: a line from each of the ``queries`` on the left to each of the ``keys``
    on the right, as wide as its weight. ``weights`` are (T, S); ``chosen`` draws one query alone.
    """
    row, left, right = 24, 120, 223
    rows = range(len(queries)) if chosen is None else [chosen]
    largest = max((weights[t][s], t, s) for t in rows for s in range(len(keys)))
    canvas = Canvas(
        343, row * (max(len(queries), len(keys)) + 1.5),
        f"Lines from {len(rows)} of {len(queries)} tokens to the tokens they look at; the widest, "
        f"{largest[0]:.2f}, from {queries[largest[1]]!r} to {keys[largest[2]]!r}",
    )  # fmt: skip
    canvas.text(left, row / 2, "looks", 11, "end", opacity=0.8)
    canvas.text(right, row / 2, "is looked at", 11, "start", opacity=0.8)
    for t in rows:
        for s in range(len(keys)):
            weight = weights[t][s]
            if weight > 0.01:
                canvas.line(left + 6, row * (t + 1.5), right - 6, row * (s + 1.5),
                            0.5 + 7 * weight, BLUE, 0.25 + 0.75 * weight)  # fmt: skip
    for t, word in enumerate(queries):
        canvas.text(left, row * (t + 1.5), printable(word), 13, "end", bold=t == chosen)
    for s, word in enumerate(keys):
        canvas.text(right, row * (s + 1.5), printable(word), 13, "start")
    return canvas.drawing()


def online_softmax_frames(
    words: Sequence[str], scores: Sequence[float], values: Sequence[float], tile: int
) -> Drawing:
    """A softmax in tiles, one frame per tile of keys: the scores it reads, the factor that corrects
    what was added up before, and m, l, a after it. ``values`` is one feature of each key."""
    width, high, top = 343, 146, 4  # the first frame corrects nothing: there is room above it
    count = -(-len(words) // tile)
    states: list[tuple[float, float, float]] = []
    canvas = Canvas(width, top + count * high + 16, "")
    columns = 44, 155, 279
    for x, name, meaning in zip(
        columns, "mla", ("largest score", "sum of exponentials", "weighted values")
    ):
        canvas.text(x, 8, name, 13, bold=True)
        canvas.text(x, 23, meaning, 11, opacity=0.8)
    for i in range(count):
        y, keys = top + i * high, range(i * tile, min((i + 1) * tile, len(words)))
        y = y if states else y + 30
        canvas.line(0, y + 4, width, y + 4, opacity=0.3)
        canvas.text(2, y + 20, f"tile {i + 1}", 12, "start", bold=True)
        cell = 240 / len(words)
        for j in range(len(words)):  # read and forgotten, in work, not yet read
            fill, tint = (INK, 0.15) if j < keys[0] else (BLUE, 0.6) if j in keys else ("none", 0)
            canvas.box(width - 241 + j * cell, y + 14, cell - 3, 12, fill, tint, radius=2)
        for j in keys:
            x = width * (j - keys[0] + 0.5) / tile
            canvas.text(x, y + 46, printable(words[j]), 13, bold=True)
            canvas.text(x, y + 63, signed(scores[j]), 13, colour=BLUE)
        m = max(scores[j] for j in keys)
        if states:
            m = max(m, states[-1][0])
        weights = [exp(scores[j] - m) for j in keys]
        l, a = sum(weights), sum(w * values[j] for w, j in zip(weights, keys))
        if states:
            before, factor = states[-1], exp(states[-1][0] - m)
            power = f"{signed(before[0])} − {signed(m)}".replace("− −", "+ ")
            canvas.text(2, y + 86, f"factor  exp({power}) = {factor:.2f}", 12, "start", RED)
            parts = [f"{factor:.2f} × {signed(old)} + {signed(new)}".replace("+ −", "− ")
                     for old, new in zip(before[1:], (l, a))]  # fmt: skip
            steps = f"{signed(before[0])} → {signed(m)}", *parts
            l, a = factor * before[1] + l, factor * before[2] + a
            for x, text in zip(columns, steps):
                canvas.text(x, y + 106, text, 11)
        states.append((m, l, a))
        for x, number in zip(columns, states[-1]):
            canvas.text(x, y + (126 if i else 96), signed(number), 14, bold=True)
    result = states[-1][2] / states[-1][1]
    canvas.text(columns[2], top + count * high + 6, f"a / l = {signed(result)}", 13, bold=True)
    canvas.says = f"{count} tiles of keys; after each, " + "; ".join(
        f"m = {m:.1f}, l = {l:.2f}, a = {a:.2f}" for m, l, a in states
    )
    return canvas.drawing()


def signed(number: float) -> str:
    """Two digits, with a minus sign as wide as a plus."""
    return f"{number:.2f}".replace("-", "−")


def packed_row(pieces: Sequence[Sequence[str]], width: int, a_line: int = 6) -> Drawing:
    """Documents, each a list of pieces, end to end in a row of ``width`` slots. Under each slot are
    its position, the number of its document, and the piece that it is to predict. The row is broken
    into lines of ``a_line`` slots."""
    slots = [(piece, p, d) for d, each in enumerate(pieces) for p, piece in enumerate(each)]
    targets = [target for each in pieces for target in [*each[1:], "–"]]
    empty = width - len(slots)
    left, high = 62, 94
    cell = (343 - left) / a_line
    canvas = Canvas(
        343, high * -(-width // a_line) - 14,
        f"{len(pieces)} documents in a row of {width} slots, {empty} of them empty. Positions start "
        "again at 0 in each document, each has a number, and its last token has no target",
    )  # fmt: skip
    for i, (piece, position, number) in enumerate([*slots, *[("", -1, -1)] * empty]):
        x, y = left + i % a_line * cell, i // a_line * high + 2
        if i % a_line == 0:
            for k, name in enumerate(("position", "document", "target")):
                canvas.text(left - 6, y + 36 + 16 * k, name, 11, "end", opacity=0.8)
        canvas.box(x + 1, y, cell - 2, 24, COLOURS[number % 5] if piece else "none", 0.25)
        canvas.text(x + cell / 2, y + 12, piece.strip(), 11)
        for k, value in enumerate((position, number)):
            canvas.text(x + cell / 2, y + 36 + 16 * k, str(value).replace("-", "−"), 12)
        if piece:
            canvas.text(x + cell / 2, y + 68, targets[i].strip(), 11, opacity=0.8)
    return canvas.drawing()
