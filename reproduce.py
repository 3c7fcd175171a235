"""Every table of the paper as a list of runs, the paper's numbers beside ours.

python reproduce.py                                the tables, and how far each is
python reproduce.py ablations                      run what is missing at the small scale, print the table
python reproduce.py sizes --scale full --seeds 0,1,2
python reproduce.py ablations --rows full,structured --seeds 1,2     some rows, by the names of their folders
python reproduce.py sizes --dry-run                the commands, nothing run
python reproduce.py sizes --budget 60              start no run that would not end within 60 minutes
python reproduce.py sizes --collect                write what is finished to results/, as one line a run, beside the
                                                   lines of runs that are not on this machine
python reproduce.py runs/mine --collect            the same of a folder that a training script wrote
python reproduce.py --readme                       make the tables of README.md anew from results/

Runs lie in runs/TABLE/ROW/INIT-seedK/, those of the cpu scale in runs/TABLE-cpu/. A finished run is not run again, one
that was interrupted goes on from its checkpoint, so the same command continues where it stopped. A table
is of all finished runs, whatever their seeds. `full` is the paper's setting; `cpu` a declared smaller one, which two
CPU cores finish: it shows a tendency early in training, not where the paper's runs end.
"""

import argparse
import importlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import harness

from inits import VISION_INITS

HERE = Path(__file__).parent


class Row(NamedTuple):
    label: str
    flags: str  # for the script, beside those of the table
    paper: dict  # the paper's number for each init; None where it has none
    small: str = ""  # for the cpu scale, beside these, where it must differ from what the scale does to the table


class Table(NamedTuple):
    about: str
    script: str
    metric: str  # a key of result.json
    full: str  # flags of every row at the full scale
    cpu: str
    rows: list[Row]


def pair(default: float | None, mimetic: float | None) -> dict:
    return dict(default=default, mimetic=mimetic)


SMALL = "--limit 10000 --augment crop --batch-size 128 --lr 1e-3"
SMALL_IMAGES = f"{SMALL} --width 96 --depth 6 --epochs 8 --eval-every 8"  # the README's first small setting
SIZES = [
    (96, 6, 3, 84.75, 87.90), (96, 12, 3, 84.75, 88.84), (192, 6, 3, 85.85, 89.68), (192, 12, 1, 85.25, 89.88),
    (192, 12, 3, 86.07, 90.78), (192, 12, 6, 86.74, 91.38), (192, 24, 3, 86.36, 91.85), (384, 12, 3, 86.26, 91.56),
    (384, 12, 6, 84.40, 92.17), (384, 12, 12, 86.39, 92.30),
]  # fmt: skip
RESOLUTIONS = [
    (2, 32, 85.79, 90.46), (4, 64, 90.24, 92.38), (8, 128, 90.03, 92.49), (16, 256, 88.85, 92.74),
    (4, 32, 88.43, 90.47), (8, 64, 88.00, 90.96), (16, 128, 87.90, 91.90), (32, 256, 86.27, 90.15),
]  # fmt: skip
MIMETIC = "--init mimetic"
SMALL_TEXT = "--width 192 --depth 6 --heads 6 --context 256 --batch-size 32 --steps 600 --warmup 0.1667"
EITHER = pair(None, None)
WORDS = "--dataset ptb-word"
SHRINKING = [(1, 0.2), (1, 0.1), (2, 0.4), (2, 0.2), (2, 0.1)]  # γ and α₂ = β₂, beside the paper's (1, 0.4)
SCALES_OF_POSITIONS = [(0.5, None), (1, 90.8), (2, 91.4), (4, None)]  # the first and last are not in the paper

TABLES = {
    "sizes": Table(
        "CIFAR-10, width, depth, heads (cpu: width and depth halved, 5 000 images, 5 epochs)",
        "train_cifar.py", "test_acc", "",
        "--limit 5000 --augment crop --batch-size 64 --lr 1e-3 --epochs 5 --eval-every 5",
        [
            Row(f"width {w}, depth {d}, heads {h}", f"--width {w} --depth {d} --heads {h}", pair(a, b),
                f"--width {w // 2} --depth {d // 2}")
            for w, d, h, a, b in SIZES
        ],
    ),
    "depth": Table(
        "CIFAR-10, is it the shrinking of the residual stream that slows a deep model down?", "train_cifar.py",
        "test_acc", "", "--limit 5000 --augment crop --batch-size 64 --lr 1e-3 --epochs 5 --eval-every 5",
        [
            row
            for d, paper in ((24, pair(86.36, 91.85)), (12, pair(86.07, 90.78)))
            for row in (
                Row(f"depth {d}", f"--depth {d}", paper, f"--width 96 --depth {d // 2}"),
                Row(f"depth {d}, twice the learning rate", f"--depth {d} --lr 6e-3", dict(default=None),
                    f"--width 96 --depth {d // 2} --lr 2e-3"),
                *(
                    Row(f"depth {d}, γ = {g}, α₂ = β₂ = {b}", f"--depth {d} --pos-scale {g} --alpha2 {b} --beta2 {b}",
                        dict(mimetic=None), f"--width 96 --depth {d // 2}")
                    for g, b in SHRINKING
                ),
                Row(f"depth {d}, three times as long", f"--depth {d} --epochs 300", EITHER,
                    f"--width 96 --depth {d // 2} --epochs 15 --eval-every 3"),
            )
        ],
    ),
    "ablations": Table(
        "CIFAR-10, what each part gives (the paper says 3 heads; its full score is that of 6)", "train_cifar.py",
        "test_acc", "--heads 6", f"{SMALL_IMAGES} --heads 3",
        [
            Row("sinusoidal positions, default init", "--init default", dict(default=87.39)),
            Row("full", MIMETIC, dict(mimetic=91.38)),
            Row("learned positions", f"{MIMETIC} --pos learned", dict(mimetic=88.70)),
            Row("W_Q, W_K only", f"{MIMETIC} --parts qk", dict(mimetic=89.17)),
            Row("W_V, W_proj only", f"{MIMETIC} --parts vp", dict(mimetic=87.23)),
            Row("positive diagonal", f"{MIMETIC} --beta2 -0.4", dict(mimetic=89.65)),
            Row("control: scaled", "--init scaled", dict(scaled=None)),
            Row("control: orthogonal", "--init orthogonal", dict(orthogonal=None)),
            Row("structured", "--init structured", dict(structured=None)),
            Row("structured, closed form", "--init structured --method closed_form", dict(structured=None)),
            Row("GPSA, 8 heads", "--init default --attention gpsa --heads 8", dict(default=90.03)),
            Row("GPSA, 4 heads", "--init default --attention gpsa --heads 4", dict(default=90.83)),
            Row("GPSA, 4 heads, W_V, W_proj mimetic", f"{MIMETIC} --attention gpsa --heads 4 --parts vp",
                dict(mimetic=91.21)),
        ],
    ),
    "transfer": Table(
        "CIFAR-10 from ImageNet-pretrained attention and positions (--flags '--transfer-from FILE', a ViT-Tiny's)",
        "train_cifar.py", "test_acc", "--transfer-from deit_tiny_patch16_224.pth",
        f"{SMALL} --epochs 8 --eval-every 8 --transfer-from deit_tiny_patch16_224.pth",
        [Row("ImageNet-pretrained", "--init transfer --pos learned", dict(transfer=91.15))],
    ),
    "convolution": Table(
        "CIFAR-10, convolution mixed into attention", "train_cifar.py", "test_acc", "--init default",
        f"{SMALL_IMAGES} --init default",
        [
            Row("vanilla", "", dict(default=88.1)),
            Row("inside the softmax", "--attention conv-inside", dict(default=87.5)),
            Row("beside the softmax", "--attention conv-outside", dict(default=89.9)),
            Row("softmax of it beside", "--attention conv-softmax", dict(default=75.0)),
        ],
    ),
    "pos-scale": Table(
        "CIFAR-10, scale of the positions (the paper's numbers are read off a figure)", "train_cifar.py", "test_acc",
        MIMETIC, f"{SMALL_IMAGES} {MIMETIC}",
        [Row(f"γ = {g}", f"--pos-scale {g}", dict(mimetic=p)) for g, p in SCALES_OF_POSITIONS],
    ),
    "resolutions": Table(
        "CIFAR-10 upsampled: patch @ image size", "train_cifar.py", "test_acc", "",
        f"{SMALL_IMAGES} --epochs 4 --eval-every 4",
        [Row(f"{p} @ {s}", f"--patch-size {p} --image-size {s}", pair(a, b)) for p, s, a, b in RESOLUTIONS],
    ),
    "datasets": Table(
        "other data sets", "train_cifar.py", "test_acc", "", SMALL_IMAGES,
        [
            Row("Tiny ImageNet", "--dataset tiny-imagenet", pair(45.24, 50.87)),
            Row("CIFAR-100", "--dataset cifar100", pair(60.94, 67.33)),
            Row("SVHN", "--dataset svhn", pair(96.40, 96.79)),
        ],
    ),
    "imagenet": Table(
        "ImageNet-1k (--flags '--data-dir ...'; several GPUs: the commands of --dry-run under torchrun)",
        "train_imagenet.py", "test_acc", "",
        "--image-size 64 --patch-size 8 --width 96 --depth 6 --epochs 2 --warmup-epochs 0.2",
        [
            Row("ViT-Tiny, resnet pipeline, batch 640", "--batch-size 640", pair(70.28, 73.08)),
            Row("ViT-Tiny, resnet pipeline, batch 1024", "--batch-size 1024", pair(67.80, 71.92)),
            Row("ViT-Tiny, DeiT pipeline", "--pipeline deit", pair(72.08, 72.65)),
            Row("ViT-Small, DeiT pipeline", "--pipeline deit --width 384 --heads 6", pair(79.83, 80.36),
                "--width 192"),
        ],
    ),
    "language": Table(
        "Penn Treebank, bits per character (cpu: 600 steps of a smaller model)", "train_lm.py", "test_bpc", "",
        SMALL_TEXT,
        [Row("characters", "", pair(1.233, 1.210))],
    ),
    "signs": Table(
        "Penn Treebank by characters: a negative diagonal of W_V W_proj (β₂ > 0) or a positive one?", "train_lm.py",
        "test_bpc", "--init mimetic", f"{SMALL_TEXT} --init mimetic",
        [Row(f"β₂ = {b}", f"--beta2 {b}", dict(mimetic=None)) for b in (0.2, 0.0, -0.2)],
    ),
    "text-choices": Table(
        "Penn Treebank by characters: what the paper leaves open, one at a time (β₁I of rank k: which axes?)",
        "train_lm.py", "test_bpc", "", SMALL_TEXT,
        [
            Row("all as we chose", "", EITHER),
            Row("each head axes of its own", "--init own-axes", {"own-axes": None}),
            Row("each head a random basis", "--init random-axes", {"random-axes": None}),
            Row("positions, γ = 0.5", "--pos-scale 0.5", EITHER),
            Row("positions, γ = 2", "--pos-scale 2", EITHER),
            Row("embeddings as drawn, not times √width", "--embed-scale 1", EITHER),
            Row("embeddings times 50", "--embed-scale 50", EITHER),
        ],
    ),
    "words": Table(
        "Penn Treebank by words, perplexity", "train_lm.py", "test_ppl", WORDS,
        f"{WORDS} --width 192 --depth 6 --heads 6 --context 128 --batch-size 32 --steps 600",
        [Row("words", "", pair(84.84, 82.34))],
    ),
    "wikitext": Table(
        "WikiText-103, perplexity", "train_lm.py", "test_ppl",
        "--dataset wikitext-103",
        "--dataset wikitext-103 --width 80 --depth 4 --heads 4 --context 128 --steps 300",
        [Row("WikiText-103", "", pair(28.87, 28.21))],
    ),
}  # fmt: skip


# ---- runs


def slug(label: str) -> str:
    return re.sub(r"[^a-z0-9γ]+", "-", label.lower().replace("= -", "minus ")).strip("-")


def name_at(table: str, scale: str) -> str:
    return table if scale == "full" else f"{table}-{scale}"


def run_folder(table: str, row: Row, init: str, seed: int, scale: str, runs: Path) -> Path:
    return runs / name_at(table, scale) / slug(row.label) / f"{init}-seed{seed}"


def command(table: str, row: Row, init: str, seed: int, scale: str, runs: Path, extra: list[str]) -> list[str]:
    """The table's flags, the row's, the row's at this scale, the user's, then what names the run; of two, the later."""
    flags = [getattr(TABLES[table], scale), row.flags, row.small if scale == "cpu" else ""]
    out = run_folder(table, row, init, seed, scale, runs).parent
    named = ["--init", init, "--seeds", str(seed), "--out", str(out), "--resume"]
    values: list[str] = []  # of the flag at hand; those before any are for the script to refuse
    last = {"": values}
    for word in [*shlex.split(" ".join(flags)), *extra, *named]:
        if word.startswith("--"):
            name, *value = word.split("=", 1)
            values = last[name] = [name, *value]
        else:
            values.append(word)
    return [TABLES[table].script, *sum(last.values(), [])]


def rows_named(table: str, slugs: str) -> list[Row]:
    """The rows of these comma-separated slugs, all if there are none. Raises ValueError for one that is not there."""
    rows = {slug(row.label): row for row in TABLES[table].rows}
    for name in filter(None, slugs.split(",")):
        if name not in rows:
            raise ValueError(f"{table} has no row {name}{harness.near(name, rows)}; its rows are {', '.join(rows)}")
    return [row for name, row in rows.items() if not slugs or name in slugs.split(",")]


def all_runs(rows: list[Row], seeds: list[int]) -> list[tuple[Row, str, int]]:
    """Seed by seed, so that an early stop leaves whole comparisons."""
    return [(row, init, seed) for seed in seeds for row in rows for init in row.paper]


def result_of(folder: Path) -> dict | None:
    """The folder's result.json with the curve of its log, if it has one; None where the run is not finished."""
    if not (folder / "result.json").exists():
        return None
    try:
        result = harness.read_json(folder / "result.json")
    except ValueError as error:
        sys.exit(f"reproduce.py: {error}")
    curve = harness.curve(harness.read_log(folder / "log.jsonl"))
    return dict(result, curve=curve) if curve else result


def run_missing(
    table: str, rows: list[Row], seeds: list[int], scale: str, runs: Path, extra: list[str], budget: float, dry: bool
) -> None:
    """Run what is not finished; stop where the next would not end `budget` minutes from now (0: no limit)."""
    started = time.time()
    pressed = []  # Ctrl-C is the run's, which saves a checkpoint and ends with 130, or just ends, if it was about to
    for row, init, seed in all_runs(rows, seeds):
        folder = run_folder(table, row, init, seed, scale, runs)
        words = command(table, row, init, seed, scale, runs, extra)
        if result_of(folder):
            continue
        if dry:
            print("python", shlex.join(words))
            continue
        if budget and time.time() - started + (need := needed(folder, words)) > 60 * budget:
            print(f"stopped before {row.label}, {init}, seed {seed}: it takes about {need / 60:.0f} minutes.")
            return
        print(f"\n{row.label}, {init}, seed {seed}", flush=True)
        signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
        code = subprocess.run([sys.executable, *words], cwd=HERE).returncode or (130 if pressed else 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if code:
            sys.exit(code if code == 130 else f"reproduce.py: that run ended with status {code}; see above.")


def settings_of(words: list[str]):
    """What a command's script makes of its flags."""
    return importlib.import_module(words[0].removesuffix(".py")).settings(words[1:])


def needed(folder: Path, words: list[str]) -> float:
    """Seconds that a run will take, by the slowest finished one of its row, else of its table and their sizes."""
    same_row = [r for r in map(result_of, folder.parent.glob("*-seed*")) if r]
    others = [r for r in map(result_of, folder.parent.parent.glob("*/*-seed*")) if r]
    ours = work(vars(settings_of(words)))
    seconds = max((r["seconds"] * ours / work(r["config"]) for r in same_row or others), default=0)
    return 1.1 * seconds + 30  # it starts, loads data, and may test at its end


def work(config: dict) -> float:
    """What the time of a run grows with, roughly, among runs of a table: the products of its layers, each epoch."""
    side = config.get("image_size") or (64 if config["dataset"] == "tiny-imagenet" else 32)
    tokens = config.get("context") or (side // config["patch_size"]) ** 2
    return config["epochs"] * config["depth"] * tokens * config["width"] * (12 * config["width"] + 2 * tokens)


def check_settings(words: list[str], result: dict, folder: Path) -> None:
    """End the program where a finished run had other settings than its command asks for now."""
    if changes := harness.changed_settings(result["config"], settings_of(words)):
        sys.exit(f"reproduce.py: {folder} has other settings ({'; '.join(changes)}); delete it, or use --runs.")


# ---- tables


def has_paper(table: str) -> bool:
    """Whether the paper has numbers for this table."""
    return any(paper is not None for row in TABLES[table].rows for paper in row.paper.values())


def markdown(table: str, scales: dict[str, list[dict]]) -> str:
    """A row an init of each row of the table: of each scale mean ± deviation over seeds and n, and the paper's number.

    scales: the results of each, with the `row` that they belong to, under its title. A table of ours alone has no
    column for the paper.
    """
    rows, metric, papers = TABLES[table].rows, TABLES[table].metric, has_paper(table)
    titles = [*(f"{scale} | n" for scale in scales), *["the paper"] * papers]
    lines = [f"| | init | {' | '.join(titles)} |", "|---|---" + "|---|---" * len(scales) + "|---" * papers + "|"]
    for row in rows:
        for init, paper in row.paper.items():
            cells = [row.label, init]
            for results in scales.values():
                values = [r[metric] for r in results if (r["row"], r["init"]) == (row.label, init)]
                shown = harness.mean_and_deviation(values, harness.digits_of(metric)) if values else "not run yet"
                cells += [shown, str(len(values))]
            cells += ["" if paper is None else str(paper)] * papers
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def finished(table: str, scale: str, runs: Path, extra: list[str]) -> list[dict]:
    """The results of every finished run of a table, whatever its seed, with its row's label.

    Ends the program where one has other settings than its command with the flags `extra`: no table mixes them.
    """
    found = []
    for row in TABLES[table].rows:
        for file in sorted((runs / name_at(table, scale) / slug(row.label)).glob("*-seed*/result.json")):
            result = result_of(file.parent)
            words = command(table, row, result["init"], result["seed"], scale, runs, extra)
            check_settings(words, result, file.parent)
            found.append(dict(table=table, scale=scale, row=row.label, **result))
    return found


def status(runs: Path) -> str:
    lines = ["| table | what | cpu | full |", "|---|---|---|---|"]
    for name, table in TABLES.items():
        n = sum(len(row.paper) for row in table.rows)
        done = [len(list((runs / name_at(name, scale)).glob("*/*-seed*/result.json"))) for scale in ("cpu", "full")]
        lines.append(f"| {name} | {table.about} | {done[0]} runs, {n} a seed | {done[1]} runs |")
    return "\n".join(lines)


PATHS = ("data_dir", "out", "text", "transfer_from")  # settings that name files of one machine


def collect(name: str, here: list[dict], order: list[tuple[str, str]]) -> Path:
    """Write results to results/NAME.jsonl, a JSON line each, without paths of this machine.

    Lines that are there already stay, but for those of runs that are finished here. order: of (row, init).
    """
    file = HERE / "results" / f"{name}.jsonl"
    lines = {(r.get("row", ""), r["init"], r["seed"]): r for r in [*recorded(file.name), *here]}
    lines = {key: r for key, r in lines.items() if key[:2] in order}  # other rows were of an older table
    text = ""
    for key in sorted(lines, key=lambda key: (order.index(key[:2]), key[2])):
        kept = {k: v for k, v in lines[key]["config"].items() if k not in PATHS}
        text += json.dumps(dict(lines[key], config=kept), ensure_ascii=False) + "\n"
    harness.write_text(file, text)
    return file


def collect_table(table: str, scale: str, runs: Path, extra: list[str]) -> Path:
    """Collect a table's finished runs."""
    if not (here := finished(table, scale, runs, extra)):
        sys.exit(f"reproduce.py: no run of {table} at this scale is finished under {runs}.")
    return collect(name_at(table, scale), here, [(row.label, init) for row in TABLES[table].rows for init in row.paper])


def collect_folder(folder: Path) -> Path:
    """Collect the runs that a training script left in its --out; they must be of one setting."""
    here = [r for r in map(result_of, sorted(folder.glob("*-seed*"))) if r]
    if not here:
        sys.exit(f"reproduce.py: no run is finished in {folder}.")
    if folder.name.removesuffix("-cpu") in TABLES:
        sys.exit(f"reproduce.py: {folder.name} is the name of a table; give the folder of these runs another.")
    first = here[0]["config"]
    script = "train_lm" if "context" in first else "train_imagenet" if "pipeline" in first else "train_cifar"
    s = harness.settings_from(importlib.import_module(script).Settings, first)
    unknown = set().union(*(r["config"] for r in here)) - vars(s).keys()  # settings of another version
    for r in here:
        changes = harness.changed_settings(r["config"], s)
        changes += [name for name in sorted(unknown) if r["config"].get(name) != first.get(name)]
        if changes:
            sys.exit(f"reproduce.py: the runs in {folder} have several settings ({'; '.join(changes)}).")
    return collect(folder.name, here, [("", init) for init in VISION_INITS])


def recorded(name: str) -> list[dict]:
    """The runs in a file of results/; none where there is no such file."""
    file = HERE / "results" / name
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


# In README.md a table of these follows a line <!-- table: TABLE -->, and one of a single setting, a row an init, a line
# <!-- results: FILE KEY TITLE ... -->; FILE is one of results/.
MARKER = re.compile(r"(<!-- (results|table): ([^>]+) -->\n)((?:\|.*\n)*)")


def readme(text: str) -> str:
    """README.md with each marked table made anew from results/."""

    def made(match: re.Match) -> str:
        kind, words = match[2], shlex.split(match[3])
        if kind == "results":
            metrics = dict(zip(words[1::2], words[2::2], strict=True))
            return match[1] + harness.summary_table(recorded(words[0]), metrics) + "\n"
        small, full = (recorded(f"{name_at(words[0], scale)}.jsonl") for scale in ("cpu", "full"))
        scales = {"small scale": small, "full scale": full} if full or has_paper(words[0]) else {"ours": small}
        return match[1] + markdown(words[0], scales) + "\n"

    return MARKER.sub(made, text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", help=f"{', '.join(TABLES)}; with --collect also a folder of runs")
    parser.add_argument("--scale", choices=("cpu", "full"), default="cpu")
    parser.add_argument("--seeds", default="0", help="comma-separated [0]")
    parser.add_argument("--rows", default="", help="comma-separated rows, by the names of their folders [all]")
    parser.add_argument("--runs", default="runs", help="folder of the runs [runs]")
    parser.add_argument(
        "--flags", default="", help="for the script, in this folder: '--data-dir /data'; one word: --flags=--compile"
    )
    parser.add_argument("--budget", type=float, default=0, help="minutes")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--readme", action="store_true")
    s = parser.parse_args(argv)
    runs = Path(s.runs).resolve()
    if s.readme:
        file = HERE / "README.md"
        return harness.write_text(file, readme(file.read_text(encoding="utf-8")))
    if not s.table:
        return print(status(runs))
    if s.collect and s.table not in TABLES and Path(s.table).is_dir():
        return print(collect_folder(Path(s.table).resolve()))
    if s.table not in TABLES:
        parser.error(f"there is no table {s.table}{harness.near(s.table, TABLES)}; they are {', '.join(TABLES)}")
    extra = shlex.split(s.flags)
    if s.collect:
        return print(collect_table(s.table, s.scale, runs, extra))
    try:
        seeds = [int(seed) for seed in s.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds are whole numbers, separated by commas, not {s.seeds}")
    try:
        rows = rows_named(s.table, s.rows)
    except ValueError as error:
        parser.error(str(error))
    finished(s.table, s.scale, runs, extra)  # ends here where runs of other settings are in the way
    run_missing(s.table, rows, seeds, s.scale, runs, extra, s.budget, s.dry_run)
    if not s.dry_run:
        print("\n" + markdown(s.table, {"ours": finished(s.table, s.scale, runs, extra)}))


if __name__ == "__main__":
    harness.run(main)
