"""Drawings of chapter 1: tokens, the parts of GPT-2, and who looks at whom."""

from collections.abc import Mapping, Sequence
from html import escape

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    Canvas,
    Drawing,
    printable,
    tint,
)


def tokens(pieces: Sequence[str], ids: Sequence[int] | None = None) -> Drawing:
    """The pieces of a text in coloured boxes, each above its number if ``ids`` are given."""
    boxes = []
    for i, piece in enumerate(pieces):
        number = "" if ids is None else f"<br><small>{ids[i]}</small>"
        boxes.append(
            f'<span style="display: inline-block; margin: 0 2px 4px 0; padding: 1px 3px; '
            f"border-radius: 4px; text-align: center; white-space: pre; "
            f'background: {tint(COLOURS[i % 5], 0.25)}">{escape(printable(piece))}{number}</span>'
        )
    return Drawing(f'<div class="diagram tokens">{"".join(boxes)}</div>', " | ".join(pieces))


def merges(rows: Sequence[Sequence[str]], names: Sequence[str]) -> Drawing:
    """A word while its pieces grow together, one merge a row; ``names`` stand beside the rows. A
    piece that the row above does not have is coloured."""
    letter, row = min(34, 250 / max(len("".join(rows[0])), 1)), 38
    canvas = Canvas(343, row * len(rows) + 2, "; ".join("·".join(pieces) for pieces in rows))
    above: set[tuple[int, str]] = {(i, piece) for i, piece in enumerate(rows[0])}
    for r, (pieces, name) in enumerate(zip(rows, names, strict=True)):
        start, now = 0, set()
        for piece in pieces:
            new = (start, piece) not in above
            canvas.box(letter * start + 3, row * r + 3, letter * len(piece) - 4, row - 10,
                       BLUE if new else INK, 0.35 if new else 0.06)  # fmt: skip
            canvas.text(letter * (start + len(piece) / 2) + 1, row * r + 17, piece, 14, bold=new)
            now.add((start, piece))
            start += len(piece)
        above = now
        canvas.text(letter * start + 14, row * r + 17, name, 12, "start", opacity=0.8)
    return canvas.drawing()


def repeats(pieces: Sequence[str], n: int = 4) -> Drawing:
    """A text, given by its tokens, in which every run of ``n`` tokens that has been there before is
    marked: tinted and underlined."""
    runs = [tuple(pieces[i : i + n]) for i in range(len(pieces) - n + 1)]
    again = [i for i, run in enumerate(runs) if run in runs[:i]]
    marks = {place for i in again for place in range(i, i + n)}
    style = f"background: {tint(ORANGE, 0.3)}; border-bottom: 2px solid {ORANGE}"
    spans = "".join(
        f'<span style="{style}">{escape(piece)}</span>' if i in marks else escape(piece)
        for i, piece in enumerate(pieces)
    )
    return Drawing(
        f'<div class="diagram" style="white-space: pre-wrap">{spans}</div>', "".join(pieces)
    )


def shifted(pieces: Sequence[str], after: str) -> Drawing:
    """The pieces of a text above the target of each: the piece to its right. ``after`` is what
    follows the last one."""
    pairs = list(zip(pieces, [*pieces[1:], after], strict=True))
    lengths = [max(map(len, pair)) for pair in pairs]
    unit = min(8.0, (333 - 14 * len(pairs)) / sum(lengths))
    says = "; ".join(f"target of {piece!r}: {target!r}" for piece, target in pairs)
    canvas = Canvas(343, 118, says)
    canvas.text(5, 9, "the model reads", 11, "start", opacity=0.8)
    canvas.text(5, 110, "the target of each token", 11, "start", opacity=0.8)
    x = 5.0
    for i, (pair, length) in enumerate(zip(pairs, lengths, strict=True)):
        width = unit * length + 10
        for k, y in enumerate((20, 72)):
            canvas.box(x, y, width, 26, COLOURS[(i + k) % 5], 0.25)
            canvas.text(x + width / 2, y + 13, printable(pair[k]), 1.6 * unit)
        canvas.line(x + width / 2, 47, x + width / 2, 71, arrow=True)
        x += width + 4
    return canvas.drawing()


def gpt2_blocks(n_layer: int, links: Mapping[str, str]) -> Drawing:
    """The parts of GPT-2 from ids (top) to logits. Keys of ``links`` are "lookups", "norm",
    "attention", "mlp", "stream" and "logits", each with the address that the part leads to."""
    canvas = Canvas(
        343, 458, f"ids, two lookups, {n_layer} blocks of LayerNorm, attention, LayerNorm and MLP, "
        "which are added to the state; a last LayerNorm, logits; each part leads to its section",
    )  # fmt: skip
    spine, left, width = 40, 96, 238

    def part(y: float, key: str, text: str, note: str, colour: str, height: float = 34) -> None:
        canvas.begin_link(links[key])
        canvas.box(left, y, width, height, colour, 0.25)
        canvas.text(left + 12, y + height / 2, text, 13, "start", bold=True)
        canvas.text(left + width - 8, y + height / 2, note, 11, "end", opacity=0.85)
        canvas.end_link()

    def branch(y: float, key: str, text: str, note: str, colour: str) -> None:
        """A copy of the state goes through a norm and one more part; the result is added."""
        canvas.line(spine, y + 17, left, y + 17, arrow=True)
        part(y, "norm", "LayerNorm", "one scale for all", PURPLE)
        canvas.line(left + width / 2, y + 34, left + width / 2, y + 46, arrow=True)
        part(y + 46, key, text, note, colour)
        canvas.line(left, y + 63, spine + 10, y + 63, arrow=True)
        canvas.begin_link(links["stream"])
        canvas.circle(spine, y + 63, 9)
        canvas.text(spine, y + 63, "+", 14)
        canvas.end_link()

    canvas.text(spine, 12, "ids", 13, bold=True)
    canvas.line(spine + 16, 12, left, 12, arrow=True)
    part(4, "lookups", "Two lookups", "word + place", ORANGE)
    canvas.line(left, 30, spine, 30)
    canvas.line(spine, 30, spine, 337)
    canvas.text(spine + 5, 45, "x (T, C)", 11, "start", opacity=0.85)
    canvas.box(8, 56, 331, 254, radius=8)
    canvas.text(left + width - 8, 294, f"{n_layer} blocks", 13, "end", bold=True)
    branch(66, "attention", "Attention", "tokens look back", BLUE)
    branch(166, "mlp", "MLP", "each token alone", GREEN)
    canvas.begin_link(links["stream"])
    canvas.text(spine + 16, 270, "x = x + …, the residual stream", 12, "start")
    canvas.end_link()
    canvas.line(spine, 337, left, 337, arrow=True)
    part(320, "norm", "LayerNorm", "once more", PURPLE)
    canvas.line(left + width / 2, 354, left + width / 2, 366, arrow=True)
    part(366, "logits", "Logits", "a score for every token", ORANGE)
    canvas.line(left + width / 2, 400, left + width / 2, 416, arrow=True)
    canvas.text(left + width / 2, 428, "(T, V)", 11, opacity=0.85)
    canvas.text(left + width / 2, 444, "softmax: which token comes next?", 12)
    return canvas.drawing()


def lines(
    queries: Sequence[str], keys: Sequence[str], weights: Sequence[Sequence[float]],
    chosen: int | None = None,
) -> Drawing:  # fmt: skip
    """Who looks at whom: a line from each of the ``queries`` on the left to each of the ``keys``
    on the right, as wide as its weight. ``weights`` are (T, S); ``chosen`` draws one query alone.
    """
    row, left, right = 24, 120, 223
    rows = range(len(queries)) if chosen is None else [chosen]
    largest = max((weights[t][s], t, s) for t in rows for s in range(len(keys)))
    canvas = Canvas(
        343, row * (max(len(queries), len(keys)) + 1.5),
        f"Lines from {len(rows)} of {len(queries)} tokens to the tokens they look at; the widest, "
        f"{largest[0]:.2f}, from {queries[largest[1]]!r} to {keys[largest[2]]!r}",
    )  # fmt: skip
    canvas.text(left, row / 2, "looks", 11, "end", opacity=0.8)
    canvas.text(right, row / 2, "is looked at", 11, "start", opacity=0.8)
    for t in rows:
        for s in range(len(keys)):
            weight = weights[t][s]
            if weight > 0.01:
                canvas.line(left + 6, row * (t + 1.5), right - 6, row * (s + 1.5),
                            0.5 + 7 * weight, BLUE, 0.25 + 0.75 * weight)  # fmt: skip
    for t, word in enumerate(queries):
        canvas.text(left, row * (t + 1.5), printable(word), 13, "end", bold=t == chosen)
    for s, word in enumerate(keys):
        canvas.text(right, row * (s + 1.5), printable(word), 13, "start")
    return canvas.drawing()


def head_cells(titles: Sequence[str], owners: Sequence[Sequence[Sequence[int]]]) -> Drawing:
    """Tables of T tokens x C features, one below another, with each number coloured by the head
    that gets it: ``owners`` holds one table (T, C) of heads for each of the ``titles``."""
    cell, left = 28, 84
    height = sum(28 + cell * len(table) + 12 for table in owners)
    canvas = Canvas(
        343, height, "; ".join(f"{t}: {o}" for t, o in zip(titles, owners, strict=True))
    )
    y = 0.0
    for title, table in zip(titles, owners, strict=True):
        canvas.text(4, y + 13, title, 13, "start", bold=True)
        y += 28
        for t, row in enumerate(table):
            canvas.text(left - 10, y + cell / 2, f"token {t}", 12, "end")
            for c, head in enumerate(row):
                x = left + cell * c
                canvas.box(x, y, cell, cell, COLOURS[head % 5], 0.35, radius=0)
                canvas.text(x + cell / 2, y + cell / 2, str(len(row) * t + c), 12)
            y += cell
        for head in sorted({head for row in table for head in row}):
            x, top = left + cell * len(table[0]) + 24, y - cell * len(table)
            canvas.box(x, top + 26 * head + 2, 18, 18, COLOURS[head % 5], 0.35, radius=2)
            canvas.text(x + 26, top + 26 * head + 11, f"head {head}", 12, "start")
        y += 12
    return canvas.drawing()


def bars(words: Sequence[str], shares: Sequence[float], chosen: Sequence[int] = ()) -> Drawing:
    """A bar for the share (0 to 1) of each word; ``chosen`` words are orange."""
    row, left, full = 24, 122, 160
    said = ", ".join(f"{word!r} {share:.1%}" for word, share in zip(words, shares, strict=True))
    canvas = Canvas(343, row * len(words), said)
    largest = max(shares)
    for i, (word, share) in enumerate(zip(words, shares, strict=True)):
        y, width = row * (i + 0.5), max(full * share / largest, 1)
        canvas.text(left - 8, y, printable(word), 13, "end")
        colour = ORANGE if i in chosen else BLUE
        canvas.box(left, y - 8, width, 16, colour, 0.55, colour, radius=2)
        canvas.text(left + width + 6, y, f"{share:.1%}", 12, "start")
    return canvas.drawing()
