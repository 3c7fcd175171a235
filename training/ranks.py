"""One process, or several under torchrun: the same script, the same batches, the same numbers to float tolerance.

    torchrun --nproc-per-node 2 train_cifar.py ...

A batch is divided over the ranks and gradients are summed; only rank 0 writes and prints, and the first rank of each
machine downloads. Without torchrun there is one rank, and every function here does the plain thing.
"""

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

ARRIVAL = datetime.timedelta(minutes=5)  # how long a process waits for the others to start


def rank() -> int:
    """This process among all of the run; 0 also without torchrun. Only rank 0 writes and prints."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def check_environment() -> None:
    """Ends the program if the environment announces several processes without all the variables that torchrun sets."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    found = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    one = (os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")) == ("0", "1")
    if not one and len(found) < len(names) and "TORCHELASTIC_RUN_ID" not in os.environ:
        left = " ".join(found)
        sys.exit(f"{Path(sys.argv[0]).name}: {left} is set, but not by torchrun: unset that, or use torchrun.")


def join(device: torch.device) -> None:
    """Join the other processes, if torchrun started this one. CUDA talks over nccl, the CPU over gloo.

    On Linux, this process is asked to stop when torchrun ends, even by kill -9; it would train on unnoticed.
    """
    if world_size() > 1 and not dist.is_initialized():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(AttributeError, OSError, TypeError):
                ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        print0(f"one of {world_size()} processes, as WORLD_SIZE says; waits {ARRIVAL} for the others")
        from torch.distributed.rendezvous import rendezvous  # some builds of torch lack it

        store, own, size = next(rendezvous("env://", timeout=ARRIVAL))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=datetime.timedelta(hours=1))


def leave() -> None:
    """Leave the other processes, so that this one may end."""
    if dist.is_initialized():
        gc.collect()  # cycles of DistributedDataParallel hold the group, whose threads would abort an ending process
        dist.destroy_process_group()


def is_lost(error: RuntimeError) -> bool:
    """Whether `error` only says that another rank has ended; that rank says why."""
    return world_size() > 1 and any(word in str(error) for word in ("Connection closed", "Connection reset", "NCCL"))


def call_in_turn(call, *arguments):
    """call(*arguments) on every rank, the first of each machine before the others (it may download a data set).

    If it raises ValueError or OSError on any rank, all ranks end, and the message is printed once. The call itself must
    not wait for other ranks.
    """
    value, error = None, ""
    for turn in (True, False):
        if turn == (int(os.environ.get("LOCAL_RANK", 0)) == 0):
            try:
                value = call(*arguments)
            except (ValueError, OSError) as caught:
                error = str(caught)
                if isinstance(caught, OSError) and caught.strerror and caught.filename:  # the system's, without number
                    error = f"{caught.filename}: {caught.strerror}"
        errors = gather(error)
        if any(errors):
            fail(next(filter(None, errors)))
    return value


def shard(batch: Tensor) -> Tensor:
    """This rank's part of a batch: all of it without torchrun, or none of it if there are fewer items than ranks."""
    return batch.tensor_split(world_size())[rank()]


def all_sum(values: Tensor) -> Tensor:
    """The sum over ranks."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def gather(value) -> list:
    """Every rank's `value`, which may be any object, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast(value):
    """Rank 0's `value`, which may be any object, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def parallelize(model: nn.Module) -> nn.Module:
    """`model`, with the same weights, in DistributedDataParallel under torchrun."""
    if world_size() == 1:
        return model
    # Buffers are constants here, so they need not be sent.
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def no_sync(model: nn.Module):
    """A context in which backward leaves gradients unsynchronized: for all micro-batches but a batch's last."""
    return model.no_sync() if world_size() > 1 else contextlib.nullcontext()


# ---- rank 0 alone speaks


def print0(text: str, end: str = "\n") -> None:
    """Print a line that stays, over the live one. If stdout is closed the run goes on: what matters is in the log."""
    if rank():
        return
    try:
        print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(text: str) -> None:
    """End the program with one sentence on stderr and exit status 1. Of several ranks, rank 0 says it."""
    if rank():
        sys.exit(1)
    if sys.stdout.isatty():
        print0("")  # over the live line
    sys.exit(f"{Path(sys.argv[0]).name}: {text}")
