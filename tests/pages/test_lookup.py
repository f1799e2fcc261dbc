"""The pages for looking things up: glossary, symbols, the index of the bug museum."""

from __future__ import annotations

import re
from pathlib import Path

import course
import exercise_pages
import exercises
import gallery
import museum
import notebooks
import pytest
import symbols

from lm_from_scratch.checkpoint import GPT2_NAMES, QWEN2_NAMES

DOCS = gallery.DOCS
PAGES = {page: exercise_pages.script(page) for page in course.in_order()}

# -- glossary --------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    text = (DOCS / "glossary.rst").read_text(encoding="utf-8")
    found = re.findall(r"^   (\S.*)\n      (\S.*)$", text, re.M)
    assert len(found) == len(dict(found)), "a term is there twice"
    return dict(found)


def test_the_glossary_is_alphabetical_and_links_to_pages_that_exist() -> None:
    terms = entries()
    assert len(terms) > 150
    assert list(terms) == sorted(terms, key=str.lower)
    for term, meaning in terms.items():
        page = re.search(r" Page: :doc:`/(?:auto_tutorials/)?([^`]+)`\.$", meaning)
        other = re.search(r"See :term:`([^`]+)`\.$", meaning)
        assert page or other, term
        if page and "/" in page[1] and not page[1].startswith("exercises"):
            assert page[1] in PAGES, term
        if other:
            assert other[1] in terms, term


#: Words that readers bring along, where the pages use others.
BROUGHT_ALONG = {
    "acceptance rate", "activation checkpointing", "autoregressive",
    "classification head", "context length", "grouped-query attention", "KL divergence",
    "logit processor", "MQA", "normalisation", "process group", "rotary position embedding",
    "split-KV", "tensor swapping", "weight tying", "weight-only quantisation",
}  # fmt: skip


def test_a_term_is_used_on_some_page() -> None:
    pages = [script.read_text(encoding="utf-8").replace("#", " ") for script in PAGES.values()]
    text = " ".join(" ".join(pages).split()).lower()
    words = {term: re.sub(r" \(.*\)$", "", term).rstrip("y").lower() for term in entries()}
    there = {term for term, word in words.items() if word in text}
    others = {"bug hunt"}  # of the exercises
    assert set(words) - there - others == BROUGHT_ALONG


# -- symbols ---------------------------------------------------------------------------------

#: Words of a sentence on letters that name no axis.
IDLE = {
    "width",
    "of",
    "a",
    "the",
    "and",
    "all",
    "is",
    "are",
    "number",
    "here",
    "in",
    "package",
    "entries",
}


def letters() -> list[tuple[list[str], set[str], list[str]]]:
    """The tables of axes: letters, the words of their meaning, the pages where it holds."""
    found = []
    text = (DOCS / "symbols.rst").read_text(encoding="utf-8")
    for row in re.findall(r"^   \* - (.+)\n     - (.+)\n     -(.*)$", text, re.M):
        if re.fullmatch(r"[A-Za-z]{1,3}(, [A-Za-z])*", row[0]) and row[0] != "letter":
            where = re.findall(r":doc:`/(?:auto_tutorials/)?([^`]+)`", row[2])
            found.append((row[0].split(", "), words(row[1]), where))
    return found


def words(text: str) -> set[str]:
    found = re.findall(r"[a-z]+", text.lower().replace("hidden state", "state token"))
    return {word for word in found if len(word) > 1} - IDLE


def said(text: str) -> list[tuple[list[str], str]]:
    """The letters and meanings of a page's sentences "Letters name axes: ..."."""
    found = []
    sentence = re.search(r"Letters name axes[^:]*:\s(.*?)(?=\n\n|\Z)", text, re.S)
    for part in re.split(r",\s+|\.\s+", " ".join(sentence[1].split())) if sentence else ():
        part = part.removeprefix("and ").rstrip(".")
        letter = r"[A-Z](?:kv)?|[nt]"
        if group := re.search(r"groups of ([A-Z]) (\S+)", part):
            found.append(([group[1]], group[2]))
            continue
        if each := re.match(r"A \S+ has ([a-z]) (\S+)", part):
            found.append(([each[1]], each[2]))
            continue
        two = re.match(rf"({letter}) is (.*) and ({letter}) (.*)$", part)
        if two:
            found += [([two[1]], two[2]), ([two[3]], two[4])]
            continue
        both = re.match(rf"({letter}) and ({letter}) (?:the )?(\S.*) and (\S.*?)( of .*)?$", part)
        one = re.match(rf"({letter}) (?:is |= \S+ / \S+ )?(?:the )?(\S.*)$", part)
        if both:
            found += [([both[1]], both[3]), ([both[2]], both[4])]
        elif one:
            found.append(([one[1]], one[2]))
    return found


def wrong_letters(page: str, text: str) -> list[str]:
    problems = []
    for (letter,), meaning in said(text):
        rows = [row for row in letters() if letter in row[0]]
        own = [row for row in rows if page in row[2]] or [row for row in rows if not row[2]]
        if not any(words(meaning) <= row[1] for row in own):
            problems.append(f"{letter} {meaning}")
    return problems


WITH_LETTERS = [
    page for page, script in PAGES.items() if "Letters name axes" in script.read_text("utf-8")
]


def prose(page: str) -> str:
    blocks = notebooks.blocks(PAGES[page])
    return "\n\n".join(block[1] for block in blocks if block[0] == "text")


@pytest.mark.parametrize("page", WITH_LETTERS)
def test_letters_mean_what_the_table_says(page: str) -> None:
    text = prose(page)
    assert len(said(text)) >= 3
    assert wrong_letters(page, text) == []


def test_a_letter_with_another_meaning_is_found() -> None:
    text = "Letters name axes: B rows, T tokens, S words, Hkv key heads. L is the number of words."
    assert wrong_letters("1_gpt2/2_gpt2", text) == ["S words", "L number of words"]
    text = "Letters name axes: K labels of a row."
    assert wrong_letters("4_classification/1_sequences", text) != []
    assert wrong_letters("1_gpt2/2_gpt2", "Letters name axes: K labels.") == ["K labels"]


def test_config_names_are_those_of_the_checkpoint() -> None:
    table = symbols.config_names()
    for name, theirs in [*GPT2_NAMES.items(), *QWEN2_NAMES.items()]:
        assert re.search(rf"- ``{name}``\n(     - .*\n)?     - ``{theirs}``", table)


# -- bug museum ------------------------------------------------------------------------------


def test_every_exhibit_is_in_the_index_and_the_other_way_round() -> None:
    unnumbered = {(section.page, section.title) for section in museum.unnumbered()}
    written = {(page, title) for page, d in museum.data()["unnumbered"].items() for title in d}
    assert unnumbered == written
    shown = {number for section in museum.exhibits() for number in section.shows()}
    assert shown <= set(museum.numbers())
    assert set(museum.mentioned()) <= set(museum.numbers())
    assert set(museum.hunts()) <= set(museum.numbers())
    assert set(museum.tests()) <= set(museum.numbers())


def test_every_page_has_a_museum() -> None:
    """A page without one says so here."""
    with_one = {section.page for section in museum.exhibits()}
    assert set(PAGES) - with_one == set()


def test_every_number_has_a_test() -> None:
    assert set(museum.numbers()) - set(museum.tests()) == set()


def test_numbers_have_no_gap() -> None:
    for letter in museum.data()["sources"]:
        found = [int(number) for number in museum.data()[letter]]
        assert found == list(range(1, len(found) + 1))


def test_pages_on_a_subject_exist() -> None:
    for number, place in museum.data()["see"].items():
        assert number in museum.numbers()
        assert museum.find(place)


def test_every_hunt_leads_to_the_index() -> None:
    for one in exercises.written():
        if one.hunt:
            text = exercise_pages.page(one)
            found = museum.NUMBER.findall(one.hunt)
            assert found or one.name in museum.data()["hunts"]
            for number in found:
                assert f"<{museum.label(number)}>`" in text


def test_numbers_are_told_from_other_words() -> None:
    section = museum.Section("x", "", "", "", False, False)
    text = "G25 (Q4), an L2 penalty, the L2 cache, ``T7``, T10, K0 and sm_K1. Numbered G1, G2, ..."
    assert section.numbers(text) == ["G25", "Q4", "T10"]
    assert museum.Section("gpu/8_galore", "", "", "", False, False).numbers("G1 G2 G3") == ["G3"]


def test_the_index_has_a_row_for_each_number(tmp_path: Path) -> None:
    text = museum.index()
    for number in museum.numbers():
        assert text.count(f".. _{museum.label(number)}:") == 1
    for section in museum.exhibits():
        assert museum.place(section) in text
