"""Which lines of a page's code its reader can do without at first: checks, tables, drawing.

The rule is read from the code itself. At the end of a block, statements that only assert, only
print a table or only draw are folded behind one line; so is a block of nothing else, and a long
list of imports at its beginning. Scripts and notebooks keep every line as it is.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Modules that draw. What is imported from one, or made by one, draws too.
DRAWS = ("matplotlib", "lm_from_scratch.instruments.plot", "lm_from_scratch.instruments.diagrams")
#: Lines of imports at the beginning of a block, so many of which are folded.
LONG = 4


@dataclass
class Part:
    """Lines that stand together, and why they are folded: "" if they are not."""

    text: str
    kinds: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        said = ["imports"] if {*self.kinds} == {"import"} else []
        if count := self.kinds.count("check"):
            said.append(f"checked: {count}")
        if "table" in self.kinds:
            said.append("printing code")
        if "figure" in self.kinds:
            said.append("figure code")
        return ", ".join(said)


def parts(blocks: list[str]) -> list[list[Part]]:
    """Each block of a page in up to three parts: imports, what is shown, what is folded below."""
    drawing: set[str] = set()
    return [split(block, drawing) for block in blocks]


def lines(part: Part) -> int:
    """Those of code: no empty ones, no comments."""
    return len(re.findall(r"^\s*[^\s#]", part.text, re.M))


def split(code: str, drawing: set[str]) -> list[Part]:
    code = code.strip("\n")
    statements = ast.parse(code).body
    kinds = [kind(statement, drawing) for statement in statements]
    shown = [i for i, found in enumerate(kinds) if found == ""]
    if not shown:
        folded = [found for found in kinds if found != "import"]
        return [Part(code, folded or kinds)]
    # Imports below the last line that is shown are for what is folded.
    first, last = shown[0], shown[-1]
    above = statements[first - 1].end_lineno if first and {*kinds[:first]} == {"import"} else 0
    below = statements[last].end_lineno if {*kinds[last + 1 :]} - {"import"} else None
    written = code.split("\n")
    if lines(Part("\n".join(written[:above]))) < LONG:
        above = 0
    found = [
        Part("\n".join(written[:above]), ["import"]),
        Part("\n".join(written[above:below])),
        Part("\n".join(written[below:] if below else []), kinds[last + 1 :]),
    ]
    return [Part(part.text.strip("\n"), part.kinds) for part in found if part.text.strip()]


def kind(node: ast.stmt, drawing: set[str]) -> str:
    """ "check", "table", "figure", "import", or "" for what a reader should see."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        drawing.update(names_that_draw(node))
        return "import"
    if isinstance(node, ast.Assert):
        return "check"
    if isinstance(node, (ast.For, ast.With)):
        return loop(node, drawing)
    if isinstance(node, ast.FunctionDef):
        return "figure" if draws_only(node.body, drawing) else ""
    value = getattr(node, "value", None)
    if isinstance(node, ast.Expr) and is_check(node.value):
        return "check"
    if isinstance(value, ast.Call) and root(value.func) in drawing:
        if isinstance(node, ast.Assign):
            drawing.update(name.id for name in ast.walk(node) if is_target(name))
        return "figure"
    if isinstance(node, ast.Expr) and is_table(node.value):
        return "table"
    return ""


def loop(node: ast.For | ast.With, drawing: set[str]) -> str:
    if isinstance(node, ast.For) and any(
        isinstance(name, ast.Name) and name.id in drawing for name in ast.walk(node.iter)
    ):
        drawing.update(name.id for name in ast.walk(node.target) if isinstance(name, ast.Name))
    if draws_only(node.body, drawing):
        return "figure"
    kinds = {kind(inner, drawing) for inner in node.body}
    if kinds == {"check"}:
        return "check"
    printed = all(
        is_call_of(inner, "print") for inner in node.body if kind(inner, drawing) != "check"
    )
    return "table" if isinstance(node, ast.For) and printed else ""


def draws_only(body: list[ast.stmt], drawing: set[str]) -> bool:
    """Whether statements draw, and beside it do no more than give names to what they draw."""
    kinds = [(inner, kind(inner, drawing)) for inner in body]
    drawn = [inner for inner, found in kinds if found == "figure"]
    return bool(drawn) and all(
        found in ("figure", "check") or isinstance(inner, ast.Assign) for inner, found in kinds
    )


def names_that_draw(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        whole = alias.name
        if isinstance(node, ast.ImportFrom):
            whole = f"{node.module}.{alias.name}"
        if whole.startswith(DRAWS):
            yield alias.asname or alias.name.partition(".")[0]


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
    name = getattr(getattr(node, "func", None), "attr", "")
    return isinstance(node, ast.Call) and name.startswith("assert_")


def is_table(node: ast.expr) -> bool:
    """Whether an expression prints in columns: with a width or a number of digits."""
    if not (isinstance(node, ast.Call) and root(node.func) == "print"):
        return False
    return any(
        isinstance(inner, ast.FormattedValue) and inner.format_spec for inner in ast.walk(node)
    )
