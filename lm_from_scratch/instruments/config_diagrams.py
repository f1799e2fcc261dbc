"""Drawings of a ``config.json``: its lines, and what each belongs to."""

from collections.abc import Mapping
from typing import Any

from lm_from_scratch.instruments.canvas import INK, Canvas, Drawing
from lm_from_scratch.instruments.plot import COLOURS


def shortened(value: Any) -> str:
    """A value as a file has it; of a long list, how often it holds each word."""
    if isinstance(value, list) and len(value) > 3:
        words = [str(one).removesuffix("_attention") for one in value]
        return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return (
        f'"{value}"'
        if isinstance(value, str)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value}"
    )


def explained(config: Mapping[str, Any], labels: Mapping[str, str]) -> Drawing:
    """The lines of a config, a key and its value each, and on the right what ``labels`` call the
    key. Lines with one label are next to each other and have one colour; those without stand first.
    """
    order = ["", *dict.fromkeys(labels[key] for key in config if labels.get(key))]
    rows = [(key, label) for label in order for key in config if labels.get(key, "") == label]
    row, top = 19, 4
    canvas = Canvas(343, top + row * len(rows) + 4, "")
    begun = ""
    for i, (key, label) in enumerate(rows):
        y = top + row * i
        if label:
            colour = COLOURS[(order.index(label) - 1) % 5]
            canvas.box(1, y, 341, row - 2, colour, 0.2, "none", radius=2)
            canvas.box(1, y, 4, row - 2, colour, 1, "none", radius=0)
        text = f"{key}: {shortened(config[key])}"
        canvas.text(10, y + row / 2 - 1, text, 11, "start", opacity=1 if label else 0.75)
        if label and label != begun:
            canvas.text(338, y + row / 2 - 1, label, 11, "end", INK, bold=True)
        begun = label
    parts = [
        f"{label or 'sizes'}: {', '.join(key for key, of in rows if of == label)}"
        for label in order
    ]
    canvas.says = f"A config of {len(rows)} lines. " + "; ".join(parts)
    return canvas.drawing()


def kept(bytes_of: Mapping[str, tuple[int, int]], tokens: int) -> Drawing:
    """Bars: what the cache of each model keeps for so many ``tokens``, in bytes, and how much of it
    is a state whose size does not depend on them."""
    row, left, right = 38, 6, 290
    most = max(sum(both) for both in bytes_of.values())
    canvas = Canvas(343, row * len(bytes_of) + 4, "")
    says = []
    for i, (name, (growing, fixed)) in enumerate(bytes_of.items()):
        y, total = row * i, growing + fixed
        size = f"{total / 2**30:.2f} GiB" if total >= 2**30 else f"{total / 2**20:,.0f} MiB"
        canvas.text(left, y + 9, name, 12, "start", bold=True)
        wide = (right - left) * growing / most
        canvas.box(left, y + 18, max(wide, 0.5), 14, COLOURS[0], 0.6, "none", radius=0)
        if fixed:
            state = max(3, (right - left) * fixed / most)
            canvas.box(left + wide, y + 18, state, 14, COLOURS[1], 0.9, "none", radius=0)
        canvas.text(337, y + 9, size, 12, "end")
        says.append(
            f"{name} {size}" + (f", of which {fixed / 2**20:.0f} MiB state" if fixed else "")
        )
    canvas.says = f"A cache of {tokens:,} tokens: " + "; ".join(says)
    return canvas.drawing()
