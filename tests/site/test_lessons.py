"""What a lesson does in a browser: answers that wait, code that is folded, figures, the path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Visitor
from gallery import folding, navigation, pages
from playwright.sync_api import Browser

PAGES = [name for name in pages.in_order() if not name.startswith("gpu/")]
ASKING = [
    name for name in pages.in_order() if "**Predict first.**" in pages.source(name).read_text()
]
each_page = pytest.mark.parametrize("name", PAGES)


def html(site: Path, name: str) -> str:
    return (site / f"{pages.document(name)[1:]}.html").read_text(encoding="utf-8")


@each_page
def test_code_that_can_wait_is_folded(site: Path, name: str) -> None:
    blocks = [block.content for block in pages.blocks(pages.source(name)) if block.type == "code"]
    parts = [part for parts in folding.parts(tuple(blocks)) for part in parts]
    text = html(site, name)
    labels = re.findall(r'<details class="[^"]*\bcode\b[^"]*">\s*<summary>(.*?)</summary>', text)
    assert labels == [part.label for part in parts if part.kinds]
    assert text.count('<div class="highlight-Python') == len(parts)


@pytest.mark.parametrize("name", ASKING)
def test_every_question_has_its_answer(site: Path, name: str) -> None:
    text = html(site, name)
    asked = pages.source(name).read_text().count("**Predict first.**")
    assert text.count("Predict first.") == asked
    assert len(re.findall(r'<details class="[^"]*\banswer\b', text)) == asked
    chosen = re.findall(r'<fieldset class="[^"]*predict.*?</fieldset>', text, re.S)
    assert len(chosen) == asked
    assert all(2 <= choices.count("<input") <= 4 for choices in chosen)


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "none"])
def test_a_reader_predicts_by_the_keyboard(browser: Browser, server: str, scripts: bool) -> None:
    """Choose, read what comes of it, change one's mind; without scripts open the answer oneself."""
    context = browser.new_context(
        java_script_enabled=scripts, viewport={"width": 375, "height": 800}
    )
    view = context.new_page()
    view.goto(f"{server}/{pages.document(ASKING[0])[1:]}.html")
    question = view.locator("fieldset.predict").first
    right = int(question.get_attribute("data-right") or "")
    choices = question.locator("input").all()
    answer = view.locator("details.answer").first
    inside = answer.locator(":scope > p")
    choices[(right + 1) % len(choices)].focus()
    view.keyboard.press("ArrowUp")  # moving does not decide
    view.keyboard.press("ArrowDown")
    assert choices[(right + 1) % len(choices)].is_checked()
    assert not inside.is_visible()
    if scripts:
        view.keyboard.press("Enter")
        assert "Not quite" in question.get_by_role("status").inner_text()
        view.keyboard.press("ArrowUp")
        view.keyboard.press("Space")
        view.keyboard.press("Enter")
        assert question.get_by_role("status").inner_text() == "Right."
    else:
        answer.locator("summary").focus()
        view.keyboard.press("Enter")
        assert question.get_by_role("status").count() == 0
    assert inside.is_visible()
    context.close()


def test_the_path_and_what_is_beside_it(visit: Visitor, server: str) -> None:
    """The button leads to the next lesson; the navigation shows in-depth pages below theirs."""
    name = next(name for name in pages.lessons() if pages.in_depth(name))
    deeper, after = pages.in_depth(name)[0], navigation.beside(name)[1]
    view = visit().open(f"{server}/{pages.document(name)[1:]}.html")
    ends = {button: view.locator(f"a.{button}").get_attribute("href") for button in ("right-next",)}
    assert after and (ends["right-next"] or "").endswith(f"{after.partition('/')[2]}.html")
    entry = view.locator(".bd-sidebar-primary li.current li.current ul a")
    assert entry.first.get_attribute("href") == f"{deeper.partition('/')[2]}.html"
    view.goto(f"{server}/{pages.document(deeper)[1:]}.html")
    back = view.locator("a.left-prev").get_attribute("href") or ""
    assert back.endswith(f"{name.partition('/')[2]}.html")


SMALLEST = """() => Math.min(...[...document.querySelectorAll(
  'article .figure svg text, article .diagram text, article .diagram span')]
  .filter(text => text.textContent.trim() && text.getBoundingClientRect().height > 0)
  .map(text => {
    const svg = text.closest('svg');
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    return parseFloat(getComputedStyle(text).fontSize) * scale;
  }), 99)"""
WIDER = """() => [...document.querySelectorAll(
  'article :is(.figure, .diagram, mjx-container[display], pre, .pst-scrollable-table-container)')]
  .filter(one => one.scrollWidth > one.clientWidth + 1)
  .filter(one => one.tabIndex || getComputedStyle(one).maskImage === 'none').length"""


@pytest.mark.parametrize("name", [name for name in PAGES if re.match(r"[1-4]_\w+/\d_", name)])
def test_figures_can_be_read_on_a_phone(visit: Visitor, server: str, name: str) -> None:
    """Letters of 7 pixels and more at 343 px; what is wider says so and scrolls, by keys too."""
    view = visit(theme="dark", width=375).open(f"{server}/{pages.document(name)[1:]}.html")
    view.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert view.evaluate(SMALLEST) >= 7
    view.evaluate("new Promise(done => setTimeout(done, 100))")  # what is open now is measured
    assert view.evaluate(WIDER) == 0
    assert view.locator("article .figure img, article img.sphx-glr-single-img").count() == 0


def test_ink_follows_the_theme(visit: Visitor, server: str, site: Path) -> None:
    name = next(name for name in PAGES if '<div class="figure"' in html(site, name))
    colours = set()
    for theme in ("light", "dark"):
        view = visit(theme=theme).open(f"{server}/{pages.document(name)[1:]}.html")
        ink = "one => getComputedStyle(one).fill"
        text = view.locator("article .figure svg text").first.evaluate(ink)
        assert text == view.locator("article p").first.evaluate("p => getComputedStyle(p).color")
        colours.add(text)
    assert len(colours) == 2


# -- slides ------------------------------------------------------------------------------------


def announcing(text: str) -> list[str]:
    """Slides that end in a colon, and those with a title alone."""
    drawn = re.sub(r"<(svg|math|pre)\b.*?</\1>|<img[^>]*>", "[drawn]", text, flags=re.S)
    plain = [
        re.sub(r"<[^>]+>", " ", slide.partition("</h")[2][2:]).strip()
        for slide in re.findall(r"<section.*?</section>", drawn, re.S)
    ]
    return [slide for slide in plain if not slide or slide.endswith(":")]


def test_a_slide_without_its_content_is_found() -> None:
    page = "<section><h2>One</h2>{}</section>"
    assert announcing(page.format("<p>These:</p>")) == ["These:"]
    assert announcing(page.format(" <p></p>")) == [""]
    assert announcing(page.format("<p>These:</p><ul><li>a</li></ul>")) == []
    assert announcing(page.format("<p>This:</p><pre>f(x):</pre>")) == []


@pytest.mark.parametrize("name", pages.lessons())
def test_slides_of_a_lesson(site: Path, name: str) -> None:
    """All that a class should see is in one file, which asks for no other."""
    text = (site / f"_static/slides/{name}.html").read_text(encoding="utf-8")
    asked = pages.source(name).read_text(encoding="utf-8").count("**Predict first.**")
    assert text.count('<section class="ask">') == text.count("<summary>Answer") == asked
    assert len(re.findall(r"<section", text)) > asked + 2
    assert not re.search(r"<link|<script src|(src|href)=\"(?!data:|#)|@import", text)
    assert "<svg" in text or 'class="diagram' in text or "data:image" in text
    assert announcing(text) == []
    (keep,) = re.findall(r'<section class="keep">.*?</section>', text, re.S)
    assert keep.count("<li>") == 3


def test_slides_by_the_keyboard(visit: Visitor, site: Path) -> None:
    """From disk, without a server: the arrow keys, and an answer that opens."""
    view = visit(width=1280)
    page = view.open((site / "_static/slides/1_gpt2/1_tokens.html").as_uri())
    assert page.evaluate("scrollY") == 0
    page.keyboard.press("ArrowRight")
    page.wait_for_function("scrollY >= innerHeight - 1")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("scrollY === 0")
    page.locator("summary").first.click()
    assert page.locator("details[open]").count() == 1
    assert view.problems == []
