"""bench.py gpu and roofline, on a CPU: the counts are exact, and what is for a GPU runs on one of paper."""

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import reproduce
from benchmarks import gpu as bench_gpu
from benchmarks import roofline as bench_roofline
from benchmarks.paper_gpu import TRAINED, Op, paper_gpu
from benchmarks.roofline import BANDWIDTH, LAUNCH, Run, count, fuse, gpu_seconds, seconds

ROOT = Path(__file__).parent.parent


# ---- the GPU of paper


def test_a_product_moves_its_operands_and_its_result_once():
    with paper_gpu() as recorder:
        a = torch.empty(64, 32, device="cuda", dtype=torch.bfloat16)
        b = torch.empty(32, 16, device="cuda", dtype=torch.bfloat16)
        assert a.is_cuda and str((a @ b.relu()).device) == "cuda:0"
    relu, product = recorder.ops
    assert (relu.name, relu.launches, relu.bytes, relu.flop) == ("relu", 1, 2 * 2 * 32 * 16, 0)
    assert (product.name, product.launches, product.bytes) == ("mm", 1, 2 * (64 * 32 + 32 * 16 + 64 * 16))
    assert product.flop == 2 * 64 * 32 * 16
    assert gpu_seconds(product) == product.bytes / BANDWIDTH  # it is small: its bytes take longer


def test_views_move_nothing_and_an_expanded_tensor_only_what_is_there():
    with paper_gpu() as recorder:
        x = torch.empty(8, 1, device="cuda").expand(8, 100)
        x.t().unsqueeze(0)
        assert not recorder.ops
        x + 1
    assert recorder.ops[0].bytes == 4 * (8 + 800)


def test_a_lookup_reads_what_it_fetches():
    with paper_gpu() as recorder:
        table, rows = torch.empty(1000, 4, device="cuda"), torch.zeros(3, dtype=torch.long, device="cuda")
        recorder.ops.clear()
        F.embedding(rows, table)
    assert recorder.ops[0].bytes == 3 * 8 + 2 * 3 * 4 * 4


def test_flash_attention_keeps_no_map_and_backward_has_five_products():
    B, H, N, K = 2, 3, 64, 16
    with paper_gpu() as recorder:
        q, k, v = (torch.empty(B, H, N, K, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    forward, backward = (op for op in recorder.ops if op.flop)
    assert forward.flop == 4 * B * H * N * N * K and backward.flop == 2.5 * forward.flop
    rows = 4 * B * H * N  # the softmax's normalization, and a random state of a few bytes
    assert 0 <= forward.bytes - 4 * 2 * B * H * N * K - rows < 64


def test_casts_are_those_of_cuda():
    x, layer = torch.randn(2, 8), torch.nn.Linear(8, 8)
    with paper_gpu(), torch.autocast("cuda", torch.bfloat16):
        y = layer.to("cuda")(x.to("cuda"))
        assert y.dtype == torch.bfloat16 and y.softmax(-1).dtype == torch.float32
        assert F.layer_norm(y, (8,)).dtype == torch.float32  # on a CPU it would stay bfloat16


def test_blocking_copies_and_reads_wait_and_mixed_devices_raise():
    with paper_gpu() as recorder:
        x = torch.ones(4).to("cuda")
        x.sum().item()
        torch.ones(4).pin_memory().to("cuda", non_blocking=True)
        with pytest.raises(RuntimeError):
            x + torch.ones(4)
    assert [op.waits for op in recorder.ops if op.name in ("copy", "read")] == [True, True, False]


# ---- the roofline


def step_flop(B: int, N: int, D: int, depth: int, inputs: int) -> int:
    """Of a ViT's step on B images of N patches of so many inputs: products forward, and twice that backward."""
    layer = 3 * 2 * B * N * 12 * D * D + 3.5 * 4 * B * N * N * D
    return depth * layer + 2 * 2 * B * N * inputs * D + 3 * 2 * B * D * 10  # no gradient for the pixels


def test_a_training_step_multiplies_what_the_formula_says():
    flags = "--dataset shapes --limit 32 --batch-size 16 --width 24 --depth 2 --heads 3 --patch-size 8"
    run = Run(count("train_cifar", flags, 2), 2, 1, 2, 1)
    assert sum(op.flop for op in run.training()) == 2 * step_flop(16, 16, 24, 2, 3 * 8 * 8)
    phases = {op.phase for op in run.ops}
    assert {"augmentation", TRAINED, "optimizer", "evaluation"} <= phases
    assert sum(op.launches for op in run.fused().training()) < sum(op.launches for op in run.training())


def test_host_and_gpu_work_side_by_side_but_not_across_a_wait():
    launch, work = Op("", "", 0, launches=10), Op("", "", 0, launches=0, reads={1: int(BANDWIDTH * 20 * LAUNCH)})
    assert math.isclose(seconds([launch, work]), 20 * LAUNCH)
    assert math.isclose(seconds([launch._replace(waits=True), work]), 30 * LAUNCH)


def test_what_lies_between_two_products_fuses():
    with paper_gpu() as recorder:
        a = torch.empty(64, 64, device="cuda")
        b = (a @ a).relu().mul(2).add(1)
        b @ b
    ops = [op._replace(phase=TRAINED) for op in recorder.ops]
    first, fused, second = fuse(ops)
    assert (fused.launches, fused.bytes) == (1, 2 * 4 * 64 * 64) and first.flop == second.flop > 0


def test_the_roofline_prints_both_scripts(capsys, monkeypatch):
    ops = [Op(TRAINED, "mm", 1, flop=10**12), Op("evaluation", "mm", 2, flop=10**12)]
    monkeypatch.setattr(bench_roofline, "count", lambda script, flags, steps: ops * steps)
    bench_roofline.main([], steps=1)
    assert capsys.readouterr().out.count("| a step | 1 | 0.0 | 0.00 | 1.00 | 0.01 | 1.67 |") == 4


# ---- the first fifteen minutes


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A function from a part to a rehearsal of it, whose scripts run in this process."""

    def script(self, name, *words):
        importlib.import_module(name.removesuffix(".py")).main(list(words))

    monkeypatch.setattr(bench_gpu.Bench, "script", script)
    o = dict(out=tmp_path, data_dir=str(tmp_path), seconds=60, tiny=True)
    yield lambda part, device="cpu": bench_gpu.Bench(argparse.Namespace(part=part, device=device, **o))
    torch.use_deterministic_algorithms(False)


def measured(b, leave: tuple[str, ...] = ()):
    for name, call in bench_gpu.PARTS[b.part][0](b):
        if not name.startswith(leave):
            b.measure(name, call)
    return b.found


def test_every_check_holds_on_a_cpu(bench):
    found = measured(bench("check"))
    assert found and all(figures["ok"] is True for figures in found.values()), found
    assert found["killed and resumed, --deterministic"]["killed_before_its_end"]


def test_checks_and_speeds_run_on_a_gpu_of_paper(bench):
    """None mixes devices. Values are nothing there, so inits and runs are left out."""
    leave = ("init", "killed", "ViT-Tiny/2, compiled", "language model, compiled")
    with paper_gpu(first=sys.maxsize):  # nothing is counted
        for part in ("check", "speed"):
            found = measured(bench(part, "cuda"), leave)
            assert not any("error" in figures for figures in found.values()), found


def test_an_epoch_gives_the_time_of_every_full_row(bench):
    found = measured(bench("epoch"))
    tables = {name: t for name, t in reproduce.TABLES.items() if t.script != "train_imagenet.py"}
    assert len(found) == 2 + sum(len(table.rows) for table in tables.values())
    one, six = (found[f"sizes: width 192, depth 12, heads {h}"]["estimated_minutes"] for h in (3, 6))
    assert one == six > 0 and math.isclose(found["sizes: width 192, depth 24, heads 3"]["estimated_minutes"], 2 * one)


def test_the_command_leaves_lines_and_a_summary(tmp_path):
    words = "bench.py gpu --device cpu --tiny --parts peers,rows --data-dir nowhere --out".split()
    subprocess.run([sys.executable, *words, str(tmp_path)], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("ours_images_per_second" in line for line in lines) and lines[-1]["left_out"] == "all rows"
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").count("\n") == len(lines) + 2


def test_a_part_that_takes_too_long_or_fails_says_so(tmp_path, bench):
    bench_gpu.start_part("check", ["--device", "cpu", "--tiny", "--out", str(tmp_path)], tmp_path, 1.0)
    bench_gpu.start_part("check", ["--device", "nowhere", "--out", str(tmp_path)], tmp_path, 60)
    bench_gpu.start_part("check", [], tmp_path, -1)
    b = bench("check")
    b.measure("broken", lambda: 1 / 0)
    lines = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text(encoding="utf-8").splitlines()]
    errors = [line for line in lines if line.keys() & {"error", "left_out"}]  # the first check may end in time
    assert errors[0]["error"] == "stopped after 1 s" and "nowhere" in errors[1]["error"]
    assert "left_out" in errors[2] and errors[3]["error"] == "ZeroDivisionError: division by zero"
