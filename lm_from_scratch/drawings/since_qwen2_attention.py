"""Drawings of chapter 9: sinks and gates, positions, sparse attention."""

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape

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


def softmax_budget(words: Sequence[str], scores: Sequence[float], sink: float) -> Drawing:
    """The weights of one query as parts of a bar: above by the softmax of its ``scores`` for the
    ``words``, below with a ``sink`` beside them, whose part is empty."""
    left, wide = 6, 331
    canvas = Canvas(343, 150, "")
    says = []
    for row, name in enumerate(("keys alone", f"with a sink of {sink:g}")):
        y = 74 * row
        spent = [math.exp(score) for score in scores] + ([math.exp(sink)] if row else [])
        shares = [part / sum(spent) for part in spent]
        canvas.text(left, y + 12, name, 12, "start", bold=True)
        x: float = left
        for word, share in zip([*words, "nothing"], shares, strict=False):
            empty = word == "nothing"
            width = wide * share
            canvas.box(x, y + 24, width, 26, "none" if empty else BLUE, 0.35, INK, 1)
            if width > 7 * len(word) + 4:
                canvas.text(x + width / 2, y + 37, printable(word), 12)
                canvas.text(x + width / 2, y + 60, f"{share:.0%}", 11, opacity=0.8)
            x += width
        parts = zip([*words, "nothing"], shares, strict=False)
        says.append(f"{name}: " + ", ".join(f"{word} {share:.0%}" for word, share in parts))
    canvas.says = "; ".join(says)
    return canvas.drawing()


def pinned_window(pieces: Sequence[str], window: int, first: int) -> Drawing:
    """A row for each step of a text, a cell for each of its ``pieces``: blue for the ``first``
    ones, which stay, orange for the latest ``window``; what was pushed out is an empty cell."""
    cell, left, top, n = 24, 34, 30, len(pieces)
    canvas = Canvas(
        min(343, left + cell * n + 6), top + cell * n + 26,
        f"A window of {window} keys that keeps the first {first}: after {n} tokens it holds "
        f"{first} first and {window} latest ones",
    )  # fmt: skip
    canvas.text(4, 12, "read", 11, "start", opacity=0.8)
    for s, piece in enumerate(pieces):
        canvas.text(left + cell * (s + 0.5), 16, printable(piece), 12)
        canvas.text(left - 8, top + cell * (s + 0.5), printable(piece), 12, "end")
    for t in range(n):
        for s in range(t + 1):
            at = left + cell * s + 1, top + cell * t + 1, cell - 3, cell - 3
            if s > t - window:
                canvas.box(*at, ORANGE, 0.45)
            elif s < first:
                canvas.box(*at, BLUE, 0.45)
            else:
                canvas.box(*at, "none", 0, INK, 2)
                canvas.line(at[0], at[1], at[0] + cell - 3, at[1] + cell - 3, 0.8, INK, 0.5)
    y = top + cell * n + 12
    for x, colour, word in ((left, BLUE, "first"), (left + 80, ORANGE, "latest")):
        canvas.box(x, y - 7, 14, 14, colour, 0.45)
        canvas.text(x + 20, y, word, 11, "start")
    return canvas.drawing()


def gate_places(heads: int) -> Drawing:
    """The rows of a projection that makes a query and a gate for each of some ``heads``: above, as
    the checkpoint has them, head after head; below, as a cut in two halves takes them."""
    left, wide, tall = 6, 331, 30
    canvas = Canvas(
        343, 150, f"Above: query and gate of each of {heads} heads in turn; below: a cut in the "
        "middle takes the first heads for queries and the last for gates",
    )  # fmt: skip
    part = wide / (2 * heads)
    for row, name in enumerate(("q_proj, as it is stored", "cut in two halves")):
        y = 74 * row
        canvas.text(left, y + 12, name, 12, "start", bold=True)
        for i in range(2 * heads):
            x, colour = left + part * i, GREEN if i % 2 else BLUE
            canvas.box(x, y + 24, part, tall, colour, 0.35, INK, 1)
            canvas.text(x + part / 2, y + 24 + tall / 2, f"{'gq'[i % 2 == 0]}{i // 2}", 12)
        if row:
            canvas.line(left + wide / 2, y + 20, left + wide / 2, y + 60, 3)
            canvas.text(left + wide / 4, y + 66, "taken for queries", 11)
            canvas.text(left + 3 * wide / 4, y + 66, "taken for gates", 11)
    return canvas.drawing()


def two_questions(tokens: Sequence[str], key: tuple[int, int], back: tuple[int, int]) -> Drawing:
    """A row of ``tokens`` and two of them that ask: ``key`` is the place of a token that asks for
    what belongs to a letter, and the place of the answer; ``back`` the same for one that asks what
    stands some places before it."""
    wide = 343 / len(tokens)
    canvas = Canvas(
        343, 128,
        f"Tokens {' '.join(tokens)}. Token {key[0]} looks for its letter and finds it at {key[1]}; "
        f"token {back[0]} looks {back[0] - back[1]} places back, at {back[1]}",
    )  # fmt: skip
    for i, token in enumerate(tokens):
        colour = {key[0]: ORANGE, key[1]: ORANGE, back[0]: BLUE, back[1]: BLUE}.get(i, INK)
        asking = i in (key[0], back[0])
        canvas.box(wide * i + 1, 50, wide - 3, 26, colour, 0.3 if colour != INK else 0.06, colour)
        canvas.text(wide * (i + 0.5), 63, token, 12, bold=asking)
    for (asks, answer), high, colour, words in (
        (key, 26, ORANGE, "the same letter, anywhere"),
        (back, 100, BLUE, f"{back[0] - back[1]} places back, whatever is there"),
    ):
        edge = 48 if high < 50 else 78
        start, end = wide * (asks + 0.5), wide * (answer + 0.5)
        canvas.line(start, edge, start, high, 1.6, colour)
        canvas.line(start, high, end, high, 1.6, colour)
        canvas.line(end, high, end, edge, 1.6, colour, arrow=True)
        place = max(102.0, min(241.0, (start + end) / 2))
        canvas.text(place, high - 13 if high < 50 else high + 14, words, 12)
    return canvas.drawing()


def turned_features(widths: Mapping[str, int], head_dim: int) -> Drawing:
    """The features of a head as boxes, a row for each name in ``widths``, which says how many of
    them turn: two with one number and colour are a pair. Empty boxes do not turn."""
    row, wide = 58, 339 / head_dim
    canvas = Canvas(
        343, row * len(widths),
        "; ".join(f"{name}: {n} of {head_dim} features turn" for name, n in widths.items()),
    )  # fmt: skip
    for r, (name, turned) in enumerate(widths.items()):
        canvas.text(2, row * r + 10, name, 12, "start", bold=True)
        for i in range(head_dim):
            pair = i % (turned // 2) if i < turned else None
            colour = INK if pair is None else COLOURS[pair % 5]
            tint = 0.0 if pair is None else 0.3
            canvas.box(2 + wide * i, row * r + 22, wide - 4, 26, colour, tint, colour)
            if pair is not None:
                canvas.text(wide * (i + 0.5), row * r + 35, f"{pair}", 13)
    return canvas.drawing()


def layer_kinds(models: Mapping[str, Sequence[str]], kinds: Mapping[str, str]) -> Drawing:
    """The layers of some ``models`` as columns of boxes, the first layer at the bottom; each layer
    has a letter, and ``kinds`` says what a letter stands for."""
    high, most = 18, max(len(layers) for layers in models.values())
    wide = 343 / len(models)
    canvas = Canvas(
        343, high * most + 30 + 20 * len(kinds),
        "; ".join(f"{name}, from below: {' '.join(layers)}" for name, layers in models.items())
        + ". " + "; ".join(f"{letter}: {words}" for letter, words in kinds.items()),
    )  # fmt: skip
    colours = dict(zip(kinds, COLOURS, strict=False))
    for m, (name, layers) in enumerate(models.items()):
        middle = wide * (m + 0.5)
        canvas.text(middle, 10, name, 12, bold=True)
        for layer, letter in enumerate(layers):
            y = 22 + high * (most - 1 - layer)
            canvas.box(middle - 44, y, 88, high - 3, colours[letter], 0.3, colours[letter])
            canvas.text(middle, y + (high - 3) / 2, letter, 12)
    for k, (letter, words) in enumerate(kinds.items()):
        y = 22 + high * most + 16 + 20 * k
        canvas.box(6, y - 7, 22, 14, colours[letter], 0.3, colours[letter])
        canvas.text(17, y, letter, 11)
        canvas.text(36, y, words, 12, "start")
    return canvas.drawing()


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
        mark = piece.replace("\n", "↵\n") if s in chosen else piece
        spans.append(f'<span style="{style}">{escape(mark)}</span>')
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
    left, row = 66, 30
    cell = (343 - left) / S
    scores = [
        sum(w * max(0.0, line[s]) for w, line in zip(weights, products, strict=True))
        for s in range(S)
    ]
    best = sorted(range(S), key=lambda s: (-scores[s], -s))[:count]
    canvas = Canvas(
        343, row * (J + 2) + 34,
        f"Scores of {S} keys by {J} heads: "
        + ", ".join(f"{words[s]!r} {scores[s]:.2f}" for s in range(S))
        + f"; chosen: {', '.join(repr(words[s]) for s in sorted(best))}",
    )  # fmt: skip
    for s, word in enumerate(words):
        canvas.text(
            left + cell * (s + 0.5), 12, printable(word.strip(" ") or word)[:6], 11, bold=s in best
        )
    for j, (weight, line) in enumerate(zip(weights, products, strict=True)):
        y = 26 + row * j
        canvas.text(2, y + 13, f"{weight:+.2f} ×", 12, "start")
        for s, product in enumerate(line):
            x = left + cell * s
            canvas.box(x, y, cell - 3, row - 5, BLUE if product > 0 else "none", 0.25)
            canvas.text(x + cell / 2 - 1.5, y + 13, f"{product:.1f}", 11,
                        opacity=1.0 if product > 0 else 0.45)  # fmt: skip
            if product <= 0:
                canvas.line(x + 5, y + 13, x + cell - 8, y + 13, 1, INK, 0.6)
    y = 26 + row * J + 8
    canvas.text(2, y + 13, "score", 12, "start", bold=True)
    for s, score in enumerate(scores):
        x, edge = left + cell * s, ORANGE if s in best else INK
        canvas.box(x, y, cell - 3, row - 5, ORANGE if s in best else "none", 0.3, edge)
        canvas.text(x + cell / 2 - 1.5, y + 13, f"{score:.2f}", 11, bold=s in best)
    canvas.text(left, y + row + 6, "struck out: below 0, counts as 0", 11, "start", opacity=0.8)
    return canvas.drawing()
