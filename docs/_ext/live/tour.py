"""The numbers and pictures of the tour: what the shipped model did with one text."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from live import pictures

MODEL, NEW = "qwen2-docs", 6
LAYER, HEAD = 3, 3  # the head of step 3


class Strip(NamedTuple):
    """A vector, and the size that has the strongest colour."""

    numbers: list[float]
    most: float


def numbers() -> dict[str, Any]:
    model, tokenizer = pictures.shipped(MODEL)
    ids = tokenizer.start(pictures.PROMPT)
    pieces = ["⊢", *tokenizer.pieces(ids[1:])]
    states = stages(model, ids)
    look = pictures.look(MODEL, pictures.PROMPT, LAYER, HEAD)[1]
    most = max(look, key=lambda row: row[1])
    config = model.config
    return {
        "prompt": pictures.PROMPT, "count": len(ids), "last": pieces[-1].strip(), "id": ids[-1],
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}",
        "vocabulary": config.vocab_size, "width": config.n_embd, "heads": config.n_head,
        "blocks": config.n_layer, "layer": LAYER,
        "most": most[0].strip("␣"), "most_share": f"{most[1]:.0%}",
        "tokens": list(zip(map(pictures.printable, pieces), ids, strict=True)),
        "strips": strips(states),
        "look": look, "lens": pictures.lens(MODEL, pictures.PROMPT),
        "likeliest": pictures.picture("next", MODEL, pictures.PROMPT)[1],
        "new": continued(model, tokenizer, ids),
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
def continued(model: Any, tokenizer: Any, ids: list[int]) -> str:
    """What the model puts behind the text, the likeliest token each time."""
    end = list(ids)
    for _ in range(NEW):
        end.append(int(model(torch.tensor([end]))[0, -1].argmax()))
    return str(tokenizer.decode(end[len(ids) :]))


def strips(states: dict[str, Tensor]) -> dict[str, Strip]:
    """Numbers as colours; those around the MLP in the same ones."""
    around = torch.stack([states["attended"], states["behind"]]).abs().max().item()
    most = {"embedded": states["embedded"].abs().max().item()}
    return {name: Strip(x.tolist(), most.get(name, around)) for name, x in states.items()}
