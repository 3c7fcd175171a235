"""The Vision Transformer against second implementations: torch's own encoder layer, unfold, the fused attention."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimetic import sinusoids_2d
from vit import Attention, Block, ViT

SMALL = dict(image_size=8, patch_size=2, dim=24, depth=2, heads=3)


def small_vit(**sizes):
    torch.manual_seed(0)
    return ViT(**{**SMALL, **sizes})


@pytest.mark.parametrize("causal", [False, True])
def test_explicit_and_fused_attention_give_the_same_numbers_and_gradients(causal):
    torch.manual_seed(0)
    explicit = Attention(24, 3, causal=causal).double()
    fused = copy.deepcopy(explicit)
    explicit.fused, fused.fused = False, True
    x = torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    explicit(x).square().sum().backward()
    fused(y).square().sum().backward()
    torch.testing.assert_close(explicit(x), fused(y))
    torch.testing.assert_close(x.grad, y.grad)
    for a, b in zip(explicit.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_cpu_takes_the_explicit_path_and_a_gpu_the_fused_call(monkeypatch):
    called = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: called.append(q.device.type) or v)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        Attention(24, 3).to(device)(torch.randn(2, 9, 24, device=device))
    assert called == devices[1:]


def test_causal_attention_never_looks_ahead():
    maps = Attention(24, 3, causal=True).attention_map(torch.randn(2, 9, 24))
    assert (maps.triu(1) == 0).all() and torch.allclose(maps.sum(-1), torch.ones(2, 3, 9))


def test_dropout_reaches_attention_and_branches_and_falls_silent_in_eval_mode():
    images, model = torch.randn(2, 3, 32, 32), ViT(dim=24, depth=1, heads=3, patch_size=8, dropout=0.5)
    for name in ("blocks.0.attn", "blocks.0.drop"):
        assert torch.equal(model.eval()(images), model(images))
        model.get_submodule(name).train()  # this one alone
        assert not torch.equal(model(images), model(images))


def test_block_is_torchs_pre_norm_encoder_layer():
    torch.manual_seed(0)
    block = Block(24, Attention(24, 3))
    oracle = nn.TransformerEncoderLayer(24, 3, 96, dropout=0, activation="gelu", batch_first=True, norm_first=True)
    pairs = {
        "self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj.", "linear1.": "mlp.0.",
        "linear2.": "mlp.2.", "norm1.": "norm1.", "norm2.": "norm2.",
    }  # fmt: skip
    block.attn.qkv.bias, block.attn.proj.bias = nn.Parameter(torch.zeros(72)), nn.Parameter(torch.zeros(24))
    state = {
        theirs + kind: block.state_dict()[own + kind] for theirs, own in pairs.items() for kind in ("weight", "bias")
    }
    oracle.load_state_dict(state)
    x = torch.randn(2, 9, 24)
    torch.testing.assert_close(block(x), oracle(x), atol=1e-5, rtol=1e-5)


def test_patches_are_row_major_and_flattened_like_unfold():
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(small_vit().patches(images), F.unfold(images, 2, stride=2).transpose(1, 2))


@pytest.mark.parametrize("pos_scale", [1.0, 2.5])
def test_positions_are_added_once_times_their_scale(pos_scale):
    model = small_vit(pos_scale=pos_scale)
    with torch.no_grad():
        tokens = model.embed(torch.zeros(1, 3, 8, 8))
    torch.testing.assert_close(tokens[0, 1:] - model.patch_embed.bias, pos_scale * sinusoids_2d(4, 4, 24))
    torch.testing.assert_close(tokens[0, 0], model.cls_token[0, 0].detach())


def test_parameter_count_is_what_the_formula_says():
    D, L, N, patch = 24, 2, 16, 12
    block = 3 * D * D + D * D + (4 * D * D + 4 * D) + (4 * D * D + D) + 4 * D
    ends = (patch * D + D) + 2 * D + (10 * D + 10)
    for extra, sizes in [(D, {}), (0, dict(pool="mean")), (D + N * D, dict(pos="learned"))]:
        assert sum(p.numel() for p in small_vit(**sizes).parameters()) == L * block + ends + extra


def test_default_initialization_is_the_usual_one_of_vits():
    model = small_vit(dim=96, pos="learned")
    for module in model.modules():
        if module is model.patch_embed:  # 12 inputs: U(−1/√12, 1/√12) has deviation 1/6
            assert module.weight.abs().max() <= 12**-0.5 and abs(module.weight.std() - 1 / 6) < 0.01
        elif isinstance(module, nn.Linear):
            assert abs(module.weight.std() - 0.02) < 0.002 and (module.bias is None or (module.bias == 0).all())
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all()
    assert abs(model.pos_embed.std() - 0.02) < 0.002 and abs(model.cls_token.std() - 0.02) < 0.004


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("pos", ["sinusoidal", "learned"])
def test_every_parameter_gets_a_gradient(pool, pos):
    model = small_vit(pool=pool, pos=pos)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_attention_maps_are_those_of_the_forward_pass(pool):
    model = small_vit(pool=pool)
    images = torch.randn(2, 3, 8, 8)
    maps = model.attention_maps(images)
    n = 17 if pool == "cls" else 16
    assert maps.shape == (2, 2, 3, n, n) and torch.allclose(maps.sum(-1), torch.ones(2, 2, 3, n))
    with torch.no_grad():  # the forward pass again, with the maps in the place of the softmax
        x = model.embed(images)
        for block, A in zip(model.blocks, maps, strict=True):
            v = block.attn.queries_keys_values(block.norm1(x))[2]
            x = x + block.attn.proj((A @ v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
        pooled = x[:, 0] if pool == "cls" else x.mean(1)
        torch.testing.assert_close(model(images), model.head(model.norm(pooled)), atol=1e-5, rtol=1e-5)


def test_without_positions_mean_pooling_ignores_the_order_of_patches_and_with_them_does_not():
    images = torch.randn(2, 3, 8, 8)
    rolled = images.roll(2, dims=-1)  # by one patch
    for pos_scale, same in [(0.0, True), (1.0, False)]:
        model = small_vit(pool="mean", pos_scale=pos_scale)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
            assert torch.allclose(model(images), model(rolled), atol=1e-5) == same


def test_sinusoids_are_fixed_saved_and_scaled_logits_are_divided_by_root_k():
    model = small_vit()
    assert "pos_embed" in model.state_dict() and "pos_embed" not in dict(model.named_parameters())
    attention, x = model.blocks[0].attn, torch.randn(1, 5, 24)
    q, k, _ = attention.queries_keys_values(x)
    torch.testing.assert_close(attention.attention_map(x), (q @ k.mT / math.sqrt(8)).softmax(-1))


@pytest.mark.parametrize(
    "sizes, sentence",
    [
        (dict(patch_size=3), "patches of 3 pixels do not tile an image of 8"),
        (dict(heads=5), "5 heads do not divide the width 24"),
        (dict(heads=0), "0 heads do not divide"),
        (dict(dim=30), "divisible by 4"),
        (dict(pos="cosine"), "not 'cosine'"),
        (dict(pool="max"), "'max'"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        small_vit(**sizes)
