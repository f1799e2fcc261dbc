"""What text is made of before it is tokens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text. ``group`` decides the side of the split: all of a group goes to one side."""

    name: str
    group: str
    text: str
