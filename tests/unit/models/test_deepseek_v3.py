"""DeepSeek-V3 against transformers, on tiny random models of drawn sizes with large weights; and
what its latent is in every kind of cache."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import in_chunks
from safetensors.torch import load_file, save_file
from tiny_models import (
    DEEPSEEK_V3,
    ROPES,
    enlarge_,
    hf_twin,
    ours_from_hf,
    tiny_deepseek_v3,
    token_ids,
)

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.engine import Engine, Request
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.interop.caches import load_cache, save_cache
from lm_from_scratch.layers.activation import GatedMLP
from lm_from_scratch.layers.experts import SharedExperts, SigmoidRouter, active_parameters
from lm_from_scratch.layers.linear import plain_matrix
from lm_from_scratch.layers.rope_scaling import YaRNScaling
from lm_from_scratch.models.causal_lm import build
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM, sharpness
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.weights.lora import add_lora_
from lm_from_scratch.weights.quantize import quantize_

YARN = ROPES[4]
#: Those of Qwen2, and YaRN as DeepSeek has it.
OWN_ROPES = [
    *ROPES,
    {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    {**YARN, "mscale_all_dim": 2.0},
    {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
]


def drawn(seed: int) -> dict[str, Any]:
    """A config in the words of transformers: no two sizes alike, by chance."""
    draw = random.Random(f"deepseek_v3 {seed}")
    heads, n_layer = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3])
    experts = random.Random(f"experts {seed}")
    n_group, size = experts.choice([1, 2, 4]), experts.choice([2, 3, 5])
    topk_group = experts.randint(1, n_group)
    return dict(
        vocab_size=97,
        hidden_size=draw.choice([20, 31, 48]),
        intermediate_size=draw.choice([20, 33, 56]),
        num_hidden_layers=n_layer,
        first_k_dense_replace=draw.choice([0, 0, 1]),
        n_routed_experts=n_group * size,
        n_shared_experts=experts.choice([1, 2]),
        num_experts_per_tok=experts.randint(1, topk_group * size),
        moe_intermediate_size=experts.choice([5, 9, 12]),
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=experts.choice([False, True]),
        routed_scaling_factor=experts.choice([1.0, 2.5]),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=draw.choice([None, 9, 14]),
        kv_lora_rank=draw.choice([3, 8, 16, 24]),
        qk_nope_head_dim=draw.choice([5, 8, 12]),
        qk_rope_head_dim=draw.choice([4, 6, 8]),
        v_head_dim=draw.choice([5, 7, 12]),
        rope_interleave=draw.choice([False, True, True]),
        max_position_embeddings=draw.choice([64, 128]),
        rms_norm_eps=draw.choice([1e-6, 1e-2]),
        rope_parameters=draw.choice(OWN_ROPES),
        tie_word_embeddings=draw.choice([False, False, True]),
        hidden_act=draw.choice(["silu", "silu", "gelu"]),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def theirs(seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    config = AutoConfig.for_model("deepseek_v3", **drawn(seed) | changes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one needs rows of whole 16 bytes
    model = HFModel.from_config(config).eval()
    enlarge_(model, seed)
    enlarge_biases_(model, seed)
    return model


def enlarge_biases_(model: torch.nn.Module, seed: int = 0) -> list[torch.Tensor]:
    """Correction biases large enough to change which experts are chosen."""
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for layer, bias in enumerate(biases):
        bias.copy_(torch.randn(len(bias), generator=torch.Generator().manual_seed(seed + layer)))
        bias.mul_(0.3)
    return biases


def twin_of(model: DeepseekV3ForCausalLM) -> Any:
    twin = hf_twin(model)
    twin.config._experts_implementation = "eager"
    return twin


def forms(model: DeepseekV3ForCausalLM, T: int, S: int) -> bool:
    return model.model.layers[0].self_attn.absorbs(T, S)


def test_the_drawn_configs_reach_both_forms_everywhere() -> None:
    """A prompt expanded and, for narrow latents, absorbed; one token absorbed."""
    models = [build(config_from_dict({"model_type": "deepseek_v3", **drawn(s)})) for s in range(25)]
    assert {forms(model, 12, 12) for model in models} == {True, False}
    assert {forms(model, 1, 12) for model in models} == {True}
    assert {forms(model, 1, 1) for model in models} == {True, False}
    assert {hasattr(model.model.layers[0].self_attn, "q_proj") for model in models} == {True, False}
    mlps = {type(block.mlp) for model in models for block in model.model.layers}
    assert mlps == {GatedMLP, SharedExperts}
    routers = [m for model in models for m in model.modules() if isinstance(m, SigmoidRouter)]
    grouped = [m for m in routers if m.top_group < m.n_group]
    assert {m.normalize for m in routers} == {True, False} and len(grouped) > 5


@pytest.mark.parametrize("seed", range(25))
def test_a_published_folder_computes_what_transformers_does(seed: int) -> None:
    twin = theirs(seed)
    model = ours_from_hf(twin)
    assert type(model) is DeepseekV3ForCausalLM
    idx = token_ids(2, 12, seed=seed)
    want = twin(idx, labels=idx).logits
    torch.testing.assert_close(model(idx), want, atol=5e-5, rtol=0)
    with torch.no_grad():
        fed = in_chunks(idx, [5, 1, 1, 3, 2], model=model)
    torch.testing.assert_close(fed, want, atol=5e-5, rtol=0)


@pytest.mark.parametrize("seed", range(25))
def test_padded_rows_have_the_loss_and_gradients_of_transformers(seed: int) -> None:
    twin = theirs(seed)
    model = ours_from_hf(twin)
    rows = [token_ids(9, seed=seed).tolist(), token_ids(5, seed=seed + 1).tolist()]
    batch = padded_batch(rows, 0, "left")
    labels = batch.idx.masked_fill(batch.positions <= 0, IGNORE)
    want = twin(
        batch.idx,
        attention_mask=(batch.positions >= 0).long(),
        position_ids=batch.positions.clamp(min=0),
        labels=labels,
    )
    want.loss.backward()
    loss = causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets)
    loss.backward()
    torch.testing.assert_close(loss, want.loss, atol=1e-5, rtol=0)
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=2e-4, rtol=2e-4, msg=name)
    with torch.no_grad():
        alone = model(torch.tensor([rows[1]]))[0]
        fed = in_chunks(batch.idx, [4, 3, 1, 1], batch.positions, model=model)
        packed = model(
            torch.tensor([rows[0] + rows[1]]),
            positions=torch.tensor([[*range(9), *range(5)]]),
            documents=torch.tensor([[0] * 9 + [1] * 5]),
        )
    torch.testing.assert_close(fed[1, 4:], alone, atol=5e-5, rtol=0)
    torch.testing.assert_close(packed[0, 9:], alone, atol=5e-5, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_a_folder_comes_back_as_the_model_that_it_was(seed: int, tmp_path) -> None:
    model = ours_from_hf(theirs(seed))
    idx = token_ids(1, 12)
    twin = twin_of(model)
    assert twin.config.model_type == "deepseek_v3"
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)
    save_pretrained(model, tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert again.config == model.config
    assert torch.equal(again(idx), model(idx))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "rope_interleave": False},
        {"first_k_dense_replace": 1, "n_shared_experts": 2},
    ],
)
def test_a_model_made_here_is_read_by_transformers(changes) -> None:
    model = tiny_deepseek_v3(**changes)
    assert len(enlarge_biases_(model)) == (2 if "first_k_dense_replace" in changes else 0)
    twin, idx = twin_of(model), token_ids(2, 9)
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@torch.no_grad()
def test_every_kind_of_attention_and_greedy_text(kind: str) -> None:
    model = tiny_deepseek_v3(first_k_dense_replace=1)
    twin, idx = twin_of(model), token_ids(1, 6)
    use_attention_(model, kind)
    torch.testing.assert_close(model(idx), twin(idx).logits, atol=5e-5, rtol=0)
    want = twin.generate(idx, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert complete(generate(model, idx, 9, GREEDY)) == want[:, 6:].tolist()


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
    found = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    assert found == want


def test_the_published_size() -> None:
    """671 billion parameters, of which a token meets 37, without the layer that drafts; of the
    embedding it meets one row."""
    with torch.device("meta"):
        model = build(DeepseekV3Config())
    total, active = sum(p.numel() for p in model.parameters()), active_parameters(model)
    active -= model.model.embed_tokens.weight.numel()
    assert (round(total / 1e9), round(active / 1e9)) == (671, 37)


def test_options_that_are_not_here_are_refused_by_name() -> None:
    for changes, message in [
        ({"n_kv_head": 2}, "n_kv_head=2 is not supported, only n_kv_head=4"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be an integer, at least 1"),
        ({"q_lora_rank": -1}, "q_lora_rank=-1 must be an integer, at least 1"),
        ({"rope_interleave": 1}, "rope_interleave=1 is not a bool"),
        ({"v_head_dim": 2.5}, "v_head_dim=2.5 must be an integer, at least 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be an integer, at least 0"),
        ({"n_group": 3}, "n_group=3 does not share out 8 experts"),
        ({"n_group": 8}, "n_group=8 does not share out 8 experts, 2 or more"),
        ({"top_group": 5}, "top_group=5 groups of 2 have no 3 experts to choose from n_group=4"),
        ({"top_k": 5}, "top_group=2 groups of 2 have no 5 experts"),
        ({"top_k": 9}, "top_k=9 exceeds n_expert=8"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 must be an integer, at least 1"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 must be a positive number"),
    ]:
        with pytest.raises(ValueError, match=message):
            DeepseekV3Config(**{**DEEPSEEK_V3, **changes})
    with pytest.raises(ValueError, match="attention_bias=True is not supported, only"):
        config_from_dict({"model_type": "deepseek_v3", "attention_bias": True})
    with pytest.raises(ValueError, match=r"head_dim=7 is odd.*\(qk_rope_head_dim in the file\)"):
        config_from_dict({"model_type": "deepseek_v3", "qk_rope_head_dim": 7})
    with pytest.raises(ValueError, match=r"top_group=9 groups.*\(topk_group in the file\)"):
        config_from_dict({"model_type": "deepseek_v3", "topk_group": 9})
    linear = {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}
    with pytest.raises(ValueError, match=r"mscale_all_dim=1\.0 is not supported with rope_type="):
        config_from_dict({"model_type": "deepseek_v3", "rope_parameters": linear})
    with pytest.raises(ValueError, match=r"windows=.* cannot be those of a deepseek_v3"):
        config_to_dict(DeepseekV3Config(sliding_window=8, max_window_layers=0))


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    from transformers import AutoConfig

    ours = config_from_dict({"model_type": "deepseek_v3"})
    defaults, written = AutoConfig.for_model("deepseek_v3"), config_to_dict(ours, "deepseek_v3")
    assert ours == DeepseekV3Config()
    skipped = {"architectures", "rope_parameters", "rope_scaling"}
    for key in {*written} & {*defaults.to_dict()} - skipped:
        assert getattr(defaults, key) == written[key], key
    assert written.keys() >= {"kv_lora_rank", "qk_rope_head_dim", "first_k_dense_replace"}
    assert written.keys() >= {"n_routed_experts", "topk_group", "moe_intermediate_size"}


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
