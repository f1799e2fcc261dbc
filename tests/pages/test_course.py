"""What a page says of itself, and what the site makes of that: strip, plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from course import first_evening, plans
from gallery import exercises, navigation, pages

PAGES = pages.in_order()
each_page = pytest.mark.parametrize("name", PAGES)


@each_page
def test_links_between_pages_lead_to_pages(name: str) -> None:
    for block in pages.blocks(pages.source(name)):
        for link in pages.LINK.finditer(block.content):
            assert pages.target(name, link) in PAGES, link[0]


@each_page
def test_what_a_page_needs_comes_before_it(name: str) -> None:
    """In reading order, so that there is no circle either."""
    assert set(pages.needs(name)) <= set(PAGES[: PAGES.index(name)])


def test_links_become_links_to_documents() -> None:
    text = (
        "Read `GPT-2 <../1_gpt2/2_gpt2.ipynb>`_ and `norms <1_rms_norm.ipynb>`_, `x <http://a.b>`_."
    )
    assert pages.with_documents("2_qwen2/2_rope", text, ":doc:`{} <{}>`") == (
        "Read :doc:`GPT-2 </auto_tutorials/1_gpt2/2_gpt2>` and "
        ":doc:`norms </auto_tutorials/2_qwen2/1_rms_norm>`, `x <http://a.b>`_."
    )
    kernel = pages.with_documents("gpu/2_softmax", "`one <1_swiglu.ipynb>`_", ":doc:`{} <{}>`")
    assert kernel == ":doc:`one </gpu/1_swiglu>`"


def test_minutes_follow_the_rule() -> None:
    text = "word " * 2000 + "\n\n.. math::\n\n   a = b\n\n.. math::\n\n   c\n\nhttps://a.org/b/c\n"
    code = "# a comment\n\n" + "x = 1\n" * 80
    blocks = [SimpleNamespace(type=t, content=c) for t, c in (("text", text), ("code", code))]
    assert pages.minutes_of(blocks) == (15, 22)  # 10 and 4 and 1, or 10 and 10 and 2


@each_page
def test_every_page_has_its_facts(name: str) -> None:
    assert pages.minutes(name) < 90
    assert pages.exercises(name) >= pages.is_lesson(name)
    assert (pages.packages(name) == ["triton"]) == name.startswith("gpu/")


def test_packages_are_those_beyond_the_core() -> None:
    assert pages.packages("1_gpt2/1_tokens") == []
    assert pages.packages("1_gpt2/2a_gpt2_in_depth") == ["transformers"]
    core = {"torch", "numpy", "matplotlib", "tokenizers", "lm_from_scratch"}
    assert not core & {package for name in PAGES for package in pages.packages(name)}


def test_only_pages_of_the_course_have_a_strip() -> None:
    assert pages.page_of("auto_tutorials/1_gpt2/1_tokens") == "1_gpt2/1_tokens"
    assert pages.page_of("gpu/1_swiglu") == "gpu/1_swiglu"
    assert pages.page_of("index") is None
    assert pages.page_of("auto_tutorials/index") is None


# -- lessons and what is beside them ----------------------------------------------------------


def test_an_in_depth_page_has_its_lesson() -> None:
    for name in PAGES:
        lesson = pages.lesson(name)
        assert pages.is_lesson(lesson) and lesson.partition("/")[0] == name.partition("/")[0]
        assert pages.is_lesson(name) == (lesson == name)
        assert pages.is_lesson(name) or lesson in pages.needs(name)


def test_each_in_depth_page_is_below_one_lesson() -> None:
    """And below no in-depth page: the sidebar would go round in a circle."""
    below = [page for name in pages.in_order() for page in pages.in_depth(name)]
    assert sorted(below) == sorted(set(pages.in_order()) - set(pages.lessons()))


def test_the_path_leads_from_lesson_to_lesson() -> None:
    path = pages.lessons()
    assert navigation.beside(path[0]) == (None, path[1])
    assert navigation.beside(path[-1]) == (path[-2], None)
    for name in set(PAGES) - set(path):
        lesson = pages.lesson(name)
        assert navigation.beside(name) == (lesson, navigation.beside(lesson)[1])


def test_minutes_of_the_first_evening() -> None:
    assert first_evening.minutes("auto_tutorials/1_gpt2/2_gpt2") == pages.minutes("1_gpt2/2_gpt2")
    assert 3 <= first_evening.minutes("tour") <= 10


# -- plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", plans.PLANS)
def test_a_plan_can_be_followed(number: int) -> None:
    """Every page once and in order, after what it needs; exercises after theirs."""
    _, hardest = plans.PLANS[number]
    weeks = plans.weeks(number)
    assert len(weeks) == number and all(week.pages for week in weeks)
    taken = [name for week in weeks for name in week.pages]
    assert taken == sorted(set(taken), key=PAGES.index)
    assert all(pages.behind(name) & {*pages.lessons()} <= set(taken) for name in taken)
    week_of = {one.name: i for i, week in enumerate(weeks) for one in week.exercises}
    week_of |= {name: i for i, week in enumerate(weeks) for name in week.pages}
    for one in exercises.written():
        if one.name in week_of:
            assert one.difficulty <= hardest
            assert all(week_of[name] <= week_of[one.name] for name in [one.page, *one.after])


def test_the_start_from_zero_is_a_week_of_its_own() -> None:
    """Its exercises too, so that a class may leave it out, or begin a shorter plan with it."""
    zero = [name for name in pages.lessons() if name.startswith("0_")]
    first, *others = plans.weeks(12)
    assert first.pages == zero
    assert all(one.page in zero for one in first.exercises)
    assert not any(one.page in zero for week in others for one in week.exercises)
    assert not any(name in zero for week in plans.weeks(6) for name in week.pages)


def test_the_long_plan_has_every_lesson() -> None:
    taken = plans.pages_to(plans.PLANS[12][0])
    lessons = pages.lessons()
    assert {name for name in lessons if not name.startswith("gpu/")} <= set(taken) <= set(lessons)
