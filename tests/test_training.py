"""Schedule, flags, files and statistics of the training scripts."""

import dataclasses
import json
import os
import shlex
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from lm import TransformerLM
from training import records
from training.flags import Common, check_runs, flag, format_flags, parse_settings
from training.loop import Run
from training.records import mean_and_deviation, summary_table
from training.start import compile_and_parallelize, pick_device, pick_precision
from training.step import accuracy, generator, learning_rate
from vit import ViT


def test_learning_rate_warms_up_linearly_and_falls_as_a_cosine_to_zero():
    rates = [learning_rate(step, 100, peak=2.0, warmup=0.1) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])  # the first step learns already
    assert rates[10] == 2.0 and rates[55] == pytest.approx(1.0) and rates[100] == pytest.approx(0.0)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))


@pytest.mark.parametrize("warmup", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 7])
def test_warm_up_may_be_none_or_the_whole_run(warmup, steps):
    assert all(0 < learning_rate(step, steps, 1.0, warmup) <= 1.0 for step in range(steps))


def test_deviation_is_that_of_a_sample():
    assert mean_and_deviation([1.0, 2.0, 4.0]) == f"2.33 ± {statistics.stdev([1, 2, 4]):.2f}" == "2.33 ± 1.53"
    assert mean_and_deviation([3.0], signed=True) == "+3.00"


def test_bits_per_character_have_three_digits_as_in_the_paper():
    results = [dict(init=init, seed=0, test_bpc=bpc) for init, bpc in (("default", 1.2333), ("mimetic", 1.21))]
    assert summary_table(results, dict(test_bpc="bits")).splitlines()[2:] == [
        "| default | 1 | 1.233 |  |",
        "| mimetic | 1 | 1.210 | -0.023 |",
    ]


def test_summary_pairs_differences_by_seed():
    scores = {("default", 0): 50, ("default", 1): 60, ("mimetic", 1): 62, ("mimetic", 0): 52, ("mimetic", 2): 10}
    results = [dict(init=init, seed=seed, acc=float(acc)) for (init, seed), acc in scores.items()]
    table = summary_table(results, dict(acc="accuracy")).splitlines()
    assert table[0] == "| init | n | accuracy | minus default |"
    assert table[2] == "| default | 2 | 55.00 ± 7.07 |  |"
    alone = summary_table(results[:2], dict(acc="accuracy")).splitlines()  # nothing to compare with
    assert alone == ["| init | n | accuracy |", "|---|---|---|", "| default | 2 | 55.00 ± 7.07 |"]
    assert table[3].startswith("| mimetic | 3 |") and table[3].endswith("| +2.00 ± 0.00 |")


@dataclasses.dataclass
class Few:
    demo: bool = flag(False, "")
    names: tuple = flag(("a", "b"), "names")
    seeds: tuple = flag((0,), "seeds")
    rate: float = flag(0.5, "100 % of it", low=0, high=1)
    size: int = flag(3, "size", low=0)


def test_flags_are_typed_by_their_defaults_and_win_over_the_demo():
    s = parse_settings(Few, "--demo --seeds 1,2 --rate 1e-3".split(), "", dict(size=9, rate=0.7))
    assert s == Few(True, ("a", "b"), (1, 2), 0.001, 9)
    assert parse_settings(Few, "--seeds 1 2,3 --size 4".split(), "", {}).seeds == (1, 2, 3)  # commas or spaces
    for bad in (
        ["--rate", "nan"],
        ["--rate", "1.5"],
        ["--size", "-1"],
        ["--seeds", "1,"],
        ["--size", "many"],
        ["--seeds", "1,x"],
        ["--sizes", "3"],
        ["--siz", "3"],
    ):
        with pytest.raises(SystemExit):
            parse_settings(Few, bad, "", {})


def test_negative_numbers_are_values_however_they_are_written(capsys):
    @dataclasses.dataclass
    class Signed:
        beta: float = flag(0.4, "", low=-1)
        seeds: tuple = flag((0,), "", low=0)
        fast: bool = flag(False, "")

    for text in ("-4e-1", "-.4", "-0.4", "-4E-01"):
        assert parse_settings(Signed, ["--beta", text, "--fast"], "", {}) == Signed(-0.4, (0,), True)
    for words in ("--seeds -1,0", "--seeds 0 -1"):
        with pytest.raises(SystemExit):
            parse_settings(Signed, words.split(), "", {})
        assert "-1 is not at least 0" in capsys.readouterr().err


def test_the_settings_told_first_are_flags_that_give_them_again():
    s = Few(False, ("a", "c d"), (1, 2), 0.25, 3)
    assert format_flags(Few()) == "" and format_flags(s) == "--names 'a,c d' --seeds 1,2 --rate 0.25"
    for other in (s, Few(names=("-1.txt", "-a")), Few(names=("-1", "b"))):
        assert parse_settings(Few, shlex.split(format_flags(other)), "", {}) == other
    assert parse_settings(Few, ["--names", "-1", "b.txt"], "", {}).names == ("-1", "b.txt")


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit):
        parse_settings(Few, ["--help"], "usage text", {})
    shown = capsys.readouterr().out
    assert "usage text" in shown and "100 % of it [0.5]" in shown and "[a,b]" in shown


def test_streams_of_one_seed_are_independent():
    draws = [torch.randn(1000, generator=generator(*key)) for key in ((0, 1), (0, 2), (1, 1), (0, 1, 1))]
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlations.abs().max() < 0.15


def test_json_is_moved_into_place(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    records.write_json(file, dict(a=1))
    assert json.loads(file.read_text()) == dict(a=1)
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SystemExit, match="could not write"):
        records.write_json(file, dict(a=2))
    assert json.loads(file.read_text()) == dict(a=1)


def test_accuracy_and_loss_are_means_over_images_in_eval_mode_whatever_the_batches():
    torch.manual_seed(0)
    logits, labels, model = torch.randn(10, 4), torch.arange(10) % 4, torch.nn.Dropout(0.9)
    batches = zip(logits.split(3), labels.split(3), strict=True)
    percent, loss = accuracy(model, batches, torch.device("cpu"), "fp32")
    assert percent == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item()) and 0 < percent < 100
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item()) and model.training


def test_cuda_that_is_absent_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="sees only cpu"):
        pick_device("cuda")
    assert pick_precision("fp32", torch.device("cpu")) == "fp32"


@dataclasses.dataclass
class Sized(Common):
    size: int = flag(3, "")


def test_the_summary_covers_every_finished_run_of_these_settings_and_compares_with_default(tmp_path):
    for init, seed, acc, size in [
        ("mimetic", 0, 60.0, 3),
        ("default", 0, 50.0, 3),
        ("scaled", 0, 55.0, 3),
        ("b", 0, 9.0, 4),
    ]:
        (tmp_path / f"{init}-seed{seed}").mkdir()
        result = dict(init=init, seed=seed, acc=acc, config=dataclasses.asdict(Sized(size=size)))
        records.write_json(tmp_path / f"{init}-seed{seed}" / "result.json", result)
    (tmp_path / "default-seed1").mkdir()  # not finished
    (tmp_path / "foreign-seed1").mkdir()
    (tmp_path / "foreign-seed1" / "result.json").write_text("")
    records.save_summary(Sized(out=str(tmp_path)), dict(acc="accuracy"))
    rows = (tmp_path / "summary.md").read_text().splitlines()[2:]
    assert rows == ["| default | 1 | 50.00 |  |", "| mimetic | 1 | 60.00 | +10.00 |", "| scaled | 1 | 55.00 | +5.00 |"]


def shown(monkeypatch, capsys, elapsed, step, steps, start_step, init="run", items=8, epochs=1, demo=False):
    """What a run of one step after `start_step` shows after `elapsed` seconds."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    model = torch.nn.Linear(1, 1)
    s = Sized(demo=demo)
    s.epochs = epochs
    run = Run(s, init, 0, model, torch.optim.SGD(model.parameters(), 0.1), steps // epochs, torch.device("cpu"), "fp32")
    run.state["step"], run.start_step, clock[0] = step, start_step, elapsed
    run.loss, run.state["items"] = 2.0, items * (step - start_step)
    capsys.readouterr()
    run.show_progress()
    return capsys.readouterr().out


def test_a_resumed_run_tells_its_time_left_from_its_own_steps(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "step 905/1000  loss 2.000  3:10 left  4 images/s" in shown(monkeypatch, capsys, 10.0, 905, 1000, 900)


def test_the_live_line_fits_80_columns_comes_at_once_where_steps_are_slow_and_never_into_a_file(monkeypatch, capsys):
    long = dict(steps=9800, start_step=0, init="orthogonal", items=512, epochs=100)
    assert shown(monkeypatch, capsys, 20.0, 1, **long) == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    text = shown(monkeypatch, capsys, 20.0, 1, **long).removeprefix("\r\x1b[K")
    assert "loss 2.000" in text and text.endswith(" 26 images/s") and "  " not in text and len(text) < 80
    assert shown(monkeypatch, capsys, 10.0, 101, **long) == ""


def test_a_slow_demo_says_what_may_help(monkeypatch, capsys):
    assert "slow: 20 minutes per run" in shown(monkeypatch, capsys, 20.0, 20, 1200, 0, demo=True)
    assert shown(monkeypatch, capsys, 2.0, 20, 1200, 0, demo=True) == ""


def test_a_setting_that_an_older_run_did_not_know_had_its_default_there():
    assert records.diff_settings({}, Sized()) == []
    assert records.diff_settings({}, Sized(size=4)) == ["--size was 3, now 4"]


def test_runs_asked_for_twice_are_refused():
    for inits, seeds, sentence in [
        (("a", "a"), (0,), "--init names one of a, a twice"),
        (("a",), (0, 1, 0), "--seeds names one of 0, 1, 0 twice"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            check_runs(Common(init=inits, seeds=seeds))


def test_a_machine_without_git_is_no_error(monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError("git")

    records.commit.cache_clear()
    monkeypatch.setattr("subprocess.run", no_git)
    assert records.environment(torch.device("cpu"), "fp32")["commit"] == "unknown"
    records.commit.cache_clear()


@pytest.fixture
def compiled_frames(monkeypatch):
    """Counts what torch.compile compiles, without a compiler."""
    counter, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compile_(model, backend=counter, **how))
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def test_an_epochs_smaller_last_batch_is_compiled_once_and_not_in_each_epoch(compiled_frames):
    model = ViT(image_size=8, dim=24, depth=2, heads=3, pool="mean")
    trained = compile_and_parallelize(model, Common(compile="on"), torch.device("cpu"))
    for size in 3 * (8, 8, 5):
        trained(torch.randn(size, 3, 8, 8)).sum().backward()
    assert compiled_frames.frame_count == 2


def test_a_language_model_compiles_with_its_loss_in_chunks(compiled_frames, monkeypatch):
    torch.manual_seed(0)
    model, ids = TransformerLM(50, context=16, dim=24, depth=1, heads=3), torch.randint(50, (4, 16))
    trained = compile_and_parallelize(model, Common(compile="on"), torch.device("cpu"))
    whole = trained(ids, ids)
    monkeypatch.setattr("lm.LOGITS_AT_ONCE", 1000)
    torch.testing.assert_close(trained(ids, ids), whole)
    trained(ids, ids).backward()
    assert compiled_frames.frame_count and all(p.grad is not None for p in model.parameters())


def test_only_a_gpu_compiles_by_itself_and_only_if_it_has_the_tools(compiled_frames, monkeypatch):
    model, cpu, gpu = torch.nn.Linear(1, 1), torch.device("cpu"), torch.device("cuda:0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/gcc")
    assert compile_and_parallelize(model, Common(), cpu) is model
    assert compile_and_parallelize(model, Common(compile="off"), gpu) is model
    assert compile_and_parallelize(model, Common(), gpu) is not model
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compile_and_parallelize(model, Common(), gpu) is model
