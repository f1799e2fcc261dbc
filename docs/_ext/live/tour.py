"""The numbers and pictures of the tour: what the shipped model did with one text."""

from typing import Any

import torch
from sources import templates
from torch import Tensor

from live import pictures, widgets
from live.pictures import Row

MODEL, NEW = "qwen2-docs", 6
LAYER, HEAD = 3, 3  # the head of step 3; the page says "the fourth block"


def numbers() -> dict[str, Any]:
    model, tokenizer = pictures.shipped(MODEL)
    ids = tokenizer.start(widgets.PROMPT)
    pieces = ["⊢", *tokenizer.pieces(ids[1:])]
    states = stages(model, ids)
    look = pictures.look(MODEL, widgets.PROMPT, LAYER, HEAD)[1]
    most = max(look, key=lambda row: row[1])
    config = model.config
    return {
        "prompt": widgets.PROMPT, "count": len(ids), "last": pieces[-1].strip(), "id": ids[-1],
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}",
        "vocabulary": config.vocab_size, "width": config.n_embd, "heads": config.n_head,
        "blocks": config.n_layer, "most": most[0].strip("·"), "most_share": f"{most[1]:.0%}",
        "tokens": row_of(zip(pieces, ids, strict=True)),
        "strips": strips(states),
        "look": look, "lens": pictures.lens(MODEL, widgets.PROMPT),
        "likeliest": pictures.picture("next", MODEL, widgets.PROMPT)[1],
        "said": said(model, tokenizer, ids), "bars": bars,
    }  # fmt: skip


@torch.no_grad()
def stages(model: Any, ids: list[int]) -> dict[str, Tensor]:
    """The vector of the last token: from the table, and around the first block's MLP."""
    states = {"embedded": model.head.weight[ids[-1]]}
    block = model.backbone.layers[0]
    norm, mlp = block.post_attention_layernorm, block.mlp
    hooks = [
        norm.register_forward_pre_hook(lambda _, x: states.update(attended=x[0][0, -1])),
        mlp.register_forward_hook(
            lambda _, __, y: states.update(behind=states["attended"] + y[0, -1])
        ),
    ]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return states


@torch.no_grad()
def said(model: Any, tokenizer: Any, ids: list[int]) -> str:
    """The text and what the model puts behind it, the likeliest token each time."""
    end = list(ids)
    for _ in range(NEW):
        end.append(int(model(torch.tensor([end]))[0, -1].argmax()))
    new = tokenizer.decode(end[len(ids) :])
    return templates.render("tour/said.html", prompt=widgets.PROMPT, new=new)


def row_of(tokens: Any) -> str:
    return templates.render("tour/tokens.html", tokens=list(tokens))


def strips(states: dict[str, Tensor]) -> dict[str, str]:
    """Numbers as colours; those around the MLP in the same ones."""
    around = torch.stack([states["attended"], states["behind"]]).abs().max().item()
    most = {"embedded": states["embedded"].abs().max().item()}
    return {
        name: templates.render("tour/strip.html", numbers=x.tolist(), most=most.get(name, around))
        for name, x in states.items()
    }


def bars(rows: list[Row]) -> str:
    return templates.render("tour/bars.html", rows=rows)
