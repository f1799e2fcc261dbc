"""A model that runs in the page: one line, ``.. live:: next``, puts a widget there.

The widget is ``_static/live/widgets/next.js``. Options are what it begins with: ``:prompt:``, and
``:model:``, one of those that ship with the package. A page with a widget loads a small script;
engine and weights come when a reader asks for them. Without scripts there is a picture: what the
model says after the prompt, computed here.
"""

import base64
import json
from pathlib import Path
from typing import Any, ClassVar

import rst
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from lm_from_scratch import pretrained

LIVE = Path(__file__).resolve().parents[1] / "_static" / "live"
#: What to try, in a sentence.
INVITATIONS = {
    "next": "Type the beginning of a sentence, and choose among the tokens that may follow.",
    "look": "Choose a token and a head, and see where it looks. Silence the head: what does the text cost now?",
    "race": "Let the model write the same tokens with a cache and without one.",
    "clock": "Move all positions. One of the two models does not notice.",
    "bits": "Round the weights to fewer bits, and see what the text costs.",
    "break": "One part of this model is switched off. Find out which by the texts that you give it.",
    "tour": "Follow one token through the model, with its own numbers.",
    "draft": "Let a small model draft, and a larger one check: which tokens were kept?",
}
PROMPT, SHOWN = "If the file does not exist, an", 5


class live(nodes.General, nodes.Element):
    """A place for a widget."""


class Live(SphinxDirective):
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "prompt": directives.unchanged_required,
        "model": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        widget = self.arguments[0]
        if not (LIVE / "widgets" / f"{widget}.js").is_file():
            raise self.error(f"there is no widget {widget!r}")
        number = self.env.new_serialno("live")
        name = f"live-{widget}" + (f"-{number}" if number else "")
        prompt = self.options.get("prompt", PROMPT)
        model = self.options.get("model", "qwen2-docs")
        return [live("", widget=widget, name=name, prompt=prompt, model=model)]


def picture(model_name: str, prompt: str) -> list[tuple[str, float]]:
    """The likeliest tokens after a prompt, and their probabilities."""
    import torch

    from lm_from_scratch.checkpoint.weights import load_shipped

    model, tokenizer = load_shipped(model_name)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokenizer.start(prompt)]))[0, -1]
    best = logits.softmax(-1).topk(SHOWN)
    return list(zip(tokenizer.pieces(best.indices.tolist()), best.values.tolist(), strict=True))


def visit(self: Any, node: live) -> None:
    self.body.append(
        rst.render(
            "live.html", **node.attributes, invitation=INVITATIONS[node["widget"]],
            likeliest=picture(node["model"], node["prompt"]),
        )  # fmt: skip
    )
    raise nodes.SkipNode


def skip(self: Any, node: live) -> None:
    raise nodes.SkipNode


def add_loader(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    if doctree is not None and next(doctree.findall(live), None) is not None:
        app.add_js_file("live/loader.js", loading_method="defer")
        app.add_css_file("live/live.css")


def write_models(folder: Path) -> None:
    """The shipped models as scripts, which a page may load from a disk, too."""
    for shipped in Path(pretrained.__file__).parent.glob("*-docs"):
        parts = {
            "config": json.loads((shipped / "config.json").read_text()),
            "tokenizer": json.loads((shipped / "tokenizer.json").read_text(encoding="utf-8")),
            "weights": base64.b64encode((shipped / "model.safetensors").read_bytes()).decode(),
        }
        script = f"lm.receive({json.dumps(shipped.name)}, {json.dumps(parts)});\n"
        rst.write({folder / f"{shipped.name}.js": script})


def finish(app: Any, error: Exception | None) -> None:
    if not error and app.builder.format == "html":
        write_models(Path(app.outdir, "_static", "live", "models"))


def setup(app: Any) -> dict[str, bool]:
    app.add_node(live, html=(visit, None), text=(skip, None), latex=(skip, None))
    app.add_directive("live", Live)
    app.connect("html-page-context", add_loader)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
