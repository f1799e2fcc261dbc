"""tasks: what the checkers say is what Python's own arithmetic and brute force say."""

import ast
import hashlib
import itertools
import re
from collections import Counter
from functools import cache
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_from_scratch.text import corpora
from lm_from_scratch.text.document import Document
from lm_from_scratch.text.tasks import (
    DOCUMENTS,
    TASKS,
    below,
    held_out_questions,
    is_held_out,
    prompt,
    questions,
)

each = pytest.mark.parametrize("name", TASKS)
seeds = st.integers(0, 2**32).map(Random)


documents = cache(corpora.tasks)


@cache
def corpus() -> tuple[list[Document], list[Document]]:
    return corpora.split(documents(), 0.05)


def drawn(name: str, rng: Random, above: int = 0) -> tuple[str, str]:
    """A question of a size of the training text, or up to so many above, and its answer."""
    sizes = TASKS[name].sizes
    question = TASKS[name].question(rng, rng.randrange(sizes.start, sizes.stop + above))
    return question, TASKS[name].answer(question)


@given(seeds)
def test_a_sum_is_that_of_python(rng: Random) -> None:
    question, answer = drawn("add", rng, above=17)
    assert answer == str(eval(question))


@pytest.mark.parametrize("size", range(1, 21))
def test_the_size_of_a_sum_is_that_of_both_numbers(size: int) -> None:
    found = [TASKS["add"].question(Random(seed), size).split("+") for seed in range(300)]
    assert {len(number) for pair in found for number in pair} == {size}
    assert {pair[0][0] for pair in found} == set("0123456789" if size == 1 else "123456789")
    assert {pair[1][-1] for pair in found} == set("0123456789")


@given(seeds)
def test_sorted_letters_are_the_same_letters_none_before_a_smaller_one(rng: Random) -> None:
    question, answer = drawn("sort", rng, above=12)
    assert Counter(answer) == Counter(question)
    assert all(ord(a) <= ord(b) for a, b in itertools.pairwise(answer))


@given(seeds)
def test_reversed_letters_stand_at_the_opposite_place(rng: Random) -> None:
    question, answer = drawn("reverse", rng, above=12)
    assert len(question) == len(answer)
    assert all(answer[-1 - i] == letter for i, letter in enumerate(question))


def balanced(text: str) -> bool:
    """Nothing is left when neighbours that belong together are taken away, again and again."""
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", text)) != text:
        text = shorter
    return text == ""


@given(seeds)
def test_brackets_are_balanced_after_the_answer_and_not_before(rng: Random) -> None:
    question, answer = drawn("brackets", rng, above=10)
    assert balanced(question + answer)
    assert all(not balanced(question + answer[:i]) for i in range(len(answer)))


@pytest.mark.parametrize("question", ["(", "([", "([]{", "[](", "{{}("])
def test_of_all_short_strings_the_answer_alone_closes_the_brackets(question: str) -> None:
    task = TASKS["brackets"]
    shortest = len(task.answer(question))
    for length in range(shortest + 1):
        for letters in itertools.product("()[]{}", repeat=length):
            answer = "".join(letters)
            assert task.is_right(question, answer) == balanced(question + answer)


@given(seeds)
def test_the_largest_is_one_of_them_and_none_is_larger(rng: Random) -> None:
    question, answer = drawn("max", rng, above=15)
    numbers = [int(number) for number in question.split(" ")]
    assert int(answer) in numbers and not any(number > int(answer) for number in numbers)


def came_to(answer: str, numbers: list[int]) -> int | None:
    """What Python makes of an answer: none for what is no expression of these numbers."""
    if answer != answer.strip() or "\n" in answer:
        return None
    try:
        tree = ast.parse(answer, mode="eval")
    except SyntaxError:
        return None
    allowed = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Constant)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        return None
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return eval(answer) if Counter(used) == Counter(numbers) else None


SHAPES = ["{0}{3}{1}{4}{2}", "({0}{3}{1}){4}{2}", "{0}{3}({1}{4}{2})", "(({0}){3}{1}{4}{2})"]


def test_of_all_expressions_of_three_numbers_those_are_right_that_python_finds_right() -> None:
    task, numbers = TASKS["countdown"], [2, 3, 7]
    expressions = [
        shape.format(*order, *signs)
        for shape in SHAPES
        for order in itertools.permutations(numbers)
        for signs in itertools.product("+-*", repeat=2)
    ]
    found = {expression: eval(expression) for expression in expressions}
    for target in range(100):
        right = {e for e in expressions if task.is_right(f"2 3 7>{target}", e)}
        assert right == {e for e, n in found.items() if n == target}
        if right:
            assert eval(task.answer(f"2 3 7>{target}")) == target
        else:
            with pytest.raises(ValueError, match="has no answer"):
                task.answer(f"2 3 7>{target}")


#: Short texts, most of them nonsense, many of them with the right numbers.
PIECES = ["2", "3", "4", "23", "+", "-", "*", "(", ")", "**", "/", " ", "=", "x", "٣", "²"]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.integers(0, 30))
def test_nonsense_is_right_only_where_python_agrees(answer: str, target: int) -> None:
    simple = set(answer) <= set("0123456789+-*()") and "**" not in answer
    wanted = simple and came_to(answer, [2, 3, 4]) == target
    assert TASKS["countdown"].is_right(f"2 3 4>{target}", answer) == wanted


@given(seeds)
def test_an_expression_that_is_given_as_the_answer_is_right(rng: Random) -> None:
    question, answer = drawn("countdown", rng, above=1)
    numbers, target = question.split(">")
    assert came_to(answer, [int(n) for n in numbers.split()]) == int(target)
    assert TASKS["countdown"].is_right(question, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "", "10", "2*3", "2*3+4+0", "2*3+4 ", "2*3+4=10", "2*3+04", "2*(3+4", "2*3)+4", "(2*3+4",
        "2*3+4)", "2*3++4", "2 *3+4", "+2*3+4", "4--2*3", "2*3+4\n", "()2*3+4", "(2)(3)+4",
        "(" * 99 + "2*3+4" + ")" * 99, "(" * 10**5, "9" * 10**5,
    ],
)  # fmt: skip
def test_a_wrong_answer_is_wrong_whatever_it_is(answer: str) -> None:
    assert TASKS["countdown"].is_right("2 3 4>10", "2*3+4")
    assert not TASKS["countdown"].is_right("2 3 4>10", answer)


@each
def test_right_answers_are_right_and_changed_ones_wrong(name: str) -> None:
    task = TASKS[name]
    for question in islice(questions(name, Random(1)), 200):
        answer = task.answer(question)
        assert task.is_right(question, answer)
        for other in (answer + "0", answer[:-1], " " + answer, answer + "\n", "0" + answer):
            assert not task.is_right(question, other), other


@each
def test_sizes_are_those_that_are_asked_for_and_larger_ones_can_be_drawn(name: str) -> None:
    task = TASKS[name]
    few = dict(add=lambda q: len(q) // 2, max=lambda q: len(q.split()),
               countdown=lambda q: len(q.split()))  # fmt: skip
    for size in range(task.sizes.start, task.most + 1):
        assert few.get(name, len)(task.question(Random(0), size)) == size
    assert task.most > task.sizes.stop
    for size in (task.sizes.start - 1, task.most + 1, -1, 2.0, True, "2", None):
        limits = f"of {name} is not in {task.sizes.start} ... {task.most}$"
        with pytest.raises(ValueError, match=limits) as error:
            task.question(Random(0), size)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("add", "47-38"), ("add", "047+38"), ("add", "47+38="), ("add", "٣+1"),
        ("sort", "dB"), ("sort", ""), ("reverse", "a b"), ("brackets", "(a"), ("brackets", "(]"),
        ("brackets", "())"), ("max", "1  2"), ("max", "1 2\n"), ("countdown", "2 3 4"),
        ("countdown", "1 2 3 4 5 6>7"), ("countdown", "2 3>x" * 100),
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused_in_one_line(name: str, question: str) -> None:
    for call in (TASKS[name].answer, lambda q: TASKS[name].is_right(q, "1")):
        with pytest.raises(ValueError, match=f"is no question of {name}") as error:
            call(question)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_another_name_is_refused_with_those_there_are() -> None:
    for call in (lambda: prompt("minus", "1-1"), lambda: held_out_questions("minus", 1)):
        with pytest.raises(ValueError, match=r"no task 'minus': add, sort, reverse, brackets"):
            call()


@given(st.integers(1, 1000), seeds)
def test_a_number_below_n_is_one_of_n(n: int, rng: Random) -> None:
    assert all(0 <= below(rng, n) < n for _ in range(20))


def test_numbers_below_n_are_as_likely() -> None:
    rng = Random(0)
    counts = Counter(below(rng, 7) for _ in range(70_000))
    chi_squared = sum((counts[i] - 10_000) ** 2 / 10_000 for i in range(7))
    assert chi_squared < 22.5  # more than that once in a thousand times, at six degrees of freedom


@pytest.mark.slow
def test_the_corpus_is_the_same_everywhere() -> None:
    """The shipped model was trained on this text: another digest is another text."""
    assert Counter(d.name.split("/")[0] for d in documents()) == DOCUMENTS
    text = "\n".join(document.text for document in documents())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a470cad86dc384fd"


@pytest.mark.slow
def test_every_document_is_a_prompt_and_a_right_answer() -> None:
    train, held_out = corpus()
    for document in train[::100] + held_out[::10]:
        name, question = document.name.split("/", 1)
        assert document.group == prompt(name, question) == f"{name}:{question}="
        assert document.text.startswith(document.group)
        assert TASKS[name].is_right(question, document.text.removeprefix(document.group))


@pytest.mark.slow
@each
def test_no_held_out_question_stands_in_the_training_text(name: str) -> None:
    train, held_out = corpus()
    asked = held_out_questions(name, 500)
    assert len(set(asked)) == len(asked) == 500
    prompts = {prompt(name, question) for question in asked}
    assert not prompts & {document.group for document in train}
    assert all(is_held_out(d.name.split("/")[0], d.name.split("/", 1)[1]) for d in held_out)
    assert held_out_questions(name, 500) == asked
    assert held_out_questions(name, 500, seed=1) != asked
    large = TASKS[name].sizes.stop
    one_size = held_out_questions(name, 50, [large])
    assert 40 < len(one_size) <= 50 and not set(one_size) & set(asked)


def test_there_are_as_many_held_out_sums_of_one_digit_as_there_are() -> None:
    sums = [f"{a}+{b}" for a in range(10) for b in range(10)]
    found = held_out_questions("add", 50, [1])
    assert set(found) == {question for question in sums if is_held_out("add", question)}
