"""Mistakes in Triton's kernels, planted and run in its interpreter.

What only the compiler sees is in tests/kernels/test_compiled_kernels.py.
"""

import pytest
import torch
from mutation import Mutant, killer, laws_in, mutants

pytest.importorskip("triton", reason="Triton is not installed here", exc_type=ImportError)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted"),
]

MISTAKES = {
    "kernels.swiglu:swiglu_kernel": [
        ("a store without a mask", "* u, mask=inside)", "* u)"),
        ("no mask at all", ", mask=inside", "", 3),
    ],
    "kernels.swiglu:swiglu_backward": [
        ("a gradient taken as contiguous", "grad.contiguous()", "grad"),
    ],
    "kernels.softmax:softmax_kernel": [
        ("padding with 0 instead of -inf", 'other=-float("inf")', "other=0.0", 2),
        ("no rescaling at a new maximum", "total * tl.exp(top - raised)", "total"),
    ],
    "kernels.norm:rms_norm_kernel": [
        ("the mean over the block, not the row", "/ width", "/ BLOCK"),
        ("another eps", "+ eps", "+ 0.1"),
    ],
    "kernels.rope:rope_kernel": [
        ("a gradient turned forwards", "if BACK:", "if False:"),
        ("heads taken as one contiguous block",
         "t * x_t + h * x_h", "t * HALF * 2 + h * T * HALF * 2"),
        ("angles of the first row for all", "b * cos_b + t * HALF", "t * HALF"),
    ],
    "kernels.adamw:adamw_kernel": [
        ("eps inside the root", "tl.sqrt(v / correction2) + eps", "tl.sqrt(v / correction2 + eps)"),
        ("moments not corrected", "v / correction2", "v"),
    ],
    "kernels.matmul:tile_of": [
        ("tiles of another group", "within % height, within // height",
         "within // height, within % height"),
    ],
    "kernels.matmul:matmul_kernel": [
        ("half a tile of K without a mask", "inside = ks < K - k", "inside = ks < BLOCK_K"),
    ],
    "kernels.int8:int8_linear_kernel": [
        ("one scale for every row of codes", "scale += columns * scale_n", "scale += columns * 0"),
    ],
    "kernels.loss:cross_entropy_kernel": [
        ("tokens that do not count are counted", "target == IGNORE", "target == IGNORE - 1"),
    ],
    "kernels.loss:cross_entropy_backward": [
        ("a gradient written over the logits",
         "torch.empty_like(logits, memory_format=torch.contiguous_format)", "logits"),
    ],
    "kernels.attention:sees": [
        ("the causal triangle from the first key", "S - T + t, s", "t, s"),
    ],
    "kernels.attention:load_rows": [
        ("rows loaded beyond the last", "row < n - start", "row < n"),
    ],
    "kernels.decoding:merge_kernel": [
        ("splits merged without their weights",
         "tl.exp(L - tl.max(L, 0))", "tl.where(split < splits, 1.0, 0.0)"),
    ],
}  # fmt: skip


def killer_of(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr("lm_from_scratch.kernels.softmax.BLOCK", 16)  # rows of several blocks
    kernel = mutant.where.partition(":")[0].rpartition(".")[2]
    file = f"kernels/test_kernels_{kernel}.py"
    return killer(mutant, laws_in(file, names="reference|strides|every_length", most=1))


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killer_of(mutant, monkeypatch)


def test_float32_products_in_tf32_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no tf32: a run of the tests on a GPU finds it."""
    tf32 = Mutant("kernels.matmul:matmul_kernel", '"ieee"', '"tf32"')
    assert killer_of(tf32, monkeypatch) is None
