"""The landing page: what the shipped model says during the build, and the cards of the chapters.

Each row of the figure is a step. On the left are the probabilities of the next token, on the right
the weights of one attention head. Its colours are those of the page's text, for both themes.
"""

from typing import Any

import rst

MODEL = "qwen2-docs"
PROMPT = "If the file does not exist, an"
STEPS = 6
CANDIDATES = 3
LAYER, HEAD = 2, 2  # a head that looks at nouns


def compute() -> dict[str, list[Any]]:
    """What the model did: the tokens, the likeliest next ones at each step, and one map.

    tokens  prompt and continuation, the first stands for the start of a document
    steps   for each new token the likeliest (token, probability), the chosen one first
    weights for each new token how much the head takes from each token before it
    """
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
    return {"tokens": ["⊢", *tokenizer.pieces(ids[1:])], "steps": steps, "weights": rows}


def shown(token: str) -> str:
    """A token as a label: its leading blank is the space between words, a line end is an arrow."""
    return token.strip(" ").replace("\n", "↵") or "␣"


def spoken(token: str) -> str:
    return {"\n": "a line end", "⊢": "the start"}.get(token, f"“{token.strip()}”")


def figure(result: dict[str, list[Any]]) -> str:
    """Both halves fill a phone's screen: a row of bars for each step, the chosen token and its
    rivals, and a row of the map for each step, with a column for each token that it can see."""
    return rst.render("landing.html", prompt=PROMPT, new=result["tokens"][-STEPS:], **result)


rst.PAGES.filters |= {"shown": shown, "spoken": spoken}


def add_chapters(app: Any, docname: str, source: list[str]) -> None:
    """The chapters outside the gallery go behind its own: a section, and a place in the table of
    contents."""
    if docname == "auto_tutorials/index":
        head, toctree, tail = source[0].rpartition(".. toctree::")
        own = f"{toctree}\n   :hidden:\n\n   /gpu/index\n   /exercises/index\n"
        more = ".. include:: /generated/more_chapters.rst\n\n"
        source[0] = f"{head}{more}{toctree}{tail}\n{own}"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_chapters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
