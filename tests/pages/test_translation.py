"""Ready for a second language: a switch that is hidden until there is one, and what it leads to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import catalogues
import pytest
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from gallery import DOCS

CONF = """
project, copyright = "tiny", "nobody"
language, editions = {language!r}, {editions!r}
locale_dirs, gettext_compact, gettext_location = ["locale"], False, False
templates_path = [{templates!r}]
html_theme = "pydata_sphinx_theme"
html_context = {{"default_mode": "light", "editions": editions, "edition": language}}
html_theme_options = {{"navbar_end": ["language_switch.html", "theme-switcher"]}}
"""
PAGES = {
    "index": "Start\n=====\n\nA key meets a query.\n\n.. toctree::\n\n   deeper/second\n",
    "deeper/second": "Second\n======\n\nRead :doc:`the start </index>` first.\n",
}


def sphinx(source: Path, out: Path, builder: str) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-E", "-b", builder]
    command += ["-d", str(out.parent / f"{out.name}-doctrees"), str(source), str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def write_source(folder: Path, language: str, editions: dict[str, str]) -> Path:
    for name, text in PAGES.items():
        path = folder / f"{name}.rst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given = {"templates": str(DOCS / "_templates")}
    conf = CONF.format(language=language, editions=editions, **given)
    (folder / "conf.py").write_text(conf)
    return folder


def translate(source: Path, catalogues: Path, language: str) -> None:
    """A made-up translation: every message backwards, but for what is marked up."""
    for pot in catalogues.rglob("*.pot"):
        with open(pot, "rb") as file:
            catalogue = read_po(file)
        for message in catalogue:
            if message.id:
                parts = re.split(r"(:doc:`[^`]*`)", str(message.id))
                backwards = [p if p.startswith(":doc:") else p[::-1] for p in reversed(parts)]
                message.string = " ".join(part.strip() for part in backwards).strip()
        target = source / "locale" / language / "LC_MESSAGES" / pot.relative_to(catalogues)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".mo"), "wb") as out:
            write_mo(out, catalogue)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pages in English, and the same backwards, as Chinese: its code has two forms."""
    folder = tmp_path_factory.mktemp("editions")
    editions = {"en": "English", "zh_CN": "简体中文"}
    source = write_source(folder / "source", "en", editions)
    sphinx(source, folder / "pot", "gettext")
    sphinx(source, folder / "site", "html")
    write_source(source, "zh_CN", editions)
    translate(source, folder / "pot", "zh_CN")
    sphinx(source, folder / "site" / "zh_CN", "html")
    return folder / "site"


@pytest.mark.parametrize("page", PAGES)
def test_the_switch_leads_to_the_twin_page_and_back(site: Path, page: str) -> None:
    for folder, there, code in (("", "zh_CN/", "zh-CN"), ("zh_CN/", "", "en")):
        path = site / f"{folder}{page}.html"
        text = path.read_text(encoding="utf-8")
        found = re.findall(r'<nav class="language-switch".*?</nav>', text, re.S)
        assert len(set(found)) == 1
        ((address, language, target_language),) = re.findall(
            r'href="([^"]*)" lang="([^"]*)" hreflang="([^"]*)"', found[0]
        )
        assert language == target_language == code
        assert (path.parent / address).resolve() == site / f"{there}{page}.html"
        assert (path.parent / address).exists()
        assert re.search(r'<html[^>]* lang="([^"]*)"', text)[1] != code  # type: ignore[index]


def test_prose_is_translated(site: Path) -> None:
    text = (site / "zh_CN" / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<html[^>]* lang="zh-CN"', text)
    assert ".yreuq a steem yek A" in text
    assert "A key meets a query." not in text
    assert "A key meets a query." in (site / "index.html").read_text(encoding="utf-8")


def test_one_edition_has_no_switch(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "en", {"en": "English"})
    sphinx(source, tmp_path / "site", "html")
    text = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "theme-switch-button" in text
    assert "language-switch" not in text


@pytest.mark.parametrize(
    "text",
    ["Measured on 2026-11-21.", "It took 0.31 s.", "With torch 2.13.0.", "At 12:30:05.",
     "In /home/me/work.", "<Tensor at 0x7f25f55be5c0>", "On 3 May 2026."],
)  # fmt: skip
def test_volatile_text_is_found(text: str) -> None:
    assert catalogues.volatile({"page": ["A stable sentence.", text]})


@pytest.mark.parametrize(
    "text",
    ["Python 3.11 or newer.", "About 0.5 of it.", "See tutorials/gpu/1_swiglu.py.", "3.5 times",
     "arXiv 2403.03507", "`paper <https://example.org/home/x>`_"],
)  # fmt: skip
def test_stable_text_is_not(text: str) -> None:
    assert catalogues.volatile({"page": [text]}) == []
