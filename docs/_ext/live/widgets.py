"""A model that runs in the page: one line, ``.. live:: next``, puts a widget there.

The widget is ``_static/live/widgets/next.js``. Options are what it begins with: ``:prompt:``, and
``:model:``, one of those that ship with the package; with ``:starts:`` it begins by itself when it
is in sight. A page with a widget loads a small script;
engine and weights come when a reader is near. Without scripts, and in print, there is a picture
(pictures.py).
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

from live import pictures, training
from live.pictures import PROMPT
from lm_from_scratch import pretrained

LIVE = Path(__file__).resolve().parents[2] / "_static" / "live"
#: What to try, in a sentence.
INVITATIONS = {
    "next": _("Type the beginning of a text: which token, a word or a part of one, comes next?"),
    "look": _("Choose a token and a head: where does it look? Then silence that head."),
    "race": _(
        "Write a text with the results for earlier tokens kept, and with all computed again."
    ),
    "clock": _("Pretend that the text begins later. Do both models still look at the same tokens?"),
    "bits": _(
        "Round the weights to fewer bits. When does the text begin to surprise the model more?"
    ),
    "break": _("One part of this model is switched off. Give it texts, and find out which."),
    "tour": _("Follow the last token of a text through the model, one step at a time."),
    "beams": _(
        "Keep one beginning at each step, or several. Which way finds the more likely text?"
    ),
    "draft": _("One model guesses some tokens ahead, another checks them in one pass. Which stay?"),
    "move": _("Move the key in the model's head: the text stays, one state inside changes."),
    "kernel": "Multiply in plain JavaScript and with the kernel. How much faster is your browser?",
    "train": _("Train a small GPT-2 here and now, and watch noise turn into words and sentences."),
}
#: Those that compare two models.
TWO = {"clock", "draft"}


class live(nodes.General, nodes.Element):
    """A place for a widget."""


class Live(SphinxDirective):
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "prompt": directives.unchanged_required,
        "model": directives.unchanged_required,
        "starts": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        widget = self.arguments[0]
        if widget not in INVITATIONS:
            raise self.error(f"there is no widget {widget!r}: {', '.join(INVITATIONS)}")
        number = self.env.new_serialno(f"live-{widget}")
        node = live(
            widget=widget,
            ids=[f"live-{widget}" + (f"-{number}" if number else "")],
            prompt=self.options.get("prompt", PROMPT),
            model=self.options.get("model", "stories" if widget == "train" else "qwen2-docs"),
            starts="starts" in self.options,
        )
        invitation = str(INVITATIONS[widget])
        node += nodes.paragraph(invitation, invitation, classes=["live-invitation"])
        return [node]


def picture(node: live) -> pictures.Picture:
    """What stands in its place where nothing runs."""
    return pictures.picture(node["widget"], node["model"], node["prompt"])


def visit(self: Any, node: live) -> None:
    data = {f"data-{name}": node[name] for name in ("widget", "model", "prompt")}
    data |= {"data-starts": ""} if node["starts"] else {}
    label = {"aria-label": str(INVITATIONS[node["widget"]])}  # a landmark: no two of one name
    self.body.append(self.starttag(node, "section", CLASS="live", **data, **label))


def depart(self: Any, node: live) -> None:
    widget = node["widget"]
    values = {"picture": picture(node), "label": label(widget, node["model"]), "widget": widget}
    html = self.builder.templates.render("live.html", values)
    self.body.append(f"{html}</section>\n")


def skip(self: Any, node: live) -> None:
    raise nodes.SkipNode


def label(widget: str, model: str) -> str:
    """What the button says that begins."""
    if widget == "train":
        return _("Train")
    return _("Run the model here (loads {size} MB)").format(size=megabytes(widget, model))


@cache
def megabytes(widget: str, model: str) -> int:
    """What a widget loads: its model, or the two that it compares, as text."""
    folder = Path(pretrained.__file__).parent
    names = ["gpt2-docs", "qwen2-docs"] if widget in TWO else [model]
    return round(sum((folder / n / "model.safetensors").stat().st_size for n in names) * 4 / 3e6)


@cache
def digest() -> str:
    """Of the engine, the widgets, the models and a text: what a browser may keep."""
    folders = LIVE, Path(pretrained.__file__).parent
    files = sorted(path for folder in folders for path in folder.rglob("*.*") if path.is_file())
    content = hashlib.sha256(json.dumps(training.texts()).encode())
    for path in files:
        if "__pycache__" not in path.parts:
            content.update(path.read_bytes())
    return content.hexdigest()[:8]


def add_loader(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    if doctree is not None and next(doctree.findall(live), None) is not None:
        version = {"data-version": digest()}
        if not app.tags.has("first_edition"):  # the models are those of the first edition
            version["data-models"] = "../../../_static/live/"
        app.add_js_file("live/loader.js", loading_method="defer", **version)
        app.add_css_file("live/live.css")


# -------------------------------------------------------------------- what the built site holds


def write_models(folder: Path) -> None:
    """The shipped models, and a text to train on, as scripts: a page may load them from a disk."""
    scripts: dict[str, Any] = {"stories": {"texts": training.texts()}}
    for config in Path(pretrained.__file__).parent.glob("*/config.json"):
        shipped = config.parent
        scripts[shipped.name] = {
            "config": json.loads((shipped / "config.json").read_text()),
            "tokenizer": json.loads((shipped / "tokenizer.json").read_text(encoding="utf-8")),
            "weights": base64.b64encode((shipped / "model.safetensors").read_bytes()).decode(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in scripts.items():
        script = f"lm.receive({json.dumps(name)}, {json.dumps(parts)});\n"
        (folder / f"{name}.js").write_text(script, encoding="utf-8")


def finish(app: Any, error: Exception | None) -> None:
    if not error and app.builder.name == "html" and app.tags.has("first_edition"):
        write_models(Path(app.outdir, "_static", "live", "models"))


def setup(app: Any) -> dict[str, bool]:
    app.add_node(live, html=(visit, depart), text=(skip, None), latex=(skip, None))
    app.add_directive("live", Live)
    app.connect("html-page-context", add_loader)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
