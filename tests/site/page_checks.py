"""Checks of built pages that need no browser. Each returns a list of problems."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Two chapter sections on one index page share this id (a known fault of the gallery). 2026-11.
ALLOWED_DUPLICATES = {"sg-tag-list"}


def name_of_script(figure: str) -> str:
    """What the gallery takes as the text of a figure that has no title: the name of its script."""
    match = re.search(r"sphx_glr_(\w+?)_\d{3}\.png$", figure)
    return match[1].replace("_", " ") if match else figure


def is_name_of_file(alt: str, figure: str) -> bool:
    """Whether the text of a figure is that of its script or, on a GPU page, its own address."""
    return alt == name_of_script(figure) or re.search(r"\.(png|jpe?g|svg|gif)$", alt) is not None


class Page(HTMLParser):
    """Ids, references and images of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []  # scripts, styles, images: what a browser fetches by itself
        self.images_without_alt: list[str] = []
        self.figures_without_title: list[str] = []
        self.lang = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        attrs = dict(attributes)
        if attrs.get("id"):
            self.ids.append(attrs["id"] or "")
        if tag == "html":
            self.lang = attrs.get("lang") or ""
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"] or "")
        if tag == "img" and "alt" not in attrs:
            self.images_without_alt.append(attrs.get("src") or "")
        if tag == "svg" and attrs.get("aria-label") == "":
            self.figures_without_title.append("drawn in the page")
        if tag == "img" and is_name_of_file(attrs.get("alt") or "", attrs.get("src") or ""):
            self.figures_without_title.append(attrs["src"] or "")
        if attrs.get("src"):
            self.loaded.append(attrs["src"] or "")
        for candidate in (attrs.get("srcset") or "").split(","):
            if candidate.strip():
                self.loaded.append(candidate.split()[0])
        fetched = {"stylesheet", "preload", "icon", "modulepreload", "preconnect", "dns-prefetch"}
        if tag == "link" and attrs.get("href") and fetched & set((attrs.get("rel") or "").split()):
            self.loaded.append(attrs["href"] or "")


def read(site: Path) -> dict[Path, Page]:
    paths = sorted(site.rglob("*.html"))
    return {path: Page(path) for path in paths if "_static" not in path.relative_to(site).parts}


def check_ids(pages: dict[Path, Page]) -> list[str]:
    problems = []
    for path, page in pages.items():
        counts = Counter(page.ids)
        repeated = {name for name, n in counts.items() if n > 1} - ALLOWED_DUPLICATES
        problems += [f"{path}: id {name!r} appears more than once" for name in sorted(repeated)]
    return problems


def check_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Every reference inside the site leads to a file of the site, and to an id on its page."""
    problems = []
    site = site.resolve()
    ids = {path.resolve(): set(page.ids) for path, page in pages.items()}

    @cache  # pages of a folder share most of their links
    def place(folder: Path, name: str) -> tuple[Path, bool]:
        target = (folder / name).resolve()
        target = target / "index.html" if target.is_dir() else target
        return target, target.is_file()

    for path, page in pages.items():
        for reference in dict.fromkeys([*page.links, *page.loaded]):
            url = urlsplit(reference)
            if url.scheme or url.netloc:
                continue
            target, exists = place(path.parent, unquote(url.path) if url.path else path.name)
            if not target.is_relative_to(site):
                problems.append(f"{path}: {reference} leaves the site")
            elif not exists:
                problems.append(f"{path}: {reference} does not exist")
            elif url.fragment and target in ids and unquote(url.fragment) not in ids[target]:
                problems.append(f"{path}: {reference} has no such place on the page")
    return problems


def check_no_outside_resources(pages: dict[Path, Page]) -> list[str]:
    return [
        f"{path}: loads {reference}"
        for path, page in pages.items()
        for reference in page.loaded
        if reference.startswith(("http:", "https:", "//"))
    ]


def check_paths(site: Path, root: Path) -> list[str]:
    """Where the site was built, and objects that stand for a path of that machine."""
    return [
        f"{path.relative_to(site)}: shows {where}"
        for path in sorted(site.rglob("*.html"))
        for where in (str(root), "PosixPath(")
        if where in path.read_text(encoding="utf-8")
    ]


def check_images(pages: dict[Path, Page]) -> list[str]:
    problems = []
    for path, page in pages.items():
        problems += [f"{path}: image {image} has no alt text" for image in page.images_without_alt]
        problems += [
            f"{path}: figure {image} has no title, so its alt text is a file name"
            for image in page.figures_without_title
        ]
    return problems


def check_junit(report: Path, scripts: Iterable[Path]) -> list[str]:
    """Every script ran in this build, took time and passed."""
    suite = ET.parse(report).getroot()
    cases = {case.get("classname"): case for case in suite.iter("testcase")}
    names = [script.stem for script in scripts]
    problems = [
        f"{name} did not run in this build (make docs runs all)"
        for name in names
        if name not in cases
    ]
    problems += [f"{name} is in the report but is no script" for name in set(cases) - set(names)]
    for name, case in cases.items():
        if case.find("failure") is not None or case.find("skipped") is not None:
            problems.append(f"{name} did not pass")
        if not float(case.get("time") or 0) > 0:
            problems.append(f"{name} took no time, so it was not run")
    return problems
