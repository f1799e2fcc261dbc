"""optim/eight_bit.py: the values, the rounding, and steps, state and files of 8-bit moments."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, token_ids
from torch import Tensor, nn

from lm_from_scratch.optim.adamw import AdamW, adamw
from lm_from_scratch.optim.eight_bit import (
    BLOCK,
    MOMENTS,
    SMALLEST,
    Table,
    decode,
    dynamic_values,
    encode,
    is_coded,
    stored,
    table_for,
)
from lm_from_scratch.optim.galore import MOMENTS as AT_A_NEW_BASIS
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.training.loss import causal_lm_loss

F64 = torch.float64
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide_range(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of both signs over 14 decades, as gradients have them."""
    return normal(*shape, seed=seed) * 10.0 ** (3 * normal(*shape, seed=seed + 1) - 3)


# ------------------------------------------------------------------------------- the 256 values


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_are_those_of_a_byte_read_bit_by_bit(signed: bool) -> None:
    def value(byte: int) -> float:
        """Zeros, a one, and what is behind it; without the sign."""
        bits = f"{byte:08b}"[1 if signed else 0 :]
        zeros = bits.index("1")
        rest = bits[zeros + 1 :]
        fraction = (int(rest or "0", 2) + 0.5) / 2 ** len(rest)
        return 10.0**-zeros * (0.1 + 0.9 * fraction)

    size = 128 if signed else 256
    above_0 = [value(byte) for byte in range(1 if signed else 2, size)]
    below_0 = [-x for x in above_0] if signed else []
    want = torch.tensor(sorted([*below_0, 0.0, 1.0, *above_0]), dtype=F64)
    values = dynamic_values(signed)
    assert values.shape == (256,) and values.dtype == torch.float32
    torch.testing.assert_close(values.double(), want, rtol=2e-7, atol=0.0)
    assert (values == 0).sum() == 1 and values[-1] == 1.0 and values.diff().min() > 0


def test_the_error_of_each_decade_doubles() -> None:
    for signed, parts in ((True, 64), (False, 128)):
        table = Table.of(dynamic_values(signed))
        for decade in range(7):
            top = 10.0**-decade
            x = torch.linspace(0.101 * top, 0.99 * top, 999)
            block = torch.cat([torch.ones(1), x])  # the scale of all, up to 256 numbers a block
            error = torch.cat(
                [
                    (decode(*encode(part, table), table) - part)[1:].abs()
                    for part in (torch.cat([block[:1], p]) for p in x.split(BLOCK - 1))
                ]
            )
            half = 0.45 * top / (parts // 2**decade)  # of the width of a part
            assert 0.8 * half < error.max() <= 1.001 * half


# ------------------------------------------------------------------------ rounding to the nearest


@given(
    shape=st.lists(st.integers(0, 40), min_size=0, max_size=3),
    size=st.sampled_from([1e-37, 1e-18, 1.0, 1e18, 1e37]),
    moment=st.sampled_from(MOMENTS),
    seed=st.integers(0, 99),
)
def test_every_number_becomes_the_nearest_value_of_its_block(shape, size, moment, seed) -> None:
    table = table_for(moment, CPU)
    x = wide_range(*shape, seed=seed)
    x = x if moment == "exp_avg" else x.abs()
    x = size * (x / max([1.0, *x.abs().flatten().tolist()]))
    codes, largest = encode(x, table)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape
    assert largest.shape == (math.ceil(x.numel() / BLOCK),)
    got = decode(codes, largest, table)
    assert got.shape == x.shape
    for i in range(0, x.numel(), BLOCK):
        ours, block = (t.flatten()[i : i + BLOCK].double() for t in (x, got))
        scale = ours.abs().max()
        distance = (ours[:, None] - scale * table.values.double()).abs().amin(1)
        rounding = max(3e-7 * scale.item(), 1e-44)  # of the product in float32
        torch.testing.assert_close((block - ours).abs(), distance, rtol=1e-5, atol=rounding)


@given(st.integers(0, 10**6))
def test_the_short_cut_finds_what_a_search_finds(seed: int) -> None:
    for moment in MOMENTS:
        table = table_for(moment, CPU)
        x = wide_range(3, BLOCK, seed=seed)
        x = (x if moment == "exp_avg" else x.abs()) / x.abs().amax(1, keepdim=True)
        close = table.middles[:-1].repeat(3)[: 2 * BLOCK].view(2, BLOCK)  # the hardest
        x = torch.cat([x, close, close.nextafter(close + 1), close.nextafter(close - 1)])
        x[:, 0] = 1.0
        assert torch.equal(encode(x, table)[0].long(), torch.bucketize(x, table.middles))


def test_a_large_tensor_is_its_blocks_alone() -> None:
    table = table_for("exp_avg", CPU)
    x = wide_range(2**18 + 3 * BLOCK + 7)
    codes, largest = encode(x, table)
    found = decode(codes, largest, table)
    for i in (0, 2**18 - BLOCK, 2**18, 2**18 + 3 * BLOCK):
        block = x[i : i + BLOCK]
        alone = encode(block, table)
        assert torch.equal(codes[i : i + BLOCK], alone[0])
        assert torch.equal(found[i : i + BLOCK], decode(*alone, table))
    assert largest.shape == (2**10 + 4,)


def test_blocks_of_zeros_and_blocks_with_one_number() -> None:
    for moment in MOMENTS:
        table = table_for(moment, CPU)
        assert not decode(*encode(torch.zeros(700), table), table).any()
        x = torch.zeros(2 * BLOCK + 1)
        x[-1] = 1e-30
        assert torch.equal(decode(*encode(x, table), table), x)
        assert encode(torch.zeros(0), table)[0].shape == (0,)


def test_a_block_that_overflowed_stays_finite() -> None:
    table = table_for("exp_avg_sq", CPU)
    x = torch.full((BLOCK,), 1e30)
    x[3] = math.inf
    got = decode(*encode(x, table), table)
    assert got.isfinite().all() and got[3] == torch.finfo(torch.float32).max


def test_numbers_in_any_layout_and_dtype() -> None:
    table = table_for("exp_avg", CPU)
    x = normal(70, 60, 2)
    strided = x.mT.contiguous().mT
    assert not strided.is_contiguous()
    for a, b in zip(encode(x, table), encode(strided, table), strict=True):
        assert torch.equal(a, b)
    for dtype in (torch.bfloat16, F64):
        codes, largest = encode(x.to(dtype), table)
        assert largest.dtype == torch.float32
        assert (decode(codes, largest, table) - x.to(dtype)).abs().max() < 0.03


def test_a_second_moment_never_becomes_0_beside_others() -> None:
    """Its first moment would be divided by epsilon: a step of thousands of learning rates."""
    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW([p], lr=1.0, weight_decay=0.0, optim_bits=8)
    p.grad = torch.ones(64, 64)
    p.grad[::2] = 1e-4
    optimizer.step()
    before = p.detach().clone()
    p.grad = torch.zeros(64, 64)
    optimizer.step()
    assert (p - before).abs().max() < 1.0
    codes = encode(torch.tensor([1.0, 1e-12, 0.0]), table := table_for("exp_avg_sq", CPU))
    assert decode(*codes, table)[1:].min() > 1e-7


# ------------------------------------------------------------------------------------- the steps


def both(state: dict[str, Tensor]) -> list[Tensor]:
    """The moments of a state, as numbers."""
    if "exp_avg_absmax" not in state:
        return [state[name].clone() for name in MOMENTS]
    tables = (table_for(name, CPU) for name in MOMENTS)
    return [
        decode(state[name], state[f"{name}_absmax"], table)
        for name, table in zip(MOMENTS, tables, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_decode_adamw_encode(fused: bool, dtype: torch.dtype) -> None:
    p = nn.Parameter(normal(70, 61, dtype=dtype))
    options = dict(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    optimizer = AdamW([p], **options, fused=fused, optim_bits=8)
    m = v = torch.zeros(70, 61)
    for step in range(1, 5):
        p.grad = normal(70, 61, seed=step, dtype=dtype)
        inputs = (t.double() for t in (p.detach(), p.grad, m, v))
        want, m, v = adamw(*inputs, step, **options)
        optimizer.step()
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p.detach().double(), want, rtol=tolerance, atol=tolerance)
        state = {"exp_avg": m, "exp_avg_sq": v}
        for name, got, exact in zip(MOMENTS, both(optimizer.state[p]), state.values(), strict=True):
            table = table_for(name, CPU)
            again = decode(*encode(exact, table), table)
            near = (got - again).abs() <= 1e-5 * again.abs()  # the others lie at a middle
            assert near.double().mean() > 0.995
            assert (got - exact).abs().max() < 0.02 * exact.abs().max()
        m, v = both(optimizer.state[p])


def test_a_step_of_galore_is_decode_step_encode() -> None:
    ours, theirs = (nn.Parameter(normal(96, 200)) for _ in range(2))
    options = dict(rank=48, update_proj_gap=3, scale=1.0, lr=0.1)
    a, b = GaLore([ours], **options, optim_bits=8), GaLore([theirs], **options)
    for step in range(8):
        ours.grad, theirs.grad = (normal(96, 200, seed=step) for _ in range(2))
        a.step()
        b.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        got = both(a.state[ours])
        for name, numbers in zip(MOMENTS, got, strict=True):
            error = (numbers - b.state[theirs][name]).abs().max()
            assert 0.0 < error < 0.02 * numbers.abs().max()
            b.state[theirs][name].copy_(numbers)


# ------------------------------------------------------------------------------------- the state


def held(optimizer: AdamW) -> int:
    """Bytes of all memory that the state keeps alive."""
    storages = [t.untyped_storage() for s in optimizer.state.values() for t in s.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_bytes_held_are_bytes_by_formula() -> None:
    shapes = (100, 61), (4096,), (4095,), (63, 65), (300, 20)
    params = [nn.Parameter(normal(*shape)) for shape in shapes]
    optimizer = AdamW(params, optim_bits=8)
    expected = 0
    for p in params:
        p.grad = torch.ones_like(p)
        n = p.numel()
        expected += 4 + 2 * (n + 4 * math.ceil(n / 256) if n >= 4096 else 4 * n)
    optimizer.step()
    assert held(optimizer) == expected
    for p in params:
        shapes_of = {name: value.shape for name, value in optimizer.state[p].items()}
        assert shapes_of == optimizer.state_shapes(p)
        assert is_coded(optimizer.state[p], 8) == (p.numel() >= SMALLEST)
    p = nn.Parameter(normal(400, 300))
    galore = GaLore([p], rank=20, optim_bits=8)
    p.grad = normal(400, 300, seed=1)
    galore.step()
    assert held(galore) == 3 * 4 + 4 * 300 * 20 + 2 * (400 * 20 + 4 * math.ceil(400 * 20 / 256))
    assert {k: v.shape for k, v in galore.state[p].items()} == galore.state_shapes(p)


def model_and(kind: str, **options: object) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = tiny_gpt2(n_embd=64)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    if kind == "galore":
        return model, GaLore(
            [{"params": matrices, "rank": 32, "update_proj_gap": 2}, {"params": others}], **options
        )
    return model, AdamW([{"params": matrices}, {"params": others}], **options)


def go_on(model: nn.Module, optimizer: AdamW, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = causal_lm_loss(model(token_ids(2, 9, seed=step)), token_ids(2, 9, seed=step + 50))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("moments", AT_A_NEW_BASIS)
def test_a_new_basis(moments: str) -> None:
    """Kept codes stay bit for bit; rotated and reset ones are those of 32 bits, encoded."""
    p, q = (nn.Parameter(normal(80, 120)) for _ in range(2))
    options = dict(rank=60, update_proj_gap=2, moments=moments)
    a, b = GaLore([p], **options, optim_bits=8), GaLore([q], **options)
    for step in range(2):
        p.grad, q.grad = (normal(80, 120, seed=step) for _ in range(2))
        a.step()
        b.step()
    for name, numbers in zip(MOMENTS, both(a.state[p]), strict=True):
        b.state[q][name].copy_(numbers)
    before = {name: value.clone() for name, value in a.state[p].items()}
    for optimizer, x in ((a, p), (b, q)):
        optimizer.make_basis(x, normal(80, 120, seed=9), optimizer.param_groups[0])
    if moments == "keep":
        for name in ("exp_avg", "exp_avg_absmax", "exp_avg_sq", "exp_avg_sq_absmax"):
            assert torch.equal(a.state[p][name], before[name])
    want = stored(b.state[q], 8)
    for name, numbers in zip(MOMENTS, both(a.state[p]), strict=True):
        torch.testing.assert_close(numbers, both(want)[MOMENTS.index(name)], atol=0.02, rtol=0.0)
    assert a.state[p]["step"] == b.state[q]["step"] == (0 if moments == "reset" else 2)


def test_a_rank_that_is_changed_begins_anew_with_moments_that_fit() -> None:
    p = nn.Parameter(normal(80, 120))
    optimizer = GaLore([p], rank=60, update_proj_gap=1, optim_bits=8)
    for rank, coded in ((60, True), (20, False), (50, True)):
        optimizer.param_groups[0]["rank"] = rank
        p.grad = normal(80, 120, seed=rank)
        optimizer.step()
        assert ("exp_avg_absmax" in optimizer.state[p]) == coded
        assert {k: v.shape for k, v in optimizer.state[p].items()} == optimizer.state_shapes(p)


@pytest.mark.parametrize("kind", ["adamw", "galore"])
def test_an_option_that_is_changed_takes_effect_with_the_next_step(kind: str) -> None:
    model, optimizer = model_and(kind, fused=True)
    for bits in (32, 8, 32, 8):
        for group in optimizer.param_groups:
            group["optim_bits"] = bits
        losses = go_on(model, optimizer, 0, 2)
        assert all(math.isfinite(loss) for loss in losses)
        for p, state in optimizer.state.items():
            assert {k: v.shape for k, v in state.items()} == optimizer.state_shapes(p)


def after_one_step(*shape: int) -> tuple[nn.Parameter, AdamW]:
    """A weight whose moments are codes, and its optimizer."""
    p = nn.Parameter(normal(*shape))
    optimizer = AdamW([p], optim_bits=8)
    p.grad = normal(*shape, seed=1)
    optimizer.step()
    return p, optimizer


def test_a_step_that_fails_leaves_the_moments() -> None:
    p, optimizer = after_one_step(64, 64)
    before = dict(optimizer.state[p])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    optimizer.update_one = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert all(optimizer.state[p][name] is value for name, value in before.items())
    assert optimizer.state[p].keys() == before.keys()


# ------------------------------------------------------------------------------ what is refused


def test_codes_are_no_numbers_of_32_bits() -> None:
    p, optimizer = after_one_step(64, 65)
    before, state = dict(optimizer.state[p]), optimizer.state_dict()
    state["param_groups"][0]["optim_bits"] = 32
    with pytest.raises(ValueError, match=r"has shape \(17,\), expected None"):
        optimizer.load_state_dict(state)
    assert all(optimizer.state[p][name] is value for name, value in before.items())


# --------------------------------------------------------------------------------- what it learns


@pytest.mark.parametrize("kind", ["adamw", pytest.param("galore", marks=pytest.mark.slow)])
def test_a_model_learns_as_with_32_bits(kind: str) -> None:
    ends = {}
    for bits in (8, 32):
        model, optimizer = model_and(kind, optim_bits=bits, lr=3e-3, betas=(0.9, 0.95))
        idx, targets = token_ids(4, 9), token_ids(4, 9, seed=1)
        for _ in range(24):
            optimizer.zero_grad()
            loss = causal_lm_loss(model(idx), targets)
            loss.backward()
            optimizer.step()
            ends.setdefault(bits, []).append(loss.item())
    first = ends[32][0]
    assert first == ends[8][0] and ends[32][-1] < 0.7 * first
    assert abs(ends[8][-1] - ends[32][-1]) < 0.05 * (first - ends[32][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_the_order_in_memory_and_a_switch_of_bits_change_nothing(dtype, fused) -> None:
    """A weight that lies column by column, and 8 bits switched on and off again."""
    numbers = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = [nn.Parameter(numbers.clone()), nn.Parameter(numbers.T.contiguous().T)]
    optimizers = [AdamW([p], fused=fused, optim_bits=8) for p in weights]
    for step, bits in enumerate((8, 8, 32, 32, 8, 32)):
        grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(step + 1)).to(dtype)
        for p, optimizer in zip(weights, optimizers, strict=True):
            optimizer.param_groups[0]["optim_bits"] = bits
            p.grad = torch.empty_like(p).copy_(grad)
            optimizer.step()
        if bits == 32:
            moments = [o.state[p]["exp_avg"] for p, o in zip(weights, optimizers, strict=True)]
            assert [m.dtype for m in moments] == [dtype] * 2
            assert moments[1].stride() == weights[1].stride()
        near = dict(rtol=0, atol=1e-5) if dtype == torch.float32 else dict(rtol=0, atol=2e-2)
        torch.testing.assert_close(*(p.detach() for p in weights), **near)


def test_every_byte_is_the_code_of_a_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for moment in MOMENTS:
        decoded_codes = decode(codes, torch.ones(1), table_for(moment, torch.device("cpu")))
        assert decoded_codes.isfinite().all() and decoded_codes.diff().ge(0).all()
