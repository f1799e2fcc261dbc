"""Texts with a label each, and batches of them for a classifier.

A file holds one text in each line: ``text<TAB>label``, or, where its name ends in ``.jsonl``, an
object ``{"text": ..., "label": ...}``.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lm_from_scratch.limits import Count, require
from lm_from_scratch.text.batches import Batch, padded_batch
from lm_from_scratch.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Labelled:
    """A text and what it is called."""

    text: str
    label: str


def read_labelled(path: str | Path) -> list[Labelled]:
    """The lines of a file; empty ones are left out, and a first line whose label is ``label``: the
    names of the columns.

    Raises ``ValueError`` with the number of a line that is neither, for a file without any, and for
    one in which most labels stand once: its columns may be exchanged.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        is_header = number == 1 and line.rpartition("\t")[2].strip().lower() == "label"
        if is_header or not line.strip():
            continue
        try:
            found.append(_row(line, path.suffix.lower() == ".jsonl"))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no text with a label")
    labels = {row.label for row in found}
    if len(found) > 4 and len(labels) > len(found) / 2:
        raise ValueError(
            f"{path} has {len(labels)} labels for {len(found)} texts: does each line end in one?"
        )
    return found


def _row(line: str, is_json: bool) -> Labelled:
    if is_json:
        try:
            said = json.loads(line)
            text, label = said["text"], said["label"]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError('it must be {"text": ..., "label": ...}') from error
        label = str(label) if type(label) in (int, bool) else label
    else:
        text, tab, label = line.rstrip("\r").rpartition("\t")
        if not tab:
            raise ValueError("it must be a text, a tab and a label")
    if not (isinstance(text, str) and isinstance(label, str) and text.strip() and label.strip()):
        raise ValueError("neither the text nor the label may be empty, or anything but a text")
    label = label.strip()
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in label):
        raise ValueError(f"the label {label!r} must be plain text, without tab or line break")
    return Labelled(text, label)


def split_labelled(
    rows: Sequence[Labelled], held_out: float = 0.05
) -> tuple[list[Labelled], list[Labelled]]:
    """Rows to train on and rows that are held out, about ``held_out`` of all. A row's side depends
    on its text alone, so that no text is on both. Raises ``ValueError`` where one would be empty.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out} must be above 0 and below 1")
    places = [hashlib.sha256(row.text.encode(errors="replace")).hexdigest() for row in rows]
    different = sorted(set(places))
    if len(different) < 2:
        raise ValueError(f"{len(different)} text cannot be split into training and held out")
    border = different[min(max(round(held_out * len(different)), 1), len(different) - 1)]
    sides: tuple[list[Labelled], list[Labelled]] = ([], [])
    for row, place in zip(rows, places, strict=True):
        sides[place < border].append(row)
    return sides


class LabelledBatches:
    """Batch number ``i`` of an endless run over labelled texts: a function of the seed and ``i``.

    Each epoch draws the texts in a new random order. A text is what the tokenizer's rule makes of
    it, cut to its first ``block_size`` tokens. The ``targets`` (B,) of a batch are the numbers of
    its labels in ``labels``.
    """

    def __init__(
        self,
        rows: Sequence[Labelled],
        labels: Sequence[str],
        tokenizer: Tokenizer,
        batch_size: int,
        block_size: int,
        seed: int = 0,
    ) -> None:
        require(Count, batch_size=batch_size, block_size=block_size)
        if len(labels) < 2:
            raise ValueError(f"{list(labels)} leaves nothing to learn: two labels are needed")
        if len(rows) < batch_size:
            raise ValueError(f"{len(rows)} texts are fewer than batch_size={batch_size}")
        if unknown := sorted({row.label for row in rows} - set(labels)):
            raise ValueError(f"the label {unknown[0]!r} is not one of {list(labels)}")
        self.batch_size, self.block_size, self.seed = batch_size, block_size, seed
        self.labels = list(labels)
        self.ids = [tokenizer.start(row.text)[:block_size] for row in rows]
        self.targets = torch.tensor([self.labels.index(row.label) for row in rows])
        self.batches_per_epoch = len(rows) // batch_size
        digest = hashlib.sha256(tokenizer.backend.to_str().encode())
        for row in rows:
            digest.update(json.dumps([row.text, row.label]).encode())
        self.key = digest.hexdigest()
        self._epoch, self._order = -1, torch.empty(0)

    def recipe(self) -> dict[str, object]:
        """All that the batches depend on."""
        return {
            "text": self.key,
            "labels": self.labels,
            "batch_size": self.batch_size,
            "block_size": self.block_size,
            "seed": self.seed,
        }

    def __getitem__(self, i: int) -> Batch:
        epoch, batch = divmod(i, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order, self._epoch = torch.randperm(len(self.ids), generator=generator), epoch
        return self._batch(self._order[batch * self.batch_size :][: self.batch_size].tolist())

    def each_once(self) -> Iterator[Batch]:
        """Every text once, in order: for what is held out."""
        for first in range(0, len(self.ids), self.batch_size):
            yield self._batch(list(range(first, min(first + self.batch_size, len(self.ids)))))

    def _batch(self, rows: list[int]) -> Batch:
        padded = padded_batch([self.ids[row] for row in rows], pad_token_id=0)
        return Batch(padded.idx, self.targets[rows], padded.positions)
