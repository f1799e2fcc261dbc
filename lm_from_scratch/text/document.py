"""What text is made of before it is tokens: ``corpora`` makes documents, ``batches`` reads them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text. ``group`` decides the side of the split: all of a group goes to one side.

    The side depends on the name of the group alone, so another name may change it.
    """

    name: str
    group: str
    text: str
