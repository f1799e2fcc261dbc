"""Configuration of the site. The build needs no network and the site loads nothing from outside."""

import importlib.util
import os
import sys
from pathlib import Path

# Set before torch is imported: on shared cores its threads cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
EXTENSIONS = DOCS / "_ext"
for folder in (ROOT / "tests" / "benchmarks", EXTENSIONS, ROOT):
    sys.path.insert(0, str(folder))
# Tutorials that start a process, and the workers of a parallel build, find the same package.
paths = [str(ROOT), str(EXTENSIONS), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(paths)

from api import package  # noqa: E402
from editions import translation  # noqa: E402
from gallery import running  # noqa: E402
from sources import modules  # noqa: E402

project = "lm_from_scratch"
author = "The lm_from_scratch authors"
copyright = "the lm_from_scratch authors, Apache License 2.0"
release = version = modules.project()["project"]["version"]

extensions = [
    "sphinx.ext.intersphinx",
    "sphinx.ext.autosummary",
    "sphinx_gallery.gen_gallery",
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinxext.opengraph",
    # Those of this site, in docs/_ext.
    "output.generated",
    "output.mathjax",
    "editions.translation",
    "editions.chinese",
    "gallery.running",
    "gallery.navigation",
    "gallery.lessons",
    "gallery.downloads",
    "live.widgets",
    "course.first_evening",
    "course.slides",
    "api.docstrings",
    "lookup.terms",
    "lookup.search",
]
exclude_patterns = [
    "book.rst",
    "_build",
    "_ext",
    "_templates",
    "_pages",
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
    (r"py:.*", r"(torch|triton|np|numpy|tokenizers|safetensors|jinja2)(\..*)?"),
    (r"py:class", r"lm_from_scratch\.text\.(plots\.T|rows\.Row)"),
    (r"py:.*", r"lm_from_scratch\.checkpoint\.weights\.AnyModel"),
    # What a command takes is said by its help.
    (r"py:class", r"lm_from_scratch\.(commands\.fields|exercises\.options)\.\w+"),
    (r"py:.*", r"types\.FrameType|lm_from_scratch\.layers\.rope_scaling\._Checked"),
    (r"py:.*", r"(transformers|matplotlib|plt|tqdm)(\..*)?"),
    (r"py:.*", r"(Tensor|nn\.\w+|Tokenizer|Figure|Axes|optional|Path)"),
    (r"py:.*", r"ast\.(Module|expr|stmt)"),  # the standard library's own pages do not list them
    (r"py:.*", r".*lambda.*"),  # the limits of the numbers of a config
    # autodoc shows a default_factory as <factory>, which is no valid Python, so Sphinx splits the
    # whole signature at its commas.
    (r"py:.*", r"(collections\.abc\.)?(dict|list|tuple|Mapping)\[.*"),
]
language = translation.LANGUAGE
locale_dirs = ["locale"]
gettext_compact = False
gettext_location = False
gettext_uuid = False
translation_progress_classes = True

# -- API pages -------------------------------------------------------------------------------
autosummary_generate = ["generated/api.rst"]
# Pages on code are not translated: the catalogues do without them, and without links to them.
if tags.has("catalogues"):  # noqa: F821
    autosummary_generate, nitpicky = [], False
    exclude_patterns.append("api/lm_from_scratch*")
    suppress_warnings += ["toc.excluded", "toc.not_included", "ref.doc"]
autosummary_context = {"rooms": package.members_of_rooms()}
autodoc_default_options = {"exclude-members": "extra_repr, training"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_use_type_comments = False  # there are none; looking for them reads each function again
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
sphinx_gallery_conf = running.sphinx_gallery_conf()
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
# Summaries are fetched, which a copy opened from disk cannot do. See lookup/search.py.
html_show_search_summary = False
html_context = {"default_mode": "auto"}
# Titles and descriptions for programs that show a link. Pictures would need the site's address.
ogp_site_url = os.environ.get("SITE_URL", "")
ogp_social_cards = {"enable": False}
ogp_enable_meta_description = False  # lookup/search.py has it, for the search as well
html_sidebars = {
    **{name: [] for name in ("index", "tour", "course", "questions", "benchmarks", "search")},
    **{name: ["place.html", "sidebar-nav-bs.html"] for name in ("auto_tutorials/*/*", "gpu/*")},
}
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
    "navigation_depth": 4,
    "collapse_navigation": True,  # of the other chapters the title alone
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

# -- An edition in another language: its pages, from what the first edition has run ------------
globals().update(translation.settings())
if language == translation.FIRST:
    tags.add("first_edition")  # noqa: F821
else:
    sphinx_gallery_conf["junit"] = ""

# -- The book: the lessons, from the same results ----------------------------------------------
if tags.has("book"):  # noqa: F821
    from books import book

    globals().update(book.settings())
    sphinx_gallery_conf["junit"] = ""
