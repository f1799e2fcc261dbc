"""A sheet for drawings of how things work, as SVG and HTML, and a grid of cells to stand on it.

A drawing is at most 343 units wide, so that a phone shows it at its natural size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from lm_from_scratch.drawings.colours import BLUE, INK, ORANGE

FONT = "system-ui, 'DejaVu Sans', sans-serif"
WIDTH = 343


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
    says: str = ""
    marks: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: object, size: float = 13, anchor: str = "middle",
        colour: str = INK, bold: bool = False, opacity: float = 1.0,
    ) -> None:  # fmt: skip
        """Write ``text`` with its middle at the height y; ``anchor``: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.marks.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" dy="0.35em" '
            f'fill="{colour}" opacity="{opacity:g}"{weight}>{escape(str(text))}</text>'
        )

    def note(
        self, x: float, y: float, text: object, anchor: str = "start", size: float = 11
    ) -> None:
        """What explains the rest: small and faint."""
        self.text(x, y, text, size, anchor, opacity=0.8)

    def title(self, y: float, text: str, right: str = "", size: float = 13) -> None:
        """The name of a part, and at the right edge what is to be said of it."""
        self.text(2, y, text, size, "start", bold=True)
        if right:
            self.text(self.width - 2, y, right, 12, "end")

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none",
        tint: float = 0.2, edge: str = INK, radius: float = 4,
    ) -> None:  # fmt: skip
        """A box with its top left at (x, y). ``tint`` is the opacity of its colour ``fill``."""
        self.marks.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" fill-opacity="{tint:g}" stroke="{edge}"/>'
        )

    def cell(
        self, x: float, y: float, width: float, height: float, text: object, size: float = 12,
        fill: str = "none", tint: float = 0.2, edge: str = INK, radius: float = 4,
        bold: bool = False, opacity: float = 1.0,
    ) -> None:  # fmt: skip
        """A box with a text in its middle."""
        self.box(x, y, width, height, fill, tint, edge, radius)
        if text != "":
            self.text(x + width / 2, y + height / 2, text, size, bold=bold, opacity=opacity)

    def legend(self, y: float, *entries: tuple[str, float, str], x: float = 2.0) -> None:
        """What boxes of a (fill, tint) stand for, in a line whose middle is y."""
        for fill, tint, words in entries:
            self.box(x, y - 6, 13, 13, fill, tint, INK if fill == "none" else fill, 2)
            self.text(x + 18, y, words, 12, "start")
            x += 32 + 6.9 * len(words)

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

    def frame(
        self, x: float, y: float, width: float, height: float, thick: float = 2.2,
        opacity: float = 1.0, dashes: str = "",
    ) -> None:  # fmt: skip
        """Four lines around a place, over what is drawn there."""
        right, low = x + width, y + height
        for ends in (
            (x, y, right, y),
            (right, y, right, low),
            (right, low, x, low),
            (x, low, x, y),
        ):
            self.line(*ends, thick, opacity=opacity, dashes=dashes)

    def circle(
        self, x: float, y: float, radius: float, fill: str = "none", tint: float = 0.2,
        edge: str = INK,
    ) -> None:  # fmt: skip
        """A circle around (x, y)."""
        self.marks.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}" '
            f'fill-opacity="{tint:g}" stroke="{edge}"/>'
        )

    def begin_link(self, address: str) -> None:
        """What is drawn until `end_link` leads to an address, as "#attention" on the same page."""
        self.marks.append(f'<a href="{escape(address)}">')

    def end_link(self) -> None:
        """What follows leads nowhere again."""
        self.marks.append("</a>")

    def drawing(self, says: str = "") -> Drawing:
        """The sheet as it is."""
        says = says or self.says
        linked = any(mark.startswith("<a ") for mark in self.marks)
        role = "group" if linked else "img"  # the parts of an image cannot be links
        return Drawing(
            f'<div class="diagram"><svg xmlns="http://www.w3.org/2000/svg" role="{role}" '
            f'aria-label="{escape(says)}" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="{FONT}">'
            f"{''.join(self.marks)}</svg></div>",
            says,
        )


@dataclass
class Grid:
    """Rows and columns of cells on a canvas, ``gap`` units apart: a drawing says what stands in
    which row and column, from (0, 0) at the (left, top)."""

    canvas: Canvas
    left: float
    top: float
    wide: float
    high: float
    gap: float = 3

    def cell(
        self, row: float, column: float, text: object = "", size: float = 12, fill: str = "none",
        tint: float = 0.2, edge: str = "", radius: float = 2, bold: bool = False,
        opacity: float = 1.0, across: float = 1, down: float = 1,
    ) -> None:  # fmt: skip
        """A box with a text in it, ``across`` so many columns and ``down`` so many rows. Without
        another ``edge`` it has that of its colour."""
        self.canvas.cell(
            self.left + self.wide * column, self.top + self.high * row,
            self.wide * across - self.gap, self.high * down - self.gap, text, size, fill, tint,
            edge or (INK if fill == "none" else fill), radius, bold, opacity,
        )  # fmt: skip

    def masked(self, row: float, column: float) -> None:
        """A place that a mask cuts off: crossed out."""
        x, y = self.left + self.wide * column, self.top + self.high * row
        right, low = x + self.wide - self.gap, y + self.high - self.gap
        self.canvas.box(x, y, right - x, low - y, tint=0.0, radius=2)
        self.canvas.line(x + 3, low - 3, right - 3, y + 3, 1, opacity=0.6)
        self.canvas.line(x + 3, y + 3, right - 3, low - 3, 1, opacity=0.6)

    def middle(self, row: float, column: float) -> tuple[float, float]:
        """The middle of a cell."""
        x, y = self.left + self.wide * column, self.top + self.high * row
        return x + (self.wide - self.gap) / 2, y + (self.high - self.gap) / 2

    def text(
        self, row: float, column: float, text: object, size: float = 12, bold: bool = False,
        opacity: float = 1.0, colour: str = INK,
    ) -> None:  # fmt: skip
        """A text in the middle of a cell."""
        self.canvas.text(
            *self.middle(row, column), text, size, bold=bold, opacity=opacity, colour=colour
        )

    def name(
        self, row: float, text: object, size: float = 12, bold: bool = False, opacity: float = 1.0,
        away: float = 8,
    ) -> None:  # fmt: skip
        """The name of a row, at its left."""
        y = self.middle(row, 0)[1]
        self.canvas.text(self.left - away, y, text, size, "end", bold=bold, opacity=opacity)


def slides(name: str, frames: Sequence[Drawing], labels: Sequence[str], first: int = 0) -> Drawing:
    """Frames of which a reader chooses one, by buttons with these ``labels``; ``name`` says what
    the buttons choose. Frame ``first`` is shown at the beginning. Where styles are removed, all
    frames are shown, one below another."""
    key = f"steps-{hashlib.sha256(''.join(f.html for f in frames).encode()).hexdigest()[:8]}"
    numbers = range(len(frames))
    chosen = ", ".join(f"#{key}-{i}:checked ~ .frames > :nth-child({i + 1})" for i in numbers)
    style = (
        f".{key} {{ max-width: 343px; margin-left: auto; margin-right: auto }} "
        f".{key} input {{ position: absolute; opacity: 0; pointer-events: none }} "
        f".{key} label {{ display: inline-block; box-sizing: border-box; min-width: 26px; "
        f"margin: 0 2px 4px 0; padding: 2px 5px; border: 1px solid currentColor; "
        f"border-radius: 4px; font-size: 13px; line-height: 20px; text-align: center; "
        f"cursor: pointer }} "
        f".{key} input:checked + label {{ background: {BLUE}; color: #fff; font-weight: 600 }} "
        f".{key} input:focus-visible + label {{ outline: 2px solid {ORANGE} }} "
        f".{key} .frames > * {{ display: none }} {chosen} {{ display: block }}"
    )
    buttons = "".join(
        f'<input type="radio" name="{key}" id="{key}-{i}"'
        + (' checked="checked"' if i == first else "")
        + f'/><label for="{key}-{i}">{escape(label)}</label>'
        for i, label in zip(numbers, labels, strict=True)
    )
    return Drawing(
        f'<div class="diagram {key}" role="radiogroup" aria-label="{escape(name)}">'
        f"<style>{style}</style><span>{escape(name)} </span>{buttons}"
        f'<div class="frames">{"".join(frame.html for frame in frames)}</div></div>',
        "; ".join(f"{name} {label}: {frame.says}" for label, frame in zip(labels, frames)),
    )
