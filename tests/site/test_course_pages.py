"""The built site: its first page, the strip below each title, the graph, and ways on."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import course
import exercise_pages
import pytest
from conftest import Visit

Visitor = Callable[..., Visit]
COURSE = [exercise_pages.document(page)[1:] for page in course.in_order()]
#: Made by Sphinx, in no sequence.
LISTS = {"search.html", "genindex.html", "py-modindex.html"}


def article(site: Path, document: str) -> str:
    page = (site / f"{document}.html").read_text(encoding="utf-8")
    return page[page.index("<article") : page.index("</article>")]


def test_stored_seconds_are_those_of_this_build(site: Path) -> None:
    assert course.check_seconds(site.parent / "gallery_junit.xml") == []


@pytest.mark.parametrize("page", course.in_order())
def test_strip_below_the_title(site: Path, page: str) -> None:
    text = article(site, exercise_pages.document(page)[1:])
    found = re.search(r'</h1>\s*<ul class="page-facts[^"]*">(.*?)</ul>', text, re.S)
    assert found, "no strip below the title"
    assert f"{course.minutes(page)} minutes to read" in found[1]
    assert f"runs in about {course.duration(course.seconds(page) or 0)}" in found[1]
    for name in course.NEEDS[page]:
        end = exercise_pages.document(name).rpartition("/")[2]
        assert f'{end}.html"' in found[1]
    assert 'href="#exercises"' in found[1] and 'id="exercises"' in text
    for package in course.packages(page):
        assert f"needs {package}" in found[1]


def test_ways_on(site: Path) -> None:
    """Every page but the lists leads on and back; the first and the last have one way."""
    forward = backward = 0
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if name in LISTS or name.startswith("_static/"):
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
    names = {name.strip() for name in entries.all_inner_texts()} - {""}
    assert {"Tutorials", "Look up", "API"} <= names and len(names) <= 6
    assert page.locator(".bd-header .dropdown-toggle", has_text="More").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_first_visit_on_a_phone(visit: Visitor, server: str, theme: str) -> None:
    """Title, one sentence, result, paths: in this order, and nothing cut off."""
    view = visit(theme=theme, width=375)
    page = view.open(f"{server}/index.html")
    places = []
    for selector in ("h1", ".lead p", ".living-result", ".paths", "#set-up"):
        box = page.locator(selector).first.bounding_box()
        assert box and box["width"] > 200, selector
        places.append((box["y"], box["y"] + box["height"]))
    assert all(above[1] <= below[0] + 1 for above, below in pairwise(places))
    assert places[2][0] < 900, "the result begins below the first screen"
    assert page.locator(".paths .sd-card").count() == 3
    # Text of the figure that is wider than the figure would be cut off.
    cut = page.evaluate("""
      () => [...document.querySelectorAll('.living-result svg')].flatMap(svg => {
        const edge = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => {
          const box = text.getBoundingClientRect();
          return box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1;
        }).map(text => text.textContent);
      })""")
    assert cut == []
    assert view.problems == []


def test_graph_by_keyboard(visit: Visitor, server: str) -> None:
    """Each node is a link that the keyboard reaches, in the order of the figure."""
    view = visit()
    page = view.open(f"{server}/course.html")
    links = page.locator("svg.prerequisites a")
    assert [link.get_attribute("href") for link in links.all()] == [f"{c}.html" for c in COURSE]
    links.first.focus()
    page.keyboard.press("Tab")
    focused = page.evaluate("() => document.activeElement.getAttribute('href')")
    assert focused == f"{COURSE[1]}.html"
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.url == f"{server}/{COURSE[1]}.html"
    assert view.problems == []


@pytest.mark.parametrize("name", ["course", "teaching"])
def test_no_text_of_the_graph_is_cut_off(visit: Visitor, server: str, name: str) -> None:
    page = visit(width=375).open(f"{server}/{name}.html")
    wide = page.evaluate("""
      () => [...document.querySelectorAll('svg.prerequisites')].flatMap(svg => {
        const edge = svg.getBoundingClientRect().right;
        return [...svg.querySelectorAll('text')]
          .filter(text => text.getBoundingClientRect().right > edge + 1)
          .map(text => text.textContent);
      })""")
    assert wide == []


def test_the_course_is_a_page(site: Path) -> None:
    text = article(site, "course")
    for document in COURSE:
        assert text.count(f'href="{document}.html"') >= 2  # figure and table
