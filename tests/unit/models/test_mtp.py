"""mtp.py and its loss: against transformers, against the formula in float64, and what no depth may
see."""

import copy
import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_families import in_float64, near, several_seeds
from mtp_layers import enlarged, of_transformers, theirs
from tiny_models import ours_from_hf, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.text.targets import IGNORE, mtp_targets, next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.mtp_loss import mtp_losses

FAMILIES = ["llama", "mistral", "qwen3", "qwen3_moe", "deepseek_v3"]


QWEN2 = tiny_qwen2().double()
TIED = tiny_qwen2(tie_word_embeddings=True).double()
SLIDES = tiny_qwen2(sliding_window=4, max_window_layers=0).double()
MODELS = {"qwen2": QWEN2, "tied": TIED, "slides": SLIDES}
LAYERS = {name: enlarged(model, 3).double() for name, model in MODELS.items()}


# ------------------------------------------------------------------------------------ transformers


def both(family: str, seed: int, n_depth: int) -> tuple[Any, MTP, Any, Any]:
    """Ours and its layers, theirs and its layers, in float64."""
    with in_float64():
        twin = theirs(family, seed)
        model = ours_from_hf(twin)
        mtp = enlarged(model, n_depth, seed)
        twin_layers = of_transformers(twin, mtp)
        return model.double(), mtp.double(), twin.double(), twin_layers.double()


def twin_states(twin: Any, layers: Any, idx: torch.Tensor, n_depth: int) -> list[torch.Tensor]:
    """What each depth of transformers computes. Those have no caches but their own."""
    from transformers.cache_utils import MtpCache

    with in_float64():
        cache = MtpCache(config=twin.config.get_mtp_config())
        states = [twin.model(idx).last_hidden_state]
        for depth in range(1, n_depth + 1):
            known = F.pad(idx[:, depth:], (0, depth))
            places = torch.arange(idx.shape[1])[None] + depth
            states.append(
                layers.forward_layer(depth - 1, states[-1], places, cache, input_ids=known)
            )
    return states[1:]


@pytest.mark.parametrize("seed", several_seeds(range(25)))
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_depth_computes_what_transformers_does(family: str, seed: int) -> None:
    """Read at once, and in pieces after a cache."""
    n_depth = random.Random(seed).choice([1, 2, 3])
    model, mtp, twin, layers = both(family, seed, n_depth)
    idx = token_ids(1, 12, seed=seed)
    fed = h = model.model(idx)
    states, want = mtp(model, h, idx), twin_states(twin, layers, idx, n_depth)
    for depth in range(1, n_depth + 1):
        near(states[depth - 1], want[depth - 1])
        logits = model.head(states[depth - 1])
        near(logits, layers._project_to_logits(want[depth - 1]))
        own, known = cache_for([mtp.window]), F.pad(idx[:, depth:], (0, depth))
        pieces = zip(fed.split([5, 1, 6], 1), known.split([5, 1, 6], 1), strict=True)
        fed = torch.cat([mtp.step(model, depth, h, x, cache=own) for h, x in pieces], dim=1)
        near(fed, want[depth - 1])


@pytest.mark.parametrize("seed", range(25, 31))
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(family: str, seed: int) -> None:
    model, mtp, twin, layers = both(family, seed, 2)
    idx = token_ids(1, 10, seed=seed)
    sum(mtp_losses(model, mtp, model.model(idx), idx)).backward()
    total = 0.0
    for depth, hidden in enumerate(twin_states(twin, layers, idx, 2), 1):
        logits = layers._project_to_logits(hidden)[:, : -depth - 1]
        total = total + F.cross_entropy(logits[0], idx[0, depth + 1 :])
    total.backward()
    for ours, them in ((mtp, layers), (model, twin)):
        named = dict(them.named_parameters())
        for name, p in ours.named_parameters():
            near(p.grad, named[name].grad, name)


# ------------------------------------------------------------------------------------- the formula


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_one_depth_by_its_formula_in_float64() -> None:
    """A block that is replaced by one without attention, so that the formula fits on a page."""
    mtp, idx = copy.deepcopy(LAYERS["qwen2"]), token_ids(2, 9)
    h = torch.randn(2, 9, 48, dtype=torch.float64)
    layer, C, eps = mtp.layers[0], 48, 1e-6

    class Doubles(torch.nn.Module):
        def forward(self, x, rotation, visibility, cache):
            return 2 * x

    layer.mtp_block = Doubles()
    E = QWEN2.model.embed_tokens.weight
    W = layer.eh_proj.weight
    x = E[idx[:, 1:]]
    u = rms(x, layer.enorm.weight, eps) @ W[:, :C].T
    u = u + rms(h[:, :-1], layer.hnorm.weight, eps) @ W[:, C:].T
    want = rms(2 * u, layer.post_norm.weight, eps)
    torch.testing.assert_close(mtp(QWEN2, h, idx)[0][:, :-1], want, atol=1e-12, rtol=1e-10)


# --------------------------------------------------------------------------------- what it may see


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_depth_sees_its_answer(name: str, depth: int) -> None:
    """Another token at place j changes columns from j - depth on, and the one there: its target is
    token j + 1. So no column sees its own target, and each sees all tokens before it."""
    model, mtp = MODELS[name], LAYERS[name]
    idx = token_ids(1, 12)
    with torch.no_grad():
        before = mtp(model, model.model(idx), idx)[depth - 1]
        for j in range(4, 12):
            other = idx.clone()
            other[0, j] = idx[0, j] % 90 + 4
            after = mtp(model, model.model(other), other)[depth - 1]
            changed = (after - before).abs().amax(-1)[0] > 1e-9
            assert changed.tolist() == [i >= j - depth for i in range(12)] or name == "slides"
            assert not changed[: j - depth].any() and changed[j - depth]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_padding_and_documents_change_nothing(name: str) -> None:
    model, mtp = MODELS[name], LAYERS[name]
    a, b = token_ids(1, 7, seed=3), token_ids(1, 5, seed=4)
    alone = [mtp(model, model.model(x), x) for x in (a, b)]
    losses = [mtp_losses(model, mtp, model.model(x), x) for x in (a, b)]
    rows = torch.cat([a, b], dim=1)
    places = torch.tensor([[*range(7), *range(5)]])
    documents = torch.tensor([[0] * 7 + [1] * 5])
    packed = dict(positions=places, documents=documents)
    h = model.model(rows, **packed)
    left = torch.cat([torch.tensor([[0, 0]]), b], dim=1)
    padded = dict(positions=torch.tensor([[-1, -1, *range(5)]]))
    g = model.model(left, **padded)
    for depth in (1, 2, 3):
        at = depth - 1
        states = mtp(model, h, rows, **packed)[at]
        for have, want in ((states[:, :7], alone[0]), (states[:, 7:], alone[1])):
            real = want[at].shape[1] - depth
            torch.testing.assert_close(have[:, :real], want[at][:, :real])
        have = mtp(model, g, left, **padded)[at][:, 2:]
        torch.testing.assert_close(have[:, : 5 - depth], alone[1][at][:, : 5 - depth])
        counts = [max(0, n - 1 - depth) for n in (7, 5)]
        want = (counts[0] * losses[0][at] + counts[1] * losses[1][at]) / sum(counts)
        torch.testing.assert_close(mtp_losses(model, mtp, h, rows, **packed)[at], want)
        torch.testing.assert_close(mtp_losses(model, mtp, g, left, **padded)[at], losses[1][at])


def test_columns_may_be_counted_from_anywhere() -> None:
    """Rotation sees differences: transformers counts a column from its newest token."""
    idx = token_ids(2, 9)
    h = QWEN2.model(idx)
    mtp = LAYERS["qwen2"]
    places = torch.arange(9).expand(2, 9)
    want = mtp(QWEN2, h, idx)
    for have, one in zip(mtp(QWEN2, h, idx, positions=places + 5), want, strict=True):
        torch.testing.assert_close(have, one)


# --------------------------------------------------------------------------------- targets and loss


def test_targets_of_each_depth() -> None:
    idx = torch.tensor([[5, 6, 7, 8, 9]])
    no = IGNORE
    assert mtp_targets(idx, 0).tolist() == [[6, 7, 8, 9, no]]
    assert mtp_targets(idx, 1).tolist() == [[7, 8, 9, no, no]]
    assert mtp_targets(idx, 3).tolist() == [[9, no, no, no, no]]
    assert mtp_targets(idx, 9).tolist() == [[no] * 5]
    packed = torch.tensor([[0, 1, 0, 1, 2]])
    assert mtp_targets(idx, 1, positions=packed).tolist() == [[no, no, 9, no, no]]
    padded = torch.tensor([[-1, 0, 1, 2, 3]])
    assert mtp_targets(idx, 1, positions=padded).tolist() == [[no, 8, 9, no, no]]
    right = torch.tensor([[0, 1, 2, -1, -1]])
    assert mtp_targets(idx, 1, positions=right).tolist() == [[7, no, no, no, no]]
    assert mtp_targets(idx[:, :1], 1).tolist() == [[no]]
    for depth in (-1, 1.0, True, None):
        with pytest.raises(ValueError, match=f"depth={depth} must be a whole number, 0 or more"):
            mtp_targets(idx, depth)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 2))
def test_targets_by_their_definition(lengths, depth, padding) -> None:
    """In each document the token depth + 1 places on, if the document has it."""
    documents = [[100 * d + t for t in range(n)] for d, n in enumerate(lengths)]
    idx = torch.tensor([[0] * padding + list(itertools.chain(*documents))])
    places = [[-1] * padding, *(list(range(n)) for n in lengths)]
    want = [IGNORE] * padding
    for row in documents:
        want += [(row + [IGNORE] * (depth + 1))[t + depth + 1] for t in range(len(row))]
    found = mtp_targets(idx, depth, positions=torch.tensor([list(itertools.chain(*places))]))
    assert found.tolist() == [want]
    if depth == 0:
        assert torch.equal(
            found, next_token_targets(idx, positions=torch.tensor([list(itertools.chain(*places))]))
        )


def test_the_loss_is_the_mean_over_columns_with_a_target() -> None:
    idx = token_ids(2, 8)
    mtp = LAYERS["qwen2"]
    h = QWEN2.model(idx)
    for depth, (loss, x) in enumerate(
        zip(mtp_losses(QWEN2, mtp, h, idx), mtp(QWEN2, h, idx), strict=True), 1
    ):
        logits = x @ QWEN2.lm_head.weight.T
        log_p = logits.log_softmax(-1)
        terms = [-log_p[b, i, idx[b, i + depth + 1]] for b in (0, 1) for i in range(8 - depth - 1)]
        torch.testing.assert_close(loss, sum(terms) / len(terms))
        want = causal_lm_loss(logits, mtp_targets(idx, depth))
        torch.testing.assert_close(loss, want)


def test_only_the_layers_learn_where_the_states_are_detached() -> None:
    model, idx = copy.deepcopy(TIED).requires_grad_(False), token_ids(2, 8)
    mtp = MTP(model)
    assert sum(mtp_losses(model, mtp, model.model(idx).detach(), idx)).requires_grad
    sum(mtp_losses(model, mtp, model.model(idx).detach(), idx)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mtp.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_fresh_part_knows_nothing_and_shares_embedding_and_head() -> None:
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=97, n_layer=2, n_head=2, n_kv_head=1, n_embd=16,
                    intermediate_size=24, pad_token_id=0, eos_token_id=2)
    )  # fmt: skip
    mtp, idx = MTP(model, 2), token_ids(2, 12)
    for loss in mtp_losses(model, mtp, model.model(idx), idx):
        assert loss.item() == pytest.approx(math.log(97), abs=0.2)
    shapes = {name: tuple(p.shape) for name, p in mtp.layers[0].named_parameters()}
    assert shapes.pop("eh_proj.weight") == (16, 32)
    assert {shapes.pop(f"{n}.weight") for n in ("enorm", "hnorm", "post_norm")} == {(16,)}
    block = {f"mtp_block.{n}": tuple(p.shape) for n, p in model.model.layers[1].named_parameters()}
    assert shapes == block
    own = {id(p) for p in model.parameters()}
    assert not own & {id(p) for p in mtp.parameters()}
    assert MTP(QWEN2).layers[0].eh_proj.weight.dtype == torch.float64
    assert all(not p.any() for name, p in mtp.named_parameters() if name.endswith("bias"))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="model=GPT2LMHeadModel is not supported, only Qwen2"):
        MTP(tiny_gpt2())
    with pytest.raises(ValueError, match="n_depth=0 must be an integer, at least 1"):
        MTP(QWEN2, 0)
    idx = token_ids(2, 5)
    for h in (torch.zeros(2, 4, 48), torch.zeros(2, 5, 47)):
        with pytest.raises(ValueError, match=r"tokens of shape \(2, 5\) they must be \(2, 5, 48\)"):
            LAYERS["qwen2"](QWEN2, h.double(), idx)
