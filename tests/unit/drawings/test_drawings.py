"""Every drawing can be read on a phone, on both grounds and without eyes; what it shows is so."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from svg import bars, crossed_out, flaws, marks, parsed, texts

from lm_from_scratch import drawings
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache
from lm_from_scratch.drawings import (
    after_pretraining,
    attention,
    caching,
    classification,
    generation,
    gpt2,
    gpu_programs,
    gpu_tiles,
    optimizers,
    quantized_weights,
    qwen2,
    since_qwen2_attention,
    since_qwen2_models,
    stories,
    zero,
)
from lm_from_scratch.drawings.canvas import Canvas, Drawing, slides
from lm_from_scratch.drawings.colours import BLUE, GREEN, ORANGE
from lm_from_scratch.layers.delta_rule import recurrent_delta_rule
from lm_from_scratch.training.autograd import Value

INF = float("inf")
WORDS = ["⊢", "If", " <the>", " file", "\n", " does", " not", " exist", " &", "."]
PARTS = ("lookups", "norm", "attention", "mlp", "stream", "logits")
ROW = [0.5, -1.0, 0.0, 2.0, 1.0, -3.0, 1.5, 0.0]
LAYOUTS = {"a": ((2, 3), (3, 1)), "b": ((3, 2), (1, 3)), "c": ((2, 3), (0, 0))}
BY_ROW = [(m, n) for m in range(32) for n in range(38)]
PASSES: list[list[int | None]] = [[0, 1], [0, None], [0, 2]]
HELD = {"<A>": ["a", " b", "c", "d", "<e>"], "B": ["a", " b", *"cdefgh"]}
TENSORS = {"θ": ("<weights>", True), "g": ("gradient", False)}
TWO = [("silu", ["g"], ["silu(g)"]), ("product", ["silu(g)", "u"], ["y"])]
CONFIG = {
    "hidden_size": 2048, "num_experts": 512, "head_dim": 256, "num_experts_per_tok": 10,
    "tie_word_embeddings": False, "layer_types": ["linear", "linear", "linear", "full"] * 2,
}  # fmt: skip
LABELS = {"num_experts": "Experts", "num_experts_per_tok": "Experts", "layer_types": "Delta rule"}
SIZES = SimpleNamespace(
    n_layer=24, n_embd=896, n_head=14, n_kv_head=2, vocab_size=9, intermediate_size=4864
)
STATE = torch.tensor([[1.0, 0.0, -0.5, 0.2], [0.3, 0.8, 0.0, 0.0], [0.0, 0.0, 0.4, -0.6]])
KEY, VALUE = torch.tensor([0.6, 0.0, 0.8]), torch.tensor([0.0, 1.0, 0.0, 0.0])
PLAIN, CODES = torch.zeros(2), torch.ones(2, dtype=torch.int8)
CODES.scale = torch.ones(1)  # type: ignore[attr-defined]
BOTH = {"tensor <1>": PLAIN, "tensor 2": CODES}
GIB = {"weights": 13.5, "gradients": 13.5, "moments": 27.0}
VALLEY = [(-10.0, 1.0), (-9.0, -1.2), (0.4, 0.1)]
NAN = math.nan


def candidate(tokens: tuple[int, ...], p: float, parent: int, fate: str) -> SimpleNamespace:
    score = math.log(p) / len(tokens)
    return SimpleNamespace(
        tokens=tokens, log_probability=math.log(p), score=score, parent=parent, fate=fate
    )


BEAMS = [
    [candidate((0,), 0.4, 0, "kept"), candidate((1,), 0.3, 0, "kept"),
     candidate((2,), 0.2, 0, "dropped"), candidate((3,), 0.1, 0, "dropped")],
    [candidate((1, 3), 0.28, 1, "finished"), candidate((0, 4), 0.2, 0, "finished"),
     candidate((0, 2), 0.1, 0, "dropped")],
]  # fmt: skip
PIECES = [" a", "<b>", "\n", "&", "."]


def machine(a: float, b: float, c: float) -> dict[str, Value]:
    """That of the first lesson."""
    numbers = {"a": Value(a), "b": Value(b), "c": Value(c)}
    numbers["product"] = numbers["a"] * numbers["b"]
    numbers["total"] = numbers["product"] + numbers["c"]
    numbers["bent"] = numbers["total"].relu()
    return numbers | {"result": numbers["bent"] * numbers["product"]}


#: Every drawing with what a page might give it.
EXAMPLES: list[tuple[Callable[..., Drawing], tuple[Any, ...]]] = [
    (slides, ("Step", [Canvas(10, 10, "a & b").drawing()] * 2, ["0", "1"], 1)),
    (zero.backward_steps, (machine(2, -1.5, 5),)),
    (zero.backward_steps, (machine(2.25, -1.75, 3),)),
    (zero.descending_line, (range(7), [100, 95, 88, 83, 76, 71, 65], 100, 0.02, [0, 1, 10])),
    (zero.descending_line, ([1, 2, 3], [20, 40, 55], 0, 0.1, [0, 3])),
    (zero.learned_curves,
     ([7, 8, 9], [100, 50, 80], [7, 7.5, 8, 8.5, 9],
      {"0": ([-40, 20, 30, 90, 130], "off by 60 <%>"), "9": ([90, 70, 50, 60, 80], "")})),
    (gpt2.tokens, (["<a>", " b&"], [3, 4])),
    (gpt2.merges, ([("l", "o", "w"), ("lo", "w"), ("low",)], ["letters", "l+o", "lo+w"])),
    (gpt2.repeats, (["a", " b", "a", " b"], 2)),
    (gpt2.shifted, (["If", " the", " file", " does", " not"], " exist")),
    (gpt2.gpt2_blocks, (6, {part: f"#{part}" for part in PARTS})),
    (gpt2.lines, (WORDS[:2], WORDS[:2], [[1.0, 0.0], [0.3, 0.7]])),
    (gpt2.lines, (["a", " b"], ["a", " b"], [[1.0, 0.0], [0.3, 0.7]], 1)),
    (gpt2.head_cells, (["right", "wrong"], [[[0, 0, 1, 1]] * 3, [[0, 1, 0, 1]] * 3])),
    (gpt2.bars, (["<a>", " b"], [0.75, 0.25], [1])),
    (qwen2.clock_hands, ((3, 5), (13, 15))),
    (qwen2.hand_speeds, ({"pair 0": 6.28, "pair 1": 63.0, "pair 2": 628.0}, 6)),
    (qwen2.feature_pairs, ({"halves": [0, 1, 2, 3] * 2, "pairs": [0, 0, 1, 1, 2, 2, 3, 3]},)),
    (qwen2.gates, (["a", " b"], [3, 512], [[0.0, 1.0], [0.5, -0.1]])),
    (qwen2.shared_heads, (4, [4, 2, 1])),
    (qwen2.qwen2_blocks, (8, ["#1", "#2", "#3", "#4", "#5"])),
    (qwen2.model_sizes, ({"Qwen2-0.5B": SIZES, "tiny": SIZES}, {"Qwen2-0.5B": 494e6, "tiny": 1e6})),
    (attention.query_steps,
     (["a", " <b>"], [1.0, -2.0, 0.5], [[0.1, 1.0, 2.0], [1.0, -1.0, 0.0]], [[1.0, 0.0]] * 2, 1)),
    (attention.online_softmax_frames,
     (["a", "b", "c", "d"], [1.0, -2.0, 3.0, 0.0], [1.0, 2.0, 3.0, -1.0], 2)),
    (attention.packed_row, ([["if", " a", ":"], ["end"], ["for", " x"]], 8)),
    (classification.padded_rows, ([["a", " b"], ["<c>"]], "pad", [1, 0])),
    (classification.labelled, (["if", " <x>"], ["keyword", "name"], ["keyword", "number"])),
    (caching.cache_filling, (WORDS[:8], 3)),
    (caching.one_query, (WORDS[:3], [0.5, 0.25, 0.0])),
    (caching.slot_steps, (WORDS[:8], 8, 3)),
    (caching.writing_order, (WORDS[:7], 3, 2)),
    (caching.slot_masks, ({"a": ([0, 1, -1], [1, 2], [[True, True, False], [True] * 3])},)),
    (caching.padded_batch, ([["pad", "<a>"], ["b", " c"]], [[-1, 0], [0, 1]], [1, 1])),
    (caching.ruler, ([-1.2, 0.1, 0.35, 2.1], [2, 4, 8], [3])),
    (caching.shared_rulers, (["a", " b", " c", " d", " e"], 4, 2)),
    (caching.versions, ({"<a>": [" one", "\n"], "b": [" one", " <two>"]},)),
    (generation.beam_tree, ("a <b>", BEAMS, PIECES.__getitem__)),
    (generation.beam_tree, ("a", BEAMS[:1], PIECES.__getitem__, 0)),
    (generation.surprise, ({"<real>": (["a", " &", "\n"], [0.0, 3.5, 20.0])},)),
    (generation.drafts, ([([" a", " b", "\n"], 1, "<d>"), ([], 0, " "), (["c"], 1, "d")], "if")),
    (generation.overlap, (["<a>", " b", "c"], [0.5, 0.3, 0.2], [0.2, 0.8, 0.0])),
    (generation.batch_timelines, ({"<one>": PASSES, "two": PASSES[:1]}, "abc")),
    (generation.page_table, (HELD, {"<A>": [2, 0], "B": [2, 1]}, 5, 4, [3])),
    (optimizers.valley, ({"<a>": VALLEY, "b": VALLEY[:2]}, 50.0)),
    (optimizers.magnitudes, ([" the", "<b>"], [0.011, 2.2e-6])),
    (optimizers.training_memory, ({"<a>": GIB, "b": {"weights": 13.5}}, 24.0, "a card")),
    (optimizers.galore_step, (384, 128, 32)),
    (optimizers.subspaces, (200,)),
    (optimizers.optimizer_state, (128, 344, 32)),
    (optimizers.gradient_lives, (["head", "block <1>", "embedding"],)),
    (optimizers.two_copies, ([["a & b", "c"], ["d"]], [-0.25, 0.5], "block 0")),
    (quantized_weights.rounding,
     ({"<wide>": ([0.14, -0.7, 0.68], 0.1, 7), "narrow": ([0.02, 0.07], 0.01, 7)},)),
    (quantized_weights.holders, ("after", {"name": PLAIN, "<list>": PLAIN, "new": CODES}, BOTH)),
    (quantized_weights.holders, ("nobody", {"name": PLAIN}, BOTH)),
    (quantized_weights.held_tensors,
     ("Tensor (2, 3)", {"codes": ["int8", "<6>"], "scale": ["float32"]})),
    (quantized_weights.two_doors, (["F.linear"], ["detach", "clone"], ["all else:", "error"])),
    (quantized_weights.load_stations, ([f"#{i}" for i in range(5)],)),
    (quantized_weights.choices, ({"a\nb": "1 c", "<d>": "2 e\nf\ng"}, ("case", "use"))),
    (quantized_weights.low_rank, (512, 128, 8, "4 bits")),
    (quantized_weights.low_rank, (128, 512, 1, "4 bits")),
    (since_qwen2_models.visited_experts, (["If", " the", " <b>"], [3, 0, 15])),
    (since_qwen2_models.mixture, (" list", [0.1 * e - 0.3 for e in range(16)], {15: 0.7, 0: 0.3})),
    (since_qwen2_models.expert_loads, ({"plain": [9, 1, 1, 1], "balanced": [3, 3, 3, 3]},)),
    (since_qwen2_models.token_bytes,
     ([("one", "MHA", 2**20), ("two", "MLA", 2**18), ("three", "MQA", 1536)],)),
    (since_qwen2_models.latent_token, (7168, 512, 128, 128, 64, 99)),
    (since_qwen2_models.delta_rule_step, (STATE, KEY, VALUE, ("cat", "red"))),
    (since_qwen2_models.delta_rule_step, (torch.eye(5), torch.ones(5), torch.ones(5))),
    (since_qwen2_models.self_draft, ("If the file does not exist, an", [" exception", ",", " an"])),
    (since_qwen2_models.mtp_targets, (["If", " the", " file", " does", " not"], (0, 1, 2))),
    (since_qwen2_models.residual_streams, ([0.2, 0.8], [1.0, 2.0], [[0.6, 0.4], [0.4, 0.6]])),
    (since_qwen2_models.residual_streams, ([0.2] * 5, [2.0] * 5, [[0.2] * 5] * 5)),
    (since_qwen2_models.config_lines, (CONFIG, LABELS)),
    (since_qwen2_models.cache_sizes, ({"a": (2**31, 0), "b": (2**22, 2**21)}, 1000)),
    (since_qwen2_attention.softmax_budget, (["a", "b", "c"], [0.0, 0.0, 0.0], 0.0)),
    (since_qwen2_attention.pinned_window, (list("abcdefgh"), 3, 1)),
    (since_qwen2_attention.gate_places, (4,)),
    (since_qwen2_attention.two_questions, (list("abcdefghijkl"), (6, 1), (11, 8))),
    (since_qwen2_attention.turned_features, ({"all": 8, "half": 4, "none": 0}, 8)),
    (since_qwen2_attention.layer_kinds,
     ({"one": "RRRN", "two": "LLLLLG"},
      {"R": "rotates", "N": "does not", "L": "a window", "G": "all"})),
    (since_qwen2_attention.pooled_blocks, (WORDS[:5] * 2, 4, 3)),
    (since_qwen2_attention.pooled_blocks, (list("abcdef"), 3, 1)),
    (since_qwen2_attention.where_it_looks, (WORDS[:5], [0.5, 0.1, 0.0, 0.3, 0.1], [0, 3])),
    (since_qwen2_attention.indexer_scores,
     (WORDS[:5], [[1.0, -2.0, 0.5, -1.0, -0.1], [-1.0, -1.0, 2.0, 1.0, -3.0]], [1.0, -0.5], 2)),
    (after_pretraining.learned_parts,
     (["<|im_start|>", "2", "+", "\n", "5"], ["template", "question", "question", "template",
      "answer"], [False, False, False, False, True])),
    (after_pretraining.answer_group, ("2 3>6", ["2*3", "2<3"], [1, 0], [0.33, -0.67])),
    (after_pretraining.answer_group, ("2 3>6", ["2*3", "3"], [0, 0], [0, 0], "paid")),
    (after_pretraining.answer_pair,
     ("2 3>6", "2*3", "2+3", {"before": (0.0, 0.0), "after": (0.25, -0.75)})),
    (gpu_programs.programs_on_a_vector, (37, 16)),
    (gpu_programs.round_trips, ({"two kernels": TWO, "one": [("both", ["g", "u"], ["y"])]},)),
    (gpu_programs.pointer, (ROW, 5)),
    (gpu_programs.masked_store, (37, 16)),
    (gpu_programs.strides, (LAYOUTS,)),
    (gpu_programs.row_programs, ([[1.0, -INF], [0.5, 2.0]], ["<If>", " the"], 4)),
    (gpu_programs.online_sum_frames, (ROW, 3)),
    (gpu_programs.row_blocks, (5, 6, 2, 8)),
    (gpu_programs.sums_across, (6, 3)),
    (gpu_programs.rope_rows, (4, 3, 3, 8, 4)),
    (gpu_programs.memory_places, ({"<a>": [[0, 1], [2, 3]], "b": [[0, 2], [1, 3]]},)),
    (gpu_programs.optimizer_blocks, (TENSORS, 10, 4)),
    (gpu_tiles.tile_steps, (5, 7, 7, 3, 3, (1, 1), 1)),
    (gpu_tiles.first_programs, ({"a": BY_ROW, "b": BY_ROW}, 32, 38, 132)),
    (gpu_tiles.matrix_units, ()),
    (gpu_tiles.tiled_product, (("P transposed", "G", "R"), (20, 128, 384), 32, (0, 5))),
    (gpu_tiles.tiled_product, (("P", "d", "W"), (128, 20, 384), 32, (1, 5))),
    (gpu_tiles.rows_of_logits, (8192, 151_936, 4096)),
    (gpu_tiles.split_vocabulary, (45, 301, 32, 128, 64, (1, 2))),
    (gpu_tiles.causal_tiles, (WORDS, 4)),
    (gpu_tiles.split_keys, (22, 4, 3)),
    (gpu_tiles.paged_keys, ([4, 1, 5], 4, 10, 4, 6)),
    (stories.nan_spreads,
     (["pad", " <a>"], {"<a>": [[NAN, NAN], [1, -2]], "b": [[NAN, 0]] * 2}, 1)),
    (stories.written, ({"<A>": [1, 2, 3, 4], "B": [1, 2, 3, 1]},)),
]  # fmt: skip
#: The first example of each.
DRAWN = {draw.__name__: draw(*given) for draw, given in reversed(EXAMPLES)}


@pytest.mark.parametrize(("draw", "given"), EXAMPLES, ids=lambda it: getattr(it, "__name__", ""))
def test_a_drawing_can_be_read(draw: Callable[..., Drawing], given: tuple[Any, ...]) -> None:
    drawing = draw(*given)
    assert not [*flaws(drawing)]
    assert draw(*given) == drawing


def test_every_drawing_has_an_example() -> None:
    files = [f"{drawings.__name__}.{file.name}" for file in pkgutil.iter_modules(drawings.__path__)]
    functions = {
        one.__name__
        for file in files
        for one in vars(importlib.import_module(file)).values()
        if getattr(one, "__annotations__", {}).get("return") is Drawing
    }
    assert functions == {*DRAWN}


# ------------------------------------------------------------------------------ what they say


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("descending_line", "1: after 1 step a = −3.03, loss 102.2; Steps 10: after 10 steps a ="),
        ("learned_curves", "Steps 0: after 0 steps off by 60 <%>; Steps 9: after 9 steps"),
        ("backward_steps", "product: 2 + (−3 × 1) = −1; c: −3 × 1 = −3. Slopes: c −3, product −1"),
        ("query_steps", "sum to 3.0; Step scores: a −0.5, ␣<b> 1.7; Step softmax: a 0.10"),
        ("padded_batch", "row 0: pad | <a>, mask [0, 1], positions [-1, 0]; row 1"),
        ("writing_order", "misses a key 1 times"),
        ("versions", "<a>: ' one↵'\nb: 1 tokens, then ' <two>'"),
        ("drafts", "if a[ b]<d>| |cd"),
        ("batch_timelines", "<one>: 3 passes, 1 places idle; two: 1 passes, 0 places idle"),
        ("page_table", "3 of 5 blocks in use; <A> is in the blocks [2, 0]"),
        ("valley", "<a>: from height 75 to 0.33 in 2 steps; b: from height 75"),
        ("magnitudes", "' the' 0.011, '<b>' 0.0000022"),
        ("training_memory", "<a>: 54.0 GB, of which weights 13.5, gradients 13.5, moments 27.0"),
        ("optimizer_state", f"{2 * 128 * 344:,} numbers; GaLore a basis of 128 x 32"),
        ("two_copies", "replace it by the mean, 0.125, and"),
        ("rounding", "<wide>: 3 weights on 3 of 15 levels; narrow: 2 weights on 2 of 15"),
        ("holders", "name, <list> at tensor <1>, which is float32; new at tensor 2, which is int8"),
        ("visited_experts", "If[3]  the[0]  <b>[15]"),
        ("expert_loads", "has 3.0 times the mean; balanced: the busiest expert has 1.0 times"),
        ("token_bytes", "one (MHA) 1 MiB; two (MLA) 256 KiB; three (MQA) 1.5 KiB"),
        ("latent_token", "576 numbers are kept. From the latent each of 128 heads makes 128"),
        ("self_draft", "h and ' exception' give h¹, which drafts ','. h¹ and ',' give h², which"),
        ("mtp_targets", "Depth 2: after ' file' ' does', after ' does' ' not'"),
        ("cache_sizes", "a 2.00 GiB; b 6 MiB, of which 2 MiB state"),
        ("softmax_budget", "keys alone: a 33%, b 33%, c 33%; with a sink of 0: a 25%"),
        ("two_questions", "token 11 looks 3 places back, at 8"),
        ("turned_features", "half: 4 of 8 features turn"),
        ("layer_kinds", "one, from below: R R R N"),
        ("where_it_looks", "5 tokens; the framed 2 have 80% of the attention"),
        ("indexer_scores", "chosen: '⊢', '\\n'"),  # negative counts as 0; of equals the latest
        ("learned_parts", "[question] '2+' [template] '\\n' [answer, counts] '5'"),
        ("answer_group", "2 3>6: 1 of 2 answers are right: 2*3 +0.33, 2<3 -0.67"),
        ("answer_pair", "before: 2*3 +0.00, 2+3 +0.00; after: 2*3 +0.25, 2+3 -0.75"),
        ("pointer", "the addresses 1000 to 1016, 4 bytes apart"),
        ("optimizer_blocks", "writes over its block of θ;"),
        ("sums_across", "programs take blocks [0, 3], [1, 4], [2, 5]"),
        ("first_programs", "a: 132 programs need 4 rows and 38 columns;"),
        ("rows_of_logits", "the last holds 384 logits, and the mask cuts off 3,712"),
        ("split_vocabulary", "2 x 3 programs"),
        ("paged_keys", "keys 0–3 in page 4; keys 4–7 in page 1; keys 8–9 in page 5"),
        ("nan_spreads", "<a>: NaN in 1 of 2 rows; b: NaN in 2 of 2 rows"),
        ("written", "<A>: 10 writes in 4 steps, at most 4 in one; B: 7 writes"),
    ],
)  # fmt: skip
def test_the_words_in_place_of_a_drawing_have_its_numbers(name: str, words: str) -> None:
    assert words in DRAWN[name].says


# -------------------------------------------------------------------------- what they count


@pytest.mark.parametrize(
    ("name", "text", "times"),
    [
        ("page_table", "a␣bcd", 3),  # in two rows, and once in the pool
        ("gradient_lives", "g", 6 + 3 + 1),  # 1 + 2 + 3 in the ordinary loop, and one in the key
        ("latent_token", "value 99", 3),
        ("mtp_targets", "–", (0 + 1) + (1 + 2) + (2 + 3)),
        ("round_trips", "5 tensors move", 1),
        ("round_trips", "3 tensors move", 1),
        ("masked_store", "?", 11),
        ("masked_store", "−1", 11),
        ("row_programs", "−∞", 1),
        ("sums_across", "block 5", 2),
        ("optimizer_blocks", "written", 1),
        ("split_keys", "×", 2),
        ("paged_keys", "×", 2),
        ("nan_spreads", "NaN", 4),
    ],
)  # fmt: skip
def test_a_word_stands_as_often_as_its_thing_is_there(name: str, text: str, times: int) -> None:
    assert texts(DRAWN[name]).count(text) == times


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("programs_on_a_vector", 3 * 16 - 37),
        ("row_programs", 2 * 2),
        ("row_blocks", 6 * 8 - 5 * 6),
        ("rope_rows", 2 * (2 * 8 * 4 - 12 * 3)),
        ("optimizer_blocks", len(TENSORS) * (3 * 4 - 10)),
    ],
)
def test_a_mask_cuts_off_what_is_outside(name: str, places: int) -> None:
    assert crossed_out(parsed(DRAWN[name])) == places


def test_a_tile_masks_rows_columns_and_the_end_of_k() -> None:
    """Rows 3 to 5 of 5, columns 3 to 5 of 7, and three steps over 7 along K."""
    for step, frame in enumerate(marks(DRAWN["tile_steps"], "svg")):
        beyond = max(3 * (step + 1) - 7, 0)
        assert crossed_out(frame) == (9 - 2 * (3 - beyond)) + 3 * beyond + 3


@pytest.mark.parametrize(
    ("name", "colour", "axis", "numbers"),
    [
        ("bars", BLUE, "width", [0.25]),
        ("expert_loads", ORANGE, "height", [9, 3, 3, 3, 3]),
        ("expert_loads", BLUE, "height", [1, 1, 1]),
        ("cache_sizes", BLUE, "width", [2**31, 2**22]),
        ("token_bytes", BLUE, "width", [2**20]),
        ("training_memory", BLUE, "width", [13.5, 13.5]),
        ("written", ORANGE, "height", [1, 2, 3, 1, 2]),
        ("low_rank", ORANGE, "height", [512, 8]),
        ("galore_step", BLUE, "height", [128, 384, 384, 32]),
    ],
)
def test_bars_and_matrices_are_in_scale(
    name: str, colour: str, axis: str, numbers: list[float]
) -> None:
    lengths = bars(DRAWN[name], colour, axis)[: len(numbers)]
    assert lengths == pytest.approx([n * lengths[0] / numbers[0] for n in numbers], rel=0.01)


def test_what_comes_out_of_a_draft_is_as_long_as_p() -> None:
    """Accepted in blue and replaced in orange, in units of the largest probability."""
    lengths: dict[str, float] = {}
    for bar in marks(DRAWN["overlap"], "rect"):
        if bar.get("fill") != "none" and bar.get("height") == "16":
            row = bar.get("y", "")
            lengths[row] = lengths.get(row, 0.0) + float(bar.get("width", 0))
    assert [round(one / 178 * 0.8, 2) for one in lengths.values()] == [0.5, 0.3, 0.2]


def test_a_tree_leads_to_the_best_that_finished() -> None:
    bold = [mark.text for mark in marks(DRAWN["beam_tree"], "text") if mark.get("font-weight")]
    assert bold == ["a␣<b>", "<b>", "&"]
    widths = [line.get("stroke-width") for line in marks(DRAWN["beam_tree"], "line")]
    assert widths.count("3") == 2


def test_what_surprises_more_is_darker() -> None:
    tints = re.findall(r"0, ([\d.]+)\); border", DRAWN["surprise"].html)
    assert 0 == float(tints[0]) < float(tints[1]) < float(tints[2]) == float(tints[-1])


def test_a_wider_line_is_a_larger_weight() -> None:
    first, second, third = (float(x.get("stroke-width", 0)) for x in marks(DRAWN["lines"], "line"))
    assert first > third > second


def test_equal_contents_have_equal_colours() -> None:
    fills = [box.get("fill") for box in marks(DRAWN["holders"], "rect")]
    alike = quantized_weights.holders("", {}, {"one": PLAIN, "two": torch.ones(3)})
    assert len({*fills}) == 2 and len({box.get("fill") for box in marks(alike, "rect")}) == 1


@pytest.mark.parametrize(
    ("name", "y", "shares"),
    [("rounding", 61, [8 / 14, 0, 1]), ("ruler", 56, [0, 1 / 3, 1 / 3, 1])],  # of the ruler
)
def test_every_number_goes_to_its_nearest_level(name: str, y: int, shares: list[float]) -> None:
    """15 levels from -0.7 to 0.7, and 4 marks from -1.2 to 2.1."""
    lines = [line for line in marks(DRAWN[name], "line") if line.get("y2") == str(y)]
    ends = [float(line.get("x2", 0)) for line in lines if line.get("stroke-width") == "1.4"]
    assert ends == pytest.approx([12 + 319 * share for share in shares], abs=0.01)


# ------------------------------------------------------------------------- what they compute


def test_a_backward_pass_ends_with_the_slopes_of_the_package() -> None:
    numbers = machine(2, -1.5, 5)
    numbers["result"].backward()
    shown = [text for text in texts(marks(DRAWN["backward_steps"], "svg")[-1]) if "slope " in text]
    slopes = [f"slope {value.grad:g}".replace("-", "−") for value in numbers.values()]
    assert [text for text in shown if "passes" not in text] == slopes


def test_a_line_descends_by_the_slopes_of_the_package() -> None:
    a, x, y = Value(0.0), [1.0, 2.0, 4.0], [90.0, 85.0, 60.0]
    for place in zero.descent(x, y, 100, 0.03, 5):
        assert a.data == pytest.approx(place)
        misses = [100 + a * p - q for p, q in zip(x, y, strict=True)]
        loss = sum((miss**2 for miss in misses), Value(0)) / 3
        assert loss.data == pytest.approx(zero.squared_error(x, y, 100, place))
        loss.backward()
        a.data, a.grad = a.data - 0.03 * a.grad, 0.0


def test_a_filling_cache_computes_each_token_once() -> None:
    """After a prompt of three tokens: 3, 4, ... are read without a cache, and with one only one."""
    read = 0
    for r, frame in enumerate(marks(DRAWN["cache_filling"], "svg")):
        words, T = texts(frame), 3 + r
        read += T
        assert words.count("again") == words.count("kept") == (T - 1 if r else 0)
        assert [text for text in words if "tokens" in text] == [f"{read} tokens", f"{T} tokens"]
        assert words.count("q") == T + (1 if r else 3) and words.count("k") == 2 * T


def test_slots_hold_what_the_caches_of_the_package_hold() -> None:
    caches = GrowingCache(1), StaticCache(1, 8), SlidingCache(1, 3)
    for frame in marks(DRAWN["slot_steps"], "svg"):
        held = []
        for cache in caches:
            k = torch.zeros(1, 1, 1, 2)
            cache.see(k[:, 0], windows=[3])
            cache[0].update(k, k)
            held += [place for place in cache.contents(0)[2][0].tolist() if place >= 0]
        assert [int(text) for text in texts(frame) if text.isdigit()] == held


def test_one_step_of_the_delta_rule_is_that_of_the_package() -> None:
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    key, value = KEY[None, None, None], VALUE[None, None, None]
    y, state = recurrent_delta_rule(key, key, value, zero, one, STATE[None, None])
    assert DRAWN["delta_rule_step"].says.endswith(", ".join(f"{abs(n):.1f}" for n in y.flatten()))
    numbers = [f"{n:.1f}".replace("-0.0", "0.0").replace("-", "−") for n in state.flatten()]
    assert [text for text in texts(DRAWN["delta_rule_step"]) if "." in text][-12:] == numbers


def test_strides_are_those_of_torch() -> None:
    for shape, strides in LAYOUTS.values():
        table = torch.arange(6).as_strided(shape, strides).tolist()
        assert f"strides {strides}, offsets {table}" in DRAWN["strides"].says


def test_the_last_sum_is_that_of_the_row() -> None:
    row = torch.tensor(ROW)
    assert f"ℓ = {(row - row.max()).exp().sum():.2f}" in texts(DRAWN["online_sum_frames"])


def test_a_softmax_in_tiles_is_that_of_all() -> None:
    weights = torch.tensor([1.0, -2.0, 3.0, 0.0]).softmax(0)
    result = weights @ torch.tensor([1.0, 2.0, 3.0, -1.0])
    assert f"a / l = {result:.2f}" in texts(DRAWN["online_softmax_frames"])


@pytest.mark.parametrize("keeps", ["queries", "keys"])
def test_programs_use_each_causal_score_once(keeps: str) -> None:
    """Ten tokens in tiles of 4: the programs together use 55 scores, and write no other."""
    drawing = gpu_tiles.causal_tiles(WORDS, 4, keeps)
    used, masked = (
        [int(n) for n in re.findall(rf"(\d+) {words}", drawing.says)]
        for words in ("scores are used", "are computed and masked")
    )
    assert sum(used) == 10 * 11 / 2
    tiles = (1, 2, 3) if keeps == "queries" else (3, 2, 1)
    assert [a + b for a, b in zip(used, masked)] == [16 * n for n in tiles]
    assert [texts(frame).count("×") for frame in marks(drawing, "svg")] == masked


def test_splits_share_the_keys() -> None:
    """22 keys in 6 tiles of 4: two tiles for each split; the last two of five would get no key."""
    spans = re.findall(r"reads keys (\d+)–(\d+)", DRAWN["split_keys"].says)
    assert spans == [("0", "7"), ("8", "15"), ("16", "21")]
    assert "in 3 splits" in gpu_tiles.split_keys(22, 4, 5).says


@pytest.mark.parametrize("sizes", [(70, 40, 90), (20, 128, 384)])
def test_programs_of_a_product_read_each_tile_of_their_row_and_column(
    sizes: tuple[int, int, int],
) -> None:
    """All results are written once; A is read once for each column of tiles, B for each row."""
    rows, inner, columns = sizes
    down, along, across = (-(-size // 32) for size in sizes)
    scale = min(2.4, 300 / (32 * (along + across))) ** 2
    read = {BLUE: 0.0, ORANGE: 0.0, GREEN: 0.0}
    for i, j in ((i, j) for i in range(down) for j in range(across)):
        for box in marks(gpu_tiles.tiled_product(("A", "B", "C"), sizes, 32, (i, j)), "rect"):
            if box.get("fill") in read:
                area = float(box.get("width", 0)) * float(box.get("height", 0))
                read[box.get("fill", "")] += area / scale
    wanted = [across * rows * inner, down * inner * columns, rows * columns]
    assert [*read.values()] == pytest.approx(wanted, rel=1e-3)


def test_nothing_is_masked_where_blocks_fit() -> None:
    assert crossed_out(parsed(gpu_programs.rope_rows(2, 4, 4, 8, 4))) == 0
    assert "mask" not in " ".join(texts(gpu_programs.programs_on_a_vector(32, 16)))


def test_texts_agree_up_to_their_first_other_token() -> None:
    assert caching.same_tokens(["x", "y", "z"], ["x", "o", "z"]) == 1
    assert caching.same_tokens(["x", "y"], ["x"]) == 1 and caching.same_tokens([], []) == 0


def test_lines_of_a_config_stand_with_their_idea() -> None:
    lines = [text for text in texts(DRAWN["config_lines"]) if ":" in text]
    assert lines[2] == "tie_word_embeddings: false"
    assert [line.partition(":")[0] for line in lines[3:5]] == ["num_experts", "num_experts_per_tok"]
    assert lines[-1] == "layer_types: 6 linear, 2 full"


# ------------------------------------------------------------------------------- the sheet


def test_a_sheet_with_links_is_no_image() -> None:
    """The parts of an image cannot be reached; those of a group can."""
    assert 'role="img" aria-label="a &amp; b"' in Canvas(10, 10, "a & b").drawing().html
    assert 'role="group"' in DRAWN["load_stations"].html
    links = [mark.get("href") for mark in parsed(DRAWN["load_stations"]).iter()]
    assert [link for link in links if link] == ["#0", "#1", "#2", "#3", "#4"]


def test_an_arrow_points_to_its_end() -> None:
    canvas = Canvas(10, 10, "arrow")
    canvas.line(0, 0, 10, 0, arrow=True)
    (arrow,) = marks(canvas.drawing(), "polygon")
    assert arrow.get("points", "").startswith("10,0 ")


def test_a_reader_chooses_one_slide() -> None:
    show = parsed(slides("Step", [Canvas(9, 9, s).drawing() for s in "abc"], "123", 1))
    buttons = list(show.iter("input"))
    assert [button.get("checked") for button in buttons] == [None, "checked", None]
    assert len({button.get("name") for button in buttons}) == 1
    assert [label.get("for") for label in show.iter("label")] == [b.get("id") for b in buttons]
    style = "".join(show.find("style").itertext())  # type: ignore[union-attr]
    for i, button in enumerate(buttons):  # each shows its own frame
        assert f"#{button.get('id')}:checked ~ .frames > :nth-child({i + 1})" in style
    other = parsed(slides("Step", [Canvas(9, 9, "d").drawing()], ["1"]))
    assert next(other.iter("input")).get("id") != buttons[0].get("id")
