"""The index of the bug museum: its numbers are those of pages, tests and hunts."""

from __future__ import annotations

import exercise_pages
import exercises
import museum


def test_pages_hunts_and_tests_name_numbers_that_exist() -> None:
    shown = {number for exhibit in museum.exhibits() for number in exhibit.shows()}
    assert shown <= set(museum.numbers())
    assert set(museum.tests()) <= set(museum.numbers())
    for one in exercises.written():
        assert set(museum.numbers_in(one.hunt)) <= set(museum.numbers())


def test_every_number_has_a_test() -> None:
    assert set(museum.numbers()) - set(museum.tests()) == set()


def test_every_exhibit_says_what_it_is_about() -> None:
    """In whole sentences of its page, which the index quotes."""
    for exhibit in museum.exhibits():
        if not exhibit.shows():
            assert exhibit.about().endswith((".", "?", "!")), exhibit.title


def test_every_hunt_leads_to_the_index() -> None:
    for one in exercises.written():
        for number in museum.numbers_in(one.hunt):
            assert f"<{museum.label(number)}>`" in exercise_pages.page(one)


def test_numbers_are_told_from_other_words() -> None:
    text = "G25 (Q4), an L2 penalty, the L2 cache, ``T7``, T10, K0 and sm_K1. Numbered G1, G2, ..."
    assert museum.numbers_in(text) == ["G25", "Q4", "T10"]
