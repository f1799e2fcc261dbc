"""How a wheel is built: setuptools, with the tutorials as notebooks.

The hooks of PEP 517, of which `pyproject.toml` names this file; its folder is on the path then.
`make install` installs the clone itself, and needs no notebooks; an sdist holds them already, and
of this folder nothing but this file.
"""

import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401 - hooks that are as they were
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "lm_from_scratch" / "notebooks"
IS_SDIST = (ROOT / "PKG-INFO").exists()
CONVERTERS = ("sphinx", "sphinx-gallery")


def converters() -> list[str]:
    """What the conversion needs, as the extra `docs` asks for it."""
    if IS_SDIST:
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    docs = project["optional-dependencies"]["docs"]
    return [line for line in docs if line.partition(">")[0] in CONVERTERS]


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(settings) + converters()


def get_requires_for_build_sdist(settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_sdist(settings) + converters()


@contextmanager
def notebooks() -> Iterator[None]:
    """The tutorials lie in the package while it is packed."""
    if IS_SDIST:
        yield
        return
    from gallery.downloads import tutorials

    try:
        for place, text in tutorials():
            path = NOTEBOOKS / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        yield
    finally:
        shutil.rmtree(NOTEBOOKS, ignore_errors=True)


def build_wheel(folder: str, settings: Any = None, metadata: Any = None) -> str:
    with notebooks():
        return build_meta.build_wheel(folder, settings, metadata)


def build_sdist(folder: str, settings: Any = None) -> str:
    with notebooks():
        return build_meta.build_sdist(folder, settings)
