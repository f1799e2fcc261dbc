"""The tests of what has changed since the last commit: `make check`.

A file of the package has the tests of its name in the folder of its room, or, where none has its
name, all of the room. A page is run as a script, a stored notebook by nbval, and its text is
checked. This is a first answer, without slow tests; `make test` has the last word.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNIT, KERNELS, PAGES = "tests/unit", "tests/kernels", "tests/pages"


def changed() -> list[str]:
    """Changed and new files; in a clean clone those of the last commit."""
    new = asked("ls-files", "--others", "--exclude-standard")
    found = [*asked("diff", "--name-only", "HEAD"), *new] or asked("diff", "--name-only", "HEAD~1")
    return [name for name in found if (ROOT / name).is_file()]


def asked(*words: str) -> list[str]:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines()


def existing(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def is_page(name: str) -> bool:
    """A script in a chapter, or the notebook of a page on a kernel."""
    return bool(re.fullmatch(r"tutorials/\w+/\w+\.(py|ipynb)", name))


def is_script(name: str) -> bool:
    return is_page(name) and name.endswith(".py")


def tests_of(name: str) -> list[str]:
    """The test files that a changed file asks for."""
    parts, stem = name.split("/"), Path(name).stem
    if stem.startswith("test_"):
        return [] if parts[1] == "site" else [name]
    if is_page(name):
        notebooks = "notebooks" if is_script(name) else "gpu_notebooks"
        return of_pages("anatomy", "course", "lookup", "teaching", notebooks)
    if parts[:2] == ["docs", "_ext"]:
        return of_pages("*")
    if parts[0] in ("docs", "tutorials"):
        return of_pages("anatomy", "course", "lookup", "teaching", "translations")
    if exercise_of(name):
        return [*existing("tests/exercises/test_*.py"), f"{UNIT}/exercises/test_exercises.py"]
    if parts[0] == "lm_from_scratch" and name.endswith(".py"):
        about = [f"{UNIT}/test_api.py", f"{UNIT}/test_architecture.py"]
        if len(parts) == 2:
            return [*about, *existing(f"{UNIT}/test_{stem}.py")]
        if parts[1] == "kernels":
            return [*about, *existing(f"{KERNELS}/test_kernels_{stem}.py")]
        own = existing(f"{UNIT}/{parts[1]}/test_{stem}*.py")
        own = own or existing(f"{UNIT}/{parts[1]}/test_*.py")
        parity = existing("tests/parity/test_parity.py") if parts[1] == "models" else []
        return [*about, *own, *parity]
    if parts[0] == "tests":  # a helper: whoever imports it
        used = re.compile(rf"^ *(from|import) {re.escape(stem)}\b", re.M)
        tests = existing("tests/[!s]*/**/test_*.py") if name.endswith(".py") else []
        return [test for test in tests if used.search((ROOT / test).read_text("utf-8"))]
    return [f"{UNIT}/test_contributing.py", f"{UNIT}/test_environment.py"]


def of_pages(*names: str) -> list[str]:
    return [test for name in names for test in existing(f"{PAGES}/test_{name}.py")]


def exercise_of(name: str) -> str:
    """The exercise that a file of the catalogue, or of the answers beside the tests, belongs to."""
    catalogue = re.match(r"lm_from_scratch/exercises/catalogue/(\w+)/", name)
    answers = re.match(r"tests/exercises/\w+/(\w+)\.py", name)
    return (catalogue or answers or ["", ""])[1]


def main() -> int:
    files = changed()
    pages = [name for name in files if is_script(name)]
    stored = [name for name in files if is_page(name) and not is_script(name)]
    tests = sorted({test for name in files for test in tests_of(name)})
    env = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    print(f"{len(files)} changed files, {len(pages)} pages to run, {len(tests)} test files")
    for page in pages:
        print(f"running {page}", flush=True)
        command = [sys.executable, "-W", "error", Path(page).name]
        folder = (ROOT / page).parent
        run = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)
        if run.returncode:
            return run.returncode
    if stored:
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", *stored]
        if failed := subprocess.run(command, cwd=ROOT).returncode:
            return failed
    if not tests:
        return 0
    # A second process costs ten seconds of imports: more than a few files take.
    processes = "2" if len(tests) > 4 else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:nbval", "-m", "not slow"]
    command += ["-n", processes, "--dist", "worksteal", *tests]
    if all(is_page(name) for name in files):  # the text of these pages, and of no other
        stems = " or ".join(Path(name).stem for name in files)
        command += ["-k", f"({stems} or course or lookup) and not template and not planted"]
    if all(map(exercise_of, files)):
        command += ["-k", " or ".join(map(exercise_of, files))]
    failed = subprocess.run(command, cwd=ROOT).returncode
    return 0 if failed == 5 else failed  # 5: all of them are slow


if __name__ == "__main__":
    sys.exit(main())
