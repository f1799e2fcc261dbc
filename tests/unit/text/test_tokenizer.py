"""tokenizer.py: every string comes back; the readable algorithm equals the library's."""

from collections import Counter
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from lm_from_scratch.text.corpora import reference
from lm_from_scratch.text.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    apply_merges,
    count_pairs,
    learn_merges,
    merge_pair,
)

TEXTS = [document.text for document in reference()[:25]]
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=600)


@settings(max_examples=300)
@given(st.text())
@example("")
@example("  \t\r\n\0 \x7f\u00a0")
@example("안녕 썐 😀 👩‍👩‍👧 e\u0301 \u202e")
@example(f"a{END_OF_TEXT}b")
@example("<|endoftext")
@example("\ufffd\ufeff\U0010ffff")
def test_decode_of_encode_is_the_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=100)
@given(st.text())
@example("ends with \ufffd")
@example("😀\ufffd\ufffd")
def test_stream_gives_the_text_and_never_half_a_character(text: str) -> None:
    pieces = list(TOKENIZER.stream(TOKENIZER.encode(text)))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_characters_do_not_collide_and_nothing_is_padding_by_accident() -> None:
    assert ord("썐") % 50000 == 0  # the historic tokenizer made this the pad token
    seen = {tuple(TOKENIZER.encode(c)) for c in "썐😀潠\0a"}
    assert len(seen) == 5
    assert all(TOKENIZER.eos_token_id not in ids for ids in seen)


def test_a_text_cannot_end_the_document() -> None:
    ids = TOKENIZER.encode(f"before {END_OF_TEXT} after")
    assert TOKENIZER.eos_token_id not in ids
    assert TOKENIZER.decode([TOKENIZER.eos_token_id]) == END_OF_TEXT


def test_save_and_load_give_the_same_ids(tmp_path) -> None:
    TOKENIZER.save(tmp_path)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    for where in (tmp_path, tmp_path / "tokenizer.json"):
        again = Tokenizer.load(where)
        assert again.encode(TEXTS[3]) == TOKENIZER.encode(TEXTS[3])
        assert again.encode(END_OF_TEXT) == TOKENIZER.encode(END_OF_TEXT)


def test_transformers_reads_the_file(tmp_path) -> None:
    from transformers import PreTrainedTokenizerFast

    TOKENIZER.save(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXTS[2], add_special_tokens=False) == TOKENIZER.encode(TEXTS[2])
    assert theirs.encode(TEXTS[2]) == TOKENIZER.start(TEXTS[2])


def test_special_tokens_and_vocabulary_size() -> None:
    made = Tokenizer.train(TEXTS, 400, special_tokens=[END_OF_TEXT, "<|tool|>"])
    assert made.vocab_size == 400
    assert made.decode([made.backend.token_to_id("<|tool|>")]) == "<|tool|>"
    small = Tokenizer.train(["aa"], 4000)
    assert small.vocab_size < 300  # no pairs left
    assert small.decode(small.encode("zebra")) == "zebra"


def test_training_is_repeatable() -> None:
    assert Tokenizer.train(TEXTS, 600).backend.to_str() == TOKENIZER.backend.to_str()


def test_bad_input_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="vocab_size=200 is too small"):
        Tokenizer.train(TEXTS, 200)
    with pytest.raises(ValueError, match="need a name"):
        Tokenizer.train(TEXTS, 400, special_tokens=[""])
    for name in ("a:b", "$A"):
        with pytest.raises(ValueError, match="must not hold ':'"):
            Tokenizer.train(TEXTS[:1], 300, end_token=name)
    with pytest.raises(ValueError, match=r"surrogate pair.*index 2"):
        TOKENIZER.encode("ab\ud800")
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match=f"token id {bad}"):
            TOKENIZER.decode([bad])
    with pytest.raises(ValueError, match="no tokenizer at"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="can be read"):
        Tokenizer.load(tmp_path)
    other = tokenizers.Tokenizer(models.BPE())
    assert Tokenizer(other).eos_token_id is None
    with pytest.raises(ValueError, match="has no '<s>' token"):
        Tokenizer(other, "<s>")
    with pytest.raises(ValueError, match="a list where a text is needed"):
        TOKENIZER.encode(["a", "b"])
    with pytest.raises(ValueError, match="encode takes one"):
        TOKENIZER.encode_batch("ab")


def test_any_token_may_end_a_text_and_names_of_tokens_are_not_learned() -> None:
    texts = [f"{name}{text}{name}" for name in ("<end>", "<end>x") for text in TEXTS[:5]] * 5
    made = Tokenizer.train(texts, 500, ["<end>x"], end_token="<end>")
    assert made.decode([made.eos_token_id]) == "<end>"
    assert made.start("a") == [made.eos_token_id, *made.encode("a")]
    plain = Tokenizer.train(TEXTS[:5] * 10, 500, ["<end>x"], end_token="<end>")
    assert made.backend.to_str() == plain.backend.to_str()
    text = "a<end>b<end>xc"
    assert made.decode(made.encode(text)) == made.decode(made.encode(text, special=True)) == text
    assert made.eos_token_id not in made.encode(text)
    special = [made.backend.token_to_id(name) for name in ("<end>", "<end>x")]
    assert [i for i in made.encode(text, special=True) if i in special] == special


# ------------------------------------------------------------------ the algorithm, to be read


def test_counting_and_merging() -> None:
    words = {("a", "b", "a", "b"): 2, ("b", "a"): 5}
    assert count_pairs(words) == {("a", "b"): 4, ("b", "a"): 7}
    assert merge_pair(("a", "a", "a"), ("a", "a")) == ("aa", "a")
    assert merge_pair((), ("a", "b")) == ()


def library_merges(words: dict[str, int], n: int) -> list[tuple[str, str]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    alphabet = len({c for word in words for c in word})
    trainer = trainers.BpeTrainer(vocab_size=alphabet + n, show_progress=False)
    backend.train_from_iterator([word for word, k in words.items() for _ in range(k)], trainer)
    import json

    return [tuple(m) for m in json.loads(backend.to_str())["model"]["merges"]]


@settings(max_examples=60)
@given(
    st.dictionaries(st.text("abcd", min_size=1, max_size=8), st.integers(1, 9), max_size=12),
    st.integers(1, 12),
)
def test_learned_merges_equal_the_library(words: dict[str, int], n: int) -> None:
    if not words:
        return
    ours = learn_merges({tuple(word): count for word, count in words.items()}, n)
    theirs = library_merges(words, n)
    assert ours[: len(theirs)] == theirs


def test_applied_merges_equal_the_library_on_real_words() -> None:
    counts = Counter(word for text in TEXTS for word in text.split() if word.isascii())
    words = dict(counts.most_common(400))
    merges = learn_merges({tuple(word): count for word, count in words.items()}, 80)
    assert merges == library_merges(words, 80)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(sorted({*"".join(words), *map("".join, merges)}))},
            merges=merges,
        )
    )
    for word in words:
        assert list(apply_merges(word, merges)) == backend.encode(word).tokens


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    ids = TOKENIZER.encode("a😀")[:-1]
    assert "".join(TOKENIZER.stream(ids)) == TOKENIZER.decode(ids)


def test_pieces_join_to_the_text() -> None:
    ids = TOKENIZER.encode("the value of x")
    assert "".join(TOKENIZER.pieces(ids)) == "the value of x"
    assert all(a != b or a for a, b in pairwise(TOKENIZER.pieces(ids)))
