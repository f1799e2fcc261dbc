"""Files that hold one thing in each line, and the rows of them that are held out."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lm_from_scratch.files import read_text

Row = TypeVar("Row")


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, each with its number from 1. Raises ``ValueError``
    for a file that is not UTF-8."""
    lines = read_text(path).split("\n")  # a line ends there alone: a text may hold "\u2028"
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def split_by(
    key: Callable[[Row], str], rows: Sequence[Row], held_out: float = 0.05
) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows that are held out, about ``held_out`` of all. A row's side depends
    on its ``key`` alone, so that no two rows with one key are on different sides.

    Raises ``ValueError`` where a side would be empty.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out} must be above 0 and below 1")
    places = [hashlib.sha256(key(row).encode(errors="replace")).hexdigest() for row in rows]
    different = sorted(set(places))
    if len(different) < 2:
        raise ValueError(f"{len(different)} text cannot be split into training and held out")
    border = different[min(max(round(held_out * len(different)), 1), len(different) - 1)]
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row, place in zip(rows, places, strict=True):
        sides[place < border].append(row)
    return sides
