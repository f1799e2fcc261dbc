"""The API reference is complete: what a docstring must say is read from the code beside it.

Nothing is imported: a docstring is compared with the signature and the body in the same file.
Public is every name without an underscore in front, in every module that has an API page.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lm_from_scratch"
#: How a docstring says what it refuses.
RAISES = "Raises ``ValueError``"
#: A shape in brackets, as (B, T, C), (...) or (N,); or words for tensors that any shape fits.
SHAPE = (
    r"(\((…|\.\.\.|[A-Z0-9]|out|rows|r\b|m,|n,)[^()]*\)|any shape|one shape|same shape|one number)"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Name:
    """A public function, class or method: where it stands, and what it says."""

    path: Path
    name: str  # with its class in front
    node: Function | ast.ClassDef
    of_class: str = ""  # the docstring of its class, where it is a method

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.node.lineno} {self.name}"

    @property
    def own(self) -> str:
        return ast.get_docstring(self.node) or ""


def is_public(name: str) -> bool:
    return not name.startswith("_")


def modules() -> list[Path]:
    """The files with an API page: all but private ones and the material of the exercises."""
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if "catalogue" not in path.parts
        and all(is_public(part) for part in path.relative_to(PACKAGE).parts)
    ]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def public_names(path: Path) -> Iterator[Name]:
    for node in parse(path).body:
        if not isinstance(node, Function | ast.ClassDef) or not is_public(node.name):
            continue
        text = ast.get_docstring(node) or ""
        yield Name(path, node.name, node)
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, Function) and is_public(method.name):
                    yield Name(path, f"{node.name}.{method.name}", method, text)


def inherited(classes: dict[str, ast.ClassDef], owner: str, method: str) -> str:
    """The docstring of the nearest method of that name above a class, in the package."""
    for base in classes[owner].bases:
        name = ast.unparse(base).split(".")[-1]
        if name in classes:
            for node in classes[name].body:
                text = ast.get_docstring(node) if isinstance(node, Function) else None
                if text and node.name == method:
                    return text
            if text := inherited(classes, name, method):
                return text
    return ""


ALL = [name for path in modules() for name in public_names(path)]
CLASSES = {name.node.name: name.node for name in ALL if isinstance(name.node, ast.ClassDef)}
#: What these compute is said by the class that they belong to.
SAID_BY_CLASS = {"forward", "backward", "extra_repr"}


def docstring(name: Name) -> str:
    """Its own docstring, or that of the method which it overrides, on one line."""
    owner, _, method = name.name.rpartition(".")
    text = name.own or (inherited(CLASSES, owner, method) if owner else "")
    return " ".join(text.split())


def tensors(node: Function) -> list[str]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [
        a.arg
        for a in arguments
        if a.annotation and re.fullmatch(r"Tensor( \| None)?", ast.unparse(a.annotation))
    ]


#: A parameter of an optimizer: of any shape, which the formulas say once.
ANY_SHAPE = {"p"}


def is_internal(node: Function) -> bool:
    """A kernel, an operator that gets what its function has checked, or a step of autograd."""
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    first = [a.arg for a in node.args.args[:1]]
    return first == ["ctx"] or any(m.startswith(("torch.library", "triton.jit")) for m in marks)


def without_shape(name: Name) -> list[str]:
    """The tensor arguments whose shape is said by no docstring around.

    In the docstring of the function or of its class, the shape stands in the same sentence; a
    module that says it for all its functions puts it right behind the name.
    """
    node = name.node
    last = name.name.rpartition(".")[2]
    if not isinstance(node, Function) or is_internal(node) or last.startswith("check"):
        return []
    if "tensors of any shape" in (ast.get_docstring(parse(name.path)) or ""):
        return []
    near = docstring(name) + " " + " ".join(name.of_class.split())
    module = " ".join((ast.get_docstring(parse(name.path)) or "").split())
    return [
        argument
        for argument in tensors(node)
        if argument not in ANY_SHAPE
        and not re.search(rf"\b{argument}\b[^.]*?{SHAPE}", near.replace("...", "…"))
        and not re.search(rf"\b{argument}\b(``)?(, \w+)*( and \w+)? {SHAPE}", module)
    ]


HELPERS = {
    node.name: node
    for path in modules()
    for node in parse(path).body
    if isinstance(node, Function) and node.name.startswith(("_", "check"))
}


def raised(
    node: ast.AST, owner: ast.ClassDef | None = None, seen: tuple[str, ...] = ()
) -> set[str]:
    """Exceptions that a function raises itself, or through the helpers that check for it."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
            found.add(ast.unparse(part.exc.func))
        if isinstance(part, ast.Call):
            name = ast.unparse(part.func)
            if name in HELPERS and name not in seen:
                found |= raised(HELPERS[name], None, (*seen, name))
            if owner and name.startswith(("self._", "self.check")) and name not in seen:
                for method in owner.body:
                    if isinstance(method, Function) and f"self.{method.name}" == name:
                        found |= raised(method, owner, (*seen, name))
    return found


#: What an object of a class does without a name of its own: its class says what it raises.
IMPLICIT = {"__init__", "__post_init__", "__call__", "__getitem__", "forward"}


def raises(name: Name) -> set[str]:
    """What a caller may meet, by the code."""
    if isinstance(name.node, ast.ClassDef):
        methods = [m for m in name.node.body if isinstance(m, Function) and m.name in IMPLICIT]
        return set().union(*(raised(method, name.node) for method in methods))
    return raised(name.node, CLASSES.get(name.name.rpartition(".")[0]))


#: Exceptions that a reader must hear of. (Others say that a program is wrong, or end a process.)
TOLD = {
    "ValueError",
    "TypeError",
    "IndexError",
    "RuntimeError",
    "FloatingPointError",
    "ProcessLost",
}


def untold(name: Name) -> list[str]:
    """The exceptions that a public name raises and its docstring does not name."""
    text = docstring(name)
    found = sorted(raises(name) & TOLD)
    return [
        e for e in found if f"``{e}``" not in text or (e == "ValueError" and RAISES not in text)
    ]


def exempt(name: Name) -> bool:
    """What needs no docstring: `forward` of a class that says it, and the inside of a kernel."""
    last = name.name.rpartition(".")[2]
    return last in SAID_BY_CLASS or (isinstance(name.node, Function) and is_internal(name.node))


#: Modules that only hold, move or check: there is no paper behind them.
NO_SOURCE = {
    "checkpoint", "conformance", "data", "generate", "onednn", "plot", "record", "references",
    "swap", "cache.buffer", "cache.convert", "cache.growing", "cache.interface", "cache.layered",
    "kernels.compilation", "kernels.device", "kernels.model", "optim.sharded", "pretrained.make",
}  # fmt: skip


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def source_is_missing(path: Path) -> bool:
    """Whether no docstring of a module names a paper or another source."""
    texts = [ast.get_docstring(parse(path)), *(name.own for name in public_names(path))]
    return not any("Source" in (text or "") for text in texts)


def test_every_public_name_has_a_docstring() -> None:
    assert len(ALL) > 700
    assert [str(name) for name in ALL if not docstring(name) and not exempt(name)] == []


def test_tensor_arguments_have_their_shape_named() -> None:
    names = [name for name in ALL if "exercises" not in name.path.parts]
    assert [f"{name}: {missing}" for name in names if (missing := without_shape(name))] == []


def test_what_a_function_raises_is_in_its_docstring() -> None:
    names = [name for name in ALL if not exempt(name)]
    assert [f"{name}: {missing}" for name in names if (missing := untold(name))] == []


def test_what_implements_a_paper_names_it() -> None:
    lacks = {
        dotted(path)
        for path in modules()
        if "exercises" not in path.parts and path.name != "__init__.py" and source_is_missing(path)
    }
    assert lacks == NO_SOURCE


PLANTED = {
    "no docstring": ("def f(n: int) -> int:\n    return n\n", lambda n: not docstring(n)),
    "no shape": (
        'def f(x: Tensor) -> Tensor:\n    """Twice ``x``. A (B, T)."""\n    return 2 * x\n',
        without_shape,
    ),
    "an error in a helper": (
        'def f(n: int) -> None:\n    """Something."""\n    check_positions(n)\n',
        untold,
    ),
    "another wording": (
        'def f(n: int) -> None:\n    """A ``ValueError`` for n."""\n    raise ValueError(n)\n',
        untold,
    ),
    "an error in a constructor": (
        'class F:\n    """Something."""\n\n    def __init__(self) -> None:\n'
        "        self._check()\n\n    def _check(self) -> None:\n        raise ValueError(1)\n",
        untold,
    ),
    "a tensor of a method": (
        'class F:\n    """Something."""\n\n    def g(self, x: Tensor | None = None) -> None:\n'
        '        """Something."""\n',
        without_shape,
    ),
    "no source": ('"""A method."""\n\ndef f() -> None:\n    """."""\n', None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_gap_is_found(tmp_path: Path, fault: str) -> None:
    text, finds = PLANTED[fault]
    path = tmp_path / "planted.py"
    path.write_text(text, encoding="utf-8")
    if finds is None:
        assert source_is_missing(path)
    else:
        assert any(finds(name) for name in public_names(path))


# -------------------------------------------------------------------------------- the pages


def listed() -> dict[str, Path]:
    return {m: p for m, p in pages.modules().items() if pages.has_objects(p) and "." in m}


def test_the_index_has_every_module_in_one_group() -> None:
    groups = pages.grouped(listed())
    assert "Others" not in groups  # a new module: name it in GROUPS of docs/pages.py
    found = [module for own in groups.values() for module in own]
    assert sorted(found) == sorted(listed()) and all(groups.values())
    assert pages.grouped({"lm_from_scratch.planted": PACKAGE})["Others"]


def test_rope_is_found_under_layers() -> None:
    index = pages.api_index(listed())
    layers = index[index.index("\nLayers\n") : index.index("\nModels\n")]
    assert "(RoPE)" in layers and "`~lm_from_scratch.rope.apply_rope`" in layers
    assert "check_" not in index and "_kernel`" not in index
    # A kernel's helper and a custom operator have no place on a page: autodoc passes over them.
    assert "load_rows" not in index and "adamw_in_place" not in index
    assert "`~lm_from_scratch.kernels.adamw.adamw_`" in index


def test_a_page_begins_with_who_uses_it() -> None:
    module = "lm_from_scratch.cache.growing"  # tutorials import it from the package above
    text = pages.api_page(module, listed()[module])
    top = text[: text.index(".. automodule::")]
    assert "/auto_tutorials/5_caching/" in top and "/exercises/growing_cache`" in top
    norm = "lm_from_scratch.kernels.norm"
    assert "/gpu/3_rms_norm`" in pages.api_page(norm, listed()[norm])
