"""Shared by all tests: one thread, no network, kernels interpreted where there is no GPU."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch

# Before anything imports Triton: without a GPU the kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# What reads notebooks would make grammars of web addresses first: three seconds of each process.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
# A shell makes what it starts in the background deaf to Ctrl-C, nohup to a closed terminal, and the
# children of that too. A handler that does nothing keeps us deaf, and is not inherited.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# A check keeps what was solved: keep it out of the home of whoever runs the tests.
PROGRESS = tempfile.TemporaryDirectory()  # removed when the process ends
os.environ["LM_FROM_SCRATCH_PROGRESS"] = os.path.join(PROGRESS.name, "progress.json")
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
for name, examples in (("quick", 10), ("all", 25)):
    settings.register_profile(
        name, deadline=None, derandomize=True, max_examples=examples, suppress_health_check=QUIET
    )


def pytest_configure(config: pytest.Config) -> None:
    """A property is tried on more examples where the slow tests run, too."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "all")


def pytest_collection() -> None:
    """Nothing that is imported becomes garbage: looking for it took a tenth of this time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """All tests and libraries stay to the end. The garbage collector need not visit them again:
    that took 0.7 s each time, every tenth test, a seventh of the suite."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def seeded() -> Iterator[Callable[[int], None]]:
    """Seeds torch, and puts its random state back afterwards."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield torch.manual_seed
    torch.set_rng_state(state)
