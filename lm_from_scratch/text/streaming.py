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
``<0xA9>``     ``the caté``           nothing yet: another byte may follow
``▁sat``       ``the caté sat``       ``é sat``
=============  =====================  ===================================
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import eq

#: A token that is one byte, of vocabularies that spell rare characters in bytes (byte fallback).
#: Their decoder takes bytes side by side together: one that fits badly spoils those before it.
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


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
    ``decode([*after, *ids])`` gains over ``decode(after)``.

    A piece never ends inside a character: its bytes wait until it is whole, or until the end.
    """
    context, waiting = list(after), []
    for token in ids:
        decode([token])  # an id that cannot be is refused here
        waiting.append(token)
        name = token_of(token)
        if name is None or BYTE.fullmatch(name):  # an id without a token is not seen by a decoder
            continue
        text = decode([*context, *waiting])
        piece = gained(decode(context), text)
        if not piece or text.endswith("\ufffd"):
            continue
        yield piece
        # A word is enough context; a space alone could be one that a decoder drops at the start.
        context, waiting = ([] if piece.strip() else context) + waiting, []
    if waiting and (piece := gained(decode(context), decode([*context, *waiting]))):
        yield piece
