"""Drawings of texts of which a model learns a part: answers in a chat, calls of a tool."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from lm_from_scratch.instruments.canvas import Drawing, tint
from lm_from_scratch.instruments.plot import COLOURS, printable

LINE = "3px solid currentColor"


def learned(pieces: Sequence[str], parts: Sequence[str], counts: Sequence[bool]) -> Drawing:
    """The pieces of a text, each in the colour of its part, whose names are below. Those that count
    in training are underlined."""
    colours = {name: COLOURS[i % 5] for i, name in enumerate(dict.fromkeys(parts))}
    boxes = [
        _box(printable(piece), tint(colours[part], 0.25), LINE if counted else "none")
        for piece, part, counted in zip(pieces, parts, counts, strict=True)
    ]
    names = [_box(name, tint(colour, 0.25), "none") for name, colour in colours.items()]
    names.append(_box("counts in training", "none", LINE))
    runs = groupby(zip(pieces, parts, counts, strict=True), key=lambda one: one[1:])
    says = " ".join(
        f"[{part}{', counts' if counted else ''}] {''.join(one[0] for one in run)!r}"
        for (part, counted), run in runs
    )
    gap = '<span style="display: inline-block; width: 8px"></span>'
    return Drawing(
        f'<div class="diagram tokens">{"".join(boxes)}'
        f'<div style="margin-top: 8px"><small>{gap.join(names)}</small></div></div>',
        says,
    )


def _box(text: str, colour: str, line: str) -> str:
    return (
        f'<span style="display: inline-block; margin: 0 1px 4px 0; padding: 1px 2px; '
        f"border-radius: 3px; white-space: pre; background: {colour}; border-bottom: {line}"
        f'">{escape(text)}</span>'
    )
