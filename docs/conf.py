"""Configuration of the site. The build needs no network and the site loads nothing from outside."""

import importlib.util
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

# Set before torch is imported: on shared cores its threads cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
for folder in (DOCS, ROOT):
    sys.path.insert(0, str(folder))
# Tutorials that start a process, and the workers of a parallel build, find the same package.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(DOCS), os.environ.get("PYTHONPATH", "")])

import architecture  # noqa: E402
import benchmarks  # noqa: E402
import course  # noqa: E402
import exercise_pages  # noqa: E402
import exercise_proof  # noqa: E402
import gallery  # noqa: E402
import gpu_pages  # noqa: E402
import landing  # noqa: E402
import museum  # noqa: E402
import pages  # noqa: E402
import symbols  # noqa: E402
import teaching  # noqa: E402
import translation  # noqa: E402
from sphinx.util.nodes import make_refnode  # noqa: E402

project = "lm_from_scratch"
author = "The lm_from_scratch authors"
copyright = "the lm_from_scratch authors, Apache License 2.0"
with open(ROOT / "pyproject.toml", "rb") as file:
    release = version = tomllib.load(file)["project"]["version"]

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_gallery.gen_gallery",
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_exercise",
    "sphinx_togglebutton",
    "terms",
    "descriptions",
]
exclude_patterns = [
    "_build",
    "locale",
    "generated",
    "inventories",
    # The gallery writes a page and a notebook of each script; the page is the one to show.
    "auto_tutorials/**/*.ipynb",
    "exercises/files",  # what students download
    "sg_execution_times.rst",
    "**/sg_execution_times.rst",
]
# The folder above the repository may have spaces in its name; the scripts have none.
suppress_warnings = ["sphinx_gallery.space_in_filename"]
nitpicky = True
nitpick_ignore_regex = [
    # Types of packages whose inventory is not stored here (see intersphinx_mapping).
    (r"py:.*", r"(torch|triton|np|numpy|tokenizers|safetensors)(\..*)?"),
    (r"py:.*", r"(transformers|matplotlib|plt|tqdm)(\..*)?"),
    (r"py:.*", r"(Tensor|nn\.\w+|Tokenizer|Figure|Axes|optional|Path)"),
    (r"py:.*", r"ast\.(Module|expr|stmt)"),  # the standard library's own pages do not list them
    # A default made by a factory is no Python: its signature is cut at the commas.
    (r"py:.*", r"(dict|list|tuple)\[.*"),
]
language = os.environ.get("SITE_LANGUAGE", "en")
locale_dirs = ["locale"]
gettext_compact = False
gettext_location = False
gettext_uuid = False
translation_progress_classes = True

# -- API pages -------------------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Triton exists on machines with a GPU only; its pages are built everywhere.
autodoc_mock_imports = [] if importlib.util.find_spec("triton") else ["triton"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 70  # longer: an argument a line, which a phone can show
toc_object_entries_show_parents = "hide"
autodoc_inherit_docstrings = False  # nn.Module's text on `forward` says nothing about ours
add_module_names = False

# An inventory is stored in the repository, so that a build without network has the same links.
# torch, numpy, matplotlib and transformers publish theirs on their sites only. To link to one,
# store its objects.inv in docs/inventories/ and add an entry with that file.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3.11", "inventories/python.inv"),
}

# -- Gallery, notebooks, mathematics ---------------------------------------------------------
sphinx_gallery_conf = gallery.sphinx_gallery_conf()
nb_execution_mode = "off"
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
mathjax3_config = {"options": {"enableMenu": True}}
copybutton_exclude = ".linenos, .gp, .go"

# -- HTML ------------------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = "lm_from_scratch"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_js_files = [("a11y.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
# Summaries are fetched, which a copy opened from disk cannot do. See descriptions.py.
html_show_search_summary = False
html_context = {"default_mode": "auto", **translation.context(language)}
html_sidebars = {"index": [], "course": [], "benchmarks": [], "search": []}
html_theme_options = {
    "logo": {
        "text": "lm_from_scratch",
        "image_light": "_static/logo-light.svg",
        "image_dark": "_static/logo-dark.svg",
        "alt_text": "",
    },
    "navigation_with_keys": False,
    "show_prev_next": True,
    "show_toc_level": 2,
    "show_nav_level": 2,
    "navigation_depth": 3,
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navbar_end": ["language_switch.html", "theme-switcher"],
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc", "sg_download_links"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def prune_mathjax(app, exception):
    """Drop the parts of MathJax that no page loads: 24 MB become 6 MB, none outside HTML."""
    folder = Path(app.outdir) / "_static" / "mathjax"
    if not folder.is_dir():
        return
    if app.builder.format != "html":
        shutil.rmtree(folder)
        return
    for script in folder.glob("*.js"):
        if script.name != "tex-chtml.js":
            script.unlink()
    for speech in folder.glob("sre/mathmaps/*.js*"):
        if speech.stem not in {"base", "en"}:
            speech.unlink()


def list_of_names(app, what, name, obj, options, lines):
    """Show the columns of a docstring, a name and what it is, as a list."""
    made, inside = [], False
    for line in lines:
        column = re.match(r"([`\w][`\w, ]*?) {2,}(\S.*)$", line)
        if column and (inside or not (made and made[-1])):
            inside = True
            made.append(f"* ``{column[1].strip('`')}``: {column[2]}")
        elif inside and line.startswith("   "):
            made.append(f"  {line.strip()}")
        else:
            inside = False
            made.append(line)
    lines[:] = made


def skip_member(app, what, name, obj, skip, options):
    return True if name in {"extra_repr", "training"} else None


def resolve_short_name(app, env, node, contnode):
    """Let a docstring say `GPT2Config` from any file, as long as one object has that name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    found = domain.find_obj(env, None, None, node["reftarget"], node["reftype"], searchmode=1)
    if len(found) != 1:
        return None
    name, entry = found[0]
    target = (app.builder, node["refdoc"], entry.docname, entry.node_id)
    return make_refnode(*target, contnode, name)


def setup(app):
    app.connect("config-inited", benchmarks.begin)
    app.connect("build-finished", benchmarks.finish)
    # Before the gallery looks for its folders.
    app.connect("builder-inited", pages.write, priority=100)
    app.connect("builder-inited", architecture.write, priority=100)
    app.connect("builder-inited", gpu_pages.write, priority=100)
    app.connect("builder-inited", exercise_pages.write, priority=100)
    app.connect("builder-inited", exercise_proof.write, priority=100)
    app.connect("builder-inited", museum.write, priority=100)
    app.connect("builder-inited", symbols.write, priority=100)
    app.connect("builder-inited", teaching.write, priority=100)
    app.connect("builder-inited", benchmarks.write, priority=100)
    app.connect("builder-inited", course.write, priority=100)
    app.connect("builder-inited", landing.write, priority=100)
    app.connect("env-get-outdated", gpu_pages.outdated)
    app.connect("env-get-outdated", exercise_pages.outdated)
    app.connect("env-get-outdated", course.outdated)
    app.connect("doctree-read", course.add_strip)
    app.connect("source-read", gpu_pages.add_chapter)
    app.connect("source-read", exercise_pages.add_chapter)  # behind the GPU pages
    app.connect("source-read", exercise_pages.add_links)
    app.connect("autodoc-process-docstring", list_of_names)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("missing-reference", resolve_short_name)
    # The extension only copies files; without this a build with -j refuses to start.
    app.extensions["sphinx-mathjax-offline"].parallel_read_safe = True
    app.connect("build-finished", prune_mathjax, priority=900)
