"""reach.py: which definitions of other files a piece of Python depends on."""

from pathlib import Path

import pytest
from reach import Tree

OTHER = "import math\n\n\ndef used():\n    return helper()\n\n\ndef helper():\n    return math.pi\n"
OTHER += "\n\ndef unused():\n    return 3\n"


def reached(root: Path, page: str, **files: str) -> dict[str, str]:
    """The digests by file, after the files were written beside a package ``house``."""
    for name, text in {"page": page, "house/__init__": "", **files}.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tree = Tree(root)
    return {tree.name(path): digest for path, digest in tree.reach([root / "page.py"])[0].items()}


@pytest.mark.parametrize(
    ("page", "whole"),
    [
        ("from house.other import used\nused()\n", False),
        ("from house.other import used as f\nf()\n", False),
        ("from house import other\nother.used()\n", False),
        ("import house.other as o\no.used()\n", False),
        ("def f():\n    from house.other import used\n    return used()\n\n\nf()\n", False),
        ("def f():\n    return used()\n\n\nfrom house.other import used\n", False),
        (
            "class A:\n    def f(self):\n        from house import other as o\n        o.used()\n",
            False,
        ),
        (
            "try:\n    from house.other import used\nexcept ImportError:\n"
            "    from re import sub as used\nused()\n",
            False,
        ),
        ("import house.other\nhouse.other.used()\n", True),
        ("from house.other import *\nused()\n", True),
        ("from house import other\nprint(vars(other))\n", True),
        ("from house import other\ngetattr(other, 'us' + 'ed')()\n", True),
        ("import importlib\nimportlib.import_module('house.other')\n", True),
        ("RUN = ['-c', 'from house.other import used']\n", True),
    ],
)  # fmt: skip
def test_what_a_page_reaches(tmp_path: Path, page: str, whole: bool) -> None:
    """A function through another one, by any way to import it; one that it does not use only where
    the file is meant as a whole."""
    before = reached(tmp_path, page, **{"house/other": OTHER})
    assert before == reached(tmp_path, page, **{"house/other": OTHER})
    deep = OTHER.replace("math.pi", "math.e")
    assert reached(tmp_path, page, **{"house/other": deep}) != before
    beside = OTHER.replace("return 3", "return 4")
    assert (reached(tmp_path, page, **{"house/other": beside}) != before) == whole


def test_a_command_that_is_imported_by_a_made_name_counts(tmp_path: Path) -> None:
    page = "RUN = ['-m', 'house']\n"
    files = {"house/__init__": "", "house/__main__": "", "house/jobs/one": "X = 1\n"}
    reached(tmp_path, page, **files)
    made = {"house/__main__.py": "house/jobs/*.py"}

    def digests(**given: dict[str, str]) -> dict[Path, str]:
        return Tree(tmp_path, **given).reach([tmp_path / "page.py"])[0]

    before, blind = digests(made=made), digests()
    (tmp_path / "house/jobs/one.py").write_text("X = 2\n")
    assert digests(made=made) != before
    assert digests() == blind


REGISTRY = "TABLE = {}\n\n\ndef register(f):\n    TABLE[f.__name__] = f\n    return f\n"
ACTS = {
    "a call": "print({})\n",
    "a loop": "for i in range({}):\n    pass\n",
    "an entry of another's table": "import house.registry\n\nhouse.registry.TABLE['a'] = {}\n",
    "a decorator that registers": (
        "from house.registry import register\n\n\n@register\ndef f():\n    return {}\n"
    ),
    "a fake of an operator": "def op():\n    pass\n\n\n@op.register\ndef _():\n    return {}\n",
    "a library's table": "import atexit\n\n\n@atexit.register\ndef f():\n    return {}\n",
    "any name": "def __getattr__(name):\n    return {}\n",
    "where a library is missing": "try:\n    import nothing\nexcept ImportError:\n    X = {}\n",
}


@pytest.mark.parametrize("what", ACTS)
def test_what_a_file_does_when_it_is_imported(tmp_path: Path, what: str) -> None:
    page = "from house.middle import f\n"
    files = {"house/registry": REGISTRY, "house/middle": "from house import acting\n\n\nf = 1\n"}
    one, two = (
        reached(tmp_path, page, **files, **{"house/acting": ACTS[what].format(n)}) for n in (1, 2)
    )
    assert one.pop("house/acting.py") != two.pop("house/acting.py")
    assert one == two


def test_not_what_it_does_as_a_command(tmp_path: Path) -> None:
    page, text = "from house.other import used\nused()\n", OTHER + '\nif __name__ == "__main__":\n'
    one, two = (
        reached(tmp_path, page, **{"house/other": f"{text}    print({n})\n"}) for n in (1, 2)
    )
    assert one == two


def test_a_relative_import_and_a_file_beside(tmp_path: Path) -> None:
    page = "import beside\nfrom house.inner.a import x\nprint(x, beside.y)\n"
    files = {
        "beside": "y = 1\n",
        "house/inner/__init__": "",
        "house/inner/a": "from ..b import x\n",
    }
    found = [
        reached(tmp_path, page, **files, **{"house/b": f"x = {n}\nz = {m}\n"})
        for n, m in ((1, 1), (1, 2), (2, 2))
    ]
    assert found[0] == found[1] != found[2]
    assert "beside.py" in found[0]


def test_a_name_of_another_library(tmp_path: Path) -> None:
    page = "from {} import tensor\nprint(tensor)\n"
    one, two = (reached(tmp_path, page.format(name)) for name in ("torch", "numpy"))
    assert one != two
    tree = Tree(tmp_path)
    assert tree.reach([tmp_path / "page.py"])[1] == {"numpy"}
