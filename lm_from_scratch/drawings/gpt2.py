"""Drawings of chapter 1: tokens, the parts of GPT-2, and who looks at whom."""

from collections.abc import Mapping, Sequence
from html import escape

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, INK, ORANGE, PURPLE, tint
from lm_from_scratch.drawings.labels import printable, span, token_boxes

#: What a reader should look at in a text.
MARKED = f"background: {tint(ORANGE, 0.3)}; border-bottom: 2px solid {ORANGE}"


def tokens(pieces: Sequence[str], ids: Sequence[int] = ()) -> Drawing:
    """The pieces of a text in coloured boxes, each above its number if ``ids`` are given."""
    tints = [tint(COLOURS[i % 5], 0.25) for i in range(len(pieces))]
    return Drawing(token_boxes(pieces, tints, ids), " | ".join(pieces))


def merges(rows: Sequence[Sequence[str]], names: Sequence[str]) -> Drawing:
    """A word while its pieces grow together, one merge a row; ``names`` stand beside the rows. A
    piece that the row above does not have is coloured."""
    letters = len("".join(rows[0]))
    canvas = Canvas(WIDTH, 38 * len(rows) + 2, "; ".join("·".join(pieces) for pieces in rows))
    grid = Grid(canvas, 3, 3, min(34, 250 / max(letters, 1)), 38, 4)
    above = {*enumerate(rows[0])}
    for row, (pieces, name) in enumerate(zip(rows, names, strict=True)):
        starts = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
        placed = [*zip(starts, pieces, strict=True)]
        for start, piece in placed:
            new = (start, piece) not in above
            look = (BLUE, 0.35) if new else (INK, 0.06)
            grid.cell(row, start, piece, 14, *look, INK, 4, new, across=len(piece), down=32 / 38)
        above = {*placed}
        canvas.note(grid.wide * letters + 14, 38 * row + 17, name, size=12)
    return canvas.drawing()


def repeats(pieces: Sequence[str], n: int = 4) -> Drawing:
    """A text, given by its tokens, in which every run of ``n`` tokens that has been there before is
    marked: tinted and underlined."""
    runs = [tuple(pieces[i : i + n]) for i in range(len(pieces) - n + 1)]
    again = [i for i, run in enumerate(runs) if run in runs[:i]]
    marked = {place for i in again for place in range(i, i + n)}
    text = "".join(
        span(piece, MARKED) if i in marked else escape(piece) for i, piece in enumerate(pieces)
    )
    return Drawing(
        f'<div class="diagram" style="white-space: pre-wrap">{text}</div>', "".join(pieces)
    )


def shifted(pieces: Sequence[str], after: str) -> Drawing:
    """The pieces of a text above the target of each: the piece to its right. ``after`` is what
    follows the last one."""
    pairs = list(zip(pieces, [*pieces[1:], after], strict=True))
    lengths = [max(map(len, pair)) for pair in pairs]
    unit = min(8.0, (333 - 14 * len(pairs)) / sum(lengths))
    says = "; ".join(f"target of {piece!r}: {target!r}" for piece, target in pairs)
    canvas = Canvas(WIDTH, 118, says)
    canvas.note(5, 9, "the model reads")
    canvas.note(5, 110, "the target of each token")
    x = 5.0
    for i, (pair, length) in enumerate(zip(pairs, lengths, strict=True)):
        width = unit * length + 10
        for k, y in enumerate((20, 72)):
            canvas.cell(x, y, width, 26, printable(pair[k]), 1.6 * unit, COLOURS[(i + k) % 5], 0.25)
        canvas.line(x + width / 2, 47, x + width / 2, 71, arrow=True)
        x += width + 4
    return canvas.drawing()


def gpt2_blocks(n_layer: int, links: Mapping[str, str]) -> Drawing:
    """The parts of GPT-2 from ids (top) to logits. Keys of ``links`` are "lookups", "norm",
    "attention", "mlp", "stream" and "logits", each with the address that the part leads to."""
    canvas = Canvas(
        WIDTH, 458, f"ids, two lookups, {n_layer} blocks of LayerNorm, attention, LayerNorm and "
        "MLP, which are added to the state; a last LayerNorm, logits; each part leads to its "
        "section",
    )  # fmt: skip
    spine, left, width, middle = 40, 96, 238, 215

    def part(y: float, key: str, text: str, note: str, colour: str) -> None:
        canvas.begin_link(links[key])
        canvas.box(left, y, width, 34, colour, 0.25)
        canvas.text(left + 12, y + 17, text, 13, "start", bold=True)
        canvas.text(left + width - 8, y + 17, note, 11, "end", opacity=0.85)
        canvas.end_link()

    def branch(y: float, key: str, text: str, note: str, colour: str) -> None:
        """A copy of the state goes through a norm and one more part; the result is added."""
        canvas.line(spine, y + 17, left, y + 17, arrow=True)
        part(y, "norm", "LayerNorm", "one scale for all", PURPLE)
        canvas.line(middle, y + 34, middle, y + 46, arrow=True)
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
    canvas.line(middle, 354, middle, 366, arrow=True)
    part(366, "logits", "Logits", "a score for every token", ORANGE)
    canvas.line(middle, 400, middle, 416, arrow=True)
    canvas.text(middle, 428, "(T, V)", 11, opacity=0.85)
    canvas.text(middle, 444, "softmax: which token comes next?", 12)
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
    largest, t, s = max((weights[t][s], t, s) for t in rows for s in range(len(keys)))
    canvas = Canvas(
        WIDTH, row * (max(len(queries), len(keys)) + 1.5),
        f"Lines from {len(rows)} of {len(queries)} tokens to the tokens they look at; the widest, "
        f"{largest:.2f}, from {queries[t]!r} to {keys[s]!r}",
    )  # fmt: skip
    canvas.note(left, row / 2, "looks", "end")
    canvas.note(right, row / 2, "is looked at")
    for t in rows:
        for s, weight in enumerate(weights[t]):
            if weight > 0.01:
                ends = left + 6, row * (t + 1.5), right - 6, row * (s + 1.5)
                canvas.line(*ends, 0.5 + 7 * weight, BLUE, 0.25 + 0.75 * weight)
    for t, word in enumerate(queries):
        canvas.text(left, row * (t + 1.5), printable(word), 13, "end", bold=t == chosen)
    for s, word in enumerate(keys):
        canvas.text(right, row * (s + 1.5), printable(word), 13, "start")
    return canvas.drawing()


def head_cells(titles: Sequence[str], owners: Sequence[Sequence[Sequence[int]]]) -> Drawing:
    """Tables of T tokens x C features, one below another, with each number coloured by the head
    that gets it: ``owners`` holds one table (T, C) of heads for each of the ``titles``."""
    says = "; ".join(f"{title}: {table}" for title, table in zip(titles, owners, strict=True))
    canvas = Canvas(WIDTH, sum(28 * len(table) + 40 for table in owners), says)
    y = 0.0
    for title, table in zip(titles, owners, strict=True):
        canvas.title(y + 13, title)
        grid = Grid(canvas, 84, y + 28, 28, 28, 0)
        for t, row in enumerate(table):
            grid.name(t, f"token {t}", away=10)
            for c, head in enumerate(row):
                grid.cell(t, c, len(row) * t + c, 12, COLOURS[head % 5], 0.35, INK, 0)
        for head in sorted({head for row in table for head in row}):
            look = COLOURS[head % 5], 0.35, f"head {head}"
            canvas.legend(y + 39 + 26 * head, look, x=108 + 28 * len(table[0]))
        y += 28 * len(table) + 40
    return canvas.drawing()


def bars(words: Sequence[str], shares: Sequence[float], chosen: Sequence[int] = ()) -> Drawing:
    """A bar for the share (0 to 1) of each word; ``chosen`` words are orange."""
    row, left, full = 24, 122, 160
    caption = ", ".join(f"{word!r} {share:.1%}" for word, share in zip(words, shares, strict=True))
    canvas = Canvas(WIDTH, row * len(words), caption)
    for i, (word, share) in enumerate(zip(words, shares, strict=True)):
        y, width = row * (i + 0.5), max(full * share / max(shares), 1)
        canvas.text(left - 8, y, printable(word), 13, "end")
        colour = ORANGE if i in chosen else BLUE
        canvas.box(left, y - 8, width, 16, colour, 0.55, colour, radius=2)
        canvas.text(left + width + 6, y, f"{share:.1%}", 12, "start")
    return canvas.drawing()
