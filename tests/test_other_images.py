"""SVHN and Tiny ImageNet in their official formats, from small files with the official layout."""

import hashlib
import sys
import urllib.error
import urllib.request
import zipfile

import numpy as np
import pytest
import torch

import train_cifar
from inputs import images, other_images
from official_formats import WNIDS, jpeg, write_svhn, write_tiny_imagenet
from training.flags import parse_settings

TINY = "--width 24 --depth 1 --epochs 1 --batch-size 16 --init default --precision fp32 --device cpu".split()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def offline(url, **_):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", offline)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def svhn(tmp_path, monkeypatch):
    pytest.importorskip("scipy", reason="SVHN's files are read with scipy")
    pixels = write_svhn(tmp_path)
    for name in pixels:
        monkeypatch.setitem(images.SVHN_MD5, name, md5(tmp_path / name))
    return pixels


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    pytest.importorskip("PIL", reason="Tiny ImageNet is decoded with Pillow")
    archive = write_tiny_imagenet(tmp_path)
    monkeypatch.setattr(other_images, "TINY_MD5", md5(archive))
    return archive


# ---- SVHN


def test_svhn_comes_back_pixel_for_pixel_and_label_10_is_digit_0(tmp_path, svhn):
    data = images.load_images("svhn", tmp_path, download=False)
    for got, name in ((data.train_images, "train_32x32.mat"), (data.test_images, "test_32x32.mat")):
        assert got.dtype == torch.uint8 and got.is_contiguous()
        for i in (0, -1):
            assert np.array_equal(got[i].permute(1, 2, 0).numpy(), svhn[name][..., i])
    assert data.train_labels.dtype == torch.int64 and data.train_labels.bincount().tolist() == [6] * 10
    brightness = torch.stack([data.train_images[data.train_labels == c].float().mean() for c in range(10)])
    assert data.classes == tuple("0123456789") and (brightness.diff() > 10).all()  # made so, digit by digit


def test_a_wrong_svhn_file_is_refused_by_name(tmp_path, svhn):
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"test_32x32.mat is not the official file \(MD5 .*delete"):
        images.load_svhn(tmp_path)


def test_absent_svhn_files_are_told_with_what_to_put_where(tmp_path, svhn):
    (tmp_path / "train_32x32.mat").unlink()
    for download, words in ((False, "there is no train_32x32.mat"), (True, "could not download train_32x32.mat")):
        with pytest.raises(FileNotFoundError, match=f"{words}.*put.*housenumbers/train_32x32.mat"):
            images.load_svhn(tmp_path, download)


# ---- Tiny ImageNet


def test_tiny_imagenet_has_its_labels_names_and_gray_images(tmp_path, tiny):
    data = images.load_images("tiny-imagenet", tmp_path, download=False)
    assert data.train_images.shape == (12, 3, 64, 64) and data.train_images.dtype == torch.uint8
    assert data.classes == ("goldfish", "Egyptian cat", "coral reef")  # in the order of their ids
    assert data.train_labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.test_labels.tolist() == [1, 0, 2, 1, 0, 2]  # val_annotations.txt goes round WNIDS
    for label, wnid in enumerate(sorted(WNIDS)):
        for i, image in enumerate(data.train_images[data.train_labels == label]):
            middle = image[:, 32, 32].float()
            if i == 3:
                assert len(middle.unique()) == 1
            else:
                colour = torch.tensor([40.0 * WNIDS.index(wnid), 30.0 * i, 100.0])
                torch.testing.assert_close(middle, colour, atol=3, rtol=0)
    torch.testing.assert_close(data.test_images[:, 1, 5, 5].float(), torch.arange(6) * 40.0, atol=3, rtol=0)


def test_statistics_of_tiny_imagenet_are_those_of_all_training_pixels(tmp_path, tiny):
    data = images.load_tiny_imagenet(tmp_path)
    pixels = data.train_images.double().transpose(0, 1).flatten(1) / 255
    torch.testing.assert_close(torch.tensor(data.mean).double(), pixels.mean(1))
    torch.testing.assert_close(torch.tensor(data.std).double(), pixels.std(1, correction=0))


@pytest.mark.filterwarnings("error")
def test_tiny_imagenet_is_decoded_once_and_mapped_into_memory_after(tmp_path, tiny, monkeypatch):
    first = images.load_tiny_imagenet(tmp_path)
    tiny.unlink()
    monkeypatch.setitem(sys.modules, "PIL", None)  # later loads need neither the zip file nor Pillow
    second = images.load_tiny_imagenet(tmp_path, download=False)
    assert torch.equal(first.train_images, second.train_images) and first[4:] != () and first[5:] == second[5:]
    maps = [np.load(tmp_path / images.TINY_DECODED / "train_images.npy", mmap_mode="r")]
    second.train_images.zero_()  # a copy on write: the file stays
    assert maps[0].any()


def test_an_unpacked_copy_of_tiny_imagenet_is_used_as_it_is(tmp_path, tiny):
    zipped = images.load_tiny_imagenet(tmp_path)
    other = tmp_path / "other"
    write_tiny_imagenet(other, unpacked=True)
    unpacked = images.load_tiny_imagenet(other, download=False)
    assert torch.equal(zipped.train_images, unpacked.train_images)
    assert torch.equal(zipped.test_labels, unpacked.test_labels)


def spoil(archive, monkeypatch, name, content):
    """Write the zip file anew with one file changed, or left out."""
    with zipfile.ZipFile(archive) as old:
        files = {entry: old.read(entry) for entry in old.namelist()}
    files[f"tiny-imagenet-200/{name}"] = content
    with zipfile.ZipFile(archive, "w") as new:
        for entry, data in files.items():
            if data is not None:
                new.writestr(entry, data)
    monkeypatch.setattr(other_images, "TINY_MD5", md5(archive))


@pytest.mark.parametrize(
    "name, content, words",
    [
        (f"train/{WNIDS[0]}/images/{WNIDS[0]}_1.JPEG", b"no image", "n02124075_1.JPEG of Tiny ImageNet cannot be read"),
        (f"train/{WNIDS[0]}/images/{WNIDS[0]}_1.JPEG", None, "n02124075_1.JPEG of Tiny ImageNet cannot be read"),
        ("val/images/val_1.JPEG", 32, "val_1.JPEG is not of 64x64 pixels"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn99999999\t0\t0\t1\t1\n", "is not as the official one"),
        ("wnids.txt", None, "is not as the official one"),
    ],
)
def test_spoiled_files_of_tiny_imagenet_are_named_and_leave_nothing(tmp_path, tiny, monkeypatch, name, content, words):
    spoil(tiny, monkeypatch, name, jpeg((1, 2, 3), content) if isinstance(content, int) else content)
    with pytest.raises(ValueError, match=words):
        images.load_tiny_imagenet(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [tiny.name]


def test_a_damaged_copy_of_the_decoded_images_is_refused(tmp_path, tiny):
    images.load_tiny_imagenet(tmp_path)
    (tmp_path / images.TINY_DECODED / "test_images.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="uint8 is damaged .*delete it"):
        images.load_tiny_imagenet(tmp_path)


def test_a_wrong_or_absent_zip_file_is_told_with_what_to_do(tmp_path, tiny, monkeypatch):
    tiny.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="tiny-imagenet-200.zip is not the official file"):
        images.load_tiny_imagenet(tmp_path)
    tiny.unlink()
    for download, words in ((False, "there is no tiny"), (True, "could not download tiny")):
        with pytest.raises(FileNotFoundError, match=f"{words}-imagenet-200.zip.*put.*unpacked folder"):
            images.load_tiny_imagenet(tmp_path, download)


# ---- both


@pytest.mark.parametrize("name, package", [("svhn", "scipy"), ("tiny-imagenet", "PIL")])
def test_a_missing_package_is_named_before_anything_is_downloaded(tmp_path, monkeypatch, name, package):
    for module in (package, f"{package}.io"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match="needs one package more: pip install (scipy|pillow)"):
        images.load_images(name, tmp_path)


def test_availability_of_both_follows_the_files(tmp_path):
    assert not images.is_available("svhn", tmp_path) and not images.is_available("tiny-imagenet", tmp_path)
    for name in images.SVHN_MD5:
        (tmp_path / name).touch()
    (tmp_path / "tiny-imagenet-200.zip").touch()
    assert images.is_available("svhn", tmp_path) and images.is_available("tiny-imagenet", tmp_path)


def test_both_train_with_the_papers_patch_sizes(tmp_path, svhn, tiny, monkeypatch):
    seen, train = [], train_cifar.train
    monkeypatch.setattr(train_cifar, "train", lambda s, *rest: seen.append(s) or dict(init="x", seed=0, test_acc=0))
    for name, flags in (("svhn", []), ("tiny-imagenet", []), ("tiny-imagenet", ["--patch-size", "16"])):
        train_cifar.main([*TINY, "--dataset", name, "--data-dir", str(tmp_path), *flags])
    assert [s.patch_size for s in seen] == [2, 4, 16]  # a flag wins
    train(seen[-1], "default", 0, train_cifar.load_data(seen[-1]), torch.device("cpu"), "fp32")  # from memory maps


def test_digits_are_not_mirrored():
    stripes = torch.arange(32, dtype=torch.uint8).mul(8).expand(64, 3, 32, 32)  # brighter to the right
    s = parse_settings(train_cifar.Settings, ["--augment", "crop"], "", {})
    for name, share in (("svhn", 0), ("cifar10", 0.5)):
        data = images.load_shapes(train_size=1, test_size=1)._replace(name=name)
        data = data._replace(train_labels=torch.zeros(64, dtype=torch.int64))
        indices, draws = next(train_cifar.batches(s, 0, data, 0, torch.device("cpu")))
        out = train_cifar.prepare_images(stripes[indices], s, data, draws)
        mirrored = (out[:, 0, 16, 10] > out[:, 0, 16, 20]).float().mean()
        assert abs(mirrored - share) < 0.2 and bool(mirrored) == bool(share)
