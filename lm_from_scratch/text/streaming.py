"""Text as its tokens arrive, so that all that was said is what the decoder says of the whole.

A token alone has no text: a decoder drops the space of the first one (``▁cat`` is ``cat`` at the
start, `` cat`` after another), puts one before a word, or needs four tokens for one character. So
new tokens are decoded behind those before them, and what the text gains is what they say:

=============  =====================  ===================================
tokens         decoded                said
=============  =====================  ===================================
``▁the``       ``the``                (it is the prompt)
``▁cat``       ``the cat``            `` cat``
``<0xC3>``     ``the cat`` U+FFFD     nothing yet: half a character
``<0xA9>``     ``the caté``           ``é``
``▁sat``       ``the caté sat``       `` sat``
=============  =====================  ===================================
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import eq

#: A token that is one byte, of vocabularies that spell rare characters in bytes (byte fallback).
#: Their decoder takes bytes side by side together: one that fits badly spoils those before it.
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")

#: A byte that does not begin a character.
INSIDE = re.compile("<0x[89ABab][0-9A-Fa-f]>")

#: U+FFFD itself, in bytes: it looks like half a character, and is whole.
REPLACEMENT = ["<0xEF>", "<0xBF>", "<0xBD>"]

#: What can be read: neither a space, which a decoder may drop at the start, nor half a character.
VISIBLE = re.compile(r"[^\s\ufffd]")

#: So many tokens, of which the last three may be a part of a character, are enough to wait for one.
PATIENCE = 8


def common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items two sequences begin with that are the same in both."""
    return sum(takewhile(bool, map(eq, a, b)))


def gained(before: str, text: str) -> str:
    """What ``text`` says beyond ``before``, with which it begins; where a character was not whole
    before, from that one on."""
    return text[common(before, text) :]


def stream(
    decode: Callable[[Sequence[int]], str],
    token_of: Callable[[int], str | None],
    ids: Iterable[int],
    after: Sequence[int] = (),
) -> Iterator[str]:
    """What ``ids`` say behind the tokens ``after``, piece by piece: joined, it is what
    ``decode([*after, *ids])`` gains over ``decode(after)``. Only where bytes turn out to be no
    text, characters before them have been said that the whole does not have.

    A piece never ends inside a character: its bytes wait until it is whole, or cannot be.
    """

    def is_byte(token: int) -> bool:
        return bool(BYTE.fullmatch(token_of(token) or ""))

    context = ending(decode, token_of, after)
    spaces: list[int] = []
    waiting: list[int] = []
    before = decode(context)
    for token in ids:
        if token_of(token) is None:  # such an id is not seen by a decoder
            continue
        waiting.append(token)
        text = decode([*context, *spaces, *waiting])
        end = len(waiting)
        if text.endswith("\ufffd") and [*map(token_of, waiting[-3:])] != REPLACEMENT:
            if end < PATIENCE:
                continue
            for shorter in range(end - 3, 0, -1):  # the last may still become a character
                if text.startswith(part := decode([*context, *spaces, *waiting[:shorter]])):
                    text, end = part, shorter
                    break
        if not (piece := gained(before, text)):
            continue
        yield piece
        done, waiting = waiting[:end], waiting[end:]
        while done and is_byte(done[-1]):  # bytes that follow are read apart from these
            done.pop()
        if VISIBLE.search(decode(done)):
            context, spaces = done, []
        elif done:
            spaces = done
        before = decode([*context, *spaces])
    if piece := gained(before, decode([*context, *spaces, *waiting])):
        yield piece


def ending(
    decode: Callable[[Sequence[int]], str],
    token_of: Callable[[int], str | None],
    ids: Sequence[int],
) -> list[int]:
    """The tokens of ``ids`` that the text behind them depends on: the last that can be read, and
    the few after it, spaces or bytes, from the beginning of a character."""

    def fits(pattern: re.Pattern[str], place: int) -> bool:
        return bool(pattern.fullmatch(token_of(ids[place]) or ""))

    last = len(ids) - 1
    while last >= 0 and (fits(BYTE, last) or not VISIBLE.search(decode([ids[last]]))):
        last -= 1
    rest = max(last + 1, len(ids) - PATIENCE)
    while rest < len(ids) and fits(INSIDE, rest):
        rest += 1
    return [*ids[last : last + 1], *ids[rest:]]
