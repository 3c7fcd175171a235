"""Faults that people have met, a test a kind: a run goes on or ends with a sentence, and reports no wrong number."""

import argparse
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import inits
import sample
import train_cifar
import train_imagenet
import train_lm
from inputs import download, folders, images, text
from official_formats import write_cifar10, write_folders, write_tiny_imagenet
from training import checkpoint, loop, records, start
from vit import ViT

ROOT = Path(__file__).resolve().parent.parent
TINY = "--init mimetic --width 24 --depth 1 --precision fp32 --device cpu".split()
CIFAR = [*TINY, *"--patch-size 8 --epochs 2 --batch-size 16 --augment crop --lr 1e-3".split()]
LM = [*TINY, *"--context 16 --heads 2 --batch-size 4 --steps 8 --lr 1e-3".split()]
PHOTOS = [*TINY, *"--image-size 32 --patch-size 8 --epochs 3 --batch-size 10 --workers 0".split()]
WORDS = "the cat sat on the mat, and the dog on the log.\n"


@pytest.fixture
def commands(tmp_path):
    """The three scripts by the kind of data, with their flags; the data lie in tmp_path/data."""
    pytest.importorskip("PIL", reason="photographs are decoded with Pillow (pip install pillow)")
    data = tmp_path / "data"
    write_cifar10(data, per_batch=20)
    write_folders(data)
    (data / "book.txt").write_text(WORDS * 60, encoding="utf-8")
    out = ["--out", str(tmp_path / "out")]
    return {
        "images": (train_cifar, [*CIFAR, "--data-dir", str(data), *out]),
        "text": (train_lm, [*LM, "--text", str(data / "book.txt"), *out]),
        "photos": (train_imagenet, [*PHOTOS, "--data-dir", str(data), *out]),
    }


def run(command, *flags):
    """Run a script as it runs in a terminal, but in this process; returns its exit status, or its last sentence."""
    script, known = command
    try:
        start.run_script(lambda: script.main([*known, *flags]))
    except SystemExit as end:
        return end.code
    return 0


def result(tmp_path):
    return tmp_path / "out" / "mimetic-seed0" / "result.json"


def step_of(tmp_path):
    return checkpoint.read(tmp_path / "out" / "mimetic-seed0" / "last.pt")["state"]["step"]


def at_step(monkeypatch, step, act):
    """Call act(run) in the `step`-th step of a run."""
    read = loop.Run.read_losses

    def read_losses(run):
        if run.state["step"] == step:
            act(run)
        read(run)

    monkeypatch.setattr(loop.Run, "read_losses", read_losses)


# ---- work destroyed


def test_photographs_that_vanish_end_the_run_and_keep_its_checkpoint(commands, tmp_path, monkeypatch):
    at_step(monkeypatch, 5, lambda run: shutil.rmtree(tmp_path / "data" / "train"))
    assert re.search(r"No such file or directory: .*\.jpg", run(commands["photos"]))
    assert step_of(tmp_path) == 4 and not result(tmp_path).exists()


def test_of_an_image_only_its_decoding_may_fail(commands, tmp_path, monkeypatch):
    folder = folders.read_folder(tmp_path / "data" / "train")
    for error in (MemoryError, TypeError):

        def crop(image, size, error=error):
            raise error

        with pytest.raises(error):
            folders.Crops(folder, crop, 8)[0, 0]


def test_weights_that_are_infinite_are_never_saved(commands, tmp_path, monkeypatch):
    def spoil(run):
        with torch.no_grad():
            next(run.model.parameters()).view(-1)[0] = math.inf

    at_step(monkeypatch, 3, spoil)
    assert re.search(
        "weights became infinite .* in step 3.*last.pt is of step 2", run(commands["images"], "--save-every", "0")
    )
    assert step_of(tmp_path) == 2


def test_an_evaluation_that_is_not_a_number_is_a_failure(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(train_cifar, "evaluate", lambda *_: (10.0, math.nan))
    assert "test_loss became nan in step 7" in run(commands["images"])
    losses = iter([1.0, math.nan])  # on the validation part, and in the end on the test part
    monkeypatch.setattr(train_lm, "evaluate", lambda *_: next(losses))
    assert "test_bpc became nan in step 8" in run(commands["text"], "--seeds", "1")
    assert not list(tmp_path.rglob("result.json"))
    with pytest.raises(ValueError):
        records.write_json(tmp_path / "a.json", dict(loss=math.nan))


KILLED = """
import os, signal, sys, train_lm
from training import loop
read = loop.Run.read_losses
def read_losses(run):
    if run.state["step"] == 3 and os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    read(run)
loop.Run.read_losses = read_losses
from training.start import run_script
run_script(train_lm.main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has gone")
def test_ranks_save_and_end_when_torchrun_is_killed(commands, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    flags = [*commands["text"][1], "--steps", "100000"]
    ended = subprocess.run(
        [*launcher, str(tmp_path / "killed.py"), *flags], cwd=ROOT, env=environment, timeout=120, capture_output=True
    )  # waits for all who could still write
    assert ended.returncode == -signal.SIGKILL and b"--resume goes on" in ended.stdout and 3 <= step_of(tmp_path) < 1000


# ---- other data, another process


@pytest.mark.parametrize("kind", ["images", "text", "photos"])
def test_a_run_is_not_resumed_on_other_data(commands, tmp_path, monkeypatch, kind):
    data = tmp_path / "data"
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda run: setattr(loop, "interrupted", signal.SIGINT))
        assert run(commands[kind]) == 130
    shutil.copytree(data, tmp_path / "moved")  # the same data elsewhere are the same
    change = {
        "images": lambda: write_cifar10(shutil.rmtree(data) or data, per_batch=21),
        "text": lambda: (data / "book.txt").write_text(WORDS.replace("cat", "cow") * 60),
        "photos": lambda: (data / "train" / "cherry" / "000.jpg").rename(data / "train" / "apple" / "999.jpg"),
    }
    change[kind]()
    sentence = run(commands[kind], "--resume")
    assert re.search(r"is of a run on other data \(.*\d+ items \w+, now \d+ items", sentence), sentence
    if kind != "text":  # whose path is a setting
        assert run(commands[kind], "--resume", "--data-dir", str(tmp_path / "moved")) == 0
    else:
        shutil.copy(tmp_path / "moved" / "book.txt", data)
        assert run(commands[kind], "--resume") == 0
    change = json.loads(result(tmp_path).read_text())["data"]
    assert re.fullmatch(
        r"\d+ items \w{12}", change["train files" if kind == "photos" else "train" if kind == "text" else "classes"]
    )


def test_a_folder_is_one_living_process_alone(commands, tmp_path):
    folder = tmp_path / "out" / "mimetic-seed0"
    code = "import sys, time; from pathlib import Path; from training import records; " + (
        "records.lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(100)"
    )
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        assert "another process trains in" in run(commands["text"])
        other.kill()
    (folder / "last.99.tmp").touch()  # of a run that was killed as it saved
    assert run(commands["text"]) == 0 and not list(folder.glob("*.tmp"))


def test_a_checkpoint_is_loaded_with_resume_alone(commands, tmp_path, monkeypatch):
    at_step(monkeypatch, 5, lambda run: setattr(loop, "interrupted", signal.SIGINT))
    assert run(commands["text"]) == 130
    monkeypatch.setattr(records, "check_folders", lambda *_: [])  # as if it had come into being just now
    assert run(commands["text"]) == 130 and step_of(tmp_path) == 5


# ---- photographs


@pytest.mark.parametrize("where", ["train", "val", "train/banana"])
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_nothing_to_train_or_evaluate_on_is_said_before_a_run_begins(commands, tmp_path, where, content):
    for file in (tmp_path / "data" / where).rglob("*.jpg"):
        file.write_bytes(content)
    assert re.search(r"no image in .*\w+ can be decoded: they are empty", run(commands["photos"]))
    assert not list(tmp_path.rglob("log.jsonl"))
    write_folders(shutil.rmtree(tmp_path / "data") or tmp_path / "data")
    assert run(commands["photos"], "--resume") == 0 and json.loads(result(tmp_path).read_text())["unreadable"] == 0


def test_more_than_a_fifth_of_damaged_images_ends_the_run(commands, tmp_path):
    for file in sorted((tmp_path / "data" / "train").rglob("*.jpg"))[1:9]:  # eight of 36
        file.write_bytes(file.read_bytes()[:-200])
    assert re.search("8 of the 36 images in .*train cannot be read.*Up to 20%", run(commands["photos"]))


def test_which_files_count(tmp_path):
    root, other = tmp_path / "train", tmp_path / "other" / "deep"
    for name in ("cat/a.jpg", "dog/b.jpg", "cat/.ipynb_checkpoints/a.jpg", "__MACOSX/cat/._a.jpg", "dog/@eaDir/b.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "dog" / "._b.jpg").touch()
    (root / "dog" / "0.jpg").mkdir()
    other.mkdir(parents=True)
    (other / "c.jpg").touch()
    (root / "cat" / "linked").symlink_to(tmp_path / "other", target_is_directory=True)
    (other / "loop").symlink_to(tmp_path / "other", target_is_directory=True)
    if hasattr(os, "mkfifo"):
        os.mkfifo(root / "cat" / "pipe.jpg")
    folder = folders.read_folder(root)
    names = ["cat/a.jpg", "cat/linked/deep/c.jpg", "dog/b.jpg"]
    assert folder.classes == ("cat", "dog") and [name.replace(os.sep, "/") for name in folder.files] == names


def test_a_pipe_among_tiny_imagenets_files_is_not_waited_for(tmp_path):
    pytest.importorskip("PIL", reason="needs Pillow")
    unpacked = write_tiny_imagenet(tmp_path, unpacked=True)
    file = next((unpacked / "train").rglob("*.JPEG"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="there is no file"):
        images.load_tiny_imagenet(tmp_path, download=False)


def test_photographs_are_upright_and_32_bits_a_pixel_are_refused(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, :30] = 255  # white on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: what is left in the file is above
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    crop = folders.load_image(tmp_path / "a.jpg", folders.centre_crop, 16)
    assert crop[:, 0].min() > 250 and crop[:, -1].max() < 5
    for kind in (np.int32, np.float32):
        Image.fromarray(np.full((20, 20), 70, kind)).save(tmp_path / "a.tif")
        with pytest.raises(folders.Damaged, match="32 bits a pixel"):
            folders.load_image(tmp_path / "a.tif", folders.centre_crop, 16)


# ---- the shell around a run


def test_half_of_torchruns_environment_is_one_sentence(commands, monkeypatch):
    for left in (dict(WORLD_SIZE="8"), dict(RANK="3", WORLD_SIZE="8", MASTER_ADDR="node7"), dict(WORLD_SIZE="two")):
        with monkeypatch.context() as patch:
            for name, value in left.items():
                patch.setenv(name, value)
            assert re.search("WORLD_SIZE=.* is set, but not by torchrun: unset that", run(commands["text"]))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run(commands["text"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("shell", ["{} | head -n 1", "{} > /dev/full", "{} >&-"])
def test_a_run_goes_on_when_nobody_listens(commands, tmp_path, shell):
    command = f"{sys.executable} train_lm.py {' '.join(commands['text'][1])}"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", shell.format(command)], cwd=ROOT, capture_output=True)
    assert ended.returncode == 0 and not ended.stderr and result(tmp_path).exists()


def test_sigterm_saves_and_ends_with_143(commands, tmp_path, monkeypatch):
    at_step(monkeypatch, 3, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    assert run(commands["text"]) == 143 and step_of(tmp_path) == 3
    assert run(commands["text"], "--resume") == 0


@pytest.mark.parametrize("script", ["train_cifar.py", "sample.py", "reproduce.py", "figures.py"])
def test_scripts_start_under_pythonsafepath(script, tmp_path):
    safe = dict(os.environ, PYTHONSAFEPATH="1")
    assert not subprocess.run([sys.executable, ROOT / script, "--help"], cwd=tmp_path, env=safe).returncode


@pytest.mark.parametrize("script", ["train_lm.py", "train_cifar.py", "sample.py"])
def test_ctrl_c_in_the_first_seconds_is_no_traceback(script):
    with subprocess.Popen([sys.executable, script, "--help"], cwd=ROOT, stderr=subprocess.PIPE) as process:
        while (
            b"torch" not in Path(f"/proc/{process.pid}/maps").read_bytes() if Path("/proc/self/maps").exists() else ()
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT and not process.stderr.read()


def test_what_the_machine_lacks_is_one_sentence(commands, monkeypatch):
    def fails(error):
        def train(*_):
            raise error

        monkeypatch.setattr(train_lm, "train", train)
        return run(commands["text"])

    for error in (
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ):
        assert "lower --batch-size" in fails(error)
    assert "--workers 0" in fails(RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."))
    assert "/dev/shm" in fails(OSError(28, "No space left on device"))
    assert "use torchrun, or unset" in fails(RuntimeError("Timed out after 301 seconds. 1/2 clients joined."))
    assert fails(OSError(5, "Input/output error", "a.jpg")).endswith("Input/output error: 'a.jpg'.")
    with pytest.raises(RuntimeError, match="a bug"):
        fails(RuntimeError("a bug"))


def test_a_tilde_is_the_home_of_its_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert train_lm.settings(["--out=~/runs"]).out == os.path.expanduser("~/runs") != "~/runs"


# ---- text


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("unit", ["char", "word"])
def test_a_text_of_one_line_needs_no_line_end(tmp_path, end, unit):
    (tmp_path / "a.txt").write_text("ab ba " * 99 + "ab" + end)
    assert text.load_files([tmp_path / "a.txt"], unit).vocabulary == (
        (" ", "a", "b") if unit == "char" else ("ab", "ba")
    )


def test_prompts_that_are_empty_or_no_text(commands, tmp_path, capsys):
    assert run(commands["text"]) == 0
    folder = str(tmp_path / "out" / "mimetic-seed0")
    capsys.readouterr()
    sample.main([folder, "--prompt", "", "--length", "3"])
    assert len(capsys.readouterr().out) == 1 + 3 + 1
    with pytest.raises(SystemExit, match="is not UTF-8"):
        sample.main([folder, "--prompt", "caf\udce9"])


# ---- files of others


def test_checkpoints_of_others_are_read_or_told_apart(tmp_path):
    model = ViT(dim=24, depth=1, heads=3, patch_size=8)
    weights, file = model.state_dict(), str(tmp_path / "a.pth")
    for prefix, key in (
        ("", "model"),
        ("model.", "state_dict"),
        ("module.backbone.", "state_dict"),
        ("", "state_dict_ema"),
    ):
        extra = dict(args=argparse.Namespace(lr=0.1), best=np.float64(81.2), epoch=np.int64(3))
        torch.save({key: {prefix + name: W for name, W in weights.items()}, **extra}, file)
        assert inits.read_checkpoint(file)[0].keys() == weights.keys()
        assert len(inits.transfer_init_(model, file)) == 3
    torch.save(dict(model=model), file)
    with pytest.raises(ValueError, match=r"it holds a vit.ViT: save the state_dict\(\) alone"):
        inits.read_checkpoint(file)
    torch.save({"encoder.layer.0.weight": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match="has no blocks.0.attn.qkv.weight, but encoder.layer.0.weight"):
        inits.transfer_init_(model, file)


@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar_pickled_anew_is_read(tmp_path, protocol):
    write_cifar10(tmp_path, per_batch=20)
    expected = images.load_cifar10(tmp_path)
    for file in (tmp_path / "cifar-10-batches-py").iterdir():
        content = images.read_pickle(file)
        if "labels" in content:
            content["labels"] = np.array(content["labels"]) if protocol == 5 else [*map(np.int64, content["labels"])]
        file.write_bytes(pickle.dumps({key.encode(): value for key, value in content.items()}, protocol))
    found = images.load_cifar10(tmp_path)
    assert torch.equal(found.train_images, expected.train_images) and torch.equal(
        found.train_labels, expected.train_labels
    )


def test_what_is_made_of_data_in_a_folder_that_is_read_only_lies_in_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert download.kept(tmp_path, "a") == tmp_path / "a"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert download.kept(tmp_path, "a").parent.parent == tmp_path / "cache" / "mimetic"
    (tmp_path / "a").touch()  # made when it was writable
    assert download.kept(tmp_path, "a") == tmp_path / "a"


@pytest.mark.parametrize("spoil", ["", "{}", "[]", "truncated", "range"])
def test_a_damaged_cache_of_encoded_text_is_made_again(tmp_path, spoil):
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    for file in text.WIKITEXT_FILES:
        (folder / file).write_text("a b <unk> a\n" * 20)
    whole = text.load_wikitext103(tmp_path).train.clone()
    encoded = folder / "wiki.train.tokens.npy"
    if spoil == "truncated":
        encoded.write_bytes(encoded.read_bytes()[:-8])
    elif spoil == "range":
        np.save(encoded, np.full(100, 99, np.int32))
    else:
        (folder / "vocabulary.json").write_text(spoil)
    assert torch.equal(text.load_wikitext103(tmp_path).train, whole)


# ---- files of ours, damaged by hand


def test_a_damaged_checkpoint_is_one_sentence(commands, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda run: setattr(loop, "interrupted", signal.SIGINT))
        assert run(commands["text"]) == 130
    file = tmp_path / "out" / "mimetic-seed0" / "last.pt"
    saved = checkpoint.read(file)
    for name, value in [
        ("step", -1),
        ("step", "3"),
        ("step", None),
        ("step", 10**9),
        ("items", math.nan),
        ("record", []),
    ]:
        torch.save(dict(saved, state=dict(saved["state"], **{name: value})), file)
        assert "last.pt is damaged" in run(commands["text"], "--resume")
    other = torch.optim.AdamW([torch.zeros(3, requires_grad=True)] * 1)
    emptied = dict(saved["optimizer"], state={})
    for optimizer in (other.state_dict(), emptied, {}, 7):
        torch.save(dict(saved, optimizer=optimizer), file)
        assert "last.pt is damaged" in run(commands["text"], "--resume")
    torch.save(dict(saved, state={}), file)
    assert "last.pt is damaged" in run(commands["text"], "--resume")
    torch.save(saved, file)
    (file.parent / "log.jsonl").write_text('[1]\n7\n{"config": [1]}\n{"step": "x"}\n')
    assert "no longer says what the settings" in run(commands["text"], "--resume")
    (file.parent / "log.jsonl").write_bytes(b"\xff\n7\n")
    assert run(commands["text"], "--resume") == 0


def test_a_damaged_result_stops_its_own_run_alone(commands, tmp_path):
    assert run(commands["text"]) == 0
    (tmp_path / "out" / "default-seed0").mkdir()
    low = json.dumps(dict(json.loads(result(tmp_path).read_text()), init="default", test_bpc="low"))
    for content in ("", "7", "[]", '{"config": [1]}', low):
        (tmp_path / "out" / "default-seed0" / "result.json").write_text(content)
        assert "default-seed0/result.json is damaged" in run(commands["text"], "--resume", "--init", "default")
    assert run(commands["text"], "--seeds", "1") == 0


# ---- absurd numbers

HUGE = "1" + 51 * "0"
ABSURD = """--seeds HUGE|--batch-size 9223372036854775808|--width 1000000|--depth 2000000000|--heads 2000000000
--context 2147483648|--context 2000000000|--threads 100000|--steps HUGE|--lr 1e300|--alpha1 1e300|--pos-scale 1e300
--embed-scale 1e300|--weight-decay 1e300|--save-every 1e300 --clip 1e300|--eval-stride 2000000000"""


@pytest.mark.parametrize("flags", re.split(r"[|\n]", ABSURD))
def test_absurd_numbers_are_one_sentence(commands, capsys, flags):
    ended = run(commands["text"], *flags.replace("HUGE", HUGE).split())
    error = capsys.readouterr().err.splitlines()
    ended = error[-1] if ended == 2 else ended
    assert ended == 0 if "save-every" in flags else "\n" not in ended and len(ended) < 400, ended
