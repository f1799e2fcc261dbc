"""What makes the build quicker, and leaves the site as it is.

* One pool for all pages. The gallery fills its pool chapter by chapter, and at the end of each a
  core waits for the longest page. But it takes a page that has run, and has not changed, as it is:
  so a parallel build runs all pages here first. One that fails is reported, and runs again there.
* The gallery cuts code into its words, a node each, to link them. It does so last here, since
  every other step of a page walks over all nodes.
* Documents are trees with links back, which Python's collector searches again and again for what
  nothing refers to. It does so less often here.
"""

import gc
from pathlib import Path
from typing import Any

import gallery
from sphinx.util import logging
from sphinx_gallery._doctree_links import CodeLinksTransform
from sphinx_gallery.gen_rst import generate_file_rst

logger = logging.getLogger(__name__)


def run(app: Any) -> None:
    conf = app.config.sphinx_gallery_conf
    if not (conf["parallel"] and conf["plot_gallery"]):
        return
    from joblib import Parallel, delayed

    pages = gallery.scripts()
    targets = [Path(app.srcdir, "auto_tutorials", page.parent.name) for page in pages]
    for target in targets:
        (target / "images" / "thumb").mkdir(parents=True, exist_ok=True)
    results = Parallel(n_jobs=conf["parallel"], batch_size=1)(
        delayed(generate_file_rst)(page.name, target, page.parent, conf)
        for page, target in zip(pages, targets, strict=True)
    )
    for page, (*_, out) in zip(pages, results, strict=True):
        if "formatted_exception" in out:
            logger.warning("%s failed:\n%s", page, out["formatted_exception"])
        elif "passing" in out:
            conf["passing_examples"].append(str(page))


def ran_here(app: Any) -> None:
    """What has run in this build is not what an earlier one left."""
    conf = app.config.sphinx_gallery_conf
    if conf["passing_examples"]:
        docs = Path(app.srcdir, "auto_tutorials")
        passed = {
            str(docs / Path(page).relative_to(gallery.TUTORIALS))
            for page in conf["passing_examples"]
        }
        conf["stale_examples"] = [page for page in conf["stale_examples"] if page not in passed]


def setup(app: Any) -> dict[str, bool]:
    gc.set_threshold(100_000, 50, 100)
    CodeLinksTransform.default_priority = 800  # the terms of the glossary are linked at 700
    app.connect("builder-inited", run, priority=400)  # the gallery comes at 500
    app.connect("builder-inited", ran_here, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
