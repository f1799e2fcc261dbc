"""The landing page: what the shipped model says during the build, and the cards of the chapters.

Each row of the figure is a step. On the left are the probabilities of the next token, on the right
the weights of one attention head. Its colours are those of the page's text, for both themes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import exercise_pages
import gallery
import page
import rst

MODEL = "qwen2-docs"
PROMPT = "If the file does not exist, an"
STEPS = 6
CANDIDATES = 3
LAYER, HEAD = 2, 2  # a head that looks at nouns
ALL_CHAPTERS = "auto_tutorials/index"  # the page of all chapters, which the gallery writes


@dataclass(frozen=True)
class Result:
    """What the model did: the tokens, the likeliest next ones at each step, and one map.

    tokens  prompt and continuation, the first stands for the start of a document
    steps   for each new token the likeliest (token, probability), the chosen one first
    weights for each new token how much the head takes from each token before it
    """

    tokens: list[str]
    steps: list[list[tuple[str, float]]]
    weights: list[list[float]]


def compute() -> Result:
    import torch

    from lm_from_scratch.checkpoint.weights import load_shipped
    from lm_from_scratch.instruments.plot import attention_maps

    model, tokenizer = load_shipped(MODEL)
    model.eval()
    ids = [tokenizer.eos_token_id, *tokenizer.encode(PROMPT)]
    given, steps = len(ids), []
    with torch.no_grad():
        for _ in range(STEPS):
            probabilities = model(torch.tensor([ids]))[0, -1].softmax(-1)
            best = probabilities.topk(CANDIDATES)
            names = tokenizer.pieces(best.indices.tolist())
            steps.append(list(zip(names, best.values.tolist(), strict=True)))
            ids.append(int(best.indices[0]))
        weights = attention_maps(model, torch.tensor([ids[:-1]]))[LAYER][0, HEAD]
    rows = [weights[given - 1 + i, : given + i].tolist() for i in range(STEPS)]
    return Result(["⊢", *tokenizer.pieces(ids[1:])], steps, rows)


def shown(token: str) -> str:
    """A token as a label: its leading blank is the space between words, a line end is an arrow."""
    return token.strip(" ").replace("\n", "↵") or "␣"


def spoken(token: str) -> str:
    return {"\n": "a line end", "⊢": "the start"}.get(token, f"“{token.strip()}”")


def figure(result: Result) -> str:
    """Both halves fill a phone's screen: a row of bars for each step, the chosen token and its
    rivals, and a row of the map for each step, with a column for each token that it can see."""
    return rst.render(
        "landing.html",
        prompt=PROMPT,
        tokens=result.tokens,
        new=result.tokens[-STEPS:],
        steps=result.steps,
        weights=result.weights,
    )


rst.PAGES.filters |= {"shown": shown, "spoken": spoken}


# -- the chapters ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """What a card says; a chapter outside the gallery has a page of its own."""

    title: str
    intro: str
    links: list[str]
    time: str = ""
    index: str = ""


def chapters() -> list[Chapter]:
    made = []
    for title, names in gallery.by_chapter().items():
        folder = gallery.script(names[0]).parent
        links = [f":doc:`{gallery.document(name)}`" for name in names]
        time = page.in_words(sum(map(page.minutes, names)))
        index = "/gpu/index" if folder == gallery.GPU else ""
        made.append(Chapter(title, gallery.header_text(folder)[1], links, time, index))
    links = exercise_pages.path_card()
    last = Chapter(exercise_pages.TITLE, exercise_pages.INTRO, links, index=exercise_pages.INDEX)
    return [*made, last]


def learning_path() -> str:
    """A card with its pages for each chapter."""
    return rst.render("learning_path.rst", chapters=chapters())


def add_chapters(app: Any, docname: str, source: list[str]) -> None:
    """The chapters outside the gallery go behind its own: a section, and a place in the table of
    contents."""
    if docname == ALL_CHAPTERS:
        head, toctree, tail = source[0].rpartition(".. toctree::")
        own = rst.render("more_chapters.rst", chapters=[c for c in chapters() if c.index])
        sections, _, contents = own.partition(".. toctree::")
        source[0] = head + sections + toctree + tail + "\n" + toctree + contents


def outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """That page is read in every build: what is added to it is in no file that Sphinx compares."""
    return {ALL_CHAPTERS} & env.found_docs


def setup(app: Any) -> dict[str, bool]:
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", add_chapters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
