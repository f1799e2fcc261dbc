"""What every drawing keeps to: sound markup, words in its place, and no mark outside its sheet."""

from __future__ import annotations

import re
from types import ModuleType
from xml.etree import ElementTree

from lm_from_scratch.instruments.canvas import Drawing

SVG = "{http://www.w3.org/2000/svg}"


def parsed(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(drawing._repr_html_().replace("<br>", "<br/>"))


def texts(element: ElementTree.Element) -> list[str]:
    return [mark.text or "" for mark in element.iter(f"{SVG}text")]


def drawing_functions(module: ModuleType) -> list[str]:
    """The functions of a file that draw."""
    return [
        name
        for name, one in vars(module).items()
        if getattr(one, "__annotations__", {}).get("return") in (Drawing, "Drawing")
        and one.__module__ == module.__name__
    ]


def is_sound(drawing: Drawing, beyond: float = 1) -> None:
    """Boxes may end ``beyond`` the edge of a sheet, by the width of a line, and no further."""
    whole = parsed(drawing)
    assert whole.tag == "div" and repr(drawing).strip()
    for svg in whole.iter(f"{SVG}svg"):
        width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
        assert svg.get("viewBox") == f"0 0 {width:g} {height:g}"
        assert width <= 343 and svg.get("aria-label")
        for mark in svg.iter():
            stays(mark, "x", width, beyond)
            stays(mark, "y", height, beyond)


def stays(mark: ElementTree.Element, axis: str, limit: float, beyond: float) -> None:
    """Whether a mark is inside its sheet along "x" or "y"."""
    places = [float(mark.get(name, 0)) for name in (axis, f"{axis}1", f"{axis}2", f"c{axis}")]
    corners = re.findall(r"(-?[\d.]+),(-?[\d.]+)", mark.get("points", ""))
    places += [float(corner["xy".index(axis)]) for corner in corners]
    assert all(-1 <= place <= limit + 1 for place in places), mark.attrib
    if mark.tag == f"{SVG}rect":
        size = float(mark.get({"x": "width", "y": "height"}[axis], 0))
        assert size >= 0 and places[0] + size <= limit + beyond, mark.attrib
