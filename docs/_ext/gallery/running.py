"""How pages run: the settings of the gallery, a fresh state for each page, one pool for all.

A parallel build runs all pages in one pool. The gallery fills its pool chapter by chapter, and at
the end of each a core waits for the longest page. But it takes a page that has run, and has not
changed, as it is: so all pages run here first. One that fails is reported, and runs again there.
Editions and books that are built after the site take its results: the gallery has nothing to do.
"""

import gc
import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sphinx.util import logging
from sphinx_gallery._doctree_links import CodeLinksTransform
from sphinx_gallery.gen_rst import generate_file_rst
from sphinx_gallery.sorting import FileNameSortKey
from tqdm import tqdm

from gallery import pages

FOLDERS = {"examples_dirs": ["../tutorials"], "gallery_dirs": ["auto_tutorials"]}
FILTERS = list(warnings.filters)  # those of the build, restored after each script
#: Bytes that a worker may grow by before it is replaced and has to load everything anew. Most of it
#: is modules that pages load: the 300 MB of joblib are reached every twenty pages.
GROWTH = 1_000_000_000
logger = logging.getLogger(__name__)


class ByNumber(FileNameSortKey):
    """The pages of a chapter as they are read: 10 after 9."""

    def __call__(self, filename: Any) -> tuple[int, str]:
        return pages.number(Path(filename))


def sphinx_gallery_conf() -> dict[str, Any]:
    return {
        **FOLDERS,
        "subsection_order": [f"../tutorials/{chapter.name}" for chapter in pages.chapters()],
        "within_subsection_order": "gallery.running.ByNumber",
        # A script runs, and has a page, when its name starts with its number in the chapter.
        "filename_pattern": r"[/\\][0-9][^/\\]*[/\\][0-9][^/\\]*\.py$",
        "ignore_pattern": r"(^|[/\\])[^0-9/\\][^/\\]*\.py$",
        "junit": "../gallery_junit.xml",
        # Processes that run pages; with more than one see `start`.
        "parallel": int(os.environ.get("GALLERY_JOBS") or 0) or False,
        "reset_modules": ("matplotlib", "gallery.running.reset_state"),
        "reset_modules_order": "both",
        "remove_config_comments": True,
        "show_signature": False,
        "notebook_images": True,
        "image_scrapers": ("gallery.figures.scraper",),
        "default_thumb_file": str(pages.DOCS / "_static" / "thumbnail.png"),
        "backreferences_dir": "auto_tutorials/backreferences",
        "doc_module": ("lm_from_scratch",),
        # Names of functions and classes in the code are links; variables are not.
        "inspect_global_variables": False,
        # The name that the API page shows, not a shorter one from a package's __init__.
        "prefer_full_module": {r"lm_from_scratch"},
        # Computing times on a page change with every build; junit keeps them for the checks.
        "write_computation_times": False,
        "min_reported_time": 1e9,
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
    gc.enable()
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


def start(app: Any) -> None:
    """The workers begin while this process computes what the site is generated from."""
    conf = app.config.sphinx_gallery_conf
    if app.tags.has("book") or not app.tags.has("first_edition"):
        conf.update({key: [] for key in FOLDERS})
        return
    if not (conf["parallel"] and conf["plot_gallery"]):
        return
    from joblib import Parallel, delayed

    # A worker that pages have made large is replaced: nothing is wrong, and nothing is lost.
    warnings.filterwarnings("ignore", "A worker stopped while")
    scripts = pages.scripts()
    targets = [Path(app.srcdir, "auto_tutorials", script.parent.name) for script in scripts]
    for target in targets:
        (target / "images" / "thumb").mkdir(parents=True, exist_ok=True)
    app.running_pages = Parallel(
        n_jobs=conf["parallel"], batch_size=1, return_as="generator_unordered"
    )(delayed(page)(script, target, conf) for script, target in zip(scripts, targets, strict=True))


def finish(app: Any) -> None:
    conf = app.config.sphinx_gallery_conf
    results = getattr(app, "running_pages", None)
    for script, out in shown(results, len(pages.scripts())) if results else ():
        if "formatted_exception" in out:
            logger.warning("%s failed:\n%s", script, out["formatted_exception"])
        elif "passing" in out:
            conf["passing_examples"].append(str(script))


def page(script: Path, target: Path, conf: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Run a page in a worker, which keeps what it has loaded for the next one.

    The collector runs three times for each page, and would go through all modules of torch and
    transformers. They and whatever is still alive are set aside first.
    """
    from joblib.externals.loky import process_executor

    process_executor._MAX_MEMORY_LEAK_SIZE = GROWTH
    gc.collect()
    gc.freeze()
    return script, generate_file_rst(script.name, target, script.parent, conf)[-1]


def shown(results: Iterable[Any], count: int) -> Iterator[Any]:
    """The pages as they are done: a bar in a terminal, elsewhere a line for every ten."""
    bar = tqdm(results, total=count, unit="page", disable=not sys.stdout.isatty(), file=sys.stdout)
    for number, (script, out) in enumerate(bar, 1):
        bar.set_postfix_str(f"{script.parent.name}/{script.stem}")
        if bar.disable and (number % 10 == 0 or number == count):
            print(f"{number} of {count} pages have run", flush=True)
        yield script, out


def ran_here(app: Any) -> None:
    """What has run in this build is not what an earlier one left."""
    conf = app.config.sphinx_gallery_conf
    conf.update(FOLDERS)
    if conf["passing_examples"]:
        docs = Path(app.srcdir, "auto_tutorials")
        passed = {
            str(docs / Path(page).relative_to(pages.TUTORIALS)) for page in conf["passing_examples"]
        }
        conf["stale_examples"] = [page for page in conf["stale_examples"] if page not in passed]


def setup(app: Any) -> dict[str, bool]:
    # Documents are trees with links back, which the collector searches again and again in vain.
    gc.set_threshold(100_000, 50, 100)
    # The gallery cuts code into a node for each word, to link them. It does so last: every other
    # step of a page walks over all nodes, and terms of the glossary are linked at 700.
    CodeLinksTransform.default_priority = 800
    app.connect("builder-inited", start, priority=50)
    app.connect("builder-inited", finish, priority=400)  # the gallery comes at 500
    app.connect("builder-inited", ran_here, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
