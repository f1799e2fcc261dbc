"""Drawings of chapter 9: sinks and gates, positions, sparse attention."""

import math
from collections.abc import Collection, Mapping, Sequence

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, INK, ORANGE, tint
from lm_from_scratch.drawings.labels import printable, span, word


def softmax_budget(words: Sequence[str], scores: Sequence[float], sink: float) -> Drawing:
    """The weights of one query as parts of a bar: above by the softmax of its ``scores`` for the
    ``words``, below with a ``sink`` beside them, whose part is empty."""
    canvas, says = Canvas(WIDTH, 150), []
    rows = {"keys alone": [*scores], f"with a sink of {sink:g}": [*scores, sink]}
    for row, (name, logits) in enumerate(rows.items()):
        y, x = 74 * row, 6.0
        total = sum(map(math.exp, logits))
        canvas.text(x, y + 12, name, 12, "start", bold=True)
        parts = []
        for text, logit in zip([*words, "nothing"], logits, strict=False):
            share = math.exp(logit) / total
            width = 331 * share
            canvas.box(x, y + 24, width, 26, "none" if text == "nothing" else BLUE, 0.35, INK, 1)
            if width > 7 * len(text) + 4:
                canvas.text(x + width / 2, y + 37, printable(text), 12)
                canvas.note(x + width / 2, y + 60, f"{share:.0%}", "middle")
            x += width
            parts.append(f"{text} {share:.0%}")
        says.append(f"{name}: " + ", ".join(parts))
    return canvas.drawing("; ".join(says))


def pinned_window(pieces: Sequence[str], window: int, first: int) -> Drawing:
    """A row for each step of a text, a cell for each of its ``pieces``: blue for the ``first``
    ones, which stay, orange for the latest ``window``; what was pushed out is an empty cell."""
    cell, n = 24, len(pieces)
    canvas = Canvas(
        min(WIDTH, cell * n + 40), cell * n + 56,
        f"A window of {window} keys that keeps the first {first}: after {n} tokens it holds "
        f"{first} first and {window} latest ones",
    )  # fmt: skip
    canvas.note(4, 12, "read")
    grid = Grid(canvas, 35, 31, cell, cell)
    for t, piece in enumerate(pieces):
        x, y = grid.middle(t, t)
        canvas.text(x, 16, printable(piece), 12)
        grid.name(t, printable(piece), away=9)
        for s in range(t + 1):
            if s > t - window or s < first:
                grid.cell(t, s, "", 0, ORANGE if s > t - window else BLUE, 0.45, INK, 4)
            else:
                grid.cell(t, s, "", 0, "none", 0)
                x, y = grid.middle(t, s)
                canvas.line(x - 10.5, y - 10.5, x + 10.5, y + 10.5, 0.8, INK, 0.5)
    canvas.legend(cell * n + 42, (BLUE, 0.45, "first"), (ORANGE, 0.45, "latest"), x=34)
    return canvas.drawing()


def gate_places(heads: int) -> Drawing:
    """The rows of a projection that makes a query and a gate for each of some ``heads``: above, as
    the checkpoint has them, head after head; below, as a cut in two halves takes them."""
    left, wide = 6, 331
    canvas = Canvas(
        WIDTH, 150, f"Above: query and gate of each of {heads} heads in turn; below: a cut in the "
        "middle takes the first heads for queries and the last for gates",
    )  # fmt: skip
    for row, name in enumerate(("q_proj, as it is stored", "cut in two halves")):
        canvas.text(left, 74 * row + 12, name, 12, "start", bold=True)
        grid = Grid(canvas, left, 74 * row + 24, wide / (2 * heads), 30, 0)
        for i in range(2 * heads):
            kind, colour = ("g", GREEN) if i % 2 else ("q", BLUE)
            grid.cell(0, i, f"{kind}{i // 2}", 12, colour, 0.35, INK, 1)
    canvas.line(left + wide / 2, 94, left + wide / 2, 134, 3)
    canvas.text(left + wide / 4, 140, "taken for queries", 11)
    canvas.text(left + 3 * wide / 4, 140, "taken for gates", 11)
    return canvas.drawing()


def two_questions(tokens: Sequence[str], key: tuple[int, int], back: tuple[int, int]) -> Drawing:
    """A row of ``tokens`` and two of them that ask: ``key`` is the place of a token that asks for
    what belongs to a letter, and the place of the answer; ``back`` the same for one that asks what
    stands some places before it."""
    wide, far = WIDTH / len(tokens), back[0] - back[1]
    canvas = Canvas(
        WIDTH, 128,
        f"Tokens {' '.join(tokens)}. Token {key[0]} looks for its letter and finds it at {key[1]}; "
        f"token {back[0]} looks {far} places back, at {back[1]}",
    )  # fmt: skip
    grid = Grid(canvas, 1, 50, wide, 29)
    for i, token in enumerate(tokens):
        look = (ORANGE, 0.3) if i in key else (BLUE, 0.3) if i in back else (INK, 0.06)
        grid.cell(0, i, token, 12, *look, radius=4, bold=i in (key[0], back[0]))
    for (asks, answer), edge, high, low, colour, words in (
        (key, 48, 26, 13, ORANGE, "the same letter, anywhere"),
        (back, 78, 100, 114, BLUE, f"{far} places back, whatever is there"),
    ):
        start, end = wide * (asks + 0.5), wide * (answer + 0.5)
        canvas.line(start, edge, start, high, 1.6, colour)
        canvas.line(start, high, end, high, 1.6, colour)
        canvas.line(end, high, end, edge, 1.6, colour, arrow=True)
        canvas.text(max(102.0, min(241.0, (start + end) / 2)), low, words, 12)
    return canvas.drawing()


def turned_features(widths: Mapping[str, int], head_dim: int) -> Drawing:
    """The features of a head as boxes, a row for each name in ``widths``, which says how many of
    them turn: two with one number and colour are a pair. Empty boxes do not turn."""
    says = (f"{name}: {n} of {head_dim} features turn" for name, n in widths.items())
    canvas = Canvas(WIDTH, 58 * len(widths), "; ".join(says))
    for r, (name, turned) in enumerate(widths.items()):
        canvas.title(58 * r + 10, name, size=12)
        grid = Grid(canvas, 2, 58 * r + 22, 339 / head_dim, 30, 4)
        for i in range(turned):
            pair = i % (turned // 2)
            grid.cell(0, i, pair, 13, COLOURS[pair % 5], 0.3, radius=4)
        for i in range(turned, head_dim):
            grid.cell(0, i, "", 0, INK, 0.0, radius=4)
    return canvas.drawing()


def layer_kinds(models: Mapping[str, Sequence[str]], kinds: Mapping[str, str]) -> Drawing:
    """The layers of some ``models`` as columns of boxes, the first layer at the bottom; each layer
    has a letter, and ``kinds`` says what a letter stands for."""
    most = max(map(len, models.values()))
    foot = 18 * most + 31
    canvas = Canvas(
        WIDTH, foot - 1 + 20 * len(kinds),
        "; ".join(f"{name}, from below: {' '.join(layers)}" for name, layers in models.items())
        + ". " + "; ".join(f"{letter}: {words}" for letter, words in kinds.items()),
    )  # fmt: skip
    colours = dict(zip(kinds, COLOURS, strict=False))
    for m, (name, layers) in enumerate(models.items()):
        middle = WIDTH / len(models) * (m + 0.5)
        canvas.text(middle, 10, name, 12, bold=True)
        grid = Grid(canvas, middle - 44, 22, 91, 18)
        for layer, letter in enumerate(layers):
            grid.cell(most - 1 - layer, 0, letter, 12, colours[letter], 0.3, radius=4)
    key = Grid(canvas, 6, foot, 25, 20)
    for k, (letter, words) in enumerate(kinds.items()):
        key.cell(k, 0, letter, 11, colours[letter], 0.3, radius=4, down=17 / 20)
        canvas.text(36, foot + 7 + 20 * k, words, 12, "start")
    return canvas.drawing()


def pooled_blocks(pieces: Sequence[str], size: int, window: int) -> Drawing:
    """The tokens of a text from the top down, and at the right the entries of blocks of so many:
    blue are those that the last token sees, orange the tokens of its window. A block that is not
    complete has no entry."""
    n, step, wide = len(pieces), 25, 110
    canvas = Canvas(WIDTH, step * n + 52)
    canvas.title(10, "tokens")
    canvas.text(205, 10, "entries", 13, "start", bold=True)
    for t, piece in enumerate(pieces):
        y = step * t + 26
        fill = ORANGE if t > n - 1 - window else "none"
        canvas.cell(34, y, wide, step - 4, printable(piece), 12, fill, 0.35)
        canvas.note(28, y + 10, t, "end")
    for first in range(0, n, size):
        last = first + size - 1
        top, low = step * first + 28, step * min(last, n - 1) + 44
        whole = last < n
        canvas.line(wide + 40, top, wide + 40, low, 2.2, dashes="" if whole else "3 3")
        if whole:
            middle = (top + low) / 2
            canvas.line(wide + 44, middle, 203, middle, arrow=True)
            canvas.cell(205, middle - 13, 92, 26, f"entry {first // size}", 12, BLUE, 0.35, BLUE)
            canvas.note(WIDTH - 4, middle, f"at {last}", "end")
        else:
            canvas.note(wide + 50, (top + low) / 2, f"waits for {last + 1 - n} more")
    canvas.legend(step * n + 40, (ORANGE, 0.35, "in the window"), (BLUE, 0.35, "seen too"), x=34)
    return canvas.drawing(
        f"{n} tokens, of which the latest {window} are in the window; blocks of {size} have become "
        f"{n // size} entries, and {n % size} tokens wait"
    )


def where_it_looks(
    pieces: Sequence[str], weights: Sequence[float], chosen: Collection[int]
) -> Drawing:
    """A text as one query sees it, the last of its ``pieces``: the darker, the more of the
    ``weights`` it has there. The ``chosen`` ones are framed."""
    spans, full = [], max(weights)
    for s, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
        style = f"background: {tint(BLUE, round(0.6 * (weight / full) ** 0.5, 2))}"
        if s in chosen:
            style += f"; outline: 1.5px solid {ORANGE}; border-radius: 2px"
        if s == len(pieces) - 1:
            style += "; font-weight: 600"
        spans.append(span(piece.replace("\n", "↵\n") if s in chosen else piece, style))
    share = sum(weights[s] for s in chosen) / sum(weights)
    return Drawing(
        '<div class="diagram" style="white-space: pre-wrap; font-size: 13px; line-height: 1.5">'
        f"{''.join(spans)}</div>",
        f"{len(pieces)} tokens; the framed {len(chosen)} have {share:.0%} of the attention of "
        f"the last, {pieces[-1]!r}: {', '.join(repr(pieces[s]) for s in sorted(chosen))}",
    )


def indexer_scores(
    words: Sequence[str], products: Sequence[Sequence[float]], weights: Sequence[float], count: int
) -> Drawing:
    """How one query scores the keys of its ``words``: a row for the ``products`` (J, S) of each
    head of the indexer with its weight, below them the sum of what is above 0, and the ``count``
    best in frames. Of equal scores the latest wins."""
    J, S = len(products), len(words)
    scores = [
        sum(w * max(0.0, product) for w, product in zip(weights, column, strict=True))
        for column in zip(*products, strict=True)
    ]
    best = sorted(range(S), key=lambda s: (-scores[s], -s))[:count]
    canvas = Canvas(
        WIDTH, 30 * J + 94,
        f"Scores of {S} keys by {J} heads: "
        + ", ".join(f"{words[s]!r} {scores[s]:.2f}" for s in range(S))
        + f"; chosen: {', '.join(repr(words[s]) for s in sorted(best))}",
    )  # fmt: skip
    grid = Grid(canvas, 66, 26, 277 / S, 30)
    low = J + 8 / 30
    for s, text in enumerate(words):
        x = grid.middle(0, s)[0]
        canvas.text(x, 12, word(text.strip(" ") or text)[:6], 11, bold=s in best)
        look = (ORANGE, 0.3) if s in best else ("none", 0.3)
        grid.cell(low, s, f"{scores[s]:.2f}", 11, *look, radius=4, bold=s in best, down=28 / 30)
        for j, line in enumerate(products):
            counts, down = line[s] > 0, 28 / 30
            grid.cell(j, s, f"{line[s]:.1f}", 11, BLUE if counts else "none", 0.25, INK, 4,
                      opacity=1.0 if counts else 0.45, down=down)  # fmt: skip
            if not counts:
                y = 39 + 30 * j
                canvas.line(x - grid.wide / 2 + 6.5, y, x + grid.wide / 2 - 6.5, y, 1, INK, 0.6)
    for j, weight in enumerate(weights):
        canvas.text(2, 39 + 30 * j, f"{weight:+.2f} ×", 12, "start")
    canvas.title(47 + 30 * J, "score", size=12)
    canvas.note(66, 70 + 30 * J, "struck out: below 0, counts as 0")
    return canvas.drawing()
