"""Searching for a term finds a page about it among the first results; so does a query in everyday
words (`queries.toml`, from public threads)."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SITE, Visit, Visitor, new_context, site_of
from editions import translation
from playwright.sync_api import Browser

QUERIES: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("queries.toml").read_text(encoding="utf-8")
)["query"]
#: The share of the queries, at least, that have a right page among the first three results.
ENOUGH = 0.83

WANTED = {
    "RoPE": ("2_qwen2/2_rope.html", "gpu/4_rope.html", "exercises/rope.html"),
    "KV cache": ("5_caching/1_why_cache.html",),
    "GQA": ("2_qwen2/3_swiglu.html",),
    "flash attention": ("gpu/10_flash_attention.html",),
    "padding": ("5_caching/4_padded_batches.html",),
    "GaLore": ("7_optimizers/2_galore.html", "7_optimizers/3_galore_training.html"),
    "speculative decoding": ("6_generation/2_speculative_decoding.html",),
    "bug museum": ("museum.html",),
}


def search(visit: Visitor, site: str, words: str) -> Visit:
    """The page of the search with all that was found."""
    view = visit()
    page = view.open(f"{site}/search.html?q={words.replace(' ', '+')}")
    page.locator("#search-results li a").first.wait_for()
    # The results arrive one after the other; the summary line says when all are there.
    page.wait_for_function(
        "() => /found|matching/i.test(document.querySelector('#search-results').innerText)"
    )
    assert view.problems == []
    return view


def first_results(visit: Visitor, server: str, words: str) -> list[str]:
    return (
        search(visit, server, words)
        .page.locator("#search-results li")
        .evaluate_all("items => items.slice(0, 3).map(item => item.querySelector('a').href)")
    )


def test_a_term_is_found_in_the_glossary(visit: Visitor, server: str) -> None:
    found = first_results(visit, server, "residual stream")
    assert any("glossary.html#term-residual-stream" in url for url in found), found


#: What `search.html` would list for each query; the page is loaded once.
FOUND = """
queries => queries.map(words => Search._performSearch(...Search._parseQuery(words)).reverse()
  .map(([page, , anchor]) => [page, anchor]))
"""


#: For each query its places, as [page, anchor], the best one first.
Found = list[list[list[str]]]


def listed(visit: Visitor, site: str, queries: list[str]) -> Found:
    """The places that are found for each query, as [page, anchor], the best one first."""
    found: Found = search(visit, site, "RoPE").page.evaluate(FOUND, queries)
    return found


def is_among(place: list[str], wanted: list[str]) -> bool:
    page, anchor = place[0].removeprefix("auto_tutorials/"), place[1]
    return page in wanted or page + anchor in wanted


def test_search_leads_to_a_page_on_it(visit: Visitor, server: str) -> None:
    """Read from the page once; each other term as that page would list it."""
    found = first_results(visit, server, "RoPE")
    assert any(page in url for page in WANTED["RoPE"] for url in found), found
    for first, pages in zip(listed(visit, server, [*WANTED]), WANTED.values(), strict=True):
        places = [f"{place[0].removeprefix('auto_tutorials/')}.html" for place in first[:3]]
        assert {*places} & {*pages}, (places, pages)


@pytest.fixture(scope="module")
def found_by_learners(browser: Browser, server: str) -> Found:
    """What is listed for each of the queries, which takes seconds."""
    page = Visit(new_context(browser, "light", 1280).new_page()).open(f"{server}/search.html")
    found: Found = page.evaluate(FOUND, [query["words"] for query in QUERIES])
    page.context.close()
    return found


def test_the_words_of_learners_lead_to_a_page_that_answers(found_by_learners: Found) -> None:
    found = found_by_learners
    misses = [
        f"{query['words']}: {first[:3]}"
        for query, first in zip(QUERIES, found, strict=True)
        if not any(is_among(place, query["pages"]) for place in first[:3])
    ]
    assert 1 - len(misses) / len(QUERIES) >= ENOUGH, "\n".join(misses)


def test_from_a_disk_the_same_is_found(visit: Visitor, found_by_learners: Found) -> None:
    some = slice(0, None, 10)
    words = [query["words"] for query in QUERIES[some]]
    assert listed(visit, SITE.resolve().as_uri(), words) == found_by_learners[some]


def test_the_first_three_are_of_different_pages(found_by_learners: Found) -> None:
    for first in found_by_learners:
        different = {page for page, _ in first}
        assert len({page for page, _ in first[:3]}) == min(3, len(different)), first


def test_words_that_no_page_has_together_find_pages_with_some(visit: Visitor, server: str) -> None:
    """A word that nobody wrote hides nothing, and one that all pages have decides nothing."""
    queries = ["RMSNorm", "RMSNorm xyzzy", "why is my RMSNorm vs xyzzy", "GaLore RMSNorm", "xyzzy"]
    alone, unknown, asked, both, nothing = listed(visit, server, queries)
    assert alone[:3] == unknown[:3] == asked[:3]
    assert {"7_optimizers", "2_qwen2"} <= {page.split("/")[1] for page, _ in both if "/" in page}
    assert nothing == []


def test_a_word_is_found_by_its_parts_and_other_spellings(visit: Visitor, server: str) -> None:
    queries = ["rotate_half", "rotate half", "quantization", "temprature", "temperature"]
    whole, parts, spelt, *misspelt = listed(visit, server, queries)
    question = (
        "#rotate-half-splits-the-head-in-two-halves-but-the-rope-paper-pairs-neighbours-is-it-a-bug"
    )
    assert ["questions", question] in whole[:4] and ["questions", question] in parts[:4]
    assert any("quantized" in page for page, _ in spelt[:3])  # the pages say: quantised
    assert misspelt[0][:3] == misspelt[1][:3]


def test_the_page_of_a_name_comes_before_its_code(visit: Visitor, server: str) -> None:
    names = {"bug museum": "museum", "exercises": "exercises/index", "benchmarks": "benchmarks"}
    for first, page in zip(listed(visit, server, list(names)), names.values(), strict=True):
        assert page in [page for page, _ in first[:2]], first[:3]
    for first in listed(visit, server, ["attention", "RMSNorm", "KV cache", "cross entropy"]):
        assert first[0][0].startswith("auto_tutorials/"), first[:3]
    (code,) = listed(visit, server, ["load_shipped"])
    assert code[0][0] == "api/lm_from_scratch.checkpoint.weights", code[:3]


def test_results_are_accessible(visit: Visitor, server: str) -> None:
    found = Axe().run(search(visit, server, "why is loss nan").page)
    assert found.violations_count == 0, found.generate_report()


def test_queries_are_of_public_threads_or_in_a_strangers_words() -> None:
    assert len({query["words"] for query in QUERIES}) == len(QUERIES) >= 60
    for query in QUERIES:
        if "thread" in query:
            assert query["thread"].startswith("https://") and len(query["words"].split()) <= 5
        assert 1 <= len(query["pages"]) <= 3


def test_queries_name_places_of_the_site(site: Path) -> None:
    text = (site / "_static" / "places.js").read_text(encoding="utf-8")
    known = json.loads(re.search(r"PLACES = (.*);", text)[1])
    places = set(known) | {name.removeprefix("auto_tutorials/") for name in known}
    for name, place in known.items():
        places |= {f"{name}#{anchor}" for _, anchor, *_ in place.get("entries", [])}
    assert {page for query in QUERIES for page in query["pages"]} - places == set()


@pytest.mark.parametrize("from_disk", [False, True], ids=["server", "disk"])
def test_a_result_says_what_it_is_about(visit: Visitor, server: str, from_disk: bool) -> None:
    """A page its description, a term its meaning, whether the site is served or opened."""
    page = search(visit, SITE.resolve().as_uri() if from_disk else server, "RMSNorm").page
    said = {
        item.locator("a").get_attribute("href"): item.locator("p.context").inner_text()
        for item in page.locator("#search-results li").all()  # waits for a line in each
    }
    assert said["glossary.html#term-RMSNorm"].startswith("Dividing a vector by the root")
    assert said["auto_tutorials/2_qwen2/1_rms_norm.html"].startswith("A Qwen2 of 24 blocks")
    assert said["exercises/rms_norm.html"].startswith("What you can do afterwards: ")
    question = "questions.html#why-does-rmsnorm-convert-to-float32-what-underflows"
    assert said[question].startswith("Because it squares its input")


@pytest.mark.parametrize("edition", translation.EDITIONS)
def test_every_page_is_described(edition: str) -> None:
    """For the search of the site, and for those that others run."""
    root = site_of(edition)
    text = (root / "_static" / "places.js").read_text(encoding="utf-8")
    known = json.loads(re.search(r"DESCRIPTIONS = (.*);", text)[1])
    apart = {"_static", *translation.EDITIONS}
    written = [path.relative_to(root) for path in root.rglob("*.html")]
    names = {path.as_posix() for path in written if not apart & {*path.parts}}
    assert names - set(known) <= {"genindex.html", "py-modindex.html", "search.html"}
    pages = {name for name in known if "#" not in name}
    assert len({known[name] for name in pages}) == len(pages)
    assert [name for name in pages if not 12 <= len(known[name]) <= 300] == []
    texts = [(root / name).read_text(encoding="utf-8") for name in sorted(pages)]
    assert all(text.count('name="description"') == 1 for text in texts)
