"""What Qwen2 may not do, on tiny random models with large weights. That it computes what
transformers does: tests/parity."""

import copy
import dataclasses
import json

import pytest
import torch
from caches import in_chunks
from tiny_models import QWEN2, ROPES, hf_twin, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.attention.masks import allowed_from_additive_mask, positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.cache.slots import StaticCache
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.layers.gated_mlp import GatedMLP, swiglu
from lm_from_scratch.layers.norm import RMSNorm, rms_norm
from lm_from_scratch.layers.rope_scaling import LinearScaling
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.text.targets import next_token_targets

# ----------------------------------------------------------------------------------------- defects


def test_flex_has_no_gradient_on_a_cpu() -> None:
    model = tiny_qwen2()
    use_attention_(model, "flex")
    with pytest.raises(ValueError, match="no backward pass on a CPU"):
        model(token_ids(2, 9))


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def visible_keys(model: Qwen2ForCausalLM, idx: torch.Tensor) -> list[int]:
    """How many keys the last query sees, by layer."""
    with record_attention(model) as maps:
        model(idx)
    return [int((layer[0][0, 0, -1] > 0).sum()) for layer in maps]


@pytest.mark.parametrize("window", [1, 2, 4, 12, 40])
def test_a_window_counts_the_query_itself(window: int) -> None:
    model = tiny_qwen2(sliding_window=window, max_window_layers=0)
    assert visible_keys(model, token_ids(1, 12)) == [min(window, 12)] * 3


def test_layers_from_max_window_layers_on_slide() -> None:
    idx = token_ids(1, 12)
    upper = tiny_qwen2(n_layer=4, sliding_window=4, max_window_layers=2)
    lower = tiny_qwen2(n_layer=4, sliding_window=4, layer_types=(SLIDING, SLIDING, FULL, FULL))
    assert visible_keys(upper, idx) == [12, 12, 4, 4]
    assert visible_keys(lower, idx) == [4, 4, 12, 12]  # the convention of 4.42
    assert error(upper(idx), lower(idx)) > 1.0
    assert error(upper(idx), tiny_qwen2(n_layer=4)(idx)) > 1.0  # as if there was no window


def test_the_switch_turns_the_window_off() -> None:
    on = config_to_dict(Qwen2Config(**QWEN2, sliding_window=4, max_window_layers=0))
    old = {k: v for k, v in on.items() if k not in ("layer_types", "max_window_layers")}
    assert config_from_dict({**old, "max_window_layers": 1}).windows == [None, 4, 4]
    off = config_from_dict({**old, "max_window_layers": 1, "use_sliding_window": False})
    assert off.windows == [None, None, None] and off.sliding_window is None
    with pytest.raises(ValueError, match="use_sliding_window=False"):
        config_from_dict({**on, "use_sliding_window": False})


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@torch.no_grad()
def test_attention_weights_come_out_of_any_kind(kind: str) -> None:
    model, idx = tiny_qwen2(), token_ids(2, 9)
    use_attention_(model, kind)
    before = model(idx)
    with record_attention(model) as maps:
        assert torch.equal(model(idx), before)
    assert [len(layer) for layer in maps] == [1, 1, 1]
    assert maps[0][0].shape == (2, 6, 9, 9)
    torch.testing.assert_close(maps[2][0].sum(-1), torch.ones(2, 6, 9))


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("window", [None, 3])
def test_every_kind_reads_a_static_cache_with_unused_slots(kind: str, window) -> None:
    slides = {} if window is None else {"sliding_window": window, "max_window_layers": 1}
    model, idx = tiny_qwen2(**slides), token_ids(2, 12)
    want = model(idx)
    use_attention_(model, kind)
    cache = StaticCache(3, capacity=16)
    with torch.no_grad():
        model(idx, cache=cache)  # so that the unused slots hold something
        cache.reset()
        parts = [model(part, cache=cache) for part in idx.split([5, 1, 3, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=5e-5, rtol=0)


def test_recording_with_a_static_cache_loses_no_argument() -> None:
    model, idx = tiny_qwen2(), token_ids(2, 8)
    cache = StaticCache(3, capacity=16)
    with torch.no_grad(), record_attention(model) as maps:
        model(idx[:, :5], cache=cache)
        model(idx[:, 5:], cache=cache)
    with record_attention(model) as want:
        model(idx)
    for got, whole in zip(maps, want, strict=True):
        assert got[1].shape == (2, 6, 3, 16)  # unused slots are there, and weigh nothing
        torch.testing.assert_close(got[1][..., :8], whole[0][:, :, 5:], atol=1e-5, rtol=0)
        assert (got[1][..., 8:] == 0).all()


def test_positions_may_be_anything() -> None:
    model, idx = tiny_qwen2(block_size=16), token_ids(1, 6)
    twin = hf_twin(model)
    for positions in ([7, 8, 9, 40, 41, 300], [100000, 100001, 100002, 100003, 100004, 100005]):
        ids = torch.tensor([positions])
        want = twin(idx, position_ids=ids, attention_mask=torch.ones(1, 6)).logits
        torch.testing.assert_close(model(idx, positions=ids), want, atol=5e-4, rtol=0)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    straight, mixed = model(idx), model(idx[:, order], positions=order[None])
    torch.testing.assert_close(mixed, straight[:, order], atol=5e-5, rtol=0)


def test_a_model_from_the_meta_device_is_whole() -> None:
    want, idx = tiny_qwen2(), token_ids(2, 9)
    with torch.device("meta"):
        skeleton = Qwen2ForCausalLM(want.config)
    emptied = copy.deepcopy(skeleton).to_empty(device="cpu")
    emptied.load_state_dict(want.state_dict())
    skeleton.load_state_dict(want.state_dict(), assign=True)
    assert torch.equal(skeleton.eval()(idx), want(idx))
    assert torch.equal(emptied.eval()(idx), want(idx))


def test_a_forward_returns_logits_and_writes_the_cache_that_it_was_given() -> None:
    model, idx = tiny_qwen2(), token_ids(2, 6)
    cache = GrowingCache(3)
    with torch.no_grad():
        logits = model(idx[:, :4], cache=cache)
        assert type(logits) is type(model(idx)) is torch.Tensor
        assert cache.length == 4
        model(idx[:, 4:], cache=cache)
    assert type(cache) is GrowingCache and cache.length == 6
    assert [*model.buffers()] == []  # no table of angles, and no cache


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_strong_negative_scores_in_half_precision_give_no_nan(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = (torch.randn(2, 6, 5, 8, generator=generator) * 40).half()
    k, v = (-q[:, ::3]).clone(), torch.randn(2, 2, 5, 8, generator=generator).half()
    positions = torch.tensor([[-1, -1, -1, 0, 1], [0, 1, 2, 3, 4]])
    visibility = Visibility(positions, positions)
    out = ATTENTION_KINDS[kind](q, k, v, visibility, 0.0)
    assert out.isfinite().all()
    want = ATTENTION_KINDS["formula"](q.double(), k.double(), v.double(), visibility, 0.0)
    torch.testing.assert_close(out.double(), want, atol=5e-3, rtol=0)


def test_float64_stays_float64() -> None:
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight))
    model, idx = tiny_qwen2().double(), token_ids(2, 12)
    whole = model(idx)
    assert whole.dtype == torch.float64
    angles = model.model.rotary_emb(torch.tensor([[123456]]), torch.float64)
    assert angles[0].dtype == torch.float64
    # a float32 inside would show: the model is exact when all its positions move together
    moved = model(idx, positions=torch.arange(100_000, 100_012).expand(2, -1))
    assert error(moved, whole) < 1e-8
    assert error(in_chunks(idx, [5, 1, 3, 3], model=model), whole) < 1e-12
    use_attention_(model, "formula")
    assert error(model(idx), whole) < 1e-12


def test_generation_feeds_each_token_once() -> None:
    model = tiny_qwen2()
    fed = []
    model.model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape))
    prompts = [token_ids(5).tolist(), token_ids(3, seed=2).tolist()]
    greedy = Sampler(temperature=0)
    rows = complete(generate(model, prompts, 4, greedy))
    assert fed == [(2, 5), (2, 1), (2, 1), (2, 1)]
    for prompt, row in zip(prompts, rows, strict=True):
        assert complete(generate(model, [prompt], 4, greedy)) == [row]
    idx = token_ids(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(idx, cache=GrowingCache(3)), model(idx))


def test_logits_only_where_they_are_wanted() -> None:
    """Nowhere else are they computed."""
    model, shapes = tiny_qwen2(), []
    model.head.product = lambda x, weight: shapes.append(x.shape) or x @ weight.T
    model(token_ids(2, 9), keep=slice(-1, None))
    assert shapes == [(2, 1, 48)]


def test_no_layer_needs_to_know_its_number() -> None:
    model, idx = tiny_qwen2(), token_ids(1, 6)
    attention = model.model.layers[1].self_attn
    x = model.model.embed_tokens(idx)
    rotation = model.model.rotary_emb(torch.arange(6)[None], x.dtype)
    cache = GrowingCache(1)
    (visibility,) = cache.see(x)
    with torch.no_grad():
        alone = attention(x, rotation, visibility, cache[0])
    assert alone.shape == (1, 6, 48)
    with pytest.raises(ValueError, match="the cache has 2 layers, the model 3"):
        model(idx, cache=GrowingCache(2))


def test_masks_are_checked_before_they_are_used() -> None:
    model, idx = tiny_qwen2(), token_ids(2, 5)
    good = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    want = model(idx, positions=positions_from_mask(good))
    for mask in (good.bool(), good.float(), good.to(torch.uint8)):
        assert torch.equal(model(idx, positions=positions_from_mask(mask)), want)
    with pytest.raises(ValueError, match=r"\(2, 1, 5, 5\)"):
        positions_from_mask(torch.zeros(2, 1, 5, 5))
    for width in (4, 6):
        with pytest.raises(ValueError, match=rf"\(2, {width}\), the tokens \(2, 5\)"):
            model(idx, positions=positions_from_mask(torch.ones(2, width)))
    nothing = positions_from_mask(torch.tensor([[0] * 5, [1] * 5]))
    out = model(idx, positions=nothing)
    assert out.isfinite().all()  # a row without any token is no reason for a NaN
    torch.testing.assert_close(out[1], model(idx[1:])[0], atol=5e-5, rtol=0)


def prefix_mask(B: int, T: int, prefix: int) -> torch.Tensor:
    """A tree of two branches behind a common prefix: the second does not see the first."""
    allowed = torch.ones(B, 1, T, T, dtype=torch.bool)
    middle = (prefix + T) // 2
    allowed[:, :, middle:, prefix:middle] = False
    return allowed


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@torch.no_grad()
def test_a_mask_of_four_dimensions_restricts_every_kind_as_in_transformers(kind) -> None:
    model, idx = tiny_qwen2(), token_ids(2, 9)
    allowed = prefix_mask(2, 9, 3)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(
        ~(allowed & torch.ones(9, 9).tril().bool()), torch.finfo(torch.float32).min
    )
    want = hf_twin(model)(idx, attention_mask=additive).logits
    use_attention_(model, kind)
    view = Restricted(NO_CACHE, allowed_from_additive_mask(additive))
    if kind == "packed":
        with pytest.raises(ValueError, match="no mask of its own"):
            model(idx, cache=view)
        return
    torch.testing.assert_close(model(idx, cache=view), want, atol=5e-5, rtol=0)
    assert error(model(idx), want) > 0.5
    half = allowed.clone()
    half[:, :, :, :4] = True
    rest = allowed.clone()
    rest[:, :, :, 4:] = True
    both = Restricted(Restricted(NO_CACHE, half), rest)
    torch.testing.assert_close(model(idx, cache=both), want, atol=5e-5, rtol=0)
    cache = GrowingCache(3)
    parts = [
        model(idx[:, a:b], cache=Restricted(cache, allowed[:, :, a:b, :b]))
        for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=5e-5, rtol=0)
    with record_attention(model) as maps:
        model(idx, cache=view)
    assert (maps[0][0][:, :, 7, 3:6] == 0).all()


def test_bad_masks_of_four_dimensions_are_refused() -> None:
    model, idx = tiny_qwen2(), token_ids(2, 5)
    for bad in (torch.ones(2, 1, 5, 5), torch.full((2, 1, 5, 5), -10000.0)):
        with pytest.raises(ValueError, match="0 and the most negative number"):
            allowed_from_additive_mask(bad)
    with pytest.raises(ValueError, match=r"int64 of shape \(2, 5\)"):
        allowed_from_additive_mask(torch.ones(2, 5).long())
    for bad in (torch.ones(2, 1, 5, 4).bool(), torch.ones(2, 1, 5, 5), torch.ones(5, 5).bool()):
        with pytest.raises(ValueError, match="allowed is"):
            model(idx, cache=Restricted(NO_CACHE, bad))
    with pytest.raises(ValueError, match="0 and the most negative number"):
        allowed_from_additive_mask(torch.full((1, 1, 5, 5), -3e38))
    with pytest.raises(ValueError, match="2 rows, but the visibility has 3"):
        model(idx, cache=Restricted(NO_CACHE, torch.ones(3, 1, 5, 5).bool()))
    nothing = allowed_from_additive_mask(torch.full((1, 1, 5, 5), -torch.inf))
    assert model(idx, cache=Restricted(NO_CACHE, nothing)).isfinite().all()


# ------------------------------------------------------------------------------------ capabilities


@pytest.mark.parametrize(
    ("make", "embedding"),
    [(tiny_gpt2, "transformer.wte.weight"), (tiny_qwen2, "model.embed_tokens.weight")],
)
def test_embeddings_may_be_given_instead_of_tokens(make, embedding: str) -> None:
    model, idx = make(), token_ids(2, 9)
    C, table = model.config.n_embd, dict(model.named_parameters())[embedding]
    x = table[idx]
    assert torch.equal(model(x), model(idx))
    with pytest.raises(ValueError, match=rf"shape \(2, 9\).*n_embd={C}"):
        model(x[..., 0])
    with pytest.raises(ValueError, match=rf"shape \(2, 9, {C - 1}\).*n_embd={C}"):
        model(x[..., 1:])
    with pytest.raises(ValueError, match=rf"shape \(2, 9, {C}\)"):
        model(x.long())


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r['rope_type']}-{r['rope_theta']:.0f}")
@pytest.mark.parametrize("old", [False, True])
def test_old_and_new_rope_configs_are_read_as_transformers_reads_them(
    rope: dict, old: bool, tmp_path
) -> None:
    from transformers import Qwen2ForCausalLM as HFModel

    config = config_to_dict(Qwen2Config(**QWEN2))
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(key, None)
    if old:
        rest = {k: v for k, v in rope.items() if k != "rope_theta"}
        scaling = None if rope["rope_type"] == "default" else rest
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    else:
        config["rope_parameters"] = rope
    config["max_position_embeddings"] = 64  # longer than what transformers assumes of a scaling
    save_pretrained(tiny_qwen2(), tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    theirs = HFModel.from_pretrained(tmp_path / "m").eval()  # both read the same file
    ours = from_pretrained(tmp_path / "m")
    assert ours.config.rope_theta == rope["rope_theta"]
    idx = token_ids(1, 150)
    torch.testing.assert_close(ours(idx), theirs(idx).logits, atol=2e-4, rtol=0)
    assert config_from_dict(config_to_dict(ours.config)) == ours.config
    if rope["rope_type"] != "default":
        plain = tiny_qwen2(rope_theta=rope["rope_theta"])
        assert error(plain(idx), ours(idx)) > 0.5


def test_a_config_without_some_keys_means_what_transformers_means() -> None:
    from transformers import Qwen2Config as HFConfig

    assert config_from_dict({"model_type": "qwen2", "num_key_value_heads": None}).n_kv_head == 32
    slides = {"model_type": "qwen2", "use_sliding_window": True}
    theirs = HFConfig(use_sliding_window=True)
    ours = config_to_dict(config_from_dict(slides))
    for key in ("layer_types", "sliding_window", "max_window_layers"):
        assert ours[key] == getattr(theirs, key), key
    several = config_from_dict({"model_type": "qwen2", "eos_token_id": [7, 9]})
    assert several.eos_token_id == (7, 9)


@torch.no_grad()
def test_packed_documents_equal_each_document_alone() -> None:
    model, idx = tiny_qwen2(sliding_window=3, max_window_layers=1), token_ids(1, 11)
    documents = torch.tensor([[0] * 4 + [1] * 1 + [2] * 6])
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]])
    for kind in ATTENTION_KINDS:
        use_attention_(model, kind)
        packed = model(idx, positions=positions, documents=documents)
        alone = torch.cat([model(part) for part in idx.split([4, 1, 6], dim=1)], dim=1)
        torch.testing.assert_close(packed, alone, atol=3e-5, rtol=0)


def test_left_padding_needs_no_positions_but_a_hidden_pad() -> None:
    """A rotation is relative: counting the pads changes nothing, seeing them does."""
    model, idx = tiny_qwen2(), token_ids(2, 9)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), idx], dim=1)
    counted = torch.where(torch.arange(13) < 4, -1, torch.arange(13)).expand(2, -1)
    torch.testing.assert_close(
        model(padded, positions=counted)[:, 4:], model(idx), atol=5e-5, rtol=0
    )
    assert error(model(padded)[:, 4:], model(idx)) > 1.0


def test_weights_are_large_enough_to_show_a_bug() -> None:
    """At std 0.02 a model without any rotation hardly differs."""
    for std, low, high in ((0.25, 1.0, 99.0), (0.02, 0.0, 0.1)):
        model, idx = tiny_qwen2(std=std), token_ids(2, 12)
        before = model(idx)
        model.model.rotary_emb.forward = lambda p, d: (
            torch.ones(1, 1, 1, 4),
            torch.zeros(1, 1, 1, 4),
        )
        assert low < error(model(idx), before) < high


def test_fresh_weights_are_drawn_as_the_config_says() -> None:
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(**{**QWEN2, "vocab_size": 997, "n_embd": 96, "initializer_range": 0.03})
    )
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            assert (tensor == 0).all()
        elif "norm" in name:
            assert (tensor == 1).all()
        else:
            assert abs(tensor.std().item() - 0.03) < 1.5e-3, name
    assert (model.model.embed_tokens.weight[0] == 0).all()  # the padding row


def test_attention_dropout_acts_in_training_alone() -> None:
    model, idx = tiny_qwen2(attention_dropout=0.4), token_ids(2, 9)
    assert torch.equal(model(idx), model(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))


def test_a_config_is_plain_data() -> None:
    config = Qwen2Config(**QWEN2, rope_scaling=LinearScaling(factor=2.0))
    assert json.loads(json.dumps(dataclasses.asdict(config)))["rope_scaling"] == {"factor": 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layer = 4
    assert config.head_dim == 8
    assert next_token_targets(token_ids(1, 3)).shape == (1, 3)


def test_documents_pass_through_a_restriction() -> None:
    model, idx = tiny_qwen2(), token_ids(1, 8)
    documents = torch.tensor([[0] * 4 + [1] * 4])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    everything = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    got = model(
        idx, positions=positions, documents=documents, cache=Restricted(NO_CACHE, everything)
    )
    torch.testing.assert_close(
        got, model(idx, positions=positions, documents=documents), atol=5e-5, rtol=0
    )


def test_difference_from_transformers_the_padding_row_of_the_embedding_learns() -> None:
    model = tiny_qwen2()
    twin = hf_twin(model)
    idx = token_ids(1, 6)
    idx[0, 2] = 0  # the padding token as a token of the text
    model(idx).square().mean().backward()
    twin(idx, attention_mask=torch.ones_like(idx)).logits.square().mean().backward()
    assert model.model.embed_tokens.weight.grad[0].abs().max() > 1e-3
    assert (twin.model.embed_tokens.weight.grad[0] == 0).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_two_replacements_let_torch_func_take_a_gradient_for_each_example() -> None:
    model, idx = tiny_qwen2(), token_ids(3, 7)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.normalise = rms_norm
        elif isinstance(module, GatedMLP):
            module.product = swiglu

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],)).logsumexp(-1).sum()

    own = dict(model.named_parameters())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, idx)
    for i, row in enumerate(idx):
        want = torch.autograd.grad(loss(own, row), list(own.values()))
        for gradients, g in zip(each.values(), want, strict=True):
            torch.testing.assert_close(gradients[i], g, atol=1e-4, rtol=1e-4)
