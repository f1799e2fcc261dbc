r"""Training in several processes: data parallelism by DDP and FSDP2.

Every process takes its rows of the same batch, computes their gradient, and the gradients are
averaged over the processes. All of them then take the same step. What differs is what a process
keeps:

* ``ddp`` (distributed data parallel): the whole model and its optimizer state. One exchange a step,
  of the gradients, which overlaps the backward pass.
* ``fsdp`` (fully sharded data parallel): 1/N of every weight, gradient and moment. The weights of a
  block are gathered just before it runs and dropped after it, forward and backward. (Between the
  batches of one step, with gradient accumulation, it holds its own gradients whole.)

Both are torch's. This file says what they wrap, and shares out what a training loop shares:
:mod:`lm_from_scratch.training.train` asks a :class:`Processes` for its rows and for sums. Every
process writes its share of a checkpoint, and any number of them reads it.

Sources: Li et al., *PyTorch Distributed*, 2020, arXiv:2006.15704 (DDP); Rajbhandari et al., *ZeRO*,
2020, arXiv:1910.02054; Zhao et al., *PyTorch FSDP*, 2023, arXiv:2304.11277.
"""

import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm_from_scratch.checkpoint.folders import temporary_folder, temporary_path
from lm_from_scratch.checkpoint.published import NOTHING, Published
from lm_from_scratch.checkpoint.state import (
    checkpoint_folder,
    finish_checkpoint,
    is_trained_whole,
    optimizer_tensors,
    save_training_state,
)
from lm_from_scratch.checkpoint.weights import trained, write_config
from lm_from_scratch.models.heads import Classifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.runs.sharded import gathered, sharded
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.processes import SingleProcess
from lm_from_scratch.weights.quantize import quantized_weights

PARALLEL = ("ddp", "fsdp")
CPU = torch.device("cpu")


class ProcessLost(RuntimeError):
    """Another process of the run has ended, so that this one cannot go on."""


@dataclass
class Processes(SingleProcess):
    """The processes of a run, as one of them sees it: it is number ``rank`` of ``size``."""

    parallel: str | None = None  # "ddp", "fsdp", or None for one process on its own
    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    store: Any = None  # a small dictionary that all processes share
    joined: bool = True  # until one of them fails, or all are done

    def check(self, batch_size: int, update_in_backward: bool) -> None:
        """Raises ``ValueError`` if the processes cannot share such a run."""
        if batch_size % self.size != 0:
            raise ValueError(
                f"batch_size={batch_size} cannot be shared evenly by {self.size} processes"
            )
        if update_in_backward and self.parallel is not None:
            raise ValueError(
                f"update_in_backward is for one process, not for {self.parallel}: a gradient is "
                "complete only when those of all processes have met"
            )

    def wrap(self, module: nn.Module, blocks: nn.ModuleList) -> nn.Module:
        """``module``, whose forward returns a loss, so that its gradients meet in backward.

        With FSDP each of the ``blocks`` is gathered for itself, and the rest once. Its parameters
        become the shares of this process, on its device; no process holds a whole model there.

        Quantised weights are the same in every process from the start: DDP sends none of them, and
        FSDP cannot cut them. Raises ``ValueError`` for these.
        """
        quantized = list(quantized_weights(module))
        if self.parallel == "ddp":
            module = module.to(self.device)
            ddp: Any = nn.parallel.DistributedDataParallel
            ddp._set_params_and_buffers_to_ignore_for_model(module, quantized)  # all have the same
            return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        if self.parallel == "fsdp":
            if quantized:
                raise ValueError(
                    f"parallel='fsdp' cannot cut quantised weights, like {quantized[0]}, into "
                    "shares: 'ddp' can train beside them"
                )
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.size,))
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(module, mesh=mesh)
        return module

    def share(self, batch: Any) -> Any:
        """The rows of a batch that this process takes: ``rank``, ``rank + size``, ...

        If there are fewer rows than processes, the others take the first row without its targets:
        all must run the model equally often.
        """
        if self.size == 1:
            return batch
        idle = self.rank >= len(batch.idx)
        rows = slice(0, 1) if idle else slice(self.rank, None, self.size)
        part: dict[str, Any] = {k: t if t is None else t[rows] for k, t in vars(batch).items()}
        if idle:
            part["targets"] = torch.full_like(part["targets"], IGNORE)
        return type(batch)(**part)

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """For one of several backward passes: only in the last one of a step do gradients meet."""
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return nullcontext() if last else module.no_sync()
        if self.parallel == "fsdp":
            module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def evaluated(self, module: nn.Module) -> None:
        """After forward passes without a backward pass, which would do this: drop what FSDP has
        gathered of the weights outside the blocks."""
        if self.parallel == "fsdp":
            module.reshard()  # type: ignore[operator]

    def optimizer(self, kind: type[Any]) -> type[Any]:
        """The class that takes the steps of ``kind`` on the parameters that :meth:`wrap` leaves."""
        return sharded(kind) if self.parallel == "fsdp" else kind

    def number(self, x: Tensor) -> float:
        """The one number in ``x`` (any shape), which was computed from weights or gradients."""
        return gathered(x).item()

    def total(self, *numbers: float) -> list[float]:
        """Each number summed over the processes."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def meet(self) -> None:
        """Wait here for all others."""
        self.total(0.0)

    def save_training_state(
        self,
        folder: str | Path,
        model: CausalLM | Classifier,
        optimizer: AdamW,
        recipe: Mapping[str, Any],
        step: int,
        published: Published = NOTHING,
    ) -> None:
        """:func:`~lm_from_scratch.checkpoint.state.save_training_state`, called by all processes:
        each writes its share, into a folder that all of them see. Nothing is written when one of
        them has failed."""
        if self.parallel is None:
            return save_training_state(folder, model, optimizer, recipe, step, published)
        if not self.joined:
            return
        target = checkpoint_folder(folder, step)
        new = temporary_folder(target) if self.rank == 0 else nullcontext(temporary_path(target))
        with new as temporary:
            self.meet()
            write_shares(trained(model), temporary, join=True)
            write_shares(optimizer_tensors(model, optimizer), temporary)
            if self.rank == 0:
                if is_trained_whole(model):
                    write_config(model, temporary, published)
                finish_checkpoint(temporary, target, recipe, step)
        self.meet()

    def first_to_say(self) -> bool:
        """Whether no other process has reported an error yet."""
        return self.store is None or self.store.add("errors", 1) == 1

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the block, then all others do: files that one of them writes."""
        if self.rank > 0:
            self.store.wait(["first is done"], timedelta(days=7))
        yield
        if self.rank == 0 and self.size > 1:
            self.store.set("first is done", "")


def write_shares(tensors: Mapping[str, Tensor], folder: Path, join: bool = False) -> None:
    """Every process writes the tensors, or the pieces of them, that it has: one file each.

    A tensor that all have is written by one. With ``join`` the first process makes one file of all
    files, as :func:`~lm_from_scratch.checkpoint.weights.from_pretrained` reads it.
    (torch 2.13 loses a tensor without dimensions then.)
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=join)
    dcp.save({name: t.contiguous() for name, t in tensors.items()}, storage_writer=writer)
    if join:
        shutil.rmtree(folder / "sharded", ignore_errors=True)


@contextmanager
def processes(parallel: str | None, device: str = "cpu") -> Iterator[Processes]:
    """Join the processes that ``torchrun`` started.

    ``parallel`` is ``"ddp"``, ``"fsdp"`` or ``None``. On ``"cuda"`` every process has a GPU of its
    own. One process reports an error, the first that meets it; the others leave with exit code 2.
    Raises ``ProcessLost`` where an exchange fails because another process has gone.

    Raises ``ValueError`` where the environment is not one of torchrun.
    """
    try:
        check_environment(parallel, device)
    except ValueError:
        if int(os.environ.get("RANK", 0)) > 0:  # all processes see the same
            raise SystemExit(2) from None
        raise
    if parallel is None:
        yield Processes(device=torch.device(device))
        return
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    store, rank, size = next(dist.rendezvous("env://"))
    # numbers and files go by gloo, the gradients of a GPU by NCCL
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    store = dist.PrefixStore("lm_from_scratch", store)
    group = Processes(parallel, rank, size, where, store)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        yield group
        group.joined = False
        dist.destroy_process_group()
    except Exception as error:
        group.joined = False
        if not group.first_to_say():  # it has been said, or this one is its consequence
            raise SystemExit(2) from None
        if is_lost(error):
            raise ProcessLost("another process of the run has ended") from error
        raise


@contextmanager
def watching_signals(say: Callable[[], None], seconds: float = 10.0) -> Iterator[None]:
    """Call ``say`` if the block does not end within ``seconds`` after a signal.

    If a process is lost, torchrun sends the others SIGTERM, and SIGKILL half a minute later. One
    that waits for the lost one on a GPU never comes back to run a signal handler; a thread does.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous, ended = signal.set_wakeup_fd(writer.fileno()), threading.Event()

    def wait() -> None:
        with reader:
            if reader.recv(1) and not ended.wait(seconds):
                say()

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(previous)
        writer.close()


def check_environment(parallel: str | None, device: str) -> None:
    """Raises ``ValueError`` if this is not how ``torchrun`` would start such a run here."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if parallel is None:
        if size > 1:
            raise ValueError(
                f"{size} processes were started, and each would train the same model: give "
                "--parallel ddp or --parallel fsdp"
            )
        return
    if parallel not in PARALLEL:
        raise ValueError(f"parallel={parallel!r} must be one of {PARALLEL}")
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ValueError(
            f"--parallel {parallel} needs processes, which torchrun starts: torchrun "
            "--nproc-per-node 2 -m lm_from_scratch train ... (the environment variable "
            f"{missing[0]} is missing)"
        )
    if torch.device(device).type == "cuda":
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if here > gpus:
            raise ValueError(
                f"{here} processes on this machine (--nproc-per-node) need a GPU each; it has "
                f"{gpus}"
            )


def is_lost(error: Exception) -> bool:
    """Whether an exchange with the other processes failed."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )
