"""Drawings of sparse attention: where one query looks in a text, and how an indexer scores."""

from collections.abc import Collection, Sequence
from html import escape

from lm_from_scratch.instruments.canvas import BLUE, INK, ORANGE, Canvas, Drawing, tint
from lm_from_scratch.instruments.plot import printable


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


def scoring(
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
