"""Two processes under torchrun compute what one computes: gloo on the CPU, small data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm import TransformerLM
from official_formats import write_cifar10
from training import checkpoint, ranks, records
from vit import ViT

ROOT = Path(__file__).resolve().parent.parent
TINY = "--init mimetic --width 24 --depth 2 --lr 1e-3 --precision fp32 --device cpu".split()


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Sizes that two do not divide: batches of 21 images, the last one of 16, and 103 windows of text by 5."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder, per_batch=20)
    (folder / "book.txt").write_text("the cat sat on the mat, and the dog on the log.\n" * 39, encoding="utf-8")
    cifar = ["train_cifar.py", *TINY, *"--patch-size 8 --epochs 2 --batch-size 21 --micro-batch 4".split()]
    lm = ["train_lm.py", *TINY, *"--context 16 --heads 2 --batch-size 5 --epochs 2 --eval-stride 7".split()]
    return [*cifar, "--data-dir", str(folder)], [*lm, "--text", str(folder / "book.txt")]


def start(processes, command, out, *flags):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *command, "--out", str(out), *flags],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip


def contents(out):
    folder = out / "mimetic-seed0"
    return checkpoint.read(folder / "last.pt")["model"], records.read_log(folder / "log.jsonl")[1:]


PLAIN = """import sys, torch
sys.path.insert(0, {root!r})
import {script}
from training.start import run_script
torch.optim.AdamW = lambda parameters, lr, **_: torch.optim.SGD(parameters, lr)
run_script({script}.main)
"""  # unlike Adam, gradient descent notices a gradient that is twice or half of what it should be


@pytest.mark.parametrize("which", [0, 1], ids=["train_cifar", "train_lm"])
def test_two_ranks_give_the_loss_curve_the_evaluation_and_the_weights_of_one(commands, tmp_path, which):
    script, *flags = commands[which]
    plain = tmp_path / script
    plain.write_text(PLAIN.format(root=str(ROOT), script=script.removesuffix(".py")))
    for processes in (1, 2):
        ended = start(processes, [str(plain), *flags, "--clip", "0", "--lr", "0.1"], tmp_path / str(processes))
        assert ended.returncode == 0, ended.stderr
    assert "2 processes" in ended.stdout and ended.stdout.count("| mimetic |") == 1  # rank 0 alone speaks
    (one, curve), (two, curve2) = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-5, rtol=1e-4)
    for a, b in zip(curve, curve2, strict=True):
        assert {key: a[key] for key in a if key != "seconds"} == pytest.approx(
            {key: b[key] for key in b if key != "seconds"}, rel=1e-4
        )


def test_a_rank_that_fails_ends_all_with_its_message_said_once(commands, tmp_path):
    ended = start(2, commands[0], tmp_path, "--heads", "5")
    assert ended.returncode and ended.stderr.count("5 heads do not divide the width 24") == 1
    assert "Traceback" not in ended.stderr.split("ChildFailedError")[0].split("torch/distributed")[0]


def test_a_run_of_one_process_is_resumed_by_two(commands, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    start(1, commands[0], whole)
    half = "import sys, train_cifar\nfrom training import loop\nread = loop.Run.read_losses\n" + (
        "def read_losses(run): loop.interrupted = run.state['step'] == 3; read(run)\n"
        "loop.Run.read_losses = read_losses; train_cifar.main(sys.argv[1:])"
    )
    assert start(1, ["-c", half, *commands[0][1:]], cut).returncode == 130
    assert start(2, commands[0], cut, "--resume").returncode == 0
    (one, _), (two, _) = contents(whole), contents(cut)
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-5, rtol=1e-4)


def test_a_rank_without_items_takes_part_with_a_gradient_of_zero():
    model = ViT(image_size=8, dim=24, depth=1, heads=3)
    loss = model(torch.empty(0, 3, 8, 8)).sum()
    loss.backward()
    assert loss == 0 and all(p.grad is not None and not p.grad.any() for p in model.parameters())
    lm = TransformerLM(7, context=4, dim=24, depth=1, heads=3)
    assert lm(torch.empty(0, 4, dtype=torch.long), torch.empty(0, 4, dtype=torch.long)) == 0


@pytest.mark.parametrize("size", [0, 1, 5, 64])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_of_a_batch_hold_each_item_once(monkeypatch, size, count):
    monkeypatch.setenv("WORLD_SIZE", str(count))
    shares = []
    for rank in range(count):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(ranks.shard(torch.arange(size)))
    assert torch.cat(shares).tolist() == list(range(size))


def test_only_rank_0_speaks_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    ranks.print0("words")
    records.write_json(tmp_path / "result.json", {})
    records.append_record(tmp_path, {})
    checkpoint.save(tmp_path, torch.nn.Linear(1, 1))
    with pytest.raises(SystemExit) as stop:
        ranks.fail("words")
    assert stop.value.code == 1 and capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())
