"""A function run in several processes, with the environment that torchrun gives them."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing


def in_processes(size: int, function: Callable[..., None], *args: object) -> None:
    """Run ``function(*args)`` in processes with the environment that torchrun gives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
    torch.multiprocessing.start_processes(
        one_process, (store.port, size, function, args), nprocs=size, start_method="spawn"
    )


def one_process(
    rank: int, port: int, size: int, function: Callable[..., None], args: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ.update(torchrun_environment(rank, size, port))
    function(*args)


def torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
