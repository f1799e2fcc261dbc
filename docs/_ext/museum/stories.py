"""Ten stories of the bug museum: symptom, search, cause and fix of a mistake, with one picture.

The prose is `_pages/stories/NAME.rst`, which names its mistakes by ``fix("G4")``. The function
NAME here computes the picture and the numbers, and asserts what the prose says of them.
"""

import copy
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from live.pictures import shipped
from torch import Tensor, nn

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE, Cache
from lm_from_scratch.drawings.caching import padded_batch, slot_masks, versions
from lm_from_scratch.drawings.classification import padded_rows
from lm_from_scratch.drawings.generation import surprise
from lm_from_scratch.drawings.gpt2 import bars
from lm_from_scratch.drawings.quantized_weights import holders
from lm_from_scratch.drawings.stories import nan_spreads, written
from lm_from_scratch.optim.adamw import adam_direction
from lm_from_scratch.text.targets import IGNORE

FOLDER = Path(__file__).resolve().parents[2] / "_pages" / "stories"


class Story(NamedTuple):
    """What a list of stories says of one."""

    name: str
    title: str
    line: str
    numbers: list[str]


@cache
def told() -> list[Story]:
    """All stories, in the order of the list, as their templates say."""
    stories = []
    for name in STORIES:
        text = (FOLDER / f"{name}.rst").read_text(encoding="utf-8")
        (line,) = re.findall(r"^   :description: (.+)$", text, re.M)
        title = re.findall(r"^(.+)\n=+$", text, re.M)[0]
        stories.append(Story(name, title, line, re.findall(r'fix\("(\w+)"\)', text)))
    return stories


@cache
def values(name: str) -> dict[str, Any]:
    return STORIES[name]()


@torch.no_grad()
def greedy(
    model: nn.Module, prompt: list[int], count: int, cache: Cache = NO_CACHE, again: bool = False
) -> list[int]:
    """The likeliest token each time. A cache is fed the new tokens, or the whole text ``again``."""
    ids = list(prompt)
    for _ in range(count):
        fed = ids if again else ids[cache.length :]
        ids.append(int(model(torch.tensor([fed]), cache=cache)[0, -1].argmax()))
    return ids[len(prompt) :]


class Restarting(GrowingCache):
    """Positions of the embedding start at 0 in every pass."""

    def see(self, x: Tensor, *args: Any, **options: Any) -> Any:
        visibilities = super().see(x, *args, **options)
        visibilities[0].query_positions = torch.arange(x.shape[1])[None]
        return visibilities


def in_order(q: Tensor, k: Tensor, v: Tensor, visibility: Any, dropout: float = 0.0) -> Tensor:
    """Attention in which the queries are the last of the keys, whatever their positions."""
    T, S = q.shape[2], k.shape[2]
    mask = torch.ones(S, S, dtype=torch.bool).tril()[S - T :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def wrong_text() -> dict[str, Any]:
    shipped_model, tokenizer = shipped("gpt2-docs")
    model = copy.deepcopy(shipped_model)
    for attention in attention_layers(model):
        attention.attend = in_order
    prompt, layers = "The object is", model.config.n_layer
    ids, ways = tokenizer.start(prompt), {}
    for title, kind, again in (
        ("without a cache", None, True),
        ("the whole text is fed again", Restarting, True),
        ("new tokens only, positions from 0", Restarting, False),
        ("positions go on", GrowingCache, False),
    ):
        cache = kind(n_layer=layers) if kind else NO_CACHE
        ways[title] = greedy(model, ids, 14, cache, again)
    right, again, restarted, fixed = ways.values()
    assert right == fixed and right[:2] == again[:2]
    assert right[0] == restarted[0] and right != restarted != again != right
    pieces = {title: [prompt, *tokenizer.pieces(new)] for title, new in ways.items()}
    return {
        "picture": versions(pieces), "prompt": prompt, "first": tokenizer.decode(right[:1]).strip(),
        "start": len(ids), "grown": 2 * len(ids) + 1,
    }  # fmt: skip


@torch.no_grad()
def padded_prompt() -> dict[str, Any]:
    model, tokenizer = shipped("gpt2-docs")
    short, long = (tokenizer.start(text) for text in ("The list", "If the file does not exist,"))
    empty = len(long) - len(short)
    ids = torch.tensor([[0] * empty + short, long])
    mask = torch.tensor([[0] * empty + [1] * len(short), [1] * len(long)])
    right = positions_from_mask(mask)
    counted = torch.where(mask == 1, torch.arange(len(long)), -1)  # hidden, and counted
    alone = model(torch.tensor([short]))[0, -1].softmax(-1)
    batch = {
        name: model(ids, positions=positions)[0, -1].softmax(-1)
        for name, positions in (("right", right), ("counted", counted))
    }
    word = {name: tokenizer.pieces([int(p.argmax())])[0] for name, p in batch.items()}
    assert batch["right"].sub(alone).abs().max() < 1e-4 and word["right"] != word["counted"]
    words = ["pad"] * empty + ["⊢", *tokenizer.pieces(short[1:])]
    best = int(alone.argmax())
    return {
        "picture": padded_batch([words, words], [counted[0].tolist(), right[0].tolist()]),
        "alone": word["right"].strip(), "wrong": word["counted"].strip(), "empty": empty,
        "share": f"{alone[best].item():.0%}", "fell": f"{batch['counted'][best].item():.0%}",
    }  # fmt: skip


def low_loss() -> dict[str, Any]:
    """Three steps of fine-tuning on short texts in rows of one length."""
    shipped_model, tokenizer = shipped("gpt2-docs")
    texts = ("Return the value.", "If the file does not exist, an error is raised.",
             "The list is empty.", "Open the file for reading.")  # fmt: skip
    rows, T, end = [tokenizer.start(text) for text in texts], 28, tokenizer.eos_token_id
    ids = torch.tensor([row + [end] * (T - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in rows])
    real = ids.masked_fill(mask == 0, IGNORE)

    def costs(model: nn.Module, labels: Tensor) -> Tensor:
        logits = model(ids)[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, labels[:, 1:], ignore_index=IGNORE, reduction="none")

    def mean(model: nn.Module, labels: Tensor) -> Tensor:
        return costs(model, labels).sum() / (labels[:, 1:] != IGNORE).sum()

    models = {}
    for name, labels in (("copied", ids.clone()), ("hidden", real)):
        model = models[name] = copy.deepcopy(shipped_model).eval()  # no dropout: nothing by chance
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            mean(model, labels).backward()
            optimizer.step()
    wrong, n = models["copied"], len(rows[1])
    with torch.no_grad():
        pairs = ((wrong, ids), (wrong, real), (models["hidden"], real))
        reported, true, fixed = (mean(*pair).item() / math.log(2) for pair in pairs)
        bits = (costs(wrong, ids)[1] / math.log(2)).tolist()
    new = greedy(wrong, tokenizer.start("The list"), 12)
    ends = new[::-1].index(next(i for i in new[::-1] if i != end))
    share = 1 - mask[:, 1:].float().mean().item()
    assert reported < 0.4 * true and fixed < 0.75 * true and ends >= 3
    pieces = [*tokenizer.pieces(rows[1][1:]), *[" pad"] * (T - n)]
    return {
        "picture": surprise({
            "A row as the trainer saw it": (pieces, bits),
            "The words alone": (pieces[: n - 1], bits[: n - 1]),
        }),
        "share": f"{share:.0%}", "reported": f"{reported:.1f}", "words": f"{true:.1f}",
        "fixed": f"{fixed:.1f}", "ends": ends, "written": len(new),
    }  # fmt: skip


@torch.no_grad()
def penalty() -> dict[str, Any]:
    model, tokenizer = shipped("qwen2-docs")
    by = 1.5
    ways = {
        "divide all (before)": lambda z: z / by,
        "multiply the negative ones (after)": lambda z: torch.where(z > 0, z / by, z * by),
    }
    start, texts = tokenizer.start("The function"), {}
    for name, penalise in ways.items():
        ids = list(start)
        for _ in range(12):
            z = model(torch.tensor([ids]))[0, -1] - 30
            used = sorted({*ids})
            z[used] = penalise(z[used])
            ids.append(int(z.argmax()))
        texts[name] = ids[1:]
    before, after = texts.values()
    assert {*before[2:]} == {start[-1]} and after.count(start[-1]) == 1
    logits = model(torch.tensor([start]))[0, -1]
    moved = (logits - 30).softmax(-1).sub(logits.softmax(-1)).abs().max().item()
    assert moved < 1e-5 and (logits < 30).all()
    right = versions({name: tokenizer.pieces(texts[name]) for name in (*reversed(ways),)})
    word = tokenizer.pieces(start[-1:])[0].strip()
    return {"picture": right, "word": word, "times": before.count(start[-1]), "by": by}


def window_mask(T: int, left: int) -> Tensor:
    """A fused kernel's window: so many keys to the left of the query, and its own."""
    return torch.ones(T, T, dtype=torch.bool).tril().triu(-left)


@torch.no_grad()
def window() -> dict[str, Any]:
    shipped_model, tokenizer = shipped("qwen2-docs")
    W, model = 8, copy.deepcopy(shipped_model)
    ids = tokenizer.start("If the file does not exist, an error is raised. Otherwise the function "
                          "returns the number of bytes that were read from it.")  # fmt: skip

    def logits(left: int, length: int) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Tensor:
            mask = window_mask(length, left)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        for attention in attention_layers(model):
            attention.attend = attend
        return model(torch.tensor([ids[:length]]))[0]

    short, one_more, long = (
        (logits(W, T) - logits(W - 1, T)).abs().max().item() for T in (W, W + 1, len(ids))
    )
    assert short == 0.0 and 0.1 < one_more <= long
    small = 4
    masks = {
        f"({small}, {small}), as it was": window_mask(7, small),
        f"({small - 1}, 0), as it should be": window_mask(7, small - 1),
    }
    counts = [int(mask[-1].sum()) for mask in masks.values()]
    assert counts == [small + 1, small]
    rows = {name: ([*range(7)], [4, 5, 6], mask[4:].tolist()) for name, mask in masks.items()}
    return {
        "picture": slot_masks(rows), "small": small, "sees": counts[0], "W": W,
        "one_more": f"{one_more:.1f}", "long": f"{long:.1f}", "length": len(ids),
    }  # fmt: skip


@torch.no_grad()
def company() -> dict[str, Any]:
    model, tokenizer = shipped("qwen2-docs")
    end = tokenizer.eos_token_id
    texts = "Return the value.", "The list is empty.", "Return a list of names."
    rows = [tokenizer.start(text) for text in texts]
    assert all(row[0] == end for row in rows)  # a text begins with the token that also pads
    T = max(map(len, rows))
    ids = torch.tensor([row + [end] * (T - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in rows])

    def last_column(ids: Tensor) -> list[int]:
        """The old rule: the column before the first padding id."""
        return [c % ids.shape[1] for c in ((ids == end).int().argmax(-1) - 1).tolist()]

    right = (T - 1 - mask.flip(-1).argmax(-1)).tolist()
    assert right == [len(row) - 1 for row in rows] and last_column(ids) == [T - 1] * len(rows)
    assert all(last_column(torch.tensor([row])) == [len(row) - 1] for row in rows)
    states = model.backbone(ids, positions=positions_from_mask(mask))
    alone = model.backbone(torch.tensor([rows[0]]))[0, -1]
    torch.testing.assert_close(states[0, right[0]], alone, atol=1e-3, rtol=1e-3)
    like = torch.cosine_similarity(states[0, last_column(ids)[0]], alone, dim=0).item()
    assert like < 0.7
    pieces = [["⊢", *(piece.strip() for piece in tokenizer.pieces(row[1:]))] for row in rows]
    return {
        "picture": padded_rows(pieces, "⊢", last_column(ids)), "rows": len(rows), "columns": T,
        "wrong": sum(a != b for a, b in zip(right, last_column(ids), strict=True)),
        "like": f"{like:.2f}",
    }  # fmt: skip


def nan() -> dict[str, Any]:
    """Two layers of attention over two tokens of padding and three words, in float16."""
    lowest = torch.finfo(torch.float16).min
    words, empty = ["pad", "pad", "Return", "the", "value"], 2
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril()
    hidden[:, :empty] = True

    def added(scores: Tensor) -> Tensor:
        return scores + torch.zeros_like(scores).masked_fill(hidden, lowest)

    def filled(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden, lowest)

    def layers(hide: Callable[[Tensor], Tensor], factor: float) -> list[Tensor]:
        x, states = factor * torch.ones(5, 3).half(), []
        for _ in range(2):
            x = hide(-x @ x.mT / 3).float().softmax(-1).half() @ x
            states.append(x)
        return states

    first, second = layers(added, 4.0)  # scores of -16
    assert first[:empty].isnan().all() and not first[empty:].isnan().any() and second.isnan().all()
    for hide, factor in ((added, 3.0), (filled, 4.0)):
        assert not any(x.isnan().any() for x in layers(hide, factor))
    half = torch.tensor(lowest).half()
    assert half - 15 == half and (half - 16).isinf()
    tables = {"after layer 1": first.tolist(), "after layer 2": second.tolist()}
    return {
        "picture": nan_spreads(words, tables, empty), "lowest": f"{lowest:.0f}",
        "score": -16, "spared": -9,
    }  # fmt: skip


def slower() -> dict[str, Any]:
    """Tokens that are written to hold so many, counted from the shapes of what is written."""

    def joined(count: int) -> list[int]:
        keys, steps = torch.empty(0, 1, device="meta"), []
        for _ in range(count):
            keys = torch.cat([keys, torch.empty(1, 1, device="meta")])
            steps.append(len(keys))
        return steps

    def doubled(count: int) -> list[int]:
        slots, steps = 1, []
        for length in range(count):
            copied = 0
            if length == slots:
                copied, slots = slots, 2 * slots
            steps.append(copied + 1)
        return steps

    few, many, long = 32, 200, 1024
    ratio = sum(joined(2 * many)) / sum(joined(many))
    assert sum(joined(many)) == many * (many + 1) // 2 and sum(doubled(long)) < 3 * long
    work = {"torch.cat": joined(few), "a buffer that doubles": doubled(few)}
    return {
        "picture": written(work), "few": few, "cat": sum(work["torch.cat"]),
        "doubled": sum(work["a buffer that doubles"]), "many": many, "twice": 2 * many,
        "ratio": f"{ratio:.2f}", "long": long, "each": f"{sum(joined(long)) / long:.0f}",
    }  # fmt: skip


def late_layer() -> dict[str, Any]:
    """The first step of a weight, in learning rates, by the step that the group has reached."""
    zero, one = torch.zeros(1), torch.ones(1)
    steps = {n: adam_direction(one, zero, zero, n)[0].item() for n in (1, 10, 100, 1000, 10000)}
    assert abs(steps[1] - 1) < 1e-4 and steps[10] < 0.5 and steps[1000] > 2.5
    assert all(
        abs(adam_direction(scale * one, zero, zero, 1)[0].item() - 1) < 1e-4 for scale in (0.1, 9)
    )
    names = [f"step\u00a0{n:,}" for n in steps]
    return {
        "picture": bars(names, [*steps.values()], [i for i, n in enumerate(steps) if n > 1]),
        "ten": f"{steps[10]:.2f}", "thousand": f"{steps[1000]:.1f}",
        "limit": f"{steps[10000]:.1f}",
    }  # fmt: skip


def no_progress() -> dict[str, Any]:
    """A model whose weights are assigned after its optimizer was built, and before."""
    shipped_model, tokenizer = shipped("gpt2-docs")
    ids = torch.tensor([tokenizer.start("If the file does not exist, an error is raised.")])

    def run(late: bool) -> tuple[list[float], Any, Any]:
        model = copy.deepcopy(shipped_model).eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {name: part.clone() for name, part in shipped_model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        if not late:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(4):
            loss = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    wrong, model, optimizer = run(late=True)
    right, *_ = run(late=False)
    used, held = next(model.parameters()), optimizer.param_groups[0]["params"][0]
    assert {*wrong} == {wrong[0]} == {right[0]} and right[-1] < 0.8 * right[0]
    assert used is not held and held.grad is None and used.grad is not None
    loaded = used.detach().clone()
    loaded.gradient = True  # type: ignore[attr-defined]
    tensors = {"loaded, in use": loaded, "from before": held.detach()}
    pointers = {"model": tensors["loaded, in use"], "optimizer": tensors["from before"]}
    return {
        "picture": holders("After loading", pointers, tensors),
        "stays": f"{wrong[0]:.2f}", "falls": f"{right[-1]:.2f}", "steps": len(wrong) - 1,
    }  # fmt: skip


#: The stories in the order of the list: each has a template of this name.
STORIES: dict[str, Callable[[], dict[str, Any]]] = {
    story.__name__: story
    for story in (
        *(wrong_text, padded_prompt, low_loss, penalty, window, company, nan, slower),
        *(late_layer, no_progress),
    )
}
