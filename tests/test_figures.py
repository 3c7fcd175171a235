"""Checkpoints are read as the models they come from, the table's figures are right, and pictures are written."""

import json

import pytest
import torch
from test_layouts import HEADS, LAYERS
from torch import nn

import figures
import measures
from layouts import attention_layers
from mimetic import expected_attention, mimetic_init_, sinusoids_2d
from vit import ViT

CONFIG = dict(width=24, depth=2, heads=3, patch_size=8, pool="mean", dataset="shapes")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, with what a training script leaves in it."""
    torch.manual_seed(0)
    model = ViT(dim=24, depth=2, heads=3, patch_size=8, pool="mean")
    mimetic_init_(model, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("runs") / "mimetic-seed0"
    folder.mkdir()
    torch.save(dict(model=model.state_dict(), config=CONFIG), folder / "last.pt")
    curve = [dict(epoch=epoch, test_acc=40.0 + epoch) for epoch in (1, 2)]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, [dict(run="mimetic-seed0"), *curve])))
    return folder


def test_the_diagonal_is_measured_in_deviations_of_the_rest():
    M = torch.tensor([[[3.0, 1, -1], [1, 3, -1], [1, -1, -3]]])
    ratio, share = measures.diagonal(M)
    assert ratio == pytest.approx(1 / 1.2**0.5) and share == pytest.approx(2 / 3)


def test_a_mimetic_model_has_positive_and_negative_diagonals(run, capsys):
    figures.main(["weights", str(run)])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| blocks")]
    assert [row[0].strip() for row in rows] == ["blocks.0.attn", "blocks.1.attn"]
    for _, qk, qk_share, vp, vp_share in rows:
        assert float(qk) > 1 and float(vp) < -3
        assert int(qk_share.strip(" %")) > 80 and int(vp_share.strip(" %")) == 0


@pytest.mark.parametrize("library", LAYERS)
def test_a_state_dict_is_read_as_the_model_it_comes_from(library):
    model = nn.ModuleDict({"layer": LAYERS[library]()[0]})
    read = measures.skeleton({f"module._orig_mod.{k}": v for k, v in model.state_dict().items()}, HEADS)
    (a,), (b,) = attention_layers(model), attention_layers(read)
    assert a.name == b.name and all(torch.equal(x, y) for x, y in zip(a[2:], b[2:], strict=True))


def test_what_is_missing_is_said_in_one_sentence(tmp_path):
    torch.save(nn.MultiheadAttention(8, 2).state_dict(), tmp_path / "weights.pt")
    for arguments, words in [
        ([str(tmp_path / "weights.pt")], "figures|does not say how many heads"),
        ([str(tmp_path / "nothing.pt")], "there is no file"),
        (["timm:vit_tiny_patch16_224"], "pip install timm") if not installed("timm") else (["x"], "there is no file"),
    ]:
        with pytest.raises(SystemExit, match=words):
            figures.main(["weights", *arguments])
    with pytest.raises(SystemExit, match="holds no runs"):
        figures.main(["curves", str(tmp_path)])


def installed(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_curves_are_read_from_folders_and_from_result_files(run, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(dict(init="default", seed=1, test_acc=31.0, curve=[[1, 30.0], [2, 31.0]])))
    score, curves = measures.read_curves([str(run.parent), str(run), str(results)])
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(dict(init="default", seed=1, curve=[[1, 40.0]])))
    with pytest.raises(ValueError, match="another run has default, seed 1"):
        measures.read_curves([str(results), str(other)])
    (run.parent / "renamed").mkdir()
    (run.parent / "renamed" / "log.jsonl").write_text((run / "log.jsonl").read_text())
    with pytest.raises(ValueError, match="renamed is not called INIT-seedK"):
        measures.read_curves([str(run.parent / "renamed")])
    (run.parent / "renamed" / "log.jsonl").unlink()
    other.write_text(json.dumps(dict(init="default", seed=1, valid_bpc=2.0, curve=[[1, 2.0]])))
    assert measures.read_curves([str(other)]) == ("valid_bpc", {"default": {1: {1: 2.0}}})
    with pytest.raises(ValueError, match="several scores, test_acc, valid_bpc"):
        measures.read_curves([str(run), str(other)])
    assert score == "test_acc"
    assert curves == {"mimetic": {1: {0: 41.0}, 2: {0: 42.0}}, "default": {1: {1: 30.0}, 2: {1: 31.0}}}


def test_the_expected_map_is_that_of_the_runs_scale_of_positions(tmp_path, monkeypatch):
    model, drawn = ViT(dim=24, depth=2, heads=3, patch_size=8, pool="mean", pos_scale=2.0), {}
    torch.save(
        dict(model=model.state_dict(), config=dict(CONFIG, pos="sinusoidal", pos_scale=2.0)), tmp_path / "last.pt"
    )
    monkeypatch.setattr(figures, "subplots", lambda rows, columns, size: (None, [[None] * columns]))
    monkeypatch.setattr(figures, "show_map", lambda axis, A, title: drawn.update({title: A}))
    monkeypatch.setattr(figures, "save", lambda *_: None)
    figures.main(["attention", str(tmp_path)])
    torch.testing.assert_close(drawn["expected"], expected_attention(2 * sinusoids_2d(4, 4, 24), 0.7, 8))


def test_maps_of_models_of_different_sizes_are_not_drawn_as_one(run, tmp_path):
    torch.save(dict(model={}, config=dict(CONFIG, heads=1)), tmp_path / "last.pt")
    with pytest.raises(SystemExit, match="another heads than"):
        figures.main(["attention", str(run), str(tmp_path)])


def test_pictures_are_written(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setitem(measures.SIZES, "depth", 1)  # a fraction of the time
    learned = tmp_path / "last.pt"
    model = ViT(dim=24, depth=2, heads=3, patch_size=8, pool="mean", pos="learned")
    torch.save(dict(model=model.state_dict(), config=dict(CONFIG, pos="learned")), learned)
    for name, arguments in {
        "weights.png": ["weights", str(run), str(run)],
        "attention.svg": ["attention", str(run)],
        "learned.png": ["attention", str(learned)],
        "impulses.png": ["impulses"],
        "curves.png": ["curves", str(run.parent)],
    }.items():
        figures.main([*arguments, "--out", str(tmp_path / name)])
        assert (tmp_path / name).stat().st_size > 5000
    assert (tmp_path / "weights-1.png").is_file()
