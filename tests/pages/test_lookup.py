"""The index of the bug museum: its numbers are those of pages, tests and hunts."""

from __future__ import annotations

import exercise_pages
import exercises
import museum


def test_pages_hunts_and_tests_name_numbers_that_exist() -> None:
    shown = {number for one in museum.exhibits() for number in museum.NUMBER.findall(one.title)}
    assert shown <= set(museum.numbers())
    assert set(museum.tests()) <= set(museum.numbers())
    for one in exercises.written():
        assert set(museum.NUMBER.findall(one.hunt)) <= set(museum.numbers())


def test_every_number_has_a_test() -> None:
    assert set(museum.numbers()) - set(museum.tests()) == set()


def test_every_hunt_leads_to_the_index() -> None:
    for one in exercises.written():
        for number in museum.NUMBER.findall(one.hunt):
            assert f"<{museum.label(number)}>`" in exercise_pages.page(one)
