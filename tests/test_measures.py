"""The residual stream of an untrained model is what the recursion of docs/depth.md says."""

import math

import pytest
import torch

import figures
import train_cifar
from inputs.augment import normalize
from measures import center, directions, predict_stream, stream, stream_of
from mimetic import mimetic_init_, value_proj
from vit import ViT


@pytest.mark.parametrize("alpha, beta", [(0.4, 0.4), (0.2, 0.2), (0.4, 0.1), (0.0, 0.1)])
def test_pre_norm_layers_whose_tokens_attend_to_themselves_follow_the_recursion(alpha, beta):
    draws = torch.Generator().manual_seed(0)
    first = x = 0.8 * center(torch.randn(64, 256, generator=draws))
    scales, cosines = [], []
    for _ in range(7):
        scales.append(float(x.square().mean().sqrt()))
        cosines.append(float(torch.cosine_similarity(x, first).mean()))
        W_V, W_proj = value_proj(256, alpha, beta, draws)
        x = center(x + torch.nn.functional.layer_norm(x, (256,)) @ W_V @ W_proj)
    predicted = predict_stream(scales[0], [1.0] * 6, alpha, beta)
    assert predicted["scale"] == pytest.approx(scales, abs=0.02)
    assert predicted["cosine"] == pytest.approx(cosines, abs=0.06)  # of random vectors: deviation 1/16


def test_on_an_input_of_norm_one_a_layer_does_what_the_paper_writes():
    found = predict_stream(1.0, [1.0], alpha2=0.3, beta2=0.4)  # X <- (1 - beta2) X + alpha2 X Z
    scale = math.hypot(1 - 0.4, 0.3)
    assert found["scale"][1] == pytest.approx(scale) and found["cosine"][1] == pytest.approx((1 - 0.4) / scale)


@pytest.mark.parametrize("start", [0.8, 4.0])
@pytest.mark.parametrize("kappa", [0.6, 1.0])
def test_the_scale_ends_where_the_embedding_has_left_whatever_attention_keeps(start, kappa):
    found = predict_stream(start, [kappa] * 200, alpha2=0.4, beta2=0.4)
    assert found["scale"][-1] == pytest.approx(0.4, abs=1e-3) and abs(found["cosine"][-1]) < 1e-3
    layers = next(layer for layer, cosine in enumerate(found["cosine"]) if cosine < 0.5)
    assert abs(layers - start / (0.4 * kappa)) <= 2  # a subtraction per layer, not a factor


@pytest.mark.parametrize(
    "flags", ["", "--alpha2 0.2 --beta2 0.2", "--pos-scale 2", "--depth 6 --parts vp --patch-size 4"]
)
def test_an_untrained_vit_follows_the_recursion(flags):
    sizes = "--dataset shapes --width 96 --depth 12 --patch-size 8".split()
    measured, predicted = stream_of(f"mimetic {flags}", sizes)
    assert predicted["scale"] == pytest.approx(measured["scale"], abs=0.08)
    assert predicted["cosine"] == pytest.approx(measured["cosine"], abs=0.25)
    assert measured["cosine"][-1] < 0.5


def test_the_default_init_leaves_the_stream_as_it_was_embedded():
    measured, _ = stream_of("default", "--dataset shapes --width 96 --patch-size 8".split())
    assert len(measured["scale"]) == 13 == len(measured["kept"]) + 1
    assert min(measured["cosine"]) > 0.95
    assert measured["scale"][-1] == pytest.approx(measured["scale"][0], rel=0.1)


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_class_tokens_are_not_measured(pool):
    torch.manual_seed(0)
    model = ViT(image_size=8, dim=24, depth=2, heads=3, pool=pool)
    mimetic_init_(model, generator=torch.Generator().manual_seed(0))
    images = torch.randn(2, 3, 8, 8)
    if pool == "cls":
        with torch.no_grad():
            model.cls_token.fill_(0).add_(100 * torch.randn(24))  # as large as anything
    assert stream(model, images)["scale"][0] == pytest.approx(
        float(center(patches(model, images)).detach().square().mean().sqrt())
    )


def test_fewer_directions_come_through_the_deeper_a_mimetic_model_is():
    found = {}
    for depth in (0, 4, 12):
        for init in ("default", "mimetic"):
            torch.manual_seed(0)
            model = ViT(image_size=16, patch_size=4, dim=48, depth=depth, heads=3, pool="mean")
            if init == "mimetic" and depth:
                mimetic_init_(model, generator=torch.Generator().manual_seed(0))
            found[init, depth] = directions(
                model, torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
            )
    assert found["default", 0] == pytest.approx(46, abs=0.5)  # LayerNorm takes the mean and the length away
    assert found["default", 12] > 36
    for depth in (4, 12):  # a product of L Gaussian matrices keeps 1/(L + 1) of them
        assert 0.5 < found["mimetic", depth] * (depth + 1) / 48 < 2


def patches(model, images):
    return model.embed(images)[:, -16:]


def test_a_runs_stream_is_measured_and_a_wrong_source_is_told(tmp_path):
    tiny = "--dataset shapes --width 24 --depth 2 --patch-size 8 --device cpu --epochs 1 --limit 20 --augment none"
    train_cifar.main([*tiny.split(), "--init", "mimetic", "--out", str(tmp_path)])
    run = str(tmp_path / "mimetic-seed0")
    data = train_cifar.load_data(train_cifar.settings(["--dataset", "shapes"]))
    model = train_cifar.build(train_cifar.settings(tiny.split()), "default", 0, data, torch.device("cpu"))
    model.load_state_dict(torch.load(f"{run}/last.pt", weights_only=True)["model"])
    measured, predicted = stream_of(run, [])
    found = stream(model, normalize(data.test_images[:64], data.mean, data.std))
    assert {**measured, **found} == measured and not predicted
    torch.save(dict(model={}, config=dict(context=8)), tmp_path / "text.pt")
    for source, words in [
        (str(tmp_path / "text.pt"), "no run of train_cifar"),
        ("mimetik", "there is no checkpoint"),
        ("default --local-layers 1 --attention gpsa", "without --local-layers"),
    ]:
        with pytest.raises(SystemExit, match=words):
            figures.main(["stream", source, "--out", str(tmp_path / "stream.png")])


def test_flags_behind_a_name_are_its_own(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    sizes = "--flags=--dataset shapes --width 24 --depth 2 --heads 2 --patch-size 8"
    out = tmp_path / "stream.svg"
    figures.main(["stream", "default", "mimetic --depth 1", sizes, "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| layers before | default | mimetic --depth 1 |" and lines[-3].endswith(" |  |")
    assert out.stat().st_size > 5000
