"""Activation patching: put the numbers of another run in a run's place, and see what it says.

Reading a state shows what is there. To show that the model *uses* it, change it. Two texts of equal
length differ in one fact. The model reads the first, but at one site and token it goes on with what
it had there for the second. If it now gives the second answer, the fact passed through that place.

Two laws hold for any model: patching every token of a stream gives the other run, and patching with
a run's own numbers changes nothing.

Sources: Vig et al., *Causal Mediation Analysis for Interpreting Neural NLP*, 2020,
arXiv:2004.12265; Meng et al., *Locating and Editing Factual Associations in GPT*, 2022,
arXiv:2202.05262; Wang et al., *Interpretability in the Wild*, 2022, arXiv:2211.00593 (paths, on
which they let the MLPs between answer to the news, too).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lm_from_scratch.inside.sites import Edit, Site, activations, edited, one_stream
from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating

#: From logits (B, T, V) to a number for each row (B,): how far the answer is the other one.
Measure = Callable[[Tensor], Tensor]


def put(values: Tensor, where: Tensor) -> Edit:
    """The edit that takes ``values`` where ``where`` is true: of a stream, values (B, T, C) and a
    mask (B, T) of tokens; of heads, values (B, H, T, D) and a mask (B, T), or (B, H, T) to choose
    some."""

    def replace(x: Tensor) -> Tensor:
        mask = where[:, None] if x.dim() > where.dim() + 1 else where
        return torch.where(mask[..., None], values.to(x), x)

    return replace


def add(direction: Tensor, where: Tensor) -> Edit:
    """The edit that adds ``direction`` (C,) or (B, C) to a stream (B, T, C) where ``where`` (B, T)
    is true."""

    def move(x: Tensor) -> Tensor:
        step = direction if direction.dim() == 1 else direction[:, None]
        return x + where[..., None] * step.to(x)

    return move


def run(model: CausalLM, idx: Tensor, edits: Mapping[Site, Edit], **places: Tensor) -> Tensor:
    """The logits (B, T, V) of ``model`` for ``idx`` (B, T) with ``edits`` at their sites."""
    with evaluating(model), edited(model, edits):
        return model(idx, **places)


def difference(answer: int, other: int) -> Measure:
    """The logit of the ``other`` answer minus that of the ``answer``, after the last token: below 0
    where the model gives the answer, above 0 where it gives the other."""
    return lambda logits: logits[:, -1, other] - logits[:, -1, answer]


def _these(heads: int | Sequence[int], n: int, like: Tensor) -> Tensor:
    """Which of ``n`` heads are meant, (n,), where ``like`` is."""
    chosen = torch.tensor(heads, device=like.device).reshape(-1)
    if not ((chosen >= 0) & (chosen < n)).all():
        raise ValueError(f"heads={heads} must be from 0 to {n - 1}")
    return torch.isin(torch.arange(n, device=like.device), chosen)


def _pair(idx: Tensor, source: Tensor) -> None:
    if idx.shape != source.shape or idx.dim() != 2 or len(idx) != 1:
        raise ValueError(
            f"the texts have shapes {tuple(idx.shape)} and {tuple(source.shape)}; both must be "
            "(1, T), token under token"
        )


def patch_tokens(
    model: CausalLM, idx: Tensor, source: Tensor, measure: Measure, part: str = "stream"
) -> Tensor:
    """``measure`` (L, T) of the model on ``idx`` (1, T) with the numbers of ``source`` (1, T) put
    at one token of ``part`` of one block, for each block and token."""
    _pair(idx, source)
    if part == "stream":
        one_stream(model)
    sites = [Site(part, layer) for layer in range(len(blocks(model)))]
    _, values = activations(model, source, sites)
    T = idx.shape[1]
    rows, each = idx.expand(T, T), torch.eye(T, device=idx.device).bool()  # row t: token t
    return torch.stack([measure(run(model, rows, {s: put(values[s], each)})) for s in sites])


def patch_heads(model: CausalLM, idx: Tensor, source: Tensor, measure: Measure) -> Tensor:
    """``measure`` (L, H) of the model on ``idx`` (1, T) with what one head fetched for ``source``
    (1, T), at every token, for each head of each block."""
    _pair(idx, source)
    sites = [Site("heads", layer) for layer in range(len(blocks(model)))]
    _, values = activations(model, source, sites)
    found = []
    for site in sites:
        H, T = values[site].shape[1:3]
        each = torch.eye(H, device=idx.device).bool()[:, :, None].expand(H, H, T)  # row h: head h
        logits = run(model, idx.expand(H, T), {site: put(values[site], each)})
        found.append(measure(logits))
    return torch.stack(found)


def silence(
    model: CausalLM, texts: Tensor, layer: int, heads: int | Sequence[int], **places: Tensor
) -> Edit:
    """The edit of ``Site("heads", layer)`` that gives one head, or several, the mean over ``texts``
    (B, T), at every token: it says the same of everything. (0 would be a number that the next block
    has never met.) Tokens whose ``positions`` say that they are padding do not count. Raises
    ``ValueError`` for a head that the block does not have."""
    site = Site("heads", layer)
    _, values = activations(model, texts, [site], **places)
    real = places.get("positions", torch.zeros_like(texts)) >= 0  # (B, T)
    mean = values[site].transpose(1, 2)[real].mean(0)  # (H, D)
    silent = _these(heads, len(mean), mean)[:, None, None]
    return lambda x: torch.where(silent, mean[:, None].to(x), x)


def patch_path(
    model: CausalLM, idx: Tensor, source: Tensor, sender: tuple[int, int], receiver: Site,
    where: Tensor | None = None, **places: Tensor,
) -> Tensor:  # fmt: skip
    """The logits (B, T, V) for ``idx`` (B, T) where one path alone carries news of ``source``
    (B, T): what the head ``sender``, a (layer, head), fetched there goes straight to ``receiver``:
    the attention or the stream of a later block, the MLP of its own or a later one. It goes nowhere
    else on the way, and what the receiver makes of it goes on to everything after it. With a mask
    ``where`` (B, T), only what the head fetched at these tokens is sent.

    It is exact where a block adds what its parts make, as in Qwen2 and GPT-2. Raises ``ValueError``
    for a receiver that does not come after the sender, for a head that is not there, and for a
    model of several streams.
    """
    one_stream(model)
    if idx.shape != source.shape:
        raise ValueError(f"{tuple(idx.shape)} tokens cannot hear of {tuple(source.shape)}")
    layer, head = sender
    heads, attention = Site("heads", layer), Site("attention", layer)
    first = layer if receiver.part == "mlp" else layer + 1
    if receiver.part == "heads" or receiver.layer < first:
        raise ValueError(f"{receiver} is no receiver after the attention of block {layer}")
    _, other = activations(model, source, [heads], **places)
    _, own = activations(model, idx, [attention], **places)
    where = torch.ones_like(idx, dtype=torch.bool) if where is None else where
    one = _these(head, other[heads].shape[1], idx)
    sends = one[:, None] & where[:, None]  # (B, H, T)
    with edited(model, {heads: put(other[heads], sends)}):
        _, new = activations(model, idx, [attention], **places)
    news = new[attention] - own[attention]  # (B, T, C)
    # what enters an MLP is the stream with what the attention of its block has added
    entry = Site("attention" if receiver.part == "mlp" else "stream", receiver.layer)
    heard: dict[Site, Edit] = {entry: lambda x: x + news}
    if receiver.part == "stream":
        return run(model, idx, heard, **places)
    with edited(model, heard):
        _, made = activations(model, idx, [receiver], **places)
    return run(model, idx, {receiver: lambda x: made[receiver]}, **places)
