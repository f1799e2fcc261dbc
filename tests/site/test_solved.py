"""Exercises that a reader ticks as solved: on the index, on their own pages, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import Visitor
from gallery import exercises
from playwright.sync_api import Browser, Page, expect
from test_site import ONE_OF_EACH, OVERFLOW, axe_faults

NAMES = [one.name for one in exercises.written()]
INDEX, PACKAGE = "exercises/index.html", "exercises/your_package.html"
KEY = "lm_from_scratch.solved"


def status(page: Page, count: int) -> None:
    expect(page.locator(".solved-box [role=status]")).to_have_text(
        f"{count} of {len(NAMES)} solved"
    )


def own_tick(page: Page) -> None:
    """The checkbox of an exercise's page, by the keyboard alone."""
    tick = page.get_by_role("checkbox", name="I have solved this exercise")
    tick.focus()
    page.keyboard.press("Space")
    expect(tick).to_be_focused()


def test_only_these_pages_load_the_script(site: Path) -> None:
    own = {INDEX, PACKAGE, *(f"exercises/{name}.html" for name in NAMES)}
    for path in site.rglob("*.html"):
        name = path.relative_to(site).as_posix()
        assert ("_static/solved.js" in path.read_text(encoding="utf-8")) == (name in own), name


def test_a_ticked_part_is_marked_in_the_picture_of_the_model(visit: Visitor, server: str) -> None:
    page = visit().open(f"{server}/{PACKAGE}")
    part = page.locator(".own-model a[href='rms_norm.html']")
    expect(part).not_to_have_class("is-solved")
    page.get_by_role("checkbox", name="Solved: RMSNorm").check()
    expect(part).to_have_class("is-solved")
    status(page, 1)


def test_a_tick_is_kept_from_page_to_page(visit: Visitor, server: str) -> None:
    view = visit()
    page = view.open(f"{server}/exercises/{NAMES[0]}.html")
    status(page, 0)
    own_tick(page)
    status(page, 1)
    page = view.open(f"{server}/{INDEX}")
    status(page, 1)
    ticks = page.locator("td input[type=checkbox]")
    expect(ticks).to_have_count(len(NAMES))
    expect(ticks.first).to_be_checked()
    ticks.nth(2).focus()
    page.keyboard.press("Space")
    status(page, 2)
    ticks.first.focus()
    page.keyboard.press("Space")
    status(page, 1)
    page = view.open(f"{server}/exercises/{NAMES[0]}.html")
    status(page, 1)
    expect(page.get_by_role("checkbox", name="I have solved")).not_to_be_checked()
    assert page.evaluate(f"JSON.parse(localStorage.getItem('{KEY}')).length") == 1
    assert view.problems == []


def test_every_exercise_has_its_tick_once(visit: Visitor, server: str) -> None:
    page = visit().open(f"{server}/{INDEX}")
    rows = page.locator("tr:has(input[type=checkbox]) a[href]")
    places = [href for href in rows.evaluate_all("all => all.map((a) => a.getAttribute('href'))")]
    assert sorted(p for p in places if p in {f"{n}.html" for n in NAMES}) == sorted(
        f"{name}.html" for name in NAMES
    )
    for tick in page.locator("td input[type=checkbox]").all():
        title = tick.locator("xpath=following-sibling::a").first.inner_text()
        assert tick.get_attribute("aria-label") == f"Solved: {title}"


def test_other_links_to_a_solved_exercise_say_so(visit: Visitor, server: str) -> None:
    view = visit()
    own_tick(view.open(f"{server}/exercises/{NAMES[0]}.html"))
    page = view.open(f"{server}/{INDEX}")
    marked = page.locator(f".bd-article a.is-solved[href='{NAMES[0]}.html']")
    expect(marked.first).to_be_visible()
    expect(page.locator(f".bd-article a.is-solved[href='{NAMES[1]}.html']")).to_have_count(0)


def test_two_tabs_agree(visit: Visitor, server: str) -> None:
    view = visit()
    first = view.open(f"{server}/{INDEX}")
    second = first.context.new_page()
    second.goto(f"{server}/exercises/{NAMES[1]}.html")
    own_tick(second)
    status(first, 1)
    first.locator("td input[type=checkbox]").first.check()
    status(second, 2)


@pytest.mark.parametrize("kept", ["no JSON", "{}", "null", '["of last year", 7]'])
def test_what_is_kept_may_be_wrong(visit: Visitor, server: str, kept: str) -> None:
    view = visit(fresh=True)
    view.page.add_init_script(f"localStorage.setItem('{KEY}', {kept!r})")
    page = view.open(f"{server}/{INDEX}")
    status(page, 0)
    page.locator("td input[type=checkbox]").first.check()
    status(page, 1)
    assert view.problems == []


def test_a_browser_that_keeps_nothing_says_so(visit: Visitor, server: str) -> None:
    view = visit(fresh=True)
    view.page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no'); } })"
    )
    page = view.open(f"{server}/exercises/{NAMES[0]}.html")
    own_tick(page)
    said = f"1 of {len(NAMES)} solved (not kept by this browser)"
    expect(page.locator(".solved-box [role=status]")).to_have_text(said)


def test_without_scripts_there_is_nothing(browser: Browser, server: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        for name in (INDEX, f"exercises/{NAMES[0]}.html"):
            page.goto(f"{server}/{name}")
            expect(page.locator(".solved-box")).to_be_hidden()
            expect(page.locator("input[type=checkbox]:visible")).to_have_count(0)
    finally:
        context.close()


@pytest.mark.parametrize(("theme", "width"), [("light", 375), ("dark", 1280)])
def test_how_it_looks(visit: Visitor, server: str, theme: str, width: int) -> None:
    view = visit(theme=theme, width=width)
    for name in (f"exercises/{NAMES[0]}.html", INDEX):
        page = view.open(f"{server}/{name}")
        page.locator(".bd-article input[type=checkbox]").first.check()
        assert page.evaluate(OVERFLOW) == 0
        page.evaluate(ONE_OF_EACH, {"list": False})
        page.evaluate(Axe().axe_script)
        assert axe_faults(page, whole=True) == []
