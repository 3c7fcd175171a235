"""Bad input to the scripts gets one sentence that says what to do: no traceback, and nothing is begun or lost.

A row: what is wrong with the flags (or, as a function of the folder, with the files), and words of the sentence.
"""

import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import train_cifar
import train_lm
from official_formats import python2_pickle, write_cifar10

CIFAR = "--width 24 --depth 1 --patch-size 8 --epochs 1 --batch-size 16 --device cpu --precision fp32".split()
LM = "--width 24 --depth 1 --heads 2 --context 16 --steps 2 --batch-size 4 --device cpu --precision fp32".split()
WORDS = "the cat sat on the mat, and the dog on the log.\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    write_cifar10(folder, per_batch=20)
    (folder / "book.txt").write_text(WORDS * 60, encoding="utf-8")
    return folder


@pytest.fixture
def data(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "data"))


def sentence(main, flags, capsys):
    """The one sentence on stderr of a command that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(flags)
    error = capsys.readouterr().err
    assert stop.value.code not in (0, None) and "Traceback" not in error
    if isinstance(stop.value.code, str):
        return stop.value.code
    return error.splitlines()[-1]  # argparse prints a usage line first


def refused(main, flags, out, words, capsys):
    text = sentence(main, [*flags, "--out", str(out)], capsys)
    assert re.search(words, text) and "\n" not in text and len(text) < 400, text
    assert not list(out.rglob("log.jsonl"))


# ---- flags

BOTH = [
    ("--init mimetik", "mimetik is none of .*; did you mean mimetic?"),
    ("--init mimetic,mimetic", "mimetic, mimetic twice"),
    ("--init ,", "'' is none of default"),
    ("--seeds 0,0", "0, 0 twice"),
    ("--seeds 0,x", "argument --seeds: invalid list of ints"),
    ("--seeds -1", "argument --seeds: -1 is not at least 0"),
    ("--heads 5", "5 heads do not divide the width 24; choose a divisor"),
    ("--heads 0", "argument --heads: 0 is not at least 1"),
    ("--width -24", "argument --width: -24 is not at least 1"),
    ("--width 24.5", "argument --width: invalid int value"),
    ("--depth 0", "argument --depth: 0 is not at least 1"),
    ("--epochs 0", "argument --epochs: 0 is not at least 1"),
    ("--batch-size 0", "argument --batch-size: 0 is not at least 1"),
    ("--lr -1", "argument --lr: -1.0 is not at least 0"),
    ("--lr nan", "argument --lr: nan is not"),
    ("--lr inf", "argument --lr: inf is not"),
    ("--weight-decay -1", "argument --weight-decay: -1.0 is not at least 0"),
    ("--warmup 2", "argument --warmup: 2.0 is not between 0 and 1"),
    ("--clip -1", "argument --clip: -1.0 is not at least 0"),
    ("--init mimetic --alpha1 1e39", "alpha and beta must be finite numbers"),
    ("--alpha1 inf", "argument --alpha1: inf is not finite"),
    ("--beta2 nan", "argument --beta2: nan is not finite"),
    ("--parts kq", "argument --parts: kq is none of both, qk, vp"),
    ("--save-every -1", "argument --save-every: -1.0 is not at least 0"),
    ("--threads -2", "argument --threads: -2 is not at least 0"),
    ("--precision fp8", "argument --precision: fp8 is none of auto, bf16, fp32, tf32"),
    ("--precision tf32", "tf32 is a mode of NVIDIA GPUs"),
    ("--device toaster", "torch sees only cpu"),
    ("--device cuda:99", "torch sees only cpu"),
    ("--learning-rate 1", "unknown argument --learning-rate"),
    ("--batchsize 1", "unknown argument --batchsize; did you mean --batch-size?"),
    ("--dataset cifar11", "argument --dataset: cifar11 is none of"),
]
IMAGES = [
    ("--width 26 --heads 2", "width divisible by 4"),
    ("--patch-size 5", "patches of 5 pixels do not tile"),
    ("--patch-size 64", "patches of 64 pixels do not tile"),
    ("--patch-size 0", "argument --patch-size: 0 is not at least 1"),
    ("--dataset cifar-10", "cifar-10 is none of .*; did you mean cifar10?"),
    ("--image-size 16", "--image-size 16 is less than the images' own 32"),
    ("--image-size 36", "patches of 8 pixels do not tile an image of 36"),
    ("--attention gpsa --pool cls", "gpsa has no place for a class token: --pool mean, or --local-layers"),
    ("--local-layers 1 --pool cls", "local_layers is at most 0 of 1 layers"),
    ("--init transfer", "there is no file ''; name a checkpoint"),
    ("--pool max", "argument --pool: max is none of mean, cls"),
    ("--pos rotary", "argument --pos: rotary is none of"),
    ("--pos-scale nan", "argument --pos-scale: nan is not finite"),
    ("--limit 101", "1 to 100 images here, not 101"),
    ("--limit -5", "argument --limit: -5 is not at least 0"),
    ("--holdout 100", "leaves none of the 100 images"),
    ("--eval-every 0", "argument --eval-every: 0 is not at least 1"),
    ("--micro-batch -1", "argument --micro-batch: -1 is not at least 0"),
    ("--ra-ops -1", "argument --ra-ops: -1 is not at least 0"),
    ("--ra-magnitude 31", "argument --ra-magnitude: 31.0 is not between 0 and 30"),
    ("--cutout -3", "argument --cutout: -3 is not at least 0"),
    ("--augment mixup", "argument --augment: mixup is none of"),
]
TEXT = [
    ("--width 25 --heads 5", "even width"),
    ("--context 0", "argument --context: 0 is not at least 1"),
    ("--context 5000", "too few for a window of 5000"),
    ("--eval-stride 17", "a stride lies between 1 and the context 16.*not 17"),
    ("--eval-stride -1", "argument --eval-stride: -1 is not at least 0"),
    ("--dropout 1.5", "argument --dropout: 1.5 is not between 0 and 1"),
    ("--embed-dropout 1", "embed_dropout is a probability below 1"),
    ("--beta2-adam 2", "argument --beta2-adam: 2.0 is not between 0 and 0.999999"),
    ("--steps -1", "argument --steps: -1 is not at least 0"),
    ("--text nowhere.txt", "nowhere.txt"),
]


@pytest.mark.parametrize("flags, words", [*BOTH, *IMAGES])
def test_train_cifar_refuses(original, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = [*CIFAR, "--data-dir", str(original), *flags.split()]
    refused(train_cifar.main, flags, tmp_path / "out", words, capsys)


@pytest.mark.parametrize("flags, words", [*BOTH, *TEXT])
def test_train_lm_refuses(original, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = [*LM, "--text", str(original / "book.txt"), *flags.split()]
    refused(train_lm.main, flags, tmp_path / "out", words, capsys)


# ---- files


def batch(folder, **changes):
    """Rewrite data_batch_3 with entries changed."""
    images, labels = np.zeros((20, 3072), np.uint8), [0] * 20
    content = {b"data": images, b"labels": labels, **{key.encode(): value for key, value in changes.items()}}
    (folder / "cifar-10-batches-py" / "data_batch_3").write_bytes(python2_pickle(content))


class Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def truncated(data):
    file = data / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(file.read_bytes()[:1000])


IMAGE_FILES = {
    "an empty folder, no network": (lambda data: shutil.rmtree(data / "cifar-10-batches-py"), "could not download"),
    "a batch is missing": (lambda data: (data / "cifar-10-batches-py" / "data_batch_3").unlink(), "data_batch_3"),
    "a truncated batch": (truncated, "data_batch_3"),
    "a pickle that runs code": (
        lambda data: (data / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(Code())),
        "data_batch_3",
    ),
    "labels out of range": (lambda data: batch(data, labels=[10] * 20), "data_batch_3.*label"),
    "fewer labels than images": (lambda data: batch(data, labels=[0] * 19), "data_batch_3"),
    "images of another shape": (lambda data: batch(data, data=np.zeros((20, 3000), np.uint8)), "data_batch_3"),
    "pixels of another type": (lambda data: batch(data, data=np.zeros((20, 3072), np.int16)), "data_batch_3"),
    "no labels": (lambda data: batch(data, labels=b"none"), "data_batch_3"),
    "a folder in the place of a batch": (
        lambda data: ((data / "cifar-10-batches-py" / "data_batch_3").unlink(),
                      (data / "cifar-10-batches-py" / "data_batch_3").mkdir()),
        "data_batch_3",
    ),
    "half an archive": (
        lambda data: (shutil.rmtree(data / "cifar-10-batches-py"),
                      (data / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b half")),
        "is not the official file",
    ),
}  # fmt: skip
TEXT_FILES = {
    "not UTF-8": (lambda book: book.write_bytes(b"caf\xe9 " * 200), "UTF-8"),
    "empty": (lambda book: book.write_bytes(b""), "empty|too short|too few"),
    "shorter than one context": (lambda book: book.write_text("short"), "too few|too short"),
    "a validation part shorter than two tokens": (lambda book: book.write_text("abcdefghijklmnopqrst"), "too|tokens"),
    "characters in the test part that training never saw": (
        lambda book: book.write_text(WORDS * 60 + "\u2603" * 40, encoding="utf-8"),
        "\u2603|2603",
    ),
    "a folder": (lambda book: (book.unlink(), book.mkdir()), "book.txt"),
    "missing": (lambda book: book.unlink(), "book.txt: No such file"),
}


@pytest.mark.parametrize("name", IMAGE_FILES)
def test_train_cifar_refuses_files(data, tmp_path, capsys, monkeypatch, name):
    def no_network(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.chdir(tmp_path)
    spoil, words = IMAGE_FILES[name]
    spoil(data)
    refused(train_cifar.main, [*CIFAR, "--data-dir", str(data)], tmp_path / "out", words, capsys)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("script", [train_cifar, train_lm])
def test_a_directory_that_may_not_be_read_is_refused(original, tmp_path, capsys, monkeypatch, script):
    def unreadable(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    flags = [*CIFAR, "--data-dir", str(original)] if script is train_cifar else [*LM, "--data-dir", str(original)]
    for name in ("exists", "is_file", "open", "read_bytes", "read_text"):
        monkeypatch.setattr(Path, name, unreadable)  # as root, who runs the tests in containers, may read all
    text = sentence(script.main, flags, capsys)
    assert "Permission denied" in text and "\n" not in text


@pytest.mark.parametrize("name", TEXT_FILES)
def test_train_lm_refuses_files(data, tmp_path, capsys, name):
    spoil, words = TEXT_FILES[name]
    spoil(data / "book.txt")
    refused(train_lm.main, [*LM, "--text", str(data / "book.txt")], tmp_path / "out", words, capsys)


@pytest.mark.parametrize("script", [train_cifar, train_lm])
def test_an_out_that_cannot_be_written_is_refused(original, tmp_path, capsys, script):
    (tmp_path / "file").write_text("not a folder")
    flags = (
        [*CIFAR, "--data-dir", str(original)] if script is train_cifar else [*LM, "--text", str(original / "book.txt")]
    )
    text = sentence(script.main, [*flags, "--out", str(tmp_path / "file" / "runs")], capsys)
    assert "file" in text and "\n" not in text
