"""The EPUB, made from the built site: lessons in order, formulas, figures, links."""

from __future__ import annotations

import posixpath
import re
import zipfile
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit
from xml.etree import ElementTree

import pytest
from books.book import SITE, chapters, documents
from conftest import site_of
from editions import translation
from gallery import pages as course

XHTML, MATH = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/1998/Math/MathML}"
OPF = "{http://www.idpf.org/2007/opf}"
Pages = dict[str, ElementTree.Element]
NAME = "lm_from_scratch.epub"


@pytest.fixture(scope="module")
def book(site: Path) -> zipfile.ZipFile:
    """The one that readers get."""
    return zipfile.ZipFile(site / NAME)


@pytest.fixture(scope="module")
def pages(book: zipfile.ZipFile) -> Pages:
    return parsed(book)


@pytest.fixture(params=translation.EDITIONS)
def each_book(site: Path, request: pytest.FixtureRequest) -> zipfile.ZipFile:
    """That of each edition."""
    return zipfile.ZipFile(site_of(request.param) / NAME)


def parsed(book: zipfile.ZipFile) -> Pages:
    """Every page by its name; parsing says that it is XML."""
    names = [name for name in book.namelist() if name.endswith(".xhtml")]
    return {name: ElementTree.fromstring(book.read(name)) for name in names}


def test_the_spine_has_every_lesson_in_order(book: zipfile.ZipFile) -> None:
    package = ElementTree.fromstring(book.read("content.opf"))
    files = {item.get("id"): item.get("href") for item in package.iter(f"{OPF}item")}
    spine = [files[item.get("idref")] for item in package.iter(f"{OPF}itemref")]
    wanted = [f"{name}.xhtml" for name in documents()]
    assert [name for name in spine if name in wanted] == wanted
    lessons = [name for name in course.lessons() if not name.startswith("gpu/")]
    assert [name for name in wanted if re.search(r"/\d\w*/\d", name)] == [
        f"{course.document(name)[1:]}.xhtml" for name in lessons
    ]


def test_every_formula_is_mathml(pages: Pages) -> None:
    for names in chapters().values():
        for name in names:
            found = pages[f"{course.document(name)[1:]}.xhtml"]
            text = "".join(section.text for section in course.sections(name))
            formulas = len(re.findall(r":math:`|^\.\. math::", text, re.M))
            assert len(list(found.iter(f"{MATH}math"))) >= formulas, name
            said = "".join(found.itertext())
            assert not re.search(r"\\(frac|sum|mathrm|left)\b|:math:", said), name


def drawings(book: zipfile.ZipFile) -> list[str]:
    return [name for name in book.namelist() if name.endswith(".svg")]


def test_every_figure_is_there(site: Path, book: zipfile.ZipFile, pages: Pages) -> None:
    """Drawings of the page, and the picture of each widget."""
    assert len(drawings(book)) > 150
    for names in chapters().values():
        for name in names:
            document = course.document(name)[1:]
            html = (site / f"{document}.html").read_text(encoding="utf-8")
            article = html[html.index("<article") : html.index("</article>")]
            found = list(pages[f"{document}.xhtml"].iter(f"{XHTML}img"))
            wanted = len(re.findall(r"<svg\b", article)) + article.count('class="live"')
            assert len(found) == wanted, name
            assert all(image.get("alt") for image in found), name


def test_every_link_leads_somewhere(each_book: zipfile.ZipFile) -> None:
    files, pages = set(each_book.namelist()), parsed(each_book)
    ids = {name: {e.get("id") for e in root.iter() if e.get("id")} for name, root in pages.items()}
    for name, root in pages.items():
        for element in root.iter():
            link = element.get("href") or element.get("src")
            if link is None or urlsplit(link).scheme:
                assert SITE not in (link or ""), f"{name}: {link}"
                continue
            place, anchor = urldefrag(link)
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(place)))
            target = target if place else name
            assert target in files, f"{name}: {link}"
            assert not anchor or unquote(anchor) in ids[target], f"{name}: {link}"


def test_drawings_are_files_of_their_own(each_book: zipfile.ZipFile) -> None:
    drawn = drawings(each_book)
    assert drawn
    for name in drawn:
        text = each_book.read(name).decode()
        ElementTree.fromstring(text)
        assert "var(" not in text and "currentColor" not in text, name
