"""Small automatic changes of a program: each should break it, and a good check should see it.

One change at a time: another operator or comparison, another constant; a conversion, an operand, a
keyword or an end of a slice left out; two arguments swapped, a condition reversed, a statement left
out. Most are mistakes that people make. Where a change does not matter, ``SURVIVORS`` wants a
reason in writing.
"""

import ast
import copy
from collections.abc import Iterator

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
REVERSED: dict[type, type] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
BUILTINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
CONVERSIONS = {
    "float", "double", "half", "to", "type_as", "contiguous", "clone", "detach", "long", "bool",
    "abs", "sqrt", "rsqrt", "exp", "log", "clamp", "masked_fill", "round", "transpose", "mT",
}  # fmt: skip
TWINS = [
    ("sin", "cos"), ("min", "max"), ("amin", "amax"), ("any", "all"), ("zeros", "ones"),
    ("argmin", "argmax"), ("sqrt", "rsqrt"), ("tril", "triu"), ("floor", "ceil"), ("sum", "mean"),
]  # fmt: skip
NAMES = {a: b for pair in TWINS for a, b in (pair, pair[::-1])}


def mutants(code: str) -> Iterator[tuple[str, str]]:
    """Every changed program, with what was changed: "statement: old => new"."""
    tree = ast.parse(code)
    labels: dict[str, int] = {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.stmt))]
    owner = _owners(tree)
    for index, node in enumerate(nodes):
        if index not in owner or _skipped(node, owner[index]):
            continue
        for new in changes(node):
            copied = copy.deepcopy(tree)
            twin = [n for n in ast.walk(copied) if isinstance(n, (ast.expr, ast.stmt))][index]
            changed = ast.fix_missing_locations(_Replace(twin, new).visit(copied))
            head = ast.unparse(owner[index]).partition("\n")[0]
            label = f"{head}: {_short(node)} => {_short(new)}"
            labels[label] = labels.get(label, 0) + 1
            if labels[label] > 1:
                label += f" ({labels[label]})"
            yield label, ast.unparse(changed)


def _short(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def _owners(tree: ast.Module) -> dict[int, ast.stmt]:
    """The innermost statement around each node, by the node's place; only inside functions."""
    owner: dict[int, ast.stmt] = {}
    place = {
        id(node): i
        for i, node in enumerate(n for n in ast.walk(tree) if isinstance(n, (ast.expr, ast.stmt)))
    }

    def descend(node: ast.AST, statement: ast.stmt | None, inside: bool) -> None:
        if isinstance(node, ast.stmt):
            statement = node
        if inside and statement is not None and id(node) in place:
            owner[place[id(node)]] = statement
        for name, part in ast.iter_fields(node):
            within = inside or isinstance(node, ast.FunctionDef)
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, ast.AST):
                    descend(child, statement, within)

    descend(tree, None, False)
    return owner


def _skipped(node: ast.AST, statement: ast.stmt) -> bool:
    """Text of messages is not what an exercise is about, and a function itself stays."""
    if isinstance(node, ast.FunctionDef) or isinstance(statement, (ast.Raise, ast.AnnAssign)):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What can stand instead of one node."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        yield node.left
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
        yield ast.Pass()
    elif isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            for table in (OPERATORS, REVERSED):
                if type(op) in table:
                    ops = [*node.ops[:place], table[type(op)](), *node.ops[place + 1 :]]
                    yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(OPERATORS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, (ast.If, ast.While)):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in CONVERSIONS:
            yield node.func.value
        for place, pair in enumerate(zip(node.args, node.args[1:])):
            if all(isinstance(argument, ast.Name) for argument in pair):
                args = [*node.args[:place], *pair[::-1], *node.args[place + 2 :]]
                yield ast.Call(node.func, args, node.keywords)
        for left_out in node.keywords:
            keywords = [keyword for keyword in node.keywords if keyword is not left_out]
            yield ast.Call(node.func, node.args, keywords)
    elif isinstance(node, ast.Slice):
        if node.lower:
            yield ast.Slice(None, node.upper, node.step)
        if node.upper:
            yield ast.Slice(node.lower, None, node.step)
    elif isinstance(node, ast.Name) and node.id in BUILTINS:
        yield ast.Name(BUILTINS[node.id], node.ctx)
    elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield ast.Pass()


def _constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        if value:
            yield ast.Constant(value - 1)
    elif isinstance(value, float):
        yield ast.Constant(value * 2 if value else 1.0)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return copy.deepcopy(self.new) if node is self.old else self.generic_visit(node)
