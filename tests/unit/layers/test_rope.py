"""rope.py: equal to complex multiplication and to transformers; only the distance matters."""

from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as HFConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from lm_from_scratch.checkpoint.rope_configs import scaling_from_dict, scaling_to_dict
from lm_from_scratch.layers.rope import (
    RopeScaling,
    RotaryEmbedding,
    apply_rope,
    apply_rope_interleaved,
    inverse_frequencies,
    rotation,
    to_half_split,
    to_interleaved,
)
from lm_from_scratch.layers.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    YaRNScaling,
)

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [-1, 40, 3, 3, 511, 0, 100_003]])
SCALINGS: list[RopeScaling] = [
    LinearScaling(factor=3.0),
    DynamicNTKScaling(factor=2.0, original_length=16),
    YaRNScaling(factor=4.0, original_length=64),
    Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64),
]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_complex_numbers(x: Tensor, positions: Tensor, theta: float, interleaved: bool) -> Tensor:
    """The oracle, in float64: a pair is a + ib, and a token multiplies it by exp(i t omega)."""
    half = x.shape[-1] // 2
    pairs = x.double().unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    omega = torch.tensor(
        [theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64
    )
    turn = torch.exp(1j * positions.double()[:, None, :, None] * omega)
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return (out if interleaved else out.transpose(-1, -2)).flatten(-2)


def hf_config(head_dim: int, parameters: dict[str, Any], block_size: int = 64) -> HFConfig:
    values: dict[str, Any] = {"hidden_size": 2 * head_dim, "num_attention_heads": 2}
    values |= {"head_dim": head_dim, "max_position_embeddings": block_size}
    return HFConfig(**values, rope_parameters=dict(parameters))


# The rotation


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("theta", [100.0, 10000.0, 1e6])
def test_equals_complex_multiplication_in_value_and_gradient(
    interleaved: bool, theta: float
) -> None:
    apply = apply_rope_interleaved if interleaved else apply_rope
    results = []
    for ours in (True, False):
        x = randn(2, 3, 7, 10).requires_grad_()
        if ours:
            y = apply(x, *RotaryEmbedding(10, theta)(POSITIONS, torch.float64))
        else:
            y = by_complex_numbers(x, POSITIONS, theta, interleaved)
        (grad,) = torch.autograd.grad((y * randn(2, 3, 7, 10, seed=1)).sum(), x)
        results.append((y.detach(), grad))
    for ours_tensor, oracle in zip(*results):
        torch.testing.assert_close(ours_tensor, oracle, atol=1e-9, rtol=0)


@pytest.mark.parametrize("apply", [apply_rope, apply_rope_interleaved])
def test_gradcheck_in_float64(apply: Any) -> None:
    cos, sin = RotaryEmbedding(6)(POSITIONS, torch.float64)
    x = randn(2, 2, 7, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: apply(t, cos, sin), (x,))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-4), (torch.float16, 4e-3), (torch.bfloat16, 0.02)],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_dtype_is_kept(dtype: torch.dtype, tolerance: float, interleaved: bool) -> None:
    """Half precision differs from float64 by its last rounding alone: 2 ** -9 of up to 4."""
    positions = torch.arange(1000, 1007)[None]
    x = randn(2, 3, 7, 10).to(dtype)
    cos, sin = RotaryEmbedding(10)(positions, dtype)
    assert cos.dtype == sin.dtype == torch.promote_types(dtype, torch.float32)
    y = (apply_rope_interleaved if interleaved else apply_rope)(x, cos, sin)
    assert y.dtype == dtype
    oracle = by_complex_numbers(x, positions, 10000.0, interleaved)
    torch.testing.assert_close(y.double(), oracle, atol=tolerance, rtol=0)


def test_half_precision_is_rounded_once() -> None:
    """As near as the dtype allows; cosines cast to bfloat16, as in transformers, are not."""
    positions = torch.arange(64)[None]
    x = randn(2, 4, 64, 32).bfloat16()
    oracle = by_complex_numbers(x, positions, 10000.0, interleaved=False)
    cos, sin = RotaryEmbedding(32)(positions, torch.bfloat16)
    wide = [torch.cat([t, t], dim=-1)[:, 0].bfloat16() for t in (cos, sin)]
    theirs = apply_rotary_pos_emb(x, x, *wide)[0]
    ours_error = (apply_rope(x, cos, sin).double() - oracle).abs().mean()
    assert ours_error <= 1.01 * (oracle.bfloat16().double() - oracle).abs().mean()
    assert (theirs.double() - oracle).abs().mean() > 1.2 * ours_error


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_distance_matters(scaling: RopeScaling | None, interleaved: bool) -> None:
    """The same two vectors at positions (m, n) and (m + shift, n + shift) have one dot product."""
    apply = apply_rope_interleaved if interleaved else apply_rope
    if isinstance(scaling, DynamicNTKScaling):  # here the base grows with the highest position
        scaling = DynamicNTKScaling(factor=2.0, original_length=1_000_000)
    rotary = RotaryEmbedding(14, scaling=scaling)
    q, k = randn(1, 3, 1, 14), randn(1, 3, 1, 14, seed=1)

    def score(m: int, n: int) -> Tensor:
        turned = [
            apply(x, *rotary(torch.tensor([[t]]), torch.float64)) for x, t in ((q, m), (k, n))
        ]
        return (turned[0] * turned[1]).sum(-1)

    for shift in (1, 57, 100_003):
        torch.testing.assert_close(score(9 + shift, 2 + shift), score(9, 2), atol=1e-9, rtol=0)
    assert (score(9, 2) - score(9, 3)).abs().max() > 0.1
    assert (score(9, 2) - score(2, 9)).abs().max() > 0.1  # the sign of the distance too


@pytest.mark.parametrize("apply", [apply_rope, apply_rope_interleaved])
def test_lengths_stay_and_position_0_stands_still(apply: Any) -> None:
    x = randn(2, 3, 7, 12)
    y = apply(x, *RotaryEmbedding(12)(POSITIONS, torch.float64))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[0, :, 0], x[0, :, 0]) and torch.equal(y[1, :, 5], x[1, :, 5])
    assert (y[0, :, 1:] - x[0, :, 1:]).abs().amax(-1).min() > 0.1
    for feature in range(12):  # every feature turns, not only some of them
        assert not torch.equal(y[0, :, 1, feature], x[0, :, 1, feature])


def test_the_first_pair_turns_by_one_radian_counter_clockwise() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).double().view(1, 1, 1, 4)
    cos, sin = RotaryEmbedding(4)(torch.tensor([[1]]), torch.float64)
    c, s = torch.ones(1).double().cos().item(), torch.ones(1).double().sin().item()
    torch.testing.assert_close(apply_rope(x, cos, sin).flatten().tolist(), [c, 0.0, s, 0.0])
    torch.testing.assert_close(
        apply_rope_interleaved(x, cos, sin).flatten().tolist(), [c, s, 0.0, 0.0]
    )


def test_inverse_frequencies_fall_from_1() -> None:
    torch.testing.assert_close(
        inverse_frequencies(8, 10000.0, dtype=torch.float64),
        torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64),
    )
    assert inverse_frequencies(8, 10000.0).dtype == torch.float32


def test_a_factor_multiplies_both_and_rows_may_have_their_own_frequencies() -> None:
    inv_freq = inverse_frequencies(10, 10000.0)
    cos, sin = rotation(POSITIONS, inv_freq)
    assert cos.shape == sin.shape == (2, 1, 7, 5)
    for scaled, plain in zip(rotation(POSITIONS, inv_freq, 1.5), (cos, sin)):
        torch.testing.assert_close(scaled, plain * 1.5)
    rows = torch.stack([inv_freq, inv_freq / 2])[:, None]  # (B, 1, D/2)
    for row, freq in enumerate((inv_freq, inv_freq / 2)):
        for both, alone in zip(rotation(POSITIONS, rows), rotation(POSITIONS[row : row + 1], freq)):
            assert torch.equal(both[row : row + 1], alone)
    assert rotation(POSITIONS, inv_freq.bfloat16())[0].dtype == torch.float32


# The two layouts


def test_converted_projections_give_the_same_scores() -> None:
    B, H, Hkv, T, D, C = 2, 4, 2, 7, 10, 12
    x, cos_sin = randn(B, T, C), RotaryEmbedding(D)(POSITIONS, torch.float64)

    def heads(weight: Tensor, bias: Tensor, n_head: int) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias).view(B, T, n_head, D).transpose(1, 2)

    half, inter, wrong = [], [], []
    for n_head, seed in ((H, 1), (Hkv, 2)):
        weight, bias = randn(n_head * D, C, seed=seed), randn(n_head * D, seed=seed + 10)
        moved = to_interleaved(weight, n_head), to_interleaved(bias, n_head)
        assert torch.equal(to_half_split(moved[0], n_head), weight)
        assert torch.equal(to_half_split(moved[1], n_head), bias)
        assert torch.equal(to_interleaved(to_half_split(weight, n_head), n_head), weight)
        half.append(apply_rope(heads(weight, bias, n_head), *cos_sin))
        inter.append(apply_rope_interleaved(heads(*moved, n_head), *cos_sin))
        wrong.append(apply_rope_interleaved(heads(weight, bias, n_head), *cos_sin))
        # turned features are the same numbers in another order: 0 and D/2, 1 and D/2 + 1, ...
        torch.testing.assert_close(inter[-1][..., 0::2], half[-1][..., : D // 2])
        torch.testing.assert_close(inter[-1][..., 1::2], half[-1][..., D // 2 :])

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.repeat_interleave(H // Hkv, dim=1).mT

    torch.testing.assert_close(scores(*inter), scores(*half), atol=1e-10, rtol=0)
    assert (scores(*wrong) - scores(*half)).abs().max() > 1.0


def test_rows_of_a_converted_weight() -> None:
    rows = torch.arange(12)
    assert to_interleaved(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert to_half_split(rows, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


# Against transformers


def assert_equals_transformers(
    head_dim: int, theta: float, scaling: RopeScaling | None, positions: Tensor, block_size: int
) -> None:
    config = hf_config(head_dim, scaling_to_dict(theta, scaling), block_size)
    oracle = Qwen2RotaryEmbedding(config)
    cos, sin = RotaryEmbedding(head_dim, theta, scaling)(positions, torch.float32)
    x = randn(positions.shape[0], 3, positions.shape[1], head_dim, dtype=torch.float32)
    their_cos, their_sin = oracle(x, positions)
    theirs = apply_rotary_pos_emb(x, 2 * x, their_cos, their_sin)
    # angles differ by an ulp or two of the frequency, times the position
    tolerance = 4e-6 + 5e-7 * positions.max().item()
    for ours, hf in ((cos, their_cos), (sin, their_sin)):
        wide = torch.cat([ours, ours], dim=-1)[:, 0]
        torch.testing.assert_close(wide, hf, atol=tolerance * oracle.attention_scaling, rtol=1e-6)
    for ours_in, hf in zip((x, 2 * x), theirs):
        ours = apply_rope(ours_in, cos, sin)
        scale = ours_in.abs().max().item() * oracle.attention_scaling
        torch.testing.assert_close(ours, hf, atol=2 * tolerance * scale, rtol=0)


@pytest.mark.parametrize("theta", [100.0, 10000.0, 1e6])
@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_default_equals_transformers_to_the_bit(head_dim: int, theta: float) -> None:
    assert_equals_transformers(head_dim, theta, None, POSITIONS[:1], 64)
    config = hf_config(head_dim, {"rope_type": "default", "rope_theta": theta})
    their_cos, their_sin = Qwen2RotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    for ours, hf in zip(
        RotaryEmbedding(head_dim, theta)(POSITIONS, torch.float32), (their_cos, their_sin)
    ):
        assert torch.equal(torch.cat([ours, ours], dim=-1)[:, 0], hf)


@st.composite
def scaled(draw: st.DrawFn) -> tuple[int, float, RopeScaling, int]:
    """(head_dim, theta, scaling, the config's max_position_embeddings)"""
    head_dim = 2 * draw(st.integers(2, 32))
    theta = draw(st.sampled_from([10.0, 10000.0, 500_000.0, 1e6]))
    length = draw(st.sampled_from([8, 64, 333, 4096]))
    factor = draw(st.sampled_from([1.0, 1.5, 4.0, 40.0]))
    kind = draw(st.sampled_from([LinearScaling, DynamicNTKScaling, YaRNScaling, Llama3Scaling]))
    if kind is LinearScaling:
        return head_dim, theta, LinearScaling(factor=factor), length
    if kind is DynamicNTKScaling:
        return head_dim, theta, DynamicNTKScaling(factor=factor, original_length=length), length
    if kind is Llama3Scaling:
        low = draw(st.floats(0.5, 2.0))
        high = low + draw(st.floats(0.25, 8.0))
        llama = Llama3Scaling(
            factor=factor, low_freq_factor=low, high_freq_factor=high, original_length=length
        )
        return head_dim, theta, llama, 131_072
    optional = st.none() | st.sampled_from([0.0, 0.707, 1.0, 2.0])
    slow = draw(st.sampled_from([0.5, 1.0, 3.0]))
    yarn = YaRNScaling(
        factor=factor,
        original_length=length,
        beta_slow=slow,
        beta_fast=slow + draw(st.sampled_from([1.0, 16.0, 31.0])),
        attention_factor=draw(st.none() | st.sampled_from([0.5, 1.25])),
        mscale=draw(optional),
        mscale_all_dim=draw(optional),
        truncate=draw(st.booleans()),
    )
    return head_dim, theta, yarn, length * 4


def assert_scaling_equals_transformers(
    head_dim: int, theta: float, scaling: RopeScaling, block_size: int, drawn: list[int]
) -> None:
    positions = torch.tensor([drawn])
    assert_equals_transformers(head_dim, theta, scaling, positions, block_size)
    parameters = scaling_to_dict(theta, scaling)
    assert scaling_from_dict(parameters) == (theta, scaling)
    config = hf_config(head_dim, parameters, block_size)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config, seq_len=max(drawn) + 1
    )
    for dtype in (torch.float32, torch.float64):
        ours, factor = scaling.frequencies(positions, head_dim, theta, dtype)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.flatten().float(), theirs, atol=0, rtol=5e-6)
        assert factor == pytest.approx(their_factor, rel=1e-12)


@given(scaled(), st.lists(st.integers(0, 200), min_size=1, max_size=6))
@examples(30, 100)
def test_scalings_equal_transformers(
    case: tuple[int, float, RopeScaling, int], drawn: list[int]
) -> None:
    assert_scaling_equals_transformers(*case, drawn)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"truncate": False},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"attention_factor": 1.7},
        {"attention_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 2.0},
        {"mscale": 0.707, "mscale_all_dim": 2.0},
        {"mscale": 2.0},
        {"mscale_all_dim": 2.0},
        {"mscale": 0.0, "mscale_all_dim": 1.0},
        {"original_length": 6},  # the ramp starts and ends at pair 0
    ],
    ids=str,
)
@pytest.mark.parametrize("theta", [10.0, 10000.0])  # with 10 the ramp ends beyond the last pair
def test_every_option_of_yarn_equals_transformers(theta: float, options: dict[str, Any]) -> None:
    scaling = YaRNScaling(**{"factor": 4.0, "original_length": 4096, **options})
    assert_scaling_equals_transformers(32, theta, scaling, 16384, [5, 0, 199])


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_every_scaling_changes_the_frequencies_it_should(
    scaling: RopeScaling, dtype: torch.dtype, rtol: float
) -> None:
    """So that agreement with transformers is not agreement on doing nothing, nor on float32."""
    plain = inverse_frequencies(32, 10000.0, dtype=dtype)
    ratio = plain / scaling.frequencies(torch.tensor([[63]]), 32, 10000.0, dtype)[0].flatten()
    dynamic = isinstance(scaling, DynamicNTKScaling)
    growth = 2.0 * 64 / 16 - 1 if dynamic else scaling.factor
    torch.testing.assert_close(ratio[-1].item(), growth, rtol=rtol, atol=0)  # slowest: all of it
    first = scaling.factor if isinstance(scaling, LinearScaling) else 1.0
    torch.testing.assert_close(ratio[0].item(), first, rtol=rtol, atol=0)
    assert (ratio.diff() >= -rtol * growth).all()


def test_dynamic_rows_do_not_influence_each_other() -> None:
    """Each row is what transformers computes for it alone; transformers' batch is not."""
    scaling = DynamicNTKScaling(factor=2.0, original_length=16)
    rotary = RotaryEmbedding(12, 10000.0, scaling)
    positions = torch.stack([torch.arange(40), torch.arange(40) - 32, torch.full((40,), -1)])
    cos, sin = rotary(positions, torch.float32)
    assert cos.shape == (3, 1, 40, 6)
    config = hf_config(12, scaling_to_dict(10000.0, scaling), 16)
    together = Qwen2RotaryEmbedding(config)(torch.zeros(1), positions)[0]
    for row in range(3):
        alone = Qwen2RotaryEmbedding(config)(torch.zeros(1), positions[row : row + 1])
        for ours, hf in zip((cos, sin), alone):
            torch.testing.assert_close(ours[row, 0], hf[0, :, :6], atol=2e-5, rtol=0)
    assert (together[1, :, :6] - cos[1, 0]).abs().max() > 0.1
    plain = RotaryEmbedding(12)(positions[1:], torch.float32)[0]
    assert torch.equal(cos[1:], plain)  # short rows and rows of padding keep the base


def test_dynamic_has_no_memory_of_longer_sequences() -> None:
    """transformers keeps the base of the longest sequence until one shorter than L comes."""
    scaling = DynamicNTKScaling(factor=2.0, original_length=16)
    ours, theirs = (
        RotaryEmbedding(12, 10000.0, scaling),
        Qwen2RotaryEmbedding(hf_config(12, scaling_to_dict(10000.0, scaling), 16)),
    )
    short, long = torch.arange(20)[None], torch.arange(60)[None]
    fresh = theirs(torch.zeros(1), short)[0]
    before = ours(short, torch.float32)[0]
    ours(long, torch.float32)
    theirs(torch.zeros(1), long)
    assert torch.equal(ours(short, torch.float32)[0], before)
    torch.testing.assert_close(before[0, 0], fresh[0, :, :6], atol=1e-5, rtol=0)
    assert (theirs(torch.zeros(1), short)[0] - fresh).abs().max() > 0.1


def test_dynamic_keys_of_a_cache_were_turned_by_an_older_base() -> None:
    rotary = RotaryEmbedding(12, 10000.0, DynamicNTKScaling(factor=2.0, original_length=16))
    full = rotary(torch.arange(24)[None], torch.float64)[0][:, :, :20]
    assert (rotary(torch.arange(20)[None], torch.float64)[0] - full).abs().max() > 0.1
    inside = rotary(torch.arange(16)[None], torch.float64)[0][:, :, :9]
    assert torch.equal(rotary(torch.arange(9)[None], torch.float64)[0], inside)


# The module


def test_positions_in_any_order_and_of_any_size() -> None:
    """A table as long as the keys ends too early: 100003 is far beyond the 7 tokens here."""
    rotary = RotaryEmbedding(10)
    cos, sin = rotary(POSITIONS, torch.float64)
    for row in range(2):
        for t in range(7):
            one = rotary(POSITIONS[row : row + 1, t : t + 1], torch.float64)
            assert torch.equal(one[0][0, 0, 0], cos[row, 0, t])
            assert torch.equal(one[1][0, 0, 0], sin[row, 0, t])
    torch.testing.assert_close(cos[1, 0, 6, 0], torch.tensor(100_003.0).double().cos())


def test_positions_257_and_258_in_bfloat16() -> None:
    """bfloat16 would make them 256 and 258; the module casts nothing, whatever is done to it."""
    rotary = RotaryEmbedding(10).to(torch.bfloat16)
    positions = torch.tensor([[256, 257, 258]])
    exact = torch.tensor([256.0, 257.0, 258.0]).double().cos()
    cos, _ = rotary(positions, torch.bfloat16)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos[0, 0, :, 0].double(), exact, atol=1e-6, rtol=0)
    assert torch.equal(RotaryEmbedding(10)(positions, torch.float32)[0], cos)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary(positions, torch.bfloat16)[0], cos)


def test_the_module_holds_no_tensor() -> None:
    rotary = RotaryEmbedding(64, scaling=SCALINGS[2])
    rotary(torch.arange(1000)[None], torch.float32)
    assert not list(rotary.parameters()) and not list(rotary.buffers())
    assert not rotary.state_dict()
    assert not [name for name, value in vars(rotary).items() if isinstance(value, Tensor)]


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=str)
def test_a_module_made_on_the_meta_device_works(scaling: RopeScaling | None) -> None:
    with torch.device("meta"):
        rotary = RotaryEmbedding(16, scaling=scaling)
    rotary.to_empty(device="cpu")
    cos, sin = rotary(POSITIONS, torch.float32)
    expected = RotaryEmbedding(16, scaling=scaling)(POSITIONS, torch.float32)
    assert cos.device.type == "cpu"
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])
    assert rotary(POSITIONS.to("meta"), torch.float32)[0].device.type == "meta"


@pytest.mark.parametrize(
    "scaling",
    [pytest.param(s, marks=[pytest.mark.slow] * (i > 1)) for i, s in enumerate([None, *SCALINGS])],
    ids=str,
)
def test_it_compiles_as_one_graph(scaling: RopeScaling | None) -> None:
    torch._dynamo.reset()
    rotary = RotaryEmbedding(16, scaling=scaling)

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        return apply_rope(x, *rotary(positions, x.dtype))

    x = randn(2, 3, 7, 16).requires_grad_()
    y = turn(x, POSITIONS)
    compiled = torch.compile(turn, backend="aot_eager", fullgraph=True)
    z = compiled(x, POSITIONS)
    torch.testing.assert_close(z, y, atol=1e-12, rtol=0)
    grads = [torch.autograd.grad(out.pow(3).sum(), x)[0] for out in (y, z)]
    torch.testing.assert_close(*grads, atol=1e-10, rtol=0)


def test_repr() -> None:
    assert repr(RotaryEmbedding(8)) == "RotaryEmbedding(8, theta=10000.0, scaling=None)"


# Dictionaries


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=str)
def test_dictionaries_come_back(scaling: RopeScaling | None) -> None:
    parameters = scaling_to_dict(5e5, scaling)
    dynamic = isinstance(scaling, DynamicNTKScaling)  # its length is that of the config
    block_size = scaling.original_length if dynamic else 7
    assert scaling_from_dict(parameters, block_size) == (5e5, scaling)
    assert None not in parameters.values()
    hf_config(16, parameters).validate_rope()  # transformers knows every key that it needs


def test_names_of_the_old_and_the_new_format() -> None:
    assert scaling_from_dict({}) == (None, None)
    assert scaling_from_dict({"rope_type": "default", "rope_theta": 1e6}) == (1e6, None)
    assert scaling_from_dict({"type": "linear", "factor": 2.0}) == (None, LinearScaling(factor=2.0))
    both = {"type": "linear", "rope_type": "dynamic", "factor": 2, "unknown": 1, "alpha": None}
    expected = DynamicNTKScaling(factor=2, original_length=99)
    assert scaling_from_dict(both, block_size=99) == (None, expected)
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert scaling_from_dict({"rope_type": "llama3", **llama}, block_size=99)[1] == Llama3Scaling(
        **llama, original_length=99
    )
    partial = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}
    assert scaling_from_dict(partial)[1] == LinearScaling(factor=2.0)


@pytest.mark.parametrize(
    "given_keys",
    [
        {"factor": 4.0},
        {"factor": 4.0, "original_max_position_embeddings": 32},
        {"factor": None, "original_max_position_embeddings": 32},
        {"factor": 4.0, "beta_fast": None, "beta_slow": None, "truncate": False},
    ],
)
def test_yarn_defaults_are_those_of_transformers(given_keys: dict[str, Any]) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, **given_keys}
    if given_keys["factor"] is None:
        # transformers' check of a null factor warns, its computation takes the ratio of lengths
        ratio = 128 / given_keys["original_max_position_embeddings"]
        config = hf_config(32, {**parameters, "factor": ratio}, 128)
        config.rope_parameters = {**parameters, "factor": None}
    else:
        config = hf_config(32, parameters, 128)
    theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    theta, scaling = scaling_from_dict(parameters, block_size=128)
    assert theta == 10000.0 and scaling is not None
    ours, factor = scaling.frequencies(torch.zeros(1, 1).long(), 32, 10000.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert factor == pytest.approx(their_factor)


# Errors


YARN = {"factor": 2.0, "original_length": 64}
LLAMA = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 64}


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (LinearScaling, {"factor": 0.5}, "LinearScaling: factor=0.5 must be a number at least 1"),
        (LinearScaling, {"factor": float("nan")}, "factor=nan"),
        (LinearScaling, {"factor": float("inf")}, "factor=inf"),
        (LinearScaling, {"factor": "2"}, "factor='2'"),
        (LinearScaling, {"factor": True}, "factor=True"),
        (DynamicNTKScaling, {"factor": 0.0, "original_length": 64}, "factor=0.0"),
        (DynamicNTKScaling, {"factor": 2.0, "original_length": 0}, "original_length=0"),
        (DynamicNTKScaling, {"factor": 2.0, "original_length": None}, "original_length=None"),
        (YaRNScaling, {**YARN, "factor": -1.0}, "factor=-1.0"),
        (YaRNScaling, {**YARN, "original_length": 0}, "original_length=0"),
        (YaRNScaling, {**YARN, "beta_slow": 0.0}, "beta_slow=0.0 must be a number above 0"),
        (YaRNScaling, {**YARN, "beta_fast": 1.0}, "beta_fast=1.0 must be a number above 1.0"),
        (YaRNScaling, {**YARN, "attention_factor": 0.0}, "attention_factor=0.0"),
        (YaRNScaling, {**YARN, "mscale": -1.0}, "mscale=-1.0"),
        (YaRNScaling, {**YARN, "mscale_all_dim": -1.0}, "mscale_all_dim=-1.0"),
        (Llama3Scaling, {**LLAMA, "factor": 0.9}, "factor=0.9"),
        (Llama3Scaling, {**LLAMA, "low_freq_factor": 0}, "low_freq_factor=0 must"),
        (Llama3Scaling, {**LLAMA, "high_freq_factor": 1.0}, "high_freq_factor=1.0 must"),
        (Llama3Scaling, {**LLAMA, "original_length": -5}, "original_length=-5"),
    ],
)
def test_bad_scalings_are_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        kind(**values)
    assert message in str(error.value) and kind.__name__ in str(error.value)


@pytest.mark.parametrize("make", [inverse_frequencies, RotaryEmbedding])
@pytest.mark.parametrize(
    ("head_dim", "theta", "message"),
    [
        (7, 10000.0, "head_dim=7 must be even"),
        (0, 10000.0, "head_dim=0"),
        (-2, 10000.0, "head_dim=-2"),
        (8, 0.0, "theta=0.0 must be"),
        (8, 1.0, "theta=1.0"),
        (8, -5.0, "theta=-5.0"),
        (8, float("inf"), "theta=inf"),
        (8, float("nan"), "theta=nan"),
    ],
)
def test_bad_sizes_are_refused(make: Any, head_dim: int, theta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(head_dim, theta)


@pytest.mark.parametrize("apply", [apply_rope, apply_rope_interleaved])
@pytest.mark.parametrize(
    ("features", "cosines", "sines"), [(8, 1, 1), (2, 2, 2), (3, 1, 1), (1, 1, 1), (4, 2, 1)]
)
def test_angles_of_another_size_are_refused(
    apply: Any, features: int, cosines: int, sines: int
) -> None:
    """One angle would be broadcast over all pairs; transformers has one for each feature."""
    x, cos, sin = (torch.ones(1, 2, 3, size) for size in (features, cosines, sines))
    with pytest.raises(ValueError, match=rf"D={features} .* cos has {cosines}, sin {sines}"):
        apply(x, cos, sin)


def test_dynamic_needs_two_pairs() -> None:
    rotary = RotaryEmbedding(2, scaling=SCALINGS[1])
    with pytest.raises(ValueError, match="head_dim=2 must be at least 4"):
        rotary(POSITIONS, torch.float32)


@pytest.mark.parametrize("convert", [to_interleaved, to_half_split])
@pytest.mark.parametrize(("rows", "n_head"), [(12, 5), (12, 4), (12, 0)])
def test_bad_head_counts_are_refused(convert: Any, rows: int, n_head: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows cannot be n_head={n_head} heads"):
        convert(torch.zeros(rows, 3), n_head)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type='longrope' is not one of"),
        ({"type": "su"}, "rope_type='su'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1"),
        ({"rope_type": "linear"}, "rope_type='linear' needs 'factor'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "needs 'original_max_position_embeddings'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, "needs 'factor'"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs 'low_freq_factor'"),
        ({"full_attention": {"rope_type": "default"}}, "['full_attention'] is a dictionary"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5 must be a number at least 1"),
    ],
)
def test_bad_dictionaries_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        scaling_from_dict(parameters)
    assert message in str(error.value)
