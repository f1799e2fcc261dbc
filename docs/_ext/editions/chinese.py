"""Search in Chinese, which is written without spaces: every two neighbouring characters are a word,
in the index and in what a reader types. Latin words are words as they stand."""

import re
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
    found: list[str] = []
    for run in re.findall(rf"[{HAN}]+|[^\W{HAN}]+", text):
        pairs = [run[i : i + 2] for i in range(len(run) - 1)]
        found += pairs if pairs and re.match(f"[{HAN}]", run) else [run]
    return found


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
