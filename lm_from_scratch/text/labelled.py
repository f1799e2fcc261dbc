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
from lm_from_scratch.text.batch import Batch, padded_batch
from lm_from_scratch.text.batches import Shuffled, in_order
from lm_from_scratch.text.rows import numbered_lines, split_by
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
    path, rows = Path(path), []
    for number, line in numbered_lines(path):
        is_header = number == 1 and line.rpartition("\t")[2].strip().lower() == "label"
        if is_header:
            continue
        try:
            rows.append(_row(line, path.suffix.lower() == ".jsonl"))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no text with a label")
    labels = {row.label for row in rows}
    if len(rows) > 4 and len(labels) > len(rows) / 2:
        raise ValueError(
            f"{path} has {len(labels)} labels for {len(rows)} texts: does each line end in one?"
        )
    return rows


def _row(line: str, is_json: bool) -> Labelled:
    if is_json:
        try:
            record = json.loads(line)
            text, label = record["text"], record["label"]
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
    return split_by(lambda row: row.text, rows, held_out)


class LabelledBatches:
    """Batch number ``i`` of an endless run over labelled texts: a function of the seed and ``i``.

    Each epoch draws the texts in a new random order. A text is what the tokenizer's rule makes of
    it, with what the rule puts in front and behind, in at most ``block_size`` tokens. The
    ``targets`` (B,) of a batch are the numbers of its labels in ``labels``.
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
            raise ValueError(
                f"{len(rows)} texts are fewer than batch_size={batch_size}: "
                "use more texts or a smaller batch"
            )
        if unknown := sorted({row.label for row in rows} - set(labels)):
            raise ValueError(f"the label {unknown[0]!r} is not one of {list(labels)}")
        self.batch_size, self.block_size, self.seed = batch_size, block_size, seed
        self.labels = list(labels)
        self.ids = [tokenizer.enclosed(row.text, block_size) for row in rows]
        self.targets = torch.tensor([self.labels.index(row.label) for row in rows])
        self.order = Shuffled(len(rows), batch_size, seed)
        self.batches_per_epoch = self.order.batches_per_epoch
        digest = hashlib.sha256(tokenizer.backend.to_str().encode())
        for row in rows:
            digest.update(json.dumps([row.text, row.label]).encode())
        self.key = digest.hexdigest()

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
        return self._batch(self.order[i])

    def each_once(self) -> Iterator[Batch]:
        """Every text once, in order: for what is held out."""
        return map(self._batch, in_order(len(self.ids), self.batch_size))

    def _batch(self, rows: list[int]) -> Batch:
        padded = padded_batch([self.ids[row] for row in rows], pad_token_id=0)
        return Batch(padded.idx, self.targets[rows], padded.positions)
