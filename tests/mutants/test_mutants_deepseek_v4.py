"""DeepSeek-V4: entries pooled of blocks, what is kept of them, residual streams, routers."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

MODEL_LAWS = laws_of("deepseek_v4")
ENTRY_LAWS = laws_in("unit/attention/test_pooling.py") | MODEL_LAWS

ENTRIES = {
    "attention.pooling:in_order": [
        ("documents in one order", "(documents.long() << 32)", "0"),
    ],
    "attention.pooling:completes": [
        ("a block ends anywhere", "(positions % size == size - 1) & ", ""),
        ("a block with a gap", "(positions - first == size - 1) & ", ""),
    ],
    "attention.pooling:blocks_of": [
        ("padding before a text is pooled", " & (ends[..., None] + steps >= 0)", ""),
    ],
    "attention.pooling:pool": [
        ("one weight for all features", "of_each(gates)", "of_each(gates).mean(-1, True)"),
        ("values for the next block and the own exchanged",
         "zip(x.chunk(len(spans), dim=-1)", "zip(x.chunk(len(spans), dim=-1)[::-1]"),
    ],
    "cache.compressed:CompressedMemory.__init__": [
        ("entries that are there are made again", "if self.ends.shape[1]:", "if False:"),
    ],
    "cache.compressed:CompressedMemory.add": [
        ("ends stay where entries move", "ends.gather(1, order)", "ends[:, :count]"),
    ],
    "cache.compressed:CompressedMemory.visibility": [
        ("entries of other documents", "queries, documents)", "None, None)"),
    ],
    "cache.compressed:CompressedMemory.state": [
        ("a token too few waits", "self.width + 1", "self.width + 2"),
    ],
    "models.compressor:Pooler.offered": [
        ("gates know no places", " + self.position_bias[positions % self.size]", ""),
    ],
    "models.compressor:Pooler.entries": [
        ("entries not normed", "self.kv_norm(pool(", "(pool("),
    ],
    "models.compressor:EntryIndexer.forward": [
        ("queries of the indexer not turned", "turn(q, *rotation)", "q"),
        ("the choice is not used", "restrict(seen, choose(scores, seen, self.count))", "seen"),
    ],
    "models.compressor:Compressor.forward": [
        ("entries turned by their last place", "blocks.ends - self.size + 1", "blocks.ends"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(ENTRIES))
def test_a_law_finds_the_mistake_in_entries(mutant: Mutant) -> None:
    assert killer(mutant, ENTRY_LAWS)


STREAM_LAWS = laws_in("unit/layers/test_hyper_connections.py", most=1) | MODEL_LAWS

STREAMS = {
    "layers.hyper_connections:sinkhorn": [
        ("columns alone", "dim=-1", "dim=-2"),
        ("a round too many", "rounds - 1", "rounds"),
    ],
    "layers.hyper_connections:connect": [
        ("a column says what becomes of a stream", "carry.mT", "carry"),
    ],
    "layers.hyper_connections:HyperConnection.forward": [
        ("results written at most once", "2 * write", "write"),
        ("each stream normed alone", "streams.flatten(-2).to(work), self.norm_eps)",
         "streams.to(work), self.norm_eps).flatten(-2)"),
    ],
    "layers.hyper_connections:HyperHead.forward": [
        ("softmax", ".sigmoid()", ".softmax(dim=-1)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(STREAMS))
def test_a_law_finds_the_mistake_in_streams(mutant: Mutant) -> None:
    assert killer(mutant, STREAM_LAWS)


ROUTERS = {
    "layers.hash_routing:root_softplus": [("no root", ".sqrt()", "")],
    "layers.hash_routing:HashRouter.forward": [
        ("experts by place, not by token", "tid2eid[idx]", "tid2eid[: len(idx)]"),
        ("weights that do not sum to 1", " / (weights.sum(dim=-1, keepdim=True) + 1e-20)", ""),
        ("not scaled", "weights * self.scale", "weights"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(ROUTERS))
def test_a_law_finds_the_mistake_in_routers(mutant: Mutant) -> None:
    assert killer(mutant, MODEL_LAWS)
