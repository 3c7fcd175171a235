"""Facts of structured initialization: what the impulse is, what the solvers reach, what reaches the model."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inits import VISION_INITS
from layouts import attention_layers
from mimetic import sinusoids_2d
from structured import (
    attention,
    closed_form,
    gradient,
    impulse,
    kernel_offsets,
    map_error,
    map_errors,
    nearest_impulse,
    pseudo_input,
    pseudo_maps,
    rotate,
    structured_init_,
)
from train_cifar import Settings
from training.flags import parse_settings
from vit import ViT


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def small_vit(**sizes):
    torch.manual_seed(0)
    return ViT(**{**dict(image_size=16, patch_size=2, dim=96, depth=2, heads=3, pool="mean"), **sizes})


def initialize(model, **arguments):
    return structured_init_(model, model.pos_embed, model.grid, **{"generator": seeded(), **arguments})


def sinusoids(grid, dim):
    return pseudo_input(sinusoids_2d(*grid, dim), grid)


def impulses(grid, kernel_size=3, border="clamp"):
    return torch.stack([impulse(grid, offset, border) for offset in kernel_offsets(kernel_size)])


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# ---- the target and the pseudo-input


@pytest.mark.parametrize("grid", [(5, 5), (3, 7), (1, 6)])
def test_an_impulse_has_one_one_a_row_at_the_offset(grid):
    for row, column in kernel_offsets(5):
        H, padded = (impulse(grid, (row, column), border) for border in ("clamp", "zero"))
        assert torch.equal(H.sum(1), torch.ones(len(H))) and H.max() == 1
        for i in range(len(H)):
            r, c = i // grid[1] + row, i % grid[1] + column
            inside = 0 <= r < grid[0] and 0 <= c < grid[1]
            assert padded[i].sum() == inside
            if inside:
                assert H[i, r * grid[1] + c] == padded[i, r * grid[1] + c] == 1


@pytest.mark.parametrize("border, padding", [("clamp", "replicate"), ("zero", "constant")])
@pytest.mark.parametrize("kernel_size", [3, 5])
def test_multiplying_by_an_impulse_is_depthwise_convolution_with_it(border, padding, kernel_size):
    grid, r = (4, 6), kernel_size // 2
    X = torch.randn(24, 8, generator=seeded())  # (n, d)
    image = F.pad(X.T.reshape(1, 8, *grid), (r, r, r, r), mode=padding)
    for i, H in enumerate(impulses(grid, kernel_size, border)):
        kernel = torch.zeros(kernel_size**2).index_fill(0, torch.tensor(i), 1).view(1, 1, kernel_size, kernel_size)
        convolved = F.conv2d(image, kernel.expand(8, -1, -1, -1), groups=8)
        assert torch.equal(H @ X, convolved.flatten(2)[0].T)


def test_map_error_is_0_for_the_impulse_2_for_another_and_nearly_1_for_a_uniform_map():
    H, other = impulse((4, 4), (0, 0)), impulse((4, 4), (0, 0)).roll(5, 0)
    assert map_error(H, H) == 0 and map_error(other, H) == 2
    assert map_error(torch.full((16, 16), 1 / 16), H) == pytest.approx(1 - 1 / 16)


def test_pseudo_input_is_what_the_first_block_reads_of_positions_alone_whatever_their_scale():
    model = small_vit(pos_scale=3.0)
    with torch.no_grad():
        for parameter in model.patch_embed.parameters():
            parameter.zero_()
        first = model.blocks[0].norm1(model.embed(torch.zeros(1, 3, 16, 16)))[0]
    torch.testing.assert_close(pseudo_input(model.pos_embed, model.grid), first, atol=1e-4, rtol=0)


# ---- the solvers


@pytest.mark.parametrize("head_dim", [4, 32])
def test_closed_form_is_the_best_rank_k_approximation_through_the_best_truncated_pseudo_inverse(head_dim):
    X, H = sinusoids((8, 8), 96), impulses((8, 8))
    W_Q, W_K = closed_form(X, H, head_dim)
    candidates = []
    for j in range(1, 7):
        X_inv = torch.linalg.pinv(X.double(), rtol=2.0**-j)
        U, S, V_T = torch.linalg.svd(X_inv @ H.double() @ X_inv.T)
        k = min(head_dim, int((S[0] > 1e-9 * S[0, 0]).sum()))
        product = U[..., :k] * S[:, None, :k] @ V_T[:, :k]
        product *= 49 / S[:, :k].sum(-1)[:, None, None]  # |W_Q| = |W_K| = 7 and both carry the root of S
        logits = X.double() @ product @ X.double().T / math.sqrt(head_dim)
        candidates.append((map_error(logits.softmax(-1), H), product))
    best = torch.stack([error for error, _ in candidates]).argmin(0)
    for i, j in enumerate(best.tolist()):
        torch.testing.assert_close(W_Q[i] @ W_K[i].T, candidates[j][1][i].float(), atol=1e-4, rtol=1e-3)


def test_both_solvers_keep_the_norm_they_are_given_or_that_of_their_paper():
    X, H = sinusoids((4, 4), 64), impulses((4, 4))
    cases = [(closed_form, None, 7), (gradient, None, (64 * 16) ** 0.25 / math.sqrt(3)), (gradient, 5, 5)]
    for solver, norm, expected in cases:
        for W in solver(X, H, 16, norm):
            torch.testing.assert_close(W.norm(dim=(1, 2)), torch.full((9,), float(expected)))


@pytest.mark.parametrize("grid, dim, head_dim", [((16, 16), 192, 64), ((6, 20), 192, 64), ((8, 8), 96, 32)])
def test_the_gradient_lowers_the_error_and_every_token_looks_at_its_offset_first(grid, dim, head_dim):
    X, H = sinusoids(grid, dim), impulses(grid)
    before = map_error(attention(X, *closed_form(X, H, head_dim, norm=6)), H)
    maps = attention(X, *gradient(X, H, head_dim, norm=6))
    assert (map_error(maps, H) < 0.6 * before).all() and map_error(maps, H).max() < 0.1
    assert torch.equal(maps.argmax(-1), H.argmax(-1))  # at the border too, with clamped impulses


def test_the_gradient_ends_where_it_does_from_a_random_beginning_with_more_steps(monkeypatch):
    X, H, draws = sinusoids((8, 8), 96), impulses((8, 8)), seeded()
    expected = map_error(attention(X, *gradient(X, H, 32)), H)
    random = [torch.randn(9, 96, 32, generator=draws) for _ in "QK"]
    norm = (96 * 32) ** 0.25 / math.sqrt(3)
    monkeypatch.setattr(
        "structured.closed_form", lambda *_: [W / W.norm(dim=(1, 2), keepdim=True) * norm for W in random]
    )
    torch.testing.assert_close(map_error(attention(X, *gradient(X, H, 32, steps=300)), H), expected, atol=0.01, rtol=0)


def test_closed_form_maps_peak_at_the_offset_of_nearly_every_inner_token():
    X, H = sinusoids((16, 16), 192), impulses((16, 16))
    maps, inner = attention(X, *closed_form(X, H, 64)), torch.zeros(16, 16, dtype=torch.bool)
    inner[1:-1, 1:-1] = True
    hits = (maps.argmax(-1) == H.argmax(-1))[:, inner.flatten()].float().mean(1)
    assert hits.mean() > 0.95 and hits.min() > 0.85
    assert map_error(maps, H).max() < 0.3  # 0.16 on average, a uniform map's is 1


def test_rank_8_is_enough_for_16_by_16_tokens_and_rank_4_is_not():
    X, H = sinusoids((16, 16), 192), impulses((16, 16))[[0, 4, 5]]
    errors = [map_error(attention(X, *gradient(X, H, head_dim)), H).mean() for head_dim in (64, 8, 4, 2)]
    assert errors[0] < 0.06 and errors[1] < 0.06 < 0.6 < errors[2] < 0.8 and 0.9 < errors[3] < 1.0


def test_zero_padding_leaves_rows_that_no_softmax_map_can_reach():
    X, clamped, padded = (
        sinusoids((16, 16), 192),
        *(impulses((16, 16), 3, border)[[0, 5]] for border in ("clamp", "zero")),
    )
    outside = padded.sum(-1) == 0
    errors = []
    for H in (clamped, padded):
        A = attention(X, *gradient(X, H, 64, norm=7))
        errors.append((A - H).square().sum(-1)[outside].mean())
    assert errors[0] < 0.01 and errors[1] > 0.1  # 0.004 and 0.12


def test_a_rotation_changes_no_map_leaves_no_column_empty_and_does_not_depend_on_the_basis():
    X, H = sinusoids((8, 8), 96), impulses((8, 8))
    W_Q, W_K = (W[3] for W in closed_form(X, H, 32))
    assert (W_Q == 0).all(0).any()  # what the rotation is for
    G = torch.randn(96, 32, generator=seeded())
    rotated = rotate(W_Q, W_K, G)
    torch.testing.assert_close(rotated[0] @ rotated[1].T, W_Q @ W_K.T, atol=1e-4, rtol=0)
    for W in rotated:
        assert W.norm(dim=0).min() > 0.1 * W.norm(dim=0).max()
    Q, _ = torch.linalg.qr(torch.randn(32, 32, generator=seeded(1)))  # any other basis of the k columns
    for W, again in zip(rotated, rotate(W_Q @ Q, W_K @ Q, G), strict=True):
        torch.testing.assert_close(W, again, atol=1e-4, rtol=0)


# ---- into a model


@pytest.mark.parametrize("method", ["gradient", "closed_form"])
def test_each_head_of_each_layer_gets_the_impulse_it_drew(method):
    model = small_vit(depth=6)
    assert initialize(model, method=method) == [f"blocks.{i}.attn" for i in range(6)]
    draws, seen = seeded(), []
    for layer, maps in zip(
        attention_layers(model), pseudo_maps(model, model.pos_embed, model.grid).values(), strict=True
    ):
        drawn = torch.randint(9, (3,), generator=draws)
        torch.randn(3 * 96 * 32, generator=draws)  # the rotations
        Z = torch.randn(96, 96, generator=draws) / math.sqrt(96)
        offsets, error = nearest_impulse(maps, model.grid)
        assert torch.equal(offsets, torch.tensor(kernel_offsets(3))[drawn]) and error.max() < 0.2
        torch.testing.assert_close(layer.W_V @ layer.W_proj, 0.4 * Z - 0.4 * torch.eye(96), atol=1e-5, rtol=0)
        seen += drawn.tolist()
    assert len(set(seen)) >= 7  # of 9, in 18 heads


def test_heads_with_one_impulse_have_one_map_but_weights_of_their_own():
    model = small_vit(depth=3, heads=6, dim=192)
    initialize(model)
    layers, maps = attention_layers(model), pseudo_maps(model, model.pos_embed, model.grid)
    heads = [(layer.W_Q[h], maps[layer.name][h]) for layer in layers for h in range(6)]
    twins = 0
    for i, (W, A) in enumerate(heads):
        for W_other, A_other in heads[:i]:
            if (A - A_other).abs().max() < 1e-3:
                twins += 1
                assert abs(F.cosine_similarity(W.flatten(), W_other.flatten(), dim=0)) < 0.9
    assert twins > 3


def test_the_vit_itself_makes_these_maps_of_an_image_without_content():
    model = small_vit()
    initialize(model)
    with torch.no_grad():
        for parameter in model.patch_embed.parameters():
            parameter.zero_()
    seen = model.attention_maps(torch.randn(1, 3, 16, 16))[0, 0]  # layer 0
    torch.testing.assert_close(
        seen, pseudo_maps(model, model.pos_embed, model.grid)["blocks.0.attn"], atol=1e-3, rtol=0
    )
    offsets, error = nearest_impulse(seen, model.grid)
    for A, offset in zip(seen, offsets.tolist(), strict=True):
        assert torch.equal(A.argmax(-1), impulse(model.grid, tuple(offset)).argmax(-1))
    torch.testing.assert_close(
        error, map_errors(model, model.pos_embed, model.grid)["blocks.0.attn"], atol=1e-3, rtol=0
    )


def test_default_weights_make_uniform_maps():
    model = small_vit()
    errors = torch.cat(list(map_errors(model, model.pos_embed, model.grid).values()))
    torch.testing.assert_close(errors, torch.full((6,), 1 - 1 / 64), atol=0.01, rtol=0)


def test_a_class_token_stays_outside_the_grid_and_leaves_the_maps_as_they_are():
    model = small_vit(pool="cls", depth=1)
    initialize(model)
    with torch.no_grad():
        for parameter in model.patch_embed.parameters():
            parameter.zero_()
    (inner,) = model.attention_maps(torch.zeros(1, 3, 16, 16))[0, :, :, 1:, 1:]
    expected = pseudo_maps(model, model.pos_embed, model.grid)["blocks.0.attn"]
    torch.testing.assert_close(inner, expected, atol=0.02, rtol=0)


def test_a_grid_that_is_not_square_and_a_layer_of_torch_work_as_well():
    model, P = nn.TransformerEncoderLayer(96, 3, 192).eval(), sinusoids_2d(4, 12, 96)
    assert structured_init_(model, P, (4, 12), generator=seeded()) == ["self_attn"]
    X = pseudo_input(P, (4, 12))[:, None]  # (n, 1, d), torch's order
    _, maps = model.self_attn(X, X, X, average_attn_weights=False)
    drawn = torch.randint(9, (3,), generator=seeded())
    assert torch.equal(maps[0].argmax(-1), impulses((4, 12))[drawn].argmax(-1))


@pytest.mark.parametrize("library", ["vit", "torch"])
@pytest.mark.parametrize("parts", [dict(), dict(vp=False), dict(qk=False)])
def test_only_the_projections_asked_for_change_and_their_biases_become_zero(library, parts):
    model = small_vit(depth=1) if library == "vit" else nn.TransformerEncoderLayer(96, 3, 192)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    before, layer_before = copy.deepcopy(model.state_dict()), copy.deepcopy(attention_layers(model)[0])
    structured_init_(model, sinusoids_2d(8, 8, 96), (8, 8), **parts)
    for name, value in model.state_dict().items():
        assert "attn." in name or torch.equal(value, before[name]), name
    (layer,) = attention_layers(model)
    for part, names in [("qk", ("W_Q", "W_K")), ("vp", ("W_V", "W_proj"))]:
        for name in names:
            new, old, bias = getattr(layer, name), getattr(layer_before, name), getattr(layer, "b" + name[1:])
            assert torch.equal(new, old) != parts.get(part, True)
            assert bias is None or bool((bias == 0).all()) == parts.get(part, True)


def test_a_seed_gives_the_same_weights_whatever_the_threads_and_draws_come_from_the_generator_alone():
    threads, models = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            models.append(small_vit())
            torch.manual_seed(n)
            state = torch.get_rng_state()
            initialize(models[-1])
            assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*map(weights, models), atol=1e-3, rtol=0)
    other = small_vit()
    initialize(other, generator=seeded(1))
    assert (weights(other) - weights(models[0])).abs().max() > 0.1


def test_an_ablation_shares_its_draws_with_the_full_method():
    both, qk, vp = (small_vit(depth=3) for _ in range(3))
    for model, parts in [(both, {}), (qk, dict(vp=False)), (vp, dict(qk=False))]:
        initialize(model, **parts)
    for a, b, c in zip(*map(attention_layers, (both, qk, vp)), strict=True):
        assert torch.equal(a.W_Q, b.W_Q) and torch.equal(a.W_V, c.W_V) and torch.equal(a.W_proj, c.W_proj)


def test_other_dtypes_get_the_same_weights_rounded_and_torch_defaults_do_not_leak_in():
    reference, model, half = small_vit(), small_vit(), small_vit().to(torch.bfloat16)
    P = reference.pos_embed
    structured_init_(reference, P, (8, 8), generator=seeded())
    structured_init_(half, P, (8, 8), generator=seeded())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # stands for any default device that is not the CPU
            structured_init_(model, P, (8, 8), generator=seeded())
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b, c in zip(*map(attention_layers, (reference, model, half)), strict=True):
        assert torch.equal(a.W_Q, b.W_Q) and torch.equal(a.W_V, b.W_V) and torch.equal(a.W_K.bfloat16(), c.W_K)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_models_get_the_same_weights_and_the_gradient_runs_on_cuda():
    reference, model = small_vit(), small_vit().cuda()
    initialize(reference)
    initialize(model)
    for a, b in zip(attention_layers(reference), attention_layers(model), strict=True):
        assert torch.equal(a.W_K, b.W_K.cpu())
    X, H = sinusoids((8, 8), 96), impulses((8, 8))
    for a, b in zip(gradient(X, H, 32), gradient(X, H, 32, device="cuda"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=0)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    model, P = small_vit(), sinusoids_2d(8, 8, 96)
    before = weights(model)
    for match, arguments in [
        ("65 position embeddings for a grid of 8 by 8.*class token", dict(pos_embed=torch.randn(1, 65, 96))),
        ("blocks.0.attn has width 96, but the position embeddings have 64", dict(pos_embed=sinusoids_2d(8, 8, 64))),
        ("zero, constant or not finite", dict(pos_embed=torch.zeros(64, 96))),
        ("zero, constant or not finite", dict(pos_embed=torch.full((64, 96), math.nan))),
        ("odd.*not 4", dict(kernel_size=4)),
        ("'gradient' or 'closed_form', not 'svd'", dict(method="svd")),
        ("'clamp' or 'zero', not 'wrap'", dict(border="wrap")),
        ("norm must be positive", dict(norm=0)),
        ("alpha2 and beta2 finite", dict(alpha2=math.inf)),
        ("nothing to initialize", dict(qk=False, vp=False)),
    ]:
        with pytest.raises(ValueError, match=match):
            structured_init_(model, **{**dict(pos_embed=P, grid=(8, 8)), **arguments})
    with pytest.raises(ValueError, match="leaves the grid .1, 64. everywhere; take border='clamp'"):
        structured_init_(model, P, (1, 64), border="zero")
    with pytest.raises(ValueError, match="no self-attention layer found in Linear"):
        structured_init_(nn.Linear(4, 4), P, (8, 8))
    assert torch.equal(weights(model), before)


# ---- as the script calls it


def test_the_scripts_settings_reach_the_method_and_it_prints_the_error(capsys):
    states = []
    for flags in (
        "",
        "--kernel-size 5",
        "--method closed_form",
        "--qk-norm 6",
        "--alpha2 0.1",
        "--beta2 0.1",
        "--parts qk",
        "--parts vp",
    ):
        model = small_vit()
        VISION_INITS["structured"](model, parse_settings(Settings, flags.split(), "", {}), seeded())
        assert ("structured: map error 0." in capsys.readouterr().out) == (flags != "--parts vp")
        states.append(weights(model))
    assert not any(torch.equal(a, b) for i, a in enumerate(states) for b in states[:i])
