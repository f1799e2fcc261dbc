"""Tokens and numbers as the words of a drawing."""

from collections.abc import Sequence
from html import escape


def span(text: str, style: str, tag: str = "span") -> str:
    """A text in a style, for a drawing of words."""
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'


def token_boxes(pieces: Sequence[str], tints: Sequence[str], numbers: Sequence[int] = ()) -> str:
    """The pieces of a text in boxes of their tints, each above its number."""
    style = (
        "display: inline-block; margin: 0 2px 4px 0; padding: 1px 3px; border-radius: 4px; "
        "text-align: center; white-space: pre; background: "
    )
    below = [f"<br><small>{number}</small>" for number in numbers] or [""] * len(pieces)
    boxes = (
        f'<span style="{style}{ground}">{escape(printable(piece))}{number}</span>'
        for piece, ground, number in zip(pieces, tints, below, strict=True)
    )
    return f'<div class="diagram tokens">{"".join(boxes)}</div>'


def printable(piece: str) -> str:
    """A token as a label: blanks, line ends and the start of a document made visible, undecodable
    bytes as a box."""
    piece = piece.replace("<|endoftext|>", "⊢")
    return piece.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\ufffd", "▯")


def word(piece: str) -> str:
    """A token as a label, without the blank before it."""
    return printable(piece.removeprefix(" ") or piece)


def minus(number: object) -> str:
    """A number, or one that is written out, with a minus sign as wide as a plus."""
    return str(number).replace("-", "−")


def span_of(numbers: range) -> str:
    """ "4–7", or "4" for one number."""
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
