"""Pages of `docs/_pages`: the prose is there, and a build fills in what it computes."""

from pathlib import Path
from typing import Any

from docutils.utils import column_width
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sphinx.locale import _

DOCS = Path(__file__).resolve().parents[2]
PAGES = Environment(
    loader=FileSystemLoader([DOCS / "_pages", DOCS / "_templates"]),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    lstrip_blocks=True,
)


def render(template: str, /, **values: Any) -> str:
    return PAGES.get_template(template).render(**values)


def table(rows: list[list[str]], *options: str) -> str:
    """A table: rows of cells, the first of them the header. A cell may be several paragraphs, with
    an empty line between them."""
    lines = [".. list-table::", "   :header-rows: 1", *(f"   {option}" for option in options), ""]
    for row in rows:
        for i, cell in enumerate(row):
            first, *rest = cell.split("\n")
            lines.append(f"   {'  ' if i else '* '}- {first}".rstrip())
            lines += [f"       {line}".rstrip() for line in rest]
    return "\n".join([*lines, ""])


def heading(title: str, mark: str = "-") -> str:
    return f"{title}\n{mark * column_width(title)}\n"  # a Chinese character is two wide


PAGES.globals |= {"table": table, "heading": heading, "_": _}
PAGES.filters["percent"] = "{:.0%}".format
