"""Editions in other languages: nothing is left in English, links lead on in either edition, a
widget speaks the language, and the search answers in it."""

from __future__ import annotations

import json
import re
import tomllib
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SITE, Visitor
from editions import translation
from test_search import FOUND

OTHERS = [language for language in translation.EDITIONS if language != translation.FIRST]
each = pytest.mark.parametrize("language", OTHERS)
#: So many queries have a right page among the first three.
ENOUGH = {"zh_CN": 41}


def queries(language: str) -> list[dict[str, Any]]:
    text = Path(__file__).with_name(f"queries_{language}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["query"]


@each
def test_every_page_is_there_and_every_message_translated(language: str) -> None:
    names = translation.pages(language)
    assert names
    for name in names:
        text = (SITE / language / f"{name}.html").read_text(encoding="utf-8")
        assert f'<html lang="{language.replace("_", "-")}"' in text
        left = re.findall(r'class="[^"]*\buntranslated\b[^"]*"[^>]*>([^<]*)', text)
        assert left == [], f"{name}: out of date, or not translated"
        assert not re.search(r'title="[^"/]+/auto_tutorials/', text), f"{name}: a path as text"
        english = {
            message
            for message, translation in translation.words(language, name).items()
            if translation != message and not re.search(r"[`*:|<_]", message)
        }
        outside = re.sub(r"(?s)<svg\b.*?</svg>", "", text)
        shown = {" ".join(unescape(words).split()) for words in re.findall(r">([^<>]+)<", outside)}
        assert not english & shown, f"{name}: a translation that Sphinx left out"


@each
def test_the_switch_leads_to_the_same_page_or_to_the_first(
    visit: Visitor, server: str, language: str
) -> None:
    view = visit()
    name = translation.EDITIONS[language]
    for page, there in (
        ("tour", "tour"),
        ("museum", "index"),
        ("auto_tutorials/1_gpt2/1_tokens",) * 2,
    ):
        opened = view.open(f"{server}/{page}.html")
        opened.locator(".language-switch").first.get_by_text(name).click()
        opened.wait_for_url(f"**/{language}/{there}.html")
        opened.locator(".language-switch").first.get_by_text("English").click()
        opened.wait_for_url(f"{server}/{there}.html")
    assert view.problems == []


@each
def test_a_page_that_is_not_translated_is_a_link_into_the_first_edition(
    visit: Visitor, server: str, language: str
) -> None:
    view = visit()
    page = view.open(f"{server}/{language}/auto_tutorials/1_gpt2/2_gpt2.html")
    links = page.locator("a.other-edition").evaluate_all("links => links.map(link => link.href)")
    assert links
    for link in set(links):
        path = SITE / link.split("#")[0].removeprefix(f"{server}/")
        assert path.is_file() and language not in link, link


@each
def test_a_widget_speaks_the_language(visit: Visitor, server: str, language: str) -> None:
    view = visit()
    for name in ("index", "tour", "auto_tutorials/1_gpt2/4_training",
                 "auto_tutorials/1_gpt2/6_attention_maps",
                 "auto_tutorials/5_caching/1_why_cache"):  # fmt: skip
        page = view.open(f"{server}/{language}/{name}.html")
        place = page.locator(".live").first
        place.locator(".live-start").click()
        place.locator("textarea").wait_for()
        labels = place.locator("button, label, p, strong, figcaption").all_inner_texts()
        labels += [
            area.get_attribute("aria-label") or "" for area in place.locator("textarea").all()
        ]
        english = [text for text in labels if re.search(r"[A-Za-z]{3,} [a-z]{3,}", text)]
        assert english == [], name
        assert any(re.search(r"[\u4e00-\u9fff]", text) for text in labels)
    assert view.problems == []


@each
def test_the_tour_goes_to_its_end(visit: Visitor, server: str, language: str) -> None:
    view = visit()
    page = view.open(f"{server}/{language}/tour.html")
    page.locator(".live-start").click()
    step = page.locator(".live .live-buttons button").nth(1)
    step.wait_for()
    seen = set()
    for _ in range(40):
        seen.add(page.locator(".live .live-status").inner_text())
        assert "undefined" not in page.locator(".live").inner_text()
        if step.get_attribute("aria-disabled") == "true":
            break
        step.click()
        page.wait_for_timeout(120)
    assert len(seen) > 10 and view.problems == []


@each
def test_the_search_answers_in_the_language(visit: Visitor, server: str, language: str) -> None:
    view = visit()
    asked = queries(language)
    page = view.open(f"{server}/{language}/search.html?q=RoPE")
    page.locator("#search-results li a").first.wait_for()
    found = page.evaluate(FOUND, [query["words"] for query in asked])
    text = (SITE / language / "_static" / "places.js").read_text(encoding="utf-8")
    known = set(json.loads(re.search(r"PLACES = (.*);", text)[1]))
    missed = []
    for query, places in zip(asked, found, strict=True):
        assert {page.split("#")[0] for page in query["pages"]} <= known | {
            name.removeprefix("auto_tutorials/") for name in known
        }
        first = [name.removeprefix("auto_tutorials/") + anchor for name, anchor in places[:3]]
        if not any(one.split("#")[0] == page or one == page
                   for one in first for page in query["pages"]):  # fmt: skip
            missed.append((query["words"], first))
    assert len(asked) >= 40 and len(asked) - len(missed) >= ENOUGH[language], missed
    assert view.problems == []


@each
def test_results_of_a_search_are_accessible(visit: Visitor, server: str, language: str) -> None:
    page = visit().open(f"{server}/{language}/search.html?q=RoPE")
    page.locator("#search-results li a").first.wait_for()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
