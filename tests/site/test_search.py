"""Who looks for a term finds a page on it among the first results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Visit

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


def first_results(visit: Callable[..., Visit], server: str, words: str) -> list[str]:
    view = visit()
    page = view.open(f"{server}/search.html?q={words.replace(' ', '+')}")
    page.locator("#search-results li a").first.wait_for()
    # The results arrive one after the other; the summary line says when all are there.
    page.wait_for_function(
        "() => /found|matching/i.test(document.querySelector('#search-results').innerText)"
    )
    found = page.locator("#search-results li").evaluate_all(
        "items => items.slice(0, 3).map(item => item.querySelector('a').href)"
    )
    assert view.problems == []
    return found


@pytest.mark.parametrize(("words", "pages"), WANTED.items(), ids=WANTED)
def test_search_leads_to_a_page_on_it(
    visit: Callable[..., Visit], server: str, words: str, pages: tuple[str, ...]
) -> None:
    found = first_results(visit, server, words)
    assert any(page in url for page in pages for url in found), found


def test_a_term_is_found_in_the_glossary(visit: Callable[..., Visit], server: str) -> None:
    found = first_results(visit, server, "residual stream")
    assert any("glossary.html#term-residual-stream" in url for url in found), found
