"""Drawings of caches: what is kept, how it is rounded, and what padded rows hold."""

from collections.abc import Mapping, Sequence
from html import escape

from lm_from_scratch.instruments.canvas import BLUE, INK, ORANGE, Canvas, Drawing, tint
from lm_from_scratch.instruments.plot import COLOURS, printable

# ------------------------------------------------------------------ rounded keys, padded batches


def versions(texts: Mapping[str, Sequence[str]]) -> Drawing:
    """One text, given by its tokens, in several versions by name. From the first token on that is
    not that of the first version, a version is marked: tinted and underlined."""
    first = [*next(iter(texts.values()))]
    style = f"background: {tint(ORANGE, 0.3)}; border-bottom: 2px solid {ORANGE}"
    rows, says = [], []
    for name, pieces in texts.items():
        n = same_tokens(first, pieces)
        kept, other = ("".join(part).replace("\n", "↵") for part in (pieces[:n], pieces[n:]))
        marked = f'<span style="{style}">{escape(other)}</span>' if other else ""
        rows.append(
            f'<div style="margin-bottom: 10px"><strong>{escape(name)}</strong><br>'
            f'<span style="white-space: pre-wrap">{escape(kept)}{marked}</span></div>'
        )
        says.append(f"{name}: " + (f"{n} tokens, then {other!r}" if other else repr(kept)))
    return Drawing(f'<div class="diagram">{"".join(rows)}</div>', "\n".join(says))


def same_tokens(first: Sequence[str], second: Sequence[str]) -> int:
    """How many tokens two texts have in common before they differ."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def ruler(values: Sequence[float], bits: Sequence[int], shown: Sequence[int] = ()) -> Drawing:
    """Numbers above a ruler from the smallest to the largest of them, once for each of the ``bits``
    with 2 to that power marks. An arrow leads from each number to its nearest mark; the ``shown``
    ones are orange."""
    left, right, row = 12, 331, 96
    low, high = min(values), max(values)
    place = {value: left + (right - left) * (value - low) / (high - low) for value in values}
    canvas = Canvas(343, row * len(bits), "")
    says = []
    for r, b in enumerate(bits):
        y, step = row * r, (high - low) / (2**b - 1)
        canvas.text(
            left, y + 10, f"{b} bits: {2**b} marks, step {step:.2f}", 12, "start", bold=True
        )
        canvas.line(left, y + 64, right, y + 64, 1.4)
        for code in range(2**b):
            x = left + (right - left) * code / (2**b - 1)
            canvas.line(x, y + 58, x, y + 70)
            if b <= 4:
                canvas.text(x, y + 80, str(code), 11, opacity=0.8)
        codes = [round((value - low) / step) for value in values]
        for i, (value, code) in enumerate(zip(values, codes, strict=True)):
            x, mark = place[value], left + (right - left) * code / (2**b - 1)
            colour = ORANGE if i in shown else BLUE
            canvas.line(x, y + 34, mark, y + 56, 1.4, colour, 0.9, arrow=True)
            canvas.circle(x, y + 30, 4.5, colour, 0.8, colour)
        says.append(f"{b} bits, step {step:.2f}: codes {codes}")
    canvas.says = f"{len(values)} numbers from {low:.2f} to {high:.2f}; " + "; ".join(says)
    return canvas.drawing()


def shared_rulers(words: Sequence[str], features: int, group: int) -> Drawing:
    """Two tables, a row for each of the ``words`` and a column for each of the ``features``; the
    last word has just arrived. Cells in one box share a ruler: ``group`` features of a token
    above, ``group`` tokens of a feature below, where cells wait until their group is full."""
    cell, left = 22, 92
    full, n = len(words) // group * group, len(words)
    high = cell * n + 38
    canvas = Canvas(
        343, 2 * high + 22,
        f"Above, each of {n} tokens has rulers of its own, over {group} features; below, each "
        f"feature has a ruler over {group} tokens, and the last {n - full} tokens have none yet",
    )  # fmt: skip
    titles = "A ruler over features of one token", "A ruler over tokens of one feature"
    for table, title in enumerate(titles):
        top = table * high + 26
        canvas.text(4, top - 14, title, 13, "start", bold=True)
        for t, word in enumerate(words):
            y = top + cell * (t + 0.5)
            canvas.text(left - 8, y, printable(word), 12, "end", bold=t == n - 1)
        canvas.text(left + cell * features + 8, y, "new", 12, "start", bold=True)
        wide, tall = (group, 1) if table == 0 else (1, group)
        for t in range(0, n if table == 0 else full, tall):
            for f in range(0, features, wide):
                colour = COLOURS[(2 * t + f // wide if table == 0 else f + t // tall) % 5]
                box = left + cell * f, top + cell * t, cell * wide - 3, cell * tall - 3
                canvas.box(*box, colour, 0.4)
        for t in range(full if table else n, n):
            for f in range(features):
                canvas.box(left + cell * f, top + cell * t, cell - 3, cell - 3)
        for t in range(n):
            for f in range(features):
                x, y = left + cell * (f + 0.5) - 1.5, top + cell * (t + 0.5) - 1.5
                canvas.circle(x, y, 2, INK, 0.6, "none")
    canvas.text(left, 2 * high + 12, "no ruler yet: kept exactly", 11, "start", opacity=0.8)
    return canvas.drawing()


def padded_batch(
    rows: Sequence[Sequence[str]], positions: Sequence[Sequence[int]], read: Sequence[int] = ()
) -> Drawing:
    """The columns of a batch with the mask and the position of each token below it; where the
    position is -1 there is padding. The column ``read`` of each row is blue."""
    T = max(map(len, rows))
    left, high = 48, 70
    wide = (341 - left) / T
    masks = [[int(p >= 0) for p in row] for row in positions]
    canvas = Canvas(
        343, high * len(rows),
        "; ".join(
            f"row {r}: {' | '.join(words)}, mask {mask}, positions {[*places]}"
            for r, (words, mask, places) in enumerate(zip(rows, masks, positions, strict=True))
        ),
    )  # fmt: skip
    for r, (words, mask, places) in enumerate(zip(rows, masks, positions, strict=True)):
        y = high * r + 2
        for k, name in enumerate((f"row {r}", "mask", "position")):
            canvas.text(0, y + (13, 36, 52)[k], name, 11, "start", opacity=0.8)
        for t, (word, real, place) in enumerate(zip(words, mask, places, strict=True)):
            x, chosen = left + wide * t, r < len(read) and t == read[r]
            fill, tinted = (BLUE, 0.35) if chosen else (INK, 0.12 if real else 0.02)
            faint = 1.0 if real else 0.55
            canvas.box(x + 1, y, wide - 2, 26, fill, tinted)
            size = min(12.0, 1.65 * wide / max(len(word.strip(" ")), 1))
            canvas.text(x + wide / 2, y + 13, printable(word.strip(" ")), size, opacity=faint)
            canvas.text(x + wide / 2, y + 36, str(real), 12, opacity=faint)
            canvas.text(x + wide / 2, y + 52, f"{place}".replace("-", "−"), 12, opacity=faint)
    return canvas.drawing()
