"""Who looks for a term finds a page on it among the first results."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import SITE, Visit

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


def search(visit: Callable[..., Visit], site: str, words: str) -> Visit:
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


def first_results(visit: Callable[..., Visit], server: str, words: str) -> list[str]:
    return (
        search(visit, server, words)
        .page.locator("#search-results li")
        .evaluate_all("items => items.slice(0, 3).map(item => item.querySelector('a').href)")
    )


@pytest.mark.parametrize(("words", "pages"), WANTED.items(), ids=WANTED)
def test_search_leads_to_a_page_on_it(
    visit: Callable[..., Visit], server: str, words: str, pages: tuple[str, ...]
) -> None:
    found = first_results(visit, server, words)
    assert any(page in url for page in pages for url in found), found


def test_a_term_is_found_in_the_glossary(visit: Callable[..., Visit], server: str) -> None:
    found = first_results(visit, server, "residual stream")
    assert any("glossary.html#term-residual-stream" in url for url in found), found


@pytest.mark.parametrize("from_disk", [False, True], ids=["server", "disk"])
def test_a_result_says_what_it_is_about(
    visit: Callable[..., Visit], server: str, from_disk: bool
) -> None:
    """A page its description, a term its meaning, whether the site is served or opened."""
    page = search(visit, SITE.resolve().as_uri() if from_disk else server, "RMSNorm").page
    said = {
        item.locator("a").get_attribute("href"): item.locator("p.context").inner_text()
        for item in page.locator("#search-results li").all()  # waits for a line in each
    }
    assert said["glossary.html#term-RMSNorm"].startswith("Dividing a vector by the root")
    assert said["auto_tutorials/2_qwen2/1_rms_norm.html"].startswith("A Qwen2 of 24 layers")
    assert said["exercises/rms_norm.html"].startswith("What you can do afterwards: ")


def test_every_page_is_described() -> None:
    """For the search of the site, and for those that others run."""
    text = (SITE / "_static" / "descriptions.js").read_text(encoding="utf-8")
    known = json.loads(text[text.index("{") : text.rindex("}") + 1])
    written = [path for path in SITE.rglob("*.html") if "_static" not in path.parts]
    names = {path.relative_to(SITE).as_posix() for path in written}
    assert names - set(known) == {"genindex.html", "py-modindex.html", "search.html"}
    pages = {name for name in known if "#" not in name}
    assert len({known[name] for name in pages}) == len(pages)
    assert [name for name in pages if not 12 <= len(known[name]) <= 300] == []
    texts = [(SITE / name).read_text(encoding="utf-8") for name in sorted(pages)]
    assert all(text.count('name="description"') == 1 for text in texts)
