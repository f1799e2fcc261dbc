"""beam_search.py: transformers' hypotheses and scores, and the best of all where beams suffice."""

import itertools
import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, cache_for
from lm_from_scratch.generation.beam_search import Hypothesis, beam_search, beam_steps
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY

MODELS = {
    "gpt2": tiny_gpt2(attn_pdrop=0.3, resid_pdrop=0.3),
    "gpt2, sure of itself": tiny_gpt2(std=0.8),
    "qwen2": tiny_qwen2(),
    "qwen2, some layers slide": tiny_qwen2(seed=1, sliding_window=4, max_window_layers=1),
    "qwen2, all layers slide": tiny_qwen2(seed=2, sliding_window=3, max_window_layers=0),
}
TWINS = {name: hf_twin(model) for name, model in MODELS.items()}
MODEL = MODELS["gpt2"]
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]
PENALTIES = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])
STOPPING = st.sampled_from([True, False, "never"])


@st.composite
def searches(draw, most_prompts: int = 3) -> tuple[str, dict]:
    """The name of a model and the arguments of a search whose beams often meet a stop token."""
    name = draw(st.sampled_from(sorted(MODELS)))
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=most_prompts))
    seed = draw(st.integers(0, 10**6))
    prompts = [token_ids(n, seed=seed + i).tolist() for i, n in enumerate(lengths)]
    likely = sorted(
        {t for row in complete(generate(MODELS[name], prompts, 8, GREEDY)) for t in row}
    )
    num_beams = draw(st.integers(2, 5))
    return name, dict(
        prompts=prompts,
        max_new_tokens=draw(st.integers(1, 16)),
        num_beams=num_beams,
        length_penalty=draw(PENALTIES),
        early_stopping=draw(STOPPING),
        num_return_sequences=draw(st.integers(1, num_beams)),
        stop_tokens=draw(st.lists(st.sampled_from(likely), max_size=5, unique=True)),
    )


def transformers_search(name: str, prompts, stop_tokens=(), pad: int = 1, **arguments):
    """The same search there: for each prompt pairs of tokens and score."""
    n = max(map(len, prompts))
    twin = TWINS[name]
    twin.generation_config.eos_token_id = None  # given below, or none
    out = twin.generate(
        torch.tensor([[pad] * (n - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (n - len(p)) + [1] * len(p) for p in prompts]),
        do_sample=False, eos_token_id=list(stop_tokens) or None, pad_token_id=pad,
        return_dict_in_generate=True, output_scores=True, **arguments,
    )  # fmt: skip
    rows = []
    for row in out.sequences[:, n:].tolist():
        ends = [i + 1 for i, token in enumerate(row) if token in stop_tokens]
        rows.append(tuple(row[: ends[0] if ends else None]))
    pairs = list(zip(rows, out.sequences_scores.tolist(), strict=True))
    each = len(pairs) // len(prompts)
    return [pairs[i : i + each] for i in range(0, len(pairs), each)]


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[tuple]]) -> None:
    assert [[h.tokens for h in own] for own in ours] == [[t for t, _ in own] for own in theirs]
    for own, other in zip(ours, theirs, strict=True):
        assert [h.score for h in own] == pytest.approx([score for _, score in other], rel=1e-4)


def tokens_of(results: list[list[Hypothesis]]) -> list[list[tuple[int, ...]]]:
    return [[h.tokens for h in own] for own in results]


# ---------------------------------------------------------------------------------- transformers


@examples(12, 100)
@given(searches())
def test_tokens_and_scores_equal_transformers(search) -> None:
    name, arguments = search
    assert_same(beam_search(MODELS[name], **arguments), transformers_search(name, **arguments))


@pytest.mark.parametrize(
    "theirs", [RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2)]
)
def test_processors_see_the_tokens_of_their_own_beam(theirs) -> None:
    """The historic mistake: rows that are not moved with their beams."""
    arguments = dict(
        prompts=token_ids(3, 6).tolist(),  # one length: transformers counts pads
        max_new_tokens=12, num_beams=4, num_return_sequences=4,
    )  # fmt: skip
    plain = beam_search(MODEL, **arguments)
    ours = beam_search(
        MODEL, **arguments, processors=[lambda p, rows: theirs(torch.tensor(rows), p)]
    )
    assert tokens_of(ours) != tokens_of(plain)
    want = transformers_search("gpt2", **arguments, logits_processor=LogitsProcessorList([theirs]))
    assert_same(ours, want)


def only(*allowed: int):
    """A processor that forbids all other tokens."""

    def process(log_probs, rows):
        kept = torch.full_like(log_probs, -math.inf)
        kept[:, allowed] = log_probs[:, allowed]
        return kept

    return process


def test_transformers_fills_what_does_not_exist_and_we_return_less() -> None:
    """With three allowed tokens there are three texts of one token. There the fourth is "-1"."""
    arguments = dict(prompts=[[5, 6, 7]], max_new_tokens=1, num_beams=4, num_return_sequences=4)
    forbidden = [t for t in range(97) if t not in (10, 11, 12)]
    theirs = transformers_search("gpt2", **arguments, suppress_tokens=forbidden)
    assert theirs[0][3] == ((-1,), -1e9)
    ours = beam_search(MODEL, **arguments, processors=[only(10, 11, 12)])
    assert_same(ours, [theirs[0][:3]])


def test_transformers_loses_scores_below_its_placeholder() -> None:
    arguments = dict(prompts=[[5, 6, 7]], max_new_tokens=20, num_beams=3, length_penalty=-8.0)
    assert transformers_search("gpt2", **arguments)[0][0][1] == -1e9
    (best,) = beam_search(MODEL, **arguments)[0]
    assert len(best.tokens) == 20 and best.score == best.log_probability * 20**8 < -1e11


# --------------------------------------------------------------------------------- one and all


@given(searches())
def test_one_beam_is_greedy_search(search) -> None:
    name, arguments = search
    arguments |= dict(num_beams=1, num_return_sequences=1)
    if arguments["early_stopping"] == "never":
        arguments["length_penalty"] = min(0.0, arguments["length_penalty"])
    prompts, n, stops = (arguments[k] for k in ("prompts", "max_new_tokens", "stop_tokens"))
    want = complete(generate(MODELS[name], prompts, n, GREEDY, stop_tokens=stops))
    assert tokens_of(beam_search(MODELS[name], **arguments)) == [[tuple(row)] for row in want]


def test_one_beam_that_never_stops_early_looks_past_a_stop_token() -> None:
    stop = complete(generate(MODEL, PROMPTS[:1], 1, GREEDY))[0][0]
    steps = [
        len(list(beam_steps(MODEL, PROMPTS[:1], 9, 1, 2.0, early, [stop])))
        for early in (False, "never")
    ]
    assert steps[0] == 1 < steps[1]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("stops", [(), (2,), (1, 4)])
def test_enough_beams_find_all_texts_there_are(penalty: float, stops: tuple[int, ...]) -> None:
    """Six tokens, texts of four: every one with its probability, and these sum to 1."""
    V, n, prompt = 6, 4, [3, 0, 5]
    model = tiny_gpt2(seed=3, vocab_size=V)
    texts = torch.tensor(list(itertools.product(range(V), repeat=n)))  # (V^n, n)
    idx = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts], dim=1)
    with torch.no_grad():
        log_probs = model(idx[:, :-1])[:, len(prompt) - 1 :].log_softmax(-1)
    each = log_probs.gather(-1, texts[..., None])[..., 0].double()  # (V^n, n)
    want = {}
    for text, row in zip(texts.tolist(), each.tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(text) if token in stops), n)
        want[tuple(text[:length])] = sum(row[:length]) / length**penalty

    found = beam_search(model, [prompt], n, V**n, penalty, False, V**n, stops)[0]
    assert len(found) == len(want) and {h.tokens for h in found} == want.keys()
    assert [h.score for h in found] == pytest.approx(sorted(want.values(), reverse=True), rel=1e-4)
    assert sum(math.exp(h.log_probability) for h in found) == pytest.approx(1.0, abs=1e-4)
    best = beam_search(model, [prompt], n, V ** (n - 1), penalty, "never", 1, stops)[0][0]
    assert best.score == pytest.approx(max(want.values()), rel=1e-4)


def test_beams_find_what_greedy_search_misses() -> None:
    rows = complete(generate(MODEL, PROMPTS, 10, GREEDY))
    for prompt, row, (best,) in zip(PROMPTS, rows, beam_search(MODEL, PROMPTS, 10, 5), strict=True):
        greedy = log_probability(MODEL, prompt, row)
        assert best.log_probability > greedy - 1e-4
    assert best.log_probability > greedy + 0.1  # in the last of them by far


# -------------------------------------------------------------------------------- when it ends


def log_probability(model, prompt, tokens) -> float:
    """The law that a score obeys: one pass over the whole text, no cache."""
    idx = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        log_probs = model(idx)[0, len(prompt) - 1 : -1].log_softmax(dim=-1)  # (T, V)
    return float(log_probs.gather(-1, idx[0, len(prompt) :, None]).sum())


def search_to_the_end(model, prompt, max_new_tokens, num_beams, penalty, stops) -> list[tuple]:
    """Beam search without a cache that never stops: (score, tokens) of all that finishes."""
    beams, finished = [((), 0.0)], []
    for length in range(1, max_new_tokens + 1):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens] for tokens, _ in beams]))[:, -1]
        totals = logits.log_softmax(-1) + torch.tensor([total for _, total in beams])[:, None]
        order = totals.flatten().argsort(descending=True).tolist()
        V = logits.shape[1]
        ranked = [((*beams[j // V][0], j % V), float(totals[j // V, j % V])) for j in order]
        ends = length == max_new_tokens
        finished += [
            (total / length**penalty, tokens)
            for tokens, total in ranked[:num_beams]
            if ends or tokens[-1] in stops
        ]
        beams = [(tokens, total) for tokens, total in ranked if tokens[-1] not in stops][:num_beams]
    return sorted(finished, reverse=True)[:num_beams]


@given(searches(most_prompts=1))
def test_what_ends_early_is_what_a_search_to_the_end_finds(search) -> None:
    """For "never" always, for False where the length is no reason to go on."""
    name, arguments = search
    arguments["num_return_sequences"] = arguments["num_beams"]
    model, penalty = MODELS[name], arguments["length_penalty"]
    want = search_to_the_end(
        model, arguments["prompts"][0], arguments["max_new_tokens"], arguments["num_beams"],
        penalty, arguments["stop_tokens"],
    )  # fmt: skip
    for early in ("never", False) if penalty <= 0 else ("never",):
        found = beam_search(model, **(arguments | {"early_stopping": early}))[0]
        assert_same([found], [[(tokens, score) for score, tokens in want]])


def test_with_a_negative_penalty_too_no_search_ends_too_early() -> None:
    """Some of these beams score worse with every step, and still better than the worst result."""
    model, stops = MODELS["gpt2, sure of itself"], [67, 41, 7, 8]
    prompts = token_ids(20, 4, seed=5).tolist()
    want = [search_to_the_end(model, prompt, 12, 3, -0.5, stops) for prompt in prompts]
    for early in (False, "never"):
        found = beam_search(model, prompts, 12, 3, -0.5, early, 3, stops)
        assert_same(found, [[(tokens, score) for score, tokens in own] for own in want])


def test_a_positive_penalty_makes_false_stop_too_early_as_transformers_does() -> None:
    arguments = dict(
        prompts=token_ids(12, 5).tolist(), max_new_tokens=15, num_beams=3, length_penalty=2.0,
        num_return_sequences=3, stop_tokens=[41, 45, 83],
    )  # fmt: skip
    best = {}
    for early in (True, False, "never"):
        found = beam_search(MODEL, **arguments, early_stopping=early)
        assert_same(found, transformers_search("gpt2", **arguments, early_stopping=early))
        best[early] = torch.tensor([own[0].score for own in found])
    for more, less in (("never", False), (False, True)):
        gain = best[more] - best[less]
        assert (gain > -1e-5).all() and (gain > 1e-3).any()


# ------------------------------------------------------------------------------------- the laws


@given(searches())
def test_the_steps_are_a_tree_and_its_sums_are_the_models_own(search) -> None:
    name, arguments = search
    n = arguments["num_beams"]
    del arguments["num_return_sequences"]
    steps = list(beam_steps(MODELS[name], **arguments))
    width = n + len(arguments["stop_tokens"])
    for i, prompt in enumerate(arguments["prompts"]):
        beams = [Hypothesis((), 0.0, 0.0, 0, "kept")]
        for length, step in enumerate(steps, start=1):
            candidates = step[i]
            if not candidates:
                assert not any(later[i] for later in steps[length:])
                break
            assert len(candidates) == len(beams) * width
            sums = [h.log_probability for h in candidates]
            assert sums == sorted(sums, reverse=True)
            for rank, h in enumerate(candidates):
                parent = beams[h.parent]
                assert h.tokens[:-1] == parent.tokens and len(h.tokens) == length
                assert h.log_probability <= parent.log_probability
                assert h.score == h.log_probability / length ** arguments["length_penalty"]
                ends = h.tokens[-1] in arguments["stop_tokens"]
                ends = ends or length == arguments["max_new_tokens"]
                assert (h.fate == "finished") == (ends and rank < n)
                assert not (ends and h.fate == "kept")
            beams = [h for h in candidates if h.fate == "kept"]
            assert len(beams) == (0 if length == arguments["max_new_tokens"] else n)
            best = candidates[-1]  # any will do: the one with the smallest sum
            want = log_probability(MODELS[name], prompt, best.tokens)
            assert best.log_probability == pytest.approx(want, rel=1e-4, abs=1e-4)


@given(searches())
def test_scores_are_the_models_own_log_probabilities(search) -> None:
    name, arguments = search
    for prompt, own in zip(
        arguments["prompts"], beam_search(MODELS[name], **arguments), strict=True
    ):
        assert len(own) == arguments["num_return_sequences"]
        assert [h.score for h in own] == sorted((h.score for h in own), reverse=True)
        assert len({h.tokens for h in own}) == len(own)
        for h in own:
            want = log_probability(MODELS[name], prompt, h.tokens)
            assert h.log_probability == pytest.approx(want, rel=1e-4, abs=1e-4)
            assert h.score == h.log_probability / len(h.tokens) ** arguments["length_penalty"]


@given(searches())
def test_a_batch_equals_each_prompt_alone(search) -> None:
    name, arguments = search
    together = beam_search(MODELS[name], **arguments)
    for prompt, own in zip(arguments["prompts"], together, strict=True):
        (alone,) = beam_search(MODELS[name], **(arguments | {"prompts": [prompt]}))
        assert [(h.tokens, h.parent) for h in own] == [(h.tokens, h.parent) for h in alone]
        assert [h.score for h in own] == pytest.approx([h.score for h in alone], rel=1e-4)


# ------------------------------------------------------------------------------------ the caches


def pool_for(model, n_blocks: int = 80, block_size: int = 4) -> BlockPool:
    config = model.config
    heads = getattr(config, "n_kv_head", config.n_head)
    return BlockPool(config.n_layer, heads, config.head_dim, n_blocks, block_size)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "prompts", [PROMPTS, pytest.param(token_ids(2, 6).tolist(), marks=pytest.mark.slow)]
)
def test_every_cache_gives_the_same(name: str, prompts: list[list[int]]) -> None:
    model, n = MODELS[name], MODELS[name].config.n_layer
    stop = complete(generate(model, prompts[:1], 4, GREEDY))[0][3]
    arguments = (model, prompts, 12, 4, 1.0, False, 4, [stop])
    pool = pool_for(model)
    caches = [
        GrowingCache(n), GrowingCache(n, reserve=40), StaticCache(n, 40), PagedCache(pool),
        cache_for(model.config.windows),
    ]  # fmt: skip
    if "all" in name:
        caches.append(SlidingCache(n, 3))
    want = beam_search(*arguments)
    for cache in caches:
        found = beam_search(*arguments, cache=cache)
        assert tokens_of(found) == tokens_of(want), cache
        for own, other in zip(found, want, strict=True):
            assert [h.score for h in own] == pytest.approx([h.score for h in other], rel=1e-4)
    rounded = [GrowingCache(n, Quantized(8)), StaticCache(n, 40, Quantized(8))]
    a, b = (beam_search(*arguments, cache=cache) for cache in rounded)
    assert tokens_of(a) == tokens_of(b)


def test_a_prompt_is_read_once_and_a_search_that_is_over_costs_nothing() -> None:
    stop = complete(generate(MODEL, PROMPTS[:1], 1, GREEDY))[0][0]
    shapes = []
    hook = MODEL.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    try:
        steps = list(beam_steps(MODEL, PROMPTS, 10, 2, 0.0, True, [stop]))
    finally:
        hook.remove()
    assert shapes[0] == (3, 6) and len(shapes) == len(steps)
    alive = [sum(2 for candidates in step if candidates) for step in steps[1:]]
    assert [tuple(shape) for shape in shapes[1:]] == [(rows, 1) for rows in alive]
    assert alive[0] > alive[-1] > 0


def test_beams_share_the_blocks_of_a_paged_cache() -> None:
    pool = pool_for(MODEL, block_size=4)
    cache = PagedCache(pool)
    for step, _ in enumerate(beam_steps(MODEL, [list(range(3, 21))], 9, 4, cache=cache)):
        tables = [row.table for row in cache.rows]
        if step:
            assert len(tables) == 4 and len({tuple(table[:4]) for table in tables}) == 1
            assert all(pool.users[block] == 4 for block in tables[0][:4])
    held = len(pool.users) - len(pool.free)
    assert held < sum(map(len, tables)) / 2
    cache.reset()
    assert len(pool.free) == len(pool.users) and not any(pool.users)


# ------------------------------------------------------------------------------- edges and errors


def test_where_no_token_is_allowed_a_beam_ends_without_a_result() -> None:
    def first_only(log_probs, rows):
        return only(7)(log_probs, rows) if len(rows[0]) == 3 else log_probs - math.inf

    assert beam_search(MODEL, [[5, 6, 7]], 1, 3, processors=[first_only])[0][0].tokens == (7,)
    assert beam_search(MODEL, [[5, 6, 7]], 2, 3, processors=[first_only]) == [[]]


def test_every_token_may_be_a_stop_token() -> None:
    model = tiny_gpt2(vocab_size=5)
    (own,) = beam_search(model, [[1]], 4, 3, num_return_sequences=3, stop_tokens=range(5))
    with torch.no_grad():
        best = model(torch.tensor([[1]]))[0, -1].topk(3).indices.tolist()
    assert [h.tokens for h in own] == [(token,) for token in best]


def test_prompts_may_be_a_tensor_and_fill_all_positions() -> None:
    idx = token_ids(2, 60)
    found = beam_search(MODEL, idx, 5, 2)  # 60 + 5 - 1 = 64 tokens are fed
    assert tokens_of(found) == tokens_of(beam_search(MODEL, idx.tolist(), 5, 2))
    assert [len(own[0].tokens) for own in found] == [5, 5]


def test_the_mode_and_the_random_state_stay_and_dropout_is_off() -> None:
    want, state = beam_search(MODEL, PROMPTS, 5, 3), torch.get_rng_state()
    MODEL.train()
    try:
        for _ in beam_steps(MODEL, PROMPTS, 5, 3):
            assert MODEL.training
        assert tokens_of(beam_search(MODEL, PROMPTS, 5, 3)) == tokens_of(want)
    finally:
        MODEL.eval()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_half_precision_model_is_normalised_and_summed_in_float32() -> None:
    model = tiny_gpt2().bfloat16()
    first, second, *_ = beam_steps(model, [[5, 6, 7]], 4, 3)
    with torch.no_grad():
        want = model(torch.tensor([[5, 6, 7]]))[0, -1].float().log_softmax(-1)
    for h in first[0]:
        assert h.log_probability == pytest.approx(float(want[h.tokens[0]]), abs=1e-6)
    sums = torch.tensor([h.log_probability for h in second[0]])
    assert (sums != sums.bfloat16()).any()


def test_a_model_that_gives_nan_is_refused() -> None:
    model = tiny_gpt2()
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = math.nan
    with pytest.raises(ValueError, match="the largest logit of row 0 is nan"):
        beam_search(model, [[5]], 3, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_beams": 0}, "num_beams=0 must be an integer, at least 1"),
        ({"early_stopping": "always"}, "early_stopping='always' must be True, False or 'never'"),
        ({"early_stopping": None}, "early_stopping=None"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"length_penalty": -math.inf}, "length_penalty=-inf"),
        ({"length_penalty": 500.0}, "length_penalty=500.0: max_new_tokens=5 to this power"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 60}, "6 tokens and max_new_tokens=60 do not fit into block_size=64"),
        ({"prompts": []}, "at least one token"),
        ({"prompts": [[97]]}, "token id 97 is not below vocab_size=97"),
        ({"stop_tokens": [97]}, "stop token 97"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(change, message) -> None:
    arguments = dict(prompts=PROMPTS, max_new_tokens=5, num_beams=3) | change
    with pytest.raises(ValueError, match=message):
        beam_steps(MODEL, **arguments)  # at the call, not at the first step
    with pytest.raises(ValueError):
        beam_search(MODEL, **arguments)


@pytest.mark.parametrize("number", [0, 4])
def test_no_more_results_than_beams(number: int) -> None:
    with pytest.raises(ValueError, match=rf"num_return_sequences={number} must be"):
        beam_search(MODEL, PROMPTS, 5, 3, num_return_sequences=number)


def test_a_used_cache_is_refused() -> None:
    cache = GrowingCache(MODEL.config.n_layer)
    beam_search(MODEL, [[5, 6]], 3, 2, cache=cache)
    with pytest.raises(ValueError, match="the cache holds 4 tokens already"):
        beam_steps(MODEL, [[5, 6]], 3, 2, cache=cache)
    cache.reset()
    again = beam_search(MODEL, [[5, 6]], 3, 2, cache=cache)
    assert tokens_of(again) == tokens_of(beam_search(MODEL, [[5, 6]], 3, 2))
