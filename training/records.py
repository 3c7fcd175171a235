"""What a run leaves behind: its folder, settings, log and result, and the closing table."""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from training import ranks
from training.flags import Common, flag_name

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def environment(device: torch.device, precision: str) -> dict:
    """What a reader needs in order to trust a number: versions, device, precision, threads, processes, commit."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {cpu_name()}",
        "threads": torch.get_num_threads(),
        "processes": ranks.world_size(),
        "precision": precision,
        "commit": commit(),
    }


@functools.cache  # called when a script starts, since that is the code that runs
def commit() -> str:
    try:
        git = ["git", "describe", "--always", "--dirty"]
        found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        found = ""
    return found or "unknown"


def describe(device: torch.device, precision: str) -> str:
    """Hardware, precision and version of a run, in words."""
    words = [environment(device, precision)["device"], precision, f"torch {torch.__version__}"]
    if device.type == "cpu":
        words.insert(1, f"{torch.get_num_threads()} threads")
    if ranks.world_size() > 1:
        words.insert(0, f"{ranks.world_size()} processes")
    return ", ".join(words)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


# ---- folders and settings


def run_folder(out: str, init: str, seed: int) -> Path | None:
    return Path(out) / f"{init}-seed{seed}" if out else None


def check_folders(s: Common, data: dict | None = None) -> list[Path]:
    """The folders of all runs of s.init and s.seeds under s.out, if that is not empty and this is rank 0.

    Raises FileExistsError if one holds a run already and s.resume is not set, ValueError if it is and the run has other
    settings than `s`, or was trained on other `data` (see fingerprint): logs are never overwritten.
    """
    if s.resume and not s.out:
        raise ValueError("--resume goes on with the runs in --out DIR; name that folder.")
    folders = (
        [run_folder(s.out, init, seed) for init in s.init for seed in s.seeds] if s.out and ranks.rank() == 0 else []
    )
    now = fingerprint(data or {}) if folders else {}
    for folder in folders:
        if not any((folder / name).exists() for name in ("log.jsonl", "last.pt", "result.json")):
            continue
        if not s.resume:
            kind = "a run" if (folder / "result.json").exists() else "an unfinished run"
            raise FileExistsError(f"{folder} holds {kind} already; --resume goes on with it, or choose another --out.")
        head = read_head(folder)
        if changes := diff_settings(head["config"], s):
            raise ValueError(f"{folder} is of a run with other settings ({'; '.join(changes)}); choose another --out.")
        then = head["data"] or now  # of an older version
        if changes := [f"{name}: {then.get(name)}, now {now[name]}" for name in now if then.get(name) != now[name]]:
            raise ValueError(f"{folder} is of a run on other data ({'; '.join(changes)}); choose another --out.")
    return folders


def claim_folders(s: Common, data: dict) -> None:
    """Make the folders and lock them if they are still free: another run may have begun while data were fetched."""
    for folder in check_folders(s):
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
        for left in folder.glob("*.tmp"):  # by a run that was killed
            left.unlink()
    check_folders(s, data)


held = {}  # this process's lock files, by name: they stay open until it ends


def lock(folder: Path) -> None:
    """Make the folder this process's until it ends, however it ends: the system releases the lock.

    Raises ValueError if it is another's. Does nothing on Windows, and on file systems without locks.
    """
    file = str(folder.resolve() / ".lock")
    if fcntl is None or file in held:
        return
    held[file] = open(file, "w")  # noqa: SIM115
    try:
        fcntl.lockf(held[file], fcntl.LOCK_EX | fcntl.LOCK_NB)  # belongs to the process; its workers do not inherit it
    except OSError as error:
        held.pop(file).close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ValueError(f"another process trains in {folder}; wait for it, or choose another --out.") from error


def fingerprint(data: dict) -> dict[str, str]:
    """For each tensor and list of `data`, its number of items and a hash (of a sample, if there are many millions)."""
    found = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            flat = value.reshape(-1)
            content = flat[:: max(1, len(flat) // 2**23)].cpu().numpy().tobytes()
        elif isinstance(value, (tuple, list)):
            content = json.dumps(value).encode()
        else:
            continue  # a name, or where it lies
        found[name] = f"{len(value)} items {hashlib.sha256(content).hexdigest()[:12]}"
    return found


def read_head(folder: Path) -> dict:
    """ "config", the settings, and "data", the fingerprint, from the result, log or checkpoint of the run in `folder`.

    Raises ValueError if none of them has both.
    """
    if (folder / "result.json").exists():
        return read_result(folder / "result.json")
    try:
        head = next(iter(read_log(folder / "log.jsonl")), {})
        if "config" not in head:
            head = torch.load(folder / "last.pt", map_location="cpu", weights_only=True)
        return dict(config=dict(head["config"]), data=dict(head.get("data", {})))
    except Exception as error:  # a damaged file can cause nearly any error
        raise ValueError(f"{folder} no longer says what the settings of its run were; delete it.") from error


def diff_settings(then: dict, s: Common) -> list[str]:
    """What differs between the recorded settings `then` and `s`, among those that decide what is computed."""
    fixed = [field for field in dataclasses.fields(s) if not field.metadata["free"]]
    pairs = {field.name: (then.get(field.name, field.default), getattr(s, field.name)) for field in fixed}  # or older
    pairs = json.loads(json.dumps(pairs))  # tuples are lists
    return [f"{flag_name(name)} was {old}, now {new}" for name, (old, new) in pairs.items() if old != new]


def restore_settings(settings: type[Common], config: dict) -> Common:
    """The settings of a run from its recorded `config`, without any that this version does not know."""
    known = {field.name for field in dataclasses.fields(settings)}
    return settings(**{name: value for name, value in config.items() if name in known})


# ---- log and result


def open_log(folder: Path | None, step: int, **head) -> None:
    """Begin folder/log.jsonl with the record `head`; for a run resumed at `step`, drop what was logged past it."""
    if not folder or ranks.rank():
        return
    kept = [record for record in read_log(folder / "log.jsonl") if record.get("step", 0) <= step] if step else []
    if kept:
        head = dict(resumed_at_step=step, environment=head["environment"])
    write_text(folder / "log.jsonl", "".join(json.dumps(record) + "\n" for record in [*kept, head]))


def append_record(folder: Path | None, record: dict) -> None:
    """Append a line to folder/log.jsonl."""
    if folder and ranks.rank() == 0:
        with fail_if_full(folder / "log.jsonl"), open(folder / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")


def read_log(file: Path) -> list[dict]:
    """The records of a log.jsonl, without lines that are cut short or are no records."""
    records = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(text))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("step", 0), int)]


# What scripts measure after an epoch: its title in figures, and how the terminal shows it.
SCORES = {
    "test_acc": ("test accuracy %", "accuracy {:.2f} %"),
    "valid_bpc": ("valid bits per character", "valid {:.3f} bpc"),
    "valid_ppl": ("valid perplexity", "valid {:.3f} ppl"),
}


def curve(records: list[dict]) -> list[tuple[int, float]]:
    """(epoch, score) of each record of a log that has one of SCORES."""
    return [(r["epoch"], r[score]) for r in records for score in SCORES if score in r]


def read_result(file: Path, metrics=()) -> dict:
    """A result.json whose `metrics` are numbers. Raises ValueError for any other file."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        result["config"], result["data"] = dict(result["config"]), dict(result.get("data", {}))
        result["init"] + "", sum(result[key] for key in ("seed", *metrics))
        return result
    except (ValueError, TypeError, KeyError, OSError) as error:  # neither JSON nor UTF-8; other JSON; a folder
        raise ValueError(
            f"{file} is damaged, or no result of these scripts; delete its folder to run that again."
        ) from error


def load_result(folder: Path | None, metrics=()) -> dict | None:
    """The result of a finished run, on every rank; None if it is not finished."""
    file = folder / "result.json" if folder and ranks.rank() == 0 else None
    read = ranks.call_in_turn(lambda: read_result(file, metrics) if file and file.exists() else None)
    return ranks.broadcast(read)


def write_json(file: Path, value: dict) -> None:
    write_text(file, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write under a temporary name and move into place: a reader sees the whole file or none."""
    if ranks.rank():
        return
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with fail_if_full(file):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)


@contextlib.contextmanager
def fail_if_full(file: Path):
    """A context in which a failed write ends the program with one sentence."""
    try:
        yield
    except OSError as error:
        ranks.fail(f"could not write {file} ({error.strerror}); make room there, then --resume.")


# ---- the closing table


def decimals(metric: str) -> int:
    """Decimal places, as the paper prints a metric: three for bits per character, else two."""
    return 3 if metric.endswith("bpc") else 2


def mean_and_deviation(values: list[float], digits: int = 2, signed: bool = False) -> str:
    """ "57.20 ± 0.41": mean and sample standard deviation (n − 1); one value has no deviation."""
    text = f"{statistics.mean(values):{'+' if signed else ''}.{digits}f}"
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def summary_table(results: list[dict], metrics: dict[str, str]) -> str:
    """Markdown, for `metrics` (key of a result: title): one row per init, mean ± deviation over seeds.

    Differences are from "default", or from the first init if that is missing, seed by seed.
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
            cells.append(mean_and_deviation([result[key] for result in by_seed.values()], decimals(key)))
            shared = [seed for seed in by_seed if seed in by_init[first] and init != first]
            differences = [by_seed[seed][key] - by_init[first][seed][key] for seed in shared]
            cells += [mean_and_deviation(differences, decimals(key), signed=True) if shared else ""] * several
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
            results.append(read_result(file, metrics))
    results = [r for r in results if not diff_settings(r["config"], s)]
    if results:
        write_text(Path(s.out) / "summary.md", summary_table(results, metrics) + "\n")
