"""train_imagenet.py from end to end, on tiny folders of photographs that the tests make."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train_imagenet
from inputs import folders
from official_formats import jpeg, write_folders
from training import checkpoint, loop, records
from training.step import learning_rate

pytest.importorskip("PIL", reason="photographs are decoded with Pillow (pip install pillow)")
ROOT = Path(__file__).resolve().parent.parent
TINY = """--image-size 32 --patch-size 8 --width 24 --depth 2 --epochs 2 --batch-size 10 --lr 0.05 --warmup-epochs 0
    --precision fp32 --device cpu --workers 0""".split()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    write_folders(folder)
    return str(folder)


def run(data_dir, out, *flags):
    train_imagenet.main([*TINY, "--data-dir", data_dir, "--out", str(out), *flags])
    return checkpoint.read(out / "mimetic-seed0" / "last.pt")["model"], records.read_log(
        out / "mimetic-seed0" / "log.jsonl"
    )


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


# ---- decoding


@pytest.mark.parametrize(
    "suffix, mode",
    [("png", "RGBA"), ("png", "I;16"), ("jpg", "L"), ("jpg", "CMYK"), ("bmp", "RGB"), ("gif", "P"), ("webp", "RGB"),
     ("tiff", "RGB")],
)  # fmt: skip
def test_whatever_a_file_holds_becomes_three_planes_of_bytes(tmp_path, suffix, mode):
    from PIL import Image

    gray = mode in ("L", "I;16")
    image = Image.new("RGB", (20, 10), (128,) * 3 if gray else (200, 100, 50))
    image = Image.new("I;16", (20, 10), 128 * 256) if mode == "I;16" else image.convert(mode)
    image.save(tmp_path / f"a.{suffix}")
    with Image.open(tmp_path / f"a.{suffix}") as image:
        pixels = folders.square(image, (0, 0, 10, 20), 8)
    assert pixels.shape == (3, 8, 8) and pixels.dtype == torch.uint8
    expected = torch.tensor([128.0] * 3 if gray else [200.0, 100.0, 50.0])
    torch.testing.assert_close(pixels.float().mean((1, 2)), expected, atol=12, rtol=0)


def ramp(width, height):
    """A photograph that grows brighter to the right, by 200 in all."""
    from PIL import Image

    row = np.linspace(0, 200, width).round().astype(np.uint8)
    return Image.fromarray(np.broadcast_to(row[None, :, None], (height, width, 3)).copy())


def test_the_middle_crop_is_the_middle_seven_eighths_of_the_shorter_side():
    crop = folders.centre_crop(ramp(400, 240), 64).float()
    assert crop.shape == (3, 64, 64) and abs(float(crop.mean()) - 100) < 1
    step = 210 / 64 * 200 / 399  # of brightness, from one of its pixels to the next
    assert abs(float(crop[0, 0, -1] - crop[0, 0, 0]) - 63 * step) < 2
    assert folders.centre_crop(ramp(12, 10), 64).shape == (3, 64, 64)


def test_a_large_jpeg_is_decoded_small_and_shows_the_same(tmp_path, monkeypatch):
    from PIL import Image

    ramp(1600, 1200).save(tmp_path / "a.jpg", quality=95)
    seen, crop = [], Image.Image.crop
    monkeypatch.setattr(Image.Image, "crop", lambda image, box: seen.append(image.size) or crop(image, box))
    crops = []
    for file in ("a.jpg", "a.png"):
        Image.open(tmp_path / "a.jpg").save(tmp_path / "a.png")
        with Image.open(tmp_path / file) as image:
            crops.append(folders.square(image, (100, 400, 800, 900), 128).float())
    assert seen == [(400, 300), (1600, 1200)]  # a quarter: the box then has 200x225 pixels
    torch.testing.assert_close(crops[0], crops[1], atol=3, rtol=0)


def test_random_crops_repeat_with_their_seed_and_differ_without():
    for recipe in ({}, dict(ra_ops=2, ra_magnitude=27.0, ra_deviation=1.5, erasing=1.0)):
        crops = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            crops.append(folders.random_crop(ramp(70, 50), 32, **recipe))
        assert crops[0].shape == (3, 32, 32) and torch.equal(crops[0], crops[1]) and not torch.equal(crops[0], crops[2])


def test_a_training_crop_is_mirrored_half_the_time_and_each_operation_done_half_the_time(monkeypatch):
    from PIL import Image

    boxes, done, erased, random_box = [], [], [], folders.random_box
    monkeypatch.setattr(folders, "random_box", lambda *args: boxes.append(args) or random_box(*args))
    monkeypatch.setattr(folders, "apply_op", lambda images, *_: done.append(1) or images)
    monkeypatch.setattr(folders, "erased", lambda image: erased.append(1) or image)
    torch.manual_seed(0)
    columns = 3 * np.arange(70, dtype=np.uint8)  # brighter rightwards
    image = Image.fromarray(np.tile(columns[:, None], (50, 1, 3)))
    crops = [folders.random_crop(image, 16, 2, 9.0, 0.5, 0.25) for _ in range(400)]
    assert 160 < sum(bool(crop[0, 8, 0] > crop[0, 8, -1]) for crop in crops) < 240
    assert 340 < len(done) < 460 and 65 < len(erased) < 135
    assert set(boxes) == {(50, 70, 0.08, 1.0, 3 / 4)}
    assert folders.random_crop(Image.new("RGB", (1000, 10)), 16).shape == (3, 16, 16)  # where no box fits


# ---- runs


@pytest.mark.parametrize("pipeline", ["resnet", "deit"])
def test_both_pipelines_train_and_leave_what_the_other_scripts_leave(data_dir, tmp_path, capsys, pipeline):
    run(data_dir, tmp_path, "--pipeline", pipeline)
    head, *epochs = records.read_log(tmp_path / "mimetic-seed0" / "log.jsonl")
    recipe = train_imagenet.PIPELINES[pipeline]
    free = {"epochs", "batch_size", "lr", "warmup_epochs"}  # flags here
    assert {key: head["config"][key] for key in recipe if key not in free} == {
        key: value for key, value in recipe.items() if key not in free
    }
    assert [record["step"] for record in epochs] == [4, 8]  # 36 images by 10
    result = json.loads((tmp_path / "mimetic-seed0" / "result.json").read_text())
    assert result["test_acc"] == epochs[-1]["test_acc"] and result["classes"] == 3 and result["unreadable"] == 0
    assert "36 training images of 3 classes, 12 to evaluate" in capsys.readouterr().out
    assert "| mimetic | 1 |" in (tmp_path / "summary.md").read_text()


def test_the_deit_recipe_reaches_crops_mixing_loss_model_and_optimizer(data_dir, tmp_path, monkeypatch):
    crops, mixed, made = [], [], []
    open_loader, mix, adamw = train_imagenet.open_loader, train_imagenet.mix, train_imagenet.adamw

    def loader(s, folder, rows, crop, device):
        crops.append(crop)
        return open_loader(s, folder, rows, crop, device)

    def mixing(images, soft, mixup, cutmix, rng):
        mixed.append((soft.min().item(), mixup, cutmix))
        return mix(images, soft, mixup, cutmix, rng)

    def optimizer(model, s):
        made.append((model, adamw(model, s)))
        return made[-1][1]

    for name, double in (("open_loader", loader), ("mix", mixing), ("adamw", optimizer)):
        monkeypatch.setattr(train_imagenet, name, double)
    _, log = run(data_dir, tmp_path, *"--pipeline deit --init mimetic --warmup-epochs 1 --pos-scale 2".split())
    assert crops[0].func is folders.random_crop and folders.centre_crop in crops
    assert crops[0].keywords == dict(ra_ops=2, ra_magnitude=27.0, ra_deviation=1.5, erasing=0.25)
    assert mixed[0] == (pytest.approx(0.1 / 3), 0.8, 1.0)
    ((model, adam),) = made
    assert model.cls_token is not None and model.pos_scale == 2 and log[0]["config"]["repeats"] == 3
    rates = [learning_rate(i, 8, 0.05 * 10 / 512, 0.5) for i in (3, 7)]
    assert [record["lr"] for record in log[1:]] == rates and [g["lr"] for g in adam.param_groups] == [rates[1]] * 2
    assert [group["weight_decay"] for group in adam.param_groups] == [0.05, 0.0]


def test_inits_differ_in_attention_alone_and_seeds_in_everything():
    s, cpu = train_imagenet.settings(TINY), torch.device("cpu")
    default, mimetic, other = (
        train_imagenet.build(s, init, seed, 3, cpu) for init, seed in (("default", 0), ("mimetic", 0), ("mimetic", 1))
    )
    weights, drawn, anew = default.state_dict(), mimetic.state_dict(), other.state_dict()
    changed = {name for name in weights if not torch.equal(weights[name], drawn[name])}
    assert changed and all(".attn." in name for name in changed) and mimetic.cls_token is None
    assert all(not torch.equal(drawn[name], anew[name]) for name in changed | {"head.weight"})


def test_training_learns_the_colours_of_three_classes(data_dir, tmp_path):
    _, log = run(data_dir, tmp_path, "--init", "mimetic", "--epochs", "12")
    assert log[-1]["test_acc"] > 70 and log[-1]["train_loss"] < 0.8 < log[1]["train_loss"]  # chance: 33 %, 1.1 nats


def test_workers_change_nothing_and_hold_two_batches_each(data_dir, tmp_path):
    flags = ("--init", "mimetic", "--pipeline", "deit", "--epochs", "1")
    alone, _ = run(data_dir, tmp_path / "alone", *flags)
    two, _ = run(data_dir, tmp_path / "two", *flags, "--workers", "2")
    assert same(alone, two)
    asked = []  # what the workers have been told to read
    plan = ([asked.append(i) or (i, 0)] for i in range(36))
    folder = folders.read_folder(Path(data_dir) / "train")
    for got, _ in enumerate(folders.batches(folder, plan, folders.centre_crop, 32, workers=2), start=1):
        assert len(asked) - got <= 2 * 2


@pytest.mark.parametrize("pipeline", ["resnet", "deit"])
def test_a_run_that_was_stopped_within_an_epoch_ends_with_the_same_bits(data_dir, tmp_path, monkeypatch, pipeline):
    flags = ("--init", "mimetic", "--pipeline", pipeline)
    whole, log = run(data_dir, tmp_path / "whole", *flags)
    read = loop.Run.read_losses

    def interrupt(run):
        loop.interrupted = run.state["step"] == 6
        read(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "read_losses", interrupt)
        with pytest.raises(SystemExit) as stop:
            run(data_dir, tmp_path / "cut", *flags)
    assert stop.value.code == 130
    resumed, log2 = run(data_dir, tmp_path / "cut", *flags, "--resume")
    assert same(whole, resumed) and [a["train_loss"] for a in log if "train_loss" in a] == [
        a["train_loss"] for a in log2 if "train_loss" in a
    ]


def test_two_ranks_give_the_weights_and_the_evaluation_of_one(data_dir, tmp_path):
    flags = [*TINY, "--init", "mimetic", "--data-dir", data_dir, "--micro-batch", "3", "--lr", "0.01"]
    flags += "--mixup 0.8 --cutmix 1 --batch-size 12".split()  # even shares, whose pairs are those of one process
    contents = []
    for processes in (1, 2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        ended = subprocess.run(
            [sys.executable, *(launcher if processes > 1 else []), "train_imagenet.py", *flags, "--out",
             str(tmp_path / str(processes))],
            cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        folder = tmp_path / str(processes) / "mimetic-seed0"
        contents.append((checkpoint.read(folder / "last.pt")["model"], records.read_log(folder / "log.jsonl")[-1]))
    (one, record), (two, record2) = contents
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=2e-5, rtol=1e-3)
    assert record["test_acc"] == record2["test_acc"] and record["train_loss"] == pytest.approx(record2["train_loss"])
    assert "2 processes" in ended.stdout and ended.stdout.count("| mimetic |") == 1


def test_unreadable_images_are_named_once_left_out_and_counted(tmp_path, capsys):
    write_folders(tmp_path / "photos", per_class=4, val=2)
    bad = [tmp_path / "photos" / name for name in ("train/apple/000.jpg", "train/cherry/002.jpg", "val/banana/001.jpg")]
    for file, content in zip(bad, (b"", b"no image", jpeg((9, 9, 9), 64)[:-200])):
        file.write_bytes(content)
    _, log = run(str(tmp_path / "photos"), tmp_path / "out", "--init", "mimetic", "--batch-size", "3")
    printed = capsys.readouterr().out
    for file in bad:
        assert len(re.findall(rf"left out, for it cannot be read: .*{file.parent.name}.{file.name}", printed)) == 1
    assert log[-1]["unreadable"] == 3
    result = json.loads((tmp_path / "out" / "mimetic-seed0" / "result.json").read_text())
    assert result["unreadable"] == 3 and result["test_acc"] * 5 / 100 == pytest.approx(round(result["test_acc"] / 20))


# ---- bad input

ROWS = [
    ("--data-dir nowhere", "there is no folder nowhere.train; --data-dir wants train/CLASS"),
    ("--pipeline diet", "diet is none of resnet, deit; did you mean deit?"),
    ("--heads 5", "5 heads do not divide the width 24"),
    ("--patch-size 7", "patches of 7 pixels do not tile"),
    ("--drop-path 1", "drop_path is a probability below 1"),
    ("--mixup -1", "argument --mixup: -1.0 is not at least 0"),
    ("--smoothing 2", "argument --smoothing: 2.0 is not between 0 and 1"),
    ("--repeats 0", "argument --repeats: 0 is not at least 1"),
    ("--workers -2", "argument --workers: -2 is not at least -1"),
    (
        "--init mimetik",
        "did you mean mimetic?",
    ),
    ("--init mimetic --alpha1 1e39", "alpha and beta must be finite numbers"),
]


@pytest.mark.parametrize("flags, words", ROWS)
def test_bad_input_gets_one_sentence_and_begins_nothing(data_dir, tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run(data_dir, tmp_path / "out", *flags.split())
    text = stop.value.code if isinstance(stop.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert re.search(re.escape(words).replace("nowhere\\.train", "nowhere.train"), text) and "\n" not in text
    assert not list(tmp_path.rglob("log.jsonl"))


def test_one_class_or_none_is_refused(data_dir, tmp_path):
    (tmp_path / "train" / "apple").mkdir(parents=True)
    (tmp_path / "train" / "apple" / "a.jpg").write_bytes(jpeg((1, 2, 3), 32))
    with pytest.raises(SystemExit, match="must hold one folder a class, of two classes or more; it holds apple"):
        run(str(tmp_path), tmp_path / "out")
