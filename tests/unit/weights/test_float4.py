"""Four-bit floats: the table of the standard, nearest values, scales as torch's own 8-bit floats
have them, and the numbers that transformers unpacks."""

import pytest
import torch
from torch import Tensor

from lm_from_scratch.weights.float4 import (
    MX_BLOCK,
    MXFP4,
    NV_BLOCK,
    NVFP4,
    VALUES,
    decode_e2m1,
    decode_mxfp4,
    decode_nvfp4,
    decode_packed,
    encode_e2m1,
    encode_mxfp4,
    encode_nvfp4,
    pack,
    unpack,
)

CODES = torch.arange(16, dtype=torch.uint8)
MAGNITUDES = torch.tensor(VALUES[:8])


def test_every_code_is_what_its_bits_say() -> None:
    for code, value in enumerate(VALUES):
        sign, e, m = code >> 3, code >> 1 & 3, code & 1
        size = m / 2 if e == 0 else 2.0 ** (e - 1) * (1 + m / 2)
        assert value == (-1) ** sign * size
    assert decode_e2m1(CODES).tolist() == [*VALUES]
    assert torch.equal(encode_e2m1(decode_e2m1(CODES)), CODES)  # -0.0 is not 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_nearest_value_and_of_two_the_even_one(dtype: torch.dtype) -> None:
    x = (torch.arange(-128, 129) / 16).to(dtype)  # all midpoints are among them
    codes = encode_e2m1(x)
    distance = (x.double().abs()[:, None] - MAGNITUDES).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    assert nearest.gather(1, (codes & 7).long()[:, None]).all()
    assert torch.equal(codes >> 3, x.signbit().to(torch.uint8))
    tied = nearest.sum(1) == 2
    assert tied.sum() == 14 and (codes[tied] % 2 == 0).all()


def test_two_codes_share_a_byte_the_first_in_the_low_bits() -> None:
    pairs = torch.cartesian_prod(CODES, CODES)
    packed = pack(pairs)
    assert packed[:, 0].tolist() == [a + 16 * b for a, b in pairs.tolist()]
    assert torch.equal(unpack(packed), pairs)
    assert torch.equal(decode_packed(packed), decode_e2m1(pairs))


# -------------------------------------------------------------------------------------- MXFP4


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many sizes; one row of zeros."""
    torch.manual_seed(seed)
    x = torch.randn(*shape, dtype=dtype) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1)))
    x[0] = 0.0
    return x


@pytest.mark.parametrize("seed", range(3))
def test_a_block_is_off_by_no_more_than_a_step_and_keeps_its_largest_bits(seed: int) -> None:
    x = rows(seed, 6, 3, 2 * MX_BLOCK)
    packed = encode_mxfp4(x)
    assert packed.codes.shape == (6, 3, MX_BLOCK) and packed.scales.shape == (6, 3, 2)
    assert packed.codes.dtype == packed.scales.dtype == torch.uint8
    y = decode_mxfp4(packed)
    scale = packed.scales.view(torch.float8_e8m0fnu).float()[..., None]  # torch's own reading
    blocks = (t.unflatten(-1, (-1, MX_BLOCK)) for t in (x, y))
    x, y = (t / scale for t in blocks)
    top = x.abs().amax(-1)
    assert ((top >= 4) & (top < 8) | (top == 0)).all()
    want = MAGNITUDES[(x.abs()[..., None] - MAGNITUDES).abs().argmin(-1)] * x.sign()
    torch.testing.assert_close(y, want, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_in_four_bits_stays_as_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    packed = MXFP4(
        torch.randint(256, (9, 4, 16), dtype=torch.uint8).flatten(-2),
        torch.randint(3, 250, (9, 4), dtype=torch.uint8),
    )
    x = decode_mxfp4(packed, dtype)
    assert torch.equal(x.float(), decode_mxfp4(packed))
    assert torch.equal(decode_mxfp4(encode_mxfp4(x), dtype), x)
    biggest = (unpack(packed.codes).unflatten(-1, (-1, MX_BLOCK)) & 7).amax(-1) >= 6
    again = encode_mxfp4(x)
    assert torch.equal(again.scales[biggest], packed.scales[biggest])


def test_the_ends_of_the_scale() -> None:
    codes = torch.full((3, 16), 0x77, dtype=torch.uint8)  # 6 everywhere
    low, high, none = decode_mxfp4(MXFP4(codes, torch.tensor([[0], [252], [255]]).byte()))
    assert (low == 6 * 2.0**-127).all() and (high == 6 * 2.0**125).all() and none.isnan().all()
    tiny = torch.full((1, 32), 2.0**-140)
    assert encode_mxfp4(tiny).scales.item() == 0 and (decode_mxfp4(encode_mxfp4(tiny)) == 0).all()


def test_the_numbers_that_transformers_unpacks() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(2)
    codes = torch.randint(256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(0, 252, (3, 10, 2), dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        want = convert_moe_packed_tensors(codes, scales, dtype=dtype)
        got = decode_mxfp4(MXFP4(codes.flatten(-2), scales), dtype)
        assert torch.equal(got.mT, want) and got.dtype == dtype


# -------------------------------------------------------------------------------------- NVFP4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_scale_of_e4m3_and_the_nearest_value_beside_it(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    x = torch.randn(5, 3 * NV_BLOCK, dtype=dtype) * torch.rand(5, 1, dtype=dtype)
    x[0] = 0.0
    packed = encode_nvfp4(x)
    assert packed.scales.dtype == torch.float8_e4m3fn and packed.factor.dtype == torch.float32
    assert packed.codes.shape == (5, 24) and packed.scales.shape == (5, 3)
    assert packed.scales.float().max() == 448
    step = (packed.scales.float() * packed.factor).to(dtype)[..., None]
    blocks = x.unflatten(-1, (-1, NV_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    assert ((step * 6 - largest).abs() <= largest / 15).all()  # half of the last of 3 + 1 bits
    table = MAGNITUDES.to(dtype)
    nearest = (blocks.abs()[..., None] - table * step[..., None]).abs().amin(-1)
    got = decode_nvfp4(packed, dtype).unflatten(-1, (-1, NV_BLOCK))
    torch.testing.assert_close((got - blocks).abs(), nearest, atol=1e-6, rtol=0)


def test_nvfp4_of_what_it_can_say_is_that() -> None:
    torch.manual_seed(3)
    codes = torch.randint(16, (4, 8, NV_BLOCK), dtype=torch.uint8)
    codes[..., 5] = 7  # a 6 in every block
    scales = (torch.rand(4, 8) * 300 + 1).to(torch.float8_e4m3fn)
    scales[1, 2] = 448.0
    packed = NVFP4(pack(codes.flatten(-2)), scales, torch.tensor(0.375))
    again = encode_nvfp4(decode_nvfp4(packed))
    assert all(map(torch.equal, again[:1], packed[:1])) and again.factor == packed.factor
    assert torch.equal(again.scales.float(), scales.float())
    zero = encode_nvfp4(torch.zeros(2, 16))
    assert (decode_nvfp4(zero) == 0).all() and zero.factor == 1


def test_bytes_of_a_weight() -> None:
    x = torch.randn(64, 256)
    sizes = [sum(part.nbytes for part in packed) for packed in (encode_mxfp4(x), encode_nvfp4(x))]
    assert sizes == [0.53125 * x.numel(), 0.5625 * x.numel() + 4]


@pytest.mark.parametrize("encode", [encode_mxfp4, encode_nvfp4])
def test_rows_that_are_no_blocks_are_refused(encode) -> None:
    for x in (torch.zeros(3, 24), torch.zeros(()), torch.zeros(2, 0), torch.zeros(2, 32).int()):
        with pytest.raises(ValueError, match=r"x is torch\.\w+ of shape .*; it must be numbers"):
            encode(x)
