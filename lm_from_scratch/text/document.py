"""What text is made of before it is tokens: ``corpora`` makes documents, ``batches`` reads them."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text. ``group`` decides the side of the split: all of a group goes to one side.

    The side depends on the name of the group alone, so another name may change it.
    """

    name: str
    group: str
    text: str


def place(group: str) -> float:
    """A number in [0, 1) that depends on the name alone, spread evenly over all names: the groups
    with the smallest are held out."""
    digest = hashlib.sha256(group.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
