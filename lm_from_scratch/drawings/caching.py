"""Drawings of chapter 5: caches that fill, where keys lie, how they are rounded, padded rows."""

from collections.abc import Mapping, Sequence
from html import escape

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
    Canvas,
    Drawing,
    printable,
    slides,
    tint,
)


def cache_filling(pieces: Sequence[str], prompt: int, first: int = 3) -> Drawing:
    """A text that grows by a token in each round, after a ``prompt`` of so many of the ``pieces``:
    what the model computes without a cache and with one. Round ``first`` is shown at first."""
    row, top, words = 20, 52, 88
    columns = {"without a cache": 98, "with a cache": 226}
    rounds = range(1, len(pieces) - prompt + 1)
    frames, read = [], 0
    for r in rounds:
        T = prompt + r - 1
        new = T if r == 1 else 1
        read += T
        canvas = Canvas(
            343, top + row * len(pieces) + 30,
            f"{T} tokens, of which the last is new; the model writes {pieces[T]!r}. So far "
            f"{read} tokens were computed without a cache, {T} with one",
        )  # fmt: skip
        for title, x in columns.items():
            canvas.text(x + 52, 22, title, 13, bold=True)
        canvas.text(words, 22, "token", 11, "end", opacity=0.8)
        for t, piece in enumerate(pieces[:T]):
            y = top + row * t - 8
            canvas.text(words, y, _word(piece), 13, "end", bold=t >= T - new)
            for x, old in zip(columns.values(), ("again", "kept")):
                if t >= T - new:
                    _small_boxes(canvas, x, y, "qkv", ORANGE, 0.45)
                    canvas.text(x + 66, y, "new", 11, "start")
                elif old == "again":
                    _small_boxes(canvas, x, y, "qkv", GREY, 0.12)
                    canvas.text(x + 66, y, old, 11, "start", RED, bold=True)
                else:
                    _small_boxes(canvas, x, y, ".kv", BLUE, 0.4)
                    canvas.text(x + 66, y, old, 11, "start")
        y = top + row * T - 8
        canvas.text(words, y, _word(pieces[T]), 13, "end", GREEN, bold=True)
        canvas.text(words + 10, y, "is written", 11, "start", GREEN)
        foot = canvas.height - 14
        canvas.line(0, foot - 14, 343, foot - 14, opacity=0.3)
        canvas.text(words, foot, "read so far", 11, "end", opacity=0.8)
        for left, number in zip(columns.values(), (read, T)):
            canvas.text(left + 52, foot, f"{number} tokens", 14, bold=True)
        frames.append(canvas.drawing())
    return slides("Round", frames, [str(r) for r in rounds], first - 1)


def _small_boxes(
    canvas: Canvas, x: float, y: float, letters: str, colour: str, tint: float
) -> None:
    """A box for each of the letters q, k and v, in its own place; a point for no box."""
    for i, letter in enumerate(letters):
        if letter != ".":
            canvas.box(x + 20 * i, y - 8, 17, 16, colour, tint, colour, radius=2)
            canvas.text(x + 20 * i + 8.5, y, letter, 11)


def one_query(pieces: Sequence[str], weights: Sequence[float]) -> Drawing:
    """Attention in the round of the last token: its query meets the keys of all tokens, with these
    ``weights``. The rows of earlier queries are finished."""
    T = len(pieces)
    left, top, words = 118, 64, 84
    cell = min(22.0, (343 - left) / T)
    canvas = Canvas(
        343, top + cell * T + 26,
        f"A table of {T} queries and {T} keys: the row of {pieces[-1]!r} is computed now, earlier "
        "rows are finished, and the new key is hidden from them; keys and values are kept",
    )  # fmt: skip
    for k, name in enumerate(("key", "value")):
        canvas.text(left - 6, 12 + 22 * k, f"{name}s", 12, "end", bold=True)
        for s in range(T):
            colour = ORANGE if s == T - 1 else BLUE
            canvas.box(left + cell * s, 3 + 22 * k, cell - 3, 18, colour, 0.4, colour, radius=2)
            canvas.text(left + cell * (s + 0.5) - 1.5, 12 + 22 * k, name[0], 11)
    canvas.text(left - 6, 54, "queries", 12, "end", bold=True)
    for t, piece in enumerate(pieces):
        y, now = top + cell * t, t == T - 1
        canvas.text(words, y + cell / 2, _word(piece), 12, "end", bold=now)
        if now:
            canvas.box(left - 26, y + 1, 18, cell - 4, ORANGE, 0.4, ORANGE, radius=2)
        canvas.text(left - 17, y + cell / 2 - 1, "q", 11, opacity=1.0 if now else 0.6)
        for s in range(t + 1):
            colour = ORANGE if now else INK
            tint = 0.1 + 0.8 * weights[s] / max(weights) if now else 0.14
            x = left + cell * s
            canvas.box(x, y, cell - 3, cell - 3, colour, tint, colour if now else "none", 2)
    canvas.text(left, canvas.height - 12, "grey: finished in earlier rounds", 11, "start")
    return canvas.drawing()


def slot_steps(pieces: Sequence[str], capacity: int, window: int, first: int = 0) -> Drawing:
    """Tokens that go one by one into three caches: one that grows, one of a fixed ``capacity``, and
    a ring of ``window`` slots. Step ``first`` is shown at the beginning."""
    widest = max(capacity, 2 ** (len(pieces) - 1).bit_length())
    cell = min(21.0, 339 / widest)
    frames = []
    for p, piece in enumerate(pieces):
        grown = 2 ** p.bit_length()
        tapes = {
            f"growing: {grown} {'slots' if p else 'slot'}": [
                s if s <= p else -1 for s in range(grown)
            ],
            f"static: {capacity} slots": [s if s <= p else -1 for s in range(capacity)],
        }
        held = [s + window * ((p - s) // window) if s <= p else -1 for s in range(window)]
        out = p - window
        canvas = Canvas(
            343, 282,
            f"token {p}, {piece!r}: slot {p} of {grown} in the growing cache, slot {p} of "
            f"{capacity} in the static one, slot {p % window} of {window} in the ring, which holds "
            f"{', '.join(str(each) for each in sorted(held) if each >= 0)}",
        )  # fmt: skip
        canvas.text(2, 12, f"token {p}: {_word(piece)}", 14, "start", bold=True)
        if p and grown > 2 ** (p - 1).bit_length():
            canvas.text(341, 36, f"full: {grown // 2} copied", 12, "end", RED)
        for i, (title, places) in enumerate(tapes.items()):
            y = 36 + 62 * i
            canvas.text(2, y, title, 12, "start")
            for s, place in enumerate(places):
                _slot(canvas, 2 + cell * s, y + 11, cell - 2, 24, place, place == p)
        title = f"sliding: a ring of {window} slots"
        canvas.text(2, 160, title, 12, "start")
        if out >= 0:
            pushed = f"{_word(pieces[out])} ({out}) is overwritten"
            canvas.text(341, 160, pushed, 12, "end", RED)
        width, rows = 339 / min(window, 4), -(-window // 4)
        for s, place in enumerate(held):
            x, y = 2 + width * (s % 4), 172 + 56 * (s // 4)
            _slot(canvas, x, y, width - 4, 48, place, place == p)
            if place >= 0:
                canvas.text(x + width / 2 - 2, y + 14, _word(pieces[place]), 12, bold=place == p)
            canvas.text(x + width / 2 - 2, y + 60, f"slot {s}", 10, opacity=0.8)
        canvas.height = 172 + 56 * rows + 14
        frames.append(canvas.drawing())
    return slides("Token", frames, [str(p) for p in range(len(pieces))], first)


def _slot(
    canvas: Canvas, x: float, y: float, width: float, height: float, place: int, new: bool
) -> None:
    """A slot with the position of what it holds; -1 is nothing."""
    colour = ORANGE if new else BLUE
    fill, tint = (colour, 0.45) if place >= 0 else ("none", 0.0)
    canvas.box(x, y, width, height, fill, tint, colour if place >= 0 else INK, radius=2)
    if place >= 0:
        below = height - 13 if height > 30 else height / 2
        canvas.text(x + width / 2, y + below, str(place), 11, bold=new)


def writing_order(pieces: Sequence[str], window: int, T: int) -> Drawing:
    """The last ``T`` of the ``pieces`` of a text come together to a ring of ``window`` slots: which
    keys their queries find if they are written before anything is read, and if they are read
    beside what the ring held."""
    end = len(pieces)
    start = end - T
    first = max(start - window, 0)
    before = [s + window * ((start - 1 - s) // window) for s in range(window)]
    after = [s + window * ((end - 1 - s) // window) for s in range(window)]
    panels = {
        "write first, then read": after,
        "read first, then write": [*before, *range(start, end)],
    }
    cell, left, row = 31, 104, 27
    high = 68 + row * T
    needed = [p for q in range(start, end) for p in range(max(q - window + 1, 0), q + 1)]
    missed = sum(p not in after for p in needed)
    canvas = Canvas(
        343, 2 * high + 4,
        f"A ring of {window} slots and {T} new tokens. Written first, a query misses a key "
        f"{missed} times; read first, never",
    )  # fmt: skip
    for k, (title, keys) in enumerate(panels.items()):
        y = k * high
        canvas.text(2, y + 12, title, 13, "start", bold=True)
        canvas.text(left - 8, y + 42, "keys", 12, "end")
        for i, p in enumerate(keys):
            x = left + cell * i + (8 if k and i >= window else 0)
            _slot(canvas, x, y + 30, cell - 4, 24, p, p >= start)
        for t, q in enumerate(range(start, end)):
            middle = y + 76 + row * t
            canvas.text(left - 8, middle, f"{_word(pieces[q])} ({q})", 12, "end", bold=True)
            for p in range(max(q - window + 1, 0), q + 1):
                there = p in keys
                x = left + cell * (p - first - 1)
                colour = BLUE if there else RED
                canvas.box(x, middle - 11, cell - 4, 22, colour, 0.25 if there else 0.05, colour)
                canvas.text(x + cell / 2 - 2, middle, str(p), 12, colour=INK if there else RED)
                if not there:
                    canvas.line(x + 3, middle + 8, x + cell - 7, middle - 8, 1.6, RED)
    return canvas.drawing()


def slot_masks(
    kinds: Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[Sequence[bool]]]],
) -> Drawing:
    """Which slots each query may see: by title, the positions of the keys in the slots (-1: none),
    the positions of the queries, and one row of a mask for each of them."""
    left, row = 62, 22
    widest = max(len(keys) for keys, _, _ in kinds.values())
    cell = min(24.0, (343 - left) / widest)
    said = (
        f"{title}: " + ", ".join(f"query {q} sees {sum(r)} of {len(r)}" for q, r in zip(qs, rows))
        for title, (_, qs, rows) in kinds.items()
    )
    height = sum(62 + row * len(queries) for _, queries, _ in kinds.values())
    canvas, y = Canvas(343, height, "; ".join(said)), 0.0
    for title, (keys, queries, mask) in kinds.items():
        canvas.text(2, y + 12, title, 13, "start", bold=True)
        canvas.text(left - 8, y + 36, "slots", 11, "end", opacity=0.8)
        for s, p in enumerate(keys):
            _slot(canvas, left + cell * s, y + 26, cell - 3, 20, p, p in queries)
        y += 60
        for t, (q, seen) in enumerate(zip(queries, mask, strict=True)):
            canvas.text(left - 8, y + row * t, f"query {q}", 11, "end")
            for s, one in enumerate(seen):
                x, top = left + cell * s, y + row * t - 8
                fill = (BLUE, 0.75) if one else (INK, 0.08)
                canvas.box(x, top, cell - 3, 16, *fill, edge="none", radius=2)
        y += row * len(queries) + 2
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


def _word(piece: str) -> str:
    """A token as a label, without the blank before it."""
    return printable(piece.removeprefix(" ") or piece)


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
