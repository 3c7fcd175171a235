"""What the training scripts need and none is about: flags, device, learning rate, logs, the closing table."""

import argparse
import ctypes
import dataclasses
import difflib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

# ---- settings: one dataclass a script, one flag a field


def flag(default, help: str, choices=None, low: float = -math.inf, high: float = math.inf):
    """A dataclass field that is also a command-line flag; its type is that of the default, numbers in low..high."""
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high))


def parse_settings(cls, argv: list[str], usage: str, demo: dict):
    """An instance of the dataclass `cls` from flags named like its fields; `--demo` puts `demo` for the defaults.

    Flags beside `--demo` win over it. Tuples are comma-separated. Unknown flags and values end the program.
    """
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--demo", action="store_true", help="a comparison of minutes on two CPU cores")
    for field in dataclasses.fields(cls):
        many = isinstance(field.default, tuple)
        kind = type(field.default[0] if many else field.default)
        shown = ",".join(map(str, field.default)) if many else field.default
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=reader(kind, many, field.metadata["low"], field.metadata["high"]),
            default=field.default,
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else kind.__name__.upper() + ("S" if many else ""),
            help=f"{field.metadata['help']} [{shown}]".replace("%", "%%"),
        )
    if "--demo" in argv:
        parser.set_defaults(**demo)
    values = vars(parser.parse_args(argv))
    values.pop("demo")
    return cls(**values)


def reader(kind: type, many: bool, low: float, high: float):
    """A function from a flag's text to its value, which must be a finite number in low..high, if it is a number."""

    def read(text: str):
        values = tuple(map(kind, text.split(","))) if many else (kind(text),)
        for value in values:
            if kind in (int, float) and not (low <= value <= high and math.isfinite(value)):
                above = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise argparse.ArgumentTypeError(f"{value} is not {'finite' if low == -math.inf else above}")
        return values if many else values[0]

    read.__name__ = f"list of {kind.__name__}s" if many else kind.__name__  # argparse's "invalid ... value"
    return read


def check_runs(inits: tuple[str, ...], seeds: tuple[int, ...], known) -> None:
    """Raises ValueError that names the nearest known init where one is unknown, or where a run is asked for twice."""
    for init in inits:
        if init not in known:
            near = difflib.get_close_matches(init, list(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ValueError(f"unknown init {init!r}{hint} Known: {', '.join(known)}.")
    for flag_, values in (("--init", inits), ("--seeds", seeds)):
        if len(set(values)) < len(values):
            raise ValueError(f"{flag_} names one of {', '.join(map(str, values))} twice; each is run once.")


# ---- device and precision


def pick_device(name: str) -> torch.device:
    """The named device; "auto" is CUDA where there is one, else the CPU. Raises ValueError for any other."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if found else []), *(f"cuda:{i}" for i in range(found))]
    if name == "auto":
        name = known[1] if found else "cpu"
    if name not in known:
        raise ValueError(f"--device {name}, but torch sees only {', '.join(known)} here; use one of those, or auto.")
    return torch.device(name)


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: bf16 autocast or plain float32. "auto" takes bf16 where the hardware has it."""
    if name == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
        name = "bf16" if fast else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def autocast(device: torch.device, dtype: torch.dtype):
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def generator(seed: int, stream: int) -> torch.Generator:
    """A CPU generator of its own for each use (initialization, data), so that one never shifts another's draws."""
    return torch.Generator().manual_seed(1000 * seed + stream)


# ---- learning rate


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share `warmup` of `steps`, then a cosine to 0. A function of the step: no state.

    The first step (0) already learns, and `warmup` may be 0 or 1.
    """
    warm = round(warmup * steps)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


# ---- logs


def environment(device: torch.device, dtype: torch.dtype) -> dict:
    """What a number needs beside it to be trusted: versions, device, precision, threads, commit."""
    try:
        git = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        commit = ""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "precision": str(dtype).removeprefix("torch."),
        "commit": commit or "unknown",
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def run_folder(out: str, init: str, seed: int) -> Path | None:
    return Path(out) / f"{init}-seed{seed}" if out else None


def claim_folders(s) -> None:
    """Make the folders of all runs of s.init and s.seeds under s.out, if that is not empty.

    Raises FileExistsError where one holds a run already: logs are never overwritten.
    """
    folders = [run_folder(s.out, init, seed) for init in s.init for seed in s.seeds] if s.out else []
    for folder in folders:
        if (folder / "log.jsonl").exists():
            kind = "a run" if (folder / "result.json").exists() else "an unfinished run"
            raise FileExistsError(f"{folder} holds {kind} already; choose another --out, or delete it.")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)


def append_record(file: Path, record: dict) -> None:
    with open(file, "a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """Written under a temporary name and moved into place: a reader sees the whole file or none."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def live(text: str, step: int, steps: int, loss: torch.Tensor, done: int, started: float, unit: str) -> None:
    """Rewrite the last line of a terminal with progress, every fifth step; write nothing into a file or pipe.

    done: how many images or tokens (`unit`) have been trained on since `started`.
    """
    if step % 5 == 0 and sys.stdout.isatty():  # reading the loss waits for the device: not at every step
        spent = time.time() - started
        left = int(spent / step * (steps - step))
        text += f"  step {step}/{steps}  loss {float(loss):.3f}  {left // 60}:{left % 60:02d} left"
        text += f"  {done / spent:,.0f} {unit}/s"
        print("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)


def line(text: str) -> None:
    """A line that stays, over the live one."""
    print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, flush=True)


def fail(text: str) -> None:
    """End the program with one sentence on stderr and exit status 1."""
    if sys.stdout.isatty():
        line("")  # over the live line
    sys.exit(f"{Path(sys.argv[0]).name}: {text}")


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, where glibc is the allocator.

    By default it gives large blocks back to the system, whose 4 KiB pages the next step faults in again: on two CPU
    cores, 100 000 faults and a seventh of the time of a step of 128 images.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another allocator
        return
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never shrink the heap
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: take blocks up to 32 MiB, the most it allows, from the heap


def run(main) -> None:
    """Call a script's main(); Ctrl-C ends it with status 130, and without a traceback."""
    keep_freed_memory()
    try:
        main()
    except KeyboardInterrupt:
        line("stopped")
        sys.exit(130)


# ---- the closing table


def mean_and_deviation(values: list[float], signed: bool = False) -> str:
    """ "57.20 ± 0.41": mean and sample standard deviation (n − 1); of one value there is no deviation."""
    text = f"{statistics.mean(values):{'+' if signed else ''}.2f}"
    return text + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def summary_table(results: list[dict], metrics: dict[str, str]) -> str:
    """Markdown, for `metrics` (key of a result: title): a row an init, mean ± deviation over seeds.

    Differences are from "default", or from the first init where that is missing, seed by seed.
    """
    by_init: dict[str, dict[int, dict]] = {}
    for result in sorted(results, key=lambda result: result["init"] != "default"):
        by_init.setdefault(result["init"], {})[result["seed"]] = result
    first, several = next(iter(by_init)), len(by_init) > 1
    titles = [t for title in metrics.values() for t in ([title, f"minus {first}"] if several else [title])]
    rows = ["| init | n | " + " | ".join(titles) + " |", "|---|---|" + "---|" * len(titles)]
    for init, by_seed in by_init.items():
        cells = [init, str(len(by_seed))]
        for key in metrics:
            cells.append(mean_and_deviation([result[key] for result in by_seed.values()]))
            shared = [seed for seed in by_seed if seed in by_init[first] and init != first]
            differences = [by_seed[seed][key] - by_init[first][seed][key] for seed in shared]
            cells += [mean_and_deviation(differences, signed=True) if shared else ""] * several
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def save_summary(out: str, metrics: dict[str, str]) -> None:
    """Leave the table of all runs that are finished under `out`, earlier ones too, in OUT/summary.md."""
    files = sorted(Path(out).glob("*-seed*/result.json"), key=lambda file: file.stat().st_mtime)
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    results = [result for result in results if metrics.keys() <= result.keys()]
    write_text(Path(out) / "summary.md", summary_table(results, metrics) + "\n")
