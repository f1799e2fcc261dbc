"""Drawings and figures of a page in the form of a book: files of their own, or words on coloured
grounds, as XHTML and as TeX."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gallery import figures
from sphinx.util import texescape

SVG = "{http://www.w3.org/2000/svg}"
NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
CSS = Path(__file__).resolve().parents[2] / "_static" / "site.css"
#: Elements of a drawing that is made of words.
WORDS = {"div", "span", "b", "strong", "s", "small", "br", "wbr"}
#: Of its size on a page, so that letters are as large as those of the text.
SCALE = "0.85"


def parts_of(html: str) -> Iterator[tuple[str, Any]]:
    """The parts of a piece of HTML: "svg" and "text" with an element, "frame" with a label and its
    parts, "unknown" with what is none of these."""
    html = re.sub(r"<(br|wbr)>", r"<\1/>", html)
    html = re.sub(r"<svg\b(?![^>]*xmlns=)", f"<svg {NAMESPACES}", html)
    try:
        yield from parts(ElementTree.fromstring(f"<div>{html}</div>"))
    except ElementTree.ParseError:
        yield "unknown", html


def parts(element: ElementTree.Element) -> Iterator[tuple[str, Any]]:
    kinds = element.get("class", "").split()
    if element.tag == f"{SVG}svg":
        yield "svg", element
    elif element.get("role") == "radiogroup":  # frames, of which a reader chooses one
        (frames,) = (one for one in element if one.get("class") == "frames")
        name = element.find("span").text
        for label, frame in zip(element.findall("label"), frames, strict=True):
            yield "frame", (f"{name}{label.text}", list(parts(frame)))
    elif "diagram" in kinds and next(element.iter(f"{SVG}svg"), None) is None:
        known = all(inner.tag in WORDS for inner in element.iter())
        yield ("text", element) if known else ("unknown", xhtml(element))
    else:
        if text := "".join([element.text or "", *(one.tail or "" for one in element)]).strip():
            yield "unknown", text
        for child in element:
            yield from parts(child)


def standing_alone(svg: ElementTree.Element) -> str:
    """A drawing of a page as a file of its own, in black on white."""
    svg.set("role", "img")
    ElementTree.register_namespace("", SVG[1:-1])
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    text = ElementTree.tostring(svg, encoding="unicode")
    text = re.sub(r"</?a\b[^>]*>", "", text)  # parts of a picture are no links
    for colour, variable in figures.THEMED.items():
        text = text.replace(variable, colour)
    text = text.replace("system-ui, ", "")
    style = f"<style>{letters()} text {{ font-family: 'DejaVu Sans', sans-serif }}</style>"
    return re.sub(r"(<svg\b[^>]*>)", lambda tag: tag[1] + style, text, count=1) + "\n"


def letters() -> str:
    """Letters in a colour are dark enough to be read, as on the site on a light ground."""
    css = CSS.read_text(encoding="utf-8")
    light = re.findall(r'^html\[data-theme="light"\] :is\((\.diagram text.*?\) \{.*\})$', css, re.M)
    return re.sub(r"\.(diagram|figure) ", "", " ".join(light)).replace(") {", " {")


def as_pdf(path: Path) -> Path:
    pdf = path.with_suffix(".pdf")
    if not pdf.exists():
        subprocess.run(["rsvg-convert", "-z", SCALE, "-f", "pdf", "-o", pdf, path], check=True)
    return pdf


def xhtml(element: ElementTree.Element) -> str:
    return ElementTree.tostring(element, encoding="unicode")


def tex_drawing(element: ElementTree.Element) -> str:
    return f"\\begin{{bookdrawing}}\n{tex(element, [])}\n\\end{{bookdrawing}}\n"


def tex(element: ElementTree.Element, around: list[str]) -> str:
    """Words with coloured grounds, as TeX; ``around`` are commands that hold for each word."""
    style = dict(re.findall(r"([\w-]+):\s*([^;]+)", element.get("style", "")))
    own = [*around, *commands(element.tag, style)]
    boxed = style.get("display") == "inline-block"
    if element.tag in ("br", "wbr"):
        return "\\\\" if element.tag == "br" else ""
    inner = set_words(element.text or "", [] if boxed else own)
    for child in element:
        inner += tex(child, [] if boxed else own)
        inner += set_words(child.tail or "", [] if boxed else own)
    if boxed:
        inner = rf"\shortstack{{{inner}}}" if element.find("br") is not None else inner
        return f"{wrapped(inner, own)}\\hspace{{2pt plus 1pt}}\\allowbreak{{}}"
    return f"{inner}\\par\n" if element.tag == "div" else inner


def commands(tag: str, style: dict[str, str]) -> list[str]:
    decoration = style.get("text-decoration", "")
    holds = {
        r"\textbf": tag in ("b", "strong") or style.get("font-weight") == "600",
        r"\booksmall": tag == "small",
        r"\texttt": "monospace" in style.get("font-family", ""),
        r"\bookwrong": "wavy" in decoration,
        r"\bookstruck": "line-through" in decoration,
        r"\bookmark": "outline" in style,
    }
    if colour := re.match(r"rgba\((\d+), (\d+), (\d+), ([\d.]+)\)", style.get("background", "")):
        *rgb, opacity = map(float, colour.groups())
        on_white = (round(255 + (one - 255) * opacity) for one in rgb)
        holds[r"\bookbox{{{:02X}{:02X}{:02X}}}".format(*on_white)] = True
    holds[r"\underline"] = style.get("border-bottom", "none") != "none"
    return [command for command, holds_here in holds.items() if holds_here]


def wrapped(text: str, around: list[str]) -> str:
    for command in reversed(around):
        text = f"{command}{{{text}}}"
    return text


def set_words(text: str, around: list[str]) -> str:
    """Text with its blanks and line ends, word by word, so that a line can end after each."""
    words = ""
    for run in re.findall(r"\n|[^\S\n]*\S+|[^\S\n]+", text):
        if run == "\n":
            words += "\\\\\\mbox{}\n"
            continue
        word = run.lstrip()
        blanks = r"\ " * (len(run) - len(word))
        words += wrapped(blanks + texescape.escape(word, "xelatex"), around) + "\\allowbreak{}"
    return words
