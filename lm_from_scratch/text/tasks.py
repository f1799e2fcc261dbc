"""Six kinds of questions whose answers a program can check.

A model of text is hard to judge; a sum is right or wrong. Each :class:`Task` draws questions,
answers them, and checks an answer exactly:

=============  ============  =========  ====================================
task           question      answer     size
=============  ============  =========  ====================================
``add``        ``47+38``     ``85``     digits of each number
``sort``       ``dbac``      ``abcd``   letters
``reverse``    ``dbac``      ``cabd``   letters
``brackets``   ``([]{``      ``})``     brackets
``max``        ``17 4 93``   ``93``     numbers
``countdown``  ``2 3 4>10``  ``2*3+4``  numbers, from which to make the last
=============  ============  =========  ====================================

A document is one line, ``add:47+38=85``. The part up to ``=`` is the :func:`prompt`; it decides
whether the question is held out, so that no held-out question stands in the training text.

The same seed gives the same questions on every machine and in every version of Python: all is
drawn by :func:`below` from ``random()``, the one method of :class:`random.Random` that is promised
never to change.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from random import Random

from lm_from_scratch.limits import shown
from lm_from_scratch.text.document import place

#: The share of the questions that is held out.
HELD_OUT = 0.05

#: How many documents of each kind the corpus ``tasks`` has.
DOCUMENTS = {
    "add": 120_000, "sort": 30_000, "reverse": 30_000, "brackets": 25_000, "max": 35_000,
    "countdown": 60_000,
}  # fmt: skip

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CLOSING = {"(": ")", "[": "]", "{": "}"}
NUMBER = "(?:0|[1-9][0-9]*)"


def below(rng: Random, n: int) -> int:
    """One of 0 ... n - 1, each as likely."""
    return int(n * rng.random())


class Task(ABC):
    """One kind of question. ``sizes`` are those of the training text; larger ones, up to ``most``,
    can be drawn too."""

    name: str
    sizes: range
    most = 20
    form: str  # of a question, as a regular expression

    def question(self, rng: Random, size: int) -> str:
        """A random question. Raises ``ValueError`` for a size that there is not."""
        if type(size) is not int or not self.sizes.start <= size <= self.most:
            limits = f"{self.sizes.start} ... {self.most}"
            raise ValueError(f"size={shown(size)} of {self.name} is not in {limits}")
        return self._draw(rng, size)

    def answer(self, question: str) -> str:
        """One right answer. Raises ``ValueError`` for what is no question of this kind."""
        if not re.fullmatch(self.form, question):
            raise ValueError(f"{shown(question)} is no question of {self.name}")
        return self._answer(question)

    def is_right(self, question: str, answer: str) -> bool:
        """Whether the answer is right, to the letter: ``85``, but neither ``085`` nor ``85.``"""
        return answer == self.answer(question)

    @abstractmethod
    def _draw(self, rng: Random, size: int) -> str: ...

    @abstractmethod
    def _answer(self, question: str) -> str: ...


def number(rng: Random, digits: int) -> str:
    """A number of so many digits; the first is 0 only if it is alone."""
    least = 1 if digits > 1 else 0
    first = least + below(rng, 10 - least)
    return str(first) + "".join(str(below(rng, 10)) for _ in range(digits - 1))


class Add(Task):
    """The sum of two numbers."""

    name, sizes = "add", range(1, 4)
    form = rf"{NUMBER}\+{NUMBER}"

    def _draw(self, rng: Random, size: int) -> str:
        return f"{number(rng, size)}+{number(rng, size)}"

    def _answer(self, question: str) -> str:
        return str(sum(map(int, question.split("+"))))


class Sort(Task):
    """Letters in the order of the alphabet; one may occur twice."""

    name, sizes = "sort", range(2, 9)
    form = "[a-z]+"

    def _draw(self, rng: Random, size: int) -> str:
        return "".join(LETTERS[below(rng, 26)] for _ in range(size))

    def _answer(self, question: str) -> str:
        return "".join(sorted(question))


class Reverse(Sort):
    """Letters from the last to the first."""

    name = "reverse"

    def _answer(self, question: str) -> str:
        return question[::-1]


class Brackets(Task):
    """What closes the brackets that are open, and nothing more."""

    name, sizes = "brackets", range(2, 11)
    form = r"[(){}\[\]]+"

    def _draw(self, rng: Random, size: int) -> str:
        text, due = "", ""  # what has to close it, the last bracket first
        for i in range(size):
            must_open = len(due) <= (i == size - 1)  # at the end something is open
            if must_open or below(rng, 5) < 3:
                bracket = "([{"[below(rng, 3)]
                text, due = text + bracket, CLOSING[bracket] + due
            else:
                text, due = text + due[0], due[1:]
        return text

    def _answer(self, question: str) -> str:
        due = ""
        for bracket in question:
            if bracket in CLOSING:
                due = CLOSING[bracket] + due
            elif due[:1] == bracket:
                due = due[1:]
            else:
                raise ValueError(f"{shown(question)} is no question of brackets: {bracket} closes")
        return due


class Max(Task):
    """The largest of several numbers below 1000."""

    name, sizes = "max", range(2, 6)
    form = f"{NUMBER}(?: {NUMBER})*"

    def _draw(self, rng: Random, size: int) -> str:
        return " ".join(number(rng, 1 + below(rng, 3)) for _ in range(size))

    def _answer(self, question: str) -> str:
        return str(max(map(int, question.split())))


#: An expression, and what it comes to: value, text, whether it is a sum.
Part = tuple[int, str, bool]


class Countdown(Task):
    """An expression with ``+ - * ( )`` that uses every number once and comes to the target.

    There are often several; each of them is right. That makes it unlike the other tasks: an answer
    is easy to check and hard to find.
    """

    name, sizes, most = "countdown", range(2, 4), 5
    form = rf"{NUMBER}(?: {NUMBER}){{0,4}}>{NUMBER}"

    def _draw(self, rng: Random, size: int) -> str:
        while True:
            numbers = [1 + below(rng, 20) for _ in range(size)]
            parts = [number_part(n) for n in numbers]
            while len(parts) > 1:
                a, b = (parts.pop(below(rng, len(parts))) for _ in range(2))
                ways = combined(a, b)
                parts.append(ways[below(rng, len(ways))])
            if 1 <= parts[0][0] <= 99:
                return f"{' '.join(map(str, numbers))}>{parts[0][0]}"

    def _answer(self, question: str) -> str:
        numbers, target = question.split(">")
        answer = solve([number_part(int(n)) for n in numbers.split()], int(target))
        if answer is None:
            raise ValueError(f"{shown(question)} has no answer")
        return answer

    def is_right(self, question: str, answer: str) -> bool:
        """Whether the expression uses every number once and comes to the target. One of more than
        200 characters does not count."""
        if not re.fullmatch(self.form, question):
            raise ValueError(f"{shown(question)} is no question of {self.name}")
        numbers, target = question.split(">")
        tokens = re.findall(r"[0-9]+|[-+*()]", answer)
        used = [token for token in tokens if token.isdigit()]
        if len(answer) > 200 or "".join(tokens) != answer:
            return False
        if sorted(used) != sorted(numbers.split()):
            return False
        try:
            return value(tokens) == int(target)
        except ValueError:
            return False


def number_part(number: int) -> Part:
    """A number as an expression."""
    return number, str(number), False


def combined(a: Part, b: Part) -> list[Part]:
    """The ways to make one expression of two, none of them below zero."""
    a, b = (a, b) if a[0] >= b[0] else (b, a)
    left, right = (f"({text})" if is_sum else text for _, text, is_sum in (a, b))
    return [
        (a[0] * b[0], f"{left}*{right}", False),
        (a[0] + b[0], f"{a[1]}+{b[1]}", True),
        (a[0] - b[0], f"{a[1]}-{right}", True),
    ]


def solve(parts: Sequence[Part], target: int) -> str | None:
    """The first expression of all ``parts`` that comes to ``target``; ``None`` if none does."""
    if len(parts) == 1:
        return parts[0][1] if parts[0][0] == target else None
    for i, j in combinations(range(len(parts)), 2):
        others = [part for k, part in enumerate(parts) if k not in (i, j)]
        for way in combined(parts[i], parts[j]):
            if (answer := solve([way, *others], target)) is not None:
                return answer
    return None


def value(tokens: Sequence[str]) -> int:
    """What an expression comes to. Raises ``ValueError`` if it is none.

    ``sum = product (("+" | "-") product)*``, ``product = atom ("*" atom)*``,
    ``atom = number | "(" sum ")"``: a function for each.
    """
    rest = [*tokens, "end"][::-1]

    def sum_() -> int:
        total = product()
        while rest[-1] in ("+", "-"):
            total += product() if rest.pop() == "+" else -product()
        return total

    def product() -> int:
        result = atom()
        while rest[-1] == "*":
            rest.pop()
            result *= atom()
        return result

    def atom() -> int:
        token = rest.pop()
        if token != "(":
            return int(token)  # which refuses all but numbers
        inner = sum_()
        if rest.pop() != ")":
            raise ValueError("a bracket is not closed")
        return inner

    result = sum_()
    if rest != ["end"]:
        raise ValueError(f"{rest[-1]} stands where the expression should end")
    return result


#: All of them, by name.
TASKS: dict[str, Task] = {
    task.name: task for task in (Add(), Sort(), Reverse(), Brackets(), Max(), Countdown())
}


def task_named(name: str) -> Task:
    """A task. Raises ``ValueError`` for another name."""
    if name not in TASKS:
        raise ValueError(f"there is no task {shown(name)}: {', '.join(TASKS)}")
    return TASKS[name]


def prompt(name: str, question: str) -> str:
    """What a model of these tasks goes on from: ``add:47+38=``."""
    return f"{task_named(name).name}:{question}="


def is_held_out(name: str, question: str, share: float = HELD_OUT) -> bool:
    """Whether the training text of ``--held-out share`` never has this question."""
    return place(prompt(name, question)) <= share


def questions(name: str, rng: Random, sizes: Sequence[int] = ()) -> Iterator[str]:
    """Endless questions of these sizes, by default those of the training text. There are more large
    ones than small ones: the larger of two draws is taken, as there are so few small sums."""
    task = task_named(name)
    sizes = sizes or task.sizes
    while True:
        largest = max(below(rng, len(sizes)), below(rng, len(sizes)))
        yield task.question(rng, sizes[largest])


def held_out_questions(
    name: str, count: int, sizes: Sequence[int] = (), seed: int = 0
) -> list[str]:
    """As many different questions that the training text never has; fewer where 100 draws for each
    do not find them: few of the 100 sums of two digits are held out."""
    unknown: dict[str, None] = {}
    for question in islice(questions(name, Random(f"held out {seed}"), sizes), 100 * count):
        if len(unknown) == count:
            break
        if is_held_out(name, question):
            unknown[question] = None
    return list(unknown)
