"""What stands in the place of a widget until it runs: bars, computed with the same model.

A picture is a caption and rows: a label, a share of the full length, and a number as text.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from sphinx.locale import _
from torch import Tensor

from live import training
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.labels import printable
from lm_from_scratch.inside.patching import put, run
from lm_from_scratch.inside.sites import Site, activations
from lm_from_scratch.instruments.plot import attention_maps
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.text.tokenizer import Tokenizer

Row = tuple[str, float, str]
Picture = tuple[str, list[Row]]
SHOWN = 5
#: With which a widget begins if a page says nothing else.
PROMPT = "If the file does not exist, an"


@cache
def shipped(name: str) -> tuple[Any, Tokenizer]:
    model, tokenizer = load_shipped(name)
    return model.eval(), tokenizer


@cache
def picture(widget: str, model: str, prompt: str) -> Picture:
    with torch.no_grad():
        return PICTURES[widget](model, prompt)


def logits(name: str, prompt: str) -> Tensor:
    model, tokenizer = shipped(name)
    return model(torch.tensor([tokenizer.start(prompt)]))[0]  # (T, V)


def percent(label: str, share: float) -> Row:
    return label, share, f"{100 * share:.1f} %"


def likeliest(name: str, prompt: str) -> Picture:
    best = logits(name, prompt)[-1].softmax(-1).topk(SHOWN)
    pieces = map(printable, shipped(name)[1].pieces(best.indices.tolist()))
    rows = [percent(*row) for row in zip(pieces, best.values.tolist(), strict=True)]
    return _("After “{prompt}” these tokens are the most likely:").format(prompt=prompt), rows


def look(name: str, prompt: str, layer: int = 2, head: int = 2) -> Picture:
    model, tokenizer = shipped(name)
    ids = tokenizer.start(prompt)
    weights = attention_maps(model, torch.tensor([ids]))[layer][0, head, -1].tolist()
    labels = ["⊢", *map(printable, tokenizer.pieces(ids[1:]))]
    rows = [percent(*row) for row in zip(labels, weights, strict=True)]
    caption = _("From the last token of “{prompt}”, head {head} of block {layer} looks at:")
    return caption.format(prompt=prompt, head=head, layer=layer), rows


def race(name: str, prompt: str, count: int = 40) -> Picture:
    """Tokens that go through the model: nearly all multiplications are of the weights with them."""
    start = len(shipped(name)[1].start(prompt))
    cached, whole = start + count - 1, sum(range(start, start + count))
    rows = [(_("with a cache"), cached / whole, f"{cached}"), (_("without"), 1.0, f"{whole}")]
    return _("Tokens that go through the model to write {count}:").format(count=count), rows


def clock(name: str, prompt: str, shift: int = 16) -> Picture:
    rows = []
    for label, each in (("Qwen2, rotated", "qwen2-docs"), ("GPT-2, learned", "gpt2-docs")):
        model, tokenizer = shipped(each)
        ids = torch.tensor([tokenizer.start(prompt)])
        places = torch.arange(ids.shape[1])
        still, moved = (moved_maps(model, ids, places + by) for by in (0, shift))
        most = max((a - b).abs().amax().item() for a, b in zip(still, moved, strict=True))
        rows.append(percent(label, most))
    return f"Moved by {shift} positions, an attention weight changes by at most:", rows


def moved_maps(model: Any, ids: Tensor, positions: Tensor) -> list[Tensor]:
    with record_attention(model) as recorded:
        model(ids, positions=positions[None])
    return [layer[0] for layer in recorded]


def bits(name: str, prompt: str) -> Picture:
    ids = torch.tensor(shipped(name)[1].start(prompt))
    costs = {}
    for number in (16, 8, 4, 3, 2):
        model, _ = load_shipped(name)
        for weight in model.parameters():
            if weight.dim() == 2 and number < 16:
                step = weight.abs().amax(1, keepdim=True) / (2 ** (number - 1) - 1)
                weight.copy_((weight / step).round() * step)
        log_p = model.eval()(ids[None])[0, :-1].log_softmax(-1)
        nats = -log_p.gather(-1, ids[1:, None]).mean().item()
        costs[number] = nats / torch.tensor(2.0).log().item()
    most = max(costs.values())
    rows = [(f"{number} bits", c / most, f"{c:.2f}") for number, c in costs.items()]
    return f"How “{prompt}” surprises the model, in bits a token, with weights of", rows


def surprise(name: str, prompt: str) -> Picture:
    _, tokenizer = shipped(name)
    ids = torch.tensor(tokenizer.start(prompt))
    log_p = logits(name, prompt)[:-1].log_softmax(-1) / torch.tensor(2.0).log()
    costs = (-log_p.gather(-1, ids[1:, None]))[:, 0].tolist()
    labels = map(printable, tokenizer.pieces(ids[1:].tolist()))
    rows = [
        (label, cost / max(costs), f"{cost:.1f}") for label, cost in zip(labels, costs, strict=True)
    ]
    return "How much each token surprises the whole model, in bits:", rows


def lens(name: str, prompt: str) -> list[Row]:
    """The most likely next token, if the model stopped after each of its blocks."""
    model, tokenizer = shipped(name)
    states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, x: states.append(x[0, -1]))
        for block in model.backbone.layers
    ]
    with torch.no_grad():
        logits(name, prompt)
    for hook in hooks:
        hook.remove()
    rows = []
    for number, x in enumerate(states):
        share, best = model.head(model.backbone.norm(x)).softmax(-1).max(-1)
        (piece,) = tokenizer.pieces([int(best)])
        label = _("block {number}: ").format(number=number) + printable(piece)
        rows.append(percent(label, share.item()))
    return rows


def move(name: str, prompt: str, layer: int = 2) -> Picture:
    """At ``[hall|kitchen]`` the model reads the first word and has the state of the second."""
    model, tokenizer = shipped(name)
    begin = prompt.partition("_")[0].rstrip()
    texts = [re.sub(r"\[(.*?)\|(.*?)\]", rf"\{n}", begin) for n in (1, 2)]
    idx, other = (torch.tensor([tokenizer.start(text)]) for text in texts)
    site = Site("stream", layer)
    before, _states = activations(model, idx, [])
    _logits, states = activations(model, other, [site])
    after = run(model, idx, {site: put(states[site], idx != other)})
    runs = {"before": before[0, -1].softmax(-1), "after": after[0, -1].softmax(-1)}
    rows = []
    for id_ in dict.fromkeys(int(shares.argmax()) for shares in runs.values()):
        (piece,) = map(printable, tokenizer.pieces([id_]))
        rows += [percent(f"{piece}, {label}", p[id_].item()) for label, p in runs.items()]
    return f"After “{texts[0]}”, before and after one state inside is replaced:", rows


def kernel(name: str, prompt: str) -> Picture:
    """Products of a token with every matrix, one or four to an instruction."""
    model, _ = shipped(name)
    matrices = [w for n, w in model.named_parameters() if w.dim() == 2 and "wpe" not in n]
    products = sum(w.numel() for w in matrices) / 1e6
    rows = [
        ("plain JavaScript", 1.0, f"{products:.1f} million"),
        ("kernel", 1 / 4, f"{products / 4:.1f} million"),
    ]
    return "Multiply instructions for the matrices of one token:", rows


PICTURES: dict[str, Callable[[str, str], Picture]] = {
    "next": likeliest, "draft": likeliest, "beams": likeliest, "look": look, "race": race,
    "clock": clock, "bits": bits, "break": surprise, "tour": likeliest, "move": move,
    "kernel": kernel, "train": training.picture,
}  # fmt: skip
