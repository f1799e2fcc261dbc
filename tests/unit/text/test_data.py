"""text: corpora, a split without a leak, and batches that say where every token stands."""

import json
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm_from_scratch import files
from lm_from_scratch.text import batches, corpora
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.batches import (
    PackedBatches,
    TokenFile,
    packed_batch,
    packed_positions,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.text.corpora import load_corpus, read_texts, split
from lm_from_scratch.text.document import Document
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer

DOCUMENTS = corpora.reference()
TRAIN, HELD_OUT = split(DOCUMENTS)
TOKENIZER = Tokenizer.train([d.text for d in TRAIN], 512)


@cache
def all_docstrings() -> list[Document]:
    """They take seconds: every module of the standard library is parsed."""
    return corpora.docstrings()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> TokenFile:
    return write_tokens(TRAIN[:12], TOKENIZER, tmp_path_factory.mktemp("tokens") / "train.bin")


@pytest.mark.slow
def test_the_standard_library_has_the_text_that_the_docs_promise() -> None:
    docstrings = all_docstrings()
    sources = corpora.source()
    assert sum(len(d.text) for d in DOCUMENTS) > 400_000
    assert len(docstrings) > 5000 and sum(len(d.text) for d in docstrings) > 1_500_000
    assert sum(len(d.text) for d in sources) > 6_000_000
    names = {d.name for d in docstrings}
    assert "docstrings/json.dumps" in names and "docstrings/textwrap" in names
    text = next(d.text for d in docstrings if d.name == "docstrings/textwrap.dedent")
    assert text.startswith("textwrap.dedent(text)\n\nRemove any common leading whitespace")
    assert {d.group for d in sources} >= {d.group for d in docstrings if "json" in d.group}


def long_paragraphs(documents) -> set[str]:
    return {
        part.strip() for d in documents for part in d.text.split("\n\n") if len(part.strip()) >= 40
    }


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_no_paragraph_is_on_both_sides_of_the_split(share: float) -> None:
    documents = DOCUMENTS + all_docstrings()
    train, held_out = split(documents, share)
    assert not long_paragraphs(train) & long_paragraphs(held_out)
    assert not {d.group for d in train} & {d.group for d in held_out}
    assert train and held_out


def test_the_split_would_leak_without_the_paragraph_rule() -> None:
    """The reference repeats whole sections, so splitting by document alone is not enough."""
    held_out_groups = {d.group for d in DOCUMENTS} - {d.group for d in split(DOCUMENTS, 0.3)[0]}
    by_name = [d for d in DOCUMENTS if d.group in held_out_groups]
    assert long_paragraphs(by_name) & long_paragraphs(split(DOCUMENTS, 0.3)[0])


def test_the_split_depends_on_names_alone() -> None:
    train, held_out = split(DOCUMENTS[::-1], 0.2)
    assert {d.name for d in train} == {d.name for d in split(DOCUMENTS, 0.2)[0]}
    repeated = split(DOCUMENTS * 3, 0.2)
    assert len(repeated[0]) == 3 * len(train)
    assert len(repeated[1]) == len(held_out)  # held-out text counts once


def test_corpora_by_name_repetition_and_path(tmp_path) -> None:
    assert len(load_corpus("reference*2")) == 2 * len(DOCUMENTS)
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("zweites 😀", encoding="utf-8")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    pieces = load_corpus(str(tmp_path))
    assert "".join(d.text for d in pieces if d.name.startswith("a.txt#")) == "first"
    assert {Path(d.name).suffix.split("#")[0] for d in pieces} == {".txt", ".md"}
    long = "\n\n".join(f"paragraph {i} " + "x" * 400 for i in range(40))
    (tmp_path / "long.txt").write_text(long, encoding="utf-8")
    chunks = read_texts(tmp_path / "long.txt", chunk=4000)
    assert 3 <= len(chunks) <= 5
    assert "\n\n".join(d.text for d in chunks) == long


@given(st.text("ab \n", max_size=60), st.integers(1, 20))
def test_pieces_join_to_the_text_and_none_is_much_too_long(text: str, size: int) -> None:
    pieces = corpora.cut(text, size)
    assert "".join(pieces) == text and all(pieces)
    assert all(len(piece) < 3 * size for piece in pieces)


@pytest.mark.parametrize("between", ["\n", " ", "\r\n", ""])
def test_a_text_without_blank_lines_is_split(tmp_path, between: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(between.join(f"line{i:05}" for i in range(4000)).encode())
    documents = read_texts(path)
    assert 18 <= len(documents) <= 21 and max(len(d.text) for d in documents) < 2500
    assert all(d.text.startswith("line") and d.text[-1].isdigit() for d in documents) or not between
    train, held_out = corpora.load_split([str(path)], 0.05)
    assert train and held_out
    named = [(d.name, d.text) for d in documents]
    assert [(d.name, d.text) for d in read_texts(tmp_path)] == named  # a folder with one file
    assert named[0][0] == "notes.txt#0"


def test_a_text_of_one_piece_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("x")
    for place in (path, tmp_path):
        with pytest.raises(ValueError, match=r"notes\.txt#0.*cannot be split"):
            corpora.load_split([str(place)], 0.05)
    path.write_text("\n\n")
    for place in (path, tmp_path):
        with pytest.raises(ValueError, match="no text"):
            read_texts(place)


def test_a_byte_order_mark_is_no_text_and_endings_have_either_case(tmp_path) -> None:
    (tmp_path / "a.TXT").write_bytes(b"\xef\xbb\xbffirst \xef\xbb\xbf kept")
    (tmp_path / "b.Markdown").write_text("second")
    (tmp_path / "c.tex").write_text("third")
    (tmp_path / "d.txt.png").write_bytes(b"\x89PNG")
    texts = {d.name: d.text for d in read_texts(tmp_path, chunk=100)}
    assert texts == {"a.TXT#0": "first \ufeff kept", "b.Markdown#0": "second", "c.tex#0": "third"}


def test_without_an_end_token_there_is_no_token_file_but_there_are_pieces(tmp_path) -> None:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.post_processor = None
    endless = Tokenizer(backend)
    endless.eos_token_id = None
    with pytest.raises(
        ValueError, match="no token ends a document: the tokenizer needs an eos_token"
    ):
        write_tokens(TRAIN[:2], endless, tmp_path / "x.bin")
    assert list(tmp_path.iterdir()) == []
    batch = batches.pieces(TRAIN[:2], endless, 16, 3)
    assert batch.idx.shape == batch.targets.shape == (3, 16)
    assert batch.idx[0].tolist() == endless.encode(TRAIN[0].text)[:16]


@pytest.mark.skipif(sys.platform != "linux", reason="such a name exists on Linux alone")
def test_a_file_name_that_is_no_utf8(tmp_path) -> None:
    for i in range(20):
        name = os.fsencode(tmp_path) + b"/caf\xe9 %d.txt" % i
        Path(os.fsdecode(name)).write_text(f"text {i} " * 9, encoding="utf-8")
    train, held_out = corpora.load_split([str(tmp_path)], 0.2)
    assert "caf\ufffd 0.txt" in {d.name for d in [*train, *held_out]}


def test_bad_corpora_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load_corpus(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="no text in the folder"):
        load_corpus(str(tmp_path))
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_corpus(str(tmp_path / "x.txt"))
    for order in ("utf-16-le", "utf-16-be", "utf-32-le"):  # without the mark of their order
        (tmp_path / "x.txt").write_bytes("The cat sat.\n".encode(order))
        with pytest.raises(ValueError, match=r"x\.txt is not UTF-8 text, but looks like UTF-16"):
            load_corpus(str(tmp_path / "x.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        load_corpus(str(tmp_path / "empty.txt"))
    with pytest.raises(ValueError, match=r"reference\*x"):
        load_corpus("reference*x")
    for times in ("", "0", "10000", "9" * 30, "9" * 5000, "\u0663"):
        with pytest.raises(ValueError, match=r"whole number is needed, 1 \.\.\. 9999"):
            load_corpus(f"reference*{times}")
    with pytest.raises(ValueError, match=r"held_out=1\.5"):
        split(DOCUMENTS, 1.5)
    with pytest.raises(ValueError, match="at least two are needed"):
        split([Document("a", "a", "text")] * 3, 0.05)


def test_tokens_are_written_once_and_end_every_document(tmp_path) -> None:
    path = tmp_path / "x.bin"
    file = write_tokens(TRAIN[:5], TOKENIZER, path)
    eos = TOKENIZER.eos_token_id
    assert file.tokens[0] == eos and file.tokens[-1] == eos
    assert (file.tokens == eos).sum() == 6
    parts = np.split(file.tokens, np.flatnonzero(file.tokens == eos))[1:-1]
    assert [TOKENIZER.decode(p[1:].tolist()) for p in parts] == [d.text for d in TRAIN[:5]]
    assert file.n_bytes == sum(len(d.text.encode()) for d in TRAIN[:5])
    assert isinstance(file.tokens, np.memmap)
    before = path.stat().st_mtime_ns
    assert write_tokens(TRAIN[:5], TOKENIZER, path).n_tokens == file.n_tokens
    assert path.stat().st_mtime_ns == before  # not written again
    assert write_tokens(TRAIN[:4], TOKENIZER, path).n_tokens < file.n_tokens  # other text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.json"]


def test_a_token_file_without_its_record_is_made_again(tmp_path) -> None:
    path = tmp_path / "x.bin"
    want = np.array(write_tokens(TRAIN[:3], TOKENIZER, path).tokens)  # a copy
    path.with_suffix(".json").unlink()
    path.write_bytes(b"\0\0")  # as a killed run might leave it
    again = write_tokens(TRAIN[:3], TOKENIZER, path)
    assert np.array_equal(again.tokens, want)
    assert json.loads(path.with_suffix(".json").read_text())["n_tokens"] == len(want)


def test_packed_positions_restart_after_every_end() -> None:
    idx = torch.tensor([[7, 8, 0, 5, 0, 0, 6], [0, 1, 2, 3, 4, 5, 6]])
    positions, documents = packed_positions(idx, eos_token_id=0)
    assert positions.tolist() == [[0, 1, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert documents.tolist() == [[0, 0, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1]]


def test_packed_rows_are_the_stream_and_the_next_token(tokens) -> None:
    stream = torch.from_numpy(np.asarray(tokens.tokens).astype(np.int64))
    for isolate in (True, False):
        batch = packed_batch(tokens, [3, 100], 33, isolate)
        assert torch.equal(batch.idx, torch.stack([stream[3:36], stream[100:133]]))
        assert torch.equal(batch.targets, torch.stack([stream[4:37], stream[101:134]]))
        assert (batch.positions is None) == (not isolate) == (batch.documents is None)


def test_an_epoch_visits_every_row_once_in_a_new_order(tokens) -> None:
    batches = PackedBatches(tokens, batch_size=2, block_size=33, seed=4)
    n = batches.batches_per_epoch
    starts = []
    for i in range(2 * n):
        batches[i]
        chosen = batches._starts[(i % n) * 2 : (i % n) * 2 + 2]
        starts.append(tuple(chosen.tolist()))
    for epoch in (starts[:n], starts[n:]):
        flat = [s for pair in epoch for s in pair]
        assert len(set(flat)) == 2 * n
        assert len({s % 33 for s in flat}) == 1
        assert max(flat) + 34 <= tokens.n_tokens
    assert starts[:n] != starts[n:]


def test_batch_i_depends_on_the_seed_and_i_alone(tokens) -> None:
    a, b = (PackedBatches(tokens, 2, 33, seed=4) for _ in range(2))
    later = a.batches_per_epoch + 3
    b[0], b[later + 1]  # another history
    assert torch.equal(a[later].idx, b[later].idx)
    assert not torch.equal(PackedBatches(tokens, 2, 33, seed=5)[0].idx, a[0].idx)


def test_sequential_batches_hold_every_target_once(tokens) -> None:
    seen = []
    for batch in sequential_batches(tokens, batch_size=4, block_size=50):
        seen += batch.targets[batch.targets != IGNORE].tolist()
    assert seen == np.asarray(tokens.tokens[1:]).tolist()


def test_padding_is_marked_from_the_true_length() -> None:
    for side in ("left", "right"):
        batch = padded_batch([[5, 6], [7, 8, 9]], pad_token_id=0, side=side)
        assert (batch.positions >= 0).sum(1).tolist() == [2, 3]
        assert batch.positions[0][batch.positions[0] >= 0].tolist() == [0, 1]


def test_long_sequences_are_cut_to_the_block_size() -> None:
    batch = padded_batch([[5, 6, 7, 8], [9]], pad_token_id=0, block_size=2)
    assert batch.idx.tolist() == [[5, 6], [9, 0]]
    assert batch.positions.tolist() == [[0, 1], [0, -1]]
    with pytest.raises(ValueError, match="block_size=0"):
        padded_batch([[1]], 0, block_size=0)


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=5))
def test_padded_rows_keep_their_tokens(rows: list[list[int]]) -> None:
    for side in ("left", "right"):
        batch = padded_batch(rows, 0, side)
        for i, row in enumerate(rows):
            assert batch.idx[i][batch.positions[i] >= 0].tolist() == row
        assert (batch.positions[:, -1] >= 0).all() or side == "right"


def test_bad_batches_are_refused(tokens) -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        PackedBatches(tokens, 0, 33)
    with pytest.raises(ValueError, match="fewer than batch_size=10000"):
        PackedBatches(tokens, 10000, 33)
    with pytest.raises(ValueError, match="side='middle'"):
        padded_batch([[1]], 0, "middle")
    with pytest.raises(ValueError, match="at least one token"):
        padded_batch([[1], []], 0)
    with pytest.raises(ValueError, match="fewer than block_size"):
        next(sequential_batches(tokens, 1, 10**7))


def test_every_epoch_cuts_the_stream_elsewhere(tokens) -> None:
    batches = PackedBatches(tokens, batch_size=2, block_size=33)
    offsets = set()
    for epoch in range(6):
        batches[epoch * batches.batches_per_epoch]
        offsets.add(int(batches._starts[0]) % 33)
    assert len(offsets) > 2


def test_documents_are_isolated_unless_asked_otherwise(tokens) -> None:
    assert PackedBatches(tokens, 2, 33)[0].documents is not None
    assert next(sequential_batches(tokens, 2, 33)).documents is not None


def test_another_tokenizer_or_another_cut_makes_another_file(tmp_path) -> None:
    path, other = tmp_path / "x.bin", Tokenizer.train([d.text for d in TRAIN], 400)
    first = write_tokens(TRAIN[:3], TOKENIZER, path).n_tokens
    assert write_tokens(TRAIN[:3], other, path).n_tokens != first
    one = [Document("a", "a", "x\0y")]
    two = [Document("a", "a", "x"), Document("b", "b", "y")]
    write_tokens(one, TOKENIZER, path)
    assert (write_tokens(two, TOKENIZER, path).tokens == TOKENIZER.eos_token_id).sum() == 3


def test_a_short_or_unreadable_token_file_is_made_again(tmp_path) -> None:
    path = tmp_path / "x.bin"
    want = np.array(write_tokens(TRAIN[:3], TOKENIZER, path).tokens)  # a copy
    path.write_bytes(path.read_bytes()[:100])
    assert np.array_equal(write_tokens(TRAIN[:3], TOKENIZER, path).tokens, want)
    for record in ("", "{}", "[1]", '{"key": 1}'):
        path.with_suffix(".json").write_text(record)
        assert np.array_equal(write_tokens(TRAIN[:3], TOKENIZER, path).tokens, want)


def test_a_write_that_is_cut_off_is_not_taken_for_a_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.bin"
    write_tokens(TRAIN[:3], TOKENIZER, path)
    real, calls = files.os.replace, []

    def cut_off(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt  # the tokens have their name, the record does not
        real(source, target)

    monkeypatch.setattr(files.os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(TRAIN[:4], TOKENIZER, path)
    monkeypatch.undo()
    assert not path.with_suffix(".json").exists()
    assert (write_tokens(TRAIN[:3], TOKENIZER, path).tokens == TOKENIZER.eos_token_id).sum() == 4


def test_a_large_vocabulary_gets_four_bytes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Tokenizer, "vocab_size", property(lambda self: 70_000))
    file = write_tokens(TRAIN[:2], TOKENIZER, tmp_path / "x.bin")
    assert file.dtype == "uint32" and file.tokens.dtype == np.uint32


def test_a_held_out_document_that_is_mostly_known_is_dropped() -> None:
    known, new = "k" * 60, "n" * 60
    groups = [f"g{i}" for i in range(200)]
    documents = [Document(g, g, known if i % 2 else f"{known}\n\n{known}\n\n{new}{i}")
                 for i, g in enumerate(groups)]  # fmt: skip
    documents += [Document(f"{g}+", g, f"{known}\n\n{new}{i}{new}") for i, g in enumerate(groups)]
    _, held_out = split(documents, 0.3)
    assert held_out
    assert all(known not in d.text for d in held_out)
    assert all(d.name.endswith("+") for d in held_out)  # the others lost more than half


def test_bad_numbers_are_refused_by_name(tokens) -> None:
    with pytest.raises(ValueError, match="batch -1"):
        PackedBatches(tokens, 2, 33)[-1]
    with pytest.raises(ValueError, match="batch_size=0"):
        next(sequential_batches(tokens, 0, 33))
    with pytest.raises(ValueError, match="a whole number"):
        load_corpus("reference*²")


@pytest.mark.parametrize("n", [2, 3, 5, 24])
@pytest.mark.parametrize("share", [1e-6, 0.05, 0.999999])
def test_few_documents_still_give_both_sides(n: int, share: float) -> None:
    documents = [Document(f"d{i}", f"d{i}", f"text number {i}") for i in range(n)]
    train, held_out = split(documents, share)
    assert train and held_out and len(train) + len(held_out) == n
    small = len(split(documents, 1e-6)[1])
    assert small == 1 <= len(held_out)


def test_a_large_file_of_a_folder_is_not_held_out_whole(tmp_path) -> None:
    for pieces in ({"a": 80, "b": 320}, {str(i): 10 for i in range(30)} | {"large": 600}):
        folder = tmp_path / str(len(pieces))
        folder.mkdir()
        for name, n in pieces.items():
            text = "\n\n".join(f"paragraph {i} of the file {name}" for i in range(n))
            (folder / f"{name}.txt").write_text(text)
        train, held_out = corpora.load_split([str(folder)], 0.05)
        sizes = [sum(len(d.text) for d in side) for side in (train, held_out)]
        assert 0 < sizes[1] < 0.2 * sum(sizes)
        cut = {d.name.split("#")[0] for d in [*train, *held_out] if "#" in d.name}
        assert cut == ({"a.txt", "b.txt"} if len(pieces) == 2 else {"large.txt"})


def test_a_small_file_still_gives_about_twenty_documents(tmp_path) -> None:
    path = tmp_path / "small.txt"
    path.write_text("\n\n".join(f"paragraph {i} of a small file" for i in range(300)))
    assert 15 <= len(read_texts(path)) <= 25


def test_pieces_begin_like_documents_and_are_taken_evenly() -> None:
    documents, _ = corpora.split(corpora.reference())
    tokenizer = Tokenizer.train([d.text for d in documents[:20]], 300)
    batch = batches.pieces(documents[:20], tokenizer, 32, 7)
    assert batch.idx.shape == batch.targets.shape == (7, 32) and batch.positions is None
    assert (batch.idx[:, 0] == tokenizer.eos_token_id).all()
    assert torch.equal(batch.idx[:, 1:], batch.targets[:, :-1])
    text = tokenizer.decode(batch.targets[0].tolist())
    assert documents[0].text.startswith(text)
    last = [d for d in documents[:20] if len(tokenizer.encode(d.text)) >= 32][-1]
    assert tokenizer.decode(batch.targets[-1].tolist()) in last.text


def test_pieces_that_are_not_there_are_refused() -> None:
    documents, _ = corpora.split(corpora.reference())
    tokenizer = Tokenizer.train([documents[0].text], 300)
    with pytest.raises(ValueError, match=r"count=3 is not in 1 \.\.\. 0"):
        batches.pieces(documents[:1], tokenizer, 10**6, 3)
    with pytest.raises(ValueError, match="length=0 must be an integer, at least 1"):
        batches.pieces(documents[:1], tokenizer, 0, 3)
