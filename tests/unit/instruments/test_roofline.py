"""roofline.py: floors by hand, the stored file, and a figure that depends on that file alone."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from lm_from_scratch.instruments import roofline
from lm_from_scratch.instruments.roofline import GPU, GPUS, NOT_MEASURED, Cost, measurements, show

CHIP = GPU("a chip", bandwidth=100.0, matrix=1000.0, scalar=50.0)

STORED: dict[str, Any] = {
    "provenance": {
        "device": "a chip", "driver": "1", "torch": "2", "triton": "3", "python": "3.12",
        "commit": "0" * 40, "date": "2026-01-01",
    },
    "ceilings": {"copy": 80.0, "matmul": 800.0},
    "results": [
        {
            "kernel": "swiglu", "shape": "4 x 5", "dtype": "bfloat16", "bytes": 160,
            "operations": 100, "seconds": {"kernel": [2.5, 2.0, 3.0], "torch": [4.0]},
        }
    ],
    "decoding": [],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which no stored file is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roofline, "__file__", str(tmp_path / "repository/package/room/roofline.py"))
    return tmp_path


def store(folder: Path, **changes: Any) -> Path:
    path = folder / "measurements.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**STORED, **changes}))
    return path


def test_the_floor_is_the_larger_of_two_times() -> None:
    assert Cost(bytes=200, operations=50).floor(CHIP) == 2.0  # memory: 2 s, scalar units: 1 s
    assert Cost(bytes=200, operations=500).floor(CHIP) == 10.0
    assert Cost(bytes=200, operations=500).floor(CHIP, "matrix") == 2.0
    assert Cost(bytes=200, operations=50).intensity == 0.25
    with pytest.raises(ValueError, match="unit='tensor' is neither"):
        Cost(1, 1).floor(CHIP, "tensor")  # type: ignore[arg-type]


def test_the_rates_are_those_of_the_datasheets() -> None:
    """The datasheets of both Hopper boards print 1,979 TFLOP/s, "with sparsity"."""
    assert (GPUS["A100"].bandwidth, GPUS["A100"].matrix) == (2.039e12, 312e12)
    for name in ("H100", "H200"):
        assert GPUS[name].matrix == pytest.approx(1979e12 / 2, rel=1e-3)
        assert GPUS[name].scalar == 67e12
    assert GPUS["H200"].bandwidth / GPUS["H100"].bandwidth == pytest.approx(1.43, abs=0.01)


def test_what_is_not_stored_is_none(nowhere: Path) -> None:
    assert measurements() is None


@pytest.mark.parametrize("folder", ["tutorials/gpu", "."])
def test_the_file_is_found_from_the_repository_and_beside_a_notebook(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    store(nowhere / "tutorials" / "gpu")
    monkeypatch.chdir(nowhere / folder)
    found = measurements()
    assert found is not None and found.provenance["device"] == "a chip"


def test_the_file_is_found_in_the_package_s_repository(nowhere: Path) -> None:
    store(nowhere / "repository" / "tutorials" / "gpu")
    assert measurements() is not None


def test_what_is_stored(tmp_path: Path) -> None:
    stored = measurements(store(tmp_path))
    assert stored is not None
    (result,) = stored.of("swiglu")
    assert stored.of("softmax") == []
    assert result.cost == Cost(160, 100)
    assert result.median("kernel") == 2.5
    # 160 bytes at 80 per second take 2 s.
    assert result.shares(stored.gpu) == {"kernel": 0.8, "torch": 0.5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ceilings": {"copy": 1.0}}, "ceilings has the keys ['copy'], expected"),
        ({"provenance": {"device": "x"}}, "provenance has the keys ['device']"),
        ({"results": [{"kernel": "x"}]}, "results[0] has the keys ['kernel']"),
        ({"decoding": [{"model": "x"}]}, "decoding[0] has the keys ['model']"),
        ({"more": 1}, "has the keys ['ceilings', 'decoding', 'more'"),
        ({"results": [{**STORED["results"][0], "seconds": {"jax": [1.0]}}]}, "seconds of ['jax']"),
        ({"results": [{**STORED["results"][0], "seconds": {"torch": []}}]}, "seconds of ['torch']"),
    ],
)
def test_a_file_of_another_form_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as error:
        measurements(store(tmp_path, **changes))
    assert words in str(error.value)


def test_show_says_that_nothing_was_measured(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show("swiglu", Cost(6, 5))
    assert capsys.readouterr().out == NOT_MEASURED + "\n"
    (ax,) = plt.gcf().axes
    assert ax.get_title() == "swiglu under the roof of H100 SXM (datasheet)"
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    assert list(lines["swiglu, counted"].get_xdata()) == [5 / 6, 5 / 6]
    x, y = lines["roof, matrix units (bfloat16)"].get_data()
    assert y[0] / x[0] == pytest.approx(3.35e12)  # the slope is the bandwidth
    assert y[1] == y[2] == 989e12
    assert y[1] / x[1] == pytest.approx(3.35e12)
    assert x[0] < 5 / 6 < x[2]


def test_show_draws_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show("swiglu", Cost(160, 100), store(tmp_path))
    expected = "a chip, bfloat16 4 x 5, share of the roof:\n  kernel 80%, torch 50%\n"
    assert capsys.readouterr().out == expected
    left, right = plt.gcf().axes
    assert left.get_title() == "swiglu under the roof of a chip (measured)"
    lines = {str(line.get_label()): line for line in left.get_lines()}
    assert "other units, float32" not in lines
    assert (lines["kernel"].get_xdata()[0], lines["kernel"].get_ydata()[0]) == (
        100 / 160,
        100 / 2.5,
    )
    assert [bar.get_width() for bar in right.patches] == [0.5, 0.8]
    assert right.get_title()


def test_show_says_so_where_only_other_kernels_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show("softmax", Cost(160, 100), store(tmp_path))
    assert capsys.readouterr().out == NOT_MEASURED + "\n"
    assert plt.gcf().axes[0].get_title() == "softmax under the roof of a chip (measured)"


@pytest.mark.parametrize("cost", [Cost(0, 5), Cost(5, 0)])
def test_show_refuses_what_has_no_place(cost: Cost) -> None:
    with pytest.raises(ValueError, match="no place under a roof"):
        show("copy", cost)
