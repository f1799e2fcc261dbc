"""Search in Chinese, which is written without spaces: every two neighbouring characters are a word,
in the index and in what a reader types. Latin words are words as they stand."""

import re
from itertools import pairwise
from typing import Any

import sphinx.search
from sphinx.search import SearchLanguage

HAN = r"\u3400-\u4dbf\u4e00-\u9fff"

SPLIT = f"""
function splitQuery(query) {{
  const runs = query.match(/[{HAN}]+|(?:(?![{HAN}])[\\p{{L}}\\p{{N}}_])+/gu) || [];
  const pairs = (run) => Array.from(run.slice(1), (_, i) => run.slice(i, i + 2));
  return runs.flatMap((run) => (/^[{HAN}]{{2,}}$/.test(run) ? pairs(run) : [run]));
}}
"""
STEM = "class Stemmer { stemWord(word) { return word; } }"


def split(text: str) -> list[str]:
    """As the function in JavaScript above."""
    words: list[str] = []
    for run in re.findall(rf"[{HAN}]+|[^\W{HAN}]+", text):
        is_pairs = len(run) > 1 and re.match(f"[{HAN}]", run)
        words += map("".join, pairwise(run)) if is_pairs else [run]
    return words


class Chinese(SearchLanguage):
    lang = "zh"
    language_name = "Chinese"
    js_stemmer_code = STEM
    js_splitter_code = SPLIT

    def split(self, input: str) -> list[str]:
        return split(input)

    def stem(self, word: str) -> str:
        return word.lower()


def setup(app: Any) -> dict[str, bool]:
    sphinx.search.languages["zh"] = Chinese
    return {"parallel_read_safe": True, "parallel_write_safe": True}
