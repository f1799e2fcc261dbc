"""kernels/attention.py: every case of the conformance matrix."""

from dataclasses import replace

import pytest
import torch
from conformance_bounds import bound
from kernel_checks import DEVICE, DTYPES
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.conformance import CASES, Cell, matrix
from lm_from_scratch.kernels.attention import flash_attention

GPU = DEVICE == "cuda"


def on_device(vis: Visibility) -> Visibility:
    names = ("query_positions", "key_positions", "query_documents", "key_documents")
    parts = {name: getattr(vis, name) for name in names}
    return replace(vis, **{n: x.to(DEVICE) for n, x in parts.items() if x is not None})


def flash(q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0) -> Tensor:
    """The kernel, for the tensors of the matrix, which are on the CPU."""
    y = flash_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), on_device(vis), dropout)
    return y.to(q.device)


def allowed_error(cell: Cell) -> float:
    """A kernel of the backward pass may round a score of 100,000 otherwise than the forward one."""
    alone = cell.case == "scores above float16" and cell.dtype == torch.float32
    return 1e-2 if alone else bound(cell)


def test_padding_documents_and_windows_of_the_matrix() -> None:
    """A few of its cases."""
    names = "left padding", "packed documents", "chunk, window"
    for cell in matrix({"flash": flash}, {name: CASES[name] for name in names}, DTYPES[:1]):
        assert cell.forward is not None and cell.gradient is not None, str(cell)
        assert max(cell.forward, cell.gradient) <= allowed_error(cell), str(cell)


@pytest.mark.slow
def test_the_conformance_matrix() -> None:
    # the two long cases take the interpreter half of its time
    short = {name: case for name, case in CASES.items() if GPU or not name.startswith("longer")}
    cells = list(matrix({"flash": flash}, dtypes=DTYPES[:1]))
    cells += matrix({"flash": flash}, short, dtypes=DTYPES[1:])
    assert len(cells) == len(CASES) + len(short) * (len(DTYPES) - 1)
    for cell in cells:
        if cell.case == "dropout":
            assert cell.forward is None, str(cell)
            assert "attention has no dropout" in (cell.unsupported or ""), str(cell)
        elif "values" in cell.case:
            assert cell.forward is None and cell.gradient is None, str(cell)
            assert "and the kernel takes one width alone" in (cell.unsupported or ""), str(cell)
        else:
            assert cell.forward is not None and cell.gradient is not None, str(cell)
            assert max(cell.forward, cell.gradient) <= allowed_error(cell), str(cell)
            assert not (cell.forward != cell.forward or cell.gradient != cell.gradient), str(cell)
