"""The figure of the landing page: the shipped model goes on with a sentence during the build.

Each row is a step. On the left are the probabilities of the next token, on the right the weights of
one attention head. It is drawn in the colours of the page's text, so both themes can show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pages

MODEL = "qwen2-docs"
PROMPT = "If the file does not exist, an"
STEPS = 6
CANDIDATES = 3
LAYER, HEAD = 2, 2  # a head that looks at nouns
#: Sizes of both halves: each fills a phone's screen.
ROW, WIDTH = 30, 340


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


def likelihoods(result: Result) -> str:
    """A row of bars for each step: the chosen token, and its rivals."""
    lines = []
    unit = WIDTH / CANDIDATES
    for i, step in enumerate(result.steps):
        y = 34 + i * ROW
        for j, (token, probability) in enumerate(step):
            x, kind = j * unit, "chosen" if j == 0 else "rival"
            length = max(1.0, probability * (unit - 10))
            lines.append(
                f'<rect class="track" x="{x:.0f}" y="{y + 5}" width="{unit - 10:.0f}" height="6"/>'
                f'<rect class="{kind}" x="{x:.0f}" y="{y + 5}" width="{length:.1f}" height="6"/>'
                f'<text class="{kind}" x="{x:.0f}" y="{y}">{escape(shown(token))}</text>'
                f'<text class="percent" x="{x + unit - 10:.0f}" y="{y}">{probability:.0%}</text>'
            )
    return svg(lines, 34 + STEPS * ROW - 10, "next token, and its two rivals")


def attention(result: Result) -> str:
    """The map: a row for each step, a column for each token that it can see."""
    lines = []
    columns = len(result.tokens) - 1
    first, top = 80, 72
    cell = (WIDTH - first - 24) / columns
    for s, token in enumerate(result.tokens[:-1]):
        x = first + (s + 0.5) * cell + 4
        lines.append(
            f'<text class="column" x="{x:.1f}" y="{top - 8}" '
            f'transform="rotate(-55 {x:.1f} {top - 8})">{escape(shown(token))}</text>'
        )
    for i, row in enumerate(result.weights):
        y = top + i * 20
        name = escape(shown(result.tokens[-STEPS + i]))
        lines.append(f'<text class="row" x="{first - 8}" y="{y + 14}">{name}</text>')
        for s, weight in enumerate(row):
            lines.append(
                f'<rect class="cell" x="{first + s * cell + 1:.1f}" y="{y + 1}" '
                f'width="{cell - 2:.1f}" height="18" style="--weight: {weight:.2f}"/>'
            )
    return svg(lines, top + STEPS * 20 + 4, "where one head looks")


def svg(lines: list[str], height: int, title: str) -> str:
    return "\n".join([
        f'<div class="half"><p class="half-title">{title}</p>',
        f'<svg viewBox="0 0 {WIDTH} {height}" aria-hidden="true">', *lines, "</svg></div>",
    ])  # fmt: skip


def words(result: Result) -> str:
    """The figure in words, for who does not see it."""
    steps = [
        " or ".join(f"{spoken(token)} ({probability:.0%})" for token, probability in step)
        for step in result.steps
    ]
    looks = []
    for i, row in enumerate(result.weights):
        most = max(range(len(row)), key=row.__getitem__)
        looks.append(
            f"for {spoken(result.tokens[-STEPS + i])} mostly at {spoken(result.tokens[most])} "
            f"({row[most]:.0%})"
        )
    return (
        f"A language model goes on after “{PROMPT}”. The three likeliest tokens of each step, the "
        f"chosen one first: {'; '.join(steps)}. One attention head looks, {', '.join(looks)}."
    )


def spoken(token: str) -> str:
    return {"\n": "a line end", "⊢": "the start"}.get(token, f"“{token.strip()}”")


def figure(result: Result) -> str:
    text = "".join(result.tokens[-STEPS:])
    return "\n".join([
        f'<div class="living-result" role="img" aria-label="{escape(words(result))}">',
        f'<p class="said" aria-hidden="true">{escape(PROMPT)}<b>{escape(text)}</b></p>',
        '<div class="halves">', likelihoods(result), attention(result), "</div>",
        "</div>", "",
    ])  # fmt: skip


def write(app: Any) -> None:
    path = Path(app.srcdir) / "generated" / "landing.html"
    pages.write_texts({path: figure(compute())})
