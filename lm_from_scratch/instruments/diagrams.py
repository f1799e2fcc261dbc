"""Drawings of how things work, as SVG and HTML: tokens, blocks, lines of attention.

Results are plotted (`plot`); here mechanisms are drawn. Ink is the colour of the text around a
drawing, and other colours are those of `plot`, as tints that hold on white and on black. A drawing
is at most 343 units wide where it can be, so that a phone shows it at its natural size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

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


def gpt2_blocks(n_layer: int, links: Mapping[str, str]) -> Drawing:
    """The parts of GPT-2 from ids (top) to logits. Keys of ``links`` are "lookups", "norm",
    "attention", "mlp", "stream" and "logits", each with the address that the part leads to."""
    canvas = Canvas(
        343, 458, f"ids, two lookups, {n_layer} blocks of LayerNorm, attention, LayerNorm and MLP, "
        "which are added to the state; a last LayerNorm, logits; each part leads to its section",
    )  # fmt: skip
    spine, left, width = 40, 96, 238

    def part(y: float, key: str, text: str, note: str, colour: str, height: float = 34) -> None:
        canvas.begin_link(links[key])
        canvas.box(left, y, width, height, colour, 0.25)
        canvas.text(left + 12, y + height / 2, text, 13, "start", bold=True)
        canvas.text(left + width - 8, y + height / 2, note, 11, "end", opacity=0.85)
        canvas.end_link()

    def branch(y: float, key: str, text: str, note: str, colour: str) -> None:
        """A copy of the state goes through a norm and one more part; the result is added."""
        canvas.line(spine, y + 17, left, y + 17, arrow=True)
        part(y, "norm", "LayerNorm", "one scale for all", PURPLE)
        canvas.line(left + width / 2, y + 34, left + width / 2, y + 46, arrow=True)
        part(y + 46, key, text, note, colour)
        canvas.line(left, y + 63, spine + 10, y + 63, arrow=True)
        canvas.begin_link(links["stream"])
        canvas.circle(spine, y + 63, 9)
        canvas.text(spine, y + 63, "+", 14)
        canvas.end_link()

    canvas.text(spine, 12, "ids", 13, bold=True)
    canvas.line(spine + 16, 12, left, 12, arrow=True)
    part(4, "lookups", "Two lookups", "word + place", ORANGE)
    canvas.line(left, 30, spine, 30)
    canvas.line(spine, 30, spine, 337)
    canvas.text(spine + 5, 45, "x (T, C)", 11, "start", opacity=0.85)
    canvas.box(8, 56, 331, 254, radius=8)
    canvas.text(left + width - 8, 294, f"{n_layer} blocks", 13, "end", bold=True)
    branch(66, "attention", "Attention", "tokens look back", BLUE)
    branch(166, "mlp", "MLP", "each token alone", GREEN)
    canvas.begin_link(links["stream"])
    canvas.text(spine + 16, 270, "x = x + …, the residual stream", 12, "start")
    canvas.end_link()
    canvas.line(spine, 337, left, 337, arrow=True)
    part(320, "norm", "LayerNorm", "once more", PURPLE)
    canvas.line(left + width / 2, 354, left + width / 2, 366, arrow=True)
    part(366, "logits", "Logits", "a score for every token", ORANGE)
    canvas.line(left + width / 2, 400, left + width / 2, 416, arrow=True)
    canvas.text(left + width / 2, 428, "(T, V)", 11, opacity=0.85)
    canvas.text(left + width / 2, 444, "softmax: which token comes next?", 12)
    return canvas.drawing()


def bars(words: Sequence[str], shares: Sequence[float], chosen: Sequence[int] = ()) -> Drawing:
    """A bar for the share (0 to 1) of each word; ``chosen`` words are orange."""
    row, left, full = 24, 122, 160
    said = ", ".join(f"{word!r} {share:.1%}" for word, share in zip(words, shares, strict=True))
    canvas = Canvas(343, row * len(words), said)
    largest = max(shares)
    for i, (word, share) in enumerate(zip(words, shares, strict=True)):
        y, width = row * (i + 0.5), max(full * share / largest, 1)
        canvas.text(left - 8, y, printable(word), 13, "end")
        colour = ORANGE if i in chosen else BLUE
        canvas.box(left, y - 8, width, 16, colour, 0.55, colour, radius=2)
        canvas.text(left + width + 6, y, f"{share:.1%}", 12, "start")
    return canvas.drawing()


def head_cells(titles: Sequence[str], owners: Sequence[Sequence[Sequence[int]]]) -> Drawing:
    """Tables of T tokens x C features, one below another, with each number coloured by the head
    that gets it: ``owners`` holds one table (T, C) of heads for each of the ``titles``."""
    cell, left = 28, 84
    height = sum(28 + cell * len(table) + 12 for table in owners)
    canvas = Canvas(343, height, "; ".join(f"{t}: {o}" for t, o in zip(titles, owners, strict=True)))
    y = 0.0
    for title, table in zip(titles, owners, strict=True):
        canvas.text(4, y + 13, title, 13, "start", bold=True)
        y += 28
        for t, row in enumerate(table):
            canvas.text(left - 10, y + cell / 2, f"token {t}", 12, "end")
            for c, head in enumerate(row):
                x = left + cell * c
                canvas.box(x, y, cell, cell, COLOURS[head % 5], 0.35, radius=0)
                canvas.text(x + cell / 2, y + cell / 2, str(len(row) * t + c), 12)
            y += cell
        for head in sorted({head for row in table for head in row}):
            x, top = left + cell * len(table[0]) + 24, y - cell * len(table)
            canvas.box(x, top + 26 * head + 2, 18, 18, COLOURS[head % 5], 0.35, radius=2)
            canvas.text(x + 26, top + 26 * head + 11, f"head {head}", 12, "start")
        y += 12
    return canvas.drawing()
