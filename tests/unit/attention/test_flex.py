"""flex.py: the rule as a function of indices, and what FlexAttention cannot do on a CPU."""

import subprocess
import sys

import pytest
import torch
from torch.nn.attention import flex_attention as module

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.flex import flex_attention, mask_function, uncompiled
from lm_from_scratch.instruments.conformance import CASES, DTYPES


def test_the_function_is_the_rule() -> None:
    for name, case in CASES.items():
        vis, B = case.visibility(), len(case.queries) * case.copies
        if B > 2:
            continue
        visible = mask_function(vis, B)
        T, S = vis.query_length, vis.key_length
        b, t, s = torch.arange(B)[:, None, None], torch.arange(T)[:, None], torch.arange(S)
        assert torch.equal(visible(b, 0, t, s), vis.mask[:, 0].expand(B, -1, -1)), name


def test_the_block_mask_leaves_out_hidden_blocks() -> None:
    vis = CASES["longer than a tile, known, window"].visibility().within(40)
    blocks = module.create_block_mask(mask_function(vis, 1), 1, None, 300, 300, device="cpu")
    computed = blocks.to_dense()[0, 0]
    assert computed.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_no_warning_and_the_switch_of_torch_is_put_back() -> None:
    """Warnings are errors in these tests: the call is the test of the first half."""
    case = CASES["causal"]
    q, k, v, _ = case.tensors(torch.float32)
    module._WARNINGS_SHOWN.discard("flex_attention_performance")
    flex_attention(q, k, v, case.visibility())
    assert module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is False
    with pytest.raises(KeyError), uncompiled():
        raise KeyError
    assert module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is False


def test_gradients_on_a_cpu_are_refused_and_no_grad_is_not() -> None:
    case = CASES["left padding"]
    q, k, v, _ = case.tensors(torch.float32)
    for leaf in (q, k, v):
        leaf.requires_grad_()
        with pytest.raises(ValueError, match=r"no backward pass on a CPU.*no_grad"):
            flex_attention(q, k, v, case.visibility())
        with torch.no_grad():
            assert not flex_attention(q, k, v, case.visibility()).requires_grad
        leaf.requires_grad_(False)


def test_dropout_is_refused() -> None:
    q, k, v, _ = CASES["causal"].tensors(torch.float32)
    with pytest.raises(ValueError, match=r"flex attention has no dropout, but dropout=0\.1"):
        flex_attention(q, k, v, CASES["causal"].visibility(), 0.1)


@pytest.mark.slow
def test_importing_the_kinds_does_not_import_flex_attention() -> None:
    code = (
        "import sys; before = set(sys.modules); import torch; torches = set(sys.modules);"
        "import lm_from_scratch.attention.kinds;"
        "new = set(sys.modules) - torches;"
        "print(sorted(m for m in new if 'flex_attention' in m or 'varlen' in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lm_from_scratch.attention.varlen']"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_kernel_on_a_gpu() -> None:
    for name, case in CASES.items():
        for dtype in DTYPES[1:]:
            if case.dropout or case.scale > 1:
                continue
            q, k, v, upstream = (x.cuda() for x in case.tensors(dtype, head_dim=64))
            vis = case.visibility()
            for field in ("query_positions", "key_positions", "query_documents", "key_documents"):
                value = getattr(vis, field)
                setattr(vis, field, None if value is None else value.cuda())
            leaves = [x.requires_grad_() for x in (q, k, v)]
            ours, want = (a(q, k, v, vis) for a in (flex_attention, formula_attention))
            grads = [torch.autograd.grad(y, leaves, upstream) for y in (ours, want)]
            for a, b in [(ours, want), *zip(*grads, strict=True)]:
                torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2, msg=f"{name} {dtype}")
