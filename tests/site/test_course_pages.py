"""The built site: its first page, the strip below each title, the table, and ways on."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import Visitor
from editions import translation
from gallery import pages

COURSE = [pages.document(name)[1:] for name in pages.in_order()]
#: Made by Sphinx, in no sequence.
LISTS = {"search.html", "genindex.html", "py-modindex.html"}


def article(site: Path, document: str) -> str:
    page = (site / f"{document}.html").read_text(encoding="utf-8")
    return page[page.index("<article") : page.index("</article>")]


@pytest.mark.parametrize("name", pages.in_order())
def test_strip_below_the_title(site: Path, name: str) -> None:
    text = article(site, pages.document(name)[1:])
    found = re.search(r'</h1>\s*<ul class="page-facts[^"]*">(.*?)</ul>', text, re.S)
    assert found, "no strip below the title"
    assert f"{pages.minutes(name)} minutes to read" in found[1]
    for other in pages.needs(name):
        end = pages.document(other).rpartition("/")[2]
        assert f'{end}.html"' in found[1]
    if pages.exercises(name):
        assert 'href="#exercises"' in found[1] and 'id="exercises"' in text
    assert ("in depth, beside" in found[1]) != pages.is_lesson(name)
    assert (" to follow" in found[1]) == pages.is_lesson(name)
    if pages.is_lesson(name):
        chapter = [one for one in pages.lessons() if Path(one).parent == Path(name).parent]
        here = f"Lesson {chapter.index(name) + 1} of {len(chapter)}"
        assert here in found[1]
        page = (site / f"{pages.document(name)[1:]}.html").read_text(encoding="utf-8")
        assert f'<p class="place">{here}</p>' in page
    assert not re.findall(r'href="(?![^"]*_downloads)[^"]*\.ipynb"', text)
    for package in pages.packages(name):
        assert f"needs {package}" in found[1]


@pytest.mark.parametrize("edition", translation.EDITIONS)
def test_ways_on(site: Path, edition: str) -> None:
    """Every page but the lists leads on and back; the first and the last have one way."""
    forward = backward = 0
    root = site if edition == translation.FIRST else site / edition
    others = tuple(f"{language}/" for language in translation.EDITIONS)
    for path in sorted(root.rglob("*.html")):
        name = path.relative_to(root).as_posix()
        if name in LISTS or name.startswith(("_static/", *others)):
            continue
        text = path.read_text(encoding="utf-8")
        forward += 'class="right-next"' not in text
        backward += 'class="left-prev"' not in text
        if name != "index.html":
            assert 'class="left-prev"' in text, f"{name} does not lead back"
    assert (forward, backward) == (1, 1)


def test_few_entries_in_the_bar(visit: Visitor, server: str) -> None:
    page = visit().open(f"{server}/index.html")
    entries = page.locator(".navbar-header-items a.nav-link, .bd-header a.nav-link")
    names = {name.strip() for name in entries.all_inner_texts()} - {
        "",
        *translation.EDITIONS.values(),
    }
    assert {"Tutorials", "Questions", "Teach"} <= names and len(names) <= 6
    assert page.locator(".bd-header .dropdown-toggle", has_text="More").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_first_visit_on_a_phone(visit: Visitor, server: str, theme: str) -> None:
    """Title, one sentence, the model, the way in, paths: in this order, and nothing cut off."""
    view = visit(theme=theme, width=375)
    page = view.open(f"{server}/index.html")
    places = []
    for selector in ("h1", ".lead p", "#live-next", ".start-here", ".paths", "#set-up"):
        box = page.locator(selector).first.bounding_box()
        assert box and box["width"] > 200, selector
        places.append((box["y"], box["y"] + box["height"]))
    assert all(above[1] <= below[0] + 1 for above, below in pairwise(places))
    assert places[2][0] < 900, "the model begins below the first screen"
    assert page.locator(".start-here a").get_attribute("href") == "tour.html"
    assert page.locator(".paths .sd-card").count() == 3
    assert view.problems == []


def test_the_course_is_a_page(site: Path) -> None:
    text = article(site, "course")
    for document in COURSE:
        assert f'href="{document}.html"' in text


def test_the_course_fits_a_phone(visit: Visitor, server: str) -> None:
    page = visit(width=375).open(f"{server}/course.html")
    wide = page.locator("table.course").evaluate("one => one.getBoundingClientRect().right")
    assert wide <= 375


def test_a_gallery_shows_lessons(site: Path) -> None:
    """Each once; pages in depth are reached from theirs."""
    whole = article(site, "auto_tutorials/index").count('class="sphx-glr-thumbcontainer"')
    assert whole == sum(not name.startswith("gpu/") for name in pages.lessons())
    for chapter in pages.chapters():
        text = article(site, f"auto_tutorials/{chapter.name}/index")
        shown = re.findall(r'<a class="reference internal" href="(\w+)\.html"', text)
        names = [path.stem for path in pages.pages(chapter)]
        lessons = [name for name in names if pages.is_lesson(f"{chapter.name}/{name}")]
        assert [name for name in dict.fromkeys(shown) if name in names] == lessons
