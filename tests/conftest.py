"""Shared by all tests: one thread, no network, and small models with weights that show bugs."""

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch

# Before anything imports Triton: without a GPU the kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.models.causal_lm import CausalLM
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.weights.quantize import QuantizedWeight

torch.set_num_threads(1)
# A shell makes what it starts in the background deaf to Ctrl-C, and the children of that too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A check keeps what was solved: not in the home of who runs the tests.
PROGRESS = tempfile.TemporaryDirectory()  # removed when the process ends
os.environ["LM_FROM_SCRATCH_PROGRESS"] = os.path.join(PROGRESS.name, "progress.json")
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("tests")

TINY = dict(
    vocab_size=97,
    block_size=64,
    n_layer=3,
    n_head=4,
    n_embd=28,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=2,
    eos_token_id=2,
)

QWEN2 = dict(
    vocab_size=97,
    block_size=128,
    n_layer=3,
    n_head=6,
    n_kv_head=2,
    n_embd=48,
    intermediate_size=56,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    pad_token_id=0,
    eos_token_id=2,
)

#: Options of a `train` command that is over in a second.
SMALL = [
    "--vocab-size", "300", "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size",
    "32", "--batch-size", "4", "--steps", "6", "--warmup", "1", "--eval-every", "3", "--quiet",
]  # fmt: skip


#: What takes minutes begins first, so that two processes end at the same time.
LONGEST = ("notebooks", "proofs", "gpu_notebooks", "kernels_compiled", "distributed",
           "second_person", "train")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


def pytest_collection_finish() -> None:
    """All tests and libraries stay to the end. The garbage collector need not visit them again:
    that took 0.7 s each time, every tenth test, a seventh of the suite."""
    gc.collect()
    gc.freeze()


@torch.no_grad()
def enlarge_(model: nn.Module, seed: int = 0, std: float = 0.25) -> None:
    """Weights of std 0.25 and norms around 1: with the usual 0.02 most bugs do not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        scale = std if parameter.dim() > 1 else std / 2
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if ("ln_" in name or "norm" in name) and name.endswith("weight"):
            parameter.add_(1.0)


def tiny_gpt2(seed: int = 0, std: float = 0.25, **changes: object) -> GPT2LMHeadModel:
    """A small GPT-2 in evaluation mode, with large random weights."""
    model = GPT2LMHeadModel(GPT2Config(**{**TINY, **changes})).eval()
    enlarge_(model, seed, std)
    return model


def tiny_qwen2(seed: int = 0, std: float = 0.25, **changes: object) -> Qwen2ForCausalLM:
    """A small Qwen2 in evaluation mode, with large random weights."""
    model = Qwen2ForCausalLM(Qwen2Config(**{**QWEN2, **changes})).eval()
    enlarge_(model, seed, std)
    return model


def hf_twin(model: CausalLM) -> nn.Module:
    """The same model in transformers, carried over through a folder on disk."""
    from transformers import AutoModelForCausalLM as HFModel

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, Path(folder) / "model")
        twin, report = HFModel.from_pretrained(Path(folder) / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return twin.eval()


def tiny_hf(seed: int = 0, **changes: object) -> nn.Module:
    """A small random GPT-2 made by transformers."""
    from transformers import GPT2Config as HFConfig
    from transformers import GPT2LMHeadModel as HFModel

    config = dict(
        vocab_size=97, n_positions=64, n_layer=3, n_head=4, n_embd=28,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    model = HFModel(HFConfig(**{**config, **changes})).eval()
    enlarge_(model, seed)
    return model


def tiny_hf_qwen2(seed: int = 0, **changes: object) -> nn.Module:
    """A small random Qwen2 made by transformers."""
    from transformers import Qwen2Config as HFConfig
    from transformers import Qwen2ForCausalLM as HFModel

    config = dict(
        vocab_size=97, max_position_embeddings=128, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, hidden_size=48, intermediate_size=56, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = HFModel(HFConfig(**{**config, **changes})).eval()
    enlarge_(model, seed)
    return model


def ours_from_hf(twin: nn.Module) -> CausalLM:
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        return from_pretrained(folder)


def token_ids(*shape: int, seed: int = 1, low: int = 3, high: int = 97) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def seeded() -> Iterator[Callable[[int], None]]:
    """Seeds torch, and puts its random state back afterwards."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield torch.manual_seed
    torch.set_rng_state(state)


# --------------------------------------------------------------------------- what did not change


def held(weight: QuantizedWeight) -> list[Tensor]:
    return [getattr(weight, name) for name in weight.held]


def assert_same(ours: Tensor, want: Tensor) -> None:
    """The same class, dtype and contents, bit by bit."""
    assert type(ours) is type(want) and ours.dtype == want.dtype and ours.shape == want.shape
    assert isinstance(ours, QuantizedWeight) and isinstance(want, QuantizedWeight)
    assert ours.group_size == want.group_size and ours.device == want.device
    for a, b in zip(held(ours), held(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def snapshot(model: nn.Module) -> tuple[list[type], list[tuple[str, int, type, bool, Tensor]]]:
    """What a refusal must leave as it is: the classes of modules, and every parameter."""
    parameters = [
        (n, id(p), type(p), p.requires_grad, p.detach().clone())
        for n, p in model.named_parameters()
    ]
    return [type(module) for module in model.modules()], parameters


def assert_unchanged(
    model: nn.Module, before: tuple[list[type], list[tuple[str, int, type, bool, Tensor]]]
) -> None:
    classes, parameters = before
    assert [type(module) for module in model.modules()] == classes
    pairs = zip(parameters, model.named_parameters(), strict=True)
    for (name, *known, value), (now, p) in pairs:
        assert (name, *known) == (now, id(p), type(p), p.requires_grad)
        if isinstance(p, QuantizedWeight):
            assert_same(p, value)
        else:
            assert torch.equal(p.nan_to_num(), value.nan_to_num())
