"""A figure of Matplotlib as a part of a page: its ink, its ids, its words."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
import torch
from gallery import figures

from lm_from_scratch.instruments.plot import figure, mask_map, number_map


@pytest.fixture(scope="module")
def page() -> str:
    """Two figures of one page, with letters, a formula, maps, a legend and a clip path."""
    drawn = []
    for name in ("one", "two"):
        made, (left, right) = figure(4.8, 2.4, columns=2)
        left.plot([1.0, 2.0], [0.0, 1.0], color="black", label="$x^2$")
        left.legend(frameon=False)
        left.set_title('a "b" <c> & d')
        number_map(left, torch.tensor([[10.0, 1.0]]), largest=10.0)
        mask_map(right, torch.ones(2, 2).tril().bool(), "ab", "ab", "mask")
        drawn.append(figures.themed(made, name))
    plt.close("all")
    return "".join(drawn)


def test_ink_is_the_colour_of_the_text(page: str) -> None:
    assert not re.search(r"#000000|#dddddd|#e4e4e4", page)
    assert not re.search(r"#ffffff", page) and "var(--lm-ground)" in page
    assert 'fill="currentColor"' in page and "stroke: currentColor" in page


def test_white_letters_stay_white_on_a_colour(page: str) -> None:
    assert re.search(r"<text[^>]*fill: white[^>]*>10</text>", page)


def test_ids_and_what_they_name_belong_to_one_figure(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    named = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
    assert named and {a or b for a, b in named} <= set(ids)


def test_a_figure_says_its_titles(page: str) -> None:
    parts = page.replace("xlink:href", "href")
    labels = [
        svg.get("aria-label")
        for svg in ElementTree.fromstring(f"<p>{parts}</p>").iter()
        if svg.get("role") == "img"
    ]
    assert labels == ['a "b" <c> & d, mask'] * 2
    assert "<style" not in page and "<metadata" not in page


def test_only_wide_figures_keep_their_width() -> None:
    narrow, wide = (figures.themed(figure(width, 2.0)[0], "x") for width in (4.8, 9.0))
    plt.close("all")
    assert "min-width" not in narrow and f"min-width: {figures.NARROW}px" in wide
