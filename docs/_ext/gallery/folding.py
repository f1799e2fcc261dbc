"""Which lines of a page's code its reader can do without at first: checks, tables, drawing.

The rule is read from the code itself. At the end of a block, statements that only assert, only
print a table or only draw are folded behind one line; so is a block of nothing else, and a long
list of imports at its beginning. Scripts and notebooks keep every line as it is.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from sources import modules
from sphinx.locale import _

#: Modules that draw. What is imported from one, or made by one, draws too; but of `PLOT` only the
#: functions that take axes, or return a figure.
PLOT = "lm_from_scratch.instruments.plot"
DRAWS = re.compile(rf"matplotlib|{PLOT}|lm_from_scratch\.drawings")
#: Lines of imports at the beginning of a block, so many of which are folded.
LONG = 3


@dataclass
class Part:
    """Lines that stand together, and why they are folded: "" if they are not."""

    text: str
    kinds: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        count = self.kinds.count("check")
        checks = _("{count} checks") if count > 1 else _("{count} check")
        labels = [
            (_("imports"), {*self.kinds} == {"import"}),
            (checks.format(count=count), count),
            (_("code of the table"), "table" in self.kinds),
            (_("code of the figure"), "figure" in self.kinds),
        ]
        return str(_(", ")).join(str(label) for label, holds in labels if holds)


@cache  # a page is read, written and handed out
def parts(blocks: tuple[str, ...]) -> list[list[Part]]:
    """Each block of a page in up to three parts: imports, what is shown, what is folded below.

    What gives a name to something that is read later, in lines that are shown, is shown as well.
    """
    drawing: set[str] = set()
    page = [(split(block, drawing), {*drawing}) for block in blocks]
    read: set[str] = set()
    for block, figures in reversed(page):
        for part in reversed(block):
            if "figure" in part.kinds and assigned(part) & read - figures:
                part.kinds = []
            if not part.kinds:
                read |= loaded(part)
    return [block for block, _ in page]


def assigned(part: Part) -> set[str]:
    tree = ast.walk(ast.parse(part.text))
    values = [target for node in tree if isinstance(node, ast.Assign) for target in node.targets]
    return {node.id for value in values for node in ast.walk(value) if is_target(node)}


def loaded(part: Part) -> set[str]:
    tree = ast.walk(ast.parse(part.text))
    return {node.id for node in tree if isinstance(node, ast.Name) and not is_target(node)}


def lines(part: Part) -> int:
    """Those of code: no empty ones, no comments."""
    return len(re.findall(r"^\s*[^\s#]", part.text, re.M))


def split(code: str, drawing: set[str]) -> list[Part]:
    code = code.strip("\n")
    statements = ast.parse(code).body
    kinds = [kind_of(statement, drawing) for statement in statements]
    shown = [i for i, kind in enumerate(kinds) if kind == ""]
    if not shown:
        folded = [kind for kind in kinds if kind != "import"]
        few = not folded and lines(Part(code)) < LONG
        return [Part(code, [] if few else folded or kinds)]
    # Imports below the last line that is shown are for what is folded.
    first, last = shown[0], shown[-1]
    above = statements[first - 1].end_lineno if first and {*kinds[:first]} == {"import"} else 0
    below = statements[last].end_lineno if {*kinds[last + 1 :]} - {"import"} else None
    written = code.split("\n")
    if lines(Part("\n".join(written[:above]))) < LONG:
        above = 0
    three = [
        Part("\n".join(written[:above]), ["import"]),
        Part("\n".join(written[above:below])),
        Part("\n".join(written[below:] if below else []), kinds[last + 1 :]),
    ]
    return [Part(part.text.strip("\n"), part.kinds) for part in three if part.text.strip()]


def kind_of(node: ast.stmt, drawing: set[str]) -> str:
    """ "check", "table", "figure", "import", or "" for what a reader should see."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        drawing.update(names_that_draw(node))
        return "import"
    if isinstance(node, ast.Assert):
        return "check"
    if isinstance(node, (ast.For, ast.With)):
        return loop(node, drawing)
    if isinstance(node, ast.FunctionDef):
        if not draws_only(node.body, drawing):
            return ""
        drawing.add(node.name)  # so does a call of it
        return "figure"
    value = getattr(node, "value", None)
    if isinstance(node, ast.Expr) and is_check(node.value):
        return "check"
    draws = isinstance(value, ast.Call) and root(value.func) in drawing
    if isinstance(node, ast.Assign):
        targets = {name.id for name in ast.walk(node) if is_target(name)}
        (drawing.update if draws else drawing.difference_update)(targets)
    if draws:
        return "figure"
    if isinstance(node, ast.Expr) and is_table(node.value):
        return "table"
    return ""


def loop(node: ast.For | ast.With, drawing: set[str]) -> str:
    inside = set(drawing)
    if isinstance(node, ast.With):
        opened = (item.context_expr for item in node.items)
        return "figure" if all(root(one) in drawing for one in opened) else ""
    if any(isinstance(name, ast.Name) and name.id in drawing for name in ast.walk(node.iter)):
        inside |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    if node.orelse:
        return ""
    if draws_only(node.body, inside):
        return "figure"
    rest = [inner for inner in node.body if kind_of(inner, inside) != "check"]
    if not rest:
        return "check"
    return "table" if all(is_call_of(inner, "print") for inner in rest) else ""


def draws_only(body: list[ast.stmt], drawing: set[str]) -> bool:
    """Whether statements draw, and beside it do no more than give names to what they draw."""
    kinds = [kind_of(inner, drawing) for inner in body]
    return "figure" in kinds and all(
        kind in ("figure", "check") or isinstance(inner, ast.Assign)
        for inner, kind in zip(body, kinds, strict=True)
    )


def names_that_draw(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        name = module + alias.name
        if DRAWS.match(name) and (not name.startswith(f"{PLOT}.") or alias.name in plots()):
            yield alias.asname or alias.name.partition(".")[0]


@cache
def plots() -> set[str]:
    """The functions of `PLOT` that take axes, or return a figure."""
    path = modules.modules()[PLOT]
    functions = [node for node in modules.tree(path).body if isinstance(node, ast.FunctionDef)]
    return {
        one.name
        for one in functions
        if re.search("Axes|Figure", f"{ast.unparse(one.args)} {ast.unparse(one.returns)}")
    }


def root(node: ast.expr) -> str:
    """The name with which an expression begins: `ax` of `ax.flat[0].plot`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_target(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_call_of(node: ast.stmt, name: str) -> bool:
    call = getattr(node, "value", None)
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name


def is_check(node: ast.expr) -> bool:
    """Whether an expression is a call as `torch.testing.assert_close(...)`."""
    called = node.func if isinstance(node, ast.Call) else node
    name = getattr(called, "attr", getattr(called, "id", ""))
    return isinstance(node, ast.Call) and name.startswith("assert_")


def is_table(node: ast.expr) -> bool:
    """Whether an expression prints in columns: something in it has a width."""
    if not (isinstance(node, ast.Call) and root(node.func) == "print"):
        return False
    parts = [inner for inner in ast.walk(node) if isinstance(inner, ast.FormattedValue)]
    specs = [ast.unparse(part.format_spec)[2:-1] for part in parts if part.format_spec]
    return any(re.match(r".?[<>^=]|\d|\{", spec) for spec in specs)
