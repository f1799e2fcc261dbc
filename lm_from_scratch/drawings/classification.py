"""Drawings of chapter 4: where a padded row is read, and labels of tokens."""

from collections.abc import Sequence
from html import escape

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing, Grid
from lm_from_scratch.drawings.colours import BLUE, COLOURS, INK, tint
from lm_from_scratch.drawings.labels import printable, span


def padded_rows(rows: Sequence[Sequence[str]], pad: str, read: Sequence[int]) -> Drawing:
    """Texts of unequal length in one batch: a box for each token, grey where it is ``pad``, blue
    and bold in the column that is ``read`` of each row."""
    T = max(map(len, rows))
    says = (
        f"row {r} of {len(words)} tokens is read in column {column}"
        for r, (words, column) in enumerate(zip(rows, read, strict=True))
    )
    canvas = Canvas(WIDTH, 32 * len(rows) + 4, "; ".join(says))
    grid = Grid(canvas, 2, 3, 339 / T, 32, 4)
    size = min(12, 1.5 * grid.wide / max(len(word) for words in rows for word in [*words, pad]))
    for r, (words, column) in enumerate(zip(rows, read, strict=True)):
        for t, word in enumerate([*words, *[pad] * (T - len(words))]):
            chosen, empty = t == column, t >= len(words)
            look = (BLUE, 0.35) if chosen else (INK, 0.03 if empty else 0.1)
            faint = 0.45 if empty else 1.0
            grid.cell(r, t, printable(word), size, *look, INK, 4, chosen, faint, down=7 / 8)
    return canvas.drawing()


def labelled(pieces: Sequence[str], labels: Sequence[str], truth: Sequence[str] = ()) -> Drawing:
    """A text, each token in the colour of its label, and underlined where the label is not the
    ``truth``. A token with an empty label has no colour. Below it: which colour is which label."""
    shown = [*dict.fromkeys(label for label in [*labels, *truth] if label)]

    def piece_of(text: str, label: str, right: str) -> str:
        if not label:
            return escape(text)
        colour = tint(COLOURS[shown.index(label) % 7], 0.35)
        style = f"padding: 1px 0; border-radius: 3px; background: {colour}"
        if label != right:
            style += "; text-decoration: underline wavy; text-underline-offset: 3px"
        return span(text, style)

    text = "".join(map(piece_of, pieces, labels, truth or labels))
    key = " ".join(piece_of(f" {label} ", label, label) for label in shown)
    pairs = zip(pieces, labels, strict=True)
    return Drawing(
        f'<div class="diagram"><div style="white-space: pre-wrap; font-family: monospace; '
        f'line-height: 1.7">{text}</div><div style="margin-top: 6px; line-height: 1.9">'
        f"<small>{key}</small></div></div>",
        " ".join(f"{piece}[{label}]" for piece, label in pairs if label),
    )
