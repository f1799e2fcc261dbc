"""From text to token ids and back: byte-level byte-pair encoding (BPE).

Text becomes UTF-8 bytes, so that every string has an encoding, and the most frequent pair of
neighbours is merged into a new token, again and again, until the vocabulary is full. Encoding a
text applies the same merges in the order in which they were learned.

:class:`Tokenizer` is a thin wrapper of the ``tokenizers`` library. The functions
:func:`count_pairs`, :func:`merge_pair`, :func:`learn_merges` and :func:`apply_merges` are the
algorithm written to be read; the tests hold them equal to the library.

Source: Sennrich, Haddow, Birch, *Neural Machine Translation of Rare Words with Subword Units*,
2016, arXiv:1508.07909; bytes as the alphabet: Radford et al., 2019.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lm_from_scratch.limits import shown
from lm_from_scratch.text import streaming, tokenizer_files
from lm_from_scratch.text.tokenizer_files import (
    NO_FILES,
    TokenizerFiles,
    check_id,
    check_ids,
    check_texts,
    checked,
    one_line,
)

END_OF_TEXT = "<|endoftext|>"  # stands between documents; a model that produces it has finished

Pair = tuple[str, str]


def count_pairs(words: Mapping[tuple[str, ...], int]) -> Counter[Pair]:
    """How often each pair of neighbours occurs. ``words`` maps a word's pieces to its count."""
    pairs: Counter[Pair] = Counter()
    for pieces, count in words.items():
        for pair in pairwise(pieces):
            pairs[pair] += count
    return pairs


def merge_pair(pieces: Sequence[str], pair: Pair) -> tuple[str, ...]:
    """Replace every occurrence of ``pair`` by one piece, from left to right."""
    merged: list[str] = []
    i = 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
            merged.append(pieces[i] + pieces[i + 1])
            i += 2
        else:
            merged.append(pieces[i])
            i += 1
    return tuple(merged)


def learn_merges(words: Mapping[tuple[str, ...], int], n_merges: int) -> list[Pair]:
    """The first ``n_merges`` merges: each time the most frequent pair.

    Of pairs that are equally frequent the one with the smaller token ids wins: ids go to single
    pieces in alphabetical order first, then to the merges in the order in which they are made.
    """
    words = dict(words)
    ids = {piece: i for i, piece in enumerate(sorted({p for word in words for p in word}))}
    merges: list[Pair] = []
    for _ in range(n_merges):
        pairs = count_pairs(words)
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], -ids[pair[0]], -ids[pair[1]]))
        ids.setdefault(best[0] + best[1], len(ids))
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for pieces, count in words.items():
            merged[merge_pair(pieces, best)] += count
        words = merged
    return merges


def apply_merges(word: str, merges: Iterable[Pair]) -> tuple[str, ...]:
    """Encode one word: apply the merges in the order in which they were learned."""
    pieces: tuple[str, ...] = tuple(word)
    for pair in merges:
        if pair[0] in pieces:  # most merges are made of other words' pieces
            pieces = merge_pair(pieces, pair)
    return pieces


class Tokenizer:
    """Text to token ids and back.

    Bytes lose nothing: ``decode(encode(text)) == text`` for every string, if the vocabulary has all
    256 and no *normalizer* rewrites the text first. So it is for those that are made here. Qwen2's
    composes characters (NFC): an ``e`` and an accent come back as one ``é``.

    ``eos_token_id`` ends a text; it is ``None`` for a tokenizer without such a token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_token: str | None = None,
        files: TokenizerFiles = NO_FILES,
    ) -> None:
        self.backend, self.files = backend, files
        self.backend.encode_special_tokens = True
        end = end_token or files.end_token(END_OF_TEXT)
        self.eos_token_id: int | None = None if end is None else backend.token_to_id(end)
        if end_token is not None and self.eos_token_id is None:
            raise ValueError(f"the tokenizer has no {end_token!r} token")

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        special_tokens: Sequence[str] = (),
        end_token: str = END_OF_TEXT,
        show_progress: bool = False,
    ) -> "Tokenizer":
        """Learn a byte-level BPE vocabulary of at most ``vocab_size`` tokens from ``texts``.

        The special tokens and the 256 bytes come before the merges. No merge is learned from the
        name of a special token. A small corpus may run out of pairs before the vocabulary is full.
        """
        special = list(dict.fromkeys([end_token, *special_tokens]))
        if vocab_size < 256 + len(special):
            raise ValueError(
                f"vocab_size={vocab_size} is too small: 256 bytes and {len(special)} "
                f"special tokens need {256 + len(special)}"
            )
        if vocab_size > tokenizer_files.MAX_ID:
            raise ValueError(
                f"vocab_size={shown(vocab_size)} is larger than any vocabulary: "
                f"{tokenizer_files.MAX_ID} at most"
            )
        if "" in special:
            raise ValueError(f"special tokens need a name: {special}")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=show_progress,
        )
        names = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        parts = (part for text in checked(texts) for part in names.split(text))
        backend.train_from_iterator(parts, trainer)
        tokenizer_files.put_in_front(backend, end_token)
        return cls(backend, end_token)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a folder, or a ``tokenizer.json``. Raises ``ValueError`` if there
        is none that can be read."""
        backend, files = tokenizer_files.read(Path(path))
        return cls(backend, files=files)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer's files into the folder ``path``, those that came with it too."""
        tokenizer_files.write(self.backend, self.files, self.eos_token_id, Path(path))

    @property
    def vocab_size(self) -> int:
        """The largest id and one. A model may have more: published sizes are rounded up."""
        return 1 + max(self.backend.get_vocab().values(), default=-1)

    @cached_property
    def _reading_names(self) -> tokenizers.Tokenizer:
        """The same, but the names of special tokens become their ids."""
        backend = copy.deepcopy(self.backend)
        backend.encode_special_tokens = False
        return backend

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The token ids of ``text``. Nothing is added: no token for start or end.

        The name of a special token in the text is spelled letter by letter, so that only the
        program may end a document, not what a document says. With ``special`` it becomes the token.
        """
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """The token ids of several texts. Raises ``ValueError`` for what is no Unicode text."""
        check_texts(texts)
        backend = self._reading_names if special else self.backend
        with one_line("the text cannot be encoded"):
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's own rule puts in front of a text, and those behind it. Those
        that are made here put the end token in front, others nothing."""
        return tokenizer_files.around(self.backend)

    def start(self, prompt: str, special: bool = False) -> list[int]:
        """The token ids that a model starts from: those of ``prompt``, and what the tokenizer's own
        rule puts in front. What it puts behind a text would end this one."""
        return [*self.around[0], *self.encode(prompt, special)]

    def enclosed(self, text: str, limit: int) -> list[int]:
        """The token ids of a text that is whole, as a classifier reads it: with what the
        tokenizer's own rule puts in front and behind, at most ``limit`` together. A longer text
        loses its end."""
        front, behind = self.around
        room = max(limit - len(front) - len(behind), 0)
        return [*front, *self.encode(text)[:room], *behind][:limit]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The token ids of ``[{"role": "user", "content": "Hello"}, ...]`` by the tokenizer's own
        template; special tokens that a message names become tokens too. Raises ``ValueError`` if
        there is no template, and for messages that it refuses."""
        from lm_from_scratch.text.chat import render

        return self.encode(render(self.files, messages, add_generation_prompt), special=True)

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The token ids of ``text``, where special tokens may be named, and the places in the text
        at which each of them begins and ends."""
        check_texts([text])
        with one_line("the text cannot be encoded"):
            encoding = self._reading_names.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """The text of the token ids, special tokens included. An id without a token has none.

        With the ids that they come ``after``: what they add to the text of those.
        """
        if len(after):
            return streaming.gained(self.decode(after), self.decode([*after, *ids]))
        return self.backend.decode(check_ids(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; bytes that are no whole character show as U+FFFD."""
        return [self.decode([token]) for token in ids]

    def stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """What :meth:`decode` says of the ids ``after`` others, as they arrive, never half a
        character: its bytes wait until it is whole.

        What is still waiting at the end comes as it is, with U+FFFD for bytes that are no text.
        """
        new, before = map(check_id, ids), check_ids(after)
        return streaming.stream(self.decode, self.backend.id_to_token, new, before)
