"""The variants against second implementations: loops over single tokens, torch's circular convolution, the formulas."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layouts import attention_layers
from mimetic import mimetic_init_
from variants import (
    ATTENTIONS,
    GPSA,
    ConvInside,
    ConViT,
    ConvOutside,
    ConvSoftmax,
    circulant,
    head_offsets,
    shift_matrices,
)
from vit import Attention, ViT

GRIDS = [(4, 4), (5, 5), (3, 6)]
VARIANTS = [GPSA, ConvInside, ConvOutside, ConvSoftmax]
FINE = dict(atol=1e-10, rtol=1e-8)  # in float64


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_beside_its_kernels_a_model_has_the_weights_that_plain_attention_gets_from_the_seed(variant):
    states = []
    for attention in (Attention, variant):
        torch.manual_seed(0)
        states.append(ViT(image_size=8, dim=24, depth=2, heads=3, pool="mean", attention=attention).state_dict())
    plain, other = states
    assert all(torch.equal(plain[name], other[name]) for name in plain)
    assert {name.rpartition(".")[2] for name in other.keys() - plain.keys()} == {"kernel", "gamma"}


def test_kernels_start_as_torchs_depthwise_convolution_gamma_as_one_and_locality_as_one():
    for variant in VARIANTS[1:]:
        layer = variant(256, 64, (4, 4))
        assert layer.gamma == 1 and 0.32 < layer.kernel.abs().max() <= 1 / 3
        assert abs(layer.kernel.std() - 3**-1.5) < 0.02  # of U(±1/3)
    assert (GPSA(24, 4, (4, 4)).v_pos[:, 0] == -1).all()


def randomized(module, deviation=0.3):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, deviation)
    return module.double()


def tokens(grid, dim=24, batch=2):
    return torch.randn(batch, grid[0] * grid[1], dim, dtype=torch.float64)


def small_vit(attention, **sizes):
    torch.manual_seed(0)
    sizes = {**dict(image_size=8, dim=24, depth=3, heads=4, pool="mean", attention=attention), **sizes}
    return ConViT(**sizes) if "local_layers" in sizes else ViT(**sizes)


# ---- GPSA


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("heads", [1, 3, 4, 8, 9])
def test_each_heads_positional_map_starts_with_its_peak_at_the_heads_offset(grid, heads):
    maps = GPSA(72, heads, grid).positional_maps()
    assert len(set(map(tuple, head_offsets(heads).tolist()))) == heads
    places = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    for map_, (d1, d2) in zip(maps, head_offsets(heads).tolist(), strict=True):
        for (r, c), row in zip(places, map_, strict=True):
            distances = torch.tensor([math.hypot(r + d1 - row_, c + d2 - column) for row_, column in places])
            nearest = distances == distances.min()  # one token, or several at a border or for an offset of a half
            assert torch.equal(torch.isclose(row, row.max(), rtol=1e-4), nearest)


def test_heads_look_at_the_offsets_of_the_smallest_kernel_that_has_one_for_each():
    square = {(r, c) for r in (-1.0, 0.0, 1.0) for c in (-1.0, 0.0, 1.0)}
    offsets = {heads: set(map(tuple, head_offsets(heads).tolist())) for heads in (1, 4, 5, 8, 9)}
    assert offsets[1] == {(0, 0)} and offsets[9] == square
    assert offsets[4] == {(r, c) for r in (-0.5, 0.5) for c in (-0.5, 0.5)}
    assert offsets[8] == square - {(1, 1)}
    assert offsets[5] == {(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)}


def test_gpsa_starts_as_a_convolution_where_the_gates_are_open_and_locality_is_strong():
    gpsa, (height, width) = GPSA(36, 9, (5, 6), locality=100.0), (5, 6)
    with torch.no_grad():
        gpsa.gate.fill_(100.0)
        gpsa.proj.weight.copy_(torch.eye(36))
        x = torch.randn(1, height * width, 36)
        y = gpsa(x).view(height, width, 36)[1:-1, 1:-1]  # tokens with all their neighbours
        padded = x.view(height, width, 9, 4)
        for head, (r, c) in enumerate(head_offsets(9).int().tolist()):
            neighbour = padded[1 + r : height - 1 + r, 1 + c : width - 1 + c, head]
            torch.testing.assert_close(y[..., 4 * head : 4 * head + 4], neighbour)


@pytest.mark.parametrize("grid", GRIDS)
def test_gpsa_is_the_gated_sum_of_both_maps_token_by_token(grid):
    gpsa, x = randomized(GPSA(24, 4, grid)), tokens(grid)
    view, n, K = attention_layers(gpsa)[0], grid[0] * grid[1], 6
    expected = torch.zeros_like(x)
    for image in range(len(x)):
        for i in range(n):
            heads = []
            for h in range(4):
                content, positional, V = [], [], x[image] @ view.W_V[:, h * K : h * K + K]
                for j in range(n):
                    content.append(x[image, i] @ view.W_Q[h] @ (x[image, j] @ view.W_K[h]) / math.sqrt(K))
                    d1, d2 = j // grid[1] - i // grid[1], j % grid[1] - i % grid[1]
                    a, b, c = gpsa.v_pos[h]
                    positional.append(a * (d1**2 + d2**2) + b * d1 + c * d2)
                g = 1 / (1 + math.exp(-gpsa.gate[h].item()))
                A = (1 - g) * torch.stack(content).softmax(0) + g * torch.stack(positional).softmax(0)
                heads.append(A @ V)
            expected[image, i] = torch.cat(heads) @ view.W_proj
    torch.testing.assert_close(gpsa(x), expected, **FINE)


def test_a_closed_gate_is_plain_attention_an_open_one_the_positional_map_and_rows_always_sum_to_one():
    gpsa, x = randomized(GPSA(24, 4, (3, 6))), tokens((3, 6))
    plain = Attention(24, 4).double()
    plain.load_state_dict({name: gpsa.state_dict()[name] for name in plain.state_dict()})
    torch.testing.assert_close(gpsa.attention_map(x).sum(-1), torch.ones(2, 4, 18, dtype=torch.float64))
    with torch.no_grad():
        gpsa.gate.fill_(-100.0)
        torch.testing.assert_close(gpsa(x), plain(x), **FINE)
        gpsa.gate.fill_(100.0)
        torch.testing.assert_close(gpsa.attention_map(x), gpsa.positional_maps().expand(2, -1, -1, -1), **FINE)


def test_gpsa_starts_with_the_values_and_gates_of_convit():
    model = small_vit(GPSA)
    for block, layer in zip(model.blocks, attention_layers(model), strict=True):
        assert torch.equal(layer.W_V, torch.eye(24)) and (block.attn.gate == 1).all()
        assert abs(layer.W_Q.std() - 0.02) < 0.005 and abs(layer.W_proj.std() - 0.02) < 0.005


# ---- convolution in attention


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("size", [1, 3])
def test_multiplying_by_C_is_circular_convolution_of_the_grid(grid, size):
    heads, channels = 3, 5
    kernel, x = torch.randn(heads, size, size).double(), torch.randn(2, heads, channels, *grid).double()
    C = circulant(kernel, shift_matrices(grid, size).double())
    for h in range(heads):
        conv = nn.Conv2d(channels, channels, size, padding="same", padding_mode="circular", groups=channels, bias=False)
        conv = conv.double()
        with torch.no_grad():
            conv.weight.copy_(kernel[h].expand(channels, 1, -1, -1))
            expected = conv(x[:, h]).flatten(2).transpose(1, 2)  # (B, n, channels)
        torch.testing.assert_close(C[h] @ x[:, h].flatten(2).transpose(1, 2), expected, **FINE)


def test_C_is_doubly_block_circulant_with_the_kernel_in_each_row():
    kernel = torch.arange(1.0, 10.0).view(1, 3, 3)
    C = circulant(kernel, shift_matrices((4, 5), 3))[0]
    blocks = C.view(4, 5, 4, 5)
    assert torch.equal(blocks, blocks.roll((1, 1), dims=(0, 2))) and torch.equal(blocks, blocks.roll((1, 1), (1, 3)))
    assert (C.sort(1).values == torch.cat([torch.zeros(11), kernel.flatten()])).all()


FORMULAS = {
    ConvInside: lambda logits, gamma_C: (logits + gamma_C).softmax(-1),
    ConvOutside: lambda logits, gamma_C: logits.softmax(-1) + gamma_C,
    ConvSoftmax: lambda logits, gamma_C: logits.softmax(-1) + gamma_C.softmax(-1),
}


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("grid", GRIDS)
def test_each_form_of_convolution_in_attention_is_its_formula(kind, grid):
    attention, x = randomized(kind(24, 4, grid)), tokens(grid)
    (view,) = attention_layers(attention)
    logits = torch.einsum("bnd,hdk,hek,bme->bhnm", x, view.W_Q, view.W_K, x) / math.sqrt(6)
    gamma_C = attention.gamma * circulant(attention.kernel, attention.shifts)
    A = FORMULAS[kind](logits, gamma_C)  # (B, H, n, n)
    torch.testing.assert_close(attention.attention_map(x), A, **FINE)
    V = (x @ view.W_V).unflatten(-1, (4, 6))  # (B, n, H, K)
    torch.testing.assert_close(attention(x), torch.einsum("bhnm,bmhk->bnhk", A, V).flatten(2) @ view.W_proj, **FINE)


@pytest.mark.parametrize("kind", FORMULAS)
def test_without_a_kernel_each_form_is_attention_plus_what_a_flat_map_adds(kind):
    attention, x = randomized(kind(24, 4, (4, 4))), tokens((4, 4))
    plain = Attention(24, 4).double()
    plain.load_state_dict({name: attention.state_dict()[name] for name in plain.state_dict()})
    with torch.no_grad():
        attention.gamma.zero_()
    flat = 1 / 16 if kind is ConvSoftmax else 0
    torch.testing.assert_close(attention.attention_map(x), plain.attention_map(x) + flat, **FINE)


def test_kernels_need_a_centre():
    with pytest.raises(ValueError, match="odd side .* not 4"):
        ConvOutside(24, 4, (8, 8), kernel_size=4)


# ---- all of them in a model


@pytest.mark.parametrize("kind", VARIANTS)
def test_explicit_and_fused_calls_give_the_same_numbers_and_gradients(kind):
    explicit = randomized(kind(24, 4, (3, 6)))
    fused, x = copy.deepcopy(explicit), tokens((3, 6))
    explicit.fused = False
    fused.fused = True
    results = [layer(x) for layer in (explicit, fused)]
    torch.testing.assert_close(*results)
    for y in results:
        y.square().sum().backward()
    for a, b in zip(explicit.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("kind", VARIANTS)
def test_gradients_are_those_of_finite_differences(kind):
    attention, x = randomized(kind(8, 2, (2, 3))), tokens((2, 3), dim=8, batch=1)
    names = [name for name, _ in attention.named_parameters()]

    def forward(x, *parameters):
        return torch.func.functional_call(attention, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [x, *(p.detach() for p in attention.parameters())]
    assert torch.autograd.gradcheck(forward, [tensor.clone().requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("kind", VARIANTS)
def test_training_in_bfloat16_follows_training_in_float32(kind):
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    losses = []
    for enabled in (False, True):
        model = small_vit(kind)
        mimetic_init_(model, generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(images).float(), labels)
            loss.backward()
            assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[4] < losses[0] - 0.1  # learns by heart
    torch.testing.assert_close(losses[:5], losses[5:], atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", VARIANTS)
def test_mimetic_initialization_finds_the_four_weights_and_leaves_the_rest_alone(kind):
    model = small_vit(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert mimetic_init_(model, qk=False) == [f"blocks.{i}.attn" for i in range(3)]
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"blocks.{i}.attn.{part}.weight" for i in range(3) for part in ("qkv", "proj")}
    for layer in attention_layers(model):
        assert (layer.W_V @ layer.W_proj).diagonal().mean() < -0.2
    for block, old in zip(model.blocks, (before[f"blocks.{i}.attn.qkv.weight"] for i in range(3)), strict=True):
        assert torch.equal(block.attn.qkv.weight[:48], old[:48])  # W_Q, W_K


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_class_token_joins_after_the_local_layers_and_nowhere_else(kind):
    images = torch.randn(2, 3, 8, 8)
    model = small_vit(kind, pool="cls", local_layers=2)
    assert [type(block.attn) for block in model.blocks] == [kind, kind, Attention]
    local, last, late = *model.attention_maps(images)[1:], model.blocks[2]
    assert local.shape == (2, 4, 16, 16) and last.shape == (2, 4, 17, 17)
    with torch.no_grad():  # the forward pass by hand
        x = model.embed(images)
        for block in model.blocks[:2]:
            x = block(x)
        x = late(torch.cat([model.cls_token.expand(2, -1, -1), x], dim=1))
        torch.testing.assert_close(model(images), model.head(model.norm(x[:, 0])))
    model(images).sum().backward()
    assert model.cls_token.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="grid of 4 by 4 tokens, not 17.*ConViT"):
        small_vit(kind, pool="cls")(images)


@pytest.mark.parametrize("pool, layers", [("cls", 3), ("mean", 4), ("mean", -1)])
def test_local_layers_leave_the_class_token_one_and_are_at_most_all(pool, layers):
    with pytest.raises(ValueError, match=f"at most {3 - (pool == 'cls')} of 3 layers, not {layers}"):
        small_vit(GPSA, pool=pool, local_layers=layers)


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_model_made_without_memory_gets_the_same_start(kind):
    model = small_vit(kind)
    with torch.device("meta"):
        late = small_vit(kind)
    late.to_empty(device="cpu")
    torch.manual_seed(0)
    late.init_weights()
    again = small_vit(kind)
    torch.manual_seed(0)
    again.init_weights()
    for (name, a), (_, b) in zip(late.named_buffers(), again.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(late.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert model.state_dict().keys() == late.state_dict().keys()


@pytest.mark.parametrize("kind", VARIANTS)
def test_dropout_falls_silent_in_eval_mode(kind):
    attention, x = kind(24, 4, (4, 4), dropout=0.5).eval(), torch.randn(2, 16, 24)
    nn.init.normal_(attention.proj.weight)
    assert torch.equal(attention(x), attention(x))
    attention.train()
    assert not torch.equal(attention(x), attention(x))


def test_every_variant_has_a_name_and_heads_must_divide_the_width():
    assert set(ATTENTIONS.values()) == {Attention, *VARIANTS}
    for kind in VARIANTS:
        with pytest.raises(ValueError, match="5 heads do not divide the width 24"):
            kind(24, 5, (4, 4))
