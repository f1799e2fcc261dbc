"""The EPUB, made from the built site: lessons in order, formulas, figures, links."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit
from xml.etree import ElementTree

import books
import gallery
import page
import pytest

XHTML, MATH = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/1998/Math/MathML}"
OPF = "{http://www.idpf.org/2007/opf}"
Pages = dict[str, ElementTree.Element]


@pytest.fixture(scope="module")
def book(site: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("book")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-t", "book", "-b", "epub"]
    subprocess.run(
        [*command, "-d", str(folder / "doctrees"), str(gallery.DOCS), str(folder / "epub")],
        check=True,
        env=os.environ | {"GALLERY_JOBS": "0", "SITE_LANGUAGE": "en"},
    )
    return zipfile.ZipFile(folder / "epub" / "lm_from_scratch.epub")


@pytest.fixture(scope="module")
def pages(book: zipfile.ZipFile) -> Pages:
    """Every page by its name; parsing says that it is XML."""
    names = [name for name in book.namelist() if name.endswith(".xhtml")]
    return {name: ElementTree.fromstring(book.read(name)) for name in names}


def test_the_spine_has_every_lesson_in_order(book: zipfile.ZipFile) -> None:
    package = ElementTree.fromstring(book.read("content.opf"))
    files = {item.get("id"): item.get("href") for item in package.iter(f"{OPF}item")}
    spine = [files[item.get("idref")] for item in package.iter(f"{OPF}itemref")]
    wanted = [f"{name}.xhtml" for name in books.documents()]
    assert [name for name in spine if name in wanted] == wanted
    lessons = [name for name in gallery.lessons() if not name.startswith("gpu/")]
    assert [name for name in wanted if re.search(r"/\d\w*/\d", name)] == [
        f"{gallery.document(name)[1:]}.xhtml" for name in lessons
    ]


def test_every_formula_is_mathml(pages: Pages) -> None:
    for names in books.chapters().values():
        for name in names:
            found = pages[f"{gallery.document(name)[1:]}.xhtml"]
            text = "".join(section.text for section in page.sections(name))
            formulas = len(re.findall(r":math:`|^\.\. math::", text, re.M))
            assert len(list(found.iter(f"{MATH}math"))) >= formulas, name
            said = "".join(found.itertext())
            assert not re.search(r"\\(frac|sum|mathrm|left)\b|:math:", said), name


def test_every_figure_is_there(pages: Pages) -> None:
    images = gallery.DOCS / "auto_tutorials"
    for names in books.chapters().values():
        for name in names:
            chapter, stem = name.split("/")
            drawn = len(list((images / chapter / "images").glob(f"sphx_glr_{stem}_0*.svg.html")))
            found = list(pages[f"{gallery.document(name)[1:]}.xhtml"].iter(f"{XHTML}img"))
            assert len(found) >= drawn, name
            assert all(image.get("alt") for image in found), name


def test_every_link_leads_somewhere(book: zipfile.ZipFile, pages: Pages) -> None:
    files = set(book.namelist())
    ids = {name: {e.get("id") for e in root.iter() if e.get("id")} for name, root in pages.items()}
    for name, root in pages.items():
        for element in root.iter():
            link = element.get("href") or element.get("src")
            if link is None or urlsplit(link).scheme:
                assert books.SITE not in (link or ""), f"{name}: {link}"
                continue
            place, anchor = urldefrag(link)
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(place)))
            target = target if place else name
            assert target in files, f"{name}: {link}"
            assert not anchor or unquote(anchor) in ids[target], f"{name}: {link}"


def test_drawings_are_files_of_their_own(book: zipfile.ZipFile) -> None:
    drawn = [name for name in book.namelist() if name.endswith(".svg")]
    assert len(drawn) > 150
    for name in drawn:
        text = book.read(name).decode()
        ElementTree.fromstring(text)
        assert "var(" not in text and "currentColor" not in text, name
