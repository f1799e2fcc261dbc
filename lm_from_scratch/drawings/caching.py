"""Drawings of chapter 5: caches that fill, where keys lie, how they are rounded, padded rows."""

from collections.abc import Mapping, Sequence
from html import escape

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid, slides
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, RED
from lm_from_scratch.drawings.gpt2 import MARKED
from lm_from_scratch.drawings.labels import minus, printable, span, word


def cache_filling(pieces: Sequence[str], prompt: int, first: int = 3) -> Drawing:
    """A text that grows by a token in each round, after a ``prompt`` of so many of the ``pieces``:
    what the model computes without a cache and with one. Round ``first`` is shown at first."""
    columns = {"without a cache": 98, "with a cache": 226}
    frames, read = [], 0
    for T in range(prompt, len(pieces)):
        new = T if prompt == T else 1
        read += T
        canvas = Canvas(
            WIDTH, 82 + 20 * len(pieces),
            f"{T} tokens, of which the last is new; the model writes {pieces[T]!r}. So far "
            f"{read} tokens were computed without a cache, {T} with one",
        )  # fmt: skip
        canvas.note(88, 22, "token", "end")
        foot = canvas.height - 14
        for (title, left), old, count in zip(columns.items(), ("again", "kept"), (read, T)):
            canvas.text(left + 52, 22, title, 13, bold=True)
            canvas.text(left + 52, foot, f"{count} tokens", 14, bold=True)
            grid = Grid(canvas, left, 36, 20, 20)
            for t in range(T):
                look = (GREY, 0.12) if old == "again" else (BLUE, 0.4)
                for i, letter in enumerate("qkv"):
                    if t >= T - new or old == "again" or letter != "q":
                        colours = (ORANGE, 0.45) if t >= T - new else look
                        grid.cell(t, i, letter, 11, *colours, down=19 / 20)
                name, wrong = ("new", False) if t >= T - new else (old, old == "again")
                colour = RED if wrong else INK
                canvas.text(left + 66, 44 + 20 * t, name, 11, "start", colour, bold=wrong)
        for t, piece in enumerate(pieces[:T]):
            canvas.text(88, 44 + 20 * t, word(piece), 13, "end", bold=t >= T - new)
        canvas.text(88, 44 + 20 * T, word(pieces[T]), 13, "end", GREEN, bold=True)
        canvas.text(98, 44 + 20 * T, "is written", 11, "start", GREEN)
        canvas.line(0, foot - 14, WIDTH, foot - 14, opacity=0.3)
        canvas.note(88, foot, "read so far", "end")
        frames.append(canvas.drawing())
    return slides("Round", frames, [str(r + 1) for r in range(len(frames))], first - 1)


def one_query(pieces: Sequence[str], weights: Sequence[float]) -> Drawing:
    """Attention in the round of the last token: its query meets the keys of all tokens, with these
    ``weights``. The rows of earlier queries are finished."""
    T, left = len(pieces), 118
    cell = min(22.0, (WIDTH - left) / T)
    canvas = Canvas(
        WIDTH, cell * T + 90,
        f"A table of {T} queries and {T} keys: the row of {pieces[-1]!r} is computed now, earlier "
        "rows are finished, and the new key is hidden from them; keys and values are kept",
    )  # fmt: skip
    stored, table = Grid(canvas, left, 3, cell, 22), Grid(canvas, left, 64, cell, cell)
    for k, name in enumerate(("key", "value")):
        stored.name(k, f"{name}s", 12, bold=True, away=6)
        for s in range(T):
            colour = ORANGE if s == T - 1 else BLUE
            stored.cell(k, s, name[0], 11, colour, 0.4, down=21 / 22)
    canvas.text(left - 6, 54, "queries", 12, "end", bold=True)
    for t, piece in enumerate(pieces):
        y, now = 64 + cell * t, t == T - 1
        table.name(t, word(piece), bold=now, away=34)
        if now:
            canvas.box(left - 26, y + 1, 18, cell - 4, ORANGE, 0.4, ORANGE, radius=2)
        canvas.text(left - 17, y + cell / 2 - 1, "q", 11, opacity=1.0 if now else 0.6)
        for s in range(t + 1):
            share = weights[s] / max(weights)
            look = (ORANGE, 0.1 + 0.8 * share, ORANGE) if now else (INK, 0.14, "none")
            table.cell(t, s, "", 0, *look)
    canvas.text(left, canvas.height - 12, "grey: finished in earlier rounds", 11, "start")
    return canvas.drawing()


def slot_steps(pieces: Sequence[str], capacity: int, window: int, first: int = 0) -> Drawing:
    """Tokens that go one by one into three caches: one that grows, one of a fixed ``capacity``, and
    a ring of ``window`` slots. Step ``first`` is shown at the beginning."""
    widest = max(capacity, 2 ** (len(pieces) - 1).bit_length())
    rows = -(-window // 4)
    frames = []
    for p, piece in enumerate(pieces):
        grown, out = 2 ** p.bit_length(), p - window
        ring = _ring(p + 1, window)
        held = ", ".join(str(place) for place in sorted(ring) if place >= 0)
        canvas = Canvas(
            WIDTH, 186 + 56 * rows,
            f"token {p}, {piece!r}: slot {p} of {grown} in the growing cache, slot {p} of "
            f"{capacity} in the static one, slot {p % window} of {window} in the ring, which holds "
            f"{held}",
        )  # fmt: skip
        canvas.title(12, f"token {p}: {word(piece)}", size=14)
        if p and grown > 2 ** (p - 1).bit_length():
            canvas.text(341, 36, f"full: {grown // 2} copied", 12, "end", RED)
        names = f"growing: {grown} {'slots' if p else 'slot'}", f"static: {capacity} slots"
        for i, (name, slots) in enumerate(zip(names, (grown, capacity))):
            canvas.text(2, 36 + 62 * i, name, 12, "start")
            tape = Grid(canvas, 2, 47 + 62 * i, min(21.0, 339 / widest), 26, 2)
            for s in range(slots):
                _slot(tape, 0, s, s if s <= p else -1, s == p)
        canvas.text(2, 160, f"sliding: a ring of {window} slots", 12, "start")
        if out >= 0:
            pushed = f"{word(pieces[out])} ({out}) is overwritten"
            canvas.text(341, 160, pushed, 12, "end", RED)
        grid = Grid(canvas, 2, 172, 339 / min(window, 4), 56, 4)
        for s, place in enumerate(ring):
            row, column = divmod(s, 4)
            x, y = grid.middle(row, column)
            look = (ORANGE if place == p else BLUE, 0.45) if place >= 0 else ("none", 0.0)
            grid.cell(row, column, "", 0, *look, down=52 / 56)
            if place >= 0:
                canvas.text(x, y + 9, place, 11, bold=place == p)
                canvas.text(x, y - 12, word(pieces[place]), 12, bold=place == p)
            canvas.note(x, y + 34, f"slot {s}", "middle", 10)
        frames.append(canvas.drawing())
    return slides("Token", frames, [str(p) for p in range(len(pieces))], first)


def _ring(count: int, window: int) -> list[int]:
    """The position in each slot of a ring after so many tokens, -1 for none."""
    last = count - 1
    return [s + window * ((last - s) // window) if s <= last else -1 for s in range(window)]


def _slot(grid: Grid, row: float, column: float, place: int, new: bool) -> None:
    """A slot with the position of what it holds; -1 is nothing."""
    look = (ORANGE if new else BLUE, 0.45) if place >= 0 else ("none", 0.0)
    grid.cell(row, column, place if place >= 0 else "", 11, *look, bold=new)


def writing_order(pieces: Sequence[str], window: int, T: int) -> Drawing:
    """The last ``T`` of the ``pieces`` of a text come together to a ring of ``window`` slots: which
    keys their queries find if they are written before anything is read, and if they are read
    beside what the ring held."""
    end, start = len(pieces), len(pieces) - T
    after = _ring(end, window)
    panels = {
        "write first, then read": after,
        "read first, then write": [*_ring(start, window), *range(start, end)],
    }
    needed = {q: range(max(q - window + 1, 0), q + 1) for q in range(start, end)}
    missed = sum(p not in after for keys in needed.values() for p in keys)
    high = 68 + 27 * T
    canvas = Canvas(
        WIDTH, 2 * high + 4,
        f"A ring of {window} slots and {T} new tokens. Written first, a query misses a key "
        f"{missed} times; read first, never",
    )  # fmt: skip
    for k, (title, keys) in enumerate(panels.items()):
        y = k * high
        canvas.title(y + 12, title)
        canvas.text(96, y + 42, "keys", 12, "end")
        row = Grid(canvas, 104, y + 30, 31, 28, 4)
        for i, p in enumerate(keys):
            _slot(row, 0, i + (8 / 31 if k and i >= window else 0), p, p >= start)
        table = Grid(canvas, 104, y + 65, 31, 27, 4)
        for t, (q, wanted) in enumerate(needed.items()):
            table.name(t, f"{word(pieces[q])} ({q})", bold=True)
            for p in wanted:
                there, column = p in keys, p - max(start - window, 0) - 1
                look = (BLUE, 0.25) if there else (RED, 0.05)
                table.cell(t, column, "", 0, *look, radius=4, down=26 / 27)
                table.text(t, column, p, 12, colour=INK if there else RED)
                if not there:
                    x, middle = table.middle(t, column)
                    canvas.line(x - 10.5, middle + 8, x + 10.5, middle - 8, 1.6, RED)
    return canvas.drawing()


def slot_masks(
    kinds: Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[Sequence[bool]]]],
) -> Drawing:
    """Which slots each query may see: by title, the positions of the keys in the slots (-1: none),
    the positions of the queries, and one row of a mask for each of them."""
    cell = min(24.0, 281 / max(len(keys) for keys, _, _ in kinds.values()))
    says = (
        f"{title}: " + ", ".join(f"query {q} sees {sum(r)} of {len(r)}" for q, r in zip(qs, rows))
        for title, (_, qs, rows) in kinds.items()
    )
    height = sum(62 + 22 * len(queries) for _, queries, _ in kinds.values())
    canvas, y = Canvas(WIDTH, height, "; ".join(says)), 0.0
    for title, (keys, queries, mask) in kinds.items():
        canvas.title(y + 12, title)
        canvas.note(54, y + 36, "slots", "end")
        slots, table = Grid(canvas, 62, y + 26, cell, 23), Grid(canvas, 62, y + 52, cell, 22)
        for s, p in enumerate(keys):
            _slot(slots, 0, s, p, p in queries)
        for t, (q, seen) in enumerate(zip(queries, mask, strict=True)):
            canvas.text(54, y + 60 + 22 * t, f"query {q}", 11, "end")
            for s, one in enumerate(seen):
                look = (BLUE, 0.75) if one else (INK, 0.08)
                table.cell(t, s, "", 0, *look, "none", down=19 / 22)
        y += 62 + 22 * len(queries)
    return canvas.drawing()


def padded_batch(
    rows: Sequence[Sequence[str]], positions: Sequence[Sequence[int]], read: Sequence[int] = ()
) -> Drawing:
    """The columns of a batch with the mask and the position of each token below it; where the
    position is -1 there is padding. The column ``read`` of each row is blue."""
    wide, says = 293 / max(map(len, rows)), []
    canvas = Canvas(WIDTH, 70 * len(rows))
    for r, (words, places) in enumerate(zip(rows, positions, strict=True)):
        mask = [int(place >= 0) for place in places]
        says.append(f"row {r}: {' | '.join(words)}, mask {mask}, positions {[*places]}")
        grid = Grid(canvas, 49, 70 * r + 2, wide, 28, 2)
        for name, low in ((f"row {r}", 15), ("mask", 38), ("position", 54)):
            canvas.note(0, 70 * r + low, name)
        for t, (piece, real, place) in enumerate(zip(words, mask, places, strict=True)):
            chosen = r < len(read) and t == read[r]
            look = (BLUE, 0.35) if chosen else (INK, 0.12 if real else 0.02)
            faint, text = 1.0 if real else 0.55, piece.strip(" ")
            size = min(12.0, 1.65 * wide / max(len(text), 1))
            grid.cell(0, t, printable(text), size, *look, INK, 4, opacity=faint)
            x, y = grid.middle(0, t)
            canvas.text(x, y + 23, real, 12, opacity=faint)
            canvas.text(x, y + 39, minus(place), 12, opacity=faint)
    return canvas.drawing("; ".join(says))


def ruler(values: Sequence[float], bits: Sequence[int], shown: Sequence[int] = ()) -> Drawing:
    """Numbers above a ruler from the smallest to the largest of them, once for each of the ``bits``
    with 2 to that power marks. An arrow leads from each number to its nearest mark; the ``shown``
    ones are orange."""
    left, long = 12, 319
    low, high = min(values), max(values)
    canvas, says = Canvas(WIDTH, 96 * len(bits)), []
    for r, b in enumerate(bits):
        y, top = 96 * r, 2**b - 1
        step = (high - low) / top
        text = f"{b} bits: {2**b} marks, step {step:.2f}"
        canvas.text(left, y + 10, text, 12, "start", bold=True)
        canvas.line(left, y + 64, left + long, y + 64, 1.4)
        for code in range(2**b):
            x = left + long * code / top
            canvas.line(x, y + 58, x, y + 70)
            if b <= 4:
                canvas.note(x, y + 80, code, "middle")
        codes = [round((value - low) / step) for value in values]
        for i, (value, code) in enumerate(zip(values, codes, strict=True)):
            x = left + long * (value - low) / (high - low)
            colour = ORANGE if i in shown else BLUE
            end = left + long * code / top, y + 56
            canvas.line(x, y + 34, *end, 1.4, colour, 0.9, arrow=True)
            canvas.circle(x, y + 30, 4.5, colour, 0.8, colour)
        says.append(f"{b} bits, step {step:.2f}: codes {codes}")
    return canvas.drawing(f"{len(values)} numbers from {low:.2f} to {high:.2f}; " + "; ".join(says))


def shared_rulers(words: Sequence[str], features: int, group: int) -> Drawing:
    """Two tables, a row for each of the ``words`` and a column for each of the ``features``; the
    last word has just arrived. Cells in one box share a ruler: ``group`` features of a token
    above, ``group`` tokens of a feature below, where cells wait until their group is full."""
    n, full = len(words), len(words) // group * group
    high = 22 * n + 38
    canvas = Canvas(
        WIDTH, 2 * high + 22,
        f"Above, each of {n} tokens has rulers of its own, over {group} features; below, each "
        f"feature has a ruler over {group} tokens, and the last {n - full} tokens have none yet",
    )  # fmt: skip
    titles = "A ruler over features of one token", "A ruler over tokens of one feature"
    for below, title in enumerate(titles):
        canvas.title(below * high + 12, title)
        grid = Grid(canvas, 92, below * high + 26, 22, 22)
        for t, text in enumerate(words):
            grid.name(t, printable(text), bold=t == n - 1)
        canvas.text(100 + 22 * features, grid.middle(n - 1, 0)[1], "new", 12, "start", bold=True)
        wide, tall, ends = (1, group, full) if below else (group, 1, n)
        for t in range(0, ends, tall):
            for f in range(0, features, wide):
                colour = COLOURS[(f + t // tall if below else 2 * t + f // wide) % 5]
                grid.cell(t, f, "", 0, colour, 0.4, INK, 4, across=wide, down=tall)
        for t in range(n):
            for f in range(features):
                if t >= ends:
                    grid.cell(t, f, radius=4)
                canvas.circle(*grid.middle(t, f), 2, INK, 0.6, "none")
    canvas.note(92, 2 * high + 12, "no ruler yet: kept exactly")
    return canvas.drawing()


def versions(texts: Mapping[str, Sequence[str]]) -> Drawing:
    """One text, given by its tokens, in several versions by name. From the first token on that is
    not that of the first version, a version is marked: tinted and underlined."""
    first = [*next(iter(texts.values()))]
    rows, says = [], []
    for name, pieces in texts.items():
        n = same_tokens(first, pieces)
        alike, other = ("".join(part).replace("\n", "↵") for part in (pieces[:n], pieces[n:]))
        marked = span(other, MARKED) if other else ""
        rows.append(
            f'<div style="margin-bottom: 10px"><strong>{escape(name)}</strong><br>'
            f'<span style="white-space: pre-wrap">{escape(alike)}{marked}</span></div>'
        )
        says.append(f"{name}: " + (f"{n} tokens, then {other!r}" if other else repr(alike)))
    return Drawing(f'<div class="diagram">{"".join(rows)}</div>', "\n".join(says))


def same_tokens(first: Sequence[str], second: Sequence[str]) -> int:
    """How many tokens two texts have in common before they differ."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
