"""What a training step must read, write, multiply and launch on a GPU, counted without one.

python bench.py roofline       train_cifar.py and train_lm.py at the paper's sizes, as they are in this folder: minutes
python bench.py roofline TABLE a row for each full row of that table of reproduce.py

The scripts' own main() runs for two short epochs on a GPU of paper (paper_gpu.py), on which the code takes its CUDA
path: bf16 autocast by CUDA's lists, the fused attention, the fused optimizer. Every operation of the second epoch is
counted, below autograd.

- Bytes: every input once, every output once; of a table that is looked up, only what is fetched. Views move nothing.
- Flops: two per multiply-add of the products; attention, fused, 4 N² K per head forward and 2.5 times that backward.
- Launches: one per operation, or as KERNELS says; lists of tensors as torch's multi-tensor kernels split them.
- Waits: blocking copies between host and GPU, and values that the host reads.
- Time: an operation takes the GPU as long as its bytes or its products, whichever is longer; a launch takes the host
  5 µs. Between two waits host and GPU work side by side, so that the slower one counts; stretches add up.
- Compiled, an estimate: in forward and backward, all that lies between two products reads and writes only what comes
  from outside and is used outside, with one launch for each size of tensor that it goes over.

All this bounds a step from below: no kernel reaches the peak. What caches save is left out.
"""

import contextlib
import importlib
import io
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.paper_gpu import TRAINED, Op, paper_gpu

BANDWIDTH, PRODUCTS, LAUNCH = 3.9e12, 600e12, 5e-6  # bytes and flops a second that an H200 reaches; seconds


def count(script: str, flags: str, steps: int) -> list[Op]:
    """What main() of a training script does on the GPU after its first epoch, which has `steps` steps."""
    main = importlib.import_module(script).main
    with paper_gpu(steps) as recorder, contextlib.redirect_stdout(io.StringIO()):
        main([*flags.split(), "--init", "default", "--epochs", "2", "--device", "cuda", "--precision", "bf16"])
    return recorder.ops


# ---- from counts to seconds


def gpu_seconds(op: Op) -> float:
    return max(op.bytes / BANDWIDTH, op.flop / PRODUCTS)


def fuse(ops: list[Op]) -> list[Op]:
    """What torch.compile may make of them, by the rule above."""
    last_read = {key: i for i, op in enumerate(ops) for key in op.reads}
    result, group = [], []

    def close(end: int) -> None:
        reads, made = {}, {}
        for op in group:
            for key in op.reads.keys() - made.keys():
                reads[key] = max(op.reads[key], reads.get(key, 0))
            made |= op.writes
        writes = {key: moved for key, moved in made.items() if last_read.get(key, -1) >= end}
        if group:
            launches = len({op.size for op in group})
            result.append(group[0]._replace(name="fused", launches=launches, reads=reads, writes=writes))
        group.clear()

    for i, op in enumerate(ops):
        if op.phase == TRAINED and not (op.flop or op.waits):
            group.append(op)
        else:
            close(i)
            result.append(op)
    close(len(ops))
    return result


def seconds(ops: list[Op]) -> float:
    """Host and GPU side by side between two waits."""
    total = host = gpu = 0.0
    for op in ops:
        host, gpu = host + op.launches * LAUNCH, gpu + gpu_seconds(op)
        if op.waits:
            total, host, gpu = total + max(host, gpu), 0.0, 0.0
    return total + max(host, gpu)


# What an epoch goes over: training items, evaluated ones (images or tokens), and types of text.
EPOCHS = {
    "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "svhn": (73_257, 26_032),
    "tiny-imagenet": (100_000, 10_000), "ptb-char": (5_017_482, 393_042, 50), "ptb-word": (929_589, 73_760, 10_000),
    "wikitext-103": (103_227_021, 217_646, 267_735),
}  # fmt: skip


class Run(NamedTuple):
    """The operations of a script's second epoch, and what it takes to make them a whole run's."""

    ops: list[Op]
    steps: int  # of the epoch that was counted
    evaluations: float  # how many of a real epoch's evaluations were
    real_steps: int  # of all epochs of the full run
    epochs: int

    def fused(self) -> "Run":
        return self._replace(ops=fuse(self.ops))

    def training(self) -> list[Op]:
        return [op for op in self.ops if op.step < 2 * self.steps and op.phase != "evaluation"]

    def step_seconds(self) -> float:
        return seconds(self.training()) / self.steps

    def minutes(self) -> float:
        evaluation = seconds([op for op in self.ops if op.phase == "evaluation"]) / self.evaluations
        return (self.real_steps * self.step_seconds() + self.epochs * evaluation) / 60


def count_run(script: str, flags: str, steps: int) -> Run:
    """Count a run on a cut of line drawings or random text that is as large as `steps` steps."""
    module = importlib.import_module(script)
    s = module.settings(flags.split())
    items, evaluated, *types = EPOCHS[s.dataset]
    preset = module.PRESETS.get(s.dataset, {}).items()
    flags = " ".join([*(f"--{name.replace('_', '-')} {value}" for name, value in preset), flags])
    if not types:
        size = "--image-size 64" if s.dataset == "tiny-imagenet" else ""
        data = f"--dataset shapes --limit {steps * s.batch_size} {size}"
        ops = count(script, f"{flags} {data}", steps)
        return Run(ops, steps, 2 * 2000 / evaluated, s.epochs * -(-items // s.batch_size), s.epochs)
    tokens = s.batch_size * s.context
    steps = max(steps, -(-types[0] // tokens) + 1)  # so that training sees every type
    held = -(-steps * tokens // 18) + 1  # a twentieth, of both validation and test
    alphabet = ["\n", *map(chr, range(0x10000, 0x10000 + types[0] - 1))]
    text = alphabet + random.Random(0).choices(alphabet, k=20 * held - len(alphabet) - 1) + ["\n"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_text("".join(text), encoding="utf-8")
        ops = count(script, f"{flags} --text {file}", steps)
    return Run(ops, steps, 3 * held / evaluated, s.epochs * -(-items // tokens), s.epochs)


# ---- tables


def print_phases(run: Run) -> None:
    """A row for each phase of a step, then its time and that of the whole run."""
    print("| | launches | waits | GB | TFLOP | host ms | GPU ms |\n|---|---|---|---|---|---|---|")
    training = run.training()
    for name in [*dict.fromkeys(op.phase for op in training), "a step"]:
        own = [op for op in training if name in (op.phase, "a step")]
        figures = ((op.launches, op.waits, op.bytes, op.flop, gpu_seconds(op)) for op in own)
        launches, waits, moved, flop, gpu = (sum(values) / run.steps for values in zip(*figures))
        cells = f"{launches:,.0f} | {waits:.1f} | {moved / 1e9:.2f} | {flop / 1e12:.2f}"
        print(f"| {name} | {cells} | {1e3 * LAUNCH * launches:.2f} | {1e3 * gpu:.2f} |")
    step, minutes = 1e3 * run.step_seconds(), run.minutes()
    print(f"\n{step:.2f} ms a step; {run.epochs} epochs with evaluation: {minutes:.1f} minutes")


def print_longest(run: Run, n: int = 8) -> None:
    gpu, launches = Counter(), Counter()
    for op in run.training():
        gpu[op.name] += 1e3 * gpu_seconds(op) / run.steps
        launches[op.name] += op.launches / run.steps
    longest = (f"{name} {ms:.2f} ms in {launches[name]:.0f}" for name, ms in gpu.most_common(n))
    print(f"\nLongest on the GPU, with their launches: {', '.join(longest)}.\n")


def print_rows(name: str, steps: int = 4) -> None:
    import reproduce

    table = reproduce.TABLES[name]
    print(f"{table.about}\n\n| | eager, minutes | compiled, minutes |\n|---|---|---|")
    for row in table.rows:
        run = count_run(table.script.removesuffix(".py"), f"{table.full} {row.flags}", steps)
        print(f"| {row.label} | {run.minutes():.1f} | {run.fused().minutes():.1f} |", flush=True)


def main(argv: list[str], steps: int = 16) -> None:
    if argv:
        return print_rows(*argv)
    for title, script in (("ViT-Tiny/2 on CIFAR-10", "train_cifar"), ("Characters of Penn Treebank", "train_lm")):
        eager = count_run(script, "", steps)
        for kind, run in (("eager", eager), ("compiled, an estimate", eager.fused())):
            print(f"\n{title}, {kind}\n")
            print_phases(run)
        print_longest(eager)
