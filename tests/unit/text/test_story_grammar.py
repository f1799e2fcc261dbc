"""What is written is read again, word for word, in both languages."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_from_scratch.text.plots import PlotConfig, make_plot
from lm_from_scratch.text.story_grammar import (
    GRAMMAR,
    LANGUAGES,
    SLOTS,
    Sentence,
    cut,
    read,
    slots,
    write,
)


@st.composite
def any_sentence(draw: st.DrawFn) -> Sentence:
    """Of any kind, with any words: also what no world allows."""
    kind = draw(st.sampled_from(list(GRAMMAR)))
    words = []
    for slot in slots(kind):
        names = st.sampled_from(list(SLOTS[slot]))
        several = st.lists(names, min_size=1, max_size=5).map(tuple)
        words.append(draw(several if slot == "some" else names))
    return Sentence(kind, tuple(words))


@given(any_sentence(), st.sampled_from(LANGUAGES))
@settings(max_examples=300, deadline=None)
def test_a_written_sentence_is_read_again(sentence: Sentence, language: str) -> None:
    text = write([sentence], language)
    assert read(text) == sentence and write([read(text)], language) == text and cut(text) == [text]


@given(st.integers(0, 2**32), st.sampled_from(LANGUAGES))
@settings(max_examples=30, deadline=None)
def test_a_story_is_cut_into_its_sentences(seed: int, language: str) -> None:
    plot = make_plot(PlotConfig(), Random(seed))
    assert [read(text) for text in cut(write(plot, language))] == plot


def test_both_languages_have_the_same_slots_and_no_name_twice() -> None:
    for kind, texts in GRAMMAR.items():
        assert all(text.count(f"{{{slot}}}") == 1 for slot in slots(kind) for text in texts), kind
        assert all(text.count("{") == len(slots(kind)) for text in texts), kind
    for names in SLOTS.values():
        assert len(set(names.values())) == len(names)


def test_no_sentence_is_of_two_kinds() -> None:
    """One of each kind is read as that kind alone, whichever stands first in the grammar."""
    for kind in GRAMMAR:
        words = [next(iter(SLOTS[slot])) for slot in slots(kind)]
        words = [(w,) if slot == "some" else w for w, slot in zip(words, slots(kind))]
        for language in LANGUAGES:
            assert read(write([Sentence(kind, tuple(words))], language)).kind == kind


def test_the_two_examples_of_the_docstring() -> None:
    sentence = Sentence("put", ("Mia", "key", "box"))
    assert write([sentence]) == "Mia puts the key in the box."
    assert write([sentence], "chinese") == "米娅把钥匙放进了箱子。"


def test_lists_of_one_two_and_three() -> None:
    for things, english, chinese in (
        (("key",), "the key", "钥匙"),
        (("key", "map"), "the key and the map", "钥匙和地图"),
        (("key", "map", "box"), "the key, the map and the box", "钥匙、地图和箱子"),
    ):
        sentence = Sentence("has", ("Mia", things))
        assert write([sentence]) == f"Mia has {english}."
        assert write([sentence], "chinese") == f"米娅拿着{chinese}。"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: write([], "latin"), r"language='latin' must be one of english, chinese"),
        (lambda: write([Sentence("fly", ("Mia",))]), r"kind='fly' is not one of go, run"),
        (lambda: write([Sentence("go", ("Mia",))]), r"'go' takes .*, not the words \('Mia',\)"),
        (lambda: write([Sentence("go", ("Mia", "moon"))]), r"room='moon' is not one of kitchen"),
        (lambda: write([Sentence("put", ("Mia", "box", "bag"))]), r"thing='box' is not one of"),
        (lambda: read("Mia goes to the moon."), r"no sentence of the grammar: 'Mia goes to the"),
        (lambda: read("Mia goes to the kitchen"), r"no sentence of the grammar"),
        (lambda: read("x" * 500 + "\n"), r"^no sentence of the grammar: 'x{80}'$"),
    ],
)
def test_what_the_grammar_does_not_know_is_refused_in_one_line(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
