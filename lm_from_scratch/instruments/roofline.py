r"""The least time that a computation can take: bytes over bandwidth, or operations over rate.

A kernel moves bytes and computes with them. Neither can go faster than the chip allows, and a GPU
does both at the same time, so the larger of the two times is the *floor*:

.. math::

   t \ge \max\bigl(\text{bytes} / \text{bandwidth}, \; \text{operations} / \text{rate}\bigr)

Drawn over the *intensity*, operations per byte, the rate that a kernel can reach is a roof: a slope
where memory decides, then a ceiling where computing does. What a kernel reaches of it is measured
on a GPU, by ``make gpu``, and stored with the pages; :func:`show` draws what is stored.

The rates of :data:`GPUS` are the vendor's, from the *NVIDIA A100 Tensor Core GPU Datasheet*, the
*NVIDIA H100 Tensor Core GPU Datasheet* and the *NVIDIA H200 Tensor Core GPU Datasheet*, for the
SXM boards. The last two print the rates of matrix units for sparse matrices, twice those of dense
ones, which are given here. A program reaches about nine tenths of the bandwidth and eight tenths of
the matrix rate.

Source: Williams, Waterman and Patterson, *Roofline: An Insightful Visual Performance Model for
Multicore Architectures*, Communications of the ACM 52 (4), 2009.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What computes: the units that multiply matrices (bfloat16), or those for one number (float32).
Unit = Literal["matrix", "scalar"]

FILE = Path("tutorials") / "gpu" / "measurements.json"
NOT_MEASURED = "Not measured on a GPU yet. To measure it: make gpu"

#: The keys of the stored file, and of each of its results.
KEYS = {"provenance", "ceilings", "results", "decoding"}
PROVENANCE = {"device", "driver", "torch", "triton", "python", "commit", "date"}
CEILINGS = {"copy", "matmul"}
RESULT = {"kernel", "shape", "dtype", "bytes", "operations", "seconds"}
DECODING = {"model", "batch", "implementation", "tokens_per_second"}

#: Who computes, in the stored file, and the marker in a figure. The first one is this package.
MARKERS = {"kernel": "o", "torch": "s", "compiled": "^", "Liger-Kernel": "D"}


@dataclass(frozen=True)
class GPU:
    """What a GPU can do at most."""

    name: str
    bandwidth: float  #: bytes per second, between memory and chip
    matrix: float  #: operations per second of the matrix units, in bfloat16, dense
    scalar: float  #: operations per second of all other units, in float32


#: The GPUs that pages count for, by a short name.
GPUS = {
    "A100": GPU("A100 SXM 80 GB", bandwidth=2.039e12, matrix=312e12, scalar=19.5e12),
    "H100": GPU("H100 SXM", bandwidth=3.35e12, matrix=989e12, scalar=67e12),
    "H200": GPU("H200 SXM", bandwidth=4.8e12, matrix=989e12, scalar=67e12),
}


@dataclass(frozen=True)
class Cost:
    """What a computation needs: bytes that go to or from memory, and operations.

    A multiplication is one operation, and so is an addition.
    """

    bytes: int
    operations: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def floor(self, gpu: GPU, unit: Unit = "scalar") -> float:
        """The least seconds on ``gpu``, where ``unit`` does the computing."""
        if unit not in ("matrix", "scalar"):
            raise ValueError(f"unit={unit!r} is neither 'matrix' nor 'scalar'")
        rate = gpu.matrix if unit == "matrix" else gpu.scalar
        return max(self.bytes / gpu.bandwidth, self.operations / rate)


@dataclass(frozen=True)
class Result:
    """The measured seconds of a kernel, and of others that compute the same, at one shape."""

    kernel: str
    shape: str
    dtype: str
    cost: Cost
    seconds: dict[str, list[float]]  #: of each repetition, by implementation: see :data:`MARKERS`

    def median(self, implementation: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[implementation])

    def shares(self, gpu: GPU) -> dict[str, float]:
        """The floor on ``gpu`` over the median of each implementation: 1 is on the roof."""
        floor = self.cost.floor(gpu)
        return {name: floor / self.median(name) for name in MARKERS if name in self.seconds}


@dataclass(frozen=True)
class Measurements:
    """What one GPU measured."""

    provenance: dict[str, str]  #: device, driver, torch, triton, python, commit, date
    ceilings: dict[str, float]  #: of a ``copy`` in bytes/s, of a bfloat16 ``matmul`` in FLOP/s
    results: list[Result]
    decoding: list[dict[str, Any]]  #: tokens per second of whole models

    @property
    def gpu(self) -> GPU:
        """The measured roof. Float32 has none of its own, so the matrix units stand for it."""
        copy, matmul = self.ceilings["copy"], self.ceilings["matmul"]
        return GPU(self.provenance["device"], bandwidth=copy, matrix=matmul, scalar=matmul)

    def of(self, kernel: str) -> list[Result]:
        """The results of one kernel."""
        return [result for result in self.results if result.kernel == kernel]


def find_file() -> Path | None:
    """The stored measurements: beside a notebook, below the current folder, in the repository."""
    here, repository = Path.cwd(), Path(__file__).resolve().parents[2]
    candidates = [here / FILE.name if here.name == FILE.parent.name else here / FILE]
    candidates.append(repository / FILE)
    return next((path for path in candidates if path.is_file()), None)


def measurements(path: Path | str | None = None) -> Measurements | None:
    """What a GPU measured, or None where none has: the file at ``path``, or the stored one."""
    file = find_file() if path is None else Path(path)
    if file is None:
        return None
    stored = json.loads(file.read_text(encoding="utf-8"))
    check_keys(f"{file}", stored, KEYS)
    check_keys(f"{file}: provenance", stored["provenance"], PROVENANCE)
    check_keys(f"{file}: ceilings", stored["ceilings"], CEILINGS)
    for name, keys in (("results", RESULT), ("decoding", DECODING)):
        for i, entry in enumerate(stored[name]):
            check_keys(f"{file}: {name}[{i}]", entry, keys)
    results = []
    for entry in stored["results"]:
        cost = Cost(entry["bytes"], entry["operations"])
        texts = entry["kernel"], entry["shape"], entry["dtype"]
        results.append(Result(*texts, cost, entry["seconds"]))
        unknown = set(entry["seconds"]) - set(MARKERS)
        if unknown or not all(entry["seconds"].values()):
            raise ValueError(f"{file}: {entry['kernel']} has seconds of {list(entry['seconds'])}")
    return Measurements(stored["provenance"], stored["ceilings"], results, stored["decoding"])


def check_keys(where: str, entry: dict[str, Any], keys: set[str]) -> None:
    """Raises ``ValueError`` for other keys."""
    if set(entry) != keys:
        raise ValueError(f"{where} has the keys {sorted(entry)}, expected {sorted(keys)}")


def show(kernel: str, cost: Cost, path: Path | str | None = None) -> None:
    """Draw the roof, the intensity of ``cost`` under it, and what a GPU measured of ``kernel``.

    As long as nothing is stored the roof is the H100's of the datasheet. A sentence is printed
    where ``kernel`` was not measured, else its share of the roof. Either depends on the stored file
    alone, not on the machine. Raises ``ValueError`` for a cost without bytes or operations.
    """
    import matplotlib.pyplot as plt

    from lm_from_scratch.instruments.plot import COLOURS, figure

    if not (cost.bytes > 0 and cost.operations > 0):
        raise ValueError(f"{cost} has no place under a roof: it needs bytes and operations")
    stored = measurements(path)
    results = [] if stored is None else stored.of(kernel)
    gpu = GPUS["H100"] if stored is None else stored.gpu
    source = "datasheet" if stored is None else "measured"
    _, (ax, *more) = figure(9.6 if results else 6.4, 3.9, columns=2 if results else 1)
    draw_roof(ax, gpu, [cost, *(result.cost for result in results)])
    ax.axvline(cost.intensity, color=COLOURS[3], linestyle=":", label=f"{kernel}, counted")
    for (name, marker), colour in zip(MARKERS.items(), COLOURS[1:]):
        mine = [result for result in results if name in result.seconds]
        if mine:
            x = [result.cost.intensity for result in mine]
            y = [result.cost.operations / result.median(name) for result in mine]
            ax.plot(x, y, marker, color=colour, markersize=8, markerfacecolor="none", label=name)
    ax.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    ax.set_title(f"{kernel} under the roof of {gpu.name} ({source})", fontsize=10)
    ax.legend(frameon=False, loc="lower right", fontsize=9)
    for ax in more:
        draw_shares(ax, gpu, results)
    plt.show()
    if not results:
        print(NOT_MEASURED)
    for result in results:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in result.shares(gpu).items())
        print(f"{gpu.name}, {result.dtype} {result.shape}, share of the roof:\n  {shares}")


def draw_roof(ax: "Axes", gpu: GPU, costs: list[Cost]) -> None:
    """The slope of the memory and the ceilings of both units, wide enough for ``costs``."""
    from lm_from_scratch.instruments.plot import COLOURS

    low = min(0.1, *(cost.intensity / 4 for cost in costs))
    high = max(4 * gpu.matrix / gpu.bandwidth, *(4 * cost.intensity for cost in costs))
    ceilings = {
        "roof, matrix units (bfloat16)": gpu.matrix,
        "roof, other units (float32)": gpu.scalar,
    }
    if gpu.matrix == gpu.scalar:  # measured: one ceiling
        del ceilings["roof, other units (float32)"]
    for (name, rate), style in zip(ceilings.items(), ("-", "--")):
        x = [low, rate / gpu.bandwidth, high]
        ax.plot(x, [gpu.bandwidth * low, rate, rate], style, color=COLOURS[0], label=name)


def draw_shares(ax: "Axes", gpu: GPU, results: list[Result]) -> None:
    """A bar for what each implementation reaches of the roof."""
    from lm_from_scratch.instruments.plot import COLOURS

    colours = dict(zip(MARKERS, COLOURS[1:]))
    bars = [
        (f"{name}\n{result.dtype} {result.shape}", share, colours[name])
        for result in results
        for name, share in result.shares(gpu).items()
    ]
    labels, shares, colour = zip(*reversed(bars))
    drawn = ax.barh(range(len(bars)), shares, color=colour, height=0.6)
    ax.bar_label(drawn, [f"{share:.0%}" for share in shares], padding=3, fontsize=9)
    ax.set_yticks(range(len(bars)), labels, fontsize=8)
    ax.axvline(1.0, color=COLOURS[0])
    ax.set(xlim=(0, 1.15 * max(1.0, *shares)), xlabel="floor / measured seconds")
    ax.set_title("share of the roof", fontsize=10)
