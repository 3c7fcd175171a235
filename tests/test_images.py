"""Facts about images.py: official files are read, wrong ones refused, and shapes need local structure."""

import hashlib
import http.client
import io
import os
import pickle
import tarfile
import tempfile
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

from inputs import images
from inputs.download import progress
from inputs.shapes import SHAPES, draw
from official_formats import CIFAR10_CLASSES, python2_pickle, write_cifar10, write_cifar100

WRITERS = {"cifar10": write_cifar10, "cifar100": write_cifar100}
WRONG = ["range", "negative", "few", "text", "none", "columns", "kind", "keys", "list"]
BOTH = pytest.mark.parametrize("name", WRITERS)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def offline(url, **_):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", offline)


@pytest.fixture(scope="module")
def shapes():
    return images.load_images("shapes")


def change(monkeypatch, name, **fields):
    monkeypatch.setitem(images.ARCHIVES, name, images.ARCHIVES[name]._replace(**fields))


def make_archive(path, monkeypatch, name, extra=()):
    """A small archive in `path`, whose MD5 passes for the official one. Returns its path."""
    archive = path / images.ARCHIVES[name].archive
    with tempfile.TemporaryDirectory() as elsewhere, tarfile.open(archive, "w:gz") as tar:
        folder = WRITERS[name](elsewhere)
        tar.add(folder, arcname=folder.name)
        for member, content in extra:
            tar.addfile(member, io.BytesIO(content))
    change(monkeypatch, name, md5=hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


def serve(monkeypatch, content, announced=None, error=None):
    """Let urlopen answer with `content`, and then with `error`."""

    class Response(io.BytesIO):
        headers = {"Content-Length": str(len(content) if announced is None else announced)}

        def read(self, size=-1):
            chunk = super().read(size)
            if not chunk and error is not None:
                raise error
            return chunk

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(content))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def one_sentence(error, *parts):
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text


def ridge_accuracy(train, train_labels, test, test_labels, penalty):
    train, test = (torch.cat([x, torch.ones(len(x), 1)], dim=1) for x in (train, test))
    targets = torch.nn.functional.one_hot(train_labels).float()
    gram = train.T @ train + penalty * torch.eye(train.shape[1])
    weights = torch.linalg.solve(gram, train.T @ targets)
    return ((test @ weights).argmax(1) == test_labels).float().mean().item()


# ---- loading official files


@pytest.mark.parametrize("per_batch", [1, 300])
def test_cifar10_comes_back_pixel_for_pixel_in_file_order(tmp_path, per_batch):
    folder = write_cifar10(tmp_path, per_batch=per_batch)
    data = images.load_images("cifar10", tmp_path, download=False)
    raw = [pickle.loads((folder / f"data_batch_{i}").read_bytes(), encoding="bytes") for i in range(1, 6)]
    rows = np.concatenate([batch[b"data"] for batch in raw])
    assert data.train_images.shape == (5 * per_batch, 3, 32, 32) and data.train_images.dtype == torch.uint8
    for channel in range(3):
        plane = rows[:, 1024 * channel : 1024 * (channel + 1)].reshape(-1, 32, 32)
        assert np.array_equal(data.train_images[:, channel].numpy(), plane)
    assert data.train_labels.tolist() == sum((batch[b"labels"] for batch in raw), [])
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert data.test_images.shape == (per_batch, 3, 32, 32) and len(data.test_labels) == per_batch
    assert data.classes == tuple(CIFAR10_CLASSES)


def test_cifar100_has_its_fine_labels(tmp_path):
    write_cifar100(tmp_path, train_size=250, test_size=100)
    data = images.load_images("cifar100", str(tmp_path), download=False)
    assert data.train_labels.bincount().min() == 2 and data.train_labels.max() == 99
    assert data.test_labels.sort().values.tolist() == list(range(100))
    assert data.classes[99] == "fine_99" and len(data.classes) == 100
    assert data.name == "cifar100" and data.std == (0.2673, 0.2564, 0.2762)


def test_folders_that_python_3_pickled_load_too(tmp_path):
    folder = write_cifar10(tmp_path)
    for name in ("test_batch", "batches.meta"):
        content = pickle.loads((folder / name).read_bytes(), encoding="bytes")
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))
    data = images.load_cifar10(tmp_path)
    assert len(data.test_labels) == 20 and data.classes == tuple(CIFAR10_CLASSES)


@pytest.mark.filterwarnings("error")
def test_loading_warns_about_nothing(tmp_path):
    write_cifar10(tmp_path)
    images.load_cifar10(tmp_path)


def test_an_unknown_name_is_answered_with_the_names_and_the_nearest():
    for call in (images.load_images, images.is_available):
        with pytest.raises(ValueError, match="did you mean cifar10") as error:
            call("cifar-10")
        one_sentence(error, *images.DATASETS)


# ---- wrong files


@BOTH
@pytest.mark.parametrize("wrong", WRONG)
def test_a_batch_with_wrong_content_is_refused_by_name(tmp_path, name, wrong):
    folder, source = WRITERS[name](tmp_path), images.ARCHIVES[name]
    path, top = folder / source.test_file, source.num_classes
    wrong_labels = {"range": [1, 2, top], "negative": [1, 2, -1], "few": [1, 2], "text": [b"1", b"2", b"3"]}
    labels = wrong_labels.get(wrong, [0, 1, top - 1])
    data = np.zeros((3, 3072), np.uint8)
    data = {"columns": data[:, :3000], "kind": data.astype(np.int16), "none": data[:0]}.get(wrong, data)
    batch = {b"data": data, source.labels_key.encode(): [] if wrong == "none" else labels}
    batch = {"keys": {b"images": data}, "list": [1, 2]}.get(wrong, batch)
    path.write_bytes(python2_pickle(batch))
    with pytest.raises(ValueError) as error:
        images.load_images(name, tmp_path)
    one_sentence(error, path)


@BOTH
def test_a_truncated_batch_is_refused_wherever_it_ends(tmp_path, name):
    folder = WRITERS[name](tmp_path)
    path = folder / images.ARCHIVES[name].train_files[0]
    whole = path.read_bytes()
    for length in (0, 1, 10, 60, 200, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError) as error:
            images.load_images(name, tmp_path)
        one_sentence(error, path, "try again")


def test_a_pickle_that_wants_to_run_something_is_refused_before_it_runs(tmp_path):
    folder, trace = write_cifar10(tmp_path), tmp_path / "trace"
    for payload in (
        f"cos\nsystem\n(S'touch {trace}'\ntR.".encode(),
        f"cbuiltins\nexec\n(S'open({str(trace)!r}, \"w\")'\ntR.".encode(),
        b"cnumpy\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05numpy\x8c\x0fcore.multiarray\x93.",
    ):
        (folder / "data_batch_2").write_bytes(payload)
        with pytest.raises(ValueError) as error:
            images.load_cifar10(tmp_path)
        one_sentence(error, folder / "data_batch_2", "it asks for")
    assert not trace.exists()


def test_class_names_must_be_as_many_as_the_classes(tmp_path):
    folder = write_cifar10(tmp_path)
    (folder / "batches.meta").write_bytes(python2_pickle({b"label_names": [b"cat"]}))
    with pytest.raises(ValueError, match="batches.meta does not list 10"):
        images.load_cifar10(tmp_path)


# ---- archives


@BOTH
def test_an_archive_is_unpacked_once_and_read(tmp_path, monkeypatch, name):
    archive = make_archive(tmp_path, monkeypatch, name)
    first = images.load_images(name, tmp_path, download=False)
    assert names_in(tmp_path) == sorted([archive.name, images.ARCHIVES[name].folder])
    archive.unlink()
    again = images.load_images(name, tmp_path, download=False)
    assert torch.equal(first.train_images, again.train_images)


def test_another_process_may_be_faster_at_unpacking(tmp_path, monkeypatch):
    make_archive(tmp_path, monkeypatch, "cifar10")
    replace = os.replace

    def late(source, destination):
        write_cifar10(tmp_path, seed=9)
        replace(source, destination)

    monkeypatch.setattr(os, "replace", late)
    images.load_cifar10(tmp_path)
    assert names_in(tmp_path) == ["cifar-10-batches-py", images.ARCHIVES["cifar10"].archive]


@BOTH
def test_a_wrong_archive_is_not_opened(tmp_path, monkeypatch, name):
    archive = tmp_path / images.ARCHIVES[name].archive
    archive.write_bytes(b"<html>404</html>")
    monkeypatch.setattr(tarfile, "open", lambda *_: pytest.fail("opened"))
    with pytest.raises(ValueError) as error:
        images.load_images(name, tmp_path)
    one_sentence(error, f"delete {archive} and try again", "MD5")
    assert names_in(tmp_path) == [archive.name]


def test_only_expected_regular_files_leave_the_archive(tmp_path, monkeypatch):
    inside = "cifar-10-batches-py"
    climber, stranger = tarfile.TarInfo("../climber"), tarfile.TarInfo(f"{inside}/stranger")
    climber.size = stranger.size = 4
    link = tarfile.TarInfo(f"{inside}/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    (tmp_path / "data").mkdir()
    extra = [(climber, b"evil"), (stranger, b"evil"), (link, b"")]
    make_archive(tmp_path / "data", monkeypatch, "cifar10", extra)
    images.load_cifar10(tmp_path / "data")
    assert names_in(tmp_path) == ["data"]
    assert names_in(tmp_path / "data" / inside) == sorted(images.ARCHIVES["cifar10"].files)


def test_a_link_or_a_climbing_path_in_place_of_a_batch_counts_as_missing(tmp_path, monkeypatch):
    archive = tmp_path / images.ARCHIVES["cifar10"].archive
    folder = write_cifar10(tmp_path / "elsewhere")
    with tarfile.open(archive, "w:gz") as tar:
        for file in names_in(folder)[:-2]:
            tar.add(folder / file, arcname=f"{folder.name}/{file}")
        link = tarfile.TarInfo(f"{folder.name}/test_batch")
        link.type, link.linkname = tarfile.SYMTYPE, str(folder / "test_batch")
        tar.addfile(link)
        tar.add(folder / "data_batch_5", arcname=f"../{folder.name}/data_batch_5")
    change(monkeypatch, "cifar10", md5=hashlib.md5(archive.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="lacks data_batch_5, test_batch"):
        images.load_cifar10(tmp_path)
    assert names_in(tmp_path) == [archive.name, "elsewhere"]


# ---- absent files, downloads


@BOTH
@pytest.mark.parametrize("download", [True, False])
def test_absent_files_are_told_with_what_to_put_where(tmp_path, name, download):
    source, data_dir = images.ARCHIVES[name], tmp_path / "data"
    with pytest.raises(FileNotFoundError) as error:
        images.load_images(name, data_dir, download)
    one_sentence(error, source.archive, source.folder, data_dir, "`--demo`")
    assert ("no route to host" in str(error.value)) == download
    assert not data_dir.exists()


def test_an_incomplete_folder_is_told_with_what_it_lacks(tmp_path):
    folder = write_cifar10(tmp_path)
    (folder / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError) as error:
        images.load_cifar10(tmp_path)
    one_sentence(error, folder, "data_batch_3")
    assert not images.is_available("cifar10", tmp_path)


@BOTH
def test_a_download_is_checked_kept_and_read(tmp_path, monkeypatch, capsys, name):
    content = make_archive(tmp_path, monkeypatch, name).read_bytes()
    serve(monkeypatch, content)
    data, source = images.load_images(name, tmp_path / "new" / "data"), images.ARCHIVES[name]
    assert names_in(tmp_path / "new" / "data") == sorted([source.archive, source.folder])
    assert len(data.classes) == source.num_classes
    captured = capsys.readouterr()
    first, last = captured.err.splitlines()  # plain lines, since it is no terminal
    assert captured.out == "" and first.startswith(f"downloading {source.archive}: 0 of ") and last.endswith(" MB")


@pytest.mark.parametrize("total", [3, 0])
def test_progress_is_one_line_of_a_terminal_and_two_of_a_file(monkeypatch, capsys, total):
    def told():
        for done in range(4):
            progress("fetching", done, total, "MB")
        progress("fetching", 3, 3, "MB") if not total else None
        return capsys.readouterr().err

    assert told().splitlines() == [f"fetching: 0{' of 3' * bool(total)} MB", "fetching: 3 of 3 MB"]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    text = told()
    assert text.count("\n") == 1 and text.endswith("\rfetching: 3 of 3 MB\n") and text.startswith("\rfetching: 0")


def test_a_download_that_ends_early_or_is_a_web_page_leaves_nothing(tmp_path, monkeypatch):
    content = make_archive(tmp_path, monkeypatch, "cifar10").read_bytes()
    for wrong, announced, kind in (
        (content[:-1], len(content), FileNotFoundError),
        (b"", len(content), FileNotFoundError),
        (b"<html>sign in</html>", None, ValueError),
    ):
        serve(monkeypatch, wrong, announced)
        with pytest.raises(kind) as error:
            images.load_cifar10(tmp_path / "data")
        early = f"the connection ended after {len(wrong):,} of {len(content):,} bytes"
        one_sentence(error, early if announced else "is not the official file", "try again")
        assert names_in(tmp_path / "data") == []


@pytest.mark.parametrize(
    "interruption",
    [TimeoutError("timed out"), ConnectionResetError(), http.client.IncompleteRead(b""), KeyboardInterrupt()],
)
def test_an_interrupted_download_leaves_nothing(tmp_path, monkeypatch, interruption):
    serve(monkeypatch, b"half of it", announced=20, error=interruption)
    expected = KeyboardInterrupt if isinstance(interruption, KeyboardInterrupt) else FileNotFoundError
    with pytest.raises(expected) as error:
        images.load_cifar10(tmp_path)
    assert names_in(tmp_path) == []
    if expected is FileNotFoundError:
        one_sentence(error, "could not download", "cifar-10-batches-py")
    assert not images.is_available("cifar10", tmp_path)


@BOTH
def test_availability_follows_the_files(tmp_path, name):
    assert not images.is_available(name, tmp_path / "absent")
    assert not images.is_available(name, tmp_path)
    archive = tmp_path / images.ARCHIVES[name].archive
    archive.touch()
    assert images.is_available(name, tmp_path)
    archive.unlink()
    WRITERS[name](tmp_path)
    assert images.is_available(name, str(tmp_path))
    assert images.is_available("shapes", tmp_path / "absent")


def test_the_official_archives_are_the_published_ones():
    assert images.ARCHIVES["cifar10"].url == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert images.ARCHIVES["cifar10"].md5 == "c58f30108f718f92721af3b95e74349a"
    assert images.ARCHIVES["cifar100"].url == "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
    assert images.ARCHIVES["cifar100"].md5 == "eb9058c3a382ffc7106e4002c42a8d85"


# ---- subsets


@pytest.mark.parametrize("limit", [1, 7, 10, 95, 100, 1000])
def test_a_subset_has_as_many_of_each_class_give_or_take_one(limit):
    labels = torch.randperm(1000, generator=torch.Generator().manual_seed(1)) % 10
    chosen = images.balanced_subset(labels, limit)
    counts = labels[chosen].bincount(minlength=10)
    assert chosen.dtype == torch.int64 and len(chosen.unique()) == limit
    assert counts.max() - counts.min() <= 1


def test_a_subset_depends_on_its_seed_and_begins_every_larger_one():
    labels = torch.arange(500) % 10
    whole = images.balanced_subset(labels, 500, seed=3)
    for limit in (1, 37, 499):
        assert torch.equal(images.balanced_subset(labels, limit, seed=3), whole[:limit])
    assert not torch.equal(images.balanced_subset(labels, 500, seed=4), whole)


def test_the_odd_ones_out_are_not_always_the_first_classes():
    labels = torch.arange(500) % 10
    firsts = {labels[images.balanced_subset(labels, 1, seed)].item() for seed in range(20)}
    assert len(firsts) > 3


def test_a_class_with_too_few_images_gives_all_it_has():
    labels = torch.tensor([0] * 50 + [1] * 3 + [3] * 50)
    chosen = images.balanced_subset(labels, 43)
    assert labels[chosen].bincount().tolist() == [20, 3, 0, 20]


@pytest.mark.parametrize("limit", [0, -1, 101])
def test_a_subset_of_an_impossible_size_is_refused(limit):
    with pytest.raises(ValueError, match=f"1 to 100 images here, not {limit}"):
        images.balanced_subset(torch.arange(100) % 10, limit)


# ---- shapes


def test_shapes_are_uint8_images_of_ten_balanced_classes(shapes):
    assert shapes.train_images.shape == (10_000, 3, 32, 32) and shapes.test_images.shape == (2_000, 3, 32, 32)
    assert shapes.train_images.dtype == torch.uint8 and shapes.train_labels.dtype == torch.int64
    assert shapes.train_labels.bincount().tolist() == [1000] * 10
    assert shapes.test_labels.bincount().tolist() == [200] * 10
    assert len(shapes.classes) == 10 and shapes.name == "shapes"
    assert shapes.train_labels[:100].unique().numel() > 5  # not sorted by class


def test_shapes_statistics_are_those_of_the_pixels(shapes):
    pixels = shapes.train_images.float() / 255
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(shapes.mean), atol=0.005)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(shapes.std), atol=0.005)


def test_shapes_are_the_same_for_a_seed_and_others_for_another():
    first, again, other = (images.load_shapes(train_size=53, test_size=21, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.train_images, again.train_images)
    assert torch.equal(first.test_labels, again.test_labels)
    assert not torch.equal(first.train_images, other.train_images)
    assert len(first.train_labels) == 53 and first.test_labels.bincount().tolist() == [3] + [2] * 9
    assert images.load_shapes(train_size=1, test_size=1).test_images.shape == (1, 3, 32, 32)
    with pytest.raises(ValueError, match="test_size 0 must be at least 1"):
        images.load_shapes(test_size=0)


def test_shapes_to_test_are_not_those_to_train_even_in_equal_numbers():
    data = images.load_shapes(train_size=30, test_size=30)
    assert not torch.equal(data.train_images.sort(0).values, data.test_images.sort(0).values)


def test_no_two_shapes_are_alike_and_none_is_empty(shapes):
    everything = torch.cat([shapes.train_images, shapes.test_images]).flatten(1).numpy()
    assert len({row.tobytes() for row in everything}) == 12_000
    assert everything.std(1).min() > 10


def test_a_label_is_that_of_the_figure_drawn(shapes):
    def edges(pixels):
        return pixels.float().diff(dim=-1).abs().mean().item()

    rng = np.random.default_rng(1)
    alone = [edges(torch.from_numpy(draw(strokes, 500, rng))) for strokes in SHAPES.values()]
    labelled = [edges(shapes.train_images[shapes.train_labels == label]) for label in range(10)]
    assert labelled == pytest.approx(alone, rel=0.013) and max(alone) > 1.15 * min(alone)
    assert shapes.classes == tuple(SHAPES)


def test_mean_colour_does_not_tell_a_shape(shapes):
    train, test = ((x.float() / 255).mean((2, 3)) for x in (shapes.train_images, shapes.test_images))
    assert ridge_accuracy(train, shapes.train_labels, test, shapes.test_labels, 1e-3) < 0.15


def test_a_linear_classifier_on_pixels_hardly_tells_a_shape(shapes):
    train, test = (x.flatten(1).float() / 255 - 0.5 for x in (shapes.train_images, shapes.test_images))
    assert ridge_accuracy(train, shapes.train_labels, test, shapes.test_labels, 100.0) < 0.2


def test_the_nearest_training_image_hardly_tells_a_shape(shapes):
    train, test = (x.flatten(1).float() / 255 - 0.5 for x in (shapes.train_images, shapes.test_images[:500]))
    guess = shapes.train_labels[torch.cdist(test, train).argmin(1)]
    assert (guess == shapes.test_labels[:500]).float().mean() < 0.2


@pytest.mark.skipif(not os.environ.get("CIFAR_DIR"), reason="set CIFAR_DIR to a folder that has CIFAR-10")
def test_the_real_cifar10_has_its_sizes():
    data = images.load_cifar10(os.environ["CIFAR_DIR"], download=False)
    assert data.train_labels.bincount().tolist() == [5000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    mean = (data.train_images[::10].float() / 255).mean((0, 2, 3))
    assert torch.allclose(mean, torch.tensor(data.mean), atol=0.01)
