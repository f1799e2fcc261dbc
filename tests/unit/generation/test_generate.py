"""generate.py: a row of a batch says what it would say alone, and the same as transformers.

A G and a number in a name is a mistake of a real program; the pages use the same numbers.
"""

import os
import subprocess
import sys
from fractions import Fraction
from functools import cache

import pytest
import torch
from caches import KINDS, MODELS
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids
from torch._dynamo.testing import CompileCounter

from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, cache_for
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.generate import (
    as_prompts,
    complete,
    decode,
    forward_seconds,
    generate,
    prefill,
)
from lm_from_scratch.generation.logit_processors import forbid, no_repeat_ngram
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.generation.speculative import PromptLookup, speculate
from lm_from_scratch.generation.text import generate_text, until
from lm_from_scratch.models.modes import evaluating

MODEL = tiny_gpt2(attn_pdrop=0.3, resid_pdrop=0.3)
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]
SAMPLER = Sampler(temperature=1.5, top_k=30, top_p=0.95, repetition_penalty=1.2)


def naive_greedy(prompt: list[int], n: int) -> list[int]:
    """The whole sequence again for every token, no cache."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(MODEL(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_with_a_cache_equals_the_whole_sequence_again() -> None:
    want = [naive_greedy(prompt, 20) for prompt in PROMPTS]
    assert complete(generate(MODEL, PROMPTS, 20, GREEDY)) == want
    assert complete(generate(MODEL, PROMPTS[:1], 20, GREEDY)) == want[:1]


def test_greedy_equals_transformers_for_left_padded_prompts() -> None:
    twin = hf_twin(MODEL)
    n = max(map(len, PROMPTS))
    idx = torch.tensor([[0] * (n - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (n - len(p)) + [1] * len(p) for p in PROMPTS])
    out = twin.generate(
        idx, attention_mask=mask, max_new_tokens=20, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert complete(generate(MODEL, PROMPTS, 20, GREEDY)) == out[:, n:].tolist()


@examples(6, 15)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 1000))
def test_a_row_of_a_batch_equals_the_row_alone(lengths: list[int], seed: int) -> None:
    prompts = [token_ids(n, seed=seed + i).tolist() for i, n in enumerate(lengths)]
    together = complete(generate(MODEL, prompts, 12, SAMPLER, stop_tokens=[4, 5, 6], seed=seed))
    for i, prompt in enumerate(prompts):
        alone = complete(
            generate(MODEL, [prompt], 12, SAMPLER, stop_tokens=[4, 5, 6], seed=seed + i)
        )
        assert together[i] == alone[0]


def test_rows_finish_one_by_one() -> None:
    greedy = [naive_greedy(prompt, 12) for prompt in PROMPTS]
    stop = greedy[0][2]
    rows = complete(generate(MODEL, PROMPTS, 12, GREEDY, stop_tokens=[stop]))
    for row, full in zip(rows, greedy, strict=True):
        end = full.index(stop) + 1 if stop in full else 12
        assert row == full[:end]
    steps = list(generate(MODEL, PROMPTS[:1], 12, GREEDY, stop_tokens=[stop]))
    assert steps[-1] == [stop] and len(steps) == greedy[0].index(stop) + 1


def test_the_penalty_of_a_row_comes_from_the_row() -> None:
    sampler = Sampler(temperature=0.0, repetition_penalty=5.0)
    together = complete(generate(MODEL, PROMPTS, 15, sampler))
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert complete(generate(MODEL, [prompt], 15, sampler))[0] == row


def test_padding_is_never_penalised() -> None:
    """Token 0 fills the padding; a row that never said it must not be charged for it."""
    sampler = Sampler(temperature=0.0, repetition_penalty=1e6)
    rows = complete(generate(MODEL, [[5] * 20, [7]], 30, sampler))
    alone = complete(generate(MODEL, [[7]], 30, sampler))
    assert rows[1] == alone[0]


def test_every_prompt_gives_as_many_rows_as_asked() -> None:
    rows = complete(generate(MODEL, PROMPTS, 9, SAMPLER, num_return_sequences=3, seed=2))
    assert len(rows) == 9
    assert len({tuple(row) for row in rows[:3]}) > 1
    again = complete(generate(MODEL, PROMPTS, 9, SAMPLER, num_return_sequences=3, seed=2))
    assert rows == again


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(training: bool) -> None:
    MODEL.train(training)
    try:
        for step, _ in enumerate(generate(MODEL, PROMPTS, 5, GREEDY)):
            assert MODEL.training is training  # also between two tokens
            if step == 2:
                break
        assert MODEL.training is training
        with pytest.raises(RuntimeError), evaluating(MODEL):
            assert not MODEL.training
            raise RuntimeError
        assert MODEL.training is training
    finally:
        MODEL.eval()


def test_dropout_is_off_while_generating() -> None:
    MODEL.train()
    try:
        a = complete(generate(MODEL, PROMPTS, 8, GREEDY))
        assert a == complete(generate(MODEL, PROMPTS, 8, GREEDY))
    finally:
        MODEL.eval()


def test_the_callers_random_state_is_untouched() -> None:
    state = torch.get_rng_state()
    complete(generate(MODEL, PROMPTS, 5, SAMPLER, seed=3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 60}, "6 tokens and max_new_tokens=60 do not fit into block_size=64"),
        ({"prompts": []}, "at least one token"),
        ({"prompts": [[5], []]}, "at least one token"),
        ({"prompts": [[97]]}, "token id 97 is not below vocab_size=97"),
        ({"prompts": [[-1]]}, "token id -1"),
        ({"stop_tokens": [50256]}, "stop token 50256"),
        ({"num_return_sequences": 0}, "num_return_sequences=0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(change, message) -> None:
    arguments = dict(prompts=PROMPTS, max_new_tokens=5, sampler=GREEDY) | change
    with pytest.raises(ValueError, match=message):
        generate(MODEL, **arguments)  # at the call, not at the first token


def test_the_last_position_can_be_used() -> None:
    rows = complete(generate(MODEL, [[5] * 60], 5, GREEDY))
    assert len(rows[0]) == 5  # 60 + 5 - 1 = 64 tokens are fed


def test_time_is_measured_in_evaluation_mode_after_a_warm_up() -> None:
    modes = []
    hook = MODEL.register_forward_hook(
        lambda module, args, out: modes.append((module.training, out.requires_grad))
    )
    MODEL.train()
    try:
        assert forward_seconds(MODEL, token_ids(1, 10), repeats=3) > 0
        assert modes == [(False, False)] * 4
        assert MODEL.training
    finally:
        hook.remove()
        MODEL.eval()
    with pytest.raises(ValueError, match="repeats=0"):
        forward_seconds(MODEL, token_ids(1, 10), repeats=0)


def test_padded_tensors_become_prompts() -> None:
    idx = torch.tensor([[0, 0, 5], [6, 7, 8]])
    assert as_prompts(idx, torch.tensor([[0, 0, 1], [1, 1, 1]])) == [[5], [6, 7, 8]]
    assert as_prompts(idx) == idx.tolist()
    with pytest.raises(ValueError, match=r"\(2, 1\), idx \(2, 3\)"):
        as_prompts(idx, torch.ones(2, 1))


def test_text_streams_and_ends_with_the_document() -> None:
    model, tokenizer = load_shipped()
    pieces = list(generate_text(model, tokenizer, "Return the", 30, GREEDY))
    assert len(pieces) > 5
    text = "".join(pieces)
    assert "<|endoftext|>" not in text
    ids = [tokenizer.eos_token_id, *tokenizer.encode("Return the")]
    end = tokenizer.eos_token_id
    row = complete(generate(model, [ids], 30, GREEDY, stop_tokens=[end]))[0]
    assert text == tokenizer.decode([t for t in row if t != end])


def test_the_penalty_equals_transformers_over_a_whole_generation() -> None:
    """Prompt tokens and generated ones are charged, each row its own."""
    twin = hf_twin(MODEL)
    prompts = [row.tolist() for row in token_ids(3, 6)]  # one length: transformers counts pads
    for penalty in (1.5, 0.7):
        sampler = Sampler(temperature=0.0, repetition_penalty=penalty)
        out = twin.generate(
            torch.tensor(prompts), attention_mask=torch.ones(3, 6, dtype=torch.long),
            max_new_tokens=20, do_sample=False, repetition_penalty=penalty, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert complete(generate(MODEL, prompts, 20, sampler)) == out[:, 6:].tolist()


def test_each_module_gets_its_own_mode_back() -> None:
    model = tiny_gpt2(resid_pdrop=0.5)
    model.train()
    model.transformer.h[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert not model.transformer.h[1].mlp.training
    assert model.training and model.transformer.h[0].training
    model.eval()
    model.transformer.h[0].mlp.train()
    with evaluating(model):
        assert not model.transformer.h[0].mlp.training
    assert model.transformer.h[0].mlp.training and not model.training


def test_the_sampler_sees_float32_logits_of_a_half_precision_model() -> None:
    seen_dtypes = []

    class Spy(Sampler):
        def __call__(self, logits, seen, u):
            seen_dtypes.append(logits.dtype)
            return super().__call__(logits, seen, u)

    complete(generate(tiny_gpt2().bfloat16(), PROMPTS, 3, Spy()))
    assert seen_dtypes == [torch.float32] * 3


def test_a_text_starts_with_the_end_of_text_token_and_never_shows_it(monkeypatch) -> None:
    model, tokenizer = load_shipped()
    end, given = tokenizer.eos_token_id, []

    def fake(model, prompts, *args, **kwargs):
        given.extend(prompts)
        return iter([[t] for t in [*tokenizer.encode("fine."), end]])

    monkeypatch.setattr("lm_from_scratch.generation.text.generate", fake)
    assert "".join(generate_text(model, tokenizer, "All is", 9)) == "fine."
    assert given == [[end, *tokenizer.encode("All is")]]


def test_prompts_may_be_a_tensor_but_not_fractions() -> None:
    idx = token_ids(2, 4)
    assert complete(generate(MODEL, idx, 5, GREEDY)) == complete(
        generate(MODEL, idx.tolist(), 5, GREEDY)
    )
    with pytest.raises(ValueError, match=r"token id 5\.7"):
        generate(MODEL, [[5.7]], 5, GREEDY)


@cache
def said_without_a_cache_given(name: str) -> list[list[int]]:
    return complete(generate(MODELS[name], PROMPTS, 15, SAMPLER, seed=3, num_return_sequences=2))


@pytest.mark.parametrize("kind", [k for k in KINDS if "bits" not in k])
@pytest.mark.parametrize("name", MODELS)
def test_any_kind_of_cache_gives_the_same_text(kind: str, name: str) -> None:
    model = MODELS[name]
    cache = KINDS[kind](model)
    if not cache:
        return
    want = said_without_a_cache_given(name)
    got = generate(
        model, PROMPTS, 15, SAMPLER, seed=3, num_return_sequences=2, cache=cache, prefill_chunk=4
    )
    assert complete(got) == want
    with pytest.raises(ValueError, match=r"the cache holds \d+ tokens already"):
        generate(model, PROMPTS, 15, SAMPLER, cache=cache)


def test_a_prompt_is_read_once_whatever_comes_of_it() -> None:
    fed = []
    hook = MODEL.register_forward_pre_hook(lambda module, args: fed.append(tuple(args[0].shape)))
    complete(generate(MODEL, PROMPTS, 3, GREEDY, num_return_sequences=4, prefill_chunk=4))
    hook.remove()
    assert fed == [(3, 4), (3, 2), (12, 1), (12, 1)]
    for bad in (dict(prefill_chunk=0), dict(prefill_chunk=-1)):
        with pytest.raises(ValueError, match="prefill_chunk="):
            generate(MODEL, PROMPTS, 3, **bad)
    with pytest.raises(ValueError, match="chunk=0"):
        prefill(MODEL, token_ids(1, 3), GrowingCache(3), chunk=0)


def test_the_default_cache_never_grows_while_it_generates() -> None:
    made = []
    cache = cache_for(MODEL.config.windows, reserve=26)
    steps = generate(MODEL, PROMPTS, 20, GREEDY, cache=cache)
    for _ in steps:
        made.append((cache.keys[0].parts[0].data_ptr(), cache.nbytes))
    assert len(set(made)) == 1


@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_text_ends_before_the_first_stop_string_wherever_pieces_end(text, stop, sizes) -> None:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    said = list(until(pieces, stop))
    assert "".join(said) == ends_before(text, stop)
    assert "" not in said


def ends_before(text: str, stop: list[str]) -> str:
    """Letter by letter: once a stop string is complete the text ends before the longest that is."""
    for n in range(len(text) + 1):
        if complete_now := [s for s in stop if text[:n].endswith(s)]:
            return text[: n - max(map(len, complete_now))]
    return text


@given(st.text("abc", max_size=7), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_no_border_of_a_piece_changes_where_a_text_ends(text, stop) -> None:
    want = ends_before(text, stop)
    for cuts in range(2 ** max(len(text) - 1, 0)):  # every way to cut it
        pieces, start = [], 0
        for end in range(1, len(text) + 1):
            if end == len(text) or cuts >> (end - 1) & 1:
                pieces.append(text[start:end])
                start = end
        assert "".join(until(pieces, stop)) == want


def test_the_stop_string_that_ends_first_is_the_first() -> None:
    assert "".join(until(["abcd"], ["b", "abc"])) == "".join(until("abcd", ["b", "abc"])) == "a"
    assert "".join(until(["ab", "cd"], ["bcd", "cd", "abcde"])) == "a"


def test_text_is_held_back_only_while_it_could_begin_a_stop_string() -> None:
    source = iter("xSTxSTOPy")
    said = until(source, ["STOP"])
    assert next(said) == "x" and next(said) == "STx" and list(said) == []
    assert next(source) == "y"  # nothing was read after the end
    assert list(until(["a", "S", "T"], ["STOP"])) == ["a", "ST"]
    for bad in ([""], ["a", ""], [5], None, (word for word in ["a"])):
        with pytest.raises(ValueError, match="stop="):
            until(["a"], bad)


def test_a_stop_string_across_the_borders_of_tokens() -> None:
    model, tokenizer = load_shipped()
    text = "".join(generate_text(model, tokenizer, "Return the", 40, GREEDY))
    stop = text[7:13]
    assert len(tokenizer.encode(stop)) > 1
    said = "".join(generate_text(model, tokenizer, "Return the", 40, GREEDY, stop=[stop, "@@"]))
    assert said == text[: text.index(stop)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_decoding_through_a_static_cache_is_compiled_once(make) -> None:
    """A graph for the prompts and one for every other step, whatever their length."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = make()
    compiled = torch.compile(model, backend=counter)
    want = complete(generate(model, PROMPTS, 25, GREEDY))
    graphs = []
    for prompts in (PROMPTS, [p[::-1] for p in PROMPTS], [[7] * 6] * 3):
        steps = generate(compiled, prompts, 25, GREEDY, cache=StaticCache(3, capacity=40))
        said = complete(steps)
        graphs.append(counter.frame_count)
        if prompts is PROMPTS:
            assert said == want
    assert graphs == [2, 2, 2]
    cache = StaticCache(3, capacity=6)
    with torch.no_grad():
        compiled(token_ids(3, 6), positions=torch.arange(6).expand(3, -1), cache=cache)
        with pytest.raises((RuntimeError, IndexError)):  # a graph does not read positions
            compiled(token_ids(3, 1), positions=torch.full((3, 1), 6), cache=cache)


def test_a_cache_serves_one_generation() -> None:
    cache = GrowingCache(3)
    first = generate(MODEL, [[5, 6]], 4, GREEDY, cache=cache)
    second = generate(MODEL, [[7, 8]], 4, GREEDY, cache=cache)
    next(first)
    with pytest.raises(ValueError, match="tokens already; it must be empty"):
        next(second)


def test_a_row_that_has_finished_is_left_alone() -> None:
    """The first row ends at once; after that its processors would leave it no token."""
    ending = {5: 7}
    calls = []

    def rule(logits, rows):
        calls.append([row[0] for row in rows])
        logits = logits.clone()
        for line, row in zip(logits, rows, strict=True):
            if row[0] == 5:
                line[[t for t in range(97) if t != 7 or 7 in row]] = -torch.inf
        return logits

    both = complete(generate(MODEL, [[5, 6], [9]], 4, GREEDY, [ending[5]], processors=[rule]))
    assert both[0] == [7] and both[1] == naive_greedy([9], 4)
    assert calls == [[5, 9], [9], [9], [9]]


@pytest.mark.parametrize(
    "bad", [dict(max_new_tokens=2.5), dict(prefill_chunk=1.5), dict(seed=0.5), dict(seed=True)]
)
def test_numbers_must_be_whole(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        generate(MODEL, **(dict(prompts=PROMPTS, max_new_tokens=3) | bad))


def test_prompts_are_lists_in_a_list_and_a_cache_keeps() -> None:
    with pytest.raises(ValueError, match="lists of token ids, one list for each row"):
        generate(MODEL, [1, 2, 3], 4)
    with pytest.raises(ValueError, match="the cache is a NoCache: it must keep"):
        generate(MODEL, [[1]], 4, cache=NO_CACHE)


def test_one_stop_string_need_not_be_in_a_list() -> None:
    assert "".join(until(["aEN", "Db"], "END")) == "a"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: generate(m, None, 3), "prompts=None must be a list"),
        (lambda m: generate(m, 5, 3), "prompts=5 must be a list"),
        (lambda m: generate(m, "text", 3), "prompts='text' must be a list"),
        (lambda m: generate(m, [5, 6], 3), "one list for each row"),
        (lambda m: generate(m, [torch.tensor([0.5])], 3), "token id 0.5 must be an int"),
        (lambda m: generate(m, [[5]], 3, stop_tokens=5), r"stop_tokens=5 must be a list, as \[5\]"),
        (lambda m: generate(m, [[5]], 3, stop_tokens=["5"]), "stop token '5' is no id below"),
        (lambda m: generate(m, [[5]], 3, stop_tokens=[1.0]), "stop token 1.0 is no id below"),
        (lambda m: generate(m, [[5]], 3, sampler="greedy"), "sampler='greedy' must be a Sampler"),
        (lambda m: generate(m, [[5]], 3, processors=forbid([5])), "processors=.* must be a list"),
        (lambda m: generate(m, [[5]], 3, num_return_sequences="2"), "num_return_sequences='2'"),
        (lambda m: beam_search(m, [[5]], 3, "2"), "num_beams='2' must be an integer"),
        (lambda m: beam_search(m, [[5]], 3, 2, length_penalty="x"), "length_penalty='x'"),
        (
            lambda m: beam_search(m, [[5]], 3, 2, num_return_sequences="x"),
            "num_return_sequences='x'",
        ),
        (lambda m: beam_search(m, [[5]], 3, 2, stop_tokens=5), "stop_tokens=5 must be a list"),
        (lambda m: beam_search(m, [[5]], 3, 2, processors=forbid([5])), "processors=.* a list"),
        (lambda m: speculate(m, PromptLookup(), [[5]], 3, n_draft="x"), "n_draft='x' must be"),
        (lambda m: speculate(m, PromptLookup(), [[5]], 3, GREEDY, 2, 5), "stop_tokens=5 must be"),
        (lambda m: speculate(m, PromptLookup(), [[5]], 3, "x"), "sampler='x' must be a Sampler"),
        (lambda m: no_repeat_ngram("x"), "n='x' must be an integer"),
        (lambda m: Sampler(temperature="x"), "temperature='x' must be a finite number"),
        (lambda m: Sampler(top_p=None), "top_p=None must be a finite number"),
        (lambda m: Sampler(top_k="x"), "top_k='x' must be a whole number"),
        (lambda m: Sampler(top_k=2.5), "top_k=2.5 must be a whole number"),
        (lambda m: Sampler(top_k=True), "top_k=True must be a whole number"),
        (lambda m: Sampler(temperature=Fraction(1, 2)), "temperature=.* must be a finite number"),
        (lambda m: generate(m, [[True]], 3), "token id True must be an int"),
        (lambda m: beam_search(m, [[5]], 3, 2, num_return_sequences=2.0), "sequences=2.0 must be"),
        (lambda m: StaticCache(3, "x"), "capacity='x' must be an integer"),
        (lambda m: SlidingCache(3, "x"), "window=x must be"),
        (lambda m: GrowingCache(3, reserve=None), "reserve=None must be an integer"),
        (lambda m: BlockPool(3, 2, 8, "x"), "n_blocks='x' must be an integer"),
        (lambda m: Quantized(8, "x"), "group=x must be"),
    ],
)
def test_an_argument_of_another_type_is_refused_in_one_line(call, message) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        call(tiny_gpt2())
    assert "\n" not in str(refused.value)


def test_a_request_with_arguments_of_other_types_is_refused() -> None:
    model = tiny_gpt2()
    engine = Engine(model, BlockPool(3, 4, 7, 8))
    for bad in (dict(stop_tokens=5), dict(sampler="x"), dict(processors=len), dict(prompt=5)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            engine.submit(Request(**{"prompt": [5], "max_new_tokens": 2, **bad}))
    with pytest.raises(ValueError, match="max_batch='x' must be an integer"):
        Engine(model, engine.pool, max_batch="x")


def test_a_generation_that_inference_mode_began_goes_on_outside() -> None:
    sampler = Sampler(repetition_penalty=1.5)
    with torch.inference_mode():
        steps = generate(MODEL, [[5, 6]], 6, sampler)
        first = next(steps)
    assert [*first, *(t for (t,) in steps)] == complete(generate(MODEL, [[5, 6]], 6, sampler))[0]


def test_as_much_is_reserved_as_may_be_said_up_to_a_limit() -> None:
    model = tiny_qwen2()
    steps = generate(model, [[5]], 10**9, stop_tokens=range(model.config.vocab_size))
    assert len(list(steps)) == 1


def test_a_prompt_may_be_a_tensor_of_one_row() -> None:
    model, ids = tiny_gpt2(), token_ids(1, 5)[0]
    want = complete(generate(model, [ids.tolist()], 4, GREEDY))
    for prompts in (ids, [ids], ids[None]):
        assert complete(generate(model, prompts, 4, GREEDY)) == want
    assert beam_search(model, ids, 3, 2) == beam_search(model, [ids.tolist()], 3, 2)


def test_what_a_decoder_gets_is_a_tensor_as_any_other() -> None:
    """Decoding skips bookkeeping inside; logits can be written into, the cache goes on outside."""
    cache = cache_for(MODEL.config.windows)
    logits = prefill(MODEL, torch.tensor([[1, 2, 3], [4, 5, 6]]), cache)
    more = decode(MODEL, logits.argmax(dim=-1), cache, positions=torch.tensor([3, 3]))
    for x in (logits, more):
        assert not x.is_inference()
        x[:, 0] = 0.0
        (torch.ones((), requires_grad=True) * x).sum().backward()
    cache.crop(torch.tensor([2, 3]))
    with torch.no_grad():
        MODEL(torch.tensor([[7], [8]]), positions=torch.tensor([[2], [3]]), cache=cache)
    assert cache.lengths.tolist() == [3, 4]


@pytest.mark.parametrize("positions", [None, torch.tensor([[-1, 0, 1], [0, 1, 2]])])
def test_what_prefill_leaves_can_be_written_into(positions) -> None:
    model = tiny_gpt2()
    cache = cache_for(model.config.windows)
    logits = prefill(model, token_ids(2, 3), cache, positions=positions)
    place = None if positions is None else positions[:, -1] + 1
    logits = logits + decode(model, logits.argmax(dim=1), cache, positions=place)
    logits.zero_()
    cache.tracks[0].positions.clamp_(min=0)
    for layer in range(model.config.n_layer):
        keys, values, _ = cache.contents(layer)
        keys.add_(1.0)
        values.add_(1.0)


@pytest.mark.slow
def test_an_fsdp_model_trains_after_it_has_generated(tmp_path) -> None:
    code = """if True:
        import torch, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from tiny_models import tiny_gpt2, token_ids
        from lm_from_scratch.generation.generate import complete, generate
        from lm_from_scratch.generation.sampling import GREEDY
        want = complete(generate(tiny_gpt2(), [[1, 2, 3]], 3, GREEDY))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = tiny_gpt2()
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        assert complete(generate(model, [[1, 2, 3]], 3, GREEDY)) == want
        model(token_ids(1, 4)).sum().backward()
        dist.destroy_process_group()
    """
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)
