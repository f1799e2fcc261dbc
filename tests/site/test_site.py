"""The built site, as its readers meet it. Run `make docs`, then `make check-site`."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import nbclient
import nbformat
import page_checks
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SITE, Visit, Visitor
from course import hand_out
from editions import translation
from exercise_leaks import leaks, plain
from gallery import downloads, exercises, pages
from notebook_lint import lint_notebook
from playwright.sync_api import Page, TimeoutError

from lm_from_scratch.exercises.exercise import Exercise

PAGES = sorted(
    path.relative_to(SITE).as_posix()
    for path in SITE.rglob("*.html")
    if "_static" not in path.relative_to(SITE).parts
)
TUTORIALS = [
    f"auto_tutorials/{script.parent.name}/{script.stem}.html" for script in pages.scripts()
]
LESSONS = [page for page in TUTORIALS if pages.is_lesson(page[len("auto_tutorials/") : -5])]
GPU_PAGES = [f"gpu/{notebook.stem}.html" for notebook in pages.notebooks()]
GPU_LESSONS = [page for page in GPU_PAGES if pages.is_lesson(page[:-5])]
EXERCISES = [found.name for found in exercises.written()]
EXERCISE_PAGES = [f"exercises/{name}.html" for name in EXERCISES]
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
EVERY_VIEW = bool(os.environ.get("EVERY_VIEW"))
# On a phone the frame of a page is another, which the pages of a folder share.
FIRST_OF_FOLDER = {str(Path(name).parent): name for name in reversed(PAGES)}.values()
# Pages of modules, of exercises, of weeks, of stories and of chapters come from a template each:
# one in sixteen is opened where time counts. An in-depth page is made of what lessons are made of,
# and a translation of what its first edition is: axe looks at one in four; every second in-depth
# page is opened, and no other translation. Formulas of pages that wait are drawn together on one.
MADE = re.compile(r"(api/lm_from_scratch\.|classroom/weeks_|stories/|auto_tutorials/.+/index)")
FROM_TEMPLATES = [name for name in PAGES if name in EXERCISE_PAGES or MADE.match(name)]
EDITIONS = tuple(f"{edition}/" for edition in translation.EDITIONS)
IN_DEPTH = {*TUTORIALS, *GPU_PAGES} - {*LESSONS, *GPU_LESSONS}
LIKE_LESSONS = [name for name in PAGES if name in IN_DEPTH or name.startswith(EDITIONS)]
SAMPLED = {*FROM_TEMPLATES, *LIKE_LESSONS} - {*FROM_TEMPLATES[::16], *LIKE_LESSONS[::4]}
WITHOUT_AXE = set() if EVERY_VIEW else SAMPLED
SLOW = SAMPLED - {*sorted(IN_DEPTH)[::2]}
OPENED = [name for name in PAGES if name not in SLOW]

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
# What is there a hundred times and always the same, axe looks at once: coloured words of code and
# their copy buttons. The drawing of a formula is hidden from screen readers, which get its MathML;
# its glyphs have the colour of the text around. What is in a figure counts as one image, and of its
# text axe never says what contrast it has. The list of all pages beside a page is the same for a
# folder but for the way to the page itself.
ONE_OF_EACH = """
({list}) => {
  const seen = new Set();
  for (const word of document.querySelectorAll('.highlight pre span')) {
    const kind = word.className + (word.closest('.sphx-glr-script-out') ? ' output' : '');
    if (seen.has(kind)) word.replaceWith(...word.childNodes);
    seen.add(kind);
  }
  [...document.querySelectorAll('button.copybtn')].slice(2).forEach(button => button.remove());
  document.querySelectorAll('mjx-container > mjx-math').forEach(math => math.replaceChildren());
  const reached = 'a, [role], [tabindex], [contenteditable], foreignObject';
  [...document.querySelectorAll('svg[role=img]')]
    .filter(figure => !figure.querySelector(reached)).forEach(figure => figure.replaceChildren());
  const others = '.bd-sidebar-primary nav li:not(.current)';
  if (!list) document.querySelectorAll(others).forEach(item => item.remove());
  document.body.normalize();  // the words that were taken out of their elements are one text again
}
"""
# The contrast of a text follows from its colour, size and weight and from the grounds behind it:
# axe measures two texts of each kind, and none of a kind that was sound on another page. So it is
# with links, whose text must differ from the text around. All other rules look at the whole page.
# Colours change at once, since axe must not meet them half way. Without preload: axe would look
# for imported style sheets beside the page.
AXE = """
async ({tags, whole, everywhere, sound}) => {
  const still = document.createElement('style');
  still.textContent = '*, *::before, *::after { transition: none !important; }';
  document.head.append(still);
  const grounds = new Map([[null, '']]);
  const ground = element => {
    if (!grounds.has(element)) {
      const {backgroundColor, backgroundImage, opacity} = getComputedStyle(element);
      const own = [backgroundColor, backgroundImage, opacity].join();
      const clear = own === 'rgba(0, 0, 0, 0),none,1';
      grounds.set(element, ground(element.parentElement) + (clear ? '' : `/${own}`));
    }
    return grounds.get(element);
  };
  const looks = element => {
    const {color, fontSize, fontWeight, textShadow} = getComputedStyle(element);
    return [color, fontSize, fontWeight, textShadow, ground(element)];
  };
  const known = new Set(sound);
  const kinds = new Map();
  for (const element of document.body.querySelectorAll('*')) {
    const says = [...element.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim());
    const link = element.matches('a[href]');
    if (!(says || link || element.matches('input, textarea, select'))) continue;
    if (!element.checkVisibility({visibilityProperty: true})) continue;
    const kind = looks(element);
    if (link) {
      const {textDecoration, fontStyle, fontFamily, borderBottom} = getComputedStyle(element);
      kind.push(textDecoration, fontStyle, fontFamily, borderBottom);
      kind.push(...looks(element.parentElement.closest('p, li, td, dd, div')));
    }
    const name = kind.join(' ');
    if (everywhere || !known.has(name)) kinds.set(name, [...(kinds.get(name) ?? []), element]);
  }
  const shown = [...kinds.values()].flatMap(alike => everywhere ? alike : alike.slice(0, 2));
  document.querySelectorAll('[data-shown]').forEach(element => delete element.dataset.shown);
  shown.forEach(element => element.setAttribute('data-shown', ''));
  axe.configure({rules: [
    {id: 'color-contrast', selector: '[data-shown]'},
    {id: 'link-in-text-block', selector: 'a[href][data-shown]'},
  ]});
  const rules = whole ? {type: 'tag', values: tags} : ['color-contrast'];
  const where = whole ? document : {include: shown};
  if (!whole && !shown.length) return {faults: [], sound};
  const found = await axe.run(where, {preload: false, resultTypes: ['violations'], runOnly: rules});
  const faults = found.violations.map(fault =>
    `axe ${fault.id} (${fault.impact}): ` + fault.nodes.slice(0, 4).map(n => n.target).join(', '));
  return {faults, sound: faults.length ? sound : [...sound, ...kinds.keys()]};
}
"""
# What a phone cuts at its edge fades there, which a11y.js says of a box when the window changes.
CUT = """
() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(
  [...document.querySelectorAll('div.math, mjx-container[display], .figure, .diagram')]
    .filter(box => box.checkVisibility() && box.scrollWidth > box.clientWidth + 2)
    .filter(box => !box.closest('[data-scrolls]'))
    .map(box => `cut without a cue: ${box.className || box.tagName}`)))))
"""
# In the dark no box is light: its ground, or most of an image as its filter shows it.
LIGHT = """
() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const isLight = (element, paint) => {
    canvas.clearRect(0, 0, 9, 9);
    canvas.filter = element.tagName === 'IMG' ? getComputedStyle(element).filter : 'none';
    paint();
    const dots = canvas.getImageData(0, 0, 9, 9).data;
    const light = [...Array(81).keys()].map(i => dots.slice(4 * i, 4 * i + 4)).filter(
      ([red, green, blue, a]) => a > 127 && 0.2126 * red + 0.7152 * green + 0.0722 * blue > 127);
    return light.length > 40;
  };
  return [...document.body.querySelectorAll('*')].filter(element => {
    const {width, height, bottom} = element.getBoundingClientRect();
    if (width < 40 || height < 40 || bottom <= 0) return false;
    if (!element.checkVisibility({visibilityProperty: true})) return false;
    const ground = getComputedStyle(element).backgroundColor;
    const fill = () => { canvas.fillStyle = ground; canvas.fillRect(0, 0, 9, 9); };
    if (ground !== 'rgba(0, 0, 0, 0)' && isLight(element, fill)) return true;
    return element.tagName === 'IMG' && element.naturalWidth > 0
      && isLight(element, () => canvas.drawImage(element, 0, 0, 9, 9));
  }).map(one => `light in the dark: ${one.tagName} ${one.className} ${one.src || ''}`);
}
"""
# The text has a box of its own, which would scroll sideways before the page does.
OVERFLOW = """
() => Math.max(...[document.documentElement, ...document.querySelectorAll('.bd-article-container')]
  .map(box => box.scrollWidth - box.clientWidth))
"""


def test_there_are_pages(site: Path) -> None:
    assert "index.html" in PAGES
    assert TUTORIALS, "the gallery is empty"
    assert EXERCISE_PAGES, "there are no exercises"
    assert set(TUTORIALS) | set(GPU_PAGES) | set(EXERCISE_PAGES) <= set(PAGES)


def test_every_tutorial_ran(site: Path) -> None:
    report = site.parent / "gallery_junit.xml"
    assert page_checks.check_junit(report, pages.scripts()) == []


def test_links_lead_somewhere(site: Path, pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_links(site, pages) == []


def test_ids_are_unique(pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_ids(pages) == []


def test_nothing_is_loaded_from_outside(pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_no_outside_resources(pages) == []


def test_no_page_shows_where_it_was_built(site: Path) -> None:
    assert page_checks.check_paths(site, pages.ROOT) == []


def test_images_have_alt_text(pages: dict[Path, page_checks.Page]) -> None:
    assert page_checks.check_images(pages) == []


def test_pages_name_their_language(site: Path, pages: dict[Path, page_checks.Page]) -> None:
    for path, page in pages.items():
        folder = path.relative_to(site).parts[0]
        edition = folder if folder in translation.EDITIONS else translation.FIRST
        assert page.lang == edition.replace("_", "-"), path


def test_mathjax_keeps_its_licence(site: Path) -> None:
    assert "Apache License" in (site / "_static" / "mathjax-license.txt").read_text()


def axe_faults(page: Page, whole: bool, sound: list[str] | None = None) -> list[str]:
    """What axe finds; kinds of text that are sound join those that were."""
    sound = [] if sound is None else sound
    options = {"tags": AXE_TAGS, "whole": whole, "everywhere": EVERY_VIEW, "sound": sound}
    answer = page.evaluate(AXE, options)
    sound[:] = answer["sound"]
    faults: list[str] = answer["faults"]
    return faults


@pytest.fixture(scope="session")
def sound() -> list[str]:
    """Kinds of text whose contrast is enough."""
    return []


@pytest.mark.parametrize(
    "name", [*OPENED, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW))]
)
def test_page(reader: Visit, server: str, sound: list[str], name: str) -> None:
    """One load, on a phone: requests, console, mathematics, images; then axe, wide, in the dark.

    Each page is seen wide and dark, every fourth one narrow and light; rules that do not measure
    contrast look at the wide page, and at the narrow one of the first page of each folder. With
    EVERY_VIEW=1 each theme is seen at each width, by all rules, on every page, and the contrast of
    every text is measured: many minutes more.
    """
    problems = reader.problems
    problems.clear()
    # The page before need not be laid out for a phone.
    reader.page.evaluate("document.body.style.display = 'none'")
    reader.page.set_viewport_size({"width": 375, "height": 900})
    reader.page.emulate_media(color_scheme="dark")
    page = reader.open(f"{server}/{name}")
    problems += page.evaluate(MATH_PROBLEMS)
    problems += page.evaluate(IMAGE_PROBLEMS)
    if pixels := page.evaluate(OVERFLOW):
        problems.append(f"{pixels} px wider than a phone")
    problems += page.evaluate(CUT)
    if name in WITHOUT_AXE:
        assert not problems, "\n".join(problems)
        return
    first = name in FIRST_OF_FOLDER
    page.evaluate(ONE_OF_EACH, {"list": EVERY_VIEW or first})
    page.evaluate(Axe().axe_script)
    views = [(1280, "dark")]
    if EVERY_VIEW:
        views += [(375, "light"), (375, "dark"), (1280, "light")]
    elif first or (name in OPENED and OPENED.index(name) % 4 == 0):
        views.append((375, "light"))
    for width, theme in views:
        page.set_viewport_size({"width": width, "height": 900})
        # The reader's system changes while the page is open, which must follow.
        page.emulate_media(color_scheme=theme)
        try:
            page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
        except TimeoutError:
            problems.append(f"the page does not follow the system into the {theme} theme")
        whole = EVERY_VIEW or width == 1280 or first
        for violation in axe_faults(page, whole, sound):
            problems.append(f"{theme}, {width} px: {violation}")
        if theme == "dark":
            problems += page.evaluate(LIGHT)
    assert not problems, "\n".join(problems)


def formulas(names: Iterable[str]) -> list[str]:
    """Each once, as it stands in the source of pages: for MathJax to draw."""
    pattern = re.compile(r'<(span|div) class="math\b.*?</\1>', re.S)
    texts = ((SITE / name).read_text(encoding="utf-8") for name in sorted(names))
    return list(dict.fromkeys(match[0] for text in texts for match in pattern.finditer(text)))


DRAW = """async formulas => {
  document.querySelector('article').innerHTML = formulas.join('<br>');
  await MathJax.typesetPromise();
  await document.fonts.ready;
}"""


def test_formulas_of_pages_that_are_not_opened(visit: Visitor, server: str) -> None:
    found = formulas(SLOW)
    assert len(found) > 100
    view = visit()
    page = view.open(f"{server}/symbols.html")
    page.evaluate(DRAW, found)
    assert page.locator(".math").count() == len(found)
    assert view.problems + page.evaluate(MATH_PROBLEMS) == []
    page.evaluate(DRAW, [r'<span class="math">\(\frac{1}\)</span>'])
    assert len(page.evaluate(MATH_PROBLEMS)) == 1, "a formula that is none is found"


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("name", ["index.html", TUTORIALS[0], "exercises/index.html"])
def test_page_begins_in_the_theme_of_the_system(
    visit: Visitor, server: str, name: str, width: int
) -> None:
    view = visit(theme="dark", width=width)
    page = view.open(f"{server}/{name}")
    assert page.get_attribute("html", "data-theme") == "dark"
    assert view.problems == []


FAULTS = {
    "image-alt": "document.querySelector('article').append(document.createElement('img'))",
    "color-contrast": "document.querySelector('article h1 ~ p').style.color = '#c8c8c8'",
    "button-name": "document.querySelector('article').append(document.createElement('button'))",
    "link-in-text-block": """const link = document.createElement('a');
      Object.assign(link, {href: '#', textContent: 'a link', style: 'all: unset; color: #444'});
      document.querySelector('article h2 ~ p').append(link)""",
    "svg-img-alt": "document.querySelector('article svg[role=img]').removeAttribute('aria-label')",
}


def test_axe_finds_planted_faults(visit: Visitor, server: str) -> None:
    """Also where most kinds of text were sound before."""
    page = visit().open(f"{server}/{LESSONS[-1]}")
    page.evaluate(ONE_OF_EACH, {"list": False})
    page.evaluate(Axe().axe_script)
    sound: list[str] = []
    assert axe_faults(page, whole=True, sound=sound) == [] and len(sound) > 5
    page.evaluate(f"() => {{ {'; '.join(FAULTS.values())} }}")
    for whole, faults in ((True, {*FAULTS}), (False, {"color-contrast"})):
        found = axe_faults(page, whole, sound)
        assert {violation.split()[1] for violation in found} == faults


def test_what_is_cut_or_light_is_found(visit: Visitor, server: str) -> None:
    page = visit(theme="dark", width=375).open(f"{server}/{GPU_LESSONS[0]}")
    assert page.evaluate(CUT) == page.evaluate(LIGHT) == []
    page.evaluate("""() => {
        const fading = document.querySelectorAll('[data-scrolls]');
        fading.forEach(box => box.removeAttribute('data-scrolls'));
        const plain = 'filter: none !important';
        document.querySelectorAll('.cell_output img').forEach(one => one.style.cssText = plain);
        document.querySelector('article h2 ~ p').style.background = '#ddd';
    }""")
    assert page.evaluate(CUT) != []
    assert len(page.evaluate(LIGHT)) == page.locator(".cell_output img:visible").count() + 1


# -- downloads -------------------------------------------------------------------------------


def download(site: Path, script: Path, suffix: str) -> Path:
    page = (site / f"auto_tutorials/{script.parent.name}/{script.stem}.html").read_text()
    found = set(re.findall(rf'_downloads/[0-9a-f]+/{re.escape(script.stem)}{suffix}"', page))
    assert len(found) == 1, f"{script.name} offers {len(found)} files {suffix}"
    return site / found.pop().rstrip('"')


@pytest.mark.parametrize("script", pages.scripts(), ids=lambda path: path.stem)
def test_downloads(site: Path, script: Path) -> None:
    source = download(site, script, ".py").read_text()
    assert source == downloads.without_widgets(script.read_text()) and "live::" not in source
    ast.parse(source)

    notebook = json.loads(download(site, script, ".ipynb").read_text())
    assert notebook["cells"] == downloads.convert(script)["cells"]
    nbformat.validate(notebook)
    assert lint_notebook(notebook) == []

    with zipfile.ZipFile(download(site, script, ".zip")) as archive:
        assert archive.testzip() is None
        names = {Path(name).name for name in archive.namelist()}
        assert names == {script.name, script.with_suffix(".ipynb").name}


def test_download_of_all(site: Path) -> None:
    expected = {script.name for script in pages.scripts()}
    archives = list(site.glob("_downloads/*/auto_tutorials_python.zip"))
    assert len(archives) == 1
    with zipfile.ZipFile(archives[0]) as archive:
        assert archive.testzip() is None
        assert {Path(n).name for n in archive.namelist() if n.endswith(".py")} == expected


@pytest.mark.parametrize("notebook", pages.notebooks(), ids=lambda path: path.stem)
def test_downloads_of_gpu_pages(site: Path, notebook: Path) -> None:
    """Twice from the page and from the index of the chapter; the file is that of the repository."""
    for page in (f"gpu/{notebook.stem}.html", "gpu/index.html"):
        text = (site / page).read_text()
        found = re.findall(rf'_downloads/[0-9a-f]+/{notebook.name}(?=")', text)
        assert len({*found}) == 1, f"{page} offers {len(found)} files {notebook.name}"
        assert len(found) == (1 if page.endswith("index.html") else 2)
        assert (site / found[0]).read_bytes() == notebook.read_bytes()


@pytest.mark.parametrize("notebook", pages.notebooks(), ids=lambda path: path.stem)
def test_gpu_pages_show_their_outputs(site: Path, notebook: Path) -> None:
    """As many outputs and figures as the stored notebook has."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    page = (site / f"gpu/{notebook.stem}.html").read_text()
    assert len(re.findall(r'<img alt="[^"]+" src="\.\./_images/', page)) == len(figures)
    shown = sum(page.count(f"output {kind}") for kind in ("text_plain", "stream", "text_html"))
    assert shown == len(outputs) - len(figures)


def test_the_chapter_on_gpu_kernels_is_in_the_path(site: Path) -> None:
    assert GPU_LESSONS
    for page in ("index.html", "auto_tutorials/index.html"):
        text = (site / page).read_text()
        prefix = "" if page == "index.html" else "../"
        article = text[text.index("<article") :]
        assert [name for name in GPU_LESSONS if f'href="{prefix}{name}"' not in article] == []
    side = (site / TUTORIALS[0]).read_text()
    assert 'href="../../gpu/index.html"' in side


# -- exercises -------------------------------------------------------------------------------


def downloaded(site: Path, page: str, file: str) -> str:
    found = set(re.findall(rf'_downloads/[0-9a-f]+/{re.escape(file)}(?=")', page))
    assert len(found) == 1, f"the page offers {len(found)} files {file}"
    return (site / found.pop()).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def given() -> dict[Path, str]:
    """Every file that a student gets."""
    return hand_out.student_files()


@pytest.mark.parametrize("found", exercises.written(), ids=lambda found: found.name)
def test_exercise(site: Path, given: dict[Path, str], found: Exercise) -> None:
    """Links in both directions, closed hints, downloads; and no line of the solution."""
    name = found.name
    page = (site / f"exercises/{name}.html").read_text(encoding="utf-8")
    article = page[page.index("<article") : page.index("</article>")]
    tutorial = pages.document(found.page)
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
    notebook = downloaded(site, article, f"{name}.ipynb")
    assert notebook == given[Path(f"{name}.ipynb")]
    assert downloaded(site, article, f"{name}.py") == given[Path(f"{name}.py")]
    assert leaks(shown, name, "\n".join(found.hints)) == []
    assert leaks(plain(notebook), name) == []


def test_download_of_all_exercises(site: Path, given: dict[Path, str]) -> None:
    page = (site / "exercises/index.html").read_text(encoding="utf-8")
    (place,) = set(re.findall(r'_downloads/[0-9a-f]+/exercises\.zip(?=")', page))
    assert (site / place).read_bytes() == hand_out.archive(given)


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
    tutorials = {path.name for path in [*pages.scripts(), *pages.notebooks()]}
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
        for name in ("exercises/index.html", "teaching.html"):
            assert re.search(rf'href="(\.\./)?{name}"', article), f"{page} does not lead to {name}"
    index = (site / "exercises/index.html").read_text(encoding="utf-8")
    article = index[index.index("<article") :]
    assert [name for name in [*EXERCISES, "proof"] if f'href="{name}.html"' not in article] == []


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


def following(page: str, direction: str = "right-next") -> str | None:
    found = re.search(rf'class="{direction}"\s+href="([^"#]*)', page)
    return found and found[1]


def test_next_leads_through_every_lesson(site: Path) -> None:
    """Also back again: the page before the one that is next is this one."""
    place = site / "tour.html"
    seen = []
    while step := following(place.read_text(encoding="utf-8")):
        after = (place.parent / unquote(step)).resolve()
        back = following(after.read_text(encoding="utf-8"), "left-prev")
        assert back and (after.parent / unquote(back)).resolve() == place.resolve(), after
        assert after not in seen, f"{after} comes twice"
        seen.append(after)
        place = after
    pages = LESSONS + GPU_LESSONS + EXERCISE_PAGES
    names = [path.relative_to(site.resolve()).as_posix() for path in seen]
    assert [name for name in names if name in {*pages, *TUTORIALS, *GPU_PAGES}] == pages


def test_next_and_previous(visit: Visitor, server: str) -> None:
    view = visit(width=375)
    page = view.open(f"{server}/{LESSONS[0]}")
    with page.expect_navigation():
        page.locator("a.right-next").click()
    assert page.url == f"{server}/{LESSONS[1]}"
    with page.expect_navigation():
        page.locator("a.left-prev").click()
    assert page.url == f"{server}/{LESSONS[0]}"
    assert view.problems == []


def test_reader_downloads_and_runs_the_notebook(
    visit: Visitor, server: str, tmp_path: Path
) -> None:
    """In a folder of their own, outside the clone."""
    page = visit().open(f"{server}/{TUTORIALS[0]}")
    with page.expect_download() as download:
        page.locator(".bd-sidebar-secondary a", has_text="notebook").first.click()
    target = tmp_path / "page.ipynb"
    download.value.save_as(target)
    assert (
        json.loads(target.read_text(encoding="utf-8"))["cells"]
        == downloads.convert(pages.scripts()[0])["cells"]
    )
    notebook = nbformat.read(target, as_version=4)
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    folder = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder)
    client.execute(env=environment)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in out.get("data", {}) for cell in cells for out in cell.outputs)


def test_reader_opens_a_solution(visit: Visitor, server: str, tmp_path: Path) -> None:
    """The page shows no solution, but says what shows it; a copy of that does, asked twice."""
    view = visit(width=375)
    page = view.open(f"{server}/exercises/rms_norm.html")
    command = page.locator("article code", has_text="solution rms_norm").first.inner_text()
    program, *arguments = command.split()
    assert program == "python"
    environment = {
        **os.environ,
        "LM_FROM_SCRATCH_PROGRESS": str(tmp_path / "progress.json"),
        "PYTHONPATH": str(pages.ROOT),
    }
    run = [sys.executable, *arguments]
    texts = [
        subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert "def rms_norm" not in texts[0], "a solution is shown when it is asked for again"
    assert "def rms_norm" in texts[1] and "NotImplementedError" not in texts[1]
    assert view.problems == []


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
    view = visit(fresh=True)
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
