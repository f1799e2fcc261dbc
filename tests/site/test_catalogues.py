"""What a translator of the built site gets (`make catalogues`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import course
import exercise_pages
import translation


def catalogues(site: Path, out: Path, seed: str) -> dict[str, bytes]:
    """The files that a process of its own writes; it fails on text that does not stay."""
    command = [sys.executable, translation.__file__, str(site.parent / "doctrees"), str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0", "PYTHONHASHSEED": seed}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.pot")}


def test_every_page_has_a_catalogue_and_it_stays(site: Path, tmp_path: Path) -> None:
    first = catalogues(site, tmp_path / "first", "0")
    documents = {exercise_pages.document(page)[1:] for page in course.in_order()}
    assert {f"{name}.pot" for name in documents | {"index", "glossary"}} <= set(first)
    assert catalogues(site, tmp_path / "second", "1") == first
