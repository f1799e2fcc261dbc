"""Ten stories of the bug museum: with a picture, about mistakes that the museum has."""

from __future__ import annotations

import re

import pytest
from museum import cards, stories
from output.generated import story as page
from sources.templates import render


def test_there_are_ten_and_each_has_a_template() -> None:
    names = {path.stem for path in stories.FOLDER.glob("*.rst")}
    assert set(stories.STORIES) == names and len(names) == 10


@pytest.mark.parametrize("name", stories.STORIES)
def test_a_story_has_a_picture_and_its_numbers(name: str) -> None:
    text = page(name)  # what the prose says of its numbers is asserted where they are made
    picture = stories.values(name)["picture"]
    assert text.count(".. raw:: html") == 1 and picture.html in text and picture.says
    assert "\n" not in picture.html  # a line of its own below the directive
    for key, value in stories.values(name).items():
        assert key == "picture" or str(value) in text.replace(picture.html, ""), key
    assert re.findall(r"^(.+)\n-+$", text, re.M) == ["In your own code", "Where it happened"]


@pytest.mark.parametrize("story", stories.told(), ids=lambda story: story.name)
def test_its_mistakes_are_in_the_museum(story: stories.Story) -> None:
    assert story.numbers and set(story.numbers) <= set(cards.numbers())
    assert not cards.NUMBER.search(story.title + story.line)
    text = page(story.name)
    for number in story.numbers:
        mistake = cards.numbers()[number]
        assert f"   - {mistake.old}\n   + {mistake.new}\n" in text
        assert f":doc:`{story.title} </stories/{story.name}>`" in cards.where(
            number, stories.told()
        )


def test_they_are_spread_over_what_one_sees_and_where() -> None:
    numbers = [number for story in stories.told() for number in story.numbers]
    assert len({cards.numbers()[number].kind for number in numbers}) >= 4
    assert len({chapter for number in numbers for chapter in cards.chapters(number)}) >= 6


def test_the_museum_lists_them() -> None:
    text = render("museum.rst", **cards.index(stories.told()))
    for story in stories.told():
        assert f"* :doc:`{story.title} </stories/{story.name}>`. {story.line}\n" in text
        assert f"   stories/{story.name}\n" in text
    links = sum(len(story.numbers) for story in stories.told())
    assert text.count("      Story: :doc:`") == links
