"""A plugin of pytest for nbval: the kernel of each notebook is a fork of a process that has
imported what all of them import, PyTorch and matplotlib above all. A kernel of its own spends more
time on that than on its cells.

Nothing of the package is imported before a notebook does, and no Triton: a page decides first
whether it is interpreted. Only for systems that fork, as all that have Triton do.
"""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import local_provisioner

SHARED = [
    "ipykernel.ipkernel",
    "ipykernel.kernelapp",
    "ipykernel.zmqshell",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "torch",
]
ROOT = Path(__file__).resolve().parents[2]
#: Without the folders that pytest adds: a reader does not have them.
PATH = [place for place in sys.path if not Path(place).is_relative_to(ROOT / "tests")]
PATH = [place for place in PATH if not Path(place).is_relative_to(ROOT / "docs")]
# It is read when matplotlib is imported. A kernel of its own sets it before.
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(SHARED)


def serve(arguments: list[str], folder: str, ready: Connection) -> None:
    """Be a kernel, as ``python -m ipykernel_launcher`` is."""
    from ipykernel import kernelapp

    os.setsid()
    ready.send(True)
    os.chdir(folder)
    os.environ["JPY_PARENT_PID"] = str(os.getppid())  # it ends with that process
    sys.path[:] = PATH
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    kernelapp.launch_new_instance(arguments)


class Kernel:
    """A fork that is handled as what ``Popen`` returns."""

    stdin = stdout = stderr = None

    def __init__(self, arguments: list[str], folder: str) -> None:
        answer, ready = forks.Pipe(duplex=False)
        self.process = forks.Process(target=serve, args=(arguments, folder, ready), daemon=True)
        self.process.start()
        answer.recv()  # from now on it has a group of its own: signals are sent to the group
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.terminate()


def launch(command: list[str], *, cwd: str, **_: Any) -> Kernel:
    return Kernel(command[command.index("ipykernel_launcher") + 1 :], cwd)


local_provisioner.launch_kernel = launch
