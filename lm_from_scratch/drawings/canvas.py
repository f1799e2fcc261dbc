"""A sheet for drawings of how things work, as SVG and HTML.

Ink is the colour of the text around a drawing. Other colours are those of Okabe and Ito, which
readers with any colour vision can tell apart, as tints that hold on white and on black. A drawing
is at most 343 units wide, so that a phone shows it at its natural size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

#: Blue, orange, green, vermilion, purple, sky blue, yellow, black.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip

#: For what is not data: guides and lines that connect, and areas where nothing is.
GREY, LIGHT_GREY = "#767676", "#E4E4E4"

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

    def drawing(self) -> Drawing:
        """The sheet as it is."""
        linked = any(mark.startswith("<a ") for mark in self.marks)
        role = "group" if linked else "img"  # the parts of an image cannot be links
        return Drawing(
            f'<div class="diagram"><svg xmlns="http://www.w3.org/2000/svg" role="{role}" '
            f'aria-label="{escape(self.says)}" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="{FONT}">'
            f"{''.join(self.marks)}</svg></div>",
            self.says,
        )


def tint(colour: str, opacity: float) -> str:
    """A colour as "#0072b2" that lets what is behind it through, for a style."""
    r, g, b = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({r}, {g}, {b}, {opacity:g})"


def printable(piece: str) -> str:
    """A token as a label: blanks and line ends made visible, undecodable bytes as a box."""
    return piece.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\ufffd", "▯")


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
