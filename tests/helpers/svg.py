"""What every drawing keeps to, and its marks, for the laws of some."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from xml.etree import ElementTree

from lm_from_scratch.drawings.canvas import Drawing
from lm_from_scratch.drawings.colours import COLOURS, GREY

SVG = "{http://www.w3.org/2000/svg}"
PHONE = 343
SMALLEST = 9
#: Black is for text alone, which the site gives the colour of its ground's ink.
HOLD_ON_BOTH_GROUNDS = {"none", "currentColor", GREY, *COLOURS[:7]}


def parsed(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(drawing._repr_html_().replace("<br>", "<br/>"))


def marks(drawing: Drawing, kind: str) -> list[ElementTree.Element]:
    return list(parsed(drawing).iter(f"{SVG}{kind}"))


def texts(element: Drawing | ElementTree.Element) -> list[str]:
    root = parsed(element) if isinstance(element, Drawing) else element
    return [mark.text or "" for mark in root.iter(f"{SVG}text")]


def crossed_out(frame: ElementTree.Element) -> int:
    """The places that a mask cuts off, by two lines each."""
    return sum(mark.get("stroke-opacity") == "0.6" for mark in frame.iter(f"{SVG}line")) // 2


def bars(drawing: Drawing, colour: str, axis: str = "width") -> list[float]:
    """How long the boxes of a colour are."""
    boxes = [box for box in marks(drawing, "rect") if box.get("fill") == colour]
    return [float(box.get(axis, 0)) for box in boxes]


@cache
def width(text: str, size: float, bold: bool) -> float:
    """How wide a text is in DejaVu Sans, the widest of the fonts that a drawing may be shown in."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    weight = "bold" if bold else "normal"
    font = FT2Font(findfont(FontProperties(family="DejaVu Sans", weight=weight)))
    font.set_size(100, 72)
    font.set_text(text, 0.0)
    return float(font.get_width_height()[0]) / 64 * size / 100


def extent(mark: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a mark."""
    numbers = {key: float(n) for key, n in mark.attrib.items() if re.fullmatch(r"-?[\d.]+", n)}
    kind = mark.tag.removeprefix(SVG)
    if kind == "text":
        size, x, y = numbers["font-size"], numbers["x"], numbers["y"]
        long = width(mark.text or "", size, "font-weight" in mark.attrib)
        left = x - long * {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.get("text-anchor", "")]
        return left, y - 0.38 * size, left + long, y + 0.38 * size
    if kind == "rect":
        x, y, wide, high = (numbers[key] for key in ("x", "y", "width", "height"))
        assert wide >= 0 and high >= 0, mark.attrib
        return x, y, x + wide, y + high
    if kind in ("circle", "ellipse"):  # valleys may be cut off at the sides: their middle counts
        radius = numbers.get("r", 0.0)
        x, y = numbers["cx"], numbers["cy"]
        return x - radius, y - radius, x + radius, y + radius
    if kind == "line":
        x, y = (numbers["x1"], numbers["x2"]), (numbers["y1"], numbers["y2"])
    else:
        places = [*map(float, re.findall(r"-?[\d.]+", mark.get("points") or mark.get("d") or ""))]
        if kind == "path":
            places = places[:2] + places[-2:]  # an arc has its radii between its ends
        x, y = places[::2], places[1::2]
    return min(x), min(y), max(x), max(y)


def flaws(drawing: Drawing) -> Iterator[str]:
    """What a reader would stumble over: on a phone, on another ground, with a screen reader."""
    root = parsed(drawing)
    if not (root.tag == "div" and repr(drawing).strip()):
        yield "says nothing"
    styles = " ".join(mark.get("style", "") for mark in root.iter())
    tinted = {f"#{int(r):02X}{int(g):02X}{int(b):02X}"
              for r, g, b in re.findall(r"rgba\((\d+), (\d+), (\d+)", styles)}  # fmt: skip
    used = {mark.get(key, "none") for mark in root.iter() for key in ("fill", "stroke")}
    for colour in (tinted | used | {*re.findall(r"#\w{6}", styles)}) - HOLD_ON_BOTH_GROUNDS:
        yield f"{colour} does not hold on both grounds"
    for svg in root.iter(f"{SVG}svg"):
        wide, high = float(svg.get("width", 0)), float(svg.get("height", 0))
        if wide > PHONE or svg.get("viewBox") != f"0 0 {wide:g} {high:g}" or not svg.get("role"):
            yield f"{wide} wide, {svg.get('viewBox')}, role {svg.get('role')}"
        if not svg.get("aria-label", "").strip():
            yield "has no text in its place"
        shapes = [mark for mark in svg.iter() if mark.tag not in (f"{SVG}svg", f"{SVG}a")]
        for mark in shapes:
            left, top, right, bottom = extent(mark)
            if min(left, top) < -1 or right > wide + 1 or bottom > high + 1:
                yield f"leaves the sheet: {mark.attrib} {mark.text or ''}"
        written = [(extent(mark), mark) for mark in shapes if mark.tag == f"{SVG}text"]
        boxes = [extent(mark) for mark in shapes if mark.tag == f"{SVG}rect"]
        for (left, top, right, bottom), mark in written:
            if float(mark.get("font-size", 0)) < SMALLEST:
                yield f"too small: {mark.text}"
            x, y = (left + right) / 2, (top + bottom) / 2
            around = [b for b in boxes if b[0] < x < b[2] and b[1] < y < b[3]]
            narrow = min((b[2] - b[0] for b in around), default=PHONE)
            if mark.get("text-anchor") == "middle" and right - left > narrow + 3:
                yield f"wider than its box: {mark.text}"
        for (one, first), (two, second) in combinations(written, 2):
            across = min(one[2], two[2]) - max(one[0], two[0])
            down = min(one[3], two[3]) - max(one[1], two[1])
            if across > 0.5 and down > 0.5:
                yield f"{first.text!r} and {second.text!r} overlap"
