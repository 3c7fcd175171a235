"""What the training scripts need and none is about: flags, device, learning rate, logs, the closing table."""

import argparse
import dataclasses
import difflib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

# ---- settings: one dataclass a script, one flag a field


def flag(default, help: str, choices=None):
    """A dataclass field that is also a command-line flag; its type is that of the default."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


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
        kind = type(field.default[0]) if many else type(field.default)
        shown = ",".join(map(str, field.default)) if many else field.default
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=(lambda text, kind=kind: tuple(map(kind, text.split(",")))) if many else kind,
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


def check_known(name: str, known, what: str) -> None:
    """Raises ValueError that names the nearest known one where `name` is not among `known`."""
    if name not in known:
        nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown {what} {name!r}; did you mean {nearest}? Known: {', '.join(known)}.")


# ---- device and precision


def pick_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU. Raises ValueError for CUDA that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no CUDA device; use --device cpu, or install a CUDA build.")
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
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "precision": str(dtype).removeprefix("torch."),
        "commit": commit.stdout.strip() or "unknown",
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def claim_folders(folders: list[Path]) -> None:
    """Make the runs' folders. Raises FileExistsError where one holds a run already: logs are never overwritten."""
    for folder in folders:
        if (folder / "log.jsonl").exists():
            raise FileExistsError(f"{folder} holds a run already; choose another --out, or delete it.")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)


def append_record(file: Path, record: dict) -> None:
    with open(file, "a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")


def write_json(file: Path, value: dict) -> None:
    """Written under a temporary name and moved into place: a reader sees the whole file or none."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def live(text: str, step: int, steps: int, loss: torch.Tensor, batch: int, started: float) -> None:
    """Rewrite the last line of a terminal with progress, every fifth step; write nothing into a file or pipe."""
    if step % 5 == 0 and sys.stdout.isatty():  # reading the loss waits for the device: not at every step
        spent = time.time() - started
        left = int(spent / step * (steps - step))
        text += f"  step {step}/{steps}  loss {float(loss):.3f}  {step * batch / spent:.0f} images/s"
        text += f"  {left // 60}:{left % 60:02d} left"
        print("\r\x1b[K" + text[: os.get_terminal_size().columns - 1], end="", flush=True)


def line(text: str) -> None:
    """A line that stays, over the live one."""
    print(("\r\x1b[K" if sys.stdout.isatty() else "") + text, flush=True)


# ---- the closing table


def mean_and_deviation(values: list[float], signed: bool = False) -> str:
    """ "57.20 ± 0.41": mean and sample standard deviation (n − 1); of one value there is no deviation."""
    text = f"{statistics.mean(values):{'+' if signed else ''}.2f}"
    return text + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def summary_table(results: list[dict], metric: str, title: str) -> str:
    """Markdown: a row an init, mean ± deviation over seeds; differences from the first init, seed by seed."""
    scores: dict[str, dict[int, float]] = {}
    for result in results:
        scores.setdefault(result["init"], {})[result["seed"]] = result[metric]
    first = next(iter(scores))
    rows = [f"| init | {title} | n | minus {first} |", "|---|---|---|---|"]
    for init, by_seed in scores.items():
        paired = [by_seed[seed] - scores[first][seed] for seed in by_seed if seed in scores[first]]
        difference = "" if init == first else mean_and_deviation(paired, signed=True)
        rows.append(f"| {init} | {mean_and_deviation(list(by_seed.values()))} | {len(by_seed)} | {difference} |")
    return "\n".join(rows)
