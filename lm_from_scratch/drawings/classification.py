"""Drawings of chapter 4: where a padded row is read, and labels of tokens."""

from collections.abc import Sequence
from html import escape

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    Canvas,
    Drawing,
    printable,
    tint,
)


def padded_rows(rows: Sequence[Sequence[str]], pad: str, read: Sequence[int]) -> Drawing:
    """Texts of unequal length in one batch: a box for each token, grey where it is ``pad``, blue
    and bold in the column that is ``read`` of each row."""
    T = max(map(len, rows))
    width, row = 339 / T, 32
    canvas = Canvas(
        343, row * len(rows) + 4,
        "; ".join(f"row {r} of {len(words)} tokens is read in column {column}"
                  for r, (words, column) in enumerate(zip(rows, read, strict=True))),
    )  # fmt: skip
    size = min(12, 1.5 * width / max(len(word) for words in rows for word in [*words, pad]))
    for r, (words, column) in enumerate(zip(rows, read, strict=True)):
        for t, word in enumerate([*words, *[pad] * (T - len(words))]):
            chosen, empty = t == column, t >= len(words)
            fill, tint = (BLUE, 0.35) if chosen else (INK, 0.03 if empty else 0.1)
            canvas.box(width * t + 2, row * r + 3, width - 4, row - 8, fill, tint)
            canvas.text(width * (t + 0.5) + 2, row * r + 15, printable(word), size,
                        bold=chosen, opacity=0.45 if empty else 1.0)  # fmt: skip
    return canvas.drawing()


def labelled(pieces: Sequence[str], labels: Sequence[str], truth: Sequence[str] = ()) -> Drawing:
    """A text, each token in the colour of its label, and underlined where the label is not the
    ``truth``. A token with an empty label has no colour. Below it: which colour is which label."""
    shown = [*dict.fromkeys(label for label in [*labels, *truth] if label)]
    tints = (BLUE, ORANGE, GREEN, RED, PURPLE, *COLOURS[5:7])

    def span(text: str, label: str, wrong: bool = False) -> str:
        if not label:
            return escape(text)
        colour = tint(tints[shown.index(label) % 7], 0.35)
        style = f"padding: 1px 0; border-radius: 3px; background: {colour}"
        if wrong:
            style += "; text-decoration: underline wavy; text-underline-offset: 3px"
        return f'<span style="{style}">{escape(text)}</span>'

    wrong = [bool(truth) and a != b for a, b in zip(labels, truth or labels, strict=True)]
    text = "".join(span(*one) for one in zip(pieces, labels, wrong, strict=True))
    key = " ".join(span(f" {label} ", label) for label in shown)
    pairs = zip(pieces, labels, strict=True)
    says = " ".join(f"{piece}[{label}]" for piece, label in pairs if label)
    return Drawing(
        f'<div class="diagram"><div style="white-space: pre-wrap; font-family: monospace; '
        f'line-height: 1.7">{text}</div><div style="margin-top: 6px; line-height: 1.9">'
        f"<small>{key}</small></div></div>",
        says,
    )
