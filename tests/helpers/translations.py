"""What a translation of the site is held to: `python tests/helpers/translations.py` checks every
message of `docs/locale`.

A message has the markup, the links and the numbers of its English text; terms are those of the
glossary, which is the list of terms; Chinese has its own punctuation, and a space between it and
Latin letters. What only a reader can judge is not here.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from babel.messages.pofile import read_po
from docutils import nodes
from docutils.core import publish_doctree
from docutils.frontend import Values, get_default_settings
from docutils.parsers.rst import Parser, roles
from docutils.readers.standalone import Reader
from docutils.writers.null import Writer

ROOT = Path(__file__).resolve().parents[2]
LOCALE = ROOT / "docs" / "locale"

LITERAL = r"``.+?``"
ROLE = r":([\w:+-]+):`([^`]*)`"
LINK = r"`([^`<]*)<([^`>]*)>`__?"
DOLLARS = r"\$[^$]+\$"
HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"
WIDE = r"[，。：；？！、（）《》“”‘’…—]"
UNITS = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "万": 1e4, "亿": 1e8, "百万": 1e6}
#: Numbers that an English text may have as words.
IN_WORDS = set(range(0, 13)) | {100, 1000}


# ------------------------------------------------------------------------------- markup and links


def markup(text: str) -> Counter[str]:
    """What a program reads, and so what a translation keeps: literals, formulas, and where each
    link leads. Names of links are text."""
    found = Counter(re.findall(LITERAL, text))
    text = re.sub(LITERAL, " ", text)
    found.update(re.findall(DOLLARS, text))
    for name, content in re.findall(ROLE, text):
        target = re.search(r"<([^>]*)>$", content)
        found[f":{name}:{target[1] if target else content}"] += 1
    text = re.sub(ROLE, " ", text)
    found.update(f"link {address}" for _, address in re.findall(LINK, text))
    text = re.sub(LINK, " ", text)
    found["**"] += text.count("**")
    found["*"] += text.replace("**", "").count("*")
    return +found


for role in ("doc", "ref", "term", "func", "class", "meth", "mod", "attr", "data", "numref"):
    roles.register_generic_role(role, nodes.literal)


@cache
def settings() -> Values:
    """Those of docutils, made once: making them takes longer than a message."""
    values = get_default_settings(Reader, Parser, Writer)
    values.report_level, values.halt_level = 5, 6
    return values


def parsed(text: str) -> Counter[str]:
    """The parts of a message as docutils finds them: what stands too near to a letter is text."""
    if not re.search(r"[*`_|@]|://", text):  # most: no part begins without one of them
        return Counter()
    document = publish_doctree(text, settings=settings())
    kinds = (
        nodes.emphasis,
        nodes.strong,
        nodes.literal,
        nodes.math,
        nodes.reference,
        nodes.problematic,
    )
    return Counter(
        type(node).__name__ for node in document.findall(nodes.Inline) if isinstance(node, kinds)
    )


def prose(text: str) -> str:
    """A message without its markup: what a reader reads."""
    text = re.sub(LITERAL, "`", text)
    text = re.sub(DOLLARS, "`", text)
    text = re.sub(r":math:`[^`]*`", "`", text)
    text = re.sub(ROLE, lambda role: re.sub(r"\s*<[^>]*>$", "", role[2]), text)
    text = re.sub(LINK, lambda link: link[1].strip(), text)
    return text.replace("**", "").replace("*", "").replace("\\ ", "")


# ---------------------------------------------------------------------------------------- numbers


def numbers(text: str) -> Counter[float]:
    units = "|".join(sorted(UNITS, key=len, reverse=True))
    found: Counter[float] = Counter()
    pattern = rf"(?<![A-Za-z\d_.-])(\d+(?:,\d\d\d)*(?:\.\d+)?)(?:\s*({units}))?(?![A-Za-z\d_])"
    for digits, unit in re.findall(pattern, prose(text)):
        found[round(float(digits.replace(",", "")) * UNITS.get(unit, 1), 6)] += 1
    return found


# ------------------------------------------------------------------------------------------ terms


def bare(term: str) -> str:
    """A term without what stands in parentheses behind it."""
    return re.sub(r"\s*[(（].*[)）]$", "", term)


def fixed_terms(language: str, glossary: Path = ROOT / "docs" / "glossary.rst") -> dict[str, str]:
    """Terms that have one translation wherever they stand: those of the glossary that mean one
    thing only, so are links on every page."""
    text = glossary.read_text(encoding="utf-8")
    entries = re.findall(r"^   (\S.*)\n((?:      .*\n|\n)+)", text, re.M)
    plain = {term for term, body in entries if "linked on:" not in body and "(" not in term}
    known = messages(LOCALE / language / "LC_MESSAGES" / "glossary.po")
    return {term: bare(known[term]) for term in plain if known.get(term, term) != term}


def missing_terms(source: str, translation: str, terms: dict[str, str]) -> list[str]:
    english, other = prose(source), prose(translation)
    missing, longest_first = [], sorted(terms, key=len, reverse=True)
    for term in longest_first:
        if term.lower() not in english.lower():  # a search takes ten times as long
            continue
        pattern = rf"(?<![\w-]){re.escape(term)}(?:s|es)?(?![\w-])"
        if re.search(pattern, english, re.I):
            english = re.sub(pattern, " ", english, flags=re.I)
            if terms[term] not in other:
                missing.append(f"{term} is {terms[term]}")
    return missing


# ------------------------------------------------------------------------------------ punctuation

SIGNS = {
    rf"{HAN}\s*[,;:?!](?!\w)|{HAN}\.(?:\s|$)": "a half-width sign behind Chinese",
    rf"[(]\s*{HAN}|{HAN}\s*[)]": "a half-width parenthesis at Chinese",
    rf"[\"']{HAN}|{HAN}[\"']": "a straight quotation mark at Chinese",
    rf"{HAN} +{HAN}": "a space inside Chinese",
    rf"(?<=\S) +{WIDE}|{WIDE} +(?=\S)": "a space at a full-width sign",
    rf"{HAN}[A-Za-z0-9`$]|[A-Za-z0-9`$%]{HAN}": "no space between Chinese and Latin",
}


def punctuation(source: str, translation: str) -> list[str]:
    if re.fullmatch(r"[^.?!:]+(, [^.?!:]+){2,}", source):  # words for a search
        return []
    text = re.sub(r"\s*[—]{2}\s*", "，", prose(translation))
    return [
        f"{what}: {found[0]!r}" for sign, what in SIGNS.items() if (found := re.search(sign, text))
    ]


# ------------------------------------------------------------------------------------ the whole


def messages(path: Path) -> dict[str, str]:
    """The messages of a catalogue; one that is not translated, or marked as fuzzy, is empty."""
    with open(path, "rb") as file:
        catalogue = read_po(file)
    return {str(m.id): "" if m.fuzzy else str(m.string) for m in catalogue if m.id}


def faults(source: str, translation: str, terms: dict[str, str]) -> list[str]:
    """What is wrong with the translation of one message."""
    if not translation:
        return ["not translated"]
    found = []
    want, have = markup(source), markup(translation)
    if want != have:
        lost, new = dict(want - have), dict(have - want)
        found.append(f"markup: lost {lost}, new {new}")
    elif parsed(source) != parsed(translation):
        found.append(
            f"markup that is not seen: {dict(parsed(source))}, {dict(parsed(translation))}"
        )
    want_numbers, have_numbers = numbers(source), numbers(translation)
    if lost_numbers := want_numbers - have_numbers:
        found.append(f"numbers: lost {sorted(lost_numbers)}")
    if new_numbers := [n for n in have_numbers - want_numbers if n not in IN_WORDS]:
        found.append(f"numbers: new {sorted(new_numbers)}")
    found += missing_terms(source, translation, terms)
    if re.search(HAN, translation):
        found += punctuation(source, translation)
    return found


def check(language: str) -> list[str]:
    """Every fault of a language, with its file and the beginning of its English text."""
    terms, folder = fixed_terms(language), LOCALE / language / "LC_MESSAGES"
    return [
        f"{path.relative_to(folder)}: {source[:60]!r}: {fault}"
        for path in sorted(folder.rglob("*.po"))
        for source, translation in messages(path).items()
        for fault in faults(source, translation, terms)
    ]


if __name__ == "__main__":
    languages = sorted(path.name for path in LOCALE.iterdir()) if LOCALE.exists() else []
    found = [f"{language}: {fault}" for language in languages for fault in check(language)]
    print("\n".join(found) or "No faults.")
    sys.exit(bool(found))
