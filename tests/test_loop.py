"""Runs that are killed, interrupted or spoiled: nothing is lost, and a resumed run ends with the same bits."""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_cifar
import train_lm
from official_formats import write_cifar10
from training import checkpoint, loop, records

ROOT = Path(__file__).resolve().parent.parent
TINY = "--init mimetic --width 24 --depth 1 --lr 1e-3 --precision fp32 --device cpu --threads 1 ".split()
CIFAR = [*TINY, *"--patch-size 8 --epochs 3 --batch-size 16 --augment randaugment".split()]
LM = [*TINY, *"--context 16 --heads 2 --batch-size 4 --steps 60 --dropout 0.1 --embed-dropout 0.1".split()]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Both scripts with their flags, on small data."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder, per_batch=20)
    (folder / "book.txt").write_text("the cat sat on the mat, and the dog on the log.\n" * 60, encoding="utf-8")
    return {
        "train_cifar": (train_cifar, [*CIFAR, "--data-dir", str(folder)]),
        "train_lm": (train_lm, [*LM, "--text", str(folder / "book.txt")]),
    }


@pytest.fixture(autouse=True)
def two_threads():
    """So that --threads 1 changes something, and not for the tests that follow."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["train_cifar", "train_lm"])
def command(request, commands):
    return commands[request.param]


def contents(out):
    """The final weights, and what the log says without times."""
    folder = Path(out) / "mimetic-seed0"
    epochs = [record for record in records.read_log(folder / "log.jsonl") if "train_loss" in record]
    for record in epochs:
        del record["seconds"]
    return torch.load(folder / "last.pt", weights_only=True)["model"], epochs


def same(a, b):
    return a[1] == b[1] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][name], b[0][name]) for name in a[0])


# A process that has torch forks a child that trains, kills it at a random moment, and again, until ten are killed and
# the last has ended. A machine so fast that a run ends before its killer comes begins another.
KILLER = """
import os, random, signal, sys, time
import {script} as script
out, *flags = sys.argv[1:]
kills, runs, moments = 0, 1, random.Random(0)
while True:
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        script.main([*flags, "--out", f"{{out}}/{{runs}}"])
        os._exit(0)
    if kills < 10:
        time.sleep(moments.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        kills += 1
    elif status or kills == 10:
        sys.exit(status)
    else:
        runs += 1
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_runs_killed_ten_times_end_with_the_same_bits(command, tmp_path):
    script, flags = command
    script.main([*flags, "--out", str(tmp_path / "whole")])
    flags = [*flags, "--save-every", "0", "--resume"]  # a checkpoint every step
    killer = [sys.executable, "-c", KILLER.format(script=script.__name__), str(tmp_path / "killed"), *flags]
    subprocess.run(killer, cwd=ROOT, check=True, timeout=300)
    for out in (tmp_path / "killed").iterdir():
        assert same(contents(tmp_path / "whole"), contents(out))


def interrupted(script, flags, out, step, monkeypatch):
    """Send Ctrl-C to a run in its `step`-th step; returns how it ended."""
    steps, original = [0], torch.nn.utils.clip_grad_norm_

    def interrupt(*args, **kwargs):
        steps[0] += 1
        if steps[0] == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", interrupt)
        script.main([*flags, "--out", str(out)])
    return end.value.code


@pytest.mark.parametrize("step", [1, 10])
def test_ctrl_c_saves_says_how_to_go_on_and_the_resumed_run_ends_with_the_same_bits(
    command, tmp_path, step, monkeypatch, capsys
):
    script, flags = command
    script.main([*flags, "--out", str(tmp_path / "whole")])
    assert interrupted(script, flags, tmp_path / "cut", step, monkeypatch) == 130
    assert "--resume goes on from" in capsys.readouterr().out
    assert checkpoint.read(tmp_path / "cut" / "mimetic-seed0" / "last.pt")["state"]["step"] == step
    script.main([*flags, "--out", str(tmp_path / "cut"), "--resume"])
    assert same(contents(tmp_path / "whole"), contents(tmp_path / "cut"))
    head, *rest = records.read_log(tmp_path / "cut" / "mimetic-seed0" / "log.jsonl")
    assert head["run"] == "mimetic-seed0" and any(record.get("resumed_at_step") == step for record in rest)


def test_a_second_ctrl_c_stops_at_once():
    with loop.patient_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        assert loop.interrupted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_resuming_a_finished_run_trains_nothing_and_prints_its_result(command, tmp_path, monkeypatch, capsys):
    script, flags = command
    script.main([*flags, "--out", str(tmp_path)])
    table = capsys.readouterr().out.splitlines()[-3:]
    before = {file: file.read_bytes() for file in (tmp_path / "mimetic-seed0").iterdir()}
    monkeypatch.setattr(script, "train", None)
    script.main([*flags, "--out", str(tmp_path), "--resume"])
    assert capsys.readouterr().out.splitlines()[-3:] == table
    assert {file: file.read_bytes() for file in (tmp_path / "mimetic-seed0").iterdir()} == before


def test_an_occupied_folder_is_told_before_data_are_fetched(command, tmp_path, monkeypatch):
    script, flags = command
    script.main([*flags, "--out", str(tmp_path)])
    monkeypatch.setattr(script, "load_data", None)
    with pytest.raises(SystemExit, match="holds a run already"):
        script.main([*flags, "--out", str(tmp_path)])


def test_resume_adds_runs_and_refuses_other_settings(command, tmp_path):
    script, flags = command
    script.main([*flags, "--out", str(tmp_path)])
    script.main([*flags, "--out", str(tmp_path), "--resume", "--init", "default,mimetic", "--seeds", "0"])
    assert (tmp_path / "default-seed0" / "result.json").exists()
    with pytest.raises(SystemExit, match=r"mimetic-seed0 is of a run with other settings \(--lr was .*, now 0.5\)"):
        script.main([*flags, "--out", str(tmp_path), "--resume", "--lr", "0.5"])
    with pytest.raises(SystemExit, match="holds a run already; --resume goes on"):
        script.main([*flags, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--resume goes on with the runs in --out DIR"):
        script.main([*flags, "--resume"])


def test_what_a_checkpoint_holds_is_gone_from_it_once_the_run_is_over(command, tmp_path, monkeypatch):
    script, flags = command
    interrupted(script, flags, tmp_path, 3, monkeypatch)
    saved = checkpoint.read(tmp_path / "mimetic-seed0" / "last.pt")
    assert {"model", "optimizer", "state", "config"} <= set(saved) and saved["state"]["epoch_items"] > 0
    script.main([*flags, "--out", str(tmp_path), "--resume"])
    assert "optimizer" not in checkpoint.read(tmp_path / "mimetic-seed0" / "last.pt")


def test_a_loss_that_is_not_finite_stops_the_run_at_once_and_names_the_last_good_checkpoint(
    command, tmp_path, monkeypatch
):
    script, flags = command
    original, steps = torch.nn.utils.clip_grad_norm_, [0]

    def spoil(*args, **kwargs):
        steps[0] += 1
        return original(*args, **kwargs) * (math.nan if steps[0] == 5 else 1)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spoil)
    sentence = r"became nan in step 5 \(learning rate .*last.pt is of step 4.*Lower --lr"
    with pytest.raises(SystemExit, match=sentence):
        script.main([*flags, "--out", str(tmp_path), "--save-every", "0"])
    assert all(
        tensor.isfinite().all() for tensor in checkpoint.read(tmp_path / "mimetic-seed0" / "last.pt")["model"].values()
    )


def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays_whole(command, tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    script, flags = command
    interrupted(script, flags, tmp_path, 3, monkeypatch)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # smaller than any checkpoint, larger than the log
        with pytest.raises(SystemExit, match="could not write a checkpoint to .*--resume"):
            script.main([*flags, "--out", str(tmp_path), "--resume"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.read(tmp_path / "mimetic-seed0" / "last.pt")["state"]["step"] == 3
    assert not (tmp_path / "mimetic-seed0" / "last.tmp").exists()
    script.main([*flags, "--out", str(tmp_path), "--resume"])  # there is room again


def test_a_checkpoint_that_is_damaged_foreign_or_runs_code_is_refused(command, tmp_path, monkeypatch):
    script, flags = command
    interrupted(script, flags, tmp_path, 3, monkeypatch)
    file = tmp_path / "mimetic-seed0" / "last.pt"
    good, saved = file.read_bytes(), checkpoint.read(file)

    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    for content, sentence in [
        (good[: len(good) // 2], "cannot be read as a checkpoint"),
        (b"", "cannot be read as a checkpoint"),
        (b"an HTML page, say", "cannot be read as a checkpoint"),
        (pickle.dumps(Code()), "cannot be read as a checkpoint"),
        (dict(saved, model={"other.weight": torch.zeros(3)}), "holds another model"),
        ([1, 2], "is not a checkpoint of these scripts"),
    ]:
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
        with pytest.raises(SystemExit, match=sentence) as stop:
            script.main([*flags, "--out", str(tmp_path), "--resume"])
        assert "\n" not in stop.value.code
    assert not (tmp_path / "ran").exists()


def test_a_run_that_lost_a_file_is_refused_or_begun_again_but_never_mixed_with_other_settings(
    command, tmp_path, monkeypatch
):
    script, flags = command
    flags = [*flags, "--out", str(tmp_path)]
    folder = tmp_path / "mimetic-seed0"
    interrupted(script, flags, tmp_path, 3, monkeypatch)
    (folder / "log.jsonl").unlink()
    with pytest.raises(SystemExit, match="holds an unfinished run already"):
        script.main(flags)
    with pytest.raises(SystemExit, match="--lr was .*, now 0.5"):
        script.main([*flags, "--resume", "--lr", "0.5"])
    script.main([*flags, "--resume"])
    (folder / "result.json").write_text("")
    with pytest.raises(SystemExit, match="result.json is damaged"):
        script.main([*flags, "--resume"])
    (folder / "result.json").unlink()
    with pytest.raises(SystemExit, match="finished run without its result.json"):
        script.main([*flags, "--resume"])


def test_compiled_runs_save_plain_names(command, tmp_path, monkeypatch):
    compile_, calls = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda model, **_: calls.append(model) or compile_(model, backend="eager"))
    script, flags = command
    script.main([*flags, "--out", str(tmp_path / "plain")])
    assert not calls
    script.main([*flags, "--out", str(tmp_path / "compiled"), "--compile", "on"])
    assert len(calls) == 1
    (plain, _), (compiled, _) = contents(tmp_path / "plain"), contents(tmp_path / "compiled")
    assert plain.keys() == compiled.keys()
    assert all(torch.allclose(plain[name], compiled[name], atol=1e-5) for name in plain)


def test_a_log_cut_short_by_a_kill_is_mended(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"run": "a", "config": {}}\n{"step": 7}\n{"step": 14}\n{"step": 2', "utf-8")
    records.open_log(tmp_path, 7, run="a", environment="here")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"run": "a", "config": {}}, {"step": 7}, {"resumed_at_step": 7, "environment": "here"}]


def test_deterministic_runs_repeat_bit_by_bit(command, tmp_path):
    script, flags = command
    try:
        for out in ("a", "b"):
            script.main([*flags, "--out", str(tmp_path / out), "--deterministic", "--precision", "bf16"])
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(contents(tmp_path / "a"), contents(tmp_path / "b"))


def test_checkpoints_follow_each_epoch_and_each_ten_minutes_within_one(commands, monkeypatch):
    clock, saved = [0.0], []
    read = loop.Run.read_losses

    def slow(run):  # a step's time
        clock[0] += 200
        read(run)

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(loop.Run, "read_losses", slow)
    monkeypatch.setattr(checkpoint, "save", lambda *_, state=None, **__: state and saved.append(state["step"]))
    script, flags = commands["train_cifar"]
    script.main([*flags, "--epochs", "2", "--save-every", "10"])  # epochs of seven steps
    assert saved == [4, 7, 11, 14]
