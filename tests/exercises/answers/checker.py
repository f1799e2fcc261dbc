"""Other right answers to checker."""

import ast
import operator
import re
from typing import Any

OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def by_tree(question, answer):
    """Python's parser, and only those of its nodes that the game has."""
    given, target = question.split(">")
    if len(answer) > 200 or not re.fullmatch(r"[-+*()0-9]+", answer):
        return False
    if sorted(re.findall("[0-9]+", answer)) != sorted(given.split()):
        return False
    try:
        tree = ast.parse(answer, mode="eval").body
    except SyntaxError:
        return False
    except (RecursionError, MemoryError):  # 98 brackets are much for it
        return by_rewriting(answer) == int(target)

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(node)

    try:
        return value(tree) == int(target)
    except ValueError:
        return False


def by_rewriting(text):
    """One step of school algebra after the other, until a number is left; ~ is its sign."""
    number = "~?[0-9]+"
    steps = [
        (rf"\(({number})\)(?![0-9(])", lambda m: m[1]),
        (rf"(?<![0-9~])({number})\*({number})(?![0-9])", lambda m: signed(m[1], "*", m[2])),
        (rf"(?<![0-9~*+-])({number})([-+])({number})(?![0-9*])", lambda m: signed(*m.groups())),
    ]
    if re.search(r"[0-9)]\(|\)[0-9]", text):
        return None
    while not re.fullmatch(number, text):
        for pattern, step in steps:
            shorter = re.sub(pattern, step, text, count=1)
            if shorter != text:
                text = shorter
                break
        else:
            return None
    return unsigned(text)


def unsigned(text):
    return -int(text[1:]) if text[0] == "~" else int(text)


def signed(a, sign, b):
    x, y = unsigned(a), unsigned(b)
    result = x * y if sign == "*" else x + y if sign == "+" else x - y
    return str(result).replace("-", "~")


def by_algebra(question, answer):
    """Rewritten until a number is left."""
    given, _, target = question.partition(">")
    if len(answer) > 200 or re.search(r"[^-+*()0-9]", answer):
        return False
    if sorted(re.findall("[0-9]+", answer)) != sorted(given.split(" ")):
        return False
    return by_rewriting(answer) == int(target)


def by_stacks(question, answer):
    """Two stacks, of numbers and of signs, and what may follow what."""
    given, target = question.split(">")
    if len(answer) > 200:
        return False
    left = given.split()
    values: list[int] = []
    signs: list[str] = []
    ready = False  # for a sign, that is after a number or a closed bracket

    def reduce(lowest):
        while signs and signs[-1] != "(" and (2 if signs[-1] == "*" else 1) >= lowest:
            b, a, sign = values.pop(), values.pop(), signs.pop()
            values.append(a * b if sign == "*" else a + b if sign == "+" else a - b)

    i = 0
    while i < len(answer):
        sign, j = answer[i], i + 1
        if sign in "0123456789":
            while j < len(answer) and answer[j] in "0123456789":
                j += 1
            if ready or answer[i:j] not in left:
                return False
            left.remove(answer[i:j])
            values.append(int(answer[i:j]))
            ready = True
        elif sign == "(" and not ready:
            signs.append(sign)
        elif sign == ")" and ready:
            reduce(1)
            if not signs:
                return False
            signs.pop()
        elif sign in "+-*" and ready:
            reduce(2 if sign == "*" else 1)
            signs.append(sign)
            ready = False
        else:
            return False
        i = j
    if not ready:
        return False
    reduce(1)
    return not signs and not left and values == [int(target)]


def by_splitting(question, answer):
    """Split at the last + or - outside brackets, else at the last *, else take brackets off."""
    given, target = question.split(">")
    pieces = re.findall("[0-9]+", answer, re.ASCII)
    if len(answer) > 200 or sorted(pieces) != sorted(given.split()):
        return False

    def value(text):
        depth, places = 0, {"+": -1, "*": -1}
        for i, sign in enumerate(text):
            depth += (sign == "(") - (sign == ")")
            if depth < 0:
                raise ValueError(text)
            if depth == 0 and sign in "+-*":
                places["*" if sign == "*" else "+"] = i
        at = places["+"] if places["+"] >= 0 else places["*"]
        if at >= 0:
            a, b = value(text[:at]), value(text[at + 1 :])
            return a * b if text[at] == "*" else a + b if text[at] == "+" else a - b
        if text[:1] == "(" and text[-1:] == ")" and depth == 0:
            return value(text[1:-1])
        if not re.fullmatch("[0-9]+", text):
            raise ValueError(text)
        return int(text)

    try:
        return value(answer) == int(target)
    except ValueError:
        return False


RIGHT = [by_tree, by_algebra, by_stacks, by_splitting]
