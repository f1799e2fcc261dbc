"""Engines that people use on a CPU, each behind a function that decodes greedily; GPT-2 of others.

``make bench`` installs them into ``build/bench/peers``: CTranslate2, and llama.cpp as xllamacpp
carries it. (Its own Python package has no wheel; built on the spot it would use AVX-512, too.)
torchao lies apart: where transformers finds it, it imports it.
"""

import copy
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from measure import APART
from torch import Tensor

Run = Callable[[], Tensor]
TRANSFORMERS = "transformers"
STATIC = "transformers, static cache, compiled"
CTRANSLATE2, LLAMA, TORCHAO = "CTranslate2", "llama.cpp", "torchao"
NANOGPT = "nanoGPT"
#: What nano_gpt imports beside torch and transformers.
UNUSED = ("tiktoken", "datasets")
PACKAGES = {CTRANSLATE2: "ctranslate2", LLAMA: "xllamacpp"}


def add_engines(runs: dict[str, Run], model: Any, idx: Tensor, n: int, dtype: str) -> list[str]:
    """Those made for a CPU; the names of those that are not installed."""
    engines = {CTRANSLATE2: ctranslate2_run, LLAMA: llama_run}
    for name, engine in engines.items():
        if importlib.util.find_spec(PACKAGES[name]):
            runs[name] = engine(model, idx, n, dtype)
    return [name for name in engines if name not in runs]


def gpt2_of(peer: str, block_size: int, sizes: Mapping[str, Any]) -> Any:
    """A GPT-2 to be trained: that of transformers, or nanoGPT's as nano_gpt carries it."""
    if peer == TRANSFORMERS:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_positions=block_size, use_cache=False, **sizes)).train()
    # its tokenizer and data sets are not needed, and neither is what they import
    absent = {name: mock.MagicMock() for name in UNUSED if name not in sys.modules}
    sys.modules.update(absent)
    from nano_gpt.config import GPTConfig
    from nano_gpt.model import GPT

    for name in absent:
        del sys.modules[name]
    names = ("vocab_size", "n_layer", "n_head", "n_embd")
    config = GPTConfig(block_size=block_size, **{name: sizes[name] for name in names})
    return GPT(config, tokenizer=None)


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

    copied = copy.deepcopy(model)  # whose weights are rounded in place
    spec = _MODEL_LOADERS["GPT2Config"].get_model_spec(copied)
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


def llama_run(model: Any, idx: Tensor, n: int, dtype: str) -> Run:
    """GPT-2 of transformers in a GGUF file. The engine is a server, called without a network; each
    row is a request, all are sent at once."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.n_parallel, params.n_ctx = len(idx), len(idx) * (idx.shape[1] + n)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.verbosity, params.cache_ram_mib = -1, 0
    if dtype == "float32":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    with tempfile.TemporaryDirectory() as folder:
        params.model.path = f"{folder}/model.gguf"
        write_gguf(model, params.model.path, dtype)
        engine = xllamacpp.Server(params)
    request = {"prompt": idx.tolist(), "n_predict": n, "temperature": 0.0, "ignore_eos": True,
               "cache_prompt": False}  # fmt: skip

    def run() -> Tensor:
        said = engine.handle_completions(request)["choices"]
        texts = [choice["text"] for choice in sorted(said, key=lambda choice: choice["index"])]
        return torch.tensor([[int(token) for token in text.split(",")[:n]] for text in texts])

    return run


def write_gguf(model: Any, path: str, dtype: str) -> None:
    """The file of llama.cpp: ``token_embd.weight``, ``blk.0.attn_qkv.weight``, ... in float32, or
    the matrices in blocks of 32 numbers of 8 bits. A token's text is its number and a comma."""
    import gguf
    from gguf.quants import quantize

    config = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"{token}," for token in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if ".h." in name and weight.dim() == 2:  # which transformers holds as (in, out)
            weight = weight.T
        numbers = weight.contiguous().numpy()
        stem, _, end = name.rpartition(".")
        matrix = dtype == "int8" and weight.dim() == 2 and "wpe" not in name
        writer.add_tensor(
            f"{names.get_name(stem)}.{end}", quantize(numbers, q8) if matrix else numbers,
            raw_dtype=q8 if matrix else None,
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def torchao_model(model: Any) -> Any:
    """A copy of ours with linear maps that torchao has quantised: weights and activations."""
    sys.path.append(str(APART))
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    sys.path.remove(str(APART))
    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model
