"""kernels/model.py: a built GPT-2 or Qwen2 that computes with kernels says and learns the same."""

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_checks import DEVICE, poisoned
from small_run import SMALL
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor
from unchanged import assert_unchanged, snapshot

from lm_from_scratch.__main__ import main
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import Cache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.kernels import loss as kernel_loss
from lm_from_scratch.kernels.attention import flash_attention
from lm_from_scratch.kernels.model import use_kernels_
from lm_from_scratch.kernels.paged import KernelPagedCache
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training import loss as training_loss
from lm_from_scratch.training.objective import NextTokenLoss
from lm_from_scratch.weights.quantize import quantize_

MODELS: dict[str, Callable[[], CausalLM]] = {
    "gpt2": lambda: tiny_gpt2(n_layer=1),
    "qwen2": lambda: tiny_qwen2(n_layer=1),
    "qwen2, window": lambda: tiny_qwen2(n_layer=2, sliding_window=3, max_window_layers=1),
    "qwen2, all slide": lambda: tiny_qwen2(n_layer=1, sliding_window=3, max_window_layers=0),
}
#: The one with a window has a layer without one, too. `make test` sees the loss of its logits.
each_model = pytest.mark.parametrize(
    "name",
    ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2", "qwen2, window"))],
)

FEW_STEPS = ["--steps", "2", "--eval-every", "0", "--batch-size", "2", "--device", DEVICE]

LEFT_PADDED = positions_from_mask(torch.tensor([[0] * 5 + [1] * 7, [1] * 12])).to(DEVICE)


def pair(name: str) -> tuple[CausalLM, CausalLM, Tensor]:
    """A model, its copy with kernels, and tokens (2, 12)."""
    plain = MODELS[name]().to(DEVICE)
    ours = copy.deepcopy(plain)
    use_kernels_(ours)
    return plain, ours, token_ids(2, 12).to(DEVICE)


def new_pool(model: CausalLM) -> BlockPool:
    c = model.config
    heads = getattr(c, "n_kv_head", c.n_head)
    return BlockPool(c.n_layer, heads, c.head_dim, n_blocks=40, block_size=4, device=DEVICE)


def assert_close(ours: Tensor, plain: Tensor) -> None:
    """Logits of some tens; float32 sums in another order."""
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def quiet():  # type: ignore[no-untyped-def]
    with np.errstate(all="ignore"):
        yield


def test_what_is_replaced() -> None:
    layers, norms = 3, 7
    assert use_kernels_(tiny_gpt2().to(DEVICE)) == {"attention": layers, "loss": 1}
    model = tiny_qwen2().to(DEVICE)
    everything = {"attention": layers, "rms_norm": norms, "rope": layers, "swiglu": layers}
    assert use_kernels_(model) == {**everything, "loss": 1}
    assert use_kernels_(model) == {**everything, "loss": 1}  # again: nothing is lost
    model = tiny_qwen2(activation="relu").to(DEVICE)
    assert "swiglu" not in use_kernels_(model)
    model = tiny_qwen2().to(DEVICE)
    assert use_kernels_(model, only=["rope"]) == {"rope": layers}
    assert model.model.layers[0].self_attn.attend is not flash_attention
    quantize_(model, 8)
    assert use_kernels_(model, only=["int8"]) == {"int8": layers * 7 + 1}


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_of_a_head_is_that_of_the_kernels(tied: bool) -> None:
    model = tiny_qwen2(tie_word_embeddings=tied).to(DEVICE)
    use_kernels_(model, only=["rope"])
    assert NextTokenLoss(model).loss is training_loss.causal_lm_loss
    use_kernels_(model)
    for one in (model, copy.deepcopy(model)):
        objective = NextTokenLoss(one)
        assert objective.loss is kernel_loss.causal_lm_loss
        assert objective.chunked_loss is kernel_loss.chunked_causal_lm_loss


@each_model
@torch.no_grad()
def test_the_same_logits(name: str) -> None:
    plain, ours, idx = pair(name)
    with poisoned():
        assert_close(ours(idx), plain(idx))
        logits, want = ours(idx, positions=LEFT_PADDED), plain(idx, positions=LEFT_PADDED)
    assert_close(logits[LEFT_PADDED >= 0], want[LEFT_PADDED >= 0])
    documents = torch.tensor([[0] * 4 + [1] * 8, [0] * 11 + [1]], device=DEVICE)
    positions = torch.tensor([[*range(4), *range(8)], [*range(11), 0]], device=DEVICE)
    assert_close(
        ours(idx, positions=positions, documents=documents),
        plain(idx, positions=positions, documents=documents),
    )


@pytest.mark.parametrize(
    ("name", "chunked"),
    [
        ("gpt2", False),
        ("qwen2, window", True),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
        pytest.param("qwen2", False, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
        pytest.param("qwen2, window", False, marks=pytest.mark.slow),
    ],
)
def test_the_same_gradients(name: str, chunked: bool) -> None:
    plain, ours, idx = pair(name)
    gradients = []
    for model in (plain, ours):
        targets = next_token_targets(idx, positions=LEFT_PADDED)
        loss = NextTokenLoss(model, chunked=chunked)(idx, targets, positions=LEFT_PADDED)
        with poisoned():
            loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for mine, want in zip(*reversed(gradients), strict=True):
        assert want.any() or want.dim() == 1
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "growing"),
        ("gpt2", "paged kernels"),
        ("qwen2", "static"),
        ("qwen2", "paged"),
        ("qwen2, window", "growing"),
        ("qwen2, window", "paged kernels"),
        ("qwen2, all slide", "sliding"),
    ],
)
@torch.no_grad()
def test_cached_is_full(name: str, kind: str) -> None:
    """Fed 5, 1, 1, 3, 1, 1 tokens, with left padding, through each kind of cache."""
    plain, ours, idx = pair(name)
    n_layer = plain.config.n_layer
    caches: dict[str, Callable[[], Cache]] = {
        "growing": lambda: GrowingCache(n_layer),
        "static": lambda: StaticCache(n_layer, 16),
        "sliding": lambda: SlidingCache(n_layer, 3),
        "paged": lambda: PagedCache(new_pool(ours)),
        "paged kernels": lambda: KernelPagedCache(new_pool(ours)),
    }
    cache, logits, start = caches[kind](), [], 0
    for n in (5, 1, 1, 3, 1, 1):
        part = slice(start, start + n)
        with poisoned():
            logits.append(ours(idx[:, part], positions=LEFT_PADDED[:, part], cache=cache))
        start += n
    got, want = torch.cat(logits, dim=1), plain(idx, positions=LEFT_PADDED)
    assert_close(got[LEFT_PADDED >= 0], want[LEFT_PADDED >= 0])


@pytest.mark.slow
@torch.no_grad()
def test_an_engine_says_the_same() -> None:
    """Requests of different lengths, with shared beginnings, over one pool."""
    plain, ours, _ = pair("qwen2, window")
    start = token_ids(9, seed=9).tolist()
    requests = [
        Request(prompt=start[:n] + token_ids(m, seed=n).tolist(), max_new_tokens=5)
        for n, m in ((9, 1), (9, 2), (0, 3), (4, 2))
    ]
    said = []
    for model, kind in ((plain, PagedCache), (ours, KernelPagedCache)):
        engine = Engine(model, new_pool(model), max_batch=3, prefill_chunk=4, cache_type=kind)
        for request in requests:
            engine.submit(request)
        for _ in engine.run():
            pass
        assert not engine.errors
        said.append(engine.results)
    assert said[0] == said[1]


@torch.no_grad()
def test_8_bit_weights() -> None:
    plain = tiny_qwen2(n_layer=1, tie_word_embeddings=True).to(DEVICE)
    quantize_(plain, 8, weight_only=True)  # as the kernel is
    ours = copy.deepcopy(plain)
    assert use_kernels_(ours, only=["int8"]) == {"int8": 8}
    idx = token_ids(2, 5).to(DEVICE)
    assert_close(ours(idx), plain(idx))
    assert_close(copy.deepcopy(ours)(idx), plain(idx))


@pytest.mark.slow
def test_copies_and_files_keep_the_kernels() -> None:
    _, ours, idx = pair("qwen2")
    with torch.no_grad():
        want = ours(idx)
        assert torch.equal(copy.deepcopy(ours)(idx), want)
        assert torch.equal(pickle.loads(pickle.dumps(ours))(idx), want)


@pytest.mark.slow
def test_compiles_without_a_break() -> None:
    """The whole model is one graph: each kernel is one operator in it."""
    _, ours, idx = pair("qwen2, window")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(idx), ours(idx))
    torch.compiler.reset()


class Foreign(torch.nn.Linear):
    """A module of someone else, who uses the same words for other functions."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.normalise = self.rotate = self.product = lambda x: x


def test_refusals_change_nothing() -> None:
    model = tiny_qwen2().to(DEVICE)
    before, functions = snapshot(model), [m.__dict__.copy() for m in model.modules()]
    with pytest.raises(ValueError, match=r"only=\['flash'\] must be some of"):
        use_kernels_(model, only=["flash", "rope"])
    with pytest.raises(ValueError, match="only='rope' must be a list"):
        use_kernels_(model, only="rope")
    with pytest.raises(ValueError, match="'int8'"):
        use_kernels_(model, only=["int8", "rope"])
    model.double()
    with pytest.raises(ValueError, match="float64; kernels compute in"):
        use_kernels_(model)
    model.float()
    assert_unchanged(model, before)
    assert [list(m.__dict__) for m in model.modules()] == [list(f) for f in functions]
    with pytest.raises(ValueError, match="kernels are for the modules of lm_from_scratch"):
        use_kernels_(Foreign().to(DEVICE))


def test_attention_dropout_is_refused_when_called() -> None:
    model = tiny_gpt2(attn_pdrop=0.1).to(DEVICE)
    use_kernels_(model)
    idx = token_ids(1, 4).to(DEVICE)
    model(idx)
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        model.train()(idx)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here a kernel can run")
def test_a_choice_that_cannot_run_raises() -> None:
    """Without a GPU, and without the interpreter asked for, nothing falls back."""
    program = """
import torch
from lm_from_scratch.kernels.model import use_kernels_
from lm_from_scratch.kernels.swiglu import swiglu
from lm_from_scratch.checkpoint.weights import load_shipped
for call in (lambda: use_kernels_(load_shipped("qwen2-docs")[0]),
             lambda: swiglu(torch.ones(2), torch.ones(2))):
    try:
        call()
    except ValueError as error:
        assert "a kernel needs a CUDA device" in str(error), error
    else:
        raise SystemExit("nothing was raised")
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.slow
def test_nothing_but_the_kernels_imports_triton() -> None:
    program = """
import pkgutil, importlib, sys, lm_from_scratch
for module in pkgutil.walk_packages(lm_from_scratch.__path__, "lm_from_scratch."):
    if ".kernels" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "triton" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.slow
def test_commands_take_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Qwen2 trained with kernels learns what one without learns, and says it with kernels."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"Line {n} of {n * n}.\n\n" for n in range(400)))
    train = ["train", *SMALL, *FEW_STEPS, "--corpus", str(corpus), "--architecture", "qwen2"]
    losses = []
    for options in ([], ["--kernels", "--chunked-loss"]):
        out = tmp_path / "-".join(["run", *options])
        assert main([*train, "--out", str(out), *options]) == 0
        losses.append([json.loads(x)["loss"] for x in (out / "log.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    says = ["generate", "--model", str(out / "model"), "--max-new-tokens", "3", "--device", DEVICE]
    capsys.readouterr()
    texts = []
    for options in ([], ["--kernels"]):
        assert main([*says, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dropout", "0.1"], "give --dropout 0"),
        (["--library", "onednn"], "--library onednn does not work with --kernels"),
        (["--dropout", "0", "--dtype", "bfloat16"], "interpreter computes wrongly"),
    ],
)
def test_commands_refuse(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if DEVICE == "cuda" and "bfloat16" in options:
        pytest.skip("a GPU computes in bfloat16")
    command = ["train", *SMALL, *FEW_STEPS, "--kernels", *options]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
