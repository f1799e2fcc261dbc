"""Drawings of chapter 9: experts, latents, the delta rule, extra predictions, configs."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from torch import Tensor

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    ORANGE,
    Canvas,
    Drawing,
    printable,
    tint,
)


def visited_experts(pieces: Sequence[str], experts: Sequence[int]) -> Drawing:
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


def expert_loads(counts: Mapping[str, Sequence[float]]) -> Drawing:
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


def token_bytes(models: Sequence[tuple[str, str, int]]) -> Drawing:
    """For each model a bar, whose length is the bytes of a token in its cache: ``models`` are
    (name, kind, bytes). Bars of the kind MLA are orange."""
    left, right, row = 8, 335, 42
    longest = max(amount for _, _, amount in models)
    canvas = Canvas(343, row * len(models), "")
    for i, (name, kind, amount) in enumerate(models):
        y, colour = row * i, ORANGE if kind == "MLA" else BLUE
        canvas.text(left, y + 9, f"{name}: {kind}", 13, "start", bold=kind == "MLA")
        canvas.text(right, y + 9, size(amount), 13, "end")
        canvas.box(
            left, y + 19, max(2, (right - left) * amount / longest), 14, colour, 0.7, radius=2
        )
    canvas.says = "Bytes of a token: " + "; ".join(
        f"{name} ({kind}) {size(amount)}" for name, kind, amount in models
    )
    return canvas.drawing()


def latent_token(C: int, R: int, H: int, Dn: int, Dr: int, Dv: int) -> Drawing:
    """A state of C numbers becomes a latent of R and a turned key of Dr, which are kept. From them
    each of H heads makes a key of Dn + Dr and a value of Dv."""
    canvas = Canvas(
        343, 252,
        f"A token's state of {C:,} numbers becomes a latent of {R} and a turned key of {Dr}: "
        f"{R + Dr} numbers are kept. From the latent each of {H} heads makes {Dn} features of its "
        f"key and {Dv} of its value; the turned {Dr} are the same in all heads. Together the heads "
        f"have {H * (Dn + Dr + Dv):,} numbers",
    )  # fmt: skip
    canvas.box(72, 4, 200, 30)
    canvas.text(172, 19, f"state: {C:,} numbers", 13)
    canvas.line(130, 34, 100, 66, arrow=True)
    canvas.line(240, 34, 278, 66, arrow=True)
    canvas.box(14, 68, 196, 32, BLUE, 0.35)
    canvas.text(112, 84, f"latent c: {R}", 14, bold=True)
    canvas.box(226, 68, 108, 32, ORANGE, 0.35)
    canvas.text(280, 84, f"turned r: {Dr}", 14, bold=True)
    canvas.text(172, 116, f"kept for each token: {R + Dr} numbers", 13)
    canvas.line(8, 130, 335, 130, 1.2, INK, 0.6, dashes="4 4")
    for i, head in enumerate(("head 1", "head 2", "...", f"head {H}")):
        y = 142 + 27 * i
        if head == "...":
            canvas.text(40, y + 9, f"{H - 3} more", 12)
            continue
        canvas.text(40, y + 9, head, 12)
        canvas.box(82, y, 92, 20, BLUE, 0.15)
        canvas.text(128, y + 10, f"key {Dn}", 12)
        canvas.box(176, y, 50, 20, ORANGE, 0.15)
        canvas.text(201, y + 10, f"r {Dr}", 12)
        canvas.box(242, y, 92, 20, GREEN, 0.15)
        canvas.text(288, y + 10, f"value {Dv}", 12)
    return canvas.drawing()


def size(n: float) -> str:
    """``n`` bytes, as "8 KiB" or "2.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if n >= 10 or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.0f} TiB"


CELL = 27


def delta_rule_step(
    state: Tensor, key: Tensor, value: Tensor, names: tuple[str, str] = ("key", "value")
) -> Drawing:
    """One step of the delta rule: the ``state`` (Dk, Dv) is read with the ``key`` (Dk,), what it
    says is compared with the ``value`` (Dv,), and the difference is written. Blue is positive,
    orange negative. Up to five features fit."""
    said = key @ state
    error = value - said
    new = state + key[:, None] * error
    rows, columns = state.shape
    tall = rows * CELL
    canvas = Canvas(343, 2 * tall + 5 * CELL + 118, "")
    x, y = 100, 26
    canvas.text(4, y - 14, "1. Read: what does the memory say for the key?", 12, "start", bold=True)
    _cells(canvas, 56, y, key[:, None])
    canvas.text(50, y + tall / 2, names[0], 12, "end")
    _cells(canvas, x, y, state)
    canvas.text(x + columns * CELL + 8, y + tall / 2, "memory", 12, "start")
    y += tall + 8
    _cells(canvas, x, y, said[None])
    canvas.text(x - 8, y + CELL / 2, "it says", 12, "end")
    y += CELL + 26
    canvas.text(4, y - 10, "2. Correct: what should it have said besides?", 12, "start", bold=True)
    for name, vector in ((names[1], value), ("− it says", said), ("correction", error)):
        _cells(canvas, x, y, vector[None])
        canvas.text(x - 8, y + CELL / 2, name, 12, "end", bold=name == "correction")
        y += CELL + 2
    y += 24
    canvas.text(4, y - 10, "3. Write: key times correction is added", 12, "start", bold=True)
    _cells(canvas, 56, y, key[:, None])
    _cells(canvas, x, y, new)
    canvas.text(x + columns * CELL + 8, y + tall / 2, "new memory", 12, "start")
    after = key @ new
    canvas.says = (
        f"A memory of {rows} by {columns} numbers says {_said(said)} for {names[0]}; {names[1]} is "
        f"{_said(value)}; the difference is written, and it says {_said(after)}"
    )
    return canvas.drawing()


def _cells(canvas: Canvas, x: float, y: float, numbers: Tensor) -> None:
    """A table of numbers, tinted by their size."""
    for r, row in enumerate(numbers.tolist()):
        for c, number in enumerate(row):
            left, top = x + c * CELL, y + r * CELL
            colour = BLUE if number >= 0 else ORANGE
            canvas.box(left, top, CELL - 2, CELL - 2, colour, min(1.0, 0.6 * abs(number)))
            text = f"{number:.1f}".replace("-0.0", "0.0").replace("-", "−")
            canvas.text(left + CELL / 2 - 1, top + CELL / 2 - 1, text, 11, colour=INK)


def _said(vector: Tensor) -> str:
    return ", ".join(f"{number:.1f}".replace("-0.0", "0.0") for number in vector.tolist())


def self_draft(start: str, words: Sequence[str]) -> Drawing:
    """One pass of a model over a text that ends with ``start``, and the drafts after it: the first
    of the ``words`` is the model's own, each later one is drafted from the state before it and the
    word before it."""
    row, middle = 66, 176
    canvas = Canvas(
        343, row * len(words) + 14,
        f"The model reads {start!r}; its state h gives {words[0]!r}. "
        + " ".join(
            f"h{_up(k - 1)} and {before!r} give h{_up(k)}, which drafts {word!r}."
            for k, (before, word) in enumerate(pairwise(words), 1)
        ),
    )  # fmt: skip
    for k, word in enumerate(words):
        y = row * k + 30.0
        given = printable(start if k == 0 else words[k - 1])
        given = given if len(given) < 16 else f"…{given[-14:]}"
        colour, name = (ORANGE, "all blocks") if k == 0 else (BLUE, "one block")
        size = min(13.0, 112 / (0.6 * len(given)))
        canvas.text(4, y, given, size, "start", bold=k == 1)
        canvas.line(118, y, middle - 46, y, 1.4, arrow=True)
        canvas.box(middle - 44, y - 17, 88, 34, colour, 0.25, colour)
        canvas.text(middle, y, name, 12)
        canvas.line(middle + 46, y, 262, y, 1.4, arrow=True)
        canvas.text(242, y - 10, f"h{_up(k)}", 12)
        own = min(13.0, 74 / (0.63 * len(word)))
        canvas.text(268, y, printable(word), own, "start", bold=k == 0)
        if k + 1 < len(words):
            canvas.line(middle + 30, y + 19, middle + 30, y + row - 19, 1.4, arrow=True)
            canvas.text(middle + 44, y + row / 2, f"h{_up(k)}", 12)
    return canvas.drawing()


def mtp_targets(words: Sequence[str], depths: Sequence[int] = (0, 1)) -> Drawing:
    """For each of the ``words`` of a document the newest word that a depth has seen, and its
    target; a dash where the document has no such word."""
    row, names = 24, [name for d in depths for name in (f"depth {d} sees", f"depth {d} target")]
    wide = min(80.0, 250 / len(words))
    height = row * (len(names) + 1) + 8 * len(depths) + 10
    says = [
        f"Depth {d}: "
        + ", ".join(
            f"after {words[i + d]!r} {words[i + d + 1]!r}" for i in range(len(words) - d - 1)
        )
        for d in depths
    ]
    canvas = Canvas(343, height, "Targets. " + "; ".join(says))
    small = min(13.0, *((wide - 4) / (0.6 * max(len(printable(w)), 1)) for w in words))
    for i, word in enumerate(words):
        canvas.text(93 + wide * (i + 0.5), 16, printable(word), small, bold=True)
    canvas.text(4, 16, "column", 12, "start", opacity=0.8)
    y = 18.0
    for j, name in enumerate(names):
        d, target = depths[j // 2], j % 2 == 1
        y += row + (8 if not target else 0)
        canvas.text(4, y, name, 12, "start", opacity=0.8)
        for i in range(len(words)):
            at, x = i + d + target, 93 + wide * i
            known = at < len(words)
            colour = (GREEN if target else BLUE) if known else "none"
            canvas.box(x + 1, y - 10, wide - 2, 20, colour, 0.2, colour if known else INK, 3)
            canvas.text(x + wide / 2, y, printable(words[at]) if known else "–", small)
    return canvas.drawing()


def _up(depth: int) -> str:
    return "" if depth == 0 else "¹²³⁴⁵⁶⁷⁸⁹"[depth - 1]


def config_lines(config: Mapping[str, Any], labels: Mapping[str, str]) -> Drawing:
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
        text = f"{key}: {_value(config[key])}"
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


def cache_sizes(bytes_of: Mapping[str, tuple[int, int]], tokens: int) -> Drawing:
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


def _value(value: Any) -> str:
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
