"""The built site, as its readers meet it. Run `make docs`, then `make check-site`."""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Callable
from html import unescape
from pathlib import Path

import exercise_pages
import exercises
import gallery
import nbformat
import notebooks
import page_checks
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SITE, Visit
from exercise_leaks import leaks, plain
from playwright.sync_api import BrowserContext

from lm_from_scratch.exercises.exercise import Exercise

PAGES = sorted(
    path.relative_to(SITE).as_posix()
    for path in SITE.rglob("*.html")
    if "_static" not in path.relative_to(SITE).parts
)
TUTORIALS = [
    f"auto_tutorials/{script.parent.name}/{script.stem}.html" for script in gallery.scripts()
]
GPU_PAGES = [f"gpu/{script.stem}.html" for script in gallery.gpu_scripts()]
EXERCISES = [found.name for found in exercises.written()]
EXERCISE_PAGES = [f"exercises/{name}.html" for name in EXERCISES]
AXE_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
Visitor = Callable[..., Visit]
Readers = Callable[[str, int], BrowserContext]

MATH_PROBLEMS = r"""
() => {
  const problems = [];
  const math = [...document.querySelectorAll('.math')];
  for (const element of math) {
    const drawn = element.querySelector('mjx-container');
    const text = element.textContent.trim().slice(0, 60);
    if (!drawn) problems.push('formula not drawn: ' + text);
    else if (element.querySelector('mjx-merror, [data-mjx-error]')) problems.push('error: ' + text);
    else if (!(drawn.getBoundingClientRect().width > 0)) problems.push('formula of no width');
  }
  const loaded = [...document.fonts].filter(f => f.status === 'loaded' && /MJX/.test(f.family));
  if (math.length && !loaded.length) problems.push('no font of MathJax is loaded');
  return problems;
}
"""
IMAGE_PROBLEMS = """
() => [...document.images].flatMap(image => [
  ...(image.complete && image.naturalWidth > 0 ? [] : ['broken image ' + image.src]),
  ...(image.hasAttribute('alt') ? [] : ['no alt text on ' + image.src]),
])
"""
# Thousands of coloured words in code have a few dozen colours: axe looks at one word of each.
ONE_WORD_OF_EACH_COLOUR = """
() => {
  const seen = new Set();
  for (const word of document.querySelectorAll('.highlight pre span')) {
    const kind = word.className + (word.closest('.sphx-glr-script-out') ? ' output' : '');
    if (seen.has(kind)) word.replaceWith(...word.childNodes);
    seen.add(kind);
  }
}
"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def test_there_are_pages(site: Path) -> None:
    assert "index.html" in PAGES
    assert TUTORIALS, "the gallery is empty"
    assert EXERCISE_PAGES, "there are no exercises"
    assert set(TUTORIALS) | set(GPU_PAGES) | set(EXERCISE_PAGES) <= set(PAGES)


def test_every_tutorial_ran(site: Path) -> None:
    report = site.parent / "gallery_junit.xml"
    assert page_checks.check_junit(report, gallery.scripts()) == []


def test_links_lead_somewhere(site: Path, pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_links(site, pages) == []


def test_ids_are_unique(pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_ids(pages) == []


def test_nothing_is_loaded_from_outside(pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_no_outside_resources(pages) == []


def test_images_have_alt_text(pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_images(pages) == []


def test_pages_name_their_language(pages: dict[Path, page_checks.Page]) -> None:
    assert {page.lang for page in pages.values()} == {"en"}


def test_mathjax_keeps_its_licence(site: Path) -> None:
    assert "Apache License" in (site / "_static" / "mathjax-license.txt").read_text()


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page(readers: Readers, server: str, name: str, theme: str, width: int) -> None:
    """One load: requests, console, mathematics, images, width, theme, accessibility."""
    view = Visit(readers(theme, width).new_page())
    page = view.open(f"{server}/{name}")
    problems = view.problems
    problems += page.evaluate(MATH_PROBLEMS)
    problems += page.evaluate(IMAGE_PROBLEMS)
    if page.get_attribute("html", "data-theme") != theme:
        problems.append(f"the page does not follow the system into the {theme} theme")
    if width == 375 and (pixels := page.evaluate(OVERFLOW)):
        problems.append(f"{pixels} px wider than the screen")
    page.evaluate(ONE_WORD_OF_EACH_COLOUR)
    # Without preload: axe would look for imported style sheets beside the page.
    rules = {"runOnly": {"type": "tag", "values": AXE_RULES}, "preload": False}
    found = Axe().run(page, options={**rules, "resultTypes": ["violations"]})
    for violation in found.response["violations"]:
        places = [" ".join(map(str, node["target"])) for node in violation["nodes"]]
        problems.append(f"axe {violation['id']} ({violation['impact']}): {places[:4]}")
    page.close()
    assert not problems, "\n".join(problems)


# -- downloads -------------------------------------------------------------------------------


def download(site: Path, script: Path, suffix: str) -> Path:
    page = (site / f"auto_tutorials/{script.parent.name}/{script.stem}.html").read_text()
    found = set(re.findall(rf'_downloads/[0-9a-f]+/{re.escape(script.stem)}{suffix}"', page))
    assert len(found) == 1, f"{script.name} offers {len(found)} files {suffix}"
    return site / found.pop().rstrip('"')


@pytest.mark.parametrize("script", gallery.scripts(), ids=lambda path: path.stem)
def test_downloads(site: Path, script: Path) -> None:
    source = download(site, script, ".py").read_text()
    assert source == script.read_text()
    ast.parse(source)

    notebook = json.loads(download(site, script, ".ipynb").read_text())
    assert notebook["cells"] == notebooks.convert(script)["cells"]
    nbformat.validate(notebook)
    assert len(notebook["cells"]) == len(notebooks.blocks(script)) > 1
    assert notebooks.lint_notebook(notebook) == []

    with zipfile.ZipFile(download(site, script, ".zip")) as archive:
        assert archive.testzip() is None
        names = {Path(name).name for name in archive.namelist()}
        assert names == {script.name, script.with_suffix(".ipynb").name}


def test_download_of_all(site: Path) -> None:
    expected = {script.name for script in gallery.scripts()}
    archives = list(site.glob("_downloads/*/auto_tutorials_python.zip"))
    assert len(archives) == 1
    with zipfile.ZipFile(archives[0]) as archive:
        assert archive.testzip() is None
        assert {Path(n).name for n in archive.namelist() if n.endswith(".py")} == expected


@pytest.mark.parametrize("script", gallery.gpu_scripts(), ids=lambda path: path.stem)
def test_downloads_of_gpu_pages(site: Path, script: Path) -> None:
    """From the page and from the index of the chapter; the files are those of the repository."""
    for page in (f"gpu/{script.stem}.html", "gpu/index.html"):
        for path in (script, script.with_suffix(".ipynb")):
            found = set(
                re.findall(rf'_downloads/[0-9a-f]+/{path.name}(?=")', (site / page).read_text())
            )
            assert len(found) == 1, f"{page} offers {len(found)} files {path.name}"
            assert (site / found.pop()).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("script", gallery.gpu_scripts(), ids=lambda path: path.stem)
def test_gpu_pages_show_their_outputs(site: Path, script: Path) -> None:
    """As many outputs and figures as the stored notebook has."""
    cells = json.loads(script.with_suffix(".ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    page = (site / f"gpu/{script.stem}.html").read_text()
    assert len(re.findall(r'<img alt="[^"]+" src="\.\./_images/', page)) == len(figures)
    assert page.count("output text_plain") + page.count("output stream") == (
        len(outputs) - len(figures)
    )


def test_the_chapter_on_gpu_kernels_is_in_the_path(site: Path) -> None:
    assert GPU_PAGES
    for page in ("index.html", "auto_tutorials/index.html"):
        text = (site / page).read_text()
        prefix = "" if page == "index.html" else "../"
        article = text[text.index("<article") :]
        assert [name for name in GPU_PAGES if f'href="{prefix}{name}"' not in article] == []
    side = (site / TUTORIALS[0]).read_text()
    assert 'href="../../gpu/index.html"' in side


# -- exercises -------------------------------------------------------------------------------


def downloaded(site: Path, page: str, file: str) -> str:
    found = set(re.findall(rf'_downloads/[0-9a-f]+/{re.escape(file)}(?=")', page))
    assert len(found) == 1, f"the page offers {len(found)} files {file}"
    return (site / found.pop()).read_text(encoding="utf-8")


@pytest.mark.parametrize("found", exercises.written(), ids=lambda found: found.name)
def test_exercise(site: Path, found: Exercise) -> None:
    """Links in both directions, closed hints, downloads; and no line of the solution."""
    name = found.name
    page = (site / f"exercises/{name}.html").read_text(encoding="utf-8")
    article = page[page.index("<article") : page.index("</article>")]
    tutorial = exercise_pages.document(found.page)
    assert f'href="..{tutorial}.html"' in article
    back = (site / f"{tutorial[1:]}.html").read_text(encoding="utf-8")
    assert (
        f'href="{"../" * (tutorial.count("/") - 1)}exercises/{name}.html"'
        in (back[back.index("<article") : back.index("</article>")])
    )
    assert len(re.findall(r"<details class=[^>]*no-search[^>]*>", article)) == len(found.hints)
    assert not re.search(r"<details[^>]* open", article)
    shown = unescape(re.sub(r"<[^>]+>", "", article))
    assert "raise NotImplementedError()" in shown
    given = exercises.student_files()
    notebook = downloaded(site, article, f"{name}.ipynb")
    assert notebook == given[Path(f"{name}.ipynb")]
    assert downloaded(site, article, f"{name}.py") == given[Path(f"{name}.py")]
    assert leaks(shown, name, "\n".join(found.hints)) == []
    assert leaks(plain(notebook), name) == []


def test_download_of_all_exercises(site: Path) -> None:
    page = (site / "exercises/index.html").read_text(encoding="utf-8")
    (place,) = set(re.findall(r'_downloads/[0-9a-f]+/exercises\.zip(?=")', page))
    assert (site / place).read_bytes() == exercises.archive(exercises.student_files())


def test_no_other_file_holds_a_solution(site: Path) -> None:
    """Archives, the search index, and files that nothing links to."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    texts = {"searchindex.js": index}
    for path in site.glob("_downloads/*/*.zip"):
        with zipfile.ZipFile(path) as packed:
            for entry in packed.namelist():
                texts[f"{path.name}/{entry}"] = packed.read(entry).decode("utf-8")
    for path in site.rglob("*"):
        if path.suffix in {".py", ".ipynb", ".txt", ".md", ".rst"}:
            texts[path.relative_to(site).as_posix()] = path.read_text(encoding="utf-8")
    # Tutorials build the same functions in the open; their own files are not meant here.
    tutorials = {script.name for script in [*gallery.scripts(), *gallery.gpu_scripts()]}
    tutorials |= {Path(name).with_suffix(".ipynb").name for name in tutorials}
    for place, text in texts.items():
        if Path(place).name in tutorials:
            continue
        # A line like `return logits` of one exercise may be given in another.
        own = Path(place).stem
        for name in [own] if own in EXERCISES else EXERCISES:
            assert leaks(plain(text) if place.endswith(".ipynb") else text, name) == [], place
    assert not [place for place in texts if "catalogue" in place]
    assert not list(site.glob("api/*catalogue*"))


def test_search_does_not_know_the_proof(site: Path) -> None:
    """Wrong answers and hints are found on their pages only, by who looks for them there."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    data = json.loads(index[index.index("{") : index.rindex("}") + 1])
    proof = data["docnames"].index("exercises/proof")
    pages = [pages for pages in data["terms"].values()]
    assert not any(proof in (found if isinstance(found, list) else [found]) for found in pages)


def test_the_chapter_on_exercises_is_in_the_path(site: Path) -> None:
    for page in ("index.html", "auto_tutorials/index.html"):
        text = (site / page).read_text(encoding="utf-8")
        article = text[text.index("<article") :]
        for name in ("exercises/index.html", "exercises/proof.html", "teaching.html"):
            assert re.search(rf'href="(\.\./)?{name}"', article), f"{page} does not lead to {name}"
    index = (site / "exercises/index.html").read_text(encoding="utf-8")
    article = index[index.index("<article") :]
    assert [name for name in EXERCISES if f'href="{name}.html"' not in article] == []


def test_a_hint_opens(visit: Visitor, server: str) -> None:
    view = visit(width=375)
    page = view.open(f"{server}/{EXERCISE_PAGES[0]}")
    hint = page.locator("details.no-search").first
    assert not hint.locator("p").last.is_visible()
    hint.locator("summary").click()
    assert hint.locator("p").last.is_visible()
    assert view.problems == []


# -- journeys --------------------------------------------------------------------------------


def test_search_finds_a_tutorial(visit: Visitor, server: str) -> None:
    view = visit()
    page = view.open(f"{server}/index.html")
    page.locator("button.search-button__button:visible").first.click()
    page.locator("input[name=q]:visible").first.fill("attention")
    page.keyboard.press("Enter")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    assert results.count() > 1
    results.first.click()
    page.wait_for_load_state()
    assert "search" not in page.url
    assert view.problems == []


def test_next_leads_through_every_tutorial(visit: Visitor, server: str) -> None:
    view = visit()
    page = view.open(f"{server}/auto_tutorials/index.html")
    seen = []
    for _ in range(len(PAGES)):
        following = page.locator("a.right-next")
        if not following.count():
            break
        with page.expect_navigation():
            following.click()
        seen.append(page.url.removeprefix(f"{server}/").partition("#")[0])
    pages = TUTORIALS + GPU_PAGES + EXERCISE_PAGES
    assert [name for name in seen if name in pages] == pages
    if pages:
        page.goto(f"{server}/{pages[-1]}")
        with page.expect_navigation():
            page.locator("a.left-prev").click()
        assert page.url.removeprefix(f"{server}/") in PAGES
    assert view.problems == []


def test_reader_downloads_the_notebook(visit: Visitor, server: str, tmp_path: Path) -> None:
    page = visit().open(f"{server}/{TUTORIALS[0]}")
    with page.expect_download() as download:
        page.locator(".bd-sidebar-secondary a", has_text="notebook").first.click()
    target = tmp_path / "page.ipynb"
    download.value.save_as(target)
    assert (
        json.loads(target.read_text())["cells"] == notebooks.convert(gallery.scripts()[0])["cells"]
    )


def test_theme_survives_a_reload(visit: Visitor, server: str) -> None:
    view = visit(theme="light")
    page = view.open(f"{server}/index.html")
    page.locator("button.theme-switch-button:visible").first.click()
    page.locator("button.theme-change-button[data-mode=dark]:visible").first.click()
    assert page.get_attribute("html", "data-theme") == "dark"
    page.reload()
    assert page.get_attribute("html", "data-theme") == "dark"
    page.goto(f"{server}/{TUTORIALS[0]}")
    assert page.get_attribute("html", "data-theme") == "dark"
    assert view.problems == []


def test_phone_menu(visit: Visitor, server: str) -> None:
    view = visit(width=375)
    page = view.open(f"{server}/{TUTORIALS[0]}")
    page.locator("button.primary-toggle").click()
    link = page.locator("#pst-primary-sidebar-modal a", has_text="API").first
    link.wait_for()
    with page.expect_navigation():
        link.click()
    assert page.url.endswith("/api/index.html")
    assert view.problems == []


def test_copy_button(visit: Visitor, server: str) -> None:
    view = visit()
    view.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = view.open(f"{server}/{TUTORIALS[0]}")
    block = page.locator("div.highlight-Python, div.highlight-python").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.strip() == block.locator("pre").inner_text().strip()
    assert view.problems == []


def test_copy_on_disk(visit: Visitor, site: Path) -> None:
    """A reader who unpacks the site has mathematics and search without a server."""
    view = visit()
    page = view.open((site / TUTORIALS[0]).as_uri())
    assert page.evaluate(MATH_PROBLEMS) == []
    page.goto((site / "search.html").as_uri() + "?q=attention")
    page.locator("#search-results li a").first.wait_for()
    assert view.problems == []
