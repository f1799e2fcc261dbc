"""The first mention of a glossary term is a link, and nothing else is."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import page_checks
import pytest
from conftest import SITE
from lookup import terms
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

GLOSSARY = """
Glossary
========

.. glossary::

   block
      One layer of a model.

   block table
      Which blocks hold the tokens of a row. Page: :doc:`/gpu/1_page`.

   query
      What looks for keys.

   zero (of a group)
      What the middle code stands for.

      .. linked on: 8_weights

   RoPE
      Rotary position embedding.
"""
SYMBOLS = """
Symbols
=======

.. list-table::
   :header-rows: 1

   * - letter
     - axis
     - in a config
   * - T
     - tokens of a row
     -
   * - I
     - an inner width
     -
   * - K
     - keys
     -

.. list-table::
   :header-rows: 1

   * - letter
     - axis
     - pages
   * - K, N
     - drafts and texts
     - :doc:`/gpu/2_page`
"""
PAGE = """
A query in a heading
====================

Code has ``query``, a formula :math:`query`, a `link on a query <https://example.org/>`_.

.. code-block:: text

   query

A query-like word and a subquery are other words. Two queries, and the same query again.
Block tables come first, and one block later. RoPE is written so; Rope is not.
The mean is zero. T++ and the T of AdamT are others. I see (T, K), T again, ``T`` and N texts.
"""


def build(
    folder: Path,
    builder: str,
    pages: int = 1,
    processes: int = 1,
    glossary: str = GLOSSARY,
    fresh: bool = True,
) -> tuple[Path, str]:
    """A small site with the same page several times: where it is, and the warnings."""
    source = folder / "source"
    (source / "gpu").mkdir(parents=True, exist_ok=True)
    names = [f"gpu/{number}_page" for number in range(1, pages + 1)]
    texts = {
        "conf.py": "extensions = ['lookup.terms']",
        "glossary.rst": glossary,
        "symbols.rst": SYMBOLS,
    }
    texts["index.rst"] = (
        "Index\n=====\n\nA query here.\n\n.. toctree::\n\n   glossary\n   symbols\n"
    )
    texts["index.rst"] += "".join(f"   {name}\n" for name in names)
    texts |= {f"{name}.rst": PAGE for name in names}
    for name, text in texts.items():
        if not (source / name).exists() or (source / name).read_text() != text:
            (source / name).write_text(text)
    warnings = StringIO()
    with docutils_namespace():
        Sphinx(
            source, source, folder / builder, folder / f"doctrees-{builder}", builder,
            status=None, warning=warnings, freshenv=fresh, parallel=processes,
        ).build()  # fmt: skip
    return folder / builder, warnings.getvalue()


def links(page: Path) -> list[tuple[str, str]]:
    """The text of each link to a term, and the place in the glossary to which it leads."""
    found = re.findall(r"<a ([^>]*)>(.*?)</a>", page.read_text(encoding="utf-8"), re.S)
    links = [(attributes, text) for attributes, text in found if terms.CLASS in attributes]
    places = [re.search(r'href="[^"]*#([^"]+)"', attributes) for attributes, _ in links]
    return [(text, place[1]) for (_, text), place in zip(links, places, strict=True) if place]


def test_first_mentions_in_prose_are_links(tmp_path: Path) -> None:
    out, warnings = build(tmp_path, "html", pages=2)
    assert warnings == ""
    assert links(out / "gpu" / "1_page.html") == [
        ("queries", "term-query"),
        ("Block tables", "term-block-table"),
        ("block", "term-block"),
        ("RoPE", "term-RoPE"),
        ("T", "axis-0"),
        ("K", "axis-2"),
    ]
    page = (out / "gpu" / "1_page.html").read_text(encoding="utf-8")
    assert 'title="Which blocks hold the tokens of a row."' in page
    assert links(out / "index.html") == links(out / "glossary.html") == []


def test_a_letter_says_what_it_means(tmp_path: Path) -> None:
    """On a page that gives it a meaning of its own, that one; it leads to its row."""
    out, _ = build(tmp_path, "html", pages=2)
    assert ("K", "letter-0") in links(out / "gpu" / "2_page.html")
    assert ("N", "letter-0") in links(out / "gpu" / "2_page.html")
    assert 'title="tokens of a row"' in (out / "gpu" / "1_page.html").read_text(encoding="utf-8")
    symbols = (out / "symbols.html").read_text(encoding="utf-8")
    assert all(f'id="{place}"' in symbols for place in ("axis-0", "axis-2", "letter-0"))


def test_search_finds_a_term_on_the_page_that_explains_it(tmp_path: Path) -> None:
    out, _ = build(tmp_path, "html")
    text = (out / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    places = {
        (index["docnames"][number], id_) for number, id_, _ in index["indexentries"]["block table"]
    }
    assert places == {("glossary", "term-block-table"), ("gpu/1_page", "")}


def test_a_word_of_many_meanings_is_a_link_on_its_own_pages(tmp_path: Path) -> None:
    out, _ = build(tmp_path, "html", pages=2, glossary=GLOSSARY.replace("8_weights", "gpu/1"))
    assert ("zero", "term-zero-of-a-group") in links(out / "gpu" / "1_page.html")
    assert ("zero", "term-zero-of-a-group") not in links(out / "gpu" / "2_page.html")


def test_catalogues_do_not_know_the_links(tmp_path: Path) -> None:
    out, _ = build(tmp_path, "gettext")
    catalogue = (out / "gpu.pot").read_text(encoding="utf-8")
    assert "Two queries, and the same query again" in catalogue.replace('"\n"', "")
    assert "term-" not in catalogue


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    """A page of many, read and written by another process; every link leads somewhere."""
    alone, _ = build(tmp_path / "one", "html", pages=20)
    both, warnings = build(tmp_path / "two", "html", pages=20, processes=2)
    assert warnings == ""
    assert len(links(alone / "gpu" / "20_page.html")) == 6
    for number in range(1, 21):
        page = Path("gpu") / f"{number}_page.html"
        assert links(both / page) == links(alone / page)
    small = {path: page for path, page in page_checks.read(both).items() if "page" in path.name}
    assert page_checks.check_links(both, small) == []


def test_a_changed_glossary_changes_pages_that_did_not_change(tmp_path: Path) -> None:
    out, _ = build(tmp_path, "html")
    glossary = GLOSSARY.replace("What looks for keys", "It looks for keys")
    build(tmp_path, "html", glossary=glossary, fresh=False)
    page = (out / "gpu" / "1_page.html").read_text(encoding="utf-8")
    assert 'title="It looks for keys."' in page


# -- the built site --------------------------------------------------------------------------

PAGES = [
    path
    for path in sorted(SITE.rglob("*.html"))
    if terms.PAGES.match(path.relative_to(SITE).with_suffix("").as_posix())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_have_some_links_and_none_twice(page: Path) -> None:
    found = links(page)
    assert len(found) == len({text for text, _ in found})
    code = re.findall(r"<pre>.*?</pre>", page.read_text(encoding="utf-8"), re.S)
    assert not [block for block in code if terms.CLASS in block]
    terms_of_glossary = [place for _, place in found if place.startswith("term-")]
    assert len(terms_of_glossary) == len(set(terms_of_glossary)) <= 30
    assert len(found) <= 40
    if "exercises" not in page.parts:
        assert len(found) >= 3
