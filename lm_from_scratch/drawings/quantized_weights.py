"""Drawings of chapter 8: how weights are rounded, held, loaded and adapted."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, INK, ORANGE, PURPLE, RED
from lm_from_scratch.drawings.labels import minus


def rounding(rows: Mapping[str, tuple[Sequence[float], float, int]]) -> Drawing:
    """Weights, each with a line to the nearest level, on one ruler for all rows.

    A row of the drawing, by its title: the weights, the scale and the largest code ``top``. Levels
    are ``scale`` times a whole number from ``-top`` to ``top``; the used ones are tinted.
    """
    reach = max(max(top * scale, *map(abs, weights)) for weights, scale, top in rows.values())
    left, long = 12, 319
    canvas, says = Canvas(WIDTH, 96 * len(rows)), []
    for i, (title, (weights, scale, top)) in enumerate(rows.items()):
        y, wide = 96 * i, long * scale / reach / 2
        codes = [round(weight / scale) for weight in weights]
        canvas.title(y + 12, title, size=12)
        canvas.line(left, y + 66, left + long, y + 66, opacity=0.4)
        for code in range(-top, top + 1):
            x, used = left + long / 2 + wide * code, code in codes
            canvas.line(x, y + 61, x, y + 71, 3 if used else 1.2, ORANGE if used else INK)
            if wide >= 14 or (abs(code) == top and top * wide >= 12):
                faint = 1.0 if used else 0.7
                canvas.text(x, y + 83, minus(code), 10, bold=used, opacity=faint)
        for weight, code in zip(weights, codes, strict=True):
            x, end = left + long / 2 + wide * weight / scale, left + long / 2 + wide * code
            canvas.line(x, y + 36, end, y + 61, 1.4, opacity=0.6)
            canvas.circle(x, y + 33, 3.5, BLUE, 0.6, BLUE)
        count = len(set(codes))
        says.append(f"{title}: {len(weights)} weights on {count} of {2 * top + 1} levels")
    return canvas.drawing("; ".join(says))


def holders(title: str, held: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Drawing:
    """Who holds which tensor: an arrow from each holder in ``held`` to its object, one of the
    ``tensors``, and in the object its dtype and the names of its attributes.

    Equal contents have equal colours, in the order of the alphabet.
    """
    row, left, right, wide = 24, 112, 196, 143
    inside = {
        name: ", ".join([str(tensor.dtype).removeprefix("torch."), *vars(tensor)])
        for name, tensor in tensors.items()
    }
    colours = dict(zip(sorted(set(inside.values())), (BLUE, ORANGE, GREEN, PURPLE)))
    groups = {
        name: [holder for holder, one in held.items() if one is tensor]
        for name, tensor in tensors.items()
    }
    says = (
        f"{', '.join(group) or 'nobody'} at {name}, which is {inside[name]}"
        for name, group in groups.items()
    )
    height = 30 + sum(max(row * len(group), 46) + 10 for group in groups.values())
    canvas, y = Canvas(WIDTH, height, f"{title}: " + "; ".join(says)), 30.0
    canvas.title(12, title)
    for name, group in groups.items():
        tall = max(row * len(group), 46)
        middle, colour = y + tall / 2, colours[inside[name]]
        canvas.box(right, middle - 23, wide, 46, colour, 0.25, colour)
        canvas.text(right + wide / 2, middle - 9, name, 11, opacity=0.85)
        canvas.text(right + wide / 2, middle + 9, inside[name], 13, bold=True)
        for i, holder in enumerate(group):
            start = row * (i - (len(group) - 1) / 2)
            canvas.text(left, middle + start, holder, 13, "end")
            canvas.line(left + 6, middle + start, right - 2, middle + 0.3 * start, arrow=True)
        y += tall + 10
    return canvas.drawing()


def held_tensors(outside: str, inside: Mapping[str, Sequence[str]]) -> Drawing:
    """A tensor without numbers, described as ``outside``, and the tensors that it holds: for the
    name of each, lines that describe it."""
    width = (WIDTH - 34) / len(inside)
    contents = "; ".join(f"{name}: {', '.join(lines)}" for name, lines in inside.items())
    height = 17 * max(len(lines) for lines in inside.values()) + 34
    canvas = Canvas(WIDTH, height + 92, f"Seen from outside: {outside}. It holds {contents}")
    canvas.note(4, 9, "what a layer sees")
    canvas.box(1, 20, 341, height + 71, radius=10)
    canvas.text(171, 38, outside, 13, bold=True)
    canvas.note(171, 56, "no numbers of its own; it holds", "middle")
    for i, (name, lines) in enumerate(inside.items()):
        x = 12 + i * (width + 10)
        canvas.box(x, 72, width, height, COLOURS[i % 3], 0.25)
        canvas.text(x + width / 2, 88, name, 13, bold=True)
        for k, line in enumerate(lines):
            canvas.text(x + width / 2, 110 + 17 * k, line, 12)
    return canvas.drawing()


def two_doors(above: Sequence[str], below: Sequence[str], refused: Sequence[str]) -> Drawing:
    """A call on its way down to a tensor's numbers. It can be answered at two doors, one above and
    one below autograd; ``above`` and ``below`` are calls that are, and the lines ``refused`` say
    what happens to all others."""
    left, width, middle = 2, 226, 115
    canvas = Canvas(
        WIDTH, 240 + 17 * len(refused), f"A call passes __torch_function__ (answers "
        f"{', '.join(above)}), autograd, and __torch_dispatch__ (answers {', '.join(below)}); "
        f"{' '.join(refused)}",
    )  # fmt: skip
    canvas.text(middle, 9, "a call with the weight", 12, bold=True)
    canvas.text(252, 9, "answered", 12, "start", opacity=0.8)
    for y in (20, 82, 138, 198):
        canvas.line(middle, y, middle, y + 22, arrow=True)
    doors = (44, "__torch_function__", above, BLUE), (162, "__torch_dispatch__", below, GREEN)
    for y, name, answers, colour in doors:
        canvas.cell(left, y, width, 34, name, 13, colour, 0.25, bold=True)
        canvas.line(left + width, y + 17, left + width + 18, y + 17, arrow=True)
        for i, answer in enumerate(answers):
            canvas.text(252, y + 17 + 16 * i, answer, 12, "start")
    canvas.cell(left, 104, width, 34, "autograd takes the call apart", 12)
    canvas.box(left, 222, width, 16 + 17 * len(refused), RED, 0.2)
    for i, line in enumerate(refused):
        canvas.text(middle, 239 + 17 * i, line, 12)
    return canvas.drawing()


def load_stations(links: Sequence[str]) -> Drawing:
    """The way of a tensor from a checkpoint into a module: five stations at which your code can
    act, numbered from 1, which lead to the addresses ``links``."""
    stations = (
        ("your dictionary", "rename, transpose, drop, before torch sees it", ORANGE),
        ("pre-hook of a module", "the same, for one layer that has changed", PURPLE),
        ("copy, or assign=True", "whose dtype, memory and device?", BLUE),
        ("module_load of a tensor", "its class decides what it becomes: int8?", GREEN),
        ("post-hook of the model", "forgive a missing or unexpected key", ORANGE),
    )
    middle, end = 171.5, 20 + 66 * len(stations)
    canvas = Canvas(
        WIDTH, end + 26, "A checkpoint passes five stations: "
        + "; ".join(f"{i}. {name}: {note}" for i, (name, note, _) in enumerate(stations, 1))
        + ". Then it is in the module, or torch raises an error",
    )  # fmt: skip
    canvas.text(middle, 9, "a checkpoint: names and tensors", 13, bold=True)
    for i, (name, note, colour) in enumerate(stations):
        y = 36 + 66 * i
        canvas.line(middle, y - 17, middle, y, arrow=True)
        canvas.begin_link(links[i])
        canvas.box(1, y, 341, 48, colour, 0.25)
        canvas.circle(23, y + 24, 12, colour, 0.5)
        canvas.text(23, y + 24, i + 1, 13, bold=True)
        canvas.text(47, y + 16, name, 13, "start", bold=True)
        canvas.text(47, y + 33, note, 12, "start", opacity=0.85)
        canvas.end_link()
    canvas.line(middle, end - 1, middle, end + 10, arrow=True)
    canvas.text(middle, end + 18, "the module, or an error", 13, bold=True)
    return canvas.drawing()


def choices(rows: Mapping[str, str], titles: tuple[str, str]) -> Drawing:
    """What to do in which case: a row for each key of ``rows``, under two ``titles``. A line break
    in a text starts another line."""
    right = 178
    high = [17 * max(a.count("\n"), b.count("\n")) + 34 for a, b in rows.items()]
    flat = "; ".join(f"{a}: {b}" for a, b in rows.items()).replace("\n", " ")
    canvas, y = Canvas(WIDTH, sum(high) + 24, f"{titles[0]}, {titles[1]}: {flat}"), 22.0
    for x, title in zip((8, right), titles, strict=True):
        canvas.note(x, 10, title, size=12)
    for i, (texts, height) in enumerate(zip(rows.items(), high, strict=True)):
        canvas.box(1, y, 341, height - 6, COLOURS[(0, 1, 2, 4, 3)[i % 5]], 0.18)
        for x, text in zip((8, right), texts):
            for k, line in enumerate(text.split("\n")):
                canvas.text(x, y + 14 + 17 * k, line, 12, "start", bold=x == right)
        y += height
    return canvas.drawing()


def low_rank(n: int, k: int, r: int, kept_as: str) -> Drawing:
    """A weight (n, k) and two thin matrices (n, r) and (r, k) whose product is added to it, all in
    scale. ``kept_as`` says what the numbers of the weight are, as "4 bits"."""
    unit = min(190 / n, 100 / k)
    wide, high, thin = k * unit, n * unit, max(r * unit, 2)
    low = 30 + max(high, 60.0)
    middle = (30 + low) / 2
    canvas = Canvas(
        WIDTH, low + 68, f"W ({n}, {k}), {kept_as}, {n * k:,} numbers, frozen, plus "
        f"B ({n}, {r}) times A ({r}, {k}), {r * (n + k):,} numbers, trained",
    )  # fmt: skip
    weight, b, a = 70.0, 196.0, 236.0
    canvas.text(weight, 12, "W", 15, bold=True)
    canvas.box(weight - wide / 2, middle - high / 2, wide, high, INK, 0.15, radius=2)
    canvas.text(weight + 76, middle, "+", 20)
    canvas.text(b, 12, "B", 15, bold=True)
    canvas.box(b - thin / 2, middle - high / 2, thin, high, ORANGE, 0.6, ORANGE, radius=0)
    canvas.text(b + 22, middle, "×", 18)
    canvas.text(a + wide / 2, middle - 18, "A", 15, bold=True)
    canvas.box(a, middle - thin / 2, wide, thin, ORANGE, 0.6, ORANGE, radius=0)
    canvas.text(a + wide / 2, middle + thin + 12, f"({r}, {k})", 12)
    canvas.text(b, low + 14, f"({n}, {r})", 12)
    for i, line in enumerate((f"({n}, {k}), {kept_as}", f"{n * k:,} numbers", "frozen")):
        canvas.text(weight, low + 14 + 17 * i, line, 12)
    for i, line in enumerate((f"{r * (n + k):,} numbers", "trained")):
        canvas.text((b + a + wide) / 2, low + 31 + 17 * i, line, 12)
    return canvas.drawing()
