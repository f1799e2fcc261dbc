"""kernels/matmul.py: equal to the reference in value and gradient, in any layout, at any size."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_checks import (
    DEVICE,
    Guarded,
    check,
    check_compiled,
    check_operator,
    each_dtype_of_which_float16_is_slow,
    numbers,
    poisoned,
    strided,
)
from torch import Tensor

from lm_from_scratch.kernels import matmul as file
from lm_from_scratch.kernels.matmul import (
    NARROW_TILES,
    TILES,
    addmm,
    addmm_forward,
    is_aligned,
    launch,
    matmul,
    matmul_forward,
    tile_of,
)


def more_than_a_tile(tile: dict[str, int], *more: int) -> list[int]:
    return [tile[f"BLOCK_{side}"] + n for side, n in zip("MKN", more, strict=True)]


#: More than a tile in each direction, and none a multiple of anything.
M, K, N = more_than_a_tile(NARROW_TILES[2], 3, 5, 7)
#: The same of the large tile, for which rows must be multiples of 16.
ALIGNED = more_than_a_tile(TILES[2], 3, 16, 16)


def sliced(x: Tensor) -> Tensor:
    """The same numbers, every third of a row of every second row of something larger."""
    m, n = x.shape
    return x.new_zeros(2 * m, 3 * n)[::2, ::3].copy_(x)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 37, 5), (5, 300, 1), (M, K, N), ALIGNED], ids=str)
def test_equals_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    check(matmul, torch.matmul, numbers(m, k), numbers(k, n, seed=1), dtype=dtype)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("layout", [strided, sliced])
def test_takes_any_strides(layout, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    a, b = numbers(35, 37), numbers(37, 70, seed=1)
    check(matmul, torch.matmul, a, b, dtype=dtype, layout=layout)


def test_one_row_may_stand_for_all() -> None:
    a, b = (numbers(*shape).detach().float().to(DEVICE) for shape in [(1, 9), (9, 4)])
    torch.testing.assert_close(matmul(a.expand(3, 9), b), (a @ b).expand(3, 4))


@each_dtype_of_which_float16_is_slow
def test_sums_are_float32(dtype: torch.dtype) -> None:
    """Half precision would lose the small number beside the large ones, or overflow."""
    a = torch.tensor([[200.0, 0.5, -200.0]], dtype=dtype, device=DEVICE)
    b = torch.tensor([[400.0], [0.5], [400.0]], dtype=dtype, device=DEVICE)
    assert matmul(a, b).item() == 0.25


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0)], ids=str)
def test_nothing_to_do(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a = torch.ones(m, k, device=DEVICE, requires_grad=True)
    b = torch.ones(k, n, device=DEVICE, requires_grad=True)
    with poisoned():
        y = matmul(a, b)
        y.sum().backward()
    assert torch.equal(y, torch.zeros(m, n, device=DEVICE))
    assert torch.equal(a.grad, torch.full_like(a, n))
    assert torch.equal(b.grad, torch.full_like(b, m))


def test_a_gradient_that_nobody_wants_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (torch.ones(3, 3, device=DEVICE) for _ in range(2))
    y = matmul(a, b.requires_grad_())
    calls = []

    def counted(*args: Tensor) -> Tensor:
        calls.append(args)
        return matmul_forward(*args)

    monkeypatch.setattr("lm_from_scratch.kernels.matmul.matmul_forward", counted)
    y.sum().backward()
    assert len(calls) == 1 and torch.equal(b.grad, torch.full_like(b, 3))


@triton.jit
def tiles_kernel(out, tiles_m, tiles_n, GROUP: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    m, n = tile_of(program, tiles_m, tiles_n, GROUP)
    tl.store(out + 2 * program, m)
    tl.store(out + 2 * program + 1, n)


@pytest.mark.parametrize(("tiles_m", "tiles_n"), [(1, 5), (5, 1), (7, 3), (3, 7), (4, 4)])
def test_every_tile_once_group_by_group(tiles_m: int, tiles_n: int) -> None:
    out = torch.empty(tiles_m * tiles_n, 2, dtype=torch.int64, device=DEVICE)
    tiles_kernel[(tiles_m * tiles_n,)](out, tiles_m, tiles_n, GROUP=3)
    want = [
        [m, n]
        for first in range(0, tiles_m, 3)
        for n in range(tiles_n)
        for m in range(first, min(first + 3, tiles_m))
    ]
    assert out.tolist() == want


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize(
    "shape", [(M, K, N), pytest.param(ALIGNED, marks=pytest.mark.slow)], ids=str
)
def test_addmm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    def reference(out_in: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(out_in, a, b, beta=0.75, alpha=-0.125)

    def kernel(out_in: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return addmm(out_in, a, b, 0.75, -0.125)

    m, k, n = shape
    shapes = [(m, n), (m, k), (k, n)]
    args = [numbers(*shape, seed=i, grad=False) for i, shape in enumerate(shapes)]
    for layout in (lambda x: x, strided):
        check(kernel, reference, *args, dtype=dtype, name="addmm", gradients=False, layout=layout)


def test_in_place() -> None:
    """Each number is read before it is written, by the program that writes it."""
    a, b = (numbers(*s).detach().half().to(DEVICE) for s in [(M, 9), (9, N)])
    weight = Guarded(strided(numbers(M, N, seed=2).detach().float().to(DEVICE)))
    want = torch.addmm(weight.tensor, a.float(), b.float(), alpha=0.5)
    launch(a, b, weight.tensor, weight.tensor, 1.0, 0.5)
    torch.testing.assert_close(weight.tensor, want)
    assert torch.equal(weight.memory.isnan(), weight.before.isnan())


def test_what_is_aligned() -> None:
    memory = torch.zeros(64, 64, dtype=torch.float16)
    yes = [memory, memory.mT, memory[:5], memory[:, 16:48], memory[:1].expand(5, 64), memory[::2]]
    no = [memory[:, :7], memory[:, 1:17], memory[:, ::2], memory.view(-1, 32)[:, :17].contiguous()]
    assert [*map(is_aligned, yes)] == [True] * len(yes)
    assert [*map(is_aligned, no)] == [False] * len(no)
    for x in no:
        assert not is_aligned(x.mT)
    row = memory.view(-1)[8:1032].view(64, 16)  # 8 numbers: 16 bytes
    assert is_aligned(row) and not is_aligned(memory.view(-1)[1:1025].view(64, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_matrix_that_is_not_aligned_decides(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = []

    class Recorded:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *_, **options: tiles.append(options)

    monkeypatch.setattr(file, "matmul_kernel", Recorded())
    good, bad = torch.ones(64, 64, dtype=dtype), torch.ones(65, 65, dtype=dtype)[:-1, :-1]
    launch(good, good.mT, good, good)
    for i in range(4):
        launch(*(bad if i == j else good for j in range(4)))
    for tile, table in zip(tiles, [TILES] + 4 * [NARROW_TILES], strict=True):
        assert table[dtype.itemsize].items() <= tile.items()


def test_addmm_by_whole_numbers_and_by_zero() -> None:
    a = torch.eye(3, device=DEVICE)
    nan = torch.full((3, 3), torch.nan, device=DEVICE)
    assert torch.equal(addmm(nan, a, a, 0, 1), a)
    assert torch.equal(addmm(a, a, a, 1, 1), 2 * a)


def test_a_narrow_matrix_meets_a_wide_one() -> None:
    a, b = numbers(5, 37).detach().half().to(DEVICE), numbers(37, 3).detach().float().to(DEVICE)
    out = torch.empty(5, 3, device=DEVICE)
    launch(a, b, out)
    torch.testing.assert_close(out, a.float() @ b)


def test_is_one_operator() -> None:
    a, b = (numbers(*s).detach().float().to(DEVICE).requires_grad_() for s in [(5, 37), (37, 3)])
    check_operator(matmul_forward, a, b)
    check_operator(matmul_forward, strided(a), strided(b))
    check_compiled(matmul, a, b)
    a, b, before = a.detach(), b.detach(), numbers(5, 3).detach().half().to(DEVICE)
    check_operator(addmm_forward, strided(before), a, b, 0.5, 2.0)
    check_operator(addmm_forward, before[:1].expand(5, 3), a, b, 0.5, 2.0)
    check_compiled(addmm, before, a, b)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), "of shape (2, 3), b torch.float32 of shape (2, 3);"),
        (torch.ones(1, 2, 3), torch.ones(3, 2), "must be matrices"),
        (torch.ones(2, 3), torch.ones(3), "must be matrices"),
        (torch.ones(2, 3), torch.ones(3, 2).half(), "of one dtype"),
        (torch.ones(2, 3).int(), torch.ones(3, 2).int(), "of floating point"),
        (torch.ones(2, 3).double(), torch.ones(3, 2).double(), "kernels compute in"),
        (torch.ones(2, 3), torch.ones(3, 2, device="meta"), "b on meta; they must be on one"),
    ],
)
def test_refuses(a: Tensor, b: Tensor, words: str) -> None:
    a, b = (x if x.is_meta else x.to(DEVICE) for x in (a, b))
    with pytest.raises(ValueError, match="matmul: ") as error:
        matmul(a, b)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("out_in", "dtype", "words"),
    [
        (
            torch.ones(2, 4),
            torch.float32,
            "out_in is torch.float32 of shape (2, 4), a @ b torch.float32 of shape (2, 2);",
        ),
        (torch.ones(2), torch.float16, "out_in is torch.float32 of shape (2,), a @ b torch.float"),
        (torch.ones(2, 2).int(), torch.float32, "out_in is torch.int32 of shape (2, 2), a @ b"),
        (torch.ones(2, 2).bool(), torch.float32, "out_in is torch.bool of shape (2, 2), a @ b"),
        (torch.ones(2, 2).cfloat(), torch.float32, "out_in is torch.complex64"),
        (torch.ones(2, 2).int(), torch.int32, "a is torch.int32 of shape (2, 3), b torch.int32"),
        (torch.ones(2, 2), torch.complex64, "a is torch.complex64"),
        (torch.ones(2, 2, device="meta"), torch.float32, "out_in is on meta, a on"),
        (torch.ones(2, 2, requires_grad=True), torch.float32, "has no gradient; call it under"),
    ],
)
def test_addmm_refuses(out_in: Tensor, dtype: torch.dtype, words: str) -> None:
    a, b = (torch.ones(shape, dtype=dtype, device=DEVICE) for shape in [(2, 3), (3, 2)])
    with pytest.raises(ValueError, match="addmm: ") as error:
        addmm(out_in if out_in.is_meta else out_in.to(DEVICE), a, b)
    assert words in str(error.value)
