"""How a script starts and ends: device, precision, the other processes, memory, exit statuses."""

import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from training import ranks
from training.flags import Common, format_flags


def start(s: Common) -> tuple[torch.device, str]:
    """The device and precision that the settings ask for; joins the other processes under torchrun.

    Ends the program if this machine does not have what is asked for.
    """
    ranks.check_environment()
    ranks.print0("settings: " + (format_flags(s) or "as --help says"))
    if s.threads:
        torch.set_num_threads(s.threads)
    if s.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        device = pick_device(s.device)
        precision = pick_precision(s.precision, device)
    except ValueError as error:
        ranks.fail(str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks.join(device)
    return device, precision


def pick_device(name: str) -> torch.device:
    """The named device, CUDA with its index; "auto" is the first GPU if there is one, else the CPU.

    Under torchrun every name but "cpu" is the GPU of this process. Raises ValueError for a device that is not here, or
    on which this torch cannot compute.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if found else []), *(f"cuda:{i}" for i in range(found))]
    if name == "auto":
        name = "cuda" if found else "cpu"
    if name not in known:
        build = "" if found or torch.version.cuda else " This torch is a CPU build; GPUs need the CUDA build."
        raise ValueError(
            f"--device {name}, but torch sees only {', '.join(known)} here; use one of those, or auto.{build}"
        )
    if name == "cpu":
        return torch.device("cpu")
    if ranks.world_size() > 1:
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > found:
            raise ValueError(f"torchrun starts more processes here than GPUs, {found}: --nproc-per-node {found}.")
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
    device = torch.device(name if ":" in name else "cuda:0")
    try:
        torch.ones(1, device=device).add_(1)  # a GPU too old or too new for this build has no kernel
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"torch {torch.__version__} cannot compute on {device} ({reason}); install a build for it, or --device cpu."
        ) from error
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """Precision of matrix products: "bf16" (autocast), "fp32", or "tf32" (fp32 in TensorFloat-32, only on CUDA).

    "auto" takes bf16 if the hardware has it. Raises ValueError for tf32 on a CPU.
    """
    if name == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
        name = "bf16" if fast else "fp32"
    if name == "tf32" and device.type != "cuda":
        raise ValueError("--precision tf32 is a mode of NVIDIA GPUs; on a CPU use bf16 or fp32.")
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    return name


def compile_and_parallelize(model: torch.nn.Module, s: Common, device: torch.device) -> torch.nn.Module:
    """`model`, with the same weights, as it trains: compiled if s.compile says so, and one of several under torchrun.

    "auto" compiles on a GPU if the compiler's tools are there: triton, and a C compiler for its launchers.
    """
    tools = importlib.util.find_spec("triton") and (os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc"))
    if s.compile == "on" or (s.compile == "auto" and device.type == "cuda" and tools):
        model = torch.compile(model, dynamic=False)  # once for whole batches, once for an epoch's smaller last one
    return ranks.parallelize(model)


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, if glibc is the allocator.

    By default it gives large blocks back to the system, whose 4 KiB pages the next step faults in again: on two CPU
    cores, 100 000 faults and a seventh of the time of a step of 128 images.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another allocator
        return
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never shrink the heap
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: take blocks up to 32 MiB, the most it allows, from the heap


def run_script(main) -> None:
    """Call a script's main(). Ctrl-C ends it with status 130, and a lack of memory, disk or tools with one sentence."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_freed_memory()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, where it was closed
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that cannot be printed ends no run
    try:
        main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one
        ranks.print0("stopped")
        sys.exit(130)
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, RuntimeError) and ranks.is_lost(error):
            time.sleep(10)  # torchrun ends this process sooner
            sys.exit(1)
        found = [advice for words, advice in LACKS if re.search(words, repr(error), re.IGNORECASE)]
        if not found and not isinstance(error, OSError):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1 if lines[0].startswith("Caught ") else 0]  # the former are a loader's worker's
        sys.exit("; ".join([f"{Path(sys.argv[0]).name}: {reason.rstrip('.')}", *found[:1]]) + ".")
    finally:
        ranks.leave()


# What the machine lacks, by the text of an error (from Python, torch or a loader's worker), and what helps.
LACKS = [
    (r"MemoryError|out ?of ?memory|allocate memory|not enough memory|DefaultCPUAllocator|size calculation overflow",
     "memory ran out: lower --batch-size, --micro-batch, --width or --context"),
    (r"shared memory|killed by signal|too many open files", "loader workers had too little: try --workers 0"),
    (r"clients joined|trying to connect", "WORLD_SIZE asks for more processes: use torchrun, or unset it"),
    (r"No space left on device", "make room there; if /dev/shm is full, try --workers 0"),
    (r"Inductor|Compiler", "torch.compile failed: --compile off"),
]  # fmt: skip
