"""Editions in other languages: every message translated, with the markup, numbers and terms of its
English text; the checks find planted faults."""

import re
from pathlib import Path

import catalogues
import pydata_sphinx_theme
import pytest
import translations
from babel.messages.extract import extract_from_dir
from editions import chinese, translation

LANGUAGES = [language for language in translation.EDITIONS if language != translation.FIRST]
NAMES = re.compile(r"\{\w+\}|%s")
TERMS = {"beam search": "束搜索", "KV cache": "KV 缓存"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_message_is_translated_without_a_fault(language: str) -> None:
    assert translations.check(language) == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_texts_around_a_page_are_all_there_and_no_others(language: str) -> None:
    """Besides those of the site, some of its theme, which has no translation of them."""
    folder = Path(pydata_sphinx_theme.__file__).parent / "theme"
    found = extract_from_dir(folder, [("**.html", "jinja2")], keywords={"_": None})
    theme = {message for _, _, message, _, _ in found}
    known = set(translation.words(language))
    assert translation.around() <= known <= translation.around() | theme


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_names_in_a_text_stay(language: str) -> None:
    for source, words in translation.words(language).items():
        assert set(NAMES.findall(source)) == set(NAMES.findall(words)), source


@pytest.mark.parametrize(
    ("source", "translation"),
    [
        ("See :doc:`caches </x>`, 12 of them.", "见\\ :doc:`缓存 </x>`，共 12 种。"),
        ("It has 2.5 million numbers.", "它有 250 万个数。"),
        ("A *token* is a piece.", "\\ *词元*\\ 是片段。"),
        ("Beam search keeps several.", "束搜索保留几个。"),
        ("``x`` and $y$.", "``x`` 和 $y$。"),
        ("tour, overview, embedding", "tour, overview, embedding, 导览, 嵌入"),
        ("About (a few) words", "关于（几个）词"),
    ],
)
def test_a_good_translation_has_no_fault(source: str, translation: str) -> None:
    assert translations.faults(source, translation, TERMS) == []


@pytest.mark.parametrize(
    ("source", "translation", "fault"),
    [
        ("Text.", "", "not translated"),
        ("See :doc:`caches </x>`.", "见 :doc:`缓存 </y>`。", "markup"),
        ("See :doc:`caches </x>`.", "见缓存。", "markup"),
        ("Call ``f(x)``.", "调用 ``f(y)``。", "markup"),
        ("A formula :math:`x^2`.", "公式 :math:`x^3`。", "markup"),
        ("A *word* here.", "这里的\\ *词*。", ""),
        ("A *word* here.", "这里的*词*汇。", "not seen"),
        ("*dropout* (often)", "*dropout*（常用）", "not seen"),
        ("`Page <https://a.org/1>`_.", "`页面 <https://a.org/2>`_。", "markup"),
        ("It has 2.5 million numbers.", "它有 25 万个数。", "numbers"),
        ("It takes 17 s.", "它需要 71 s。", "numbers"),
        ("Beam searches are slow.", "集束查找很慢。", "beam search is 束搜索"),
        ("One, two.", "一, 二。", "half-width sign"),
        ("End.", "结束.", "half-width sign"),
        ("A word (small)", "一个词(小)", "parenthesis"),
        ('Say "yes".', '说"是"。', "quotation"),
        ("Two words", "两 个词", "space inside"),
        ("One, two.", "一， 二。", "full-width"),
        ("The model has 3 heads.", "模型有3 个头。", "no space"),
        ("The GPT model", "这个GPT 模型", "no space"),
    ],
)
def test_a_planted_fault_is_found(source: str, translation: str, fault: str) -> None:
    found = " ".join(translations.faults(source, translation, TERMS))
    assert fault in found if fault else not found


def test_fuzzy_is_not_translated(tmp_path) -> None:
    (tmp_path / "x.po").write_text(
        '#, fuzzy\nmsgid "One."\nmsgstr "一。"\n\nmsgid "Two."\nmsgstr "二。"\n', encoding="utf-8"
    )
    assert translations.messages(tmp_path / "x.po") == {"One.": "", "Two.": "二。"}


def test_words_of_chinese_are_pairs_of_characters() -> None:
    assert chinese.split("KV缓存为何快") == ["KV", "缓存", "存为", "为何", "何快"]
    assert chinese.split("token_id 头, Top-k") == ["token_id", "头", "Top", "k"]


@pytest.mark.parametrize(
    "text",
    ["Measured on 2026-11-21.", "It took 0.31 s.", "With torch 2.13.0.", "At 12:30:05.",
     "In /home/me/work.", "<Tensor at 0x7f25f55be5c0>", "On 3 May 2026."],
)  # fmt: skip
def test_volatile_text_is_found(text: str) -> None:
    assert catalogues.volatile({"page": ["A stable sentence.", text]})


@pytest.mark.parametrize(
    "text",
    ["Python 3.11 or newer.", "About 0.5 of it.", "See tutorials/1_gpt2/2_gpt2.py.", "3.5 times",
     "arXiv 2403.03507", "`paper <https://example.org/home/x>`_"],
)  # fmt: skip
def test_stable_text_is_not(text: str) -> None:
    assert catalogues.volatile({"page": [text]}) == []
