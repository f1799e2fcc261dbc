"""Every task of the project, on every system: ``python make.py docs``. ``make docs`` is the same.

    python make.py                      lists the tasks
    python make.py serve PORT=9000      values follow the task, or come from the environment

This file needs a Python 3 with nothing installed. The first task makes the environment that all
use, ``.venv``, from the pinned requirements. ``PYTHON=...`` says which Python it is made with;
``PY=...`` names an environment of your own, and nothing is installed.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
WINDOWS = os.name == "nt"
VENV = ROOT / ".venv"
#: The Pythons that an environment can be made with.
PYTHONS = ["python3.11", "python3.12", "python3.13", "python3.14", "python3", "python"]
OLDEST = (3, 11)
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
#: What a teacher carries to a room without a network; if it is there, nothing else is asked.
WHEELS = ROOT / "build" / "wheels"
PIP = ["-m", "pip", "--disable-pip-version-check"]
PINNED = ["--constraint", "constraints.txt"]
EXTRAS = ".[test,docs,lab]"

SITE = "docs/_build/html"
DOCTREES = "docs/_build/doctrees"
GENERATED = [
    *("docs/_build", "docs/auto_tutorials", "docs/api", "docs/generated"),
    *("docs/gpu", "docs/exercises", "docs/stories", "docs/book.rst"),
    *("docs/classroom/syllabi.md", "docs/classroom/weeks_6", "docs/classroom/weeks_12"),
]
BOOKS = "docs/_build/books"
#: What makes a PDF, and the packages of Debian and Ubuntu that have it, with the fonts.
TEX = ("xelatex", "latexmk", "rsvg-convert")
TEX_PACKAGES = (
    "apt install texlive-xetex texlive-latex-extra texlive-fonts-recommended "
    "texlive-lang-chinese latexmk librsvg2-bin fonts-freefont-otf fonts-dejavu-core fonts-noto-cjk"
)
PEERS = ROOT / "build" / "bench" / "peers"
#: With these every library treats the processor as one without AVX-512. torch.compile stores its
#: code apart: it takes what it made for AVX-512, which writes past the end of vectors half as long.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CT2_FORCE_CPU_ISA": "AVX2",
    "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "inductor-avx2"),
}


# -- the environment -------------------------------------------------------------------------------


def install() -> None:
    """create .venv and install the pinned requirements"""
    stamp, python = VENV / ".installed", venv_python()
    sources = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    works = answers(python, "import sys")
    made = stamp.stat().st_mtime if works and stamp.exists() else 0.0
    if all(path.stat().st_mtime <= made for path in sources):
        return
    if not works:  # a Python that was removed or upgraded leaves it broken: it is made again
        base = base_python()
        say(f"Creating .venv with {base}")
        shutil.rmtree(VENV, ignore_errors=True)
        if not succeeds(base, "-m", "venv", str(VENV)):
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit(
                f"{base} cannot create a virtual environment. Install its venv module "
                "(Debian and Ubuntu: python3-venv)."
            )
    if not answers(python, "import pip"):
        run(python, "-m", "ensurepip", "--default-pip")
    say("Installing the requirements: minutes on the first call, then seconds")
    carried = ["--no-index", "--find-links", str(WHEELS)] if WHEELS.is_dir() else []
    wanted = [*(carried or torch_builds(python)), *PINNED, "--editable", EXTRAS]
    if not succeeds(python, *PIP, "install", "--quiet", "--no-compile", *wanted):
        needs = "the network. Run the command again: it goes on."
        if carried:
            needs = f"wheels for this system in {WHEELS}, or that folder gone."
        sys.exit(
            f"The installation is not complete; the first lines above say why. It needs {needs}"
        )
    # pip would compile on one core. A file that is no Python, which packages have, is no mistake.
    process(python, "-m", "compileall", "-qq", "-j", "0", str(VENV))
    stamp.touch()


def wheels() -> None:
    """for a class without a network: all packages in build/wheels"""
    where = ["--dest", str(WHEELS), *torch_builds(python())]
    run(python(), *PIP, "download", *where, *PINNED, "setuptools", EXTRAS)
    say("Hand out the folder with build/wheels in it: `install` then needs no network")


def torch_builds(python: str) -> list[str]:
    """Where pip finds torch's CPU builds, for a Linux without a GPU: it would fetch GPU libraries,
    3 GB more. Nothing where pip was told its places, or where this one does not answer."""
    if not sys.platform.startswith("linux") or shutil.which("nvidia-smi"):
        return []
    settings = asked(python, "-m", "pip", "config", "list")  # of files and of the environment
    if re.search(r"\.(extra-index-url|index-url|no-index)=", settings):
        return []
    try:
        urllib.request.urlopen(f"{CPU_TORCH}/torch/", timeout=5).close()
    except (OSError, http.client.HTTPException):
        return []
    return ["--extra-index-url", CPU_TORCH]


def venv_python(folder: Path = VENV, windows: bool = WINDOWS) -> str:
    return str(folder / "Scripts" / "python.exe" if windows else folder / "bin" / "python")


def base_python() -> str:
    """The Python that makes the environment: the one asked for, this one, or another that is new
    enough."""
    seen = []
    wanted = os.environ.get("PYTHON")
    for name in [wanted] if wanted else [sys.executable, *PYTHONS]:
        if name is None or shutil.which(name) is None:
            if wanted:
                seen.append(f"There is no {name}.")
            continue
        version = asked(name, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        if not re.fullmatch(r"\d+\.\d+", version):
            seen.append(f"{name} does not start.")
        elif tuple(map(int, version.split("."))) < OLDEST:
            seen.append(f"{name} is {version}.")
        else:
            return name
    oldest = ".".join(map(str, OLDEST))
    sys.exit(
        " ".join([f"Python {oldest} or newer is needed.", *dict.fromkeys(seen)])
        + f" Install it, or name it: PYTHON=/path/to/python{oldest}"
    )


@lru_cache(maxsize=None)  # noqa: UP033 - older Pythons read this file, too
def python() -> str:
    """The Python of the tasks. It is looked for once."""
    if named := os.environ.get("PY"):
        return named
    install()
    return venv_python()


# -- running ---------------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, flush=True)


def process(*command: str, **more: str) -> int:
    """The exit code of a command. Ctrl-C is the command's affair: JupyterLab asks what is meant."""
    started = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **more})
    while True:
        try:
            return started.wait()
        except KeyboardInterrupt:
            continue


def succeeds(*command: str) -> bool:
    return process(*command) == 0


def run(*command: str, **more: str) -> None:
    """Run a command in the project's folder; where it fails, the task ends with its code."""
    if code := process(*command, **more):
        sys.exit(code if code > 0 else 128 - code)


def asked(*command: str) -> str:
    """What a command prints; nothing, where it does not start."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def answers(name: str, code: str) -> bool:
    return asked(name, "-c", f"{code}; print('yes')") == "yes"


def value(name: str, default: str = "") -> str:
    return os.environ.get(name) or default


def words(name: str) -> list[str]:
    """Options that are passed on."""
    return shlex.split(value(name))


def remove(*paths: str | Path) -> None:
    """Files and folders inside the project, and nothing else."""
    for path in paths:
        target = ROOT / path
        if ROOT not in target.parents or ".." in target.parts:
            raise ValueError(f"{target} is not inside {ROOT}")
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def sphinx(*options: str, **more: str) -> None:
    run(python(), "-m", "sphinx", *options, **more)


def built() -> None:
    """Stop where there is no site."""
    if not (ROOT / SITE / "index.html").is_file():
        sys.exit("There is no site yet. Run: python make.py docs")


def languages() -> list[str]:
    """The editions of the site: English, then its translations."""
    folders = (path for path in (ROOT / "docs" / "locale").iterdir() if path.is_dir())
    return ["en", *sorted(path.name for path in folders)]


# Each of two processes takes half of the tests, and who is done takes from the other. (nbval takes
# seconds to start: only the stored notebooks have it.)
PYTEST = ["-m", "pytest", "-p", "no:nbval", "-n", "2", "--dist", "worksteal"]
QUICK = ["-m", "not slow"]
NBVAL = ["-m", "pytest", "--nbval", "--nbval-current-env", "-n", "2", "--dist", "loadfile"]


# -- the tasks -------------------------------------------------------------------------------------


def docs() -> None:
    """build the site from nothing; every tutorial runs, a warning is an error"""
    python()
    remove(*GENERATED)
    jobs = value("GALLERY_JOBS", "0")
    say("The pages run, then the site is written")
    sphinx(
        *("-q", "-W", "--keep-going", "-j", jobs if jobs != "0" else "1", "-b", "html"),
        *("-d", DOCTREES, "docs", SITE),
    )
    say("Its other languages, and the lessons as EPUB")
    first, *others = languages()
    with ThreadPoolExecutor(2) as pool:  # the same results, other texts
        editions = [pool.submit(edition, language) for language in others]
        copies = {language: pool.submit(epub, language) for language in [first, *others]}
    for done in editions:
        done.result()
    for language, done in copies.items():
        shutil.copy(done.result(), ROOT / SITE / ("" if language == first else language))
    say(f"The site is in {SITE}. Open {SITE}/index.html, or run: python make.py serve")


def edition(language: str) -> None:
    """The site in another language."""
    sphinx(
        *("-q", "-W", "--keep-going", "-b", "html", "-d", f"{DOCTREES}-{language}"),
        *("docs", f"{SITE}/{language}"),
        SITE_LANGUAGE=language,
    )


def preview() -> None:
    """build the site again; only changed tutorials run (for authors)"""
    sphinx("-b", "html", "-d", DOCTREES, "docs", SITE)
    say(f"The site is in {SITE}. Results of unchanged tutorials were kept; publish from: docs")


def books() -> None:
    """the lessons as EPUB and PDF, with the results of the site"""
    built()
    remove(BOOKS)
    has_tex = all(map(shutil.which, TEX))
    for form in (epub, pdf) if has_tex else (epub,):
        for language in languages():
            made = form(language)
            shutil.copy(made, ROOT / BOOKS / f"{made.stem}-{language}{made.suffix}")
    names = sorted(path.name for path in (ROOT / BOOKS).glob("*.*"))
    say(f"The books are in {BOOKS}: {', '.join(names)}")
    if not has_tex:
        say(f"For the PDF, on Debian and Ubuntu: {TEX_PACKAGES}")


def book(builder: str, language: str) -> Path:
    """The folder with the lessons as an EPUB, or as what TeX reads."""
    sphinx(
        *("-q", "-W", "--keep-going", "-t", "book", "-b", builder),
        *("-d", f"{BOOKS}/doctrees-{language}", "docs", f"{BOOKS}/{builder}-{language}"),
        SITE_LANGUAGE=language,
        GALLERY_JOBS="0",
    )
    return ROOT / BOOKS / f"{builder}-{language}"


def epub(language: str) -> Path:
    return book("epub", language) / "lm_from_scratch.epub"


def pdf(language: str) -> Path:
    """It fails where a glyph or a place is missing, or a line is cut."""
    tex = book("latex", language) / "lm_from_scratch.tex"
    done = process(
        *("latexmk", "-r", str(tex.with_name("latexmkrc")), "-cd", "-xelatex"),
        *("-interaction=nonstopmode", "-quiet", str(tex)),
        max_print_line="10000",  # a message is one line of the log
    )
    log = tex.with_suffix(".log")
    if log.is_file():
        done = process(python(), "docs/_ext", "books.book", str(log)) or done
    if done:
        sys.exit(f"There is no PDF. It needs, on Debian and Ubuntu: {TEX_PACKAGES}")
    return tex.with_suffix(".pdf")


def catalogues() -> None:
    """for translators: the text of the built site in build/catalogues"""
    built()
    remove("build/catalogues")
    sphinx(
        *("-q", "-t", "catalogues", "-b", "gettext", "-d", "docs/_build/gettext"),
        *("docs", "build/catalogues"),
        SOURCE_DATE_EPOCH="0",
    )
    run(python(), "tests/helpers/catalogues.py", "build/catalogues")


def serve() -> None:
    """show the built site on this machine (PORT=8000)"""
    built()
    port = value("PORT", "8000")
    say(f"http://127.0.0.1:{port}/ (stop with Ctrl-C)")
    run(python(), "-m", "http.server", "--bind", "127.0.0.1", "--directory", SITE, port)


def lint() -> None:
    """ruff, mypy, and which room imports which"""
    run(python(), "-m", "ruff", "check", ".")
    run(python(), "-m", "ruff", "format", "--check", ".")
    run(python(), "-m", "mypy")
    run(str(Path(python()).with_name("lint-imports")), "--no-logo", "--no-cache")


def check() -> None:
    """lint, and the tests of the files that git says have changed"""
    lint()
    run(python(), "tests/changed.py")


def test() -> None:
    """lint, then every test that is not marked slow, and the stored notebooks of the lessons"""
    lint()
    tests(*QUICK)
    validate(r"\d+_.*")  # a number with a letter is a page in depth


def test_all() -> None:
    """lint, then every test, the slow ones too, and every stored notebook"""
    lint()
    tests()
    validate(".*")


def tests(*options: str) -> None:
    """Python keeps what it compiles, also where the environment asks for nothing: the other process
    and all that tests start read it, which halves the time until the first test."""
    run(python(), *PYTEST, *options, PYTHONDONTWRITEBYTECODE="")


def validate(names: str) -> None:
    """Run the stored notebooks of these names: each cell must give what is stored."""
    if not answers(python(), "import triton"):
        say("The stored notebooks are not run: there is no Triton")
        return
    say("The stored notebooks. If a new output is right: python docs/_ext gallery.gpu_notebooks")
    notebooks = sorted((ROOT / "tutorials" / "gpu").glob("*.ipynb"))
    run(python(), *NBVAL, *(str(path) for path in notebooks if re.fullmatch(names, path.stem)))


def check_site() -> None:
    """check the built site in a browser: links, mathematics, accessibility (EVERY_VIEW=1: more)"""
    built()
    tests(*([] if value("EVERY_VIEW") else QUICK), "tests/site")


def lab() -> None:
    """open tutorials and exercises as notebooks in JupyterLab (LAB_FLAGS=...: its options)"""
    run(python(), "docs/_ext", "gallery.downloads", "build/notebooks")
    run(python(), "-m", "jupyterlab", "--notebook-dir=build/notebooks", *words("LAB_FLAGS"))


def exercises() -> None:
    """for teachers: notebooks in build/exercises (WEEKS=12: nbgrader's weeks, in build/weeks_12)"""
    weeks = value("WEEKS")
    folder = f"build/weeks_{weeks}" if weeks else "build/exercises"
    run(python(), "docs/_ext", "course.hand_out", folder, *([weeks] if weeks else []))


def bench() -> None:
    """every benchmark beside its peers, for docs/benchmarks (BENCH=--quick to try; ISA=avx2)"""
    if not PEERS.exists():
        install_peers()
    as_avx2 = AVX2 if value("ISA") == "avx2" else {}
    run(python(), "tests/benchmarks/bench.py", *words("BENCH"), **as_avx2)


def install_peers() -> None:
    """Without what they require: galore-torch asks for a library of CUDA that no benchmark needs.
    One that this system has no wheel of is not measured. transformers imports torchao where it
    finds it."""
    pip = [*PIP, "install", "--quiet", "--no-deps"]
    for peer in (
        "galore-torch==1.0",
        "pytorch_optimizer==4.1.0",
        "bitsandbytes==0.50.2",
        "ctranslate2==4.8.5",
        "gguf==0.19.0",
        "xllamacpp==2026.10.11549",
        "torchao==0.18.0",
        "nano_gpt==0.1.0",
    ):
        target = PEERS / "apart" if peer.startswith("torchao") else PEERS
        process(python(), *pip, "--only-binary", ":all:", "--target", str(target), peer)


def gpu() -> None:
    """on a GPU: time, test and check every kernel, run the pages (GPU="--minutes 12": in parts)"""
    run(python(), "tests/benchmarks/run_gpu.py", *words("GPU"))


def clean() -> None:
    """remove everything that was built; keep .venv and your notebooks"""
    remove(*GENERATED, "dist", "build/ci", "build/lib", *(ROOT / "build").glob("bdist.*"))
    remove(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")
    remove(*(path for path in ROOT.rglob("__pycache__") if VENV not in path.parents))


TASKS = {
    task.__name__.replace("_", "-"): task
    for task in (
        *(install, wheels, docs, preview, books, catalogues, serve, lint, check, test, test_all),
        *(check_site, lab, exercises, bench, gpu, clean),
    )
}


def main(arguments: list[str]) -> None:
    values = [word for word in arguments if re.match(r"[A-Z_0-9]+=", word)]
    names = [word for word in arguments if word not in values]
    if not names or names == ["help"]:
        say("lm_from_scratch")
        for name, task in TASKS.items():
            say(f"  {name:11} {task.__doc__}")
        return
    for name in names:
        if name not in TASKS:
            sys.exit(f"There is no task {name!r}. The tasks: {', '.join(TASKS)}")
    os.environ["OMP_NUM_THREADS"] = "1"  # on shared cores the threads of torch cost more than they
    os.environ.setdefault("GALLERY_JOBS", "2")  # bring; two processes use both cores
    os.environ["MYPY_NUM_WORKERS"] = "2"
    if WINDOWS:
        os.environ.setdefault("PYTHONUTF8", "1")
    os.environ.update(word.split("=", 1) for word in values)
    for name in names:
        TASKS[name]()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
