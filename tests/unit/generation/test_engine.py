"""engine.py: every request says what it would say alone, whoever else is there."""

import sys
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from caches import pool as new_pool
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

import lm_from_scratch
from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.generation import engine as engine_module
from lm_from_scratch.generation.engine import PASS, Engine, Snapshot
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import forbid
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import GREEDY, Sampler

MODELS = [
    tiny_gpt2().double(),
    tiny_qwen2().double(),
    tiny_qwen2(sliding_window=3, max_window_layers=1).double(),
]
PACKAGE = str(Path(lm_from_scratch.__file__).parent)
SAMPLERS = [GREEDY, Sampler(temperature=1.5, top_k=30, repetition_penalty=1.3)]


def alone(model, request: Request) -> list[int]:
    steps = generate(
        model, [request.prompt], request.max_new_tokens, request.sampler, request.stop_tokens,
        seed=request.seed,
    )  # fmt: skip
    return complete(steps)[0]


@examples(14, 40)
@given(st.data())
def test_every_request_says_what_it_says_alone(data) -> None:
    draw = data.draw
    model = draw(st.sampled_from(MODELS))
    block_size, n_blocks = draw(st.sampled_from([(1, 24), (1, 40), (2, 12), (4, 6), (4, 40)]))
    engine = Engine(
        model, new_pool(model, block_size, n_blocks), draw(st.integers(1, 5)),
        draw(st.sampled_from([2, 5, 64])), draw(st.booleans()),
    )  # fmt: skip
    with patch.object(engine_module, "PASS", draw(st.sampled_from([0, 2, PASS]))):
        run_while_they_arrive(engine, model, n_blocks, draw)


def run_while_they_arrive(engine: Engine, model, n_blocks: int, draw) -> None:
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
    held = {prefix.block for prefix in engine.prefixes.values()}
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


@pytest.mark.parametrize("most_padding", [0, 5, PASS])
def test_similar_pieces_are_read_together_and_nobody_waits_for_it(
    most_padding, monkeypatch
) -> None:
    """Every prompt in the engine is read on in every step, whichever the others are. Prompts share
    a pass while padding takes at most ``PASS`` places: what another pass would cost."""
    monkeypatch.setattr(engine_module, "PASS", most_padding)
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 4, n_blocks=400), max_batch=6, prefill_chunk=8)
    lengths = [3, 30, 1, 17, 8, 9, 25, 2, 2, 40]
    requests = [
        Request(prompt=token_ids(n, seed=n).tolist(), max_new_tokens=4, sampler=GREEDY)
        for n in lengths
    ]
    for request in requests:
        engine.submit(request)
    steps = list(engine.run())
    assert engine.results == {n: alone(model, request) for n, request in enumerate(requests)}
    came = {n: min(i for i, step in enumerate(steps) if n in step.fed) for n in range(10)}
    spoke = {n: min(i for i, step in enumerate(steps) if n in step.tokens) for n in range(10)}
    for number, n in enumerate(lengths):
        assert spoke[number] - came[number] + 1 == -(-n // 8)  # pieces of 8, one a step
    assert sorted(came.values()) == [came[n] for n in range(10)]  # in the order of arrival
    padding = [(step.places - sum(step.fed.values()), step.passes) for step in steps]
    assert all(places <= most_padding * passes for places, passes in padding)
    assert (max(passes for _, passes in padding) > 2) == (most_padding < PASS)


def test_prompts_are_read_in_pieces_unless_asked_otherwise() -> None:
    model = tiny_gpt2(block_size=300).double()
    engine = Engine(model, new_pool(model, 16))
    request = Request(prompt=token_ids(150, seed=1).tolist(), max_new_tokens=2, sampler=GREEDY)
    engine.submit(request)
    assert [step.fed[0] for step in engine.run()] == [64, 64, 22, 1]
    assert engine.results[0] == alone(model, request)


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
    # put back: preempted, its blocks taken
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


def known(engine: Engine) -> list[tuple[int, ...]]:
    """The tokens of the blocks that are remembered, those that are given up first in front."""
    return [tokens for _, tokens in engine.prefixes]


def test_a_request_that_does_not_fit_yet_costs_no_prefix() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 2, n_blocks=8))
    engine.submit(Request(prompt=[5, 6, 7, 8, 9], max_new_tokens=1, sampler=GREEDY))
    list(engine.run())
    engine.submit(Request(prompt=[20], max_new_tokens=8, sampler=GREEDY))
    engine.submit(Request(prompt=[30] * 13, max_new_tokens=1, sampler=GREEDY))
    engine.step()
    assert len(engine.waiting) == 1 and known(engine) == [(7, 8), (5, 6)]
    assert run_all(engine) == []


def test_prefixes_are_given_up_for_memory_the_ones_that_others_build_on_last() -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 2, n_blocks=5))
    engine.submit(Request(prompt=[5, 6, 7, 8, 9], max_new_tokens=1, sampler=GREEDY))
    list(engine.run())
    assert known(engine) == [(7, 8), (5, 6)]
    engine.submit(Request(prompt=[20] * 7, max_new_tokens=1, sampler=GREEDY))
    list(engine.run())
    assert (5, 6) in known(engine) and (7, 8) not in known(engine)


def test_after_the_weights_have_changed_an_engine_forgets_what_it_computed_before() -> None:
    model = tiny_qwen2().double()
    engine = Engine(model, new_pool(model, 2))
    request = Request(prompt=[5, 6, 7, 8, 9], max_new_tokens=4, sampler=GREEDY)
    engine.submit(request)
    list(engine.run())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.forget()
    assert not engine.prefixes and len(engine.pool.free) == len(engine.pool.users)
    number = engine.submit(request)
    list(engine.run())
    assert engine.results[number] == alone(model, request)


@pytest.mark.parametrize(
    "options",
    [
        dict(sampler=lambda logits, seen, u: logits.argmax(-1, keepdim=True)),
        dict(sampler=lambda logits, seen, u: torch.tensor([-1])),
        dict(sampler=lambda logits, seen, u: torch.tensor([10**6])),
        dict(sampler=lambda logits, seen, u: torch.tensor([3.0])),
        dict(sampler=lambda logits, seen, u: torch.tensor([3, 4])),
    ],
)
def test_a_sampler_that_chooses_no_token_ends_its_own_request(options) -> None:
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 2))
    good = Request(prompt=[5, 6, 7], max_new_tokens=5, sampler=GREEDY)
    bad = engine.submit(Request(prompt=[5, 6, 8], max_new_tokens=5, **options))
    number = engine.submit(good)
    list(engine.run())
    assert list(engine.errors) == [bad] and "the sampler chose" in str(engine.errors[bad])
    assert engine.results == {number: alone(model, good)}


def test_a_processor_may_do_what_it_likes_with_the_rows_that_it_is_given() -> None:
    def cut(logits, rows):
        for row in rows:
            del row[:]
        return logits

    model = MODELS[0]
    engine = Engine(model, new_pool(model, 2))
    request = Request(prompt=[5, 6, 7], max_new_tokens=5, sampler=GREEDY)
    number = engine.submit(replace(request, processors=[cut]))
    list(engine.run())
    assert engine.results[number] == alone(model, request)


def test_an_error_keeps_nothing_of_the_pass_in_which_it_happened() -> None:
    def fail(logits, rows):
        seen.append(weakref.ref(logits))
        raise LookupError("no")

    model, seen = MODELS[0], []
    engine = Engine(model, new_pool(model, 2))
    for i in range(3):
        engine.submit(Request(prompt=[5, 6, i], max_new_tokens=5, processors=[fail]))
    list(engine.run())
    assert [str(error) for error in engine.errors.values()] == ["no"] * 3
    assert len(seen) == 3 and all(ref() is None for ref in seen)


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
        with pytest.raises(ValueError, match="must be an integer, at least 1"):
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


@pytest.mark.parametrize("model", [tiny_gpt2(), tiny_qwen2()], ids=["gpt2", "qwen2"])
def test_an_engine_runs_under_autocast_over_a_pool_of_its_dtype(model) -> None:
    config, request = model.config, Request(prompt=[5, 6, 7], max_new_tokens=5, sampler=GREEDY)
    sizes = config.n_layer, getattr(config, "n_kv_head", config.n_head), config.head_dim, 40, 4
    with torch.autocast("cpu", torch.bfloat16):
        engine = Engine(model, BlockPool(*sizes, torch.bfloat16))
        engine.submit(request)
        list(engine.run())
        assert engine.results[0] == alone(model, request)
        with pytest.raises(ValueError, match=r"float32\), the model has .*bfloat16"):
            Engine(model, BlockPool(*sizes, torch.float32))
    with pytest.raises(ValueError, match=r"bfloat16.*the model has .*float32"):
        Engine(model, BlockPool(*sizes, torch.bfloat16))


def test_a_gather_uses_the_same_memory_again_in_whatever_mode() -> None:
    pool = BlockPool(2, 3, 5, n_blocks=6, block_size=4)
    pool.keys.normal_(), pool.values.normal_()
    slots = torch.tensor([[3, 4, 9], [20, 20, 0]])
    with torch.inference_mode():
        first = [x.data_ptr() for x in pool.gather(0, slots)]
    for part in (slots, slots[:1]):
        keys, values = pool.gather(1, part)
        assert torch.equal(keys, pool.keys[1, part].transpose(1, 2))
        assert torch.equal(values, pool.values[1, part].transpose(1, 2))
        assert [keys.data_ptr(), values.data_ptr()] == first


# ------------------------------------------------------------------------------- what interrupts


@dataclass
class Interrupts:
    """Ctrl-C at every line of the package that is reached inside of this, in turn, or at every
    instruction of the engine.

    ``visits`` are those at which it comes: with (1, 4) the first and the fourth.
    """

    visits: tuple[int, ...]
    instructions: bool
    seen: Counter = field(default_factory=Counter, init=False)
    raised: int = field(default=0, init=False)

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *_) -> None:
        sys.settrace(None)

    def trace(self, frame, event, _):
        file = frame.f_code.co_filename
        where = "engine.py" if self.instructions else ".py"
        if not (file.startswith(PACKAGE) and file.endswith(where)):
            return None
        frame.f_trace_opcodes = self.instructions
        if event == ("opcode" if self.instructions else "line"):
            place = frame.f_code, frame.f_lasti if self.instructions else frame.f_lineno
            self.seen[place] += 1
            if self.seen[place] in self.visits:
                self.raised += 1
                raise KeyboardInterrupt
        return self.trace


def a_load() -> tuple[Engine, list[Request]]:
    """Sampled and greedy requests that share a beginning, in a pool that is too small for all."""
    pool = new_pool(MODELS[2], 2, n_blocks=11)
    engine = Engine(MODELS[2], pool, max_batch=3, prefill_chunk=5)
    beginning = token_ids(5, seed=5).tolist()
    requests = [
        Request(
            prompt=[*beginning[: 5 - i % 2], 20 + i],
            max_new_tokens=9,
            sampler=SAMPLERS[i % 2],
            stop_tokens=range(30, 40),
            seed=i,
        )
        for i in range(4)
    ]
    return engine, requests


def run_interrupted(engine, requests, interrupts, check) -> list[int]:
    """Every request, submitted and run in spite of the interrupts: their numbers."""
    numbers: list[int] = []
    for request in requests:
        number = None
        while number is None:
            with suppress(KeyboardInterrupt), interrupts:
                number = engine.submit(request)
        numbers.append(number)
    while True:
        try:
            with interrupts:
                for _ in engine.run():
                    pass
            return numbers
        except KeyboardInterrupt:
            if check:
                check_blocks(engine)


def check_blocks(engine: Engine) -> None:
    """Each block of the pool is free, or held as often as rows and prefixes stand for it."""
    held = Counter(prefix.block for prefix in engine.prefixes.values())
    for running in (*engine.running, *engine.waiting):
        held.update(running.row.table)
    users = engine.pool.users
    assert users == [held[block] for block in range(len(users))]
    assert sorted(engine.pool.free) == [block for block, n in enumerate(users) if not n]


@pytest.mark.slow
@pytest.mark.parametrize(
    "interrupts",
    [
        pytest.param(Interrupts((1, 7), instructions=False), id="lines"),
        pytest.param(
            Interrupts((1,), instructions=True), id="instructions", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.parametrize(
    "twice",
    [
        pytest.param(False, id="once"),
        pytest.param(True, id="while it goes back, too", marks=pytest.mark.slow),
    ],
)
def test_an_engine_goes_on_wherever_it_was_interrupted(interrupts, twice, monkeypatch) -> None:
    interrupts = replace(interrupts)
    monkeypatch.setattr(engine_module, "PASS", 0)  # as many groups as there are lengths
    if twice:
        restore = Snapshot.restore

        def interrupted_again(before, engine) -> None:
            sys.settrace(interrupts.trace)  # one that has raised is off
            restore(before, engine)

        monkeypatch.setattr(Snapshot, "restore", interrupted_again)
    engine, requests = a_load()
    want = [alone(MODELS[2], request) for request in requests]
    numbers = run_interrupted(engine, requests, interrupts, check=not twice)
    assert interrupts.raised > 500
    assert [engine.results[number] for number in numbers] == want and not engine.errors
    check_blocks(engine)
    assert not engine.running and not engine.waiting


def test_the_load_that_is_interrupted_shares_blocks_and_runs_out_of_them() -> None:
    engine, requests = a_load()
    for request in requests:
        engine.submit(request)
    steps = list(engine.run())
    assert any(step.put_back for step in steps) and any(step.shared for step in steps)


@pytest.mark.parametrize("error", [RuntimeError, KeyError, TypeError, ZeroDivisionError])
def test_a_processor_that_raises_ends_its_own_request_alone(error) -> None:
    model = MODELS[0]
    engine = Engine(model, new_pool(model, 4))

    def fails(logits, rows):
        if len(rows[0]) == 5:
            raise error("at the fifth token")
        return logits

    good = Request(prompt=[5, 6, 7], max_new_tokens=6, sampler=GREEDY)
    bad = Request(prompt=[5, 6, 8], max_new_tokens=6, sampler=GREEDY, processors=[fails])
    for request in (good, bad, good):
        engine.submit(request)
    steps = list(engine.run())
    assert engine.results == {0: alone(model, good), 2: alone(model, good)}
    assert type(engine.errors[1]) is error and steps[2].failed == [1]
    check_blocks(engine)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_fault_of_a_processor_goes_out_and_loses_no_token(error) -> None:
    model = MODELS[0]
    engine = Engine(model, new_pool(model, 4))
    interrupted = []

    def impatient(logits, rows):
        if len(rows[0]) not in interrupted:
            interrupted.append(len(rows[0]))
            raise error
        return logits

    sampler = SAMPLERS[1]
    requests = [Request(prompt=[5, 6, 7 + i], max_new_tokens=6, sampler=sampler) for i in range(3)]
    want = [alone(model, request) for request in requests]
    requests[1].processors = [impatient]
    for request in requests:
        engine.submit(request)
    said: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(7):
        with suppress(type(error)):
            for step in engine.run():
                for number, token in step.tokens.items():
                    said[number].append(token)
    assert len(interrupted) == 6
    assert [engine.results[n] for n in range(3)] == want == list(said.values())


def test_a_request_is_cancelled_wherever_it_stands() -> None:
    model = MODELS[0]
    engine = Engine(model, new_pool(model, 4), max_batch=2)
    requests = [Request(prompt=[5, 6, 7 + i], max_new_tokens=6, sampler=GREEDY) for i in range(4)]
    for request in requests:
        engine.submit(request)
    engine.step(), engine.step()
    assert engine.cancel(1) == alone(model, requests[1])[:2]  # it runs
    assert engine.cancel(3) == []  # it waits
    check_blocks(engine)
    list(engine.run())
    assert engine.results == {n: alone(model, requests[n]) for n in (0, 2)}
    for number in (0, 1, 3, 4):
        with pytest.raises(ValueError, match=f"request {number} is not in the engine"):
            engine.cancel(number)


def test_where_the_pass_itself_fails_all_requests_go_on_later(monkeypatch) -> None:
    engine, requests = a_load()
    for request in requests:
        engine.submit(request)
    next(engine.run())
    hook = MODELS[2].register_forward_hook(lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            engine.step()
        check_blocks(engine)
    hook.remove()
    list(engine.run())
    assert engine.results == dict(enumerate(alone(MODELS[2], request) for request in requests))


def test_what_is_remembered_of_prefixes_grows_with_the_tokens() -> None:
    model = tiny_gpt2(block_size=700).double()
    size = {}
    for n in (300, 600):
        engine = Engine(model, new_pool(model, 4, n_blocks=400))
        for seed in range(2):
            prompt = token_ids(n, seed=seed).tolist()
            engine.submit(Request(prompt=prompt, max_new_tokens=1, sampler=GREEDY))
            list(engine.run())
        engine.submit(Request(prompt=prompt, max_new_tokens=1, sampler=GREEDY))
        assert next(engine.run()).shared == {2: n - 4}
        size[n] = sum(len(tokens) for tokens in known(engine))
    assert size[600] == 2 * size[300]


def test_a_block_is_not_known_by_its_own_tokens_alone() -> None:
    """The same block after another beginning, also where that beginning has been given up."""
    model = MODELS[1]
    engine = Engine(model, new_pool(model, 2, n_blocks=7), max_batch=1)
    a, b, c = [5, 6], [7, 8], [9, 10]
    prompts = [a + c + [1], b + c + [1], c + c + [1], [20] * 9, b + c + [2], a + c + [2]]
    requests = [Request(prompt=prompt, max_new_tokens=3, sampler=GREEDY) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    list(engine.run())
    assert engine.results == dict(enumerate(alone(model, request) for request in requests))
