"""engine.py: every request says what it would say alone, whoever else is there."""

import pytest
import torch
from caches import pool as new_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.generation.engine import Engine, Request
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import forbid
from lm_from_scratch.generation.sampling import GREEDY, Sampler

MODELS = [
    tiny_gpt2().double(),
    tiny_qwen2().double(),
    tiny_qwen2(sliding_window=3, max_window_layers=1).double(),
]
SAMPLERS = [GREEDY, Sampler(temperature=1.5, top_k=30, repetition_penalty=1.3)]


def alone(model, request: Request) -> list[int]:
    steps = generate(
        model, [request.prompt], request.max_new_tokens, request.sampler, request.stop_tokens,
        seed=request.seed,
    )  # fmt: skip
    return complete(steps)[0]


@settings(max_examples=40)
@given(st.data())
def test_every_request_says_what_it_says_alone(data) -> None:
    draw = data.draw
    model = draw(st.sampled_from(MODELS))
    block_size, n_blocks = draw(st.sampled_from([(1, 24), (1, 40), (2, 12), (4, 6), (4, 40)]))
    engine = Engine(
        model, new_pool(model, block_size, n_blocks), draw(st.integers(1, 5)),
        draw(st.sampled_from([2, 5, 64])), draw(st.booleans()),
    )  # fmt: skip
    beginnings = [token_ids(n, seed=n).tolist() for n in (9, 5)]
    requests, steps = [], engine.run()
    for i in range(draw(st.integers(1, 8))):
        start = draw(st.sampled_from(beginnings))[: draw(st.integers(0, 9))]
        requests.append(
            Request(
                prompt=start + token_ids(draw(st.integers(1, 6)), seed=i).tolist(),
                max_new_tokens=draw(st.integers(1, 10)),
                sampler=draw(st.sampled_from(SAMPLERS)),
                stop_tokens=draw(st.sampled_from([(), range(20, 45)])),
                seed=i,
            )
        )
        assert engine.submit(requests[-1]) == i
        for _ in range(draw(st.integers(0, 3))):
            next(steps, None)
            if not (engine.waiting or engine.running):
                steps = engine.run()
    for _ in engine.run():
        pass
    for number, request in enumerate(requests):
        assert engine.results[number] == alone(model, request)
    held = set(engine.prefixes.values())
    assert [n > 0 for n in engine.pool.users] == [b in held for b in range(n_blocks)]
    assert len(engine.pool.free) == n_blocks - len(held)


def test_requests_join_and_leave_between_two_steps() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 4), max_batch=2)
    for n in (2, 5, 3):
        engine.submit(Request(prompt=[5, 6, 7], max_new_tokens=n, sampler=GREEDY))
    fed = [dict(step.fed) for step in engine.run()]
    assert [sorted(step) for step in fed] == [[0, 1], [0, 1], [1, 2], [1, 2], [1, 2]]
    assert [len(engine.results[n]) for n in range(3)] == [2, 5, 3]


def test_a_shared_beginning_is_computed_once() -> None:
    model = MODELS[0]
    beginning = token_ids(17, seed=3).tolist()
    fed = {}
    for share in (True, False):
        engine = Engine(model, new_pool(model, 4), share_prefixes=share)
        engine.submit(Request(prompt=[*beginning, 5], max_new_tokens=3, sampler=GREEDY))
        for _ in engine.run():
            pass
        number = engine.submit(Request(prompt=[*beginning, 9], max_new_tokens=3, sampler=GREEDY))
        steps = list(engine.run())
        fed[share] = sum(step.fed.get(number, 0) for step in steps)
        assert steps[0].shared == ({number: 16} if share else {})
    assert fed == {True: 18 - 16 + 2, False: 18 + 2}


def test_a_prompt_that_is_known_as_a_whole_still_runs_one_token() -> None:
    model = MODELS[0]
    engine = Engine(model, new_pool(model, 4))
    request = Request(prompt=token_ids(8, seed=3).tolist(), max_new_tokens=4, sampler=GREEDY)
    for _ in range(2):
        engine.submit(request)
        for _ in engine.run():
            pass
    assert engine.results[0] == engine.results[1] == alone(model, request)


def test_where_the_pool_runs_out_the_youngest_waits_and_nothing_is_lost() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 2, n_blocks=9), share_prefixes=False)
    requests = [Request(prompt=[5 + i], max_new_tokens=12, sampler=GREEDY) for i in range(3)]
    for request in requests:
        engine.submit(request)
    steps = list(engine.run())
    put_back = [number for step in steps for number in step.put_back]
    assert put_back and 0 not in put_back
    for number, request in enumerate(requests):
        assert engine.results[number] == alone(model, request)
    assert max(step.blocks for step in steps) <= 9 and steps[-1].blocks == 0


def run_all(engine: Engine, later: Request | None = None, after: int = 0) -> list[int]:
    """Run everything, with one more request after some steps; the numbers that were put back."""
    put_back = []
    for number, step in enumerate(engine.run(), 1):
        put_back += step.put_back
        if number == after and later:
            engine.submit(later)
    return put_back


def test_a_request_that_is_read_in_pieces_may_put_back_a_younger_one_that_decodes() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 1, n_blocks=23), prefill_chunk=4, share_prefixes=False)
    requests = [
        Request(prompt=token_ids(20, seed=1).tolist(), max_new_tokens=2, sampler=GREEDY),
        Request(prompt=[5], max_new_tokens=12, sampler=GREEDY),
    ]
    for request in requests:
        engine.submit(request)
    assert run_all(engine) == [1]
    assert [engine.results[n] for n in (0, 1)] == [alone(model, r) for r in requests]
    assert len(engine.pool.free) == 23


def test_a_request_that_has_finished_in_the_first_pass_of_a_step_is_not_put_back() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 1, n_blocks=20), prefill_chunk=4, share_prefixes=False)
    requests = [
        Request(prompt=[5], max_new_tokens=12, sampler=GREEDY),
        Request(prompt=token_ids(12, seed=1).tolist(), max_new_tokens=1, sampler=GREEDY),
    ]
    engine.submit(requests[0])
    assert run_all(engine, requests[1], after=6) == []
    assert [engine.results[n] for n in (0, 1)] == [alone(model, r) for r in requests]


def test_a_request_that_does_not_fit_yet_costs_no_prefix() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 2, n_blocks=8))
    engine.submit(Request(prompt=[5, 6, 7, 8, 9], max_new_tokens=1, sampler=GREEDY))
    list(engine.run())
    engine.submit(Request(prompt=[20], max_new_tokens=8, sampler=GREEDY))
    engine.submit(Request(prompt=[30] * 13, max_new_tokens=1, sampler=GREEDY))
    engine.step()
    assert len(engine.waiting) == 1 and list(engine.prefixes) == [(5, 6), (5, 6, 7, 8)]
    assert run_all(engine) == []


def test_prefixes_are_given_up_for_memory_the_ones_that_others_build_on_last() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 2, n_blocks=5))
    engine.submit(Request(prompt=[5, 6, 7, 8, 9], max_new_tokens=1, sampler=GREEDY))
    list(engine.run())
    assert list(engine.prefixes) == [(5, 6), (5, 6, 7, 8)]
    engine.submit(Request(prompt=[5, 6, 7, 8, 9], max_new_tokens=1, sampler=GREEDY))
    list(engine.run())
    assert list(engine.prefixes) == [(5, 6, 7, 8), (5, 6)]
    engine.submit(Request(prompt=[20] * 7, max_new_tokens=1, sampler=GREEDY))
    list(engine.run())
    assert (5, 6) in engine.prefixes and (5, 6, 7, 8) not in engine.prefixes


def test_bad_requests_are_refused_when_they_are_submitted() -> None:
    model = MODELS[0]
    engine = Engine(model, new_pool(model, 4, n_blocks=3))
    for request, message in (
        (Request(prompt=[], max_new_tokens=1), "at least one token"),
        (Request(prompt=[97], max_new_tokens=1), "token id 97"),
        (Request(prompt=[5], max_new_tokens=0), "max_new_tokens=0"),
        (Request(prompt=[5] * 10, max_new_tokens=4), "need 4 blocks, the pool has 3"),
        (Request(prompt=[5], max_new_tokens=1, stop_tokens=[99]), "stop token 99"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    assert not engine.waiting
    for bad in (dict(max_batch=0), dict(prefill_chunk=0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            Engine(model, engine.pool, **bad)
    assert engine.submit(Request(prompt=torch.tensor([5, 6]).tolist(), max_new_tokens=1)) == 0


def test_a_request_that_cannot_go_on_does_not_stop_the_others() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 4))
    good = Request(prompt=[5, 6, 7], max_new_tokens=4, sampler=GREEDY)
    bad = Request(prompt=[8, 9], max_new_tokens=4, processors=[forbid(range(97))])
    for request in (good, bad, good):
        engine.submit(request)
    steps = list(engine.run())
    assert engine.results == {0: alone(model, good), 2: alone(model, good)}
    assert list(engine.errors) == [1] and "no token can be chosen" in str(engine.errors[1])
    assert [number for step in steps for number in step.failed] == [1]
    assert len(engine.pool.free) == len(engine.pool.users) - len(engine.prefixes)


def test_a_pool_that_others_hold_is_an_error_and_no_endless_loop() -> None:
    model = MODELS[1]
    pool = new_pool(model, 4, n_blocks=3)
    pool.allocate(), pool.allocate()
    engine = Engine(model, pool)
    engine.submit(Request(prompt=[5] * 7, max_new_tokens=2))
    with pytest.raises(ValueError, match="2 more blocks are needed, 1 are free: others than this"):
        engine.step()


def test_an_engine_and_its_pool_belong_together() -> None:
    with pytest.raises(ValueError, match=r"the pool is for .*float64.*the model has .*float32"):
        Engine(tiny_qwen2(), new_pool(MODELS[1], 4))
    engine = Engine(MODELS[1], new_pool(MODELS[1], 4))
    with pytest.raises(ValueError, match="seed="):
        engine.submit(Request(prompt=[5], max_new_tokens=1, seed=2**65))
    prompt = [5, 6]
    engine.submit(Request(prompt=prompt, max_new_tokens=3, sampler=GREEDY))
    prompt.append(7)
    list(engine.run())
    assert len(engine.results[0]) == 3
