"""rollouts.py: what a step learns from is written by the model, and its gradient is REINFORCE's."""

import copy

import pytest
import torch
from tiny_models import chat_tokenizer, enlarge_, tiny_gpt2, tiny_qwen2

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.rollouts import Question, RolloutBatch, Rollouts, mean_reward

STOPS = [*range(0, 259, 6)]  # so that answers have all lengths


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def small(text: str) -> float:
    """How many of the first 128 characters there are among those of the text."""
    return sum(ord(c) < 128 for c in text) / max(1, len(text))


def model_of(seed: int = 0, **more: object) -> CausalLM:
    return tiny_qwen2(seed, std=0.1, vocab_size=259, **more)


def rollouts(tokenizer: Tokenizer, model: CausalLM, reward=small, **changes: object) -> Rollouts:
    prompts = ["a", "bc", "long question=", "1+1=", "zz", "?", "四"]
    questions = [Question(tokenizer.start(prompt), reward) for prompt in prompts]
    numbers = dict(batch_size=12, group_size=4, max_new_tokens=7, stop_tokens=STOPS)
    return Rollouts(questions, tokenizer, model, "key", **{**numbers, **changes})


def is_same(a: RolloutBatch, b: RolloutBatch) -> bool:
    pairs = zip(vars(a).values(), vars(b).values(), strict=True)
    return all(x is y or (x.shape == y.shape and torch.equal(x, y)) for x, y in pairs)


def answers(batch: RolloutBatch) -> list[list[int]]:
    return [[*map(int, row[row != IGNORE])] for row in batch.targets]


def test_a_batch_is_a_function_of_weights_seed_and_number(tokenizer) -> None:
    model = model_of()
    one, other = rollouts(tokenizer, model, seed=3), rollouts(tokenizer, model, seed=3)
    wanted = {i: one[i] for i in range(5)}
    for i in (4, 1, 0, 3, 2, 0):
        torch.rand(i + 1)  # the caller's random numbers have no say
        model.train(i % 2 == 0)
        assert is_same(other[i], wanted[i])
        assert model.training == (i % 2 == 0)
    assert len({str(answers(batch)) for batch in wanted.values()}) == 5
    assert not is_same(rollouts(tokenizer, model, seed=4)[0], wanted[0])
    enlarge_(model, seed=1, std=0.1)  # read when a batch is asked for
    assert answers(one[0]) != answers(wanted[0])


def test_dropout_has_no_say_in_what_is_written(tokenizer) -> None:
    plain = tiny_gpt2(vocab_size=259, std=0.1)
    model = tiny_gpt2(vocab_size=259, std=0.1, embd_pdrop=0.5, resid_pdrop=0.5).train()
    assert is_same(rollouts(tokenizer, model)[0], rollouts(tokenizer, plain)[0])


def test_the_answers_to_a_question_stand_side_by_side(tokenizer) -> None:
    batches = rollouts(tokenizer, model_of(), seed=1)
    for i in range(4):
        batch, asked = batches[i], batches.order[i]
        assert len(asked) == 3 and batch.idx.shape[0] == 12 and batch.documents is None
        lengths = set()
        for row in range(12):
            question = batches.questions[asked[row // 4]]
            n, written = len(question.ids), answers(batch)[row]
            ids = batch.idx[row, batch.positions[row] >= 0].tolist()
            assert ids == question.ids + written
            assert (batch.targets[row, : n - 1] == IGNORE).all()
            assert batch.targets[row, n - 1 : n - 1 + len(written)].tolist() == written
            assert (batch.targets[row, n - 1 + len(written) :] == IGNORE).all()
            assert written[-1] in STOPS or len(written) == 7
            assert not {*written[:-1]} & {*STOPS}
            text = tokenizer.decode([token for token in written if token not in STOPS])
            assert batch.rewards[row].item() == pytest.approx(small(text))
            lengths.add(len(written))
        assert len(lengths) > 3
        assert batch.reward == pytest.approx(batch.rewards.mean().item())
        groups = batch.advantages.view(3, 4)
        assert torch.allclose(groups.sum(1), torch.zeros(3), atol=1e-5) and groups.std() > 0.5
        assert batch.count == sum(map(len, answers(batch)))


def flat(model: CausalLM) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def gradient(model: CausalLM, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return flat(model)


def log_probs(model: CausalLM, prompt: list[int], written: list[int]) -> torch.Tensor:
    """Of each token of an answer alone."""
    logs = model(torch.tensor([prompt + written]))[0].log_softmax(-1)
    return torch.stack([logs[len(prompt) - 1 + n, token] for n, token in enumerate(written)])


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_gradient_is_that_of_reinforce_with_a_mean_over_tokens(kl: float, tokenizer) -> None:
    model, reference = model_of().double(), model_of().double()
    batches = rollouts(tokenizer, model, kl=kl)
    if kl:
        enlarge_(model, seed=0, std=0.11)
    batch, asked = batches[0], batches.order[0]
    got = gradient(model, batches.loss(model, "float32")(**vars(batch)))
    total = torch.zeros((), dtype=torch.float64)
    for row, written in enumerate(answers(batch)):
        group = batch.rewards[row // 4 * 4 :][:4].double()
        advantage = (group[row % 4] - group.mean()) / (group.std() + 1e-4)
        prompt = batches.questions[asked[row // 4]].ids
        own = log_probs(model, prompt, written)
        gain = own - log_probs(reference, prompt, written).detach()
        total = total - advantage * own.sum() + kl * (torch.exp(-gain) + gain - 1).sum()
    want = gradient(model, total / batch.count)
    assert want.norm() > 1e-2
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)  # advantages are in float32


@pytest.mark.parametrize("size", [2, 3, 4, 12])
def test_rows_that_are_shared_out_make_the_same_gradient(size: int, tokenizer) -> None:
    model = model_of()
    batches = rollouts(tokenizer, model, kl=0.3)
    batch = batches[0]
    enlarge_(model, seed=1, std=0.1)
    loss_of = batches.loss(model, "float32")
    whole = gradient(model, loss_of(**vars(batch)))
    shares = [Processes("ddp", rank, size).share(batch) for rank in range(size)]
    parts = [loss_of(**vars(share)) * share.count / batch.count for share in shares]
    assert sum(share.count for share in shares) == batch.count
    bound = 1e-5 * float(whole.abs().max())
    torch.testing.assert_close(gradient(model, sum(parts)), whole, atol=bound, rtol=1e-4)


def test_equal_rewards_teach_nothing(tokenizer) -> None:
    for reward in (0.0, 1.0, -3.7):
        model = model_of()
        before = [p.detach().clone() for p in model.parameters()]
        batches = rollouts(tokenizer, model, reward=lambda text, r=reward: r)
        config = TrainConfig(steps=2, lr=1e-2, weight_decay=0.0)
        steps = list(train(model, batches, config, loss=batches.loss))
        assert [step.grad_norm for step in steps] == [0.0, 0.0]
        assert [step.reward for step in steps] == pytest.approx([reward, reward])
        assert all(map(torch.equal, model.parameters(), before))


def test_a_step_makes_what_was_rewarded_more_probable(tokenizer) -> None:
    for seed in range(3):
        model = model_of(seed)
        batches = rollouts(tokenizer, model, seed=seed)
        batch, asked = batches[0], batches.order[0]

        def of_answers(model=model, batch=batch, asked=asked, batches=batches) -> torch.Tensor:
            prompts = [batches.questions[asked[row // 4]].ids for row in range(12)]
            with torch.no_grad():
                found = map(log_probs, [model] * 12, prompts, answers(batch))
                return torch.stack([logs.sum() for logs in found])

        before = of_answers()
        config = TrainConfig(steps=2, lr=1e-3, weight_decay=0.0)
        next(train(model, batches, config, loss=batches.loss))
        gain = of_answers() - before
        best, worst = batch.advantages > 0.5, batch.advantages < -0.5
        assert gain[best].mean() > 0.05 and gain[best].mean() > gain[worst].mean() + 0.05


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_rewards_rise(tokenizer, seed: int) -> None:
    model = model_of(seed)
    batches = rollouts(tokenizer, model, seed=seed, batch_size=24, group_size=8)
    config = TrainConfig(steps=25, lr=3e-3, weight_decay=0.0)
    rewards = [step.reward for step in train(model, batches, config, loss=batches.loss)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


def divergence(model: CausalLM, reference: CausalLM, batches: Rollouts) -> float:
    """KL(reference, model) after each question, in the mean."""
    found = []
    for question in batches.questions:
        with torch.no_grad():
            p, q = (m.eval()(torch.tensor([question.ids]))[0, -1].log_softmax(-1)
                    for m in (reference, model))  # fmt: skip
        found.append((p.exp() * (p - q)).sum().item())
    return sum(found) / len(found)


def test_kl_pulls_back_to_the_reference(tokenizer) -> None:
    found = {}
    for kl in (0.0, 1.0):
        model = model_of()
        batches = rollouts(tokenizer, model, reward=lambda text: 0.5, kl=kl, batch_size=28)
        assert (batches.reference is None) == (kl == 0.0)
        reference = model_of()
        enlarge_(model, seed=0, std=0.11)
        started = divergence(model, reference, batches)
        config = TrainConfig(steps=8, lr=2e-4, weight_decay=0.0)
        norms = [step.grad_norm for step in train(model, batches, config, loss=batches.loss)]
        assert (max(norms) > 0) == (kl > 0)
        found[kl] = divergence(model, reference, batches) / started
    assert found[0.0] == 1.0 and found[1.0] < 0.85, found


def test_the_reference_is_the_model_before_the_run(tokenizer) -> None:
    model = model_of().train()
    batches = rollouts(tokenizer, model, kl=0.1)
    batch = batches[0]
    enlarge_(model, seed=1, std=0.1)
    written = answers(batch)
    for row in (0, 5, 11):
        prompt = batches.questions[batches.order[0][row // 4]].ids
        want = log_probs(model_of(), prompt, written[row])
        got = batch.reference[row][batch.targets[row] != IGNORE]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert (batch.reference[row][batch.targets[row] == IGNORE] == 0).all()
    assert not any(p.requires_grad for p in batches.reference.parameters())
    key = batches.recipe()["reference"]
    assert key == rollouts(tokenizer, model_of(), kl=0.2).recipe()["reference"]
    assert key != rollouts(tokenizer, model, kl=0.1).recipe()["reference"]
    assert rollouts(tokenizer, model).recipe()["reference"] is None


def test_a_run_in_bfloat16_begins_at_no_distance(tokenizer) -> None:
    model, norms = model_of(), {}
    config = TrainConfig(steps=2, lr=1e-9, dtype="bfloat16")
    for dtype in ("bfloat16", "float32"):
        batches = rollouts(tokenizer, model, reward=lambda text: 0.5, kl=1.0, dtype=dtype)
        steps = train(copy.deepcopy(model), batches, config, loss=batches.loss)
        norms[dtype] = sum(step.grad_norm for step in steps)
    assert norms["bfloat16"] < 0.3 * norms["float32"]  # a pass with a graph may round otherwise


def test_parts_of_a_step_are_written_by_the_same_weights(tokenizer) -> None:
    model = model_of()
    batches = rollouts(tokenizer, model)
    rewards = [batches[i].reward for i in (0, 1)]
    config = TrainConfig(steps=1, lr=1e-2, grad_accumulation=2)
    step = next(train(model, batches, config, loss=batches.loss))
    assert step.reward == pytest.approx(sum(rewards) / 2)


def test_the_mean_reward_is_that_of_the_likeliest_answers(tokenizer) -> None:
    model = model_of()
    batches = rollouts(tokenizer, model)
    total = 0.0
    for question in batches.questions:
        (ids,) = complete(generate(model, [question.ids], 7, GREEDY, STOPS))
        total += small(tokenizer.decode([token for token in ids if token not in STOPS]))
    for rows in (1, 3, 64):
        got = mean_reward(batches, batches.questions, rows=rows)
        assert got == pytest.approx(total / len(batches.questions))


def test_the_mean_reward_of_answers_that_are_drawn(tokenizer) -> None:
    """Each with random numbers of its own, whatever is asked together."""
    model = model_of()
    batches = rollouts(tokenizer, model)
    prompts = [question.ids for question in batches.questions]
    answers = complete(generate(model, prompts, 7, Sampler(), STOPS))
    texts = [tokenizer.decode([t for t in answer if t not in STOPS]) for answer in answers]
    for rows in (1, 3, 64):
        got = mean_reward(batches, batches.questions, Sampler(), rows)
        assert got == pytest.approx(sum(map(small, texts)) / len(texts))
    assert got != pytest.approx(mean_reward(batches, batches.questions))


def test_what_does_not_fit_is_refused(tokenizer) -> None:
    model = tiny_gpt2(vocab_size=259)
    for changes, message in (
        (dict(group_size=1), "group_size=1 must be at least 2, and divide batch_size=12"),
        (dict(group_size=5), "group_size=5 must be at least 2, and divide batch_size=12"),
        (dict(batch_size=32), "7 questions are fewer than the 8 groups of batch_size=32"),
        (dict(kl=-0.1), "kl=-0.1 must be a finite number, not negative"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be an integer, at least 1"),
        (dict(max_new_tokens=60), "do not fit into block_size=64"),
        (dict(stop_tokens=[300]), "stop token 300 is no id below vocab_size=259"),
    ):
        with pytest.raises(ValueError, match=message):
            rollouts(tokenizer, model, **changes)
    with pytest.raises(ValueError, match="finite"):
        rollouts(tokenizer, model, reward=lambda text: float("nan"))[0]
    with pytest.raises(ValueError, match="no question"):
        mean_reward(rollouts(tokenizer, model), [])
