"""visibility.py: positions from masks, and what is refused. What each rule hides is in
test_conformance.py."""

import pytest
import torch
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch._dynamo.testing import CompileCounter

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.cache.slots import StaticCache
from lm_from_scratch.generation.generate import decode, prefill
from lm_from_scratch.interop.caches import from_legacy, from_transformers
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier, last_token
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.classification_loss import token_classification_loss
from lm_from_scratch.training.objective import NextTokenLoss


def arange(n: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n)[None]


def test_masks_of_any_integer_or_bool_dtype_become_positions() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 0]])
    want = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, -1, 2, -1]])
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float32):
        assert torch.equal(positions_from_mask(mask.to(dtype)), want)
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        positions_from_mask(mask[0])
    with pytest.raises(ValueError, match="0 and 1"):
        positions_from_mask(mask * 2)
    with pytest.raises(ValueError, match="0 and 1"):
        positions_from_mask(torch.tensor([[0.0, -10000.0]]))


def test_a_mask_of_another_width_is_refused() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 5)
    with pytest.raises(ValueError, match=r"\(2, 1\), the tokens \(2, 5\)"):
        model(idx, positions=positions_from_mask(torch.ones(2, 1)))
    with pytest.raises(ValueError, match="integers"):
        model(idx, positions=torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_a_mask_in_second_place_is_not_taken_for_positions(make) -> None:
    """All ones as positions would let every token see every other."""
    model, idx = make(), token_ids(2, 5)
    mask = torch.ones(2, 5, dtype=torch.long)
    classifiers = SequenceClassifier(model.backbone, 3), TokenClassifier(model.backbone, 3)
    for reads in (model, model.backbone, *classifiers, NextTokenLoss(model)):
        given = (idx, idx) if isinstance(reads, NextTokenLoss) else (idx,)
        with pytest.raises(TypeError, match="positional argument"):
            reads(*given, mask)
        assert torch.isfinite(reads(*given, positions=positions_from_mask(mask))).all()
    states = model.backbone(idx)
    for function, given in (
        (classifiers[0].classify, (states,)),
        (token_classification_loss, (states, idx % 3)),
        (next_token_targets, (idx,)),
        (from_transformers, (None,)),
        (last_token, (states,)),
        (prefill, (model, idx, GrowingCache(2))),
        (decode, (model, idx[:, 0], GrowingCache(2))),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            function(*given, mask)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
@torch.no_grad()
def test_documents_packed_by_positions_alone_are_refused(make) -> None:
    """Their tokens would see each other: a position of a row is one token's, or there are numbers
    of documents. Padding has no position."""
    model, idx = make(), token_ids(2, 5)
    packed = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"row 1 has two tokens at position 0: .*documents="):
        model(idx, positions=packed)
    with pytest.raises(ValueError, match=r"row 0 has two tokens at position 1: .*_from_mask"):
        model(idx, positions=torch.ones(2, 5, dtype=torch.long))
    alone = model(idx[1:, 2:])
    together = model(idx, positions=packed, documents=(packed == 0).cumsum(dim=1))
    torch.testing.assert_close(together[1:, 2:], alone)
    model(idx, positions=torch.tensor([[-1, -1, 0, 1, 2], [4, 2, 0, 1, 3]]))
    for cache in (GrowingCache(3), StaticCache(3, 8)):
        with pytest.raises(
            ValueError, match=r"row 1 has .* at position 0: each document has a row"
        ):
            model(idx, positions=packed, cache=cache)
        model(idx, positions=torch.tensor([[-1, -1, 0, 1, 2]] * 2), cache=cache)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_siblings_in_a_tree_of_drafts_share_a_position(make) -> None:
    """Each says what the path to it says alone."""
    model, idx = make(), token_ids(1, 5)
    positions = torch.tensor([[0, 1, 2, 2, 3]])  # token 4 follows token 3
    allowed = torch.ones(5, 5).tril().bool()
    allowed[3:, 2] = False
    for cache in (NO_CACHE, GrowingCache(3)):
        with torch.no_grad():
            tree = model(idx, positions=positions, cache=Restricted(cache, allowed[None, None]))
        for path in ([0, 1, 2], [0, 1, 3, 4]):
            alone = model(idx[:, path])[:, -1]
            bound = 4e-6 * alone.abs().max().item()
            torch.testing.assert_close(tree[:, path[-1]], alone, atol=bound, rtol=0)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_positions_that_nobody_can_read_pass(make) -> None:
    positions = torch.tensor([[-1, 0, 1]])
    model = make().to("meta")
    logits = model(
        torch.zeros(1, 3, dtype=torch.long, device="meta"), positions=positions.to("meta")
    )
    assert logits.shape == (1, 3, model.config.vocab_size)


def test_a_mask_is_no_row_of_positions_in_a_cache() -> None:
    k = torch.zeros(2, 1, 5, 4)
    for mask in (torch.ones(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])):
        with pytest.raises(ValueError, match="positions must grow"):
            from_legacy([(k, k)], mask.long())
        from_legacy([(k, k)], positions_from_mask(mask))


def test_bad_visibility_is_refused() -> None:
    with pytest.raises(ValueError, match="window=0"):
        Visibility(arange(3), arange(3), window=0)
    with pytest.raises(ValueError, match="both"):
        Visibility(arange(3), arange(3), query_documents=arange(3))


def test_a_mask_is_exactly_as_wide_as_the_keys() -> None:
    cache = GrowingCache(1)
    cache.see(torch.zeros(1, 4))
    cache[0].update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    (visibility,) = cache.see(torch.zeros(1, 3))
    assert visibility.mask.shape == (1, 1, 3, 7)
    assert visibility.mask.sum(-1).tolist() == [[[5, 6, 7]]]


WINDOW = dict(sliding_window=4, max_window_layers=1)
MODELS = {"gpt2": tiny_gpt2(), "qwen2": tiny_qwen2(), "qwen2, W = 4": tiny_qwen2(**WINDOW)}
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_compiles_into_one_graph_for_many_lengths(name) -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(MODELS[name], backend=graphs, fullgraph=True)
    for T in (9, 12, 17, 21, 30, 3):
        idx = token_ids(2, T)
        torch.testing.assert_close(compiled(idx), MODELS[name](idx), atol=2e-5, rtol=0)
    assert graphs.frame_count <= 3  # one for the first length, one for those that a window cuts
    positions = positions_from_mask(torch.tensor([[0] * 2 + [1] * 7, [1] * 9]))
    idx, real = token_ids(2, 9), positions >= 0
    padded, want = (f(idx, positions=positions)[real] for f in (compiled, MODELS[name]))
    torch.testing.assert_close(padded, want, atol=2e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=SLOW) for name in ("gpt2", "qwen2")), "qwen2, W = 4"]
)
def test_a_model_is_exported_for_many_lengths(name) -> None:
    model, lengths = MODELS[name], {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (token_ids(2, 9),), dynamic_shapes={"idx": lengths})
    for B, T in ((2, 9), (3, 12), (2, 17), (5, 6)):
        idx = token_ids(B, T)
        torch.testing.assert_close(exported.module()(idx), model(idx), atol=2e-5, rtol=0)


def test_what_is_known_is_a_plain_bool() -> None:
    known = []

    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def look(places):
        seen = Visibility(places, places, dense=True, window=7)
        known.extend([seen.hides_only_the_future, seen.is_causal, seen.is_full])
        return places + 1

    look(arange(5))
    assert [type(fact) for fact in known] == [bool] * 3 and known == [True, True, False]
