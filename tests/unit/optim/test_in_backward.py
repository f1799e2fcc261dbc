"""update_in_backward: the steps of an ordinary loop, one gradient at a time."""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor, nn

from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.galore_basis import singular_basis
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.optim.muon import Muon
from lm_from_scratch.training.gradient_checkpointing import use_gradient_checkpointing_
from lm_from_scratch.training.loss import causal_lm_loss

MODELS = {
    "gpt2": tiny_gpt2,  # the head is tied to the embedding
    "qwen2": tiny_qwen2,
    "tied qwen2": lambda: tiny_qwen2(tie_word_embeddings=True),
    "wide gpt2": lambda: tiny_gpt2(n_embd=64),  # large enough for moments of 8 bits
}


def galore(model: nn.Module, **options: Any) -> GaLore:
    """Matrices projected, with their refreshes in step 1, 4, ..., and the rest AdamW."""
    return GaLore(
        model.parameters(), 1e-2, **{**dict(rank=4, update_proj_gap=3, moments="rotate"), **options}
    )


def adamw(model: nn.Module, **options: Any) -> AdamW:
    return AdamW(model.parameters(), 1e-2, **options)


def muon(model: nn.Module) -> Muon:
    return Muon(model.parameters(), 1e-2, momentum=0.9)


PLAIN: dict[str, Callable[[nn.Module], AdamW]] = {
    "adamw": adamw,
    "fused adamw": partial(adamw, fused=True),
    "adamw in 8 bits": partial(adamw, optim_bits=8),
    "galore": galore,
    "fused galore": partial(galore, fused=True),
    "galore in 8 bits": partial(galore, optim_bits=8, rank=64),
    "muon": muon,
}


def loss_of(model: CausalLM, seed: int) -> Tensor:
    ids = token_ids(2, 12, seed=seed)
    return causal_lm_loss(model(ids), ids)


def context(inside: bool, optimizer: AdamW, passes: int = 1) -> Any:
    return update_in_backward(optimizer, passes) if inside else contextlib.nullcontext()


def everything(model: nn.Module, optimizer: AdamW) -> list[Any]:
    return [[p.detach(), dict(optimizer.state.get(p, {}))] for p in model.parameters()]


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in MODELS for k in PLAIN if (n == "wide gpt2") == ("8 bits" in k)],
)
def test_weights_and_state_are_bit_for_bit_those_of_plain_steps(name, kind) -> None:
    make, ends = PLAIN[kind], []
    for inside in (False, True):
        model = MODELS[name]()
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        with context(inside, optimizer):
            for step in range(5):
                loss_of(model, step).backward()
                assert all((p.grad is None) == inside for p in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        ends.append(everything(model, optimizer))
    assert_same(*ends)
    assert (ends[0][0][0] - next(MODELS[name]().parameters())).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_accumulated_adamw_is_bit_for_bit_that_of_plain_steps(name) -> None:
    ends = []
    for inside in (False, True):
        model = MODELS[name]()
        optimizer = adamw(model)
        with context(inside, optimizer, 3):
            for step in range(3):
                for part in range(3):
                    loss_of(model, 3 * step + part).backward()
                    done = [p.grad is None for p in model.parameters()]
                    assert all(done) if inside and part == 2 else not any(done)
                optimizer.step()
                optimizer.zero_grad()
        ends.append(everything(model, optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("kind", ["std", "reverse_std", "full"])
def test_accumulated_galore_adds_up_projected_gradients(kind) -> None:
    """The sum of projections is the projection of the sum, while no basis is due."""
    ends = []
    for inside in (False, True):
        model = tiny_gpt2().double()
        optimizer = galore(model, update_proj_gap=4, projection_type=kind)
        loss_of(model, 99).backward()  # the first basis is of one pass
        optimizer.step()
        optimizer.zero_grad()
        with context(inside, optimizer, 2):
            for step in range(3):
                for part in range(2):
                    loss_of(model, 2 * step + part).backward()
                    for p in model.parameters():
                        assert not inside or p.grad is None or (p.dim() < 2 and part == 0)
                optimizer.step()
                optimizer.zero_grad()
        assert all(state["step"] == 4 for state in optimizer.state.values())
        ends.append(everything(model, optimizer))
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-9)


def test_a_basis_that_is_due_is_that_of_the_first_pass() -> None:
    p = nn.Parameter(torch.zeros(6, 4))
    gradients = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    optimizer = GaLore([p], rank=2, update_proj_gap=2)
    with update_in_backward(optimizer, 3):
        for i, g in enumerate(gradients):
            (p * g).sum().backward()
            first = gradients[0] if i < 6 else gradients[6]  # steps 1 and 3
            basis = singular_basis(first, 2, False, True, "gram")[1]
            torch.testing.assert_close(optimizer.state[p]["right"], basis)
            assert optimizer.state[p]["step"] == (i + 1) // 3
    assert optimizer.state[p]["bases"] == 2


def test_a_basis_does_not_change_between_the_passes_of_one_step() -> None:
    """The second pass has drifted away, but the first one's sum is in the coordinates in use."""
    p = nn.Parameter(torch.zeros(4, 3))
    first, second = torch.zeros(4, 3), torch.zeros(4, 3)
    first[0, 0], second[1, 1] = 1.0, 2.0
    optimizer = GaLore([p], rank=1, update_proj_gap=None, max_drift=0.1)
    with update_in_backward(optimizer, 2):
        (p * first).sum().backward()
        (p * second).sum().backward()
        assert optimizer.state[p]["bases"] == 1
        assert p.nonzero().tolist() == [[0, 0]]
        (p * second).sum().backward()  # the first pass of the next step
        assert optimizer.state[p]["bases"] == 2


@pytest.mark.parametrize("make", [adamw, galore])
def test_one_full_gradient_is_alive_at_a_time(make) -> None:
    model = tiny_qwen2()
    optimizer = make(model)
    params = list(model.parameters())
    alive: list[int] = []
    after: list[int] = []

    def count(into: list[int]) -> Callable[[Tensor], None]:
        return lambda _: into.append(sum(p.grad is not None for p in params))

    early = [p.register_post_accumulate_grad_hook(count(alive)) for p in params]
    with update_in_backward(optimizer):  # hooks run in the order in which they were registered
        late = [p.register_post_accumulate_grad_hook(count(after)) for p in params]
        for step in range(2):
            loss_of(model, step).backward()
        for hook in late:
            hook.remove()
    assert alive == [1] * 2 * len(params)
    assert after == [0] * 2 * len(params)
    alive.clear()
    loss_of(model, 3).backward()  # an ordinary pass holds them all
    assert alive == list(range(1, len(params) + 1))
    assert len(early) == len(params)


@pytest.mark.parametrize("make", [adamw, galore])
def test_gradient_checkpointing_computes_again_with_the_old_weights(make) -> None:
    ends = []
    for inside, checkpointed in ((False, False), (True, True)):
        model = tiny_qwen2()
        if checkpointed:
            use_gradient_checkpointing_(model)
        optimizer = make(model)
        with context(inside, optimizer):
            for step in range(4):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(everything(model, optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("make", [adamw, galore])
def test_a_gradient_that_is_not_finite_raises_from_backward(make, bad) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    first, middle, last = (layer.weight for layer in model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    with update_in_backward(optimizer):
        y = model[0](x)
        y.register_hook(lambda g: g)
        z = model[1](y)
        z.register_hook(lambda g: g * bad)  # the gradients in front of the last layer are bad
        with pytest.raises(FloatingPointError, match=r"shape \(4, 4\) is not finite"):
            model[2](z).square().sum().backward()
    assert_same(first.detach(), before[0])
    assert_same(middle.detach(), before[1])
    assert not torch.equal(last, before[2])  # it was behind
    assert middle not in optimizer.state
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_sparse_gradient_raises_from_backward() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = AdamW(embedding.parameters())
    with update_in_backward(optimizer), pytest.raises(ValueError, match="sparse"):
        embedding(torch.tensor([1])).sum().backward()
    assert_same(embedding.weight.detach(), before)


def test_hooks_are_gone_when_the_context_is_left() -> None:
    model = tiny_gpt2()
    optimizer = galore(model)
    with update_in_backward(optimizer):
        loss_of(model, 0).backward()
    with pytest.raises(KeyError), update_in_backward(optimizer):
        raise KeyError
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 1).backward()
    assert_same([p.detach() for p in model.parameters()], before)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    with update_in_backward(optimizer):  # again
        loss_of(model, 1).backward()
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_contexts_that_would_step_twice_are_refused() -> None:
    model, other = tiny_gpt2(), tiny_gpt2()
    optimizer = adamw(model)
    with update_in_backward(optimizer):
        for second in (optimizer, galore(model), AdamW([model.transformer.wte.weight])):
            with pytest.raises(ValueError, match="is in a context"), update_in_backward(second):
                pass
        with update_in_backward(adamw(other)):  # of another model
            loss_of(other, 0).backward()
        loss_of(model, 0).backward()
    assert all(state["step"] == 1 for state in optimizer.state.values())


@pytest.mark.parametrize("passes", [0, -1, 1.0, True, None])
def test_the_number_of_passes_is_checked(passes) -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(2))])
    with (
        pytest.raises(ValueError, match=f"grad_accumulation={passes}"),
        update_in_backward(optimizer, passes),
    ):
        pass


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    a, b, frozen = (nn.Parameter(torch.ones(4, 3)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = GaLore([a, b, frozen], rank=2)
    with update_in_backward(optimizer):
        (a * frozen).sum().backward()
        optimizer.step()
    assert set(optimizer.state) == {a}
    assert_same(b.detach(), torch.ones(4, 3))
    assert_same(frozen.detach(), torch.ones(4, 3))


@pytest.mark.parametrize("rank", [None, 2])
def test_parameters_that_are_not_in_every_pass(rank) -> None:
    """Like experts of a mixture: each step is that of the plain loop."""
    used = [("ab", "b"), ("b", "ab"), ("a", "b"), ("ab", "ab"), ("b", "b"), ("b", "a"), ("ab", "a")]
    ends = []
    for inside in (False, True):
        torch.manual_seed(0)
        params = {name: nn.Parameter(torch.randn(5, 4).double()) for name in "ab"}
        optimizer = GaLore(params.values(), 0.1, rank=rank, update_proj_gap=None)
        sum(p.square().sum() for p in params.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with context(inside, optimizer, 2):
            for parts in used:
                for part in parts:
                    sum((params[name] ** 3).sum() for name in part).backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([[p.detach(), dict(optimizer.state[p])] for p in params.values()])
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def test_leaving_in_the_middle_of_a_step_loses_nothing() -> None:
    weights = []
    for inside in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).double())
            for shape in ((9, 6), (5, 8), (3, 2, 2), (4,))
        ]
        optimizer = GaLore(params, rank=2, update_proj_gap=5)
        scale = [torch.randn(p.shape, generator=generator).double() for p in params]
        more = [torch.randn(p.shape, generator=generator).double() for p in params]
        # the first step makes the bases of both from one gradient
        sum((p * c).sum() for p, c in zip(params, scale, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with update_in_backward(optimizer, 3) if inside else contextlib.nullcontext():
            for factor in (1.0, 0.5):
                loss = sum((p * (factor * c)).sum() for p, c in zip(params, more, strict=True))
                loss.backward()
        assert all(p.grad is not None for p in params)
        optimizer.step()
        weights.append(params)
    for ours, want in zip(*weights, strict=True):
        torch.testing.assert_close(ours, want, atol=1e-12, rtol=0)


def test_another_optimizer_is_refused_by_name() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))])
    with (
        pytest.raises(ValueError, match=r"torch\.optim\.adamw\.AdamW must be AdamW or GaLore"),
        update_in_backward(optimizer),
    ):
        pass


def pair_of_layers() -> tuple[nn.Module, GaLore]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).double()
    return model, GaLore(model.parameters(), rank=2)


def test_zero_grad_in_the_middle_of_a_step_forgets_what_was_added_up() -> None:
    model, optimizer = pair_of_layers()
    before = [p.detach().clone() for p in model.parameters()]
    with update_in_backward(optimizer, 2):
        model(torch.ones(2, 6).double()).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "zero_grad" not in vars(optimizer)


def test_after_an_exception_every_parameter_begins_the_same_step() -> None:
    model, optimizer = pair_of_layers()
    x = torch.ones(2, 6).double()
    with update_in_backward(optimizer, 2):
        model(x).sum().backward()
        with pytest.raises(FloatingPointError):
            (model(x).sum() * torch.nan).backward()
        optimizer.zero_grad()
        for _ in range(2):
            model(x).square().sum().backward()
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {1}


def test_a_gradient_spoilt_between_the_passes_changes_nothing() -> None:
    model, optimizer = pair_of_layers()
    before = [p.detach().clone() for p in model.parameters()]
    with update_in_backward(optimizer, 2):
        model(torch.ones(2, 6).double()).sum().backward()
        model[1].bias.grad.fill_(torch.nan)
        with pytest.raises(FloatingPointError, match="nothing was changed"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
