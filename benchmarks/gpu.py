"""The first fifteen minutes on a GPU: does it compute the same, how fast is it, what will the paper's tables take?

python bench.py gpu                                 all parts, within 15 minutes, into runs/gpu/
python bench.py gpu --budget 60 --data-dir data     the same, and with the time left full rows of CIFAR-10
python bench.py gpu --parts check,speed             some parts
python bench.py gpu --device cpu --tiny             a rehearsal on a CPU, in a minute: its figures mean nothing

check  losses of ten fp32 steps, CPU against GPU; the two attention paths; inits on both; a run killed and resumed
speed  a large product; ViT-Tiny/2 and the language model, eager and compiled, with augmentation and without
peers  the same models from timm, vit-pytorch and nanoGPT (its folder on PYTHONPATH), where installed, in turn with ours
epoch  an epoch of train_cifar.py and one of train_lm.py, of the paper's size, and from them the time of every full row
rows   rows of `reproduce.py sizes --scale full`, of 192/12/3 first, as long as one fits; CIFAR-10 is in --data-dir

Every measurement is a line of OUT/measurements.jsonl at once, and a row of OUT/summary.md in the end. Each part is a
process with a time limit: one that fails, hangs or breaks the GPU's context costs itself alone. The exit status is 1
where a check failed or anything ended in an error.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import string
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

import reproduce
from benchmarks.check import checks
from benchmarks.roofline import EPOCHS
from benchmarks.speed import peers, speed
from inputs.images import is_available
from lm import TransformerLM
from training import records, start
from vit import ViT

HERE = Path(__file__).parent.parent
FULL = {
    ViT: dict(patch_size=2, dim=192, depth=12, heads=3, pool="mean"), "batch": 512, "check_batch": 32,
    TransformerLM: dict(context=512, dim=384, depth=12, heads=8), "windows": 32, "check_windows": 2,
    "product": 8192, "seconds": 4.0, "repeat": 5, "backend": "inductor",
    "run": "--limit 2560 --batch-size 128 --width 96 --depth 4 --patch-size 4 --epochs 6 --compile off",
    "epoch": "", "epochs": 3, "text": "", "characters": 5_575_000,
}  # fmt: skip
TINY = {
    ViT: dict(patch_size=8, dim=24, depth=2, heads=3, pool="mean"), "batch": 16, "check_batch": 8,
    TransformerLM: dict(context=16, dim=24, depth=2, heads=3), "windows": 2, "check_windows": 2,
    "product": 128, "seconds": 0.05, "repeat": 1, "backend": "eager",
    "run": "--limit 256 --batch-size 64 --width 24 --depth 1 --heads 3 --patch-size 8 --epochs 5 --eval-every 5",
    "epoch": "--limit 64 --width 24 --depth 1 --heads 3 --patch-size 16", "epochs": 1,
    "text": "--width 24 --depth 1 --heads 3 --context 32 --batch-size 8", "characters": 3000,
}  # fmt: skip


class Bench:
    """A part's device and sizes, and what it has found."""

    def __init__(self, o: argparse.Namespace):
        self.part, self.out, self.data_dir = o.part, Path(o.out).resolve(), o.data_dir
        self.until = time.time() + o.seconds
        self.device, self.sizes, self.found = start.pick_device(o.device), TINY if o.tiny else FULL, {}
        self.precision = start.pick_precision("auto", self.device)

    def measure(self, name: str, call) -> None:
        """Note the figures that the call returns, or in one line why there are none."""
        try:
            figures = call()
        except (Exception, SystemExit) as error:  # whatever a machine that nobody has tried may raise
            figures = dict(error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        self.found[name] = figures
        note(self.out, self.part, name, **figures)

    def script(self, *words: str) -> None:
        """Run a script of this folder. Raises RuntimeError with the last line that it wrote if it fails.

        Ctrl-C is the script's, which saves a checkpoint; then it ends this process too.
        """
        command = [sys.executable, *words]
        before = signal.signal(signal.SIGINT, lambda *_: None)
        done = subprocess.run(command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)
        if done.returncode == 130:
            raise KeyboardInterrupt
        if done.returncode:
            last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
            raise RuntimeError(f"{words[0]} ended with status {done.returncode}: {last}")


def note(out: Path, part: str, name: str, **figures) -> None:
    with open(out / "measurements.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(dict(part=part, name=name, **figures), ensure_ascii=False) + "\n")
    with contextlib.suppress(OSError):  # nobody reads any more
        print(f"{part}  {name}: {in_words(figures)}", flush=True)


def in_words(figures: dict) -> str:
    words = {True: "yes", False: "NO"}

    def text(value) -> str:
        if isinstance(value, bool) or not isinstance(value, float):
            return words.get(value, str(value)) if isinstance(value, bool) else str(value)
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    return ", ".join(f"{key.replace('_', ' ')} {text(value)}" for key, value in figures.items())


# ---- epoch


def epoch(b: Bench):
    yield "train_cifar.py, an epoch of CIFAR-10's size", partial(image_epoch, b)
    yield "train_lm.py, an epoch of Penn Treebank's size", partial(text_epoch, b)
    found = zip(("train_cifar.py", "train_lm.py"), b.found.values())
    minutes = {script: 100 * f["seconds"] / 60 for script, f in found if "seconds" in f}  # of the paper's 100 epochs
    for name, table in reproduce.TABLES.items():
        for row in table.rows if table.script in minutes else ():
            yield f"{name}: {row.label}", partial(row_minutes, table, row, minutes[table.script])


def image_epoch(b: Bench) -> dict:
    """Of real images if they are here; else line drawings, 10 000 and 2 000, five times. The first only warms up."""
    real = is_available("cifar10", b.data_dir) and b.sizes is FULL
    times, data = (1, f"cifar10 --data-dir {b.data_dir}") if real else (5, "shapes")
    epochs = b.sizes["epochs"]
    flags = f"--init default --device {b.device} --epochs {(1 + epochs) * times} {b.sizes['epoch']} --dataset {data}"
    with tempfile.TemporaryDirectory() as out:
        b.script("train_cifar.py", *flags.split(), "--out", out)
        ends = [record["seconds"] for record in read_log(out) if "epoch" in record]
    return dict(seconds=(ends[-1] - ends[times - 1]) / epochs, dataset=data.split()[0])


def text_epoch(b: Bench) -> dict:
    """Of random characters, as many as Penn Treebank has; as above without the first."""
    epochs, count = b.sizes["epochs"], b.sizes["characters"]
    with tempfile.TemporaryDirectory() as out:
        file = Path(out) / "text"
        file.write_text("".join(random.Random(0).choices(string.ascii_letters[:49] + "\n", k=count)), encoding="utf-8")
        flags = f"--text {file} --init default --device {b.device} --epochs {1 + epochs} {b.sizes['text']} --out {out}"
        b.script("train_lm.py", *flags.split())
        ends = [record["seconds"] for record in read_log(out) if "epoch" in record]
    return dict(seconds=(ends[-1] - ends[0]) / epochs)


def read_log(out: str) -> list[dict]:
    return records.read_log(Path(out) / "default-seed0" / "log.jsonl")


def row_minutes(table, row, recipe: float) -> dict:
    """A rough estimate for a run, by the products of its layers: small models wait for launches, and variants of
    attention, which are not fused, move more bytes.
    """

    def cost(flags: str) -> float:
        s = reproduce.settings_of([table.script, *flags.split()])
        items, _, *types = EPOCHS[s.dataset]
        if not types:
            return items * reproduce.work(vars(s))
        return items / s.context * reproduce.work(vars(s)) + s.epochs * items * s.width * types[0]

    return dict(estimated_minutes=recipe * cost(f"{table.full} {row.flags}") / cost(""))


# ---- rows


def rows(b: Bench):
    if not is_available("cifar10", b.data_dir):
        yield f"CIFAR-10 is not in {b.data_dir}", partial(dict, left_out="all rows")
        return
    estimates = {name: f.get("estimated_minutes") for (_, name), f in read_notes(b.out).items()}
    ordered = sorted(reproduce.TABLES["sizes"].rows, key=lambda row: row.label != "width 192, depth 12, heads 3")
    for row in ordered:
        left = (b.until - time.time()) / 60
        need = estimates.get(f"sizes: {row.label}") or left  # one run; unknown: try it
        if need > left:
            yield row.label, partial(dict, left_out=f"{need:.0f} minutes a run, {left:.0f} left")
        else:
            yield row.label, partial(full_row, b, row, left)


def full_row(b: Bench, row, left: float) -> dict:
    """Its runs go on from their checkpoints where this was cut short before."""
    folder, flags = b.out / "runs", f"--data-dir {b.data_dir} --device {b.device} {b.sizes['epoch']}"
    words = f"sizes --scale full --rows {reproduce.slug(row.label)} --budget {left}".split()
    b.script("reproduce.py", *words, "--runs", str(folder), f"--flags={flags}")
    files = {init: reproduce.run_folder("sizes", row, init, 0, "full", folder) / "result.json" for init in row.paper}
    results = {init: records.read_result(file) for init, file in files.items() if file.exists()}
    return {f"{init}_{key}": r[key] for init, r in results.items() for key in ("test_acc", "seconds")}


# ---- the program

PARTS = dict(check=(checks, 3), speed=(speed, 4), peers=(peers, 2), epoch=(epoch, 4), rows=(rows, math.inf))  # minutes


def read_notes(out: Path) -> dict[tuple[str, str], dict]:
    """The figures of each measurement, by part and name: of an earlier and a later one, the later."""
    notes = records.read_log(out / "measurements.jsonl")
    return {(r.pop("part"), r.pop("name")): r for r in notes}


def summary(notes: dict[tuple[str, str], dict]) -> str:
    lines = ["| part | what | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {part} | {name} | {in_words(f)} |" for (part, name), f in notes.items())]) + "\n"


def run_part(o: argparse.Namespace) -> None:
    b = Bench(o)
    note(b.out, b.part, "machine", device=records.describe(b.device, b.precision), cuda=torch.version.cuda)
    for name, call in PARTS[b.part][0](b):
        b.measure(name, call)


def start_part(part: str, argv: list[str], out: Path, seconds: float) -> None:
    """Run a part as a process of its own; note what ends it early. Ctrl-C ends it with the program."""
    if seconds < 1:
        return note(out, part, "part", left_out="no time is left of --budget")
    command = [sys.executable, str(HERE / "bench.py"), "gpu", *argv, "--part", part, "--seconds", str(seconds)]
    with open(out / f"{part}.err", "w+", encoding="utf-8") as errors:
        child = subprocess.Popen(command, stderr=errors, start_new_session=True)
        try:
            if code := child.wait(seconds):
                errors.seek(0)
                last = (errors.read().strip() or "it says nothing").splitlines()[-1]
                note(out, part, "part", error=f"ended with status {code}: {last}")
        except subprocess.TimeoutExpired:
            note(out, part, "part", error=f"stopped after {seconds:.0f} s")
        finally:
            stop(child)


def stop(child: subprocess.Popen) -> None:
    """With all that it started: first as by Ctrl-C, which lets a training run save a checkpoint."""
    for number, wait in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, number)
            child.wait(wait)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "bench.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)} [all]")
    parser.add_argument("--budget", type=float, default=15, help="minutes in all [15]")
    parser.add_argument("--out", default="runs/gpu", help="folder of what is measured [runs/gpu]")
    parser.add_argument("--data-dir", default="data", help="where CIFAR-10 lies; nothing is downloaded [data]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="sizes cut down, for a rehearsal")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # for start_part
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    o = parser.parse_args(argv)
    if o.part:
        return run_part(o)
    parts, out, started = o.parts.split(","), Path(o.out), time.time()
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()}; they are {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    try:
        for part in parts:
            start_part(part, argv, out, min(60 * PARTS[part][1], 60 * o.budget - (time.time() - started)))
    finally:
        notes = read_notes(out)
        (out / "summary.md").write_text(summary(notes), encoding="utf-8")
    sys.exit(any(f.get("ok") is False or "error" in f for f in notes.values()))
