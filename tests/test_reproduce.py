"""The paper's tables: their commands, what is run and what is not, and the README's tables against results/."""

import dataclasses
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import reproduce
import tables
import train_cifar
import train_imagenet
import train_lm
from official_formats import write_cifar10, write_ptb
from tables import TABLES, Row, Table
from training import records
from training.flags import parse_settings

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"train_cifar.py": train_cifar, "train_lm.py": train_lm, "train_imagenet.py": train_imagenet}
TINY = (
    "--width 24 --depth 1 --heads 2 --patch-size 8 --epochs 1 --limit 20 --dataset shapes --batch-size 10 --device cpu"
)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("scale", ["cpu", "full"])
def test_every_row_is_a_command_that_its_script_takes(table, scale):
    for row, init, seed in reproduce.all_runs(TABLES[table].rows, [0, 1]):
        script, *flags = reproduce.command(table, row, init, seed, scale, Path("runs"), [])
        s = SCRIPTS[script].settings(flags)
        assert s.init == (init,) and s.seeds == (seed,) and s.resume
        if script == "train_cifar.py":
            assert s.width % s.heads == 0 and (s.image_size or 32) % s.patch_size == 0


def test_the_cpu_scale_of_sizes_halves_width_and_depth_and_seeds_come_one_after_the_other():
    words = reproduce.command("sizes", TABLES["sizes"].rows[0], "default", 0, "cpu", Path("runs"), [])
    s = train_cifar.settings(words[1:])
    assert (s.width, s.depth, s.limit) == (48, 3, 5000)
    rows = TABLES["signs"].rows
    assert [(row, seed) for row, _, seed in reproduce.all_runs(rows, [0, 1])] == [(r, k) for k in (0, 1) for r in rows]


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_a_folder_of_its_own(table):
    labels = [row.label for row in TABLES[table].rows]
    assert len({reproduce.slug(label) for label in labels}) == len(labels)


def test_full_scale_is_the_papers_recipe():
    row = TABLES["sizes"].rows[4]
    s = parse_settings(
        train_cifar.Settings, reproduce.command("sizes", row, "mimetic", 0, "full", Path("runs"), [])[1:], "", {}
    )
    assert row.paper == dict(default=86.07, mimetic=90.78)
    assert (s.width, s.depth, s.heads, s.patch_size) == (192, 12, 3, 2)
    assert (s.epochs, s.batch_size, s.lr, s.weight_decay, s.augment, s.limit) == (
        100,
        512,
        3e-3,
        0.01,
        "randaugment",
        0,
    )


@pytest.fixture
def small(monkeypatch):
    rows = [Row("one layer", "", dict(default=50.0, mimetic=None)), Row("two", "--depth 2", dict(default=60.0))]
    table = Table("small", "train_cifar.py", "test_acc", TINY, TINY, rows)
    monkeypatch.setitem(TABLES, "small", table)


def test_runs_what_is_missing_and_nothing_twice(small, tmp_path, capfd, monkeypatch):
    flags = ["small", "--runs", str(tmp_path), "--scale", "full"]
    reproduce.main([*flags, "--dry-run"])
    commands = capfd.readouterr().out.splitlines()
    assert len(commands) == 3 and all(line.startswith("python train_cifar.py") for line in commands)
    assert not list(tmp_path.iterdir())
    reproduce.main(flags)
    table = capfd.readouterr().out.splitlines()[-5:]
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("small/*/*/result.json"))]
    assert [folder.name for folder in sorted((tmp_path / "small").iterdir())] == ["one-layer", "two"]
    assert len(results) == 3 and table[2].startswith("| one layer | default | ") and table[2].endswith("| 1 | 50.0 |")
    monkeypatch.setattr("subprocess.run", None)  # nothing is left to run
    reproduce.main(flags)
    assert capfd.readouterr().out.splitlines()[-5:] == table
    reproduce.main(["--runs", str(tmp_path)])
    assert "| small | small | 0 runs, 3 per seed | 3 runs |" in capfd.readouterr().out


CUT = "--width 24 --depth 1 --batch-size 10 --device cpu "
CUT_IMAGES = CUT + "--limit 20 --epochs 1 --patch-size 8"
CUT_TEXT = CUT + "--heads 2 --context 8 --steps 1"


@pytest.mark.parametrize("table", ["sizes", "ablations", "convolution", "pos-scale", "language", "words"])
def test_the_full_scale_cut_down_in_size_runs_to_its_table(table, tmp_path, monkeypatch, capsys):
    lines = " the cat sat on the mat \n the dog <unk> on the log \n" * 9
    write_ptb(tmp_path, monkeypatch, lines, lines, lines)
    write_cifar10(tmp_path)
    cut = {"train_cifar.py": CUT_IMAGES, "train_lm.py": CUT_TEXT}[TABLES[table].script]

    def in_this_process(words, **_):
        SCRIPTS[words[1]].main(words[2:])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(records, "commit", lambda: "")  # which asks git in a process of its own
    monkeypatch.setattr(subprocess, "run", in_this_process)
    flags = ["--scale", "full", "--runs", str(tmp_path / "runs"), "--flags", f"{cut} --data-dir {tmp_path}"]
    reproduce.main([table, *flags])
    lines = capsys.readouterr().out.splitlines()
    rows = [(row.label, init, paper) for row in TABLES[table].rows for init, paper in row.paper.items()]
    for line, (label, init, paper) in zip(lines[-len(rows) :], rows, strict=True):
        assert line.startswith(f"| {label} | {init} | ") and line.endswith(f" | 1 | {'' if paper is None else paper} |")
        assert "not run" not in line


def test_rows_are_chosen_by_the_names_of_their_folders(small, tmp_path, capsys):
    reproduce.main(["small", "--runs", str(tmp_path), "--rows", "two", "--seeds", "1,2", "--dry-run"])
    assert [line.split("--seeds ")[1][0] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]
    with pytest.raises(SystemExit):
        reproduce.main(["small", "--runs", str(tmp_path), "--rows", "two,tree"])
    assert "small has no row tree; its rows are one-layer, two" in capsys.readouterr().err


def test_collected_results_join_those_of_other_machines(small, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    result(tmp_path / "there", "two", seed=1, test_acc=50.0)
    result(tmp_path / "there", "two", seed=0, test_acc=51.0)
    result(tmp_path / "here", "one-layer", seed=0, test_acc=52.0)
    result(tmp_path / "here", "two", seed=0, test_acc=53.0)
    for machine in ("there", "here"):
        file = reproduce.collect_table("small", "full", tmp_path / machine, [])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["test_acc"] for line in lines] == [52.0, 53.0, 50.0]
    assert not any({"data_dir", "out", "text", "transfer_from"} & line["config"].keys() for line in lines)


def test_a_folder_of_runs_is_collected_under_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    train_cifar.main([*TINY.split(), "--init", "mimetic,default", "--out", str(tmp_path / "tiny")])
    reproduce.main([str(tmp_path / "tiny"), "--collect"])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "results" / "tiny.jsonl")
    default, mimetic = reproduce.read_recorded("tiny.jsonl")
    assert (default["init"], mimetic["init"]) == ("default", "mimetic")
    assert mimetic["curve"] == [[1, mimetic["test_acc"]]] and "out" not in mimetic["config"]
    for value in (1, 2):  # of a setting of another version
        for run in (default, mimetic):
            run["config"]["gone"] = value if run is mimetic else 1
            (tmp_path / "tiny" / f"{run['init']}-seed0" / "result.json").write_text(json.dumps(run))
        if value == 1:
            reproduce.main([str(tmp_path / "tiny"), "--collect"])
    with pytest.raises(SystemExit, match="several settings .gone"):
        reproduce.main([str(tmp_path / "tiny"), "--collect"])
    with pytest.raises(SystemExit, match="no run is finished"):
        reproduce.main([str(tmp_path / "results"), "--collect"])
    (tmp_path / "tiny").rename(tmp_path / "sizes-cpu")
    with pytest.raises(SystemExit, match="name of a table"):
        reproduce.main([str(tmp_path / "sizes-cpu") + "/", "--collect"])
    (tmp_path / "sizes-cpu").rename(tmp_path / "mixed")
    mimetic = json.loads((tmp_path / "mixed" / "mimetic-seed0" / "result.json").read_text())
    mimetic["config"]["lr"] = 7.0
    (tmp_path / "mixed" / "mimetic-seed0" / "result.json").write_text(json.dumps(mimetic))
    with pytest.raises(SystemExit, match="several settings .--lr was 7.0"):
        reproduce.main([str(tmp_path / "mixed"), "--collect"])


def result(runs, row, seed, test_acc, scale="full", extra=(), init="default"):
    """A finished run of the table `small`, as train_cifar.py would leave it."""
    (row,) = reproduce.find_rows("small", row)
    folder = reproduce.run_folder("small", row, init, seed, scale, runs)
    settings = train_cifar.settings(reproduce.command("small", row, init, seed, scale, runs, extra)[1:])
    folder.mkdir(parents=True)
    told = dict(init=init, seed=seed, test_acc=test_acc, seconds=620.0, config=dataclasses.asdict(settings))
    records.write_json(folder / "result.json", told)


def test_a_budget_starts_no_run_that_would_not_end_in_time(small, tmp_path, capsys, monkeypatch):
    result(tmp_path, "one-layer", seed=0, test_acc=40.0, scale="cpu")  # took ten minutes
    monkeypatch.setattr("subprocess.run", None)
    reproduce.main(["small", "--runs", str(tmp_path), "--budget", "9"])
    printed = capsys.readouterr().out
    assert "stopped before one layer, mimetic, seed 0: it takes about 12 minutes" in printed
    assert "| one layer | mimetic | not run yet | 0 |  |" in printed


def test_a_run_of_another_row_is_judged_by_its_size(small, tmp_path, capsys, monkeypatch):
    for init in ("default", "mimetic"):
        result(tmp_path, "one-layer", seed=0, test_acc=40.0, scale="cpu", init=init)
    monkeypatch.setattr("subprocess.run", None)
    reproduce.main(["small", "--runs", str(tmp_path), "--budget", "21"])  # the next has twice as many layers
    assert "stopped before two, default, seed 0: it takes about 23 minutes" in capsys.readouterr().out


def test_tables_show_mean_and_deviation_over_seeds_beside_the_papers_number(small, tmp_path):
    for seed, acc in enumerate([50.0, 52.0]):
        result(tmp_path, "two", seed=seed, test_acc=acc)
    lines = reproduce.markdown("small", dict(ours=reproduce.finished_runs("small", "full", tmp_path, []))).splitlines()
    assert lines[-1] == "| two | default | 51.00 ± 1.41 | 2 | 60.0 |"
    assert lines[2] == "| one layer | default | not run yet | 0 | 50.0 |"
    ours = dict(ours=reproduce.finished_runs("small", "full", tmp_path, []))
    assert reproduce.markdown("small", ours, only_run=True).splitlines()[2:] == lines[-1:]


def curved(init, curve, seed=0, **other):
    told = dict(row="two", init=init, seed=seed, test_acc=curve[-1][1], epochs=curve[-1][0], curve=curve)
    return {**told, "config": dict(limit=0, dataset="cifar10", batch_size=512), **other}


def test_catching_up_is_the_first_evaluation_at_the_defaults_final_score_of_the_same_seed():
    default = [curved("default", [[8, 50.0]]), curved("default", [[4, 30.0], [8, 60.0]], seed=1)]
    mimetic = [curved("mimetic", [[2, 49.9], [4, 50.0], [8, 55.0]]), curved("mimetic", [[6, 61.0], [8, 62.0]], seed=1)]
    assert tables.catch_up(mimetic, default) == "4, 6 of 8 epochs (392 to 588 steps)"  # 98 steps per epoch
    assert tables.catch_up(mimetic[:1], default[1:]) == ""  # of other seeds
    assert tables.catch_up([curved("mimetic", [[8, 55.0]])], default) == ""  # evaluated once, at the end
    assert tables.catch_up([curved("scaled", [[4, 20.0], [8, 49.0]])], default) == "not within 8 epochs"
    few = dict(limit=2500, dataset="cifar10", batch_size=100)
    assert "(100 steps)" in tables.catch_up([curved("mimetic", [[4, 50.0], [8, 51.0]], config=few)], default)


def test_on_text_lower_is_better_and_steps_are_the_runs_own():
    default, mimetic = (
        dict(init=init, seed=0, valid_bpc=curve[-1][1], steps=6000, epochs=9.79, curve=curve)
        for init, curve in (("default", [[10, 1.47]]), ("mimetic", [[7, 1.48], [8, 1.46], [10, 1.45]]))
    )
    assert tables.catch_up([mimetic], [default]) == "8 of 10 epochs (4,903 steps)"
    last = dict(mimetic, curve=[[7, 1.48], [10, 1.47]])
    assert tables.catch_up([last], [default]) == "10 of 10 epochs (6,000 steps)"  # the last epoch is not a whole one


def test_a_row_without_a_default_is_compared_with_the_nearest_above(small, monkeypatch):
    rows = [Row("one", "", dict(default=50.0)), Row("two", "", dict(mimetic=None)), Row("three", "", dict(scaled=None))]
    monkeypatch.setitem(TABLES, "small", TABLES["small"]._replace(rows=rows))
    runs = [curved("default", [[8, 50.0]], row="one"), curved("mimetic", [[4, 51.0], [8, 52.0]], row="two")]
    lines = tables.markdown("small", dict(cpu=runs, full=[])).splitlines()
    assert lines[0].endswith("| the paper | reaches the default's final score after |")
    assert lines[1] == "|---" * 8 + "|"
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["", "4 of 8 epochs (392 steps)", ""]
    summary = tables.summary(runs, dict(test_acc="accuracy")).splitlines()
    assert summary[3].endswith("| +2.00 | 4 of 8 epochs (392 steps) |") and summary[2].endswith("|  |  |")
    assert "reaches" not in tables.markdown("small", dict(cpu=runs[:1]))


@pytest.mark.parametrize("flags", ["--collect", "--seeds 1 --dry-run"])
def test_runs_of_other_settings_stand_in_no_table(flags, small, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    result(tmp_path, "one-layer", seed=0, test_acc=40.0, extra=["--epochs", "3"])
    with pytest.raises(SystemExit, match="other settings .--epochs was 3, now 1.; delete it, or use --runs"):
        reproduce.main(["small", "--scale", "full", "--runs", str(tmp_path), *flags.split()])
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("extra", [["--lr=1"], ["--lr", "1"], ["--lr", "2", "--lr=1"]])
def test_of_two_flags_the_later_counts_and_the_runs_name_cannot_be_changed(extra, small, tmp_path):
    (row,) = reproduce.find_rows("small", "two")
    words = reproduce.command("small", row, "default", 0, "full", tmp_path, ["--init=mimetic", *extra])
    s = train_cifar.settings(words[1:])
    assert s.init == ("default",) and s.lr == 1 and words.count("--lr") == 1
    assert "stray" in reproduce.command("small", row, "default", 0, "full", tmp_path, ["stray"])  # not lost


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
@pytest.mark.parametrize("parent", ["reproduce.py", "run.py"])
def test_ctrl_c_gives_a_run_time_to_save(parent, tmp_path):
    child = tmp_path / "train.py"  # takes half a second to end after Ctrl-C
    child.write_text(
        "import os, signal, sys, time\n"
        "def save(*_): time.sleep(0.5); os.write(1, b'saved'); sys.exit(130)\n"  # print may be at work on 'ready' still
        "signal.signal(signal.SIGINT, save); print('ready', flush=True); time.sleep(60)\n"
    )
    start = {
        "run.py": f"import run; import pathlib, sys\n"
        f"run.PYTHON, run.INSTALLED = pathlib.Path(sys.executable), run.REQUIREMENTS\n"
        f"sys.argv = ['run.py', {str(child)!r}]; sys.exit(run.main())",
        "reproduce.py": f"import reproduce as r, tables, pathlib\n"
        f"r.TABLES['t'] = tables.Table('', {str(child)!r}, 'a', '', '', [tables.Row('row', '', dict(default=None))])\n"
        f"r.run_missing('t', r.TABLES['t'].rows, [0], 'cpu', pathlib.Path({str(tmp_path)!r}), [], 0, False)",
    }[parent]
    process = subprocess.Popen(
        [sys.executable, "-c", start], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert any("ready" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and child
    assert "saved" in process.communicate(timeout=60)[0] and process.returncode == 130


def test_an_unknown_table_gets_the_nearest_name(capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["ablation"])
    assert "did you mean ablations?" in capsys.readouterr().err


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_in_pages_are_those_of_results(page):
    text = page.read_text("utf-8")
    assert reproduce.update_tables(text) == text, "python reproduce.py --readme"


def test_every_file_of_results_is_shown():
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    shown = {(kind, words.split()[0]) for _, kind, words, _ in reproduce.MARKER.findall(text)}
    for file in (ROOT / "results").glob("*.jsonl"):
        assert {("results", file.name), ("table", file.stem.removesuffix("-cpu"))} & shown, f"{file} is not shown"


def test_readme_and_docs_are_updated(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    (tmp_path / "docs").mkdir()
    for page in (tmp_path / "README.md", tmp_path / "docs" / "results.md"):
        page.write_text("<!-- table: signs -->\n| an old table |\n\nprose\n", encoding="utf-8")
    reproduce.main(["--readme"])
    for page in (tmp_path / "README.md", tmp_path / "docs" / "results.md"):
        text = page.read_text("utf-8")
        assert text == "<!-- table: signs -->\n| | init | ours | n |\n|---|---|---|---|\n\nprose\n"  # nothing was run


def test_full_scale_numbers_join_those_of_the_small_scale(small, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    result(tmp_path, "two", seed=0, test_acc=51.0, scale="cpu")
    result(tmp_path, "two", seed=0, test_acc=61.0)
    reproduce.collect_table("small", "cpu", tmp_path, [])
    marker = "<!-- table: small -->\n"
    assert reproduce.update_tables(marker).splitlines()[-1] == "| two | default | 51.00 | 1 | 60.0 |"
    reproduce.collect_table("small", "full", tmp_path, [])
    assert (made := reproduce.update_tables(marker)).splitlines()[
        -1
    ] == "| two | default | 51.00 | 1 | 61.00 | 1 | 60.0 |"
    assert reproduce.update_tables(made) == made


@pytest.mark.parametrize("file", sorted(file.name for file in (ROOT / "results").glob("*.jsonl")))
def test_recorded_tables_have_the_settings_of_their_commands(file):
    for result in reproduce.read_recorded(file):
        if "table" in result:
            table, scale, init = result["table"], result["scale"], result["init"]
            assert file == f"{reproduce.name_at(table, scale)}.jsonl"
            row = next(row for row in TABLES[table].rows if row.label == result["row"])
            words = reproduce.command(table, row, init, result["seed"], scale, Path("runs"), [])
            result["config"] |= {k: v for k, v in vars(reproduce.settings_of(words)).items() if k in reproduce.PATHS}
            reproduce.check_settings(words, result, file)


def test_mimetic_leads_by_more_than_two_standard_errors_over_three_seeds():
    runs = {(r["init"], r["seed"]): r["test_acc"] for r in reproduce.read_recorded("cifar10-small-patch2.jsonl")}
    leads = [runs["mimetic", seed] - runs["default", seed] for seed in range(3)]
    assert statistics.mean(leads) > 2 * statistics.stdev(leads) / math.sqrt(3) > 0


@pytest.mark.parametrize(
    "file, marker",
    [("demo-shapes", "train_cifar.py --demo --dataset shapes"),
     ("demo-cifar10", "train_cifar.py --demo --dataset cifar10"),
     ("demo-ptb-char", "train_lm.py --demo --dataset ptb-char"), ("cifar10-small-patch2", "--out runs/"),
     ("cifar10-small-patch4", "--out runs/"), ("ptb-char-small", "--out runs/"),
     ("ptb-char-6000", "--out runs/")],
)  # fmt: skip
def test_recorded_runs_have_the_settings_of_the_command_beside_them(file, marker):
    if "runs/" in marker:  # the command is in a page
        text = "\n".join(page.read_text("utf-8") for page in PAGES).replace("\\\n", " ")
        marker = next(line for line in text.splitlines() if line.startswith("python train_") and marker + file in line)
    script, *flags = shlex.split(marker.removeprefix("python "), comments=True)
    for result in reproduce.read_recorded(f"{file}.jsonl"):
        assert not records.diff_settings(result["config"], SCRIPTS[script].settings(flags))


def test_results_hold_no_paths_of_a_machine():
    for file in (ROOT / "results").glob("*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            record = json.loads(line)
            assert {"init", "seed", "seconds", "environment", "config"} <= record.keys()
            assert not {"data_dir", "out"} & record["config"].keys() and "/tmp" not in line and "/work" not in line
