"""A checker of countdown: what is right in any form, and what only looks right."""

import re
from typing import Any

from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.text.tasks import TASKS


def reference(question: str, answer: str) -> bool:
    """The package's checker."""
    return TASKS["countdown"].is_right(question, answer)


Round = tuple[str, list[str]]


def judged(function: Any, rounds: list[Round]) -> dict[str, Any]:
    """What the function says of each answer to each question."""
    said = {}
    for question, answers in rounds:
        for answer in answers:
            text = repr(answer)
            if len(answer) > 60:
                text = f"{answer[:9]}...{answer[-9:]} ({len(answer)} characters)"
            said[f"{question} {text}"] = function(question, answer)
    return said


# ------------------------------------------------------------------------------------- arguments


def numbers(g: Generator, n: int, low: int = 2, high: int = 21) -> list[int]:
    """Different numbers, the largest first."""
    drawn: list[int] = []
    while len(drawn) < n:
        if (one := integer(g, low, high)) not in drawn:
            drawn.append(one)
    return sorted(drawn, reverse=True)


def asked(target: int, *given: int) -> str:
    return f"{' '.join(map(str, given))}>{target}"


def rounds(*found: Round) -> Call:
    return call(rounds=[*found])


def plain(g: Generator) -> Call:
    """Right in several ways; and the right numbers with another value."""
    a, b, c = numbers(g, 3)
    answers = [
        f"{a}*{b}+{c}", f"{c}+{b}*{a}", f"({b}*{a})+{c}", f"{c}+({a}*{b})", f"({a})*(({b}))+{c}",
        f"{a}*({b}+{c})", f"{a}*{b}-{c}", f"({a}+{b})*{c}", f"{a}+{b}*{c}",
    ]  # fmt: skip
    return rounds((asked(a * b + c, c, a, b), answers))


def order(g: Generator) -> Call:
    """From left to right, products first, below zero on the way or at the end, and large."""
    a, b, c, d = numbers(g, 4)
    mixed = [
        f"{d}-{a}*{b}+{c}+999", f"999+{d}-{a}*{b}+{c}", f"{d}-({a}*{b}-{c}-999)",
        f"{d}-({a}*{b}-{c}+999)", f"({d}-{a})*{b}+{c}+999", f"{d}-{a}*({b}+{c})+999",
    ]  # fmt: skip
    row = [f"{a + b}-{b}-{c}", f"{a + b}-{c}-{b}", f"{a + b}-({b}-{c})", f"{a + b}-({b}+{c})",
           f"{b}+{c}-{a + b}", f"({c}-{a + b})+{b}"]  # fmt: skip
    n = 2**32  # numbers that floating point rounds
    large = asked(n * n, n, n, 1), [f"{n}*{n}*1", f"1*{n}*{n}", f"{n}*{n}+1", f"{n}*{n}-1"]
    return rounds(
        large,
        (asked(d - a * b + c + 999, 999, a, b, c, d), mixed),
        (asked(a - c, a + b, b, c), row),
    )


def used(g: Generator) -> Call:
    """Every number, as often as it is given, and no other."""
    a, b = numbers(g, 2)
    answers = [
        f"{a}*{b}", f"{b}*{a}", f"{a * b}", f"{a}*{b}+0", f"{a}*{b}*1", f"{a}*{b}+{a}-{a}",
        f"{a}*{b}+{b}-{b}", f"{a}+{a * (b - 1)}", f"{b}+{b * (a - 1)}", f"{a}",
    ]  # fmt: skip
    return rounds((asked(a * b, a, b), answers))


def twice(g: Generator) -> Call:
    """A number that is given twice, and one that is the target: saying it alone is not enough."""
    a, b = numbers(g, 2)
    pair = [f"{a}+{a}-{b}", f"{a}-{b}+{a}", f"{a}+{a}-{b}-{b}+{b}", f"{2 * a}-{b}",
            f"{2 * a - b}", f"{a}+{a - b}", f"{a}+{a}-{b}-0"]  # fmt: skip
    there = [f"{a}*1", f"({a})*1", f"1*{a}", f"{a}", f"({a})", f"{a}+{b}-{b}", f"{a}*{b}", "1"]
    return rounds((asked(2 * a - b, a, b, a), pair), (asked(a, a, 1), there))


def glued(g: Generator) -> Call:
    """Digits of two numbers side by side make a third."""
    a, b = numbers(g, 2, 2, 10)
    two = [f"{a}{b}", f"{b}{a}", f"({a}){b}", f"{a}({b})", f"{a} {b}"]
    three = [f"{a}*10+{b}", f"{b}+10*{a}", f"{a}{b}", f"{a}{b}*10", f"{a}{b}+10-10"]
    product = [f"{a}*{b}", f"{a}({b})", f"({a}){b}", f"({a})({b})"]
    return rounds(
        (asked(10 * a + b, a, b), two),
        (asked(10 * a + b, a, 10, b), three),
        (asked(a * b, a, b), product),
    )


def zeros(g: Generator) -> Call:
    """Numbers with leading zeros are no numbers; 0 itself is one."""
    a, b = numbers(g, 2)
    answers = [
        f"{a}+{b}+0", f"0+{b}+{a}", f"{a}+{b}-0", f"0{a}+{b}+0", f"{a}+0{b}+0", f"{a}+0{b}",
        f"{a}+{b}+00", f"00+{a}+{b}", f"{b}+{a}*0",
    ]  # fmt: skip
    return rounds((asked(a + b, a, b, 0), answers))


def written(g: Generator) -> Call:
    """What Python reads, and this game has not."""
    a, b = numbers(g, 2)
    right = f"{a}+{b}"
    wrong = [
        f"{a} + {b}", f" {right}", f"{right} ", f"{right}\n", f"\n{right}", f"{right}\r",
        f"{a}+\t{b}", f"+{right}", f"{a}++{b}", f"{a}--{b}", f"{a}+(+{b})", f"-(-{a})+{b}",
        f"{a}.0+{b}", f"{a}.+{b}", f"{right}#", f"{right}#comment", f"{right};", f"{right},",
        f"{right}=={right}", f"{right}={a + b}", f"{right}or 1", f"{a}|{b}", f"{a}_0+{b}",
        f"int({a})+{b}", f"[{a}+{b}][0]", f"{a}e0+{b}", f"{a}j+{b}", f"0x{a}+{b}", f"{a}+{b}L",
    ]  # fmt: skip
    return rounds((asked(a + b, a, b), [right, f"(({a})+({b}))", *wrong]))


def operators(g: Generator) -> Call:
    """Other operators that come to the target."""
    a = integer(g, 3, 8)
    b = integer(g, 8, 12)
    square = [f"{a}**2", f"{a}*2", f"{a}^2", f"2**{a}", f"pow({a},2)", f"{a}**(2)", f"{a}²"]
    share = [f"{a * b}/{b}", f"{a * b}//{b}", f"{a * b}÷{b}", f"{a * b}%{b}", f"{a * b}-{b}"]
    return rounds(
        (asked(a * a, a, 2), square),
        (asked(a, a * b, b), share),
        (asked(a * 2, a, 2), [f"{a}*2", f"{a}<<2", f"{a}**2"]),
    )


def alphabets(g: Generator) -> Call:
    """Digits and signs of other alphabets, which `int` and `str.isdigit` take for ours."""
    a, b = numbers(g, 2)

    def other(n: int, zero: int) -> str:
        return "".join(chr(zero + int(digit)) for digit in str(n))

    answers = [f"{a}*{b}", *(f"{other(a, zero)}*{b}" for zero in (0x660, 0x966, 0xFF10))]
    signs = (0xD7, 0xFF0A, 0x2217)  # a cross, a wide star, a star of mathematics
    answers += [f"{a}*{other(b, 0xFF10)}", *(f"{a}{chr(sign)}{b}" for sign in signs)]
    answers += [f"{chr(0xFF08)}{a}*{b}{chr(0xFF09)}", f"{a}*{b}\u200b", f"{a}*{b}\u00a0"]
    return rounds((asked(a * b, a, b), answers))


def brackets(g: Generator) -> Call:
    """Not closed, not opened, empty, crossed; and deep, on both sides of 200 characters."""
    (a,), (b,) = numbers(g, 1, 10, 21), numbers(g, 1, 2, 10)
    right = f"{a}+{b}"  # four characters
    answers = [
        "(" * 98 + right + ")" * 98, "(" * 99 + right + ")" * 99, "(" * 500 + right + ")" * 500,
        "(" * 98 + right, "(" * 196 + right, right + ")" * 98, f"({right})", f"({a})+({b})",
        f"({right}", f"{right})", f"({right}))", f"(({right})", f"(){right}", f"{right}()",
        f"){right}(", f"({a}+){b}", f"{a}(+){b}", f"{a}(+{b})", f"{a})+({b}",
    ]  # fmt: skip
    c, d = numbers(g, 2, 10, 21)  # five characters: one too many
    odd = ["(" * n + f"{c}+{d}" + ")" * n for n in (97, 98)]
    return rounds((asked(a + b, a, b), answers), (asked(c + d, c, d), odd))


def words(g: Generator) -> Call:
    """No expression at all, parts of one, and some that try to run something."""
    a, b = numbers(g, 2)
    answers = [
        f"{a}+{b}", "", " ", "\n", "()", "*", "True", "None", f"{a + b}", f"{a},{b}", f"{a}>{b}",
        f"{a} {b}>{a + b}", "print(1)", "__import__('os').getpid()", f"{a}if {b}else {a}",
        f"sum(({a},{b}))", "1/0", f"answer={a}+{b}", f"{a}+{b}" * 2, f"{a}+{b}\x00", "9" * 5000,
        f"{a}+", f"+{b}", f"{a}{b}+", f"{a}+*{b}", f"*{a}+{b}", f"{a}+{b}*", f"{a}-+{b}", "(" * 200,
        "1" * 180 + "x",
    ]  # fmt: skip
    alone = [f"{a}", f"({a})", f"-{a}", f"{a}.0", f"{a}*1", f"{a - 1}+1", "a", f"{a}{a}"]
    return rounds((asked(a + b, a, b), answers), (asked(a, a), alone))


# ------------------------------------------------------------------------------- wrong answers

PLAIN, ORDER, USED = "right in several ways", "products first", "every number, once"
TWICE = "a number given twice, and a target that is given"
GLUED, WRITTEN, OTHER = "digits side by side", "what Python reads as well", "other operators"
ALPHABETS, BRACKETS, WORDS = "other alphabets", "brackets", "no expression at all"
SORTED = "if sorted(numbers) != sorted(given.split()):"
TOTAL = 'return total() == int(target) and rest == ["end"]'
TOKENS = 'tokens = re.findall("[0-9]+|[-+*()]", answer)'
WHOLE = 'if len(answer) > 200 or "".join(tokens) != answer:'


def first(code: str) -> dict[str, str]:
    """The answer is changed before it is cut."""
    return {TOKENS: f"answer = {code}\n    {TOKENS}"}


def by_eval(pattern: str) -> dict[str, str]:
    """Python's eval behind a pattern of characters."""
    return {
        WHOLE: f'if not re.fullmatch(r"{pattern}", answer):',
        TOTAL: "return bool(eval(answer) == int(target))",
        "except ValueError": "except Exception",
    }


def signs(question: str, answer: str) -> bool:
    """A sign may be before a number or a bracket."""
    kept = re.sub(r"(?<![0-9)])\+", "", answer)
    return reference(question, kept) or reference(question, re.sub(r"--", "+", kept))


def one_answer(question: str, answer: str) -> bool:
    """Only the package's own answer is right."""
    return bool(answer == TASKS["countdown"].answer(question))


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("minus the target counts as well", {TOTAL: TOTAL.replace("total()", "abs(total())")}, ORDER),
    ("compared as floating-point numbers",
     {TOTAL: TOTAL.replace("total() == int", "float(total()) == float")}, ORDER),
    ("only the value counts, whatever numbers it is made of", {SORTED: "if False:"}, USED),
    ("a number may be used as often as one likes",
     {SORTED: "if set(numbers) != set(given.split()):"}, USED),
    ("some of the numbers are enough", {SORTED: "if set(numbers) - set(given.split()):"}, USED),
    ("some of the numbers are enough, each once",
     {SORTED: "from collections import Counter\n    if Counter(numbers) - Counter(given.split()):"},
     TWICE),
    ("other numbers may be used beside those given",
     {SORTED: "from collections import Counter\n    if Counter(given.split()) - Counter(numbers):"},
     USED),
    ("as many numbers as are given, whichever",
     {SORTED: "if len(numbers) != len(given.split()):"}, USED),
    ("the numbers must be in the order of the question",
     {SORTED: "if numbers != given.split():"}, PLAIN),
    ("digits are compared, not numbers",
     {SORTED: 'if sorted("".join(numbers)) != sorted(given.replace(" ", "")):'}, GLUED),
    ("the target may be said outright", {SORTED: "if answer == target:\n        return True\n    "
     + SORTED}, USED),
    ("only one of the right answers is accepted", one_answer, PLAIN),
    ("sums come first, as products do: from left to right",
     {"result = product()": "result = atom()", 'in ("+", "-"):': 'in ("+", "-", "*"):',
      'result = result + product() if sign == "+" else result - product()':
          'after = atom()\n            result = (result * after if sign == "*" else result + after '
          'if sign == "+" else result - after)'}, PLAIN),
    ("from right to left", {"else result - product()": "else result - total()"}, ORDER),
    ("brackets are dropped",
     {TOKENS: TOKENS + "\n    tokens = [t for t in tokens if t not in '()']",
      '"".join(tokens) != answer': 're.search("[^-+*()0-9]", answer)'}, PLAIN),
    ("what follows the expression is not looked at", {' and rest == ["end"]': ""}, BRACKETS),
    ("a bracket need not be closed",
     {'if rest.pop() != ")":\n            raise ValueError("a bracket is not closed")':
          'if rest[-1] == ")":\n            rest.pop()'}, BRACKETS),
    ("characters that are not part of an expression are passed over",
     {WHOLE: "if len(answer) > 200:"}, WRITTEN),
    ("spaces are passed over", first("answer.replace(' ', '')"), WRITTEN),
    ("the answer is stripped first", first("answer.strip()"), WRITTEN),
    ("an end of line may follow: $ lets it in",
     first("answer.rstrip('\\n') if re.match('^[-+*()0-9]+$', answer) else '!'"), WRITTEN),
    ("a comment may follow", first("answer.partition('#')[0]"), WRITTEN),
    ("what follows = is not looked at", first("answer.partition('=')[0]"), WRITTEN),
    ("eval reads the rest: signs and spaces are let in",
     by_eval(r"(?!.*\*\*)[-+*()0-9 ]{1,200}"), WRITTEN),
    ("eval reads ** as well", by_eval("[-+*()0-9]{1,200}"), OTHER),
    ("a sign may be before a number", signs, WRITTEN),
    ("leading zeros are let in",
     first("re.sub('(?<![0-9])0+(?=[0-9])', '', answer[:201].ljust(len(answer), '!'))"), "zeros"),
    ("digits of any alphabet are let in",
     first(r"re.sub(r'\d', lambda m: str(int(m[0])), answer)"), ALPHABETS),
    ("answers may have up to 300 characters", {"> 200": "> 300"}, BRACKETS),
    ("an answer of exactly 200 characters is too long", {"> 200": ">= 200"}, BRACKETS),
    ("what is no expression raises an error", {"except ValueError": "except KeyError"}, WORDS),
    ("results below zero are refused on the way",
     {"else result - product()": "else result - product()\n            if result < 0:\n"
      "                raise ValueError"}, ORDER),
    ("1 and 0 instead of True and False",
     {TOTAL: 'return int(total() == int(target) and rest == ["end"])'}, PLAIN),
]  # fmt: skip

CASES = (
    Case(PLAIN, plain, "every expression with the right numbers and the right value is right",
         use=judged, points=2, teaching="what must be accepted"),
    Case(ORDER, order, "9-4-2 is 3, not 7; results on the way may be below zero", use=judged),
    Case(USED, used, "each number as often as it is given: no 0 added, none used twice",
         use=judged, points=3, teaching="what a model tries first"),
    Case(TWICE, twice,
         "count each number; where one is the target, the others must be used as well", use=judged),
    Case(GLUED, glued, "the numbers are 4 and 2, and 42 is neither", use=judged,
         teaching="digits that are all there"),
    Case("zeros", zeros, "0 is a number; 00 and 07 are not", use=judged),
    Case(WRITTEN, written, "the expression is the whole answer, to the last character", use=judged,
         points=3),
    Case(OTHER, operators, "there are three operators; ** is not two of one", use=judged,
         teaching="values that are right"),
    Case(ALPHABETS, alphabets, "\\d, isdigit and int know more digits than ten", use=judged),
    Case(BRACKETS, brackets,
         "each bracket is opened and closed around an expression; 98 of them are no problem",
         use=judged, points=2),
    Case(WORDS, words, "whatever is no expression is wrong, and nothing is raised", use=judged,
         teaching="what an untrained model says"),
)  # fmt: skip

EXERCISE = Exercise(
    name="checker", function="is_countdown", page="10_after_pretraining/3_rewards", minutes=40,
    difficulty=3,
    outcome="Write a reward that pays for right answers only, whatever a model tries.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Check three things one after the other: the characters, the numbers, the value. Each is "
        "simple if those before it hold.",
        "Cut the answer into numbers and signs with `re.findall`, and compare what you found, "
        "joined, with the answer: then nothing was passed over. Are the numbers still texts when "
        "you compare them with those of the question?",
        "Three small functions read an expression: a sum is products with + and - between them, a "
        "product is atoms with *, an atom is a number or a sum in brackets. Each begins where the "
        "one before it ended. Whatever is left at the end makes the answer wrong.",
    ),
)  # fmt: skip
