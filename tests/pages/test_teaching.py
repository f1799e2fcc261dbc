"""The teacher's guide: whole in the repository, with links that lead somewhere there and on the
site."""

from __future__ import annotations

import re

import exercises
import gallery
import pytest
import teaching

GUIDE = teaching.GUIDE.read_text(encoding="utf-8")
DOCUMENTS = {
    *map(gallery.document, gallery.in_order()),
    *(f"/exercises/{one.name}" for one in exercises.written()),
    *(f"/{path.stem}" for path in gallery.DOCS.glob("*.rst")),
    "/exercises/index",
    "/exercises/proof",
    "/api/index",
}


def test_what_is_computed_stands_in_the_guide() -> None:
    stale = [
        name
        for _, name, _ in teaching.COMPUTED.findall(GUIDE)
        if f"<!-- computed: {name} -->\n\n{teaching.computed(name)}\n\n<!-- end -->\n" not in GUIDE
    ]
    assert not stale, f"{stale} changed. Run: python docs/_ext/teaching.py"


def test_every_part_is_there_once() -> None:
    names = [name for _, name, _ in teaching.COMPUTED.findall(GUIDE)]
    plans = [f"weeks_{number}" for number in teaching.PLANS]
    assert sorted(names) == sorted(["figures", "order", "outcomes", *plans])
    assert GUIDE.count("<!--") == 2 * len(names)


@pytest.mark.parametrize("name", ["figures", "weeks_6"])
def test_an_old_part_is_written_again(name: str) -> None:
    old = GUIDE.replace(teaching.computed(name), "Something of last year.")
    assert old != GUIDE and teaching.written(old) == teaching.written(GUIDE)
    assert teaching.written(teaching.written(old)) == teaching.written(old)


def test_no_markup_that_only_the_site_knows() -> None:
    assert not re.findall(r"\{\w+\}`|^```\{", GUIDE, re.M)


def test_links_lead_to_files_of_the_repository_and_pages_of_the_site() -> None:
    links = teaching.LINK.findall(GUIDE)
    assert len(links) > 50
    for _, place in links:
        assert (gallery.DOCS / place).exists(), place
        assert teaching.document(place) in DOCUMENTS, place
    headings = {
        re.sub(r"\W+", "-", title.lower()) for title in re.findall(r"^#+ (.+)$", GUIDE, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", GUIDE)) <= headings


def test_the_site_reads_links_as_documents() -> None:
    given = (
        "<!-- computed: x -->\n[A](../tutorials/1_gpt2/1_tokens.py), [map](course.rst)\n"
        "[B](../lm_from_scratch/exercises/catalogue/rope/text.py), [c](#here)\n\n<!-- end -->\n"
    )
    assert teaching.for_site(given) == (
        "{doc}`A </auto_tutorials/1_gpt2/1_tokens>`, {doc}`map </course>`\n"
        "{doc}`B </exercises/rope>`, [c](#here)\n\n"
    )
