"""Batches of a text: documents become tokens once, in a file of their own.

Rows of that file are *packed*: several documents follow each other, and every token knows its own.
(Sequences of unequal length are *padded* instead: :mod:`~lm_from_scratch.text.batch`.)
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lm_from_scratch.files import sha256, whole_file
from lm_from_scratch.limits import Count, require
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.text.document import Document
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenFile:
    """The tokens of many documents in one memory-mapped file, an end-of-text token between them.

    The same token also stands first and last. It ends one document, as the target that the model
    has to predict, and begins the next, as the first thing that the model sees.
    ``n_bytes`` is the size of the text in UTF-8, which turns a loss per token into bits per byte.
    """

    path: Path
    n_tokens: int
    n_bytes: int
    eos_token_id: int
    dtype: str
    key: str  # the `text_key` of what it was made from

    @cached_property
    def tokens(self) -> np.ndarray:
        """The token ids (n_tokens,), read from the disk where they are needed."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.n_tokens,))


def text_key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    """A digest of the tokenizer and of every document."""
    digest = hashlib.sha256(f"{tokenizer.backend.to_str()}{tokenizer.eos_token_id}".encode())
    for document in documents:
        text = document.text.encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()


def write_tokens(
    documents: Sequence[Document], tokenizer: Tokenizer, path: str | Path
) -> TokenFile:
    """Tokenise the documents once. A file made from the same text and tokenizer is used again, if
    its bytes are those that were written.

    Raises ``ValueError`` for a tokenizer without an end token.
    """
    path, end, key = Path(path), tokenizer.eos_token_id, text_key(documents, tokenizer)
    if end is None:
        raise ValueError(
            "no token ends a document: the tokenizer needs an eos_token in its "
            "tokenizer_config.json, or Tokenizer(backend, end_token=NAME)"
        )
    about = path.with_suffix(".json")
    try:
        record = json.loads(about.read_text())
        written = record.pop("sha256")
        tokens = TokenFile(path=path, **record)
        if tokens.key == key and written == sha256(path):
            return tokens
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass  # no record, or not a whole one: the file is made again, as is one that has changed
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    about.unlink(missing_ok=True)  # without its record the file counts as absent
    n_tokens = 1
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        file.write(np.array([end], dtype=dtype).tobytes())
        for start in range(0, len(documents), 256):
            texts = [document.text for document in documents[start : start + 256]]
            for ids in tokenizer.encode_batch(texts):
                file.write(np.array([*ids, end], dtype=dtype).tobytes())
                n_tokens += len(ids) + 1
    record = dict(
        n_tokens=n_tokens,
        n_bytes=sum(len(document.text.encode()) for document in documents),
        eos_token_id=end,
        dtype=dtype,
        key=key,
    )
    with whole_file(about) as temporary:
        temporary.write_text(json.dumps({**record, "sha256": sha256(path)}))
    return TokenFile(path=path, **record)


def packed_positions(idx: Tensor, eos_token_id: int) -> tuple[Tensor, Tensor]:
    """Positions and document numbers (B, T) of packed rows ``idx`` (B, T): each eos begins a new
    document."""
    starts = idx == eos_token_id
    column = torch.arange(idx.shape[1], device=idx.device).expand_as(idx)
    last_start = torch.where(starts, column, 0).cummax(dim=1).values
    return column - last_start, starts.long().cumsum(dim=1)


class Shuffled:
    """Rows in a new random order each epoch: those of batch number ``i`` are a function of the seed
    and ``i``. What is left over at the end of an epoch waits for another one."""

    def __init__(self, n_rows: int, batch_size: int, seed: int = 0) -> None:
        require(Count, batch_size=batch_size)
        self.n_rows, self.batch_size, self.seed = n_rows, batch_size, seed
        self.batches_per_epoch = n_rows // batch_size
        self._epoch, self._order = -1, torch.empty(0)

    def __getitem__(self, i: int) -> list[int]:
        epoch, batch = divmod(i, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order, self._epoch = torch.randperm(self.n_rows, generator=generator), epoch
        return self._order[batch * self.batch_size :][: self.batch_size].tolist()


def in_order(n_rows: int, batch_size: int) -> Iterator[list[int]]:
    """Every row once, ``batch_size`` at a time; the last of them may be fewer."""
    for first in range(0, n_rows, batch_size):
        yield list(range(first, min(first + batch_size, n_rows)))


class PackedBatches:
    """Batch number ``i`` of an endless run over a token file: a function of the seed and ``i``.

    Each epoch cuts the stream into rows of ``block_size`` at a new random offset and draws the rows
    in a new random order, so nothing but the number of the next batch is needed to go on after an
    interruption. With ``isolate`` a token sees its own document alone; without it, everything
    before it in its row, as GPT-2 was trained.
    """

    def __init__(
        self,
        file: TokenFile,
        batch_size: int,
        block_size: int,
        seed: int = 0,
        isolate: bool = True,
    ) -> None:
        require(Count, batch_size=batch_size, block_size=block_size)
        # one row is lost to the random offset, and a row's last target is the next token
        self.rows = (file.n_tokens - 1) // block_size - 1
        if self.rows < batch_size:
            raise ValueError(
                f"{file.n_tokens} tokens give {max(self.rows, 0)} rows of block_size={block_size}, "
                f"fewer than batch_size={batch_size}: use more text or smaller numbers"
            )
        self.file, self.batch_size, self.block_size = file, batch_size, block_size
        self.seed, self.isolate = seed, isolate
        self.batches_per_epoch = self.rows // batch_size
        self._epoch = -1
        self._starts = torch.empty(0)

    def recipe(self) -> dict[str, object]:
        """All that the batches depend on."""
        return {
            "text": self.file.key,
            "batch_size": self.batch_size,
            "block_size": self.block_size,
            "seed": self.seed,
            "isolate": self.isolate,
        }

    def __getitem__(self, i: int) -> Batch:
        if i < 0:
            raise ValueError(f"batch {i}: batches are numbered from 0")
        epoch, batch = divmod(i, self.batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = torch.randint(self.block_size, (1,), generator=generator)
            order = torch.randperm(self.rows, generator=generator)
            self._starts, self._epoch = offset + order * self.block_size, epoch
        starts = self._starts[batch * self.batch_size : (batch + 1) * self.batch_size]
        return packed_batch(self.file, starts.tolist(), self.block_size, self.isolate)


def packed_batch(
    file: TokenFile, starts: Sequence[int], block_size: int, isolate: bool = True
) -> Batch:
    """The rows of a token file that begin at ``starts``, and the token after each."""
    rows = np.stack([file.tokens[start : start + block_size + 1] for start in starts])
    tokens = torch.from_numpy(rows.astype(np.int64))
    idx, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if not isolate:
        return Batch(idx, targets)
    positions, documents = packed_positions(idx, file.eos_token_id)
    return Batch(idx, targets, positions, documents)


def sequential_batches(
    file: TokenFile, batch_size: int, block_size: int, isolate: bool = True
) -> Iterator[Batch]:
    """Every token of the file once, in order: for the held-out loss.

    Raises ``ValueError`` for sizes below 1, and for a file that is too short.
    """
    require(Count, batch_size=batch_size, block_size=block_size)
    n_targets = file.n_tokens - 1
    if n_targets < block_size:
        raise ValueError(f"{file.n_tokens} tokens are fewer than block_size={block_size} + 1")
    firsts = range(0, n_targets, block_size)
    for i in range(0, len(firsts), batch_size):
        rows = firsts[i : i + batch_size]
        starts = [min(first, n_targets - block_size) for first in rows]
        batch = packed_batch(file, starts, block_size, isolate)
        batch.targets[-1, : rows[-1] - starts[-1]] = IGNORE  # the last row reaches back
        yield batch


def pieces(documents: Sequence[Document], tokenizer: Tokenizer, length: int, count: int) -> Batch:
    """``count`` pieces of documents, taken evenly from all there are; ``idx`` is (count, length).

    Each piece is read alone and begins as a document does, with the end token if there is one: a
    batch without positions, on which models with other caches or other weights are compared.

    Raises ``ValueError`` for a ``length`` below 1, and if there are fewer pieces than ``count``.
    """
    require(Count, length=length)
    first = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    size = length + 1 - len(first)
    rows = []
    for document in documents:
        ids = tokenizer.encode(document.text)
        for i in range(0, len(ids) - size + 1, size):
            rows.append([*first, *ids[i : i + size]])
    if not 1 <= count <= len(rows):
        raise ValueError(f"count={count} is not in 1 ... {len(rows)}, the pieces of that length")
    chosen = torch.tensor(rows)[torch.linspace(0, len(rows) - 1, count).long()]
    return Batch(chosen[:, :-1], chosen[:, 1:])
