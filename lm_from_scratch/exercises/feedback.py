"""Feedback: for each student a text, and the same as a page that opens anywhere.

A page is one file: no script, no font, nothing from elsewhere. All that comes from a submission is
escaped, and a browser is told to run nothing and load nothing.
"""

import os
from html import escape
from pathlib import Path
from zlib import crc32

from lm_from_scratch.exercises.book import replace
from lm_from_scratch.exercises.grade import Row
from lm_from_scratch.exercises.marks import Student, days_late, mark

#: :meta hide-value:
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: light-dark(#ccc, #555); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid var(--line); }}
pre {{ overflow-x: auto; padding: 1em; border: 1px solid var(--line); border-radius: .3em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{paragraphs}
<table>
<thead><tr><th>exercise</th><th>marks</th><th>points</th><th>done</th></tr></thead>
<tbody>
{table}
</tbody>
</table>
{sections}
</body>
</html>
"""


def write_reports(lines: list[Student], due: str, folder: Path) -> None:
    """A text and a page for each student. One that says something else than before is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for student in lines:
        name = file_name(student.name)
        replace(folder / f"{name}.txt", text(student, due))
        replace(folder / f"{name}.html", page(student, due))


def file_name(student: str) -> str:
    """A name that every file system takes."""
    long = len(os.fsencode(student)) >= 200
    return f"{student[:40]}-{crc32(os.fsencode(student)):08x}" if long else student


def text(student: Student, due: str) -> str:
    """All that the checks said, and a teacher."""
    parts = [headline(student), *remarks(student)]
    parts += ["\n".join([row.verdict.text, *origin(row, due)]) for row in student.rows]
    return "\n\n".join(parts) + "\n"


def page(student: Student, due: str) -> str:
    """The same in HTML."""
    table, sections = [], []
    for n, row in enumerate(student.rows):
        v = row.verdict
        link = f'<a href="#e{n}">{shown(v.exercise)}</a>'
        row_of = [link, f"{mark(v):g}", f"{v.points:g} of {v.of:g}", "yes" if v.passed else "no"]
        table.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row_of)}</tr>")
        where = "".join(f"<p>{shown(line)}</p>" for line in origin(row, due))
        head = f'<h2 id="e{n}">{shown(v.exercise)}</h2>'
        sections.append(f"{head}\n<pre>{shown(v.text)}</pre>\n{where}")
    paragraphs = "\n".join(f"<p>{shown(line)}</p>" for line in remarks(student))
    return PAGE.format(title=shown(headline(student)), paragraphs=paragraphs,
                       table="\n".join(table), sections="\n".join(sections))  # fmt: skip


def headline(student: Student) -> str:
    """The name and the sum."""
    return f"{student.name}: {student.total:g} of {student.of:g} points"


def remarks(student: Student) -> list[str]:
    """How the sum comes about, and what a teacher says."""
    of = f"{student.done} of {len(student.rows)} exercises are done"
    lines = [f"{of}. A done exercise gives all its points, any other half of those it reached."]
    if manual := student.own.get("manual", "").strip():
        lines.append(f"By your teacher: {manual} points.")
    if note := student.own.get("note", "").strip():
        lines.append(f"Note: {note}")
    return lines


def origin(row: Row, due: str) -> list[str]:
    """Which file counts, and whether it came in time."""
    late = days_late(row, due)
    days = f", {late} {'day' if late == 1 else 'days'} late" if late else ""
    return [f"file: {row.file}{days}"] if row.file else []


def shown(text: str) -> str:
    """Text inside HTML: escaped, of characters that can be printed."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
