"""Drawings of which features and which layers know where they are."""

from collections.abc import Mapping, Sequence

from lm_from_scratch.instruments.canvas import BLUE, INK, ORANGE, Canvas, Drawing
from lm_from_scratch.instruments.plot import COLOURS


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
        place = max(90.0, min(253.0, (start + end) / 2))
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
