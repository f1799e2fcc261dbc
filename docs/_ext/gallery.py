"""The gallery: which pages there are, in which order, and how they run.

`conf.py`, `notebooks.py` and the tests read the same settings from here, so a notebook checked by a
test is the notebook that the site offers. A page is called "CHAPTER/NAME", as "1_gpt2/2_gpt2": the
number is that of a lesson. A letter after it, as in "2a_gpt2_in_depth", makes an in-depth page of
the lesson with this number.
"""

import gc
import os
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
TUTORIALS = ROOT / "tutorials"
GPU = TUTORIALS / "gpu"  # no chapter of the gallery: its pages are executed notebooks
FILTERS = list(warnings.filters)  # those of the build, restored after each script


def chapters() -> list[Path]:
    """Chapter folders in reading order; a folder without a header is no chapter."""
    return sorted((h.parent for h in TUTORIALS.glob("[0-9]*/GALLERY_HEADER.rst")), key=number)


def number(path: Path) -> tuple[int, str]:
    """Of a lesson, and the letter of an in-depth page: (2, "") and (2, "a")."""
    digits, letter = re.match(r"(\d+)([a-z]?)_", path.name).groups()
    return int(digits), letter


def pages(chapter: Path) -> list[Path]:
    """The scripts of one chapter, in reading order."""
    return sorted(chapter.glob("[0-9]*.py"), key=number)


def scripts() -> list[Path]:
    """Every tutorial script of the site, in reading order."""
    return [script for chapter in chapters() for script in pages(chapter)]


def gpu_scripts() -> list[Path]:
    """The scripts of the pages on GPU kernels, in reading order. See gpu_notebooks.py."""
    return pages(GPU)


def header_text(chapter: Path) -> tuple[str, str]:
    """Title and first paragraph of a chapter's header file, the one .rst of its folder."""
    (header,) = chapter.glob("*.rst")
    heading, first, *_ = header.read_text(encoding="utf-8").strip().split("\n\n")
    return heading.splitlines()[0], " ".join(first.split())


def intro(page: str) -> str:
    """The first paragraph of a page's chapter."""
    return header_text(script(page).parent)[1]


def by_chapter() -> dict[str, list[str]]:
    """The pages of each chapter by its title, those on GPU kernels last."""
    return {
        header_text(folder)[0]: [f"{folder.name}/{path.stem}" for path in pages(folder)]
        for folder in [*chapters(), GPU]
    }


def in_order() -> list[str]:
    """All pages in reading order."""
    return [page for members in by_chapter().values() for page in members]


def lesson(page: str) -> str:
    """The lesson that a page deepens; of a lesson, itself."""
    return next(name for name in beside(page) if is_lesson(name))


def beside(page: str) -> list[str]:
    """The pages with the number of one: a lesson, and those in depth."""
    path = script(page)
    same = (one for one in pages(path.parent) if number(one)[0] == number(path)[0])
    return [f"{one.parent.name}/{one.stem}" for one in same]


def is_lesson(page: str) -> bool:
    return not number(script(page))[1]


def lessons() -> list[str]:
    """The reading path."""
    return [page for page in in_order() if is_lesson(page)]


def in_depth(page: str) -> list[str]:
    """The in-depth pages of a lesson; an in-depth page has none."""
    return [name for name in beside(page) if not is_lesson(name)] if is_lesson(page) else []


def script(page: str) -> Path:
    return TUTORIALS / f"{page}.py"


def document(page: str) -> str:
    """The document of the site that shows a page."""
    return f"/{page}" if page.startswith("gpu/") else f"/auto_tutorials/{page}"


def page_of(docname: str) -> str | None:
    """The page that a document of the site shows, if it is one of the course."""
    page = docname.removeprefix("auto_tutorials/")
    return page if page in in_order() else None


def sphinx_gallery_conf() -> dict[str, Any]:
    return {
        "examples_dirs": ["../tutorials"],
        "gallery_dirs": ["auto_tutorials"],
        "subsection_order": [f"../tutorials/{chapter.name}" for chapter in chapters()],
        "within_subsection_order": "FileNameSortKey",
        # A script runs, and has a page, when its name starts with its number in the chapter.
        "filename_pattern": r"[/\\][0-9][^/\\]*[/\\][0-9][^/\\]*\.py$",
        "ignore_pattern": r"(^|[/\\])[^0-9/\\][^/\\]*\.py$",
        "junit": "../gallery_junit.xml",
        # Processes that run pages; with more than one see quicker.py.
        "parallel": int(os.environ.get("GALLERY_JOBS") or 0) or False,
        "reset_modules": ("matplotlib", "gallery.reset_state"),
        "reset_modules_order": "both",
        "remove_config_comments": True,
        "show_signature": False,
        "notebook_images": True,
        "image_scrapers": ("figures.scraper",),
        "default_thumb_file": str(DOCS / "_static" / "thumbnail.png"),
        "backreferences_dir": "auto_tutorials/backreferences",
        "doc_module": ("lm_from_scratch",),
        # Names of functions and classes in the code are links; variables are not.
        "inspect_global_variables": False,
        # The name that the API page shows, not a shorter one from a package's __init__.
        "prefer_full_module": {r"lm_from_scratch"},
        # Computing times on a page change with every build; junit keeps them for the checks.
        "write_computation_times": False,
        "min_reported_time": 1e9,
        "recommender": {"enable": True},
        "ignore_repr_types": r"matplotlib[.](text|axes|lines|image|collections|container|legend)",
    }


def reset_state(gallery_conf: dict[str, Any], fname: str | None, when: str) -> None:
    """Give every tutorial the state of a fresh process, so that reading order does not matter.

    A warning is an error while a tutorial runs: a page shows no deprecated call.
    """
    import matplotlib.pyplot as plt
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the legacy generator is the global state to reset
    torch.manual_seed(0)
    np.set_printoptions(edgeitems=3, linewidth=75, precision=8, suppress=False, threshold=1000)
    torch.set_printoptions(profile="default")
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    plt.close("all")
    gc.collect()
    warnings.resetwarnings()
    if when == "before" and fname is not None:
        warnings.simplefilter("error")
        # Third parties deprecate at their own pace.
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.filterwarnings("ignore", category=category, module=r"(?!lm_from_scratch)")
        warnings.filterwarnings("ignore", category=ResourceWarning)
        # torch 2.15 says so when it compiles on that release alone
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
    else:
        warnings.filters[:] = FILTERS
