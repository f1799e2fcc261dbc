"""What a translator of the site gets (`make catalogues`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import catalogues
import pytest
import translations
from editions import translation
from gallery import pages


@pytest.mark.slow
def test_every_page_has_a_catalogue_and_it_stays(site: Path, tmp_path: Path) -> None:
    """A process of its own writes them; nothing in them is of one day or one machine."""
    command = [sys.executable, "-m", "sphinx", "-q", "-t", "catalogues", "-b", "gettext"]
    command += ["-d", str(tmp_path / "trees"), str(pages.DOCS), str(tmp_path / "pot")]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = catalogues.messages(tmp_path / "pot")
    documents = {pages.document(name)[1:] for name in pages.in_order()}
    assert documents | {"index", "glossary"} <= set(found)
    assert catalogues.volatile(found) == []
    for language in translation.EDITIONS:
        for name in translation.pages(language) or ():
            held = translations.messages(translation.catalogues(language) / f"{name}.po")
            assert set(held) == set(found[name]), f"{language}, {name}: update the catalogue"
