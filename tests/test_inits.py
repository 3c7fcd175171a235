import copy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from inits import (
    INITS,
    VISION_INITS,
    conditioned_init_,
    mimetic_mlp_init_,
    orthogonal_init_,
    orthogonalize,
    rebased_init_,
    scaled_init_,
    transfer_init_,
)
from layouts import attention_layers
from lm import TransformerLM
from mimetic import mimetic_init_
from vit import ViT

CONTROLS = [scaled_init_, orthogonal_init_]


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_have_the_norms_of_a_mimetic_draw_and_none_of_its_structure(control):
    models = []
    for init in (control, mimetic_init_):
        torch.manual_seed(0)
        model = ViT(image_size=8, dim=96, depth=2, heads=3)
        init(model, alpha1=0.6, generator=torch.Generator().manual_seed(0))
        models.append(model)
    for a, b in zip(*map(attention_layers, models), strict=True):
        torch.testing.assert_close(a.W_Q.norm(dim=(1, 2)), b.W_Q.norm(dim=(1, 2)))
        torch.testing.assert_close(a.W_K.norm(dim=(1, 2)), b.W_K.norm(dim=(1, 2)))
        torch.testing.assert_close(a.W_V.norm(), b.W_V.norm())
        torch.testing.assert_close(a.W_proj.norm(), b.W_proj.norm())
        assert abs((a.W_V @ a.W_proj).diagonal().mean()) < 0.05
        assert (a.W_Q @ a.W_K.mT).diagonal(dim1=1, dim2=2).mean().abs() < 0.05
    attention = {id(p) for block in models[0].blocks for p in block.attn.parameters()}
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert id(p) in attention or torch.equal(p, q)


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_leave_alone_what_a_part_leaves_alone(control):
    for parts, untouched in [(dict(vp=False), "W_V"), (dict(qk=False), "W_Q")]:
        torch.manual_seed(0)
        model = ViT(image_size=8, dim=24, depth=1, heads=3)
        before = getattr(attention_layers(model)[0], untouched).clone()
        control(model, **parts)
        (layer,) = attention_layers(model)
        assert torch.equal(getattr(layer, untouched), before)
        assert getattr(layer, {"W_V": "W_Q", "W_Q": "W_V"}[untouched]).std() > 0.05  # 0.02 by default


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("parts", [{}, dict(vp=False), dict(qk=False)])
def test_controls_set_the_biases_of_what_they_write_to_zero(control, parts):
    layer = nn.TransformerEncoderLayer(24, 3, 48)
    with torch.no_grad():
        layer.self_attn.in_proj_bias.normal_()
        layer.self_attn.out_proj.bias.normal_()
    control(layer, **parts)
    (view,) = attention_layers(layer)
    assert view.b_Q.any() == view.b_K.any() == (parts == dict(qk=False))
    assert view.b_V.any() == view.b_proj.any() == (parts == dict(vp=False))


DIRECT = {
    "mimetic": mimetic_init_, "scaled": scaled_init_, "orthogonal": orthogonal_init_,
    "own-axes": partial(rebased_init_, basis="own"), "random-axes": partial(rebased_init_, basis="random"),
}  # fmt: skip


@pytest.mark.parametrize("parts", ["both", "qk", "vp"])
@pytest.mark.parametrize("name", DIRECT)
def test_a_name_and_settings_stand_for_an_initialization(name, parts):
    language, models = dict(alpha1=0.0, beta1=0.5, alpha2=0.2, beta2=0.3), []
    for init in (
        lambda model, draws: INITS[name](model, SimpleNamespace(**language, parts=parts), draws),
        lambda model, draws: DIRECT[name](model, **language, qk=parts != "vp", vp=parts != "qk", generator=draws),
    ):
        torch.manual_seed(0)
        models.append(ViT(image_size=8, dim=24, depth=2, heads=3))
        init(models[-1], torch.Generator().manual_seed(0))
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    torch.manual_seed(0)
    (before, _), (after, _) = (attention_layers(m) for m in (ViT(image_size=8, dim=24, depth=2, heads=3), models[0]))
    assert torch.equal(before.W_Q, after.W_Q) == (parts == "vp")
    assert torch.equal(before.W_V, after.W_V) == (parts == "qk")


def test_other_bases_keep_a_projection_times_beta_and_choose_its_axes():
    language, models = dict(alpha1=0.0, beta1=0.5, alpha2=0.2, beta2=0.2), {}
    for basis in ("first", "own", "random"):
        torch.manual_seed(0)
        model, generator = ViT(image_size=8, dim=24, depth=1, heads=3), torch.Generator().manual_seed(0)
        init = mimetic_init_ if basis == "first" else lambda *a, **k: rebased_init_(*a, basis=basis, **k)  # noqa: B023
        init(model, **language, generator=generator)
        (models[basis],) = attention_layers(model)
        for W_Q, W_K in zip(models[basis].W_Q, models[basis].W_K):
            P = W_Q @ W_K.T / 0.5
            torch.testing.assert_close(P @ P, P, atol=1e-5, rtol=0)
            assert abs(P.trace() - 8) < 1e-4
    axes = {basis: (layer.W_Q @ layer.W_K.mT).diagonal(dim1=1, dim2=2) for basis, layer in models.items()}
    assert torch.equal(axes["first"][0], axes["first"][2])
    torch.testing.assert_close(axes["own"].sum(0), torch.full((24,), 0.5))  # heads share no axis and leave none out
    assert (axes["random"] > 0.05).float().mean() > 0.5
    assert torch.equal(models["random"].W_V, models["first"].W_V)


def test_other_bases_leave_alone_what_mimetic_initialization_does_and_refuse_others():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 3, batch_first=True), num_layers=1)
    cross = decoder.layers[0].multihead_attn.in_proj_weight.clone()
    assert rebased_init_(decoder, "random", strict=False) == ["layers.0.self_attn"]
    assert torch.equal(decoder.layers[0].multihead_attn.in_proj_weight, cross)
    with pytest.raises(ValueError, match="'own' or 'random', not 'randm'"):
        rebased_init_(decoder, "randm")


def test_orthogonal_control_is_a_multiple_of_orthonormal_columns_in_every_block_each_drawn_anew():
    model = ViT(image_size=8, dim=48, depth=2, heads=3)
    orthogonal_init_(model, generator=torch.Generator().manual_seed(0))
    blocks = [W for v in attention_layers(model) for W in (*v.W_Q, *v.W_K, v.W_V, v.W_proj)]
    for W in blocks:
        gram = W.T @ W
        torch.testing.assert_close(gram, gram.diagonal().mean() * torch.eye(len(gram)), atol=1e-5, rtol=0)
    columns = torch.stack([W[:, 0] / W[:, 0].norm() for W in blocks])
    assert (columns @ columns.T).triu(1).abs().max() < 0.6  # no two blocks are alike (independent: 0.14 deviation)


def test_orthogonalize_noise_is_gram_schmidts_so_that_its_directions_are_those_of_the_noise():
    noise = torch.randn(9, 4)
    Q = orthogonalize(noise)
    torch.testing.assert_close(Q[:, 0], noise[:, 0] / noise[:, 0].norm())
    assert ((Q * noise).sum(0) > 0).all()
    torch.testing.assert_close(Q.T @ Q, torch.eye(4), atol=1e-6, rtol=0)


# ---- neighbours of the method


def untouched(model, before):
    return {name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])}


@pytest.mark.parametrize("parts", ["both", "qk", "vp"])
def test_conditioned_weights_have_condition_number_one_and_no_diagonal(parts):
    torch.manual_seed(0)
    model = ViT(image_size=8, dim=96, depth=2, heads=3)
    before = copy.deepcopy(model.state_dict())
    INITS["conditioned"](model, SimpleNamespace(parts=parts), torch.Generator().manual_seed(0))
    assert {*before} - untouched(model, before) == {f"blocks.{i}.attn.qkv.weight" for i in (0, 1)}  # W_proj stays
    layers = attention_layers(model)
    for layer, i in zip(layers, (0, 1), strict=True):
        qkv = before[f"blocks.{i}.attn.qkv.weight"]
        assert torch.equal(layer.W_Q.transpose(1, 2).flatten(0, 1), qkv[:96]) == (parts == "vp")
        assert torch.equal(layer.W_V, torch.eye(96)) == (parts != "qk") == (not torch.equal(layer.W_V.T, qkv[192:]))
        for W in [*layer.W_Q, *layer.W_K] if parts != "vp" else []:
            torch.testing.assert_close(W.T @ W, torch.eye(32), atol=1e-5, rtol=0)
        assert (layer.W_Q @ layer.W_K.mT).diagonal(dim1=1, dim2=2).mean().abs() < 0.05
    first = torch.stack([W[:, 0] / W[:, 0].norm() for layer in layers for W in [*layer.W_Q, *layer.W_K]])
    assert (first @ first.T).triu(1).abs().max() < 0.6  # each block is drawn anew


def test_conditioned_init_draws_from_its_generator_alone_and_refuses_what_mimetic_init_refuses():
    models = []
    for _ in range(2):
        state = torch.random.get_rng_state()
        models.append(ViT(image_size=8, dim=24, depth=1, heads=3))
        torch.random.set_rng_state(state)
        conditioned_init_(models[-1], torch.Generator().manual_seed(3))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 3, batch_first=True), num_layers=1)
    before = copy.deepcopy(decoder.state_dict())
    with pytest.raises(ValueError, match="multihead_attn"):
        conditioned_init_(decoder)
    assert untouched(decoder, before) == {*before}
    assert conditioned_init_(decoder, strict=False) == ["layers.0.self_attn"]


@pytest.mark.parametrize("kind", ["image", "text"])
def test_a_mean_in_the_mlps_changes_no_output_before_training_but_the_gradients(kind):
    torch.manual_seed(0)
    if kind == "image":
        model, inputs = ViT(image_size=8, dim=24, depth=2, heads=3), torch.randn(4, 3, 8, 8)
    else:
        model, inputs = TransformerLM(11, context=8, dim=24, depth=2, heads=3), torch.randint(11, (4, 8))
    before, outputs, gradients = copy.deepcopy(model.state_dict()), [], []
    for _ in range(2):
        outputs.append(model(inputs))
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), model.blocks[0].norm2.bias)[0])
        mimetic_mlp_init_(model, mean=0.1)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    assert (gradients[0] - gradients[1]).norm() > 0.1 * gradients[0].norm()
    changed = {*before} - untouched(model, before)
    assert changed == {f"blocks.{i}.mlp.0.weight" for i in (0, 1)}
    for name in changed:
        torch.testing.assert_close(model.state_dict()[name] - before[name], torch.full((96, 24), 0.2))


def test_mimetic_mlp_is_mimetic_initialization_and_the_mean():
    s, models = SimpleNamespace(alpha1=0.7, beta1=0.7, alpha2=0.4, beta2=0.4, parts="both", mlp_mean=-0.03), {}
    for name in ("mimetic", "mimetic-mlp"):
        torch.manual_seed(0)
        models[name] = ViT(image_size=8, dim=24, depth=2, heads=3)
        INITS[name](models[name], s, torch.Generator().manual_seed(0))
    mimetic_mlp_init_(models["mimetic"], -0.03)
    assert all(map(torch.equal, *(model.parameters() for model in models.values())))


def test_inits_for_images_are_those_for_any_model_and_transfer():
    assert set(VISION_INITS) == {*INITS, "structured", "transfer"}


# ---- transfer


def vit(seed, **sizes):
    torch.manual_seed(seed)
    return ViT(**{**dict(image_size=8, dim=24, depth=2, heads=3), **sizes})


def trained(**sizes):
    """A state dict of ours that differs from any start everywhere."""
    model = vit(1, **sizes)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    return model.state_dict()


def timms(classes=1, side=4):
    """The names and shapes of timm's VisionTransformer: with biases, and class tokens that have positions."""
    weights = {"cls_token": torch.randn(1, 1, 24), "pos_embed": torch.randn(1, classes + side**2, 24)}
    weights |= {"patch_embed.proj.weight": torch.randn(24, 3, 2, 2), "patch_embed.proj.bias": torch.randn(24)}
    for i in range(2):
        for name, rows, columns in [
            ("attn.qkv", 72, 24),
            ("attn.proj", 24, 24),
            ("mlp.fc1", 96, 24),
            ("mlp.fc2", 24, 96),
        ]:
            weights[f"blocks.{i}.{name}.weight"] = torch.randn(rows, columns)
            weights[f"blocks.{i}.{name}.bias"] = torch.randn(rows)
        for name in ("norm1", "norm2"):
            weights |= {f"blocks.{i}.{name}.weight": torch.randn(24), f"blocks.{i}.{name}.bias": torch.randn(24)}
    return {**weights, "head.weight": torch.randn(1000, 24), "head.bias": torch.randn(1000)}


FOUR = {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")}
SAVED = {
    "a bare state dict": lambda weights: weights,
    "ours": lambda weights: dict(model=weights, config=dict(heads=3), epoch=7),
    "timm's training script": lambda weights: dict(state_dict=weights, arch="vit"),
    "of a compiled and distributed model": lambda weights: {f"module._orig_mod.{k}": v for k, v in weights.items()},
}


@pytest.mark.parametrize("form", SAVED)
@pytest.mark.parametrize("pos", ["sinusoidal", "learned"])
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("source", [trained, timms])
def test_transfer_copies_the_four_weights_and_the_positions_and_nothing_else(tmp_path, form, pos, pool, source):
    weights, model = source(), vit(0, pos=pos, pool=pool)
    torch.save(SAVED[form](weights), tmp_path / "trained.pt")
    before, kinds = copy.deepcopy(model.state_dict()), [(name, p.requires_grad) for name, p in model.named_parameters()]
    names = transfer_init_(model, str(tmp_path / "trained.pt"))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert set(names) == changed == {*FOUR, "pos_embed"}
    for name in FOUR:
        assert torch.equal(model.state_dict()[name], weights[name])
    assert torch.equal(model.pos_embed, weights["pos_embed"][:, -16:])
    assert kinds == [(name, p.requires_grad) for name, p in model.named_parameters()]


def test_transferred_layers_attend_as_the_trained_ones(tmp_path):
    """timm's attention, with its biases at zero, as the formula that timm computes."""
    weights, x = timms(), torch.randn(2, 16, 24)
    torch.save(weights, tmp_path / "timm.pth")
    model = vit(0)
    transfer_init_(model, str(tmp_path / "timm.pth"))
    qkv = nn.functional.linear(x, weights["blocks.1.attn.qkv.weight"]).reshape(2, 16, 3, 3, 8).permute(2, 0, 3, 1, 4)
    y = nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(2, 16, 24)
    expected = nn.functional.linear(y, weights["blocks.1.attn.proj.weight"])
    torch.testing.assert_close(model.blocks[1].attn(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("classes", [0, 1, 2])
@pytest.mark.parametrize("side", [3, 4, 6])
def test_positions_of_another_grid_are_resampled_without_those_of_class_tokens(tmp_path, classes, side):
    weights = timms(classes, side=side)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)) / (side - 1.0)  # row-major, 0 to 1
    weights["pos_embed"][:, :classes] = 100.0
    weights["pos_embed"][0, classes:] = places.repeat(1, 12)  # even channels tell the row, odd ones the column
    torch.save(weights, tmp_path / "timm.pth")
    model = vit(0)
    transfer_init_(model, str(tmp_path / "timm.pth"))
    P = model.pos_embed[0].unflatten(0, (4, 4))
    rows, columns = P[..., 0], P[..., 1]
    torch.testing.assert_close(rows, rows[:, :1].expand(4, 4))
    torch.testing.assert_close(columns, columns[:1].expand(4, 4))
    for line in (rows[:, 0], columns[0]):
        assert (line.diff() > 0.1).all() and -0.1 < line[0] < 0.2
        torch.testing.assert_close(line + line.flip(0), torch.ones(4))


@pytest.mark.parametrize(
    "saved, sentence",
    [
        (b"not a checkpoint", "damaged, or not a state dict"),
        (torch.zeros(3), "damaged, or not a state dict"),
        (dict(model=SimpleNamespace(run="code")), "damaged, or not a state dict"),
        ({}, "no blocks.0.attn.qkv.weight, but nothing"),
        (trained(depth=3), "attention of 3 layers of width 24, but the model of 2 layers"),
        (trained(dim=36), "attention of 2 layers of width 36, but the model of 2 layers of width 24"),
        (dict(model=trained(), config=dict(heads=2)), "has 2 heads per layer, but the model 3"),
        ({k: v for k, v in trained().items() if k != "pos_embed"}, "no positions of a square grid, 24 wide"),
        ({**trained(), "pos_embed": torch.zeros(1, 20, 24)}, r"no positions of a square grid.*\(1, 20, 24\)"),
        ({**trained(), "pos_embed": torch.zeros(1, 16, 12)}, r"no positions of a square grid.*\(1, 16, 12\)"),
        ({**trained(), "pos_embed": torch.zeros(16, 24)}, r"no positions of a square grid.*\(16, 24\)"),
    ],
)  # fmt: skip
def test_checkpoints_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, saved, sentence):
    file, model = tmp_path / "file.pt", vit(0)
    file.write_bytes(saved) if isinstance(saved, bytes) else torch.save(saved, file)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=sentence) as error:
        transfer_init_(model, str(file))
    assert "\n" not in str(error.value) and str(file) in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_that_is_not_there_is_named():
    for file in ("", "nowhere.pt"):
        with pytest.raises(FileNotFoundError, match=f"there is no file '{file}'"):
            transfer_init_(vit(0), file)


def test_safetensors_are_read_where_installed_and_asked_for_where_not(tmp_path, monkeypatch):
    file, weights, model = tmp_path / "model.safetensors", timms(), vit(0)
    file.touch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ValueError, match="pip install safetensors"):
        transfer_init_(model, str(file))
    monkeypatch.setitem(sys.modules, "safetensors", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "safetensors.torch", SimpleNamespace(load_file=lambda path: weights))
    transfer_init_(model, str(file))
    assert torch.equal(model.blocks[1].attn.proj.weight, weights["blocks.1.attn.proj.weight"])
