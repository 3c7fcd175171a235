"""What was trained can be loaded: the model as it was, ready, without the data that it saw."""

import pytest
import torch

import train_cifar
import train_imagenet
import train_lm
from inputs.augment import normalize
from inputs.images import load_shapes
from runs import load_run
from training import records
from training.loop import Run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pool cls --pos learned",
        "--image-size 64",
        "--attention gpsa --local-layers 1 --pool cls",
        "--precision bf16",
    ],
)
def test_a_loaded_vision_model_predicts_what_the_trained_one_did(tmp_path, monkeypatch, flags):
    data, trained = load_shapes(train_size=20, test_size=20), {}
    monkeypatch.setattr(train_cifar, "load_images", lambda *_: data)
    build = train_cifar.build
    monkeypatch.setattr(
        train_cifar, "build", lambda *a: trained.setdefault("model", build(*a)) if a[1] == "mimetic" else build(*a)
    )
    tiny = "--dataset shapes --init mimetic --width 24 --depth 2 --heads 3 --patch-size 8 --epochs 1 --device cpu"
    train_cifar.main([*tiny.split(), *flags.split(), "--out", str(tmp_path)])
    monkeypatch.setattr(train_cifar, "load_images", lambda *_: pytest.fail("loading a run read its data set"))
    before = torch.get_rng_state()
    model, s, text = load_run(tmp_path / "mimetic-seed0", "cpu")
    assert torch.equal(before, torch.get_rng_state()) and text is None and not model.training
    assert records.diff_settings(records.read_head(tmp_path / "mimetic-seed0")["config"], s) == [] and s.width == 24
    images = train_cifar.upsample(normalize(data.test_images, data.mean, data.std), s.image_size)
    assert torch.equal(model(images), trained["model"].eval()(images))
    assert [*model.attention_maps(images[:5])[0].shape[:2]] == [5, 3]


def test_a_loaded_language_model_has_the_vocabulary_of_its_text(tmp_path):
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and the dog on the log.\n" * 60)
    tiny = "--context 16 --width 24 --depth 1 --heads 2 --batch-size 4 --steps 2 --dropout 0.5 --device cpu".split()
    train_lm.main([*tiny, "--text", str(tmp_path / "book.txt"), "--init", "mimetic", "--out", str(tmp_path)])
    (tmp_path / "book.txt").unlink()
    model, s, text = load_run(str(tmp_path / "mimetic-seed0"))
    assert text.unit == "char" and set(text.vocabulary) == set("the cat sat on the mat, and the dog on the log.\n")
    ids = torch.randint(len(text.vocabulary), (2, 16))
    assert torch.equal(model(ids), model(ids)) and s.dropout == 0.5  # eval mode: nothing is dropped


def test_a_run_on_folders_of_photographs_is_loaded_too(tmp_path):
    s = train_imagenet.settings("--image-size 16 --patch-size 8 --width 24 --depth 1 --heads 2".split())
    s.out = str(tmp_path)
    (tmp_path / "mimetic-seed0").mkdir()
    model = train_imagenet.build(s, "mimetic", 0, 7, CPU)
    Run(s, "mimetic", 0, model, torch.optim.AdamW(model.parameters()), 1, CPU, "fp32").save()
    loaded = load_run(tmp_path / "mimetic-seed0", CPU).model
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(images), model.eval()(images)) and loaded(images).shape == (2, 7)


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint .*last.pt"):
        load_run(tmp_path)
    torch.save(dict(model={}), tmp_path / "last.pt")
    with pytest.raises(ValueError, match="is not a run of these scripts"):
        load_run(tmp_path)
