"""What a docstring must say is read from the code beside it; nothing is imported.

Every public name says something. The shape of a tensor, and the errors that a function raises, are
asked for where somebody else needs them: a page, an exercise, the README or another file of the
package uses the name.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from api import package
from gallery import pages
from sources.modules import sources, summary, tree
from sources.templates import render

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lm_from_scratch"
#: A shape in brackets, as (B, T, C), (...) or (N,); or words for tensors that any shape fits.
SHAPE = (
    r"(\((…|\.\.\.|[A-Z0-9]|out|rows|r\b|m,|n,)[^()]*\)|any shape|one shape|same shape|one number)"
)
#: Exceptions that a reader must hear of. (Others say that a program is wrong, or end a process.)
TOLD = {"ValueError", "TypeError", "IndexError", "RuntimeError", "FloatingPointError"}
#: What these compute is said by the class that they belong to.
SAID_BY_CLASS = {"forward", "backward", "extra_repr"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Name:
    """A public function, class or method: where it stands, and the docstrings around it."""

    path: Path
    name: str  # with its class in front
    node: Function | ast.ClassDef
    around: str = ""  # of its class and its module

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.node.lineno} {self.name}"

    @property
    def own(self) -> str:
        return ast.get_docstring(self.node) or ""


def modules() -> list[Path]:
    """The files with an API page: all but private ones, commands and the exercises' material."""
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not {"catalogue", "commands"} & {*path.parts}
        and not any(part.startswith("_") for part in path.relative_to(PACKAGE).parts)
    ]


def public_names(path: Path) -> Iterator[Name]:
    module = ast.get_docstring(tree(path)) or ""
    for node in tree(path).body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield Name(path, node.name, node, module)
            around = f"{ast.get_docstring(node) or ''}\n{module}"
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, Function) and not method.name.startswith("_"):
                    yield Name(path, f"{node.name}.{method.name}", method, around)


@cache
def all_names() -> list[Name]:
    return [name for path in modules() for name in public_names(path)]


@cache
def explained() -> set[str]:
    """The functions, methods and classes, without the class in front, that have a docstring."""
    return {name.name.rpartition(".")[2] for name in all_names() if name.own}


def exempt(name: Name) -> bool:
    """What needs no docstring: a step that its class explains, a method that another class with the
    same method explains, and the inside of a kernel or of an operator."""
    owner, _, last = name.name.rpartition(".")
    return last in SAID_BY_CLASS or (bool(owner) and last in explained()) or is_internal(name.node)


def is_internal(node: ast.AST) -> bool:
    """A kernel, an operator that gets what its function has checked, or a step of autograd."""
    if not isinstance(node, Function):
        return False
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    first = [a.arg for a in node.args.args[:1]]
    return first == ["ctx"] or any(m.startswith(("torch.library", "triton.jit")) for m in marks)


@cache
def words_of(path: Path) -> set[str]:
    """Every name that a file of Python uses or imports."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


@cache
def outsiders() -> dict[Path, set[str]]:
    """The files that may use a name of another: pages, exercises, the package, the README."""
    files = [*ROOT.glob("tutorials/*/*.py"), *PACKAGE.rglob("*.py")]
    readme = ROOT / "README.md"
    return {path: words_of(path) for path in files} | {
        readme: set(re.findall(r"\w+", readme.read_text(encoding="utf-8")))
    }


def is_used(name: Name) -> bool:
    last = name.name.rpartition(".")[2]
    return any(last in words for path, words in outsiders().items() if path != name.path)


def without_shape(name: Name) -> list[str]:
    """The tensor arguments whose shape is said nowhere: in the docstring, in the sentence that has
    the argument; in those of the class and the module, right behind its name or in its row of a
    table."""
    node = name.node
    if not isinstance(node, Function) or is_internal(node) or node.name.startswith("check"):
        return []
    if "tensors of any shape" in name.around:
        return []
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    tensors = [
        a.arg
        for a in arguments
        if a.annotation and re.fullmatch(r"Tensor( \| None)?", ast.unparse(a.annotation))
    ]
    own = f"{name.own} {name.around}".replace("...", "…")
    return [
        argument
        for argument in tensors
        if argument != "p"  # a parameter of an optimizer: of any shape
        and not re.search(rf"\b{argument}\b[^.]*?{SHAPE}", own)
        and not re.search(rf"^\W*{argument}\b.*{SHAPE}", name.around, re.M)
    ]


def untold(name: Name) -> list[str]:
    """The exceptions that a function raises itself, and that neither it nor its class names."""
    raised = {
        ast.unparse(part.exc.func)
        for part in ast.walk(name.node)
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call)
    }
    text = f"{name.own} {name.around}"
    return [error for error in sorted(raised & TOLD) if error not in text]


def test_every_public_name_has_a_docstring() -> None:
    assert [str(name) for name in all_names() if not name.own and not exempt(name)] == []


def test_shapes_are_said_where_somebody_needs_them() -> None:
    names = [n for n in all_names() if "exercises" not in n.path.parts and is_used(n)]
    names = [name for name in names if name.own or not exempt(name)]
    assert [f"{n}: {missing}" for n in names if (missing := without_shape(n))] == []


def test_errors_are_said_where_somebody_needs_them() -> None:
    names = [name for name in all_names() if isinstance(name.node, Function) and is_used(name)]
    assert [f"{n}: {missing}" for n in names if (missing := untold(n)) and not exempt(n)] == []


PLANTED = {
    "no docstring": ("def f(n: int) -> int:\n    return n\n", lambda n: not n.own),
    "no shape": (
        'def f(x: Tensor) -> Tensor:\n    """Twice ``x``. A (B, T)."""\n    return 2 * x\n',
        without_shape,
    ),
    "a tensor of a method": (
        'class F:\n    """Something."""\n\n    def g(self, x: Tensor | None = None) -> None:\n'
        '        """Something."""\n',
        without_shape,
    ),
    "an error": ('def f(n: int) -> None:\n    """Something."""\n    raise ValueError(n)\n', untold),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_gap_is_found(tmp_path: Path, fault: str) -> None:
    text, finds = PLANTED[fault]
    path = tmp_path / "planted.py"
    path.write_text(text, encoding="utf-8")
    assert any(finds(name) for name in public_names(path))


def test_a_table_of_shapes_in_the_module_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    table = '"""A rule.\n\n=====  =========\n``x``  (B, T, C)\n=====  =========\n"""\n'
    path.write_text(table + 'def f(x: Tensor) -> None:\n    """Something."""\n')
    assert [without_shape(name) for name in public_names(path)] == [[]]


# -------------------------------------------------------------------------------- the pages


@cache
def index() -> str:
    return render("api.rst", **package.index())


def test_the_index_has_every_file_in_one_room() -> None:
    found = [module for members in package.by_room().values() for module in members]
    assert sorted(found) == sorted(package.listed())


def test_the_index_names_what_has_a_place_on_a_page() -> None:
    text = index()
    assert "(RoPE)" in text and "rope.apply_rope`" in text
    assert "check_" not in text and "_kernel`" not in text
    # A kernel's helper and a custom operator have no place on a page: autodoc passes over them.
    assert "load_rows" not in text and "adamw_in_place" not in text
    assert "`~lm_from_scratch.kernels.adamw.adamw_`" in text


def test_the_index_begins_with_five_files_that_lessons_use() -> None:
    start, _, rest = index().partition("``attention``\n---")
    lines = re.findall(r"^#\. :doc:`[\w.]+ <([\w.]+)>`: (.+)$", start, re.M)
    assert [module for module, _ in lines] == [f"lm_from_scratch.{name}" for name in package.FIRST]
    for module, about in lines:
        assert about == summary(package.listed()[module])
        assert about.endswith(".") and rest.count(f"<{module}>`") == 1
        lessons = [n for n in pages.lessons() if module in sources(pages.source(n))]
        assert len(lessons) >= 4, f"{module}: {lessons}"


def test_what_is_for_authors_stands_apart_at_the_end() -> None:
    before, _, after = index().partition("\nFor authors\n-----------\n")
    for module in package.listed():
        of_authors = module.split(".")[1] in package.FOR_AUTHORS
        assert (f"<{module}>`" in after) == of_authors, module
        assert (f"<{module}>`" in before) != of_authors, module


def test_a_page_begins_with_who_uses_it() -> None:
    (norm,) = [name for name in package.listed() if re.fullmatch(r".*(?<!kernels)\.norm", name)]
    text = render("used_on.rst", links=package.used_on(norm))
    assert "/auto_tutorials/2_qwen2/1_rms_norm`" in text and "/exercises/rms_norm`" in text
    assert "/gpu/3_rms_norm`" in "".join(package.used_on("lm_from_scratch.kernels.norm"))


def test_no_page_shows_answers() -> None:
    """The API pages show the package's whole files; right and wrong answers are not among them."""
    assert not [name for name in package.listed() if "catalogue" in name or "rms_norm" in name]
    assert "lm_from_scratch.exercises.report" in package.listed()
