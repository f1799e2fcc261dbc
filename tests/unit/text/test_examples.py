"""examples.py: what a file may hold, how it is split, and batches that are a function of i."""

import random
from typing import Any

import pytest
import torch
from tiny_models import chat_tokenizer

from lm_from_scratch.text.conversations import answered, conversation
from lm_from_scratch.text.examples import (
    AnswerBatches,
    check_lengths,
    example,
    examples_key,
    pair,
    read_rows,
    split_rows,
)
from lm_from_scratch.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


Q, A, B = says("user", "2+2?"), says("assistant", "4"), says("assistant", "5")


def test_the_forms_of_a_row(tokenizer) -> None:
    assert example(tokenizer, {"messages": [Q, A]}) == conversation(tokenizer, [Q, A])
    text = {"prompt": "2+2=", "completion": "4"}
    assert example(tokenizer, text) == answered(tokenizer, "2+2=", "4")
    assert example(tokenizer, {"prompt": [Q], "completion": [A]}) == conversation(tokenizer, [Q, A])
    assert example(tokenizer, {**text, "messages": None}) == answered(tokenizer, "2+2=", "4")
    texts = {"prompt": "2+2=", "chosen": "4", "rejected": ""}
    assert pair(tokenizer, texts) == (
        answered(tokenizer, "2+2=", "4"),
        answered(tokenizer, "2+2=", ""),
    )
    chats = pair(tokenizer, {"prompt": [Q], "chosen": [A], "rejected": [B]})
    assert chats == (conversation(tokenizer, [Q, A]), conversation(tokenizer, [Q, B]))


def test_what_the_assistant_said_before_the_question_is_not_learned(tokenizer) -> None:
    row = {"prompt": [Q, B, says("user", "really?")], "completion": [A]}
    got = example(tokenizer, row)
    assert got.ids == tokenizer.chat([*row["prompt"], A], add_generation_prompt=False)
    assert [i for i, own in zip(got.ids, got.answer, strict=True) if own] == tokenizer.encode(
        "4<|im_end|>", special=True
    )


deep: Any = "a"
for _ in range(300):
    deep = [deep]

#: Rows that are no example, and neither a pair.
ODD = [
    [], None, 5, "text", True, {}, {"messages": []}, {"messages": "Hi"}, {"messages": [5, A]},
    {"messages": [Q]}, {"messages": [A]}, {"messages": [Q, {"role": "assistant"}]},
    {"messages": [{"role": 5, "content": "a"}, A]}, {"messages": [Q, {**A, "content": ["4"]}]},
    {"messages": [Q, {**A, "content": 4}]}, {"messages": [[Q, A]]}, {"messages": {"0": Q}},
    {"messages": [Q, {"content": "4"}]}, {"prompt": "a"}, {"prompt": None, "completion": None},
    {"prompt": "a", "completion": [A]}, {"prompt": [Q], "completion": "4"},
    {"prompt": [Q], "completion": []}, {"prompt": [Q, A], "completion": [Q]},
    {"prompt": [], "completion": [A]}, {"prompt": 1, "completion": 2},
    {"text": "a"}, {"instruction": "a", "output": "b"}, {"messages": deep},
    {"prompt": "\ud83d", "completion": "a"}, {"prompt": "a", "completion": "\udc00"},
    {"prompt": [deep], "completion": [deep]},
]  # fmt: skip


@pytest.mark.parametrize("row", ODD, ids=range(len(ODD)))
def test_another_form_is_refused(row: Any, tokenizer) -> None:
    for made in (example, pair):
        with pytest.raises(ValueError) as error:
            made(tokenizer, row)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_what_a_row_must_be_is_said(tokenizer) -> None:
    with pytest.raises(ValueError, match='it must be an object with "messages", or "prompt" and'):
        example(tokenizer, {"text": "a"})
    with pytest.raises(ValueError, match='it must be an object with "prompt", "chosen" and "rejec'):
        pair(tokenizer, {"prompt": "a", "chosen": "b"})


# ----------------------------------------------------------------------------------- files


def test_rows_are_read(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\n  \n{"n": 1}')
    assert read_rows(file) == [{"prompt": "a\u2028b"}, {"n": 1}]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "holds no example"),
        (b"\n \n", "holds no example"),
        (b'{"a": 1}\n\n{"a": 1', "line 3: it is not JSON"),
        (b'{"a": 1}\n[1]', r"line 2: \[1\] is not an object"),
        (b"null", "line 1: None is not an object"),
        (b"{'a': 1}", "line 1: it is not JSON"),
        (b'{"a": ' + b"1" * 9000 + b"}", "line 1: it is not JSON"),
        (b"[" * 100_000, "line 1: it is not JSON"),
        (b'"' + b"a" * 9000 + b'"', "line 1: 'aaa"),
        (b"\xff\xfe{", "is not UTF-8 text"),
        (b'[\n  {"prompt": "a"}\n]', "line 1: it is not JSON"),
    ],
)
def test_a_line_that_is_no_object_is_named(written: bytes, message: str, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(written)
    with pytest.raises(ValueError, match=message) as error:
        read_rows(file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def rows(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of all forms, some of them with the same question."""
    chance, found = random.Random(seed), []
    for _ in range(n):
        question = str(chance.randrange(n // 2))
        form = chance.randrange(3)
        if form == 0:
            said = [says("system", str(form))] * chance.randrange(2)
            found.append({"messages": [*said, says("user", question), A]})
        elif form == 1:
            found.append({"prompt": f"text {question}", "completion": str(chance.random())})
        else:
            found.append({"prompt": [says("user", question)], "completion": [A]})
    return found


def question(row: dict[str, Any]) -> str:
    said = row.get("messages") or row["prompt"]
    return (
        said if isinstance(said, str) else next(m["content"] for m in said if m["role"] == "user")
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_question_is_on_both_sides(seed: int) -> None:
    every = rows(600, seed)
    learn, held_out = split_rows(every, 0.2)
    assert not {*map(question, learn)} & {*map(question, held_out)}
    ids = [*map(id, learn), *map(id, held_out)]
    assert sorted(ids) == sorted(map(id, every))
    questions = {*map(question, every)}
    assert len({*map(question, held_out)}) == round(0.2 * len(questions))
    # neither the order nor the answers decide
    other = [{**row, "seen": 1} for row in reversed(every)]
    assert {*map(question, split_rows(other, 0.2)[1])} == {*map(question, held_out)}


def test_a_side_without_questions_is_refused() -> None:
    same = [{"prompt": "a", "completion": str(n)} for n in range(9)]
    with pytest.raises(ValueError, match="1 text cannot be split"):
        split_rows(same)
    learn, held_out = split_rows([*same, {"prompt": "b"}], 0.05)
    assert {len(learn), len(held_out)} == {1, 9}
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"must be above 0 and below 1"):
            split_rows(rows(20), share)


# --------------------------------------------------------------------------------- batches


def some(tokenizer: Tokenizer, n: int = 23) -> list:
    return [example(tokenizer, row) for row in rows(n)]


def test_a_batch_is_a_function_of_the_seed_and_its_number(tokenizer) -> None:
    examples = some(tokenizer)
    batches, again = (AnswerBatches(examples, tokenizer, 4, 64, seed=3) for _ in range(2))
    assert batches.batches_per_epoch == 5
    wanted = {i: batches[i] for i in range(12)}
    for i in (11, 0, 4, 5, 3, 11):
        for name, tensor in vars(again[i]).items():
            assert tensor is None or torch.equal(tensor, vars(wanted[i])[name])
    other = AnswerBatches(examples, tokenizer, 4, 64, seed=4)
    assert any(wanted[i].idx.shape != other[i].idx.shape
               or not torch.equal(wanted[i].idx, other[i].idx) for i in range(3))  # fmt: skip
    for epoch in range(2):
        drawn = [row for i in range(5) for row in batches.order[5 * epoch + i]]
        assert len({*drawn}) == 20
    assert batches.order[0] != batches.order[5]


def test_each_once_is_each_once(tokenizer) -> None:
    examples = some(tokenizer)
    batches = AnswerBatches(examples, tokenizer, 4, 64)
    counts = [batch.count for batch in batches.each_once()]
    assert len(counts) == 6
    assert sum(counts) == sum(sum(one.answer[1:]) for one in examples)


def test_the_key_knows_the_examples_and_the_tokenizer(tokenizer, tmp_path) -> None:
    examples = some(tokenizer)
    other = chat_tokenizer(tmp_path, texts=("abab" * 9,), vocab_size=260)
    keys = {
        examples_key(examples, tokenizer), examples_key(examples[1:], tokenizer),
        examples_key(examples[::-1], tokenizer), examples_key(examples, other),
    }  # fmt: skip
    assert len(keys) == 4
    recipe = AnswerBatches(examples, tokenizer, 4, 64, seed=2).recipe()
    assert recipe == {
        "text": examples_key(examples, tokenizer), "batch_size": 4, "block_size": 64, "seed": 2,
    }  # fmt: skip


def test_batches_that_cannot_be_made_are_refused(tokenizer) -> None:
    examples = some(tokenizer)
    longest = max(len(one.ids) for one in examples)
    AnswerBatches(examples, tokenizer, 4, longest)
    with pytest.raises(
        ValueError, match=f"has {longest} tokens, more than block_size={longest - 1}"
    ):
        AnswerBatches(examples, tokenizer, 4, longest - 1)
    with pytest.raises(ValueError, match="23 examples are fewer than batch_size=24"):
        AnswerBatches(examples, tokenizer, 24, longest)
    with pytest.raises(ValueError, match="batch_size=0 must be an integer, at least 1"):
        AnswerBatches(examples, tokenizer, 0, longest)
    check_lengths([], 1)
