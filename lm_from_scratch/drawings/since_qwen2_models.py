"""Drawings of chapter 9: experts, latents, the delta rule, extra predictions, configs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, INK, ORANGE, tint
from lm_from_scratch.drawings.labels import minus, printable, token_boxes


def visited_experts(pieces: Sequence[str], experts: Sequence[int]) -> Drawing:
    """The pieces of a text, each in the colour of an expert and above its number."""
    tints = [tint(COLOURS[e % 7], 0.35) for e in experts]
    says = " ".join(f"{piece}[{e}]" for piece, e in zip(pieces, experts, strict=True))
    return Drawing(token_boxes(pieces, tints, experts), says)


def mixture(word: str, scores: Sequence[float], weights: Mapping[int, float]) -> Drawing:
    """One token in a layer of experts: a bar for its score at each expert, arrows to those with a
    weight, and the sum of what these say. The others are empty: nothing is computed there."""
    left, long, middle = 8, 327, 171.5
    step = long / len(scores)
    size, low, high = min(20, step - 3), min(0.0, *scores), max(scores)
    visits = ", ".join(f"expert {e} with {w:.2f}" for e, w in weights.items())
    says = f"{word!r} visits {len(weights)} of {len(scores)} experts: {visits}"
    canvas = Canvas(WIDTH, 262, says)
    title = f"{printable(word)}: one score for each expert"
    canvas.text(left, 12, title, 13, "start", bold=True)
    canvas.line(left, 84, left + long, 84, opacity=0.5)
    canvas.cell(middle - 46, 226, 92, 26, "weighted sum", 13, ORANGE, 0.3)
    for e, score in enumerate(scores):
        x, chosen = left + step * (e + 0.5), e in weights
        height = max(52 * (score - low) / (high - low or 1), 1)
        colour = ORANGE if chosen else BLUE
        canvas.box(x - 5, 84 - height, 10, height, colour, 0.55, colour, radius=1)
        canvas.text(x, 94, e, 11, bold=chosen)
        canvas.box(x - size / 2, 134, size, 40, ORANGE if chosen else "none", 0.4, radius=3)
        if chosen:
            canvas.line(x, 103, x, 132, 1.6, ORANGE, arrow=True)
            canvas.line(x, 175, middle + (x - middle) * 0.2, 224, 1.6, ORANGE, arrow=True)
            canvas.text(min(max(x, 26), 317), 114, f"{weights[e]:.2f}", 12, bold=True)
    canvas.note(left, 188, "MLPs", size=12)
    return canvas.drawing()


def expert_loads(counts: Mapping[str, Sequence[float]]) -> Drawing:
    """How often each expert was visited, a row of bars for each name. The line is the mean."""
    left, long = 8, 327
    busiest = {name: max(values) * len(values) / sum(values) for name, values in counts.items()}
    unit = 62 / max(busiest.values())  # of the mean
    says = (f"{name}: the busiest expert has {n:.1f} times the mean" for name, n in busiest.items())
    canvas = Canvas(WIDTH, 108 * len(counts), "; ".join(says))
    for r, (name, values) in enumerate(counts.items()):
        y, step, mean = 108 * r + 88, long / len(values), sum(values) / len(values)
        canvas.text(left, y - 76, name, 13, "start", bold=True)
        for e, value in enumerate(values):
            height = max(unit * value / mean, 1)
            colour = ORANGE if value == max(values) else BLUE
            canvas.box(left + step * e + 2, y - height, step - 4, height, colour, 0.55, colour, 1)
            canvas.note(left + step * (e + 0.5), y + 9, e, "middle")
        canvas.line(left, y - unit, left + long, y - unit, 1.4, INK, dashes="5 3")
    return canvas.drawing()


def token_bytes(models: Sequence[tuple[str, str, int]]) -> Drawing:
    """For each model a bar, whose length is the bytes of a token in its cache: ``models`` are
    (name, kind, bytes). Bars of the kind MLA are orange."""
    left, long = 8, 327
    longest = max(amount for _, _, amount in models)
    canvas, says = Canvas(WIDTH, 42 * len(models)), []
    for i, (name, kind, amount) in enumerate(models):
        y, latent = 42 * i, kind == "MLA"
        canvas.text(left, y + 9, f"{name}: {kind}", 13, "start", bold=latent)
        canvas.text(left + long, y + 9, _bytes(amount), 13, "end")
        colour, width = ORANGE if latent else BLUE, max(2, long * amount / longest)
        canvas.box(left, y + 19, width, 14, colour, 0.7, radius=2)
        says.append(f"{name} ({kind}) {_bytes(amount)}")
    return canvas.drawing("Bytes of a token: " + "; ".join(says))


def _bytes(n: float) -> str:
    """``n`` bytes, as "8 KiB" or "2.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if n >= 10 or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.0f} TiB"


def latent_token(C: int, R: int, H: int, Dn: int, Dr: int, Dv: int) -> Drawing:
    """A state of C numbers becomes a latent of R and a turned key of Dr, which are kept. From them
    each of H heads makes a key of Dn + Dr and a value of Dv."""
    canvas = Canvas(
        WIDTH, 252,
        f"A token's state of {C:,} numbers becomes a latent of {R} and a turned key of {Dr}: "
        f"{R + Dr} numbers are kept. From the latent each of {H} heads makes {Dn} features of its "
        f"key and {Dv} of its value; the turned {Dr} are the same in all heads. Together the heads "
        f"have {H * (Dn + Dr + Dv):,} numbers",
    )  # fmt: skip
    canvas.cell(72, 4, 200, 30, f"state: {C:,} numbers", 13)
    canvas.line(130, 34, 100, 66, arrow=True)
    canvas.line(240, 34, 278, 66, arrow=True)
    canvas.cell(14, 68, 196, 32, f"latent c: {R}", 14, BLUE, 0.35, bold=True)
    canvas.cell(226, 68, 108, 32, f"turned r: {Dr}", 14, ORANGE, 0.35, bold=True)
    canvas.text(172, 116, f"kept for each token: {R + Dr} numbers", 13)
    canvas.line(8, 130, 335, 130, 1.2, INK, 0.6, dashes="4 4")
    for i, head in enumerate(("head 1", "head 2", f"{H - 3} more", f"head {H}")):
        y = 142 + 27 * i
        canvas.text(40, y + 10, head, 12)
        if i != 2:
            canvas.cell(82, y, 92, 20, f"key {Dn}", 12, BLUE, 0.15)
            canvas.cell(176, y, 50, 20, f"r {Dr}", 12, ORANGE, 0.15)
            canvas.cell(242, y, 92, 20, f"value {Dv}", 12, GREEN, 0.15)
    return canvas.drawing()


def delta_rule_step(
    state: Tensor, key: Tensor, value: Tensor, names: tuple[str, str] = ("key", "value")
) -> Drawing:
    """One step of the delta rule: the ``state`` (Dk, Dv) is read with the ``key`` (Dk,), what it
    says is compared with the ``value`` (Dv,), and the difference is written. Blue is positive,
    orange negative. Up to five features fit."""
    reading = key @ state
    error = value - reading
    new = state + key[:, None] * error
    rows, columns = state.shape
    side, x, right = 27, 100, 108 + 27 * columns
    canvas = Canvas(WIDTH, 2 * side * rows + 5 * side + 118)

    def table(left: float, top: float, numbers: Tensor, name: str, after: float = 0) -> None:
        """Numbers tinted by their size, and their name at the left, or at the right, ``after``."""
        grid = Grid(canvas, left, top, side, side, 2)
        for r, row in enumerate(numbers.tolist()):
            for c, number in enumerate(row):
                colour = BLUE if number >= 0 else ORANGE
                grid.cell(r, c, minus(_tenths(number)), 11, colour, min(1.0, 0.6 * abs(number)),
                          INK, 4)  # fmt: skip
        if not name:
            return
        place = (after, "start") if after else (left - (6 if left < x else 8), "end")
        y, bold = top + side * len(numbers) / 2, name == "correction"
        canvas.text(place[0], y, name, 12, place[1], bold=bold)

    canvas.text(4, 12, "1. Read: what does the memory say for the key?", 12, "start", bold=True)
    y = 26
    table(56, y, key[:, None], names[0])
    table(x, y, state, "memory", right)
    y += side * rows + 8
    table(x, y, reading[None], "it says")
    y += side + 26
    canvas.text(4, y - 10, "2. Correct: what should it have said besides?", 12, "start", bold=True)
    for name, vector in ((names[1], value), ("− it says", reading), ("correction", error)):
        table(x, y, vector[None], name)
        y += side + 2
    y += 24
    canvas.text(4, y - 10, "3. Write: key times correction is added", 12, "start", bold=True)
    table(56, y, key[:, None], "")
    table(x, y, new, "new memory", right)
    first, target, last = (", ".join(map(_tenths, v.tolist())) for v in (reading, value, key @ new))
    return canvas.drawing(
        f"A memory of {rows} by {columns} numbers says {first} for {names[0]}; {names[1]} is "
        f"{target}; the difference is written, and it says {last}"
    )


def _tenths(number: float) -> str:
    return f"{number:.1f}".replace("-0.0", "0.0")


def self_draft(start: str, words: Sequence[str]) -> Drawing:
    """One pass of a model over a text that ends with ``start``, and the drafts after it: the first
    of the ``words`` is the model's own, each later one is drafted from the state before it and the
    word before it."""
    states = ["h", *(f"h{power}" for power in "¹²³⁴⁵⁶⁷⁸⁹")]
    middle = 176
    canvas = Canvas(
        WIDTH, 66 * len(words) + 14,
        f"The model reads {start!r}; its state h gives {words[0]!r}. "
        + " ".join(
            f"{states[k]} and {before!r} give {states[k + 1]}, which drafts {word!r}."
            for k, (before, word) in enumerate(pairwise(words))
        ),
    )  # fmt: skip
    for k, word in enumerate(words):
        y, given = 66 * k + 30.0, printable(words[k - 1] if k else start)
        given = given if len(given) < 16 else f"…{given[-14:]}"
        colour, name = (BLUE, "one block") if k else (ORANGE, "all blocks")
        canvas.text(4, y, given, min(13.0, 112 / (0.6 * len(given))), "start", bold=k == 1)
        canvas.line(118, y, middle - 46, y, 1.4, arrow=True)
        canvas.cell(middle - 44, y - 17, 88, 34, name, 12, colour, 0.25, colour)
        canvas.line(middle + 46, y, 262, y, 1.4, arrow=True)
        canvas.text(242, y - 10, states[k], 12)
        size = min(13.0, 74 / (0.63 * len(word)))
        canvas.text(268, y, printable(word), size, "start", bold=k == 0)
        if k + 1 < len(words):
            canvas.line(middle + 30, y + 19, middle + 30, y + 47, 1.4, arrow=True)
            canvas.text(middle + 44, y + 33, states[k], 12)
    return canvas.drawing()


def mtp_targets(words: Sequence[str], depths: Sequence[int] = (0, 1)) -> Drawing:
    """For each of the ``words`` of a document the newest word that a depth has seen, and its
    target; a dash where the document has no such word."""
    count, wide = len(words), min(80.0, 250 / len(words))
    says = (
        f"Depth {d}: "
        + ", ".join(f"after {words[i]!r} {words[i + 1]!r}" for i in range(d, count - 1))
        for d in depths
    )
    canvas = Canvas(WIDTH, 56 * len(depths) + 34, "Targets. " + "; ".join(says))
    size = min(13.0, *((wide - 4) / (0.6 * max(len(printable(w)), 1)) for w in words))
    canvas.note(4, 16, "column", size=12)
    head = Grid(canvas, 93, 5, wide, 22, 0)
    for i, word in enumerate(words):
        head.text(0, i, printable(word), size, bold=True)
    for j, d in enumerate(depths):
        grid = Grid(canvas, 94, 40 + 56 * j, wide, 24, 2)
        for row, (name, ahead, colour) in enumerate((("sees", d, BLUE), ("target", d + 1, GREEN))):
            canvas.note(4, 50 + 56 * j + 24 * row, f"depth {d} {name}", size=12)
            for i in range(count):
                known = i + ahead < count
                text = printable(words[i + ahead]) if known else "–"
                fill = colour if known else "none"
                grid.cell(row, i, text, size, fill, radius=3, down=22 / 24)
    return canvas.drawing()


def residual_streams(
    read: Sequence[float], write: Sequence[float], carry: Sequence[Sequence[float]]
) -> Drawing:
    """A block with several residual streams: the weights with which it reads and writes each, and
    below it how the streams are mixed, ``carry[j][i]`` of stream j into stream i. Up to five
    fit."""
    n, side = len(read), 38
    low = 36 * n + 34.0
    canvas = Canvas(WIDTH, low + (side - 8) * n + 40)
    middle = 36 * n / 2 + 14
    canvas.note(4, 8, "read")
    canvas.note(WIDTH - 4, 8, "write", "end")
    for j in range(n):
        y = 36 * j + 32.0
        for x in (4.0, WIDTH - 64.0):
            canvas.cell(x, y - 13, 60, 26, f"stream {j + 1}", 12, BLUE, 0.2, BLUE)
        canvas.line(66, y, 138, middle, 0.6 + 3 * read[j], arrow=True)
        canvas.line(205, middle, WIDTH - 66, y, 0.6 + 1.5 * write[j], arrow=True)
        aside = y - 8 if y < middle else y + 8  # where no line is
        canvas.text(82, aside, f"{read[j]:.2f}", 11)
        canvas.text(WIDTH - 82, aside, f"{write[j]:.2f}", 11)
    canvas.cell(140, middle - 20, 64, 40, "block F", 13, ORANGE, 0.3, ORANGE, bold=True)
    canvas.title(low, "carry: what part of a stream goes where")
    grid = Grid(canvas, 100, low + 36, side, side - 8)
    for j, parts in enumerate(carry):
        x, y = grid.middle(j, j)
        canvas.note(92, y, f"from {j + 1}", "end")
        canvas.note(x, low + 24, f"to {j + 1}", "middle")
        for i, part in enumerate(parts):
            grid.cell(j, i, f"{part:.2f}", 11, BLUE, min(1.0, 0.7 * part), INK, 3)
    return canvas.drawing(
        f"A block reads {n} streams with the weights {', '.join(f'{w:.2f}' for w in read)}, writes "
        f"with {', '.join(f'{w:.2f}' for w in write)}, and carries them on: "
        + "; ".join(
            f"of stream {j + 1} " + ", ".join(f"{part:.2f}" for part in parts)
            for j, parts in enumerate(carry)
        )
    )


def config_lines(config: Mapping[str, Any], labels: Mapping[str, str]) -> Drawing:
    """The lines of a config, a key and its value each, and on the right what ``labels`` call the
    key. Lines with one label are next to each other and have one colour; those without stand first.
    """
    order = ["", *dict.fromkeys(labels[key] for key in config if labels.get(key))]
    groups = {label: [key for key in config if labels.get(key, "") == label] for label in order}
    says = (f"{label or 'sizes'}: {', '.join(keys)}" for label, keys in groups.items())
    canvas = Canvas(
        WIDTH, 19 * len(config) + 8, f"A config of {len(config)} lines. " + "; ".join(says)
    )
    y = 4
    for i, (label, keys) in enumerate(groups.items()):
        for key in keys:
            if label:
                colour = COLOURS[(i - 1) % 5]
                canvas.box(1, y, 341, 17, colour, 0.2, "none", radius=2)
                canvas.box(1, y, 4, 17, colour, 1, "none", radius=0)
            text = f"{key}: {_value(config[key])}"
            canvas.text(10, y + 8.5, text, 11, "start", opacity=1 if label else 0.75)
            if label and key == keys[0]:
                canvas.text(338, y + 8.5, label, 11, "end", INK, bold=True)
            y += 19
    return canvas.drawing()


def _value(value: Any) -> str:
    """A value as a file has it; of a long list, how often it holds each word."""
    if isinstance(value, list) and len(value) > 3:
        words = [str(one).removesuffix("_attention") for one in value]
        return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:,}" if isinstance(value, int) else f"{value}"


def cache_sizes(bytes_of: Mapping[str, tuple[int, int]], tokens: int) -> Drawing:
    """Bars: what the cache of each model keeps for so many ``tokens``, in bytes, and how much of it
    is a state whose size does not depend on them."""
    left, unit = 6, 284 / max(sum(both) for both in bytes_of.values())
    canvas, says = Canvas(WIDTH, 38 * len(bytes_of) + 4), []
    for i, (name, (growing, fixed)) in enumerate(bytes_of.items()):
        y, total, wide = 38 * i, growing + fixed, unit * growing
        size = f"{total / 2**30:.2f} GiB" if total >= 2**30 else f"{total / 2**20:,.0f} MiB"
        canvas.text(left, y + 9, name, 12, "start", bold=True)
        canvas.box(left, y + 18, max(wide, 0.5), 14, BLUE, 0.6, "none", radius=0)
        if fixed:
            canvas.box(left + wide, y + 18, max(3, unit * fixed), 14, ORANGE, 0.9, "none", radius=0)
        canvas.text(337, y + 9, size, 12, "end")
        state = f", of which {fixed / 2**20:.0f} MiB state" if fixed else ""
        says.append(f"{name} {size}{state}")
    return canvas.drawing(f"A cache of {tokens:,} tokens: " + "; ".join(says))
