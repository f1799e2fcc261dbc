"""The indexer as a module: DeepSeek-V3.2's own, its small cache, and what it may not touch."""

import random
from typing import Any

import pytest
import torch
from tiny_models import enlarge_, tiny_qwen2, token_ids

from lm_from_scratch.attention.indexer import choose, indexer_loss, sparse_attention
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import CatCache, GrowingCache
from lm_from_scratch.instruments.record import record_attention, record_hidden_states
from lm_from_scratch.layers.rope import RotaryEmbedding
from lm_from_scratch.models.indexed_attention import IndexedAttention, Indexer, choosing
from lm_from_scratch.training.loss import causal_lm_loss


def sizes(seed: int) -> dict[str, Any]:
    """Sizes of an indexer in the words of transformers, no two alike by chance."""
    draw = random.Random(f"indexer {seed}")
    turning = draw.choice([2, 4, 8])
    return dict(
        hidden_size=draw.choice([20, 28]),
        q_lora_rank=draw.choice([12, 18]),
        index_n_heads=draw.choice([1, 2, 3, 8]),
        index_head_dim=turning + draw.choice([0, 2, 5]),
        qk_rope_head_dim=turning,
        index_topk=draw.choice([1, 3, 6, 20]),
        rope_parameters={"rope_type": "default", "rope_theta": draw.choice([100.0, 10000.0])},
    )


def pair(seed: int) -> tuple[Any, Indexer, RotaryEmbedding]:
    """Theirs and ours with the same weights, and the rotation."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

    config = hf.DeepseekV32Config(**sizes(seed))
    twin = hf.DeepseekV32Indexer(config, 0).eval()
    enlarge_(twin, seed)
    ours = Indexer(
        config.hidden_size, config.index_n_heads, config.index_head_dim, config.index_topk,
        config.q_lora_rank,
    )  # fmt: skip
    ours.load_state_dict(twin.state_dict())
    theta = config.rope_parameters["rope_theta"]
    return twin, ours, RotaryEmbedding(config.qk_rope_head_dim, theta)


def inputs(seed: int, T: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    generator, shape = torch.Generator().manual_seed(seed), sizes(seed)
    x = torch.randn(2, T, shape["hidden_size"], generator=generator)
    return x, torch.randn(2, T, shape["q_lora_rank"], generator=generator)


def theirs(
    twin: Any, x: torch.Tensor, latent: torch.Tensor, rotation: Any, seen: Visibility
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores that their `topk` gets, and the columns that it gives."""
    caught, topk = [], torch.Tensor.topk

    def recording(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caught.append(self)
        return topk(self, *args, **kwargs)

    cos, sin = (torch.cat([part, part], dim=-1)[:, 0] for part in rotation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", recording)
        columns = twin(x, latent, (cos, sin), seen.mask[:, 0], None)
    return caught[0], columns


def same_choice(
    ours: torch.Tensor, columns: torch.Tensor, scores: torch.Tensor, seen: Visibility
) -> int:
    """How many queries have a tie at the border. Every other one has the same keys as theirs; where
    there is a tie, the scores of the keys are the same."""
    ties = 0
    visible = seen.mask[:, 0].expand_as(scores)
    for b, t in torch.cartesian_prod(torch.arange(ours.shape[0]), torch.arange(ours.shape[1])):
        row = scores[b, t]
        mine = [s for s in ours[b, t].tolist() if s >= 0]
        hers = [s for s in columns[b, t].tolist() if visible[b, t, s]]
        assert len(mine) == len(hers)
        left = [s for s in visible[b, t].nonzero().flatten().tolist() if s not in mine]
        tie = bool(mine and left) and float(row[mine].min() - row[left].max()) < 1e-6
        ties += tie
        if not tie:
            assert set(mine) == set(hers)
        torch.testing.assert_close(row[mine].sort().values, row[hers].sort().values)
    return ties


@pytest.mark.parametrize("seed", range(25))
@torch.no_grad()
def test_scores_and_choices_are_those_of_transformers(seed: int) -> None:
    twin, ours, rotary = pair(seed)
    x, latent = inputs(seed)
    places = torch.arange(13)[None]
    seen, rotation = Visibility(places, places, dense=True), rotary(places, x.dtype)
    want, columns = theirs(twin, x, latent, rotation, seen)
    scores = ours.scores(x, rotation, latent=latent)
    visible = seen.mask[:, 0].expand_as(scores)
    torch.testing.assert_close(scores[visible], want[visible], atol=5e-5, rtol=1e-5)
    same_choice(ours(x, rotation, seen, latent=latent), columns, want, seen)


@pytest.mark.parametrize("seed", range(25, 50))
@torch.no_grad()
def test_left_padded_rows_choose_as_in_transformers_and_as_alone(seed: int) -> None:
    twin, ours, rotary = pair(seed)
    x, latent = inputs(seed)
    positions = positions_from_mask(torch.tensor([[1] * 13, [0] * 4 + [1] * 9]))
    seen, rotation = Visibility(positions, positions), rotary(positions, x.dtype)
    want, columns = theirs(twin, x, latent, rotation, seen)
    chosen = ours(x, rotation, seen, latent=latent)
    same_choice(chosen[:, 4:], columns[:, 4:], want[:, 4:], replace_queries(seen, 4))
    places = torch.arange(9)[None]
    alone = ours(
        x[1:, 4:], rotary(places, x.dtype), Visibility(places, places), latent=latent[1:, 4:]
    )
    moved = torch.where(alone >= 0, alone + 4, -1)
    assert torch.equal(chosen[1:, 4:, : moved.shape[-1]], moved)


@pytest.mark.parametrize("seed", range(25))
def test_gradients_are_those_of_the_scores_of_transformers(seed: int) -> None:
    """Their module runs without gradients: here it runs with them, up to its choice. In float64: a
    product that rounding takes across 0 would have its gradient in one of them only."""
    twin, ours, rotary = pair(seed)
    twin, ours = twin.double(), ours.double()
    x, latent = (part.double() for part in inputs(seed))
    places = torch.arange(13)[None]
    seen, rotation = Visibility(places, places, dense=True), rotary(places, x.dtype)
    upstream = torch.randn(2, 13, 13, generator=torch.Generator().manual_seed(seed))
    upstream = upstream.double().masked_fill(~seen.mask[:, 0], 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(twin), "forward", type(twin).forward.__wrapped__)
        want, _ = theirs(twin, x, latent, rotation, seen)
    (want.masked_fill(~seen.mask[:, 0], 0.0) * upstream).sum().backward()
    (ours.scores(x, rotation, latent=latent) * upstream).sum().backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)


def replace_queries(seen: Visibility, start: int) -> Visibility:
    return Visibility(seen.query_positions[:, start:], seen.key_positions)


def test_ties_are_where_we_differ_on_purpose() -> None:
    """One head: a query often has too few positive scores, and the rest are exactly 0."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

    seeds = [seed for seed in range(50) if sizes(seed)["index_n_heads"] == 1]
    assert hf.DeepseekV32Indexer and len(seeds) >= 4
    ties = 0
    for seed in seeds:
        twin, ours, rotary = pair(seed)
        x, latent = inputs(seed)
        places = torch.arange(13)[None]
        seen, rotation = Visibility(places, places, dense=True), rotary(places, x.dtype)
        want, columns = theirs(twin, x, latent, rotation, seen)
        ties += same_choice(ours(x, rotation, seen, latent=latent), columns, want, seen)
    assert ties > 20


@pytest.mark.parametrize("seed", range(25))
@torch.no_grad()
def test_attention_over_their_choice_is_theirs(seed: int) -> None:
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

    places = torch.arange(13)[None]
    seen = Visibility(places, places, dense=True)
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 2, 4, 13, 6).unbind()
    chosen = choose(torch.randn(2, 13, 13), seen, 1 + seed % 14)
    hidden = torch.ones(2, 13, 13, dtype=torch.bool).scatter(-1, chosen.clamp(min=0), False)
    mask = torch.zeros(2, 1, 13, 13).masked_fill(hidden[:, None] | ~seen.mask, -torch.inf)
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    want, _ = hf.eager_attention_forward(module, q, k, v, mask, scaling=6**-0.5)
    got = sparse_attention(q, k, v, seen, chosen)
    torch.testing.assert_close(got.transpose(1, 2), want, atol=5e-5, rtol=0)


@pytest.mark.parametrize("cache", ["cat", "growing"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@torch.no_grad()
def test_chunks_choose_what_one_pass_chooses(seed: int, cache: str) -> None:
    _, ours, rotary = pair(seed)
    ours = ours.double()
    x, latent = (part.double() for part in inputs(seed))
    places = torch.arange(13)[None]
    full = ours(x, rotary(places, x.dtype), Visibility(places, places), latent=latent)
    growing, cat = GrowingCache(1), CatCache()
    start = 0
    for size in (5, 1, 1, 4, 2):
        now = slice(start, start + size)
        if cache == "growing":
            (seen,), layer = growing.see(x[:, now]), growing[0]
        else:
            seen, layer = Visibility(places[:, now], places[:, : start + size]), cat
        rotation = rotary(seen.query_positions, x.dtype)
        chosen = ours(x[:, now], rotation, seen, layer, latent[:, now])
        K = min(chosen.shape[-1], full.shape[-1])
        assert torch.equal(chosen[..., :K], full[:, now, :K])
        assert (full[:, now, K:] == -1).all()
        start += size
    if cache == "growing":
        assert growing.length == 13


def test_the_rotation_must_fit() -> None:
    indexer = Indexer(20, 2, 6, 3)
    places = torch.arange(4)[None]
    with pytest.raises(ValueError, match="turns 8 features of head_dim=6"):
        indexer.scores(torch.randn(1, 4, 20), RotaryEmbedding(8)(places, torch.float32))
    with pytest.raises(ValueError, match="count=0 must be an integer, at least 1"):
        Indexer(20, 2, 6, 0)


# ------------------------------------------------------------------------------ in a built model


def indexed(count: int, seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A Qwen2, and the same whose layers have indexers."""
    plain, model = tiny_qwen2(seed), tiny_qwen2(seed)
    for block in model.model.layers:
        indexer = Indexer(48, 2, 8, count)
        enlarge_(indexer, seed)
        block.self_attn = IndexedAttention(block.self_attn, indexer)
    return plain, model


@torch.no_grad()
def test_a_model_whose_indexers_choose_everything_is_the_model() -> None:
    plain, model = indexed(count=12)
    idx = token_ids(2, 12)
    torch.testing.assert_close(model(idx), plain(idx), atol=5e-5, rtol=0)
    assert (indexed(count=3)[1](idx) - plain(idx)).abs().max() > 0.1


@torch.no_grad()
def test_what_is_read_later_or_in_another_row_changes_nothing() -> None:
    _, model = indexed(count=3)
    model.double()
    rows = token_ids(2, 20)
    want = model(rows)
    torch.testing.assert_close(model(rows[:, :11]), want[:, :11])
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), rows[:1, :9]], dim=1)
    positions = torch.tensor([[-1] * 4 + [*range(9)]])
    torch.testing.assert_close(model(padded, positions=positions)[:, 4:], want[:1, :9])
    packed = torch.cat([rows[:1, :9], rows[1:, :7]], dim=1)
    positions = torch.tensor([[*range(9), *range(7)]])
    documents = torch.tensor([[0] * 9 + [1] * 7])
    got = model(packed, positions=positions, documents=documents)
    torch.testing.assert_close(got, torch.cat([want[:1, :9], want[1:, :7]], dim=1))


def test_neither_loss_reaches_the_other_side() -> None:
    """The loss of the language model leaves the indexers alone, and theirs leaves the model."""
    _, model = indexed(count=3)
    idx = token_ids(2, 12)
    causal_lm_loss(model(idx), token_ids(2, 12, seed=5)).backward()
    own = {name for name, _ in model.named_parameters() if ".indexer." in name}
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name in own), name
    model.zero_grad()
    places = torch.arange(12)[None]
    seen = Visibility(places, places, dense=True)
    with record_hidden_states(model, detach=False) as states:
        model(idx)
    block = model.model.layers[1]
    rotation = model.model.rotary_emb(places, torch.float32)
    rotation = tuple(part[..., :4] for part in rotation)
    weights = torch.rand(2, 6, 12, 12, requires_grad=True)
    x = block.input_layernorm(states[1][0])
    assert x.requires_grad
    indexer_loss(block.self_attn.indexer.scores(x, rotation), weights, seen).backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {name for name in own if name.startswith("model.layers.1.")}
    assert weights.grad is None


def test_an_indexer_learns_where_a_layer_looks() -> None:
    plain = tiny_qwen2(std=0.1)
    idx, places = token_ids(4, 24), torch.arange(24)[None]
    seen = Visibility(places, places, dense=True)
    rotation = plain.model.rotary_emb(places, torch.float32)
    with torch.no_grad(), record_attention(plain) as maps, record_hidden_states(plain) as states:
        plain(idx)
    x = plain.model.layers[2].input_layernorm(states[2][0])
    torch.manual_seed(0)
    indexer = Indexer(48, 4, 8, 4)
    optimizer = torch.optim.AdamW(indexer.parameters(), 0.02)
    losses = []
    for _ in range(60):
        losses.append(indexer_loss(indexer.scores(x, rotation), maps[2][0], seen))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_model_with_indexers_is_for_whole_texts() -> None:
    _, model = indexed(count=3)
    cache = GrowingCache(3)
    with torch.no_grad():
        model(token_ids(1, 5), cache=cache)
        with pytest.raises(ValueError, match=r"scores are \(1, 1, 1\).*1 queries and 6 keys"):
            model(token_ids(1, 1), cache=cache)


@torch.no_grad()
def test_indexers_are_there_for_one_block_of_code() -> None:
    plain, model = indexed(count=3)
    idx = token_ids(1, 12)
    before, few = plain(idx), model(idx)
    with choosing(plain, [block.self_attn.indexer for block in model.model.layers]):
        assert torch.equal(plain(idx), few)
    assert torch.equal(plain(idx), before)
    with pytest.raises(KeyError), choosing(plain, [lambda *_: {}["no"]] * 3):
        plain(idx)
    assert torch.equal(plain(idx), before)
    two = [model.model.layers[0].self_attn.indexer] * 2
    with pytest.raises(ValueError, match="are 2 indexers for 3 layers"), choosing(plain, two):
        pass
