"""What the training scripts need and none is about: flags, device, learning rate, logs, the closing table."""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import ranks

# ---- settings: one dataclass a script, one flag a field


def flag(default, help: str, choices=None, low: float = -math.inf, high: float = math.inf, free: bool = False):
    """A dataclass field that is also a command-line flag; its type is that of the default, numbers in low..high.

    free: says nothing about what a run computes, so `--resume` may change it. A flag whose default is False takes no
    value.
    """
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high, free=free))


@dataclasses.dataclass
class Common:
    """The settings of every script; each adds its own."""

    init: tuple = flag(
        ("default", "mimetic"),
        "initializations to compare, with default if it is there, else with the first",
        free=True,
    )
    seeds: tuple = flag((0,), "one run a seed and init; it fixes weights, data order and every draw", low=0, free=True)
    out: str = flag("", "folder for logs, results and checkpoints; empty: write nothing", free=True)
    resume: bool = flag(
        False, "go on with the runs in --out: the finished ones are read, the others continued", free=True
    )
    save_every: float = flag(
        10.0, "minutes between checkpoints within an epoch; one follows each epoch", low=0, free=True
    )
    device: str = flag("auto", "auto, cpu, cuda, cuda:1, ...", free=True)
    precision: str = flag(
        "auto", "of matrix products; auto: bf16 where the hardware has it", ("auto", "bf16", "fp32", "tf32")
    )
    threads: int = flag(0, "CPU threads; 0: torch's choice (torchrun: 1 a process)", low=0, free=True)
    compile: bool = flag(False, "torch.compile the model: slow to start, faster after")
    deterministic: bool = flag(False, "refuse operations that do not repeat bit by bit (on a CPU there are none)")


def parse_settings(cls, argv: list[str], usage: str, demo: dict, preset: dict | None = None):
    """An instance of the dataclass `cls` from flags named like its fields; `--demo` puts `demo` for the defaults.

    `preset` stands for other defaults, behind `demo`; flags win over both. Values of a tuple are separated by commas or
    spaces. Unknown flags and values end the program.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--FLAG VALUE ...]; --help lists them",
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    small = "minutes on two CPU cores: " + " ".join(f"{flag_name(k)} {v}" for k, v in demo.items())
    parser.add_argument("--demo", action="store_true", help=f"{small}; other flags go on top")
    for field in dataclasses.fields(cls):
        if field.default is False:
            parser.add_argument("--" + field.name, action="store_true", help=field.metadata["help"])
            continue
        many = isinstance(field.default, tuple)
        kind = type(field.default[0] if many else field.default)
        shown = ",".join(map(str, field.default)) if many else field.default
        parser.add_argument(
            flag_name(field.name),
            type=reader(kind, many, **{key: field.metadata[key] for key in ("choices", "low", "high")}),
            nargs="+" if many else None,
            default=field.default,
            metavar="|".join(map(str, field.metadata["choices"] or ()))
            or kind.__name__.upper() + ("S" if many else ""),
            help=f"{field.metadata['help']} [{shown}]".replace("%", "%%"),
        )
    parser.set_defaults(**{**(preset or {}), **(demo if "--demo" in argv else {})})
    values, unknown = parser.parse_known_args(joined(argv))
    if unknown:
        parser.error(f"unknown argument {unknown[0]}{near(unknown[0].split('=')[0], parser._option_string_actions)}")
    values = vars(values)
    values.pop("demo")
    return cls(**{name: sum(value, ()) if isinstance(value, list) else value for name, value in values.items()})


def joined(argv: list[str]) -> list[str]:
    """`argv` with values like -4e-1 or -1,0 joined to their flags by "=": argparse would take them for flags."""
    words = []
    for word in argv:
        number = re.fullmatch(r"-[\d.]+(e[-+]?\d+)?(,.*)?", word, re.IGNORECASE)
        if number and any(number.groups()) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += "=" + word
        else:
            words.append(word)
    return words


def flags_of(s: Common) -> str:
    """What of `s` is not as --help says, as flags: --demo, a data set or the command line has changed it."""
    words = []
    for field in dataclasses.fields(s):
        name, value = flag_name(field.name), getattr(s, field.name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if value != field.default:
            words += [name] if value is True else [f"{name}={text}"] if text.startswith("-") else [name, text]
    return shlex.join(words)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def near(name: str, known) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def reader(kind: type, many: bool, choices, low: float, high: float):
    """A function from a flag's text to its value: one of `choices`; if a number, a finite one in low..high."""

    def read(text: str):
        values = tuple(map(kind, text.split(","))) if many else (kind(text),)
        for value in values:
            if choices and value not in choices:
                known = list(map(str, choices))
                raise argparse.ArgumentTypeError(f"{value} is none of {', '.join(known)}{near(str(value), known)}")
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
            raise ValueError(f"unknown init {init!r}{near(init, known) or '.'} Known: {', '.join(known)}.")
    for flag_, values in (("--init", inits), ("--seeds", seeds)):
        if len(set(values)) < len(values):
            raise ValueError(f"{flag_} names one of {', '.join(map(str, values))} twice; each is run once.")


# ---- device and precision


def start(s: Common) -> tuple[torch.device, str]:
    """The device and precision that the settings ask for; joins the other processes under torchrun.

    Ends the program where this machine does not have what is asked for.
    """
    ranks.line("settings: " + (flags_of(s) or "as --help says"))
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
    on which this torch computes nothing.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(["cuda"] if found else []), *(f"cuda:{i}" for i in range(found))]
    if name == "auto":
        name = known[1] if found else "cpu"
    if name not in known:
        build = "" if found or torch.version.cuda else " This torch is a CPU build; GPUs need the CUDA build."
        raise ValueError(
            f"--device {name}, but torch sees only {', '.join(known)} here; use one of those, or auto.{build}"
        )
    if name == "cpu":
        return torch.device("cpu")
    if ranks.count() > 1:
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
    """Precision of matrix products: "bf16" (autocast), "fp32", or "tf32" (fp32 in TensorFloat-32, on CUDA alone).

    "auto" takes bf16 where the hardware has it. Raises ValueError for tf32 on a CPU.
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


def autocast(device: torch.device, precision: str):
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


# What a random draw is for: a stream of its own for each, so that one never shifts another's.
WEIGHTS, INIT, ORDER, AUGMENT, DROPOUT, SAMPLE, MIX = range(7)


def seeded(seed: int, use: int, step: int = 0) -> int:
    """A 32-bit seed for a use at a step. Every draw of a run is a function of these three: there is no random state
    to save, so a run that is resumed, or has other inits beside it, or more ranks, draws the same.
    """
    return int(np.random.SeedSequence((seed, use, step)).generate_state(1)[0])


def generator(seed: int, use: int, step: int = 0) -> torch.Generator:
    """A CPU generator for one use at one step."""
    return torch.Generator().manual_seed(seeded(seed, use, step))


# ---- learning rate


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share `warmup` of `steps`, then a cosine to 0. A function of the step: no state.

    The first step (0) already learns, and `warmup` may be 0 or 1.
    """
    warm = round(warmup * steps)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


# ---- what a classifier of images does with a batch


def unchanged(images: torch.Tensor) -> torch.Tensor:
    return images


def backward(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    total: int,
    micro: int,
    precision: str,
    prepare=unchanged,
) -> torch.Tensor:
    """Gradients of the mean cross-entropy over a batch of `total` images, of which these are this rank's share.

    labels are classes (B,), or probabilities (B, classes). Gradients are added up over `micro` images at a time, which
    are all that `prepare` makes larger at once. Returns the share of that mean.
    """
    mean, parts = torch.zeros((), device=images.device), list(zip(images.split(micro), labels.split(micro)))
    for i, (x, y) in enumerate(parts):
        with contextlib.nullcontext() if i + 1 == len(parts) else ranks.without_sync(model):
            with autocast(images.device, precision):
                loss = F.cross_entropy(model(prepare(x)).float(), y, reduction="sum") / total
            (loss * ranks.count()).backward()  # DistributedDataParallel averages over ranks; ours is a sum
        mean += loss.detach()
    return mean


@torch.no_grad()
def accuracy(model: torch.nn.Module, batches, device: torch.device, precision: str) -> tuple[float, float]:
    """Accuracy in percent and mean cross-entropy in nats over `batches` of (images, labels), of each rank its own."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in batches:
        with autocast(device, precision):
            logits = model(images).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums[:2] += torch.stack([(logits.argmax(-1) == labels).sum(), loss]).double().cpu()
        sums[2] += len(labels)
    model.train()
    correct, loss, count = ranks.all_sum(sums.to(device)).tolist()
    return 100 * correct / max(count, 1), loss / max(count, 1)


# ---- logs


def environment(device: torch.device, precision: str) -> dict:
    """What a number needs beside it to be trusted: versions, device, precision, threads, processes, commit."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "processes": ranks.count(),
        "precision": precision,
        "commit": commit(),
    }


@functools.cache  # asked for when a script starts: the code that runs is that of then
def commit() -> str:
    try:
        git = ["git", "describe", "--always", "--dirty"]
        found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        found = ""
    return found or "unknown"


def describe(device: torch.device, precision: str) -> str:
    """What a run runs on, in words."""
    words = [environment(device, precision)["device"], precision, f"torch {torch.__version__}"]
    if device.type == "cpu":
        words.insert(1, f"{torch.get_num_threads()} threads")
    if ranks.count() > 1:
        words.insert(0, f"{ranks.count()} processes")
    return ", ".join(words)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def run_folder(out: str, init: str, seed: int) -> Path | None:
    return Path(out) / f"{init}-seed{seed}" if out else None


def free_folders(s: Common) -> list[Path]:
    """The folders of all runs of s.init and s.seeds under s.out, if that is not empty and this is rank 0.

    Raises FileExistsError where one holds a run already and s.resume is not set, ValueError where it is and the run
    has other settings than `s`: logs are never overwritten.
    """
    if s.resume and not s.out:
        raise ValueError("--resume goes on with the runs in --out DIR; name that folder.")
    folders = (
        [run_folder(s.out, init, seed) for init in s.init for seed in s.seeds] if s.out and ranks.rank() == 0 else []
    )
    for folder in folders:
        if not any((folder / name).exists() for name in ("log.jsonl", "last.pt", "result.json")):
            continue
        if not s.resume:
            kind = "a run" if (folder / "result.json").exists() else "an unfinished run"
            raise FileExistsError(f"{folder} holds {kind} already; --resume goes on with it, or choose another --out.")
        if changes := changed_settings(recorded_settings(folder), s):
            raise ValueError(f"{folder} is of a run with other settings ({'; '.join(changes)}); choose another --out.")
    return folders


def claim_folders(s: Common) -> None:
    """Make the folders of free_folders, if they still are free: another run may have begun while data were fetched."""
    for folder in free_folders(s):
        folder.mkdir(parents=True, exist_ok=True)


def recorded_settings(folder: Path) -> dict:
    """The settings of the run in `folder`, from its result, log or checkpoint. Raises ValueError without any."""
    if (folder / "result.json").exists():
        return read_json(folder / "result.json")["config"]
    if config := next(iter(read_log(folder / "log.jsonl")), {}).get("config"):
        return config
    try:
        return torch.load(folder / "last.pt", map_location="cpu", weights_only=True)["config"]
    except Exception as error:
        raise ValueError(f"{folder} does not tell the settings of its run any more; delete it.") from error


def changed_settings(then: dict, s: Common) -> list[str]:
    """What differs between the recorded settings `then` and `s`, among those that decide what is computed."""
    fixed = [field for field in dataclasses.fields(s) if not field.metadata["free"]]
    pairs = {field.name: (then.get(field.name, field.default), getattr(s, field.name)) for field in fixed}  # or older
    pairs = json.loads(json.dumps(pairs))  # tuples are lists
    return [f"{flag_name(name)} was {old}, now {new}" for name, (old, new) in pairs.items() if old != new]


def settings_from(settings: type[Common], config: dict) -> Common:
    """The settings of a run from its recorded `config`, without any that this version does not know."""
    known = {field.name for field in dataclasses.fields(settings)}
    return settings(**{name: value for name, value in config.items() if name in known})


def read_log(file: Path) -> list[dict]:
    """The records of a log.jsonl; a last line that was cut short is left out."""
    records = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(text))
    return records


SCORES = {"test_acc": "test accuracy %", "valid_bpc": "valid bits per character", "valid_ppl": "valid perplexity"}


def curve(records: list[dict]) -> list[tuple[int, float]]:
    """(epoch, score) of each record of a log that has one of SCORES: what a script measures after an epoch."""
    return [(r["epoch"], r[score]) for r in records for score in SCORES if score in r]


def open_log(folder: Path | None, step: int, **head) -> None:
    """Begin folder/log.jsonl with the record `head`; for a run resumed at `step`, drop what was logged past it."""
    if not folder or ranks.rank():
        return
    kept = [record for record in read_log(folder / "log.jsonl") if record.get("step", 0) <= step] if step else []
    if kept:
        head = dict(resumed_at_step=step, environment=head["environment"])
    write_text(folder / "log.jsonl", "".join(json.dumps(record) + "\n" for record in [*kept, head]))


def read_json(file: Path) -> dict:
    """A result.json. Raises ValueError for a file that is not one."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(result, dict) and "config" in result:
            return result
    except ValueError:  # neither JSON nor UTF-8
        pass
    raise ValueError(f"{file} is damaged, or no result of these scripts; delete its folder to run that again.")


def append_record(folder: Path | None, record: dict) -> None:
    """A line more in folder/log.jsonl."""
    if folder and ranks.rank() == 0:
        with written(folder / "log.jsonl"), open(folder / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def written(file: Path):
    """Within, what cannot be written ends the program with one sentence."""
    try:
        yield
    except OSError as error:
        ranks.fail(f"could not write {file} ({error.strerror}); make room there, then --resume.")


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """Written under a temporary name and moved into place: a reader sees the whole file or none."""
    if ranks.rank():
        return
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with written(file):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)


def live(
    text: str, step: int, steps: int, loss: torch.Tensor, first: int, started: float, size: int, unit: str
) -> None:
    """Rewrite the last line of a terminal with progress; write nothing into a file or pipe.

    Every fifth step, or each where steps take a second, since reading the loss waits for the device.
    first: the step at which this process began, at the time `started`.  size: images or tokens (`unit`) a step.
    """
    pace = max(time.time() - started, 1e-6) / (step - first)  # seconds a step
    if ranks.rank() or not sys.stdout.isatty() or (step % 5 and pace < 1):
        return
    left, width = int(pace * (steps - step)), shutil.get_terminal_size().columns - 1
    text += f"  step {step}/{steps}  loss {float(loss):.3f}  {left // 60}:{left % 60:02d} left"
    text += f"  {size / pace:,.0f} {unit}/s"
    text = text if len(text) <= width else text.replace("  ", " ")
    print("\r\x1b[K" + text[:width], end="", flush=True)


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
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that cannot be printed ends no run
    try:
        main()
    except KeyboardInterrupt:
        ranks.line("stopped")
        sys.exit(130)
    except RuntimeError as error:
        if not ranks.lost(error):
            raise
        time.sleep(10)  # torchrun ends this process sooner
        sys.exit(1)
    finally:
        ranks.leave()


# ---- the closing table


def digits_of(metric: str) -> int:
    """Digits behind the point, as the paper prints a metric: three of bits per character, else two."""
    return 3 if metric.endswith("bpc") else 2


def mean_and_deviation(values: list[float], digits: int = 2, signed: bool = False) -> str:
    """ "57.20 ± 0.41": mean and sample standard deviation (n − 1); of one value there is no deviation."""
    text = f"{statistics.mean(values):{'+' if signed else ''}.{digits}f}"
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


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
            cells.append(mean_and_deviation([result[key] for result in by_seed.values()], digits_of(key)))
            shared = [seed for seed in by_seed if seed in by_init[first] and init != first]
            differences = [by_seed[seed][key] - by_init[first][seed][key] for seed in shared]
            cells += [mean_and_deviation(differences, digits_of(key), signed=True) if shared else ""] * several
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def save_summary(s: Common, metrics: dict[str, str]) -> None:
    """Leave the table of all finished runs under s.out that have the settings `s`, earlier ones too, in summary.md."""
    if ranks.rank():
        return
    files = sorted(Path(s.out).glob("*-seed*/result.json"), key=lambda file: file.stat().st_mtime)
    results = []
    for file in files:
        with contextlib.suppress(ValueError):  # somebody else's
            results.append(read_json(file))
    results = [r for r in results if {"config", *metrics} <= r.keys() and not changed_settings(r["config"], s)]
    if results:
        write_text(Path(s.out) / "summary.md", summary_table(results, metrics) + "\n")
