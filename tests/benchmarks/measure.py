"""What all benchmarks share: turns, limits, memory of a process, and the file of results.

Ours and the peers take turns (A B A B), so that a slow moment of the machine meets all. A ratio
compares neighbours, and is above 1 where ours is better; a row holds the median of all rounds, the
smallest and the largest. The limit of the machine is measured in the same rounds.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import json
import mmap
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
#: The results of each processor, in a file of its own.
STORED = ROOT / "docs" / "benchmarks"
#: Where ``make bench`` installs peers, and one that transformers must not find.
PEERS = ROOT / "build" / "bench" / "peers"
APART = PEERS / "apart"
Run = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """How much is measured. Smoke is for the tests: every line runs once, and no number counts."""

    name: str
    rounds: int

    @property
    def smoke(self) -> bool:
        return self.name == "smoke"

    @property
    def quick(self) -> bool:
        return self.name != "full"

    def rows(self, full: int) -> int:
        """Rounds of something that takes long."""
        return min(full, self.rounds)


#: What a row may be compared with that is nobody's implementation.
BUDGET, AIM = "the budget", "the aim"
FULL, QUICK, SMOKE = Size("full", 3), Size("quick", 2), Size("smoke", 1)


@dataclass(kw_only=True)
class Row:
    """One comparison.

    ``ratio`` and ``share`` are a median, the smallest and the largest of all rounds. ``at_limit``
    is what ``ours`` would be at the physical limit; ``limit`` says what bounds it. A row without
    ``rounds`` was not measured, and its ``note`` says why. ``headline`` says what a row counts for
    in the first sentence of the page, if it does.
    """

    setting: str
    kind: str
    peer: str
    unit: str
    ours: float
    theirs: float
    ratio: list[float]
    rounds: int
    limit: str | None = None
    at_limit: float | None = None
    share: list[float] | None = None
    target: float | None = None
    target_share: float | None = None
    note: str = ""
    headline: str = ""

    @property
    def beside(self) -> str:
        """``ahead`` of the peer or ``behind`` it in every round, or ``undecided``; without a peer
        nothing. What is equal to two digits is not behind."""
        if self.peer in (BUDGET, AIM) or not self.rounds:
            return ""
        return {1: "ahead", -1: "behind", 0: "undecided"}[side(self.ratio, 0.995)]

    @property
    def above_limit(self) -> bool:
        """The share of the limit, as it is shown, is more than 100 %."""
        return self.share is not None and round(self.share[0], 2) > 1


def side(found: Sequence[float], aim: float) -> int:
    """1 if every round reaches the aim, -1 if none does, 0 if the range crosses it."""
    _, low, high = found
    return 1 if low >= aim else -1 if high < aim else 0


def significant(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def spread(values: Sequence[float]) -> list[float]:
    """Median, smallest and largest."""
    return [significant(f(values)) for f in (statistics.median, min, max)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How often each of ours fits into its neighbour of theirs: less is better for both."""
    return spread([b / a for a, b in zip(ours, theirs, strict=True)])


def compare(
    setting: str, kind: str, peer: str, unit: str, ours: Sequence[float], theirs: Sequence[float],
    **more: Any,
) -> Row:  # fmt: skip
    """A row of what is better if it is less: seconds, megabytes."""
    return Row(
        setting=setting, kind=kind, peer=peer, unit=unit, rounds=len(ours),
        ours=significant(statistics.median(ours)), theirs=significant(statistics.median(theirs)),
        ratio=ratios(ours, theirs), **more,
    )  # fmt: skip


def absent(
    setting: str, kind: str, peer: str, unit: str, note: str = "not on this processor"
) -> Row:
    """The row of what this processor cannot do, or only many times slower than others; or of a peer
    that is not installed."""
    return Row(
        setting=setting, kind=kind, peer=peer, unit=unit, ours=0.0, theirs=0.0,
        ratio=[0.0, 0.0, 0.0], rounds=0, note=note,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- time


def seconds_of(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclass
class Times:
    """Seconds of each run, and what the machine could do, round by round."""

    seconds: dict[str, list[float]]
    limits: dict[str, list[float]]

    def row(
        self, setting: str, kind: str, peer: str, *, tokens: int | None = None,
        limit: str | None = None, work: float = 0.0, **more: Any,
    ) -> Row:  # fmt: skip
        """``kind`` beside ``peer``, in tokens a second or in milliseconds.

        ``work`` is what a run cannot do without, in the unit of ``limit``: bytes or operations.
        """
        ours, theirs = self.seconds[kind], self.seconds[peer]
        row = compare(setting, kind, peer, "ms", ours, theirs, **more)
        unit = (lambda s: 1e3 * s) if tokens is None else (lambda s: tokens / s)
        row.unit = "ms" if tokens is None else "tokens/s"
        row.ours, row.theirs = (
            significant(unit(statistics.median(times))) for times in (ours, theirs)
        )
        if limit is not None:
            bounds = [work / rate for rate in self.limits[limit]]
            row.limit, row.at_limit = limit, significant(unit(statistics.median(bounds)))
            row.share = spread([bound / s for bound, s in zip(bounds, ours, strict=True)])
        return row


def in_turns(
    runs: dict[str, Run], rounds: int, limits: dict[str, Callable[[], float]] | None = None,
    warm_up: bool = True, title: str = "",
) -> Times:  # fmt: skip
    """Every run and every limit once in each round; one round before them warms up."""
    limits = limits or {}
    times = Times({kind: [] for kind in runs}, {name: [] for name in limits})
    with tqdm(total=(rounds + warm_up) * len(runs), desc=title, leave=False, position=1) as bar:
        for number in range(-warm_up, rounds):
            for name, limit in limits.items() if number >= 0 else ():
                times.limits[name].append(limit())
            for kind, run in runs.items():
                took = seconds_of(run)
                if number >= 0:
                    times.seconds[kind].append(took)
                bar.update()
    return times


def compiled(function: Callable[..., Any], size: Size) -> Callable[..., Any]:
    """``torch.compile``; for the tests, without its compiler."""
    torch._dynamo.reset()
    return torch.compile(function, backend="eager" if size.smoke else "inductor")


# ------------------------------------------------------------------------------------- limits


def on_huge_pages(count: int) -> torch.Tensor:
    """So many ones in float32, on pages of 2 MiB where the system gives them for the asking: they
    save the processor most of its look-ups of addresses."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.ones(count)
    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


def huge_megabytes() -> float:
    """What this process holds on huge pages. (Linux)"""
    rollup = Path("/proc/self/smaps_rollup")
    held = rollup.read_text().split("AnonHugePages:") if rollup.is_file() else []
    return int(held[1].split()[0]) / 1024 if len(held) > 1 else 0.0


def bandwidth(size: Size = FULL) -> Callable[[], float]:
    """Bytes a second that one pass over 1 GiB reads, by the faster of a matrix-vector product and a
    sum, on huge pages where the system has them."""
    n = 2**8 if size.smoke else 2**14
    matrix, vector = on_huge_pages(n * n).view(n, n), torch.ones(n)
    ways: list[Run] = [lambda: matrix @ vector, lambda: matrix.sum()]
    return lambda: matrix.nbytes / min(seconds_of(way) for way in ways for _ in range(3))


def copying(nbytes: int) -> Callable[[], float]:
    """Bytes a second that a copy of a tensor of this size reads and writes: as large as what it
    bounds, because a small one stays in the processor's cache."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: 2 * nbytes / min(seconds_of(lambda: target.copy_(source)) for _ in range(5))


def multiplying(dtype: torch.dtype, size: Size = FULL) -> Callable[[], float]:
    """Operations a second of a large matrix product, by the faster of torch's two libraries."""
    from lm_from_scratch.instruments.onednn import multiplies, product

    n = 64 if size.smoke else 2048
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    ways: list[Run] = [lambda: a @ b]
    if multiplies(dtype):
        ways.append(lambda: product(a, b))
    return lambda: 2 * n**3 / min(seconds_of(way) for way in ways for _ in range(2))


# ------------------------------------------------------------------------------------- memory


def has_peak() -> bool:
    return Path("/proc/self/status").is_file()


def peak_megabytes() -> float:
    """The most memory that this process has held. (Linux; ``ru_maxrss`` would start at the
    parent's.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def growth(step: Run) -> float:
    """MB that this process has to grow by for two steps."""
    before = peak_megabytes()
    for _ in range(2):
        step()
    return max(peak_megabytes() - before, 0.1)


def _call(connection: Any, module: str, function: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    connection.send(getattr(importlib.import_module(module), function)(*arguments))


def in_a_process(module: str, function: str, *arguments: Any) -> Any:
    """What a function returns in a process of its own, because none gives its peak back."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers"])  # imported once, for all of them
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, module, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"{module}.{function}{arguments} failed: see above") from None
    finally:
        process.join()


# --------------------------------------------------------------------------- the file of results


def processor() -> str:
    """Its name, with the numbers that tell apart generations of one name. (Linux)"""
    info = Path("/proc/cpuinfo")
    facts: dict[str, str] = {}
    if info.is_file():
        first = info.read_text().split("\n\n")[0]
        facts = dict(re.findall(r"^(.+?)\s*: (.+)$", first, re.MULTILINE))
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key} {facts[at]}" for key, at in GENERATION if at in facts]
    return f"{name} ({', '.join(numbers)})" if numbers else name


#: How the numbers of a processor's generation are called, by us and by Linux.
GENERATION = (("family", "cpu family"), ("model", "model"))


def version_of(package: str) -> str | None:
    places = [*sys.path, str(APART)]
    found = importlib.metadata.distributions(name=package, path=places)
    return next((distribution.version for distribution in found), None)


def huge_pages() -> str | None:
    """When this system lays memory on huge pages: ``always``, ``madvise`` (when asked), ``never``;
    ``None`` if it does not say."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().split("[")[1].split("]")[0] if setting.is_file() else None


#: Packages whose versions decide: ours, what it stands on, and the peers.
PACKAGES = ("torch", "transformers", "lm_from_scratch", "galore-torch", "pytorch_optimizer",
            "bitsandbytes", "ctranslate2", "xllamacpp", "torchao", "nano_gpt")  # fmt: skip
#: With these a processor is treated as an older one, library by library.
CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "CT2_FORCE_CPU_ISA")


def new_report(size: Size) -> dict[str, Any]:
    """A report without results: the machine, what is installed, and the day."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    has = torch.cpu.get_capabilities()
    before, probe = huge_megabytes(), on_huge_pages(2**23)
    return {
        "machine": {
            "processor": processor(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "instructions": sorted(name for name, value in has.items() if value is True),
            "capped": {name: os.environ[name] for name in CAPS if name in os.environ},
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "memory_gb": round(memory / 1e9),
            "huge_pages": huge_pages(),
            "system": platform.system(),
        },
        "limit_on_huge_pages": huge_megabytes() - before > probe.nbytes / 2**21,
        "versions": {"python": platform.python_version()}
        | {package: version_of(package) for package in PACKAGES},
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "size": size.name,
        "benchmarks": {},
    }


def name_of(report: dict[str, Any]) -> str:
    """A processor in words. Its maker and model do not tell what it can do, its capability does."""
    return f"{report['machine']['processor']}, {report['machine']['capability']}"


def stored(report: dict[str, Any]) -> Path:
    """Where the results of this processor are kept."""
    return STORED / f"{re.sub('[^a-z0-9]+', '-', name_of(report).lower())}.json"


def same_setup(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether results of both may stand in one file. The number of cores that are there does not
    matter, but ``threads``, the number that is used."""
    same = [{**report, "machine": {**report["machine"], "cores": 0}} for report in (one, other)]
    keys = ("machine", "versions", "threads", "size")
    return all(same[0][key] == same[1][key] for key in keys)


def add(report: dict[str, Any], name: str, rows: Sequence[Row], seconds: float) -> None:
    report["benchmarks"][name] = {
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }


def write(report: dict[str, Any], path: Path) -> None:
    """A stopped program leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def rows_of(report: dict[str, Any], name: str) -> Iterator[Row]:
    for row in report["benchmarks"][name]["rows"]:
        yield Row(**row)


def all_stored() -> list[dict[str, Any]]:
    """The reports of all processors."""
    return [read(path) for path in sorted(STORED.glob("*.json"))]
