"""Engines that people use on a CPU, each behind a function that decodes greedily.

``make bench`` installs CTranslate2 and torchao into ``build/bench/peers``. llama.cpp has no wheel on
the package index; built from source, in a quarter of an hour, it is measured, too:
``pip install --target build/bench/peers --no-deps llama-cpp-python gguf``.
"""

import copy
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Tensor]
TRANSFORMERS = "transformers"
STATIC = "transformers, static cache, compiled"
CTRANSLATE2, LLAMA, TORCHAO = "CTranslate2", "llama.cpp", "torchao"
PACKAGES = {CTRANSLATE2: "ctranslate2", LLAMA: "llama_cpp", TORCHAO: "torchao"}


def add_engines(runs: dict[str, Run], model: Any, idx: Tensor, n: int, dtype: str) -> list[str]:
    """CTranslate2 and, for one row, llama.cpp; the names of those that are not installed."""
    engines = {CTRANSLATE2: ctranslate2_run} | ({LLAMA: llama_run} if len(idx) == 1 else {})
    for name, engine in engines.items():
        if not missing(name):
            runs[name] = engine(model, idx, n, dtype)
    return [name for name in engines if missing(name)]


def missing(peer: str) -> bool:
    return importlib.util.find_spec(PACKAGES[peer]) is None


def transformers_run(model: Any, idx: Tensor, n: int, **switches: Any) -> Run:
    """``generate``, as it is or with switches."""

    def run() -> Tensor:
        out = model.generate(
            idx, attention_mask=torch.ones_like(idx), max_new_tokens=n, min_new_tokens=n,
            do_sample=False, pad_token_id=0, eos_token_id=None, **switches,
        )  # fmt: skip
        return out[:, idx.shape[1] :]

    return run


def compiled_run(model: Any, idx: Tensor, n: int, backend: str) -> Run:
    """The same with the switches that its authors advise: a cache of a fixed size, compiled."""
    from transformers import CompileConfig

    torch._dynamo.reset()
    config = CompileConfig(backend=backend, mode="default" if backend == "inductor" else None)
    config._compile_all_devices = True  # a CPU, too
    return transformers_run(model, idx, n, cache_implementation="static", compile_config=config)


def transformers_step(model: Any, idx: Tensor, n: int) -> Callable[[], None]:
    """``n`` tokens after a prompt, one at a time."""
    with torch.no_grad():
        past = model(idx, use_cache=True).past_key_values

    @torch.no_grad()
    def run() -> None:
        for _ in range(n):
            model(idx[:, -1:], past_key_values=past)

    return run


def ctranslate2_run(model: Any, idx: Tensor, n: int, dtype: str) -> Run:
    """GPT-2 of transformers, converted; the names of its tokens are their numbers."""
    import ctranslate2
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    spec = _MODEL_LOADERS["GPT2Config"].get_model_spec(model)
    spec.register_vocabulary([str(token) for token in range(model.config.vocab_size)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.optimize(quantization="int8" if dtype == "int8" else None)
        spec.save(folder)
        threads = torch.get_num_threads()
        engine = ctranslate2.Generator(folder, "cpu", compute_type=dtype, intra_threads=threads)
    prompts = [[str(token) for token in row] for row in idx.tolist()]

    def run() -> Tensor:
        said = engine.generate_batch(
            prompts, max_length=n, min_length=n, include_prompt_in_result=False,
        )  # fmt: skip
        return torch.tensor([result.sequences_ids[0] for result in said])

    return run


def torchao_model(model: Any) -> Any:
    """A copy of ours whose linear maps torchao has quantised: int8, activations too."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def llama_run(model: Any, idx: Tensor, n: int, dtype: str) -> Run:
    """GPT-2 of transformers, one row, in a GGUF file."""
    from llama_cpp import Llama

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path, dtype)
        engine = Llama(
            str(path), n_ctx=idx.shape[1] + n, n_threads=torch.get_num_threads(), verbose=False,
            n_threads_batch=torch.get_num_threads(), use_mmap=False,
        )  # fmt: skip

    def run() -> Tensor:
        tokens = engine.generate(idx[0].tolist(), temp=0.0, reset=True, repeat_penalty=1.0)
        return torch.tensor([[token for _, token in zip(range(n), tokens)]])

    return run
