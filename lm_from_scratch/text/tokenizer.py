"""From text to token ids and back: byte-level byte-pair encoding (BPE).

Text becomes UTF-8 bytes, so that every string has an encoding, and the most frequent pair of
neighbours is merged into a new token, again and again, until the vocabulary is full. Encoding a
text applies the same merges in the order in which they were learnt.

:class:`Tokenizer` is a thin wrapper of the ``tokenizers`` library. The functions
:func:`count_pairs`, :func:`merge_pair`, :func:`learn_merges` and :func:`apply_merges` are the
algorithm written to be read; the tests hold them equal to the library.

Source: Sennrich, Haddow, Birch, *Neural Machine Translation of Rare Words with Subword Units*,
2016, arXiv:1508.07909; bytes as the alphabet: Radford et al., 2019.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from lm_from_scratch.files import whole_file

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
    """Encode one word: apply the merges in the order in which they were learnt."""
    pieces: tuple[str, ...] = tuple(word)
    for pair in merges:
        pieces = merge_pair(pieces, pair)
    return pieces


class Tokenizer:
    """Text to token ids and back. ``decode(encode(text)) == text`` for every string.

    A text that happens to contain ``<|endoftext|>`` is encoded letter by letter: only the program
    may end a document, not what a document says.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.backend.encode_special_tokens = True
        end = backend.token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"the tokenizer has no {END_OF_TEXT!r} token")
        self.eos_token_id: int = end

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        special_tokens: Sequence[str] = (END_OF_TEXT,),
        show_progress: bool = False,
    ) -> "Tokenizer":
        """Learn a byte-level BPE vocabulary of at most ``vocab_size`` tokens from ``texts``.

        The 256 bytes and the special tokens come first; the rest are merges. A small corpus may run
        out of pairs before the vocabulary is full.
        """
        smallest = 256 + len(special_tokens)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size={vocab_size} is too small: 256 bytes and {len(special_tokens)} "
                f"special tokens need {smallest}"
            )
        if END_OF_TEXT not in special_tokens:
            raise ValueError(f"special_tokens={list(special_tokens)} must contain {END_OF_TEXT!r}")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=show_progress,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a ``tokenizer.json``, or the one inside a folder. Raises ``ValueError`` if there is
        none that can be read."""
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"no tokenizer at {path}: a tokenizer.json file is needed")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any malformed file
            raise ValueError(f"{path} is not a tokenizer.json that can be read: {error}") from error
        return cls(backend)

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json`` into the folder ``path``: all of it, or nothing."""
        target = Path(path) / "tokenizer.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as temporary:
            temporary.write_text(self.backend.to_str(pretty=True), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``. Nothing is added: no token for start or end."""
        return self.encode_batch([text])[0]

    def start(self, prompt: str) -> list[int]:
        return [self.eos_token_id, *self.encode(prompt)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of several texts. Raises ``ValueError`` for text that is not Unicode."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"the text holds half of a surrogate pair, {text[error.start]!r}, at index "
                    f"{error.start}: it is not Unicode and has no UTF-8 bytes"
                ) from error
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the token ids, special tokens included."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is not in 0 ... {self.vocab_size - 1}")
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; bytes that are no whole character show as U+FFFD."""
        return [self.decode([token]) for token in ids]

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text as the ids arrive, never half a character: its bytes wait until it is whole.

        What is still waiting at the end comes as it is, with U+FFFD for bytes that are no text.
        """
        state, arrived, said = DecodeStream(skip_special_tokens=False), [], 0
        for token in ids:
            arrived.append(token)
            text = state.step(self.backend, token)
            if text:
                said += len(text)
                yield text
        if rest := self.decode(arrived)[said:]:
            yield rest
