"""records.py attacked, on a small repository: what must make a record stale does, what must not
does not, and a forged record fails."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from reach import Tree
from records import Proof, Records

FILES = {
    "constraints.txt": "torch==2.13.0\ntriton==3.7.1\nnumpy==2.4.6\nmatplotlib==3.11.2\n",
    "README.md": "What this is.\n",
    "house/__init__.py": '"""A package."""\n',
    "house/sums.py": (
        '"""Sums."""\n\nimport torch\n\nfrom house.parts import halves\n\nLIMIT = 3\n\n\n'
        "# a comment\ndef total(x, scale=2.0):\n"
        '    """The sum of ``x``."""\n    x = halves(x)\n    x = x[:LIMIT]\n'
        "    return torch.tensor(scale * sum(x))\n"
    ),
    "house/parts.py": "from house import deep\n\n\ndef halves(x):\n    return deep.each(x)\n",
    "house/deep.py": "def each(x):\n    return [n / 2 for n in x]\n",
    "house/lazy.py": "def more():\n    return 1\n",
    "house/table.py": "ROWS = 5\n",
    "house/table.txt": "1 2 3\n",
    "house/alone.py": "import numpy\n\nOTHER = numpy.pi\n",
    "house/__main__.py": "print(1)\n",
    "tests/test_other.py": "def test_other():\n    assert True\n",
    "pages/1_sums.py": (
        '"""\nSums\n====\n"""\n\nfrom house.sums import total\n\n# %%\n# Now we add.\n\n'
        "def show(cases=(1, 2, 3)):\n    from house.lazy import more\n"
        "    from house import table\n\n    return total(cases) + more() + table.ROWS\n\n\nshow()\n"
    ),
    "pages/2_more.py": "from house.alone import OTHER\n\nprint(OTHER)\n",
    "product.txt": "9\n",
}


class Small:
    """The small repository, with a proof of each page."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ran: list[str] = []
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert text.count(old) == 1, f"{old!r} in {name}"
        self.write(name, text.replace(old, new))

    def proofs(self) -> list[Proof]:
        def prove(name: str) -> Callable[[], dict[str, int]]:
            def proved() -> dict[str, int]:
                self.ran.append(name)
                return {"answer": 9}

            return proved

        pages = sorted(self.root.glob("pages/*.py"))
        return [Proof("page", p.stem, prove(p.stem), (p,), exact=self.inputs(p)) for p in pages]

    def inputs(self, page: Path) -> tuple[Path, ...]:
        return tuple(page.parent.glob(f"{page.stem}.csv"))

    def records(self, **options: bool) -> Records:
        tree = Tree(self.root, data={"house/table.py": "house/table.txt"})
        return Records(self.root / "recorded", tree, **options)

    def hold(self, **options: bool) -> list[str]:
        """What is repeated."""
        records, self.ran = self.records(**options), []
        for proof in self.proofs():
            records.hold(proof)
        return self.ran

    def states(self) -> list[str]:
        records = self.records()
        return [records.state(proof) for proof in self.proofs()]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    made = Small(tmp_path)
    assert made.hold() == ["1_sums", "2_more"]
    assert made.hold() == []
    return made


STALE: dict[str, tuple[str, str, str]] = {
    "a constant": ("house/sums.py", "LIMIT = 3", "LIMIT = 4"),
    "an operator": ("house/sums.py", "scale * sum(x)", "scale + sum(x)"),
    "a body two files away": ("house/deep.py", "n / 2", "n / 3"),
    "data": ("house/table.txt", "1 2 3", "1 2 4"),
    "a pinned version": ("constraints.txt", "torch==2.13.0", "torch==2.13.1"),
    "a default": ("house/sums.py", "scale=2.0", "scale=1.0"),
    "a decorator": ("house/deep.py", "def each", "@staticmethod\ndef each"),
    "an import that hides another": (
        "house/sums.py", "\n\nLIMIT", "\nfrom house.lazy import more as halves\n\nLIMIT",
    ),
    "the order of statements": (
        "house/sums.py", "x = halves(x)\n    x = x[:LIMIT]", "x = x[:LIMIT]\n    x = halves(x)",
    ),
    "a case less": ("pages/1_sums.py", "(1, 2, 3)", "(1, 2)"),
    "what a function imports": ("house/lazy.py", "return 1", "return 2"),
    "what a package does": ("house/__init__.py", "A package.", 'A package."""\nprint(1)\n"""'),
    "another library": ("house/sums.py", "import torch", "import numpy as torch"),
    "a name handed on": ("house/parts.py", "import deep", "import table as deep"),
    "a string that is used": ("house/table.py", "ROWS = 5", 'ROWS = "5"'),
    "a mark that programs read": ("pages/1_sums.py", "\n\nshow()", "\n### BEGIN SOLUTION\nshow()"),
}  # fmt: skip


@pytest.mark.parametrize("what", STALE)
def test_it_makes_a_record_stale(small: Small, what: str) -> None:
    """Its own alone, and once: the repeated proof writes a new record."""
    small.edit(*STALE[what])
    shared = what == "what a package does"
    assert small.states() == ["stale", "stale" if shared else "current"]
    with pytest.raises(AssertionError, match=r"^page 1_sums: its record is stale: make records"):
        small.hold(write=False)
    assert small.hold() == (["1_sums", "2_more"] if shared else ["1_sums"])
    assert small.hold(write=False) == []


UNUSED = "def other(x):\n    return x\n\n\nLOWEST = 3\n\n\ndef each"
KEPT: dict[str, Callable[[Small], None]] = {
    "a comment": lambda s: s.edit("house/sums.py", "# a comment", "# another\n# comment"),
    "a docstring": lambda s: s.edit("house/sums.py", "The sum of ``x``", "All of ``x``"),
    "no docstring": lambda s: s.edit("house/sums.py", '    """The sum of ``x``."""\n', ""),
    "blank lines": lambda s: s.edit("house/sums.py", "\n\nLIMIT", "\n\n\n\nLIMIT"),
    "formatting": lambda s: s.edit(
        "house/deep.py", "[n / 2 for n in x]", "[\n    n/2 for n in (x)]"
    ),
    "quotes": lambda s: s.write("house/table.py", "ROWS = (5)\n"),
    "another page": lambda s: s.edit("pages/2_more.py", "print(OTHER)", "print(2 * OTHER)"),
    "a module that it does not import": lambda s: s.edit("house/alone.py", "numpy.pi", "numpy.e"),
    "its prose": lambda s: s.edit("pages/1_sums.py", "# Now we add.", "# Now we add all of them."),
    "its title": lambda s: s.edit("pages/1_sums.py", "Sums\n====", "The sums\n========"),
    "the README": lambda s: s.edit("README.md", "What this is.", "What this was."),
    "a test of another thing": lambda s: s.edit("tests/test_other.py", "True", "1"),
    "a pin of another library": lambda s: s.edit("constraints.txt", "triton==3.7.1", "triton==3.8"),
    "a definition that it does not use": lambda s: s.edit("house/deep.py", "def each", UNUSED),
    "the order of imports": lambda s: s.edit(
        "house/sums.py",
        "import torch\n\nfrom house.parts import halves",
        "from house.parts import halves\nimport torch",
    ),
    "a new file": lambda s: s.write("house/new.py", "X = 1\n"),
    "a new page": lambda s: s.write("pages/0_first.py", "print(1)\n"),
}


@pytest.mark.parametrize("what", KEPT)
def test_it_makes_no_record_stale(small: Small, what: str) -> None:
    KEPT[what](small)
    assert "1_sums" not in small.hold()


def edit(field: str, value: object) -> Callable[[Path, Path], None]:
    def change(mine: Path, other: Path) -> None:
        record = json.loads(mine.read_text())
        assert record[field] != value
        mine.write_text(json.dumps({**record, field: value}))

    return change


FORGED: dict[str, Callable[[Path, Path], object]] = {
    "the outcome": edit("outcome", {"answer": 10}),
    "the digest": edit("digest", "0" * 64),
    "the seal": edit("seal", "0" * 64),
    "copied from another": lambda mine, other: shutil.copy(other, mine),
    "no JSON": lambda mine, other: mine.write_text("{"),
    "another JSON": lambda mine, other: mine.write_text("[]"),
    "empty": lambda mine, other: mine.write_text(""),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_record_fails(small: Small, what: str) -> None:
    mine, other = (small.records().path(proof) for proof in small.proofs())
    FORGED[what](mine, other)
    assert small.states() == ["forged", "current"]
    with pytest.raises(AssertionError, match=r"^page 1_sums: its record is forged: make records"):
        small.hold(write=False)
    assert small.hold() == ["1_sums"]  # and is repeated where it may be written


def test_an_old_digest_put_into_a_new_tree_fails(small: Small) -> None:
    """As after a merge that kept the other side's record."""
    path = small.records().path(small.proofs()[0])
    old = path.read_text()
    small.edit(*STALE["a constant"])
    small.hold()
    path.write_text(old)
    assert small.states() == ["stale", "current"]


def test_a_forged_outcome_with_its_seal_is_found_by_repeating(small: Small) -> None:
    """Who computes the seal, too, is caught where the proof is repeated: make test-all, and in CI
    for the few that the commit draws."""
    records, (proof, _) = small.records(), small.proofs()
    records.path(proof).unlink()
    records.hold(Proof("page", "1_sums", lambda: {"answer": 10}, proof.code))
    assert small.states() == ["current", "current"]
    with pytest.raises(
        AssertionError, match=r"found {'answer': 9}, the record says {'answer': 10}"
    ):
        small.hold(again=True, write=False)


def test_a_missing_record_and_one_without_its_subject(small: Small) -> None:
    records, proofs = small.records(), small.proofs()
    records.path(proofs[1]).unlink()
    with pytest.raises(AssertionError, match="page 2_more: its record is missing: make records"):
        small.hold(write=False)
    small.hold()
    assert records.orphans(proofs) == []
    (small.root / "pages/2_more.py").unlink()
    assert records.orphans(small.proofs()) == ["page/2_more.json"]


def test_what_fails_leaves_no_record(small: Small) -> None:
    def fails() -> None:
        raise ValueError("a case is accepted")

    records, proof = small.records(), Proof("page", "new", fails)
    with pytest.raises(ValueError, match="a case is accepted"):
        records.hold(proof)
    assert records.state(proof) == "missing"


def test_a_product_is_written_and_held(small: Small) -> None:
    """A proof may make a file that others read: an edit by hand is a forged record."""
    product = small.root / "product.txt"
    proof = Proof("table", "t", lambda: "10\n", (small.root / "house/sums.py",), product=product)
    small.records().hold(proof)
    assert product.read_text() == "10\n"
    assert small.records().state(proof) == "current"
    product.write_text("11\n")
    assert small.records().state(proof) == "forged"
    small.records().hold(proof)
    assert product.read_text() == "10\n"


def test_names_in_strings_count(small: Small) -> None:
    """``python -m house``, or a module by its name."""
    small.write("pages/3_run.py", "RUN = ['-m', 'house']\nX = ['from house.lazy import more']\n")
    files, _ = small.records().tree.reach([small.root / "pages/3_run.py"])
    names = {path.relative_to(small.root).as_posix() for path in files}
    assert {"house/__main__.py", "house/lazy.py"} < names
    assert "house/deep.py" not in names
    small.write("pages/4_say.py", "print('house', 'python -m house, in house/lazy.py')\n")
    files, _ = small.records().tree.reach([small.root / "pages/4_say.py"])
    assert files.keys() == {small.root / "pages/4_say.py"}


def test_a_commit_draws_one_of_each_kind_among_the_quick(small: Small) -> None:
    records, proofs = small.records(), small.proofs()
    drawn = {records.chosen(proofs, str(commit))[0].name for commit in range(20)}
    assert drawn == {"1_sums", "2_more"}
    path = records.path(proofs[0])
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 100}))
    assert {records.chosen(proofs, str(commit))[0].name for commit in range(20)} == {"2_more"}
    assert records.state(proofs[0]) == "current"
