"""What DeepSeek-V3 has of its own: the latent in every kind of cache, and where it is absorbed.
That it computes what transformers does: tests/parity."""

from pathlib import Path

import pytest
import torch
from caches import in_chunks
from model_families import drawn, enlarge_biases_
from safetensors.torch import load_file, save_file
from tiny_models import hf_twin, ours_from_hf, tiny_deepseek_v3, token_ids

from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.configs import config_from_dict
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.interop.cache_file import load_cache, save_cache
from lm_from_scratch.layers.experts import SharedExperts, SigmoidRouter
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.layers.linear import plain_matrix
from lm_from_scratch.layers.rope_scaling import YaRNScaling
from lm_from_scratch.models.deepseek_v3 import DeepseekV3ForCausalLM, sharpness
from lm_from_scratch.weights.lora import add_lora_
from lm_from_scratch.weights.quantize import quantize_


def forms(model: DeepseekV3ForCausalLM, T: int, S: int) -> bool:
    return model.model.layers[0].self_attn.absorbs(T, S)


def test_the_drawn_configs_reach_both_forms_everywhere() -> None:
    """A prompt expanded and, for narrow latents, absorbed; one token absorbed."""
    models = [build(config_from_dict(drawn("deepseek_v3", seed))) for seed in range(25)]
    assert {forms(model, 12, 12) for model in models} == {True, False}
    assert {forms(model, 1, 12) for model in models} == {True}
    assert {forms(model, 1, 1) for model in models} == {True, False}
    assert {hasattr(model.model.layers[0].self_attn, "q_proj") for model in models} == {True, False}
    mlps = {type(block.mlp) for model in models for block in model.model.layers}
    assert mlps == {GatedMLP, SharedExperts}
    routers = [m for model in models for m in model.modules() if isinstance(m, SigmoidRouter)]
    grouped = [m for m in routers if m.top_group < m.n_group]
    assert {m.normalize for m in routers} == {True, False} and len(grouped) > 5


@torch.no_grad()
def test_the_cache_holds_the_normed_latent_and_the_turned_key() -> None:
    """What transformers holds, up to the order of the turned features."""
    from transformers import DynamicCache

    model = tiny_deepseek_v3()
    twin, idx = hf_twin(model), token_ids(2, 7)
    cache, wanted = GrowingCache(3), DynamicCache()
    model(idx, cache=cache)
    twin(idx, past_key_values=wanted, use_cache=True)
    for layer, held in enumerate(wanted.layers):
        latent, shared, _ = cache.contents(layer)
        assert latent.shape == (2, 1, 7, 16) and shared.shape == (2, 1, 7, 4)
        torch.testing.assert_close(latent, held.keys, atol=1e-5, rtol=0)
        order = [0, 2, 1, 3]  # evens, then odds, to pairs side by side
        torch.testing.assert_close(shared[..., order], held.values, atol=1e-5, rtol=0)


@torch.no_grad()
def test_bytes_of_a_token_are_those_of_the_config() -> None:
    model = tiny_deepseek_v3()
    heads, R, Dr = model.config.kv_shape
    assert (heads, R, Dr) == (1, 16, 4)
    cache = GrowingCache(3, reserve=10)
    model(token_ids(2, 10), cache=cache)
    assert cache.nbytes == 2 * 10 * 3 * heads * (R + Dr) * 4
    rounded = GrowingCache(3, Quantized(8, group=4), reserve=10)
    model(token_ids(2, 10), cache=rounded)
    assert rounded.nbytes == 2 * 10 * 3 * (R + Dr) * (1 + 2 * 4 / 4)


@torch.no_grad()
def test_many_requests_share_a_pool(tmp_path) -> None:
    model = tiny_deepseek_v3()
    heads, D, Dv = model.config.kv_shape
    engine = Engine(model, BlockPool(3, heads, D, 40, block_size=4, value_dim=Dv))
    prompts = [token_ids(n, seed=n).tolist() for n in (3, 9, 6)]
    numbers = [
        engine.submit(Request(prompt=prompt, max_new_tokens=5, sampler=GREEDY))
        for prompt in prompts
    ]
    for _ in engine.run():
        pass
    for number, prompt in zip(numbers, prompts, strict=True):
        assert engine.results[number] == complete(generate(model, [prompt], 5, GREEDY))[0]
    with pytest.raises(ValueError, match=r"pool is for .* \(3, 1, 16, 16, .*has \(3, 1, 16, 4,"):
        Engine(model, BlockPool(3, heads, D, 40))


@torch.no_grad()
def test_a_paged_cache_comes_back_from_a_file(tmp_path) -> None:
    model, idx = tiny_deepseek_v3(), token_ids(2, 9)
    cache = PagedCache(BlockPool(3, 1, 16, 20, block_size=4, value_dim=4))
    model(idx[:, :6], cache=cache)
    save_cache(cache, tmp_path / "cache")
    want = model(idx[:, 6:], cache=cache)
    assert torch.equal(model(idx[:, 6:], cache=load_cache(tmp_path / "cache")), want)


@torch.no_grad()
def test_adapters_and_few_bits_of_the_absorbed_matrix_count() -> None:
    """A matrix that is more than its numbers is applied, and not read."""
    idx = token_ids(2, 8)
    adapted = tiny_deepseek_v3()
    add_lora_(adapted, rank=2, select=lambda name: "kv_b_proj" in name)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_b"):
            parameter.normal_(std=0.5)
    small = tiny_deepseek_v3(kv_lora_rank=32)
    quantize_(small, bits=8, select=lambda name: "kv_b_proj" in name)
    for model in (adapted, small):
        assert plain_matrix(model.model.layers[0].self_attn.kv_b_proj) is None
        fed = in_chunks(idx, [5, 1, 1, 1], model=model)
        torch.testing.assert_close(fed, model(idx), atol=5e-5, rtol=0)
    assert (adapted(idx) - tiny_deepseek_v3()(idx)).abs().max() > 0.1


def test_scores_are_sharper_in_a_longer_context_by_the_square() -> None:
    yarn = YaRNScaling(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    assert abs(sharpness(yarn) - 1.3688879454113936**2) < 1e-12 and yarn.magnitude() == 1.0
    assert sharpness(None) == sharpness(YaRNScaling(factor=40.0, original_length=4096)) == 1.0


@torch.no_grad()
def test_the_correction_bias_stays_in_float32(tmp_path: Path) -> None:
    """In the model, in a folder, and between the two; and the experts that it chooses."""
    model = tiny_deepseek_v3(first_k_dense_replace=1)
    biases = [bias.clone() for bias in enlarge_biases_(model)]
    assert all((bias != bias.bfloat16()).any() for bias in biases)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"

    def holds(other: torch.nn.Module, dtype: torch.dtype) -> bool:
        held = [b for n, b in other.named_buffers() if n.endswith("correction_bias")]
        weights = {p.dtype for p in other.parameters()}
        return weights == {dtype} and all(map(torch.equal, held, biases))

    for dtype in (torch.bfloat16, torch.float16):
        for small in (model.to(dtype), tiny_deepseek_v3(first_k_dense_replace=1).to(dtype)):
            small.load_state_dict(model.state_dict())
            assert holds(small, dtype)
    model.to(torch.bfloat16)
    save_pretrained(model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert tensors.pop(name).dtype == torch.float32
    assert {t.dtype for n, t in tensors.items() if "correction" not in n} == {torch.bfloat16}
    again, twin = from_pretrained(tmp_path / "m"), hf_twin(model)
    assert holds(again, torch.bfloat16) and holds(twin, torch.bfloat16)
    assert holds(ours_from_hf(twin), torch.bfloat16)
    idx = token_ids(2, 9)
    assert torch.equal(again(idx), model(idx))
    bias, norm = biases[0], "model.norm.weight"
    mixed = {**load_file(tmp_path / "m/model.safetensors"), norm: tensors[norm].float()}
    save_file(mixed, tmp_path / "m" / "model.safetensors")
    assert holds(from_pretrained(tmp_path / "m"), torch.bfloat16)
    rounded = {**mixed, name: bias}
    save_file({n: t.bfloat16() for n, t in rounded.items()}, tmp_path / "m" / "model.safetensors")
    gate = from_pretrained(tmp_path / "m").model.layers[1].mlp.gate
    assert torch.equal(gate.e_score_correction_bias, bias.bfloat16().float())
    assert model.double().model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float64


def test_files_hold_each_expert_by_itself_under_its_published_name(tmp_path: Path) -> None:
    model = tiny_deepseek_v3(n_layer=2, first_k_dense_replace=1, n_shared_experts=2)
    save_pretrained(model, tmp_path / "m")
    shapes = {n: tuple(t.shape) for n, t in load_file(tmp_path / "m/model.safetensors").items()}
    prefix = "model.layers.1.mlp."
    want = {"gate.weight": (8, 30), "gate.e_score_correction_bias": (8,)}
    for mlp, F in [*((f"experts.{e}", 7) for e in range(8)), ("shared_experts", 14)]:
        want |= {f"{mlp}.gate_proj.weight": (F, 30), f"{mlp}.up_proj.weight": (F, 30)}
        want |= {f"{mlp}.down_proj.weight": (30, F)}
    named = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    assert named == want


@torch.no_grad()
def test_no_latent_means_no_key_of_each_head() -> None:
    """A token decoded after a long text makes no key or value of a head: the largest tensor of the
    pass is the cache itself, or the logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            if isinstance(y, torch.Tensor):
                largest[0] = max(largest[0], y.numel())
            return y

    model = tiny_deepseek_v3(n_head=8, v_head_dim=12)
    S, cache = 500, GrowingCache(3, reserve=512)
    model(token_ids(1, S), cache=cache)
    with Largest():
        model(token_ids(1, 1), cache=cache)
    assert largest[0] <= 512 * 20 < S * 8 * (6 + 12)
    assert torch.isfinite(model(token_ids(1, 3), cache=NO_CACHE)).all()
