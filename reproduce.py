"""Every table of the paper as a list of runs, with the paper's numbers beside ours.

python reproduce.py                                list the tables, and how many of their runs are finished
python reproduce.py ablations                      run what is missing at the small scale, print the table
python reproduce.py sizes --scale full --seeds 0,1,2
python reproduce.py ablations --rows full,structured --seeds 1,2     some rows, by the names of their folders
python reproduce.py sizes --dry-run                print the commands, run nothing
python reproduce.py sizes --budget 60              start no run that would not end within 60 minutes
python reproduce.py sizes --collect                write what is finished to results/, one line per run, and keep the
                                                   lines of runs that are not on this machine
python reproduce.py runs/mine --collect            the same for a folder that a training script wrote
python reproduce.py --readme                       rewrite the tables of README.md and docs/ from results/

Runs are in runs/TABLE/ROW/INIT-seedK/, those of the cpu scale in runs/TABLE-cpu/. A finished run is not repeated and an
interrupted one continues from its checkpoint, so the same command continues where it stopped. A table shows all
finished runs, whatever their seeds. `full` is the paper's setting, `cpu` a stated smaller one, which two CPU cores can
finish: it shows a tendency early in training, not where the paper's runs end.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # under PYTHONSAFEPATH as well

from inits import VISION_INITS
from tables import TABLES, Row, has_paper, markdown, summary
from training import records
from training.flags import did_you_mean
from training.start import run_script

HERE = Path(__file__).parent


# ---- runs


def slug(label: str) -> str:
    return re.sub(r"[^a-z0-9γ]+", "-", label.lower().replace("= -", "minus ")).strip("-")


def name_at(table: str, scale: str) -> str:
    return table if scale == "full" else f"{table}-{scale}"


def run_folder(table: str, row: Row, init: str, seed: int, scale: str, runs: Path) -> Path:
    return runs / name_at(table, scale) / slug(row.label) / f"{init}-seed{seed}"


def command(table: str, row: Row, init: str, seed: int, scale: str, runs: Path, extra: list[str]) -> list[str]:
    """Flags of the table, the row, the row at this scale, the user, and the run's own; of repeated ones the last."""
    flags = [getattr(TABLES[table], scale), row.flags, row.small if scale == "cpu" else ""]
    out = run_folder(table, row, init, seed, scale, runs).parent
    named = ["--init", init, "--seeds", str(seed), "--out", str(out), "--resume"]
    values: list[str] = []  # of the current flag; the script refuses those before any flag
    last = {"": values}
    for word in [*shlex.split(" ".join(flags)), *extra, *named]:
        if word.startswith("--"):
            name, *value = word.split("=", 1)
            values = last[name] = [name, *value]
        else:
            values.append(word)
    return [TABLES[table].script, *sum(last.values(), [])]


def find_rows(table: str, slugs: str) -> list[Row]:
    """The rows with these comma-separated slugs; all if there are none. Raises ValueError for an unknown one."""
    rows = {slug(row.label): row for row in TABLES[table].rows}
    for name in filter(None, slugs.split(",")):
        if name not in rows:
            raise ValueError(f"{table} has no row {name}{did_you_mean(name, rows)}; its rows are {', '.join(rows)}")
    return [row for name, row in rows.items() if not slugs or name in slugs.split(",")]


def all_runs(rows: list[Row], seeds: list[int]) -> list[tuple[Row, str, int]]:
    """Seed by seed, so that an early stop leaves whole comparisons."""
    return [(row, init, seed) for seed in seeds for row in rows for init in row.paper]


def result_of(folder: Path) -> dict | None:
    """The folder's result.json with the curve of its log, if it has one; None if the run is not finished."""
    if not (folder / "result.json").exists():
        return None
    try:
        result = records.read_result(folder / "result.json")
    except ValueError as error:
        sys.exit(f"reproduce.py: {error}")
    curve = records.curve(records.read_log(folder / "log.jsonl"))
    return dict(result, curve=curve) if curve else result


def run_missing(
    table: str, rows: list[Row], seeds: list[int], scale: str, runs: Path, extra: list[str], budget: float, dry: bool
) -> None:
    """Run what is not finished; stop before a run that would not end within `budget` minutes from now (0: no limit)."""
    started = time.time()
    pressed = []  # Ctrl-C is for the run, which saves a checkpoint and ends with 130, or just ends if it was about to
    for row, init, seed in all_runs(rows, seeds):
        folder = run_folder(table, row, init, seed, scale, runs)
        words = command(table, row, init, seed, scale, runs, extra)
        if result_of(folder):
            continue
        if dry:
            print("python", shlex.join(words))
            continue
        if budget and time.time() - started + (need := estimate_seconds(folder, words)) > 60 * budget:
            print(f"stopped before {row.label}, {init}, seed {seed}: it takes about {need / 60:.0f} minutes.")
            return
        print(f"\n{row.label}, {init}, seed {seed}", flush=True)
        signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
        code = subprocess.run([sys.executable, *words], cwd=HERE).returncode or (130 if pressed else 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if code:
            sys.exit(code if code == 130 else f"reproduce.py: that run ended with status {code}; see above.")


def settings_of(words: list[str]):
    """The settings that a command's script makes of its flags."""
    return importlib.import_module(words[0].removesuffix(".py")).settings(words[1:])


def estimate_seconds(folder: Path, words: list[str]) -> float:
    """Seconds that a run will take, judging by the slowest finished one of its row, or else by its table and sizes."""
    same_row = [r for r in map(result_of, folder.parent.glob("*-seed*")) if r]
    others = [r for r in map(result_of, folder.parent.parent.glob("*/*-seed*")) if r]
    ours = work(vars(settings_of(words)))
    seconds = max((r["seconds"] * ours / work(r["config"]) for r in same_row or others), default=0)
    return 1.1 * seconds + 30  # for starting, loading data, and perhaps a test at the end


def work(config: dict) -> float:
    """Roughly proportional to a run's time, among runs of a table: the products of its layers over all epochs."""
    side = config.get("image_size") or (64 if config["dataset"] == "tiny-imagenet" else 32)
    tokens = config.get("context") or (side // config["patch_size"]) ** 2
    return config["epochs"] * config["depth"] * tokens * config["width"] * (12 * config["width"] + 2 * tokens)


def check_settings(words: list[str], result: dict, folder: Path) -> None:
    """End the program if a finished run had other settings than its command asks for now."""
    if changes := records.diff_settings(result["config"], settings_of(words)):
        sys.exit(f"reproduce.py: {folder} has other settings ({'; '.join(changes)}); delete it, or use --runs.")


# ---- tables


def finished_runs(table: str, scale: str, runs: Path, extra: list[str]) -> list[dict]:
    """The results of every finished run of a table, whatever its seed, with its row's label.

    Ends the program if one has other settings than its command with the flags `extra`: no table mixes settings.
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
        lines.append(f"| {name} | {table.about} | {done[0]} runs, {n} per seed | {done[1]} runs |")
    return "\n".join(lines)


PATHS = ("data_dir", "out", "text", "transfer_from")  # settings that name files of one machine


def collect(name: str, here: list[dict], order: list[tuple[str, str]]) -> Path:
    """Write results to results/NAME.jsonl, one JSON line each, without paths of this machine.

    Lines that are already there stay, unless their run is finished here. order: the order of (row, init).
    """
    file = HERE / "results" / f"{name}.jsonl"
    lines = {(r.get("row", ""), r["init"], r["seed"]): r for r in [*read_recorded(file.name), *here]}
    lines = {key: r for key, r in lines.items() if key[:2] in order}  # other rows belong to an older table
    text = ""
    for key in sorted(lines, key=lambda key: (order.index(key[:2]), key[2])):
        kept = {k: v for k, v in lines[key]["config"].items() if k not in PATHS}
        text += json.dumps(dict(lines[key], config=kept), ensure_ascii=False) + "\n"
    records.write_text(file, text)
    return file


def collect_table(table: str, scale: str, runs: Path, extra: list[str]) -> Path:
    """Collect a table's finished runs."""
    if not (here := finished_runs(table, scale, runs, extra)):
        sys.exit(f"reproduce.py: no run of {table} at this scale is finished under {runs}.")
    return collect(name_at(table, scale), here, [(row.label, init) for row in TABLES[table].rows for init in row.paper])


def collect_folder(folder: Path) -> Path:
    """Collect the runs that a training script left in its --out; they must have the same settings."""
    here = [r for r in map(result_of, sorted(folder.glob("*-seed*"))) if r]
    if not here:
        sys.exit(f"reproduce.py: no run is finished in {folder}.")
    if folder.name.removesuffix("-cpu") in TABLES:
        sys.exit(f"reproduce.py: {folder.name} is the name of a table; give the folder of these runs another.")
    first = here[0]["config"]
    script = "train_lm" if "context" in first else "train_imagenet" if "pipeline" in first else "train_cifar"
    s = records.restore_settings(importlib.import_module(script).Settings, first)
    unknown = set().union(*(r["config"] for r in here)) - vars(s).keys()  # settings that another version had
    for r in here:
        changes = records.diff_settings(r["config"], s)
        changes += [name for name in sorted(unknown) if r["config"].get(name) != first.get(name)]
        if changes:
            sys.exit(f"reproduce.py: the runs in {folder} have several settings ({'; '.join(changes)}).")
    return collect(folder.name, here, [("", init) for init in VISION_INITS])


def read_recorded(name: str) -> list[dict]:
    """The runs in a file of results/; none if there is no such file."""
    file = HERE / "results" / name
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


# In a Markdown file, the line <!-- table: TABLE --> comes before a table of these, and the line
# <!-- results: FILE KEY TITLE ... --> before that of a single setting, with a row per init; FILE is in results/.
MARKER = re.compile(r"(<!-- (results|table): ([^>]+) -->\n)((?:\|.*\n)*)")


def update_tables(text: str) -> str:
    """A Markdown text with each marked table rewritten from results/."""

    def made(match: re.Match) -> str:
        kind, words = match[2], shlex.split(match[3])
        if kind == "results":
            metrics = dict(zip(words[1::2], words[2::2], strict=True))
            return match[1] + summary(read_recorded(words[0]), metrics) + "\n"
        small, full = (read_recorded(f"{name_at(words[0], scale)}.jsonl") for scale in ("cpu", "full"))
        scales = {"small scale" if full or has_paper(words[0]) else "ours": small}
        scales |= {"full scale": full} if full else {}
        return match[1] + markdown(words[0], scales, only_run=True) + "\n"

    return MARKER.sub(made, text)


def update_pages() -> None:
    """Rewrite the tables of README.md and of each page in docs/."""
    for page in [HERE / "README.md", *(HERE / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        if (new := update_tables(text)) != text:
            records.write_text(page, new)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", help=f"{', '.join(TABLES)}; with --collect also a folder of runs")
    parser.add_argument("--scale", choices=("cpu", "full"), default="cpu", help="cpu: small; full: the paper's [cpu]")
    parser.add_argument("--seeds", default="0", help="comma-separated [0]")
    parser.add_argument("--rows", default="", help="comma-separated rows, by the names of their folders [all]")
    parser.add_argument("--runs", default="runs", help="folder of the runs [runs]")
    parser.add_argument(
        "--flags", default="", help="more flags for the script: '--data-dir /data'; a single one: --flags=--compile"
    )
    parser.add_argument("--budget", type=float, default=0, help="start no run that would not end in N minutes; 0: any")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--collect", action="store_true", help="write finished runs to results/")
    parser.add_argument("--readme", action="store_true", help="rewrite the tables of README.md and docs/")
    s = parser.parse_args(argv)
    runs = Path(s.runs).resolve()
    if s.readme:
        return update_pages()
    if not s.table:
        return print(status(runs))
    if s.collect and s.table not in TABLES and Path(s.table).is_dir():
        return print(collect_folder(Path(s.table).resolve()))
    if s.table not in TABLES:
        parser.error(f"there is no table {s.table}{did_you_mean(s.table, TABLES)}; they are {', '.join(TABLES)}")
    extra = shlex.split(s.flags)
    if s.collect:
        return print(collect_table(s.table, s.scale, runs, extra))
    try:
        seeds = [int(seed) for seed in s.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds takes whole numbers, separated by commas, not {s.seeds}")
    try:
        rows = find_rows(s.table, s.rows)
    except ValueError as error:
        parser.error(str(error))
    finished_runs(s.table, s.scale, runs, extra)  # ends here if runs with other settings are in the way
    run_missing(s.table, rows, seeds, s.scale, runs, extra, s.budget, s.dry_run)
    if not s.dry_run:
        print("\n" + markdown(s.table, {"ours": finished_runs(s.table, s.scale, runs, extra)}))


if __name__ == "__main__":
    run_script(main)
