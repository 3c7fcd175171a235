"""Facts of the paper, checked on whole matrices: the copies that are wrong have the right mean diagonal."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from layouts import attention_layers
from mimetic import expected_attention, mimetic_init_, query_key, sinusoids_1d, sinusoids_2d, value_proj
from vit import ViT


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def small_vit(**sizes):
    torch.manual_seed(0)
    return ViT(**{**dict(image_size=8, patch_size=4, dim=24, depth=2, heads=3), **sizes})


def products(view):
    """W_Q W_Kᵀ of every head (H, D, D), and W_V W_proj (D, D)."""
    return view.W_Q @ view.W_K.transpose(1, 2), view.W_V @ view.W_proj


def off_target(product, dim, beta):
    """The noise left over after beta·I, scaled so that N(0, I/d) has deviation one."""
    return ((product - beta * torch.eye(dim)) * math.sqrt(dim)).flatten()


# ---- positions


def test_second_row_of_a_width_four_table_is_sine_and_cosine_of_1_and_001():
    expected = [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]
    torch.testing.assert_close(sinusoids_1d(3, 4)[1], torch.tensor(expected))


def test_sinusoids_follow_the_formula_and_the_product_depends_on_distance_alone():
    P = sinusoids_1d(20, 12).double()
    for i in range(6):
        omega = 10_000 ** (-2 * i / 12)
        np.testing.assert_allclose(P[:, 2 * i], np.sin(np.arange(20) * omega), atol=1e-6)
        np.testing.assert_allclose(P[:, 2 * i + 1], np.cos(np.arange(20) * omega), atol=1e-6)
    gram = P @ P.T
    torch.testing.assert_close(gram[:-1, :-1], gram[1:, 1:], atol=1e-5, rtol=0)


def test_grid_positions_are_row_major_with_rows_in_the_first_half():
    P = sinusoids_2d(3, 5, 8).view(3, 5, 8)
    for r in range(3):
        for c in range(5):
            torch.testing.assert_close(P[r, c, :4], sinusoids_1d(3, 4)[r])
            torch.testing.assert_close(P[r, c, 4:], sinusoids_1d(5, 4)[c])


def test_widths_that_sinusoids_cannot_fill_are_refused():
    with pytest.raises(ValueError, match="even width.*7"):
        sinusoids_1d(4, 7)
    with pytest.raises(ValueError, match="divisible by 4.*6"):
        sinusoids_2d(4, 4, 6)


# ---- the two products


@pytest.mark.parametrize("dim, head_dim", [(64, 16), (33, 11), (7, 7), (5, 1), (1, 1)])
@pytest.mark.parametrize("alpha, beta", [(0.7, 0.7), (0.3, -0.5), (1.0, 0.0)])
def test_query_key_product_is_the_best_rank_k_approximation_of_the_target(dim, head_dim, alpha, beta):
    W_Q, W_K = query_key(dim, head_dim, alpha, beta, seeded())
    Z = torch.randn(dim, dim, generator=seeded()).double().numpy() / math.sqrt(dim)
    U, S, V_T = np.linalg.svd(alpha * Z + beta * np.eye(dim))
    best = (U[:, :head_dim] * S[:head_dim]) @ V_T[:head_dim]
    np.testing.assert_allclose(W_Q.double() @ W_K.double().T, best, atol=2e-5)
    assert W_Q.shape == W_K.shape == (dim, head_dim)


@pytest.mark.parametrize("dim", [1, 5, 33, 64])
@pytest.mark.parametrize("alpha, beta", [(0.4, 0.4), (0.4, -0.4), (0.0, 0.2), (0.2, 0.0)])
def test_value_projection_product_is_the_target_matrix(dim, alpha, beta):
    W_V, W_proj = value_proj(dim, alpha, beta, seeded())
    Z = torch.randn(dim, dim, generator=seeded()) / math.sqrt(dim)
    torch.testing.assert_close(W_V @ W_proj, alpha * Z - beta * torch.eye(dim), atol=2e-6, rtol=0)


def test_noise_is_gaussian_with_deviation_one_over_root_dim():
    for product, beta in [
        (torch.matmul(*value_proj(256, 0.4, 0.4, seeded())) / 0.4, -1),
        (query_key(256, 256, 0.7, 0.7, seeded()), 1),
    ]:
        if isinstance(product, tuple):
            product = product[0] @ product[1].T / 0.7
        noise = off_target(product, 256, beta)
        assert abs(noise.std() - 1) < 0.02
        assert abs((noise**4).mean() - 3) < 0.15  # the Gaussian's; a uniform draw's is 1.8


def test_truncation_leaves_less_than_beta_on_the_diagonal():
    W_Q, W_K = query_key(64, 16, 0.7, 0.7, seeded())
    assert 0.27 < (W_Q * W_K).sum() / 64 < 0.35  # about 0.31, not 0.7: the rank-16 part of a rank-64 matrix


def test_both_factors_carry_the_square_root_of_the_singular_values():
    W_V, W_proj = value_proj(32, generator=seeded())
    S = torch.linalg.svdvals(W_V @ W_proj)
    torch.testing.assert_close(torch.linalg.svdvals(W_V), S.sqrt(), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.svdvals(W_proj), S.sqrt(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("beta", [0.5, -0.5])
def test_without_noise_the_query_key_product_is_beta_times_a_rank_k_projection(beta):
    W_Q, W_K = query_key(24, 6, alpha=0, beta=beta)
    projection = (W_Q @ W_K.T) / beta
    torch.testing.assert_close(projection @ projection, projection)
    torch.testing.assert_close(projection, projection.T)
    assert torch.linalg.matrix_rank(projection) == 6
    assert torch.equal(W_Q, query_key(24, 6, alpha=0, beta=beta, generator=seeded(9))[0])


def test_head_dim_beyond_the_width_is_refused():
    with pytest.raises(ValueError, match="between 1 and the width 8, not 9"):
        query_key(8, 9)


def test_factor_signs_are_fixed_so_that_every_lapack_agrees():
    W_V, _ = value_proj(16, generator=seeded())
    largest = W_V.gather(0, W_V.abs().argmax(0, keepdim=True))
    assert (largest > 0).all()


# ---- into a model


def test_every_head_and_layer_gets_its_target_with_a_draw_of_its_own():
    model = small_vit(dim=48, depth=3)
    names = mimetic_init_(model, generator=seeded(3))
    assert names == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    draws, noises = seeded(3), []
    for view in attention_layers(model):
        qk, vp = products(view)
        for head in qk:
            Z = torch.randn(48, 48, generator=draws) / math.sqrt(48)
            U, S, V_T = torch.linalg.svd(0.7 * Z + 0.7 * torch.eye(48))
            torch.testing.assert_close(head, U[:, :16] * S[:16] @ V_T[:16], atol=1e-5, rtol=0)
            noises.append(Z.flatten())
        Z = torch.randn(48, 48, generator=draws) / math.sqrt(48)
        torch.testing.assert_close(vp, 0.4 * Z - 0.4 * torch.eye(48), atol=1e-5, rtol=0)
        noises.append(Z.flatten())
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(len(noises))
    assert correlations.abs().max() < 0.1  # 12 draws, none used twice


def test_products_of_one_layer_share_no_noise():
    model = small_vit(dim=96, heads=1, depth=2)  # one head: rank d, so the whole noise can be read back
    mimetic_init_(model, generator=seeded())
    noises = []
    for view in attention_layers(model):
        qk, vp = products(view)
        noises += [off_target(qk[0] / 0.7, 96, 1), off_target(vp / 0.4, 96, -1)]
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(4)
    assert correlations.abs().max() < 0.05


def test_query_key_diagonal_is_positive_and_value_projection_diagonal_negative():
    model = small_vit(dim=96, heads=3)
    mimetic_init_(model, generator=seeded())
    for view in attention_layers(model):
        qk, vp = products(view)
        assert (qk.diagonal(dim1=1, dim2=2).mean(1) > 0.2).all()
        assert abs(vp.diagonal().mean() + 0.4) < 0.03
    mimetic_init_(model, beta2=-0.4)  # the paper's ablation
    assert abs(products(attention_layers(model)[0])[1].diagonal().mean() - 0.4) < 0.03


def test_each_alpha_and_beta_reaches_its_own_product():
    model = small_vit(dim=64, heads=1)
    mimetic_init_(model, alpha1=0.1, beta1=0.9, alpha2=0.3, beta2=0.6, generator=seeded())
    qk, vp = products(attention_layers(model)[0])
    assert abs(qk[0].diagonal().mean() - 0.9) < 0.02
    assert abs(off_target(qk[0], 64, 0.9).std() - 0.1) < 0.01
    assert abs(vp.diagonal().mean() + 0.6) < 0.03
    assert abs(off_target(vp, 64, -0.6).std() - 0.3) < 0.02


@pytest.mark.parametrize("library", ["vit", "torch"])
def test_only_the_four_projections_change_and_their_biases_become_zero(library):
    model = small_vit() if library == "vit" else nn.TransformerEncoderLayer(24, 3, 48)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    before = copy.deepcopy(model.state_dict())
    mimetic_init_(model)
    for name, value in model.state_dict().items():
        if "attn." not in name:
            assert torch.equal(value, before[name]), name
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            assert (value != before[name]).all()


@pytest.mark.parametrize("parts, changed", [(dict(qk=False), "vp"), (dict(vp=False), "qk")])
def test_one_product_can_be_left_alone(parts, changed):
    model = small_vit()
    before = copy.deepcopy(attention_layers(model))
    mimetic_init_(model, **parts)
    for old, new in zip(before, attention_layers(model), strict=True):
        assert torch.equal(old.W_Q, new.W_Q) == torch.equal(old.W_K, new.W_K) == (changed == "vp")
        assert torch.equal(old.W_V, new.W_V) == torch.equal(old.W_proj, new.W_proj) == (changed == "qk")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_get_the_same_weights_rounded(dtype):
    reference, model = small_vit(), small_vit().to(dtype)
    mimetic_init_(reference, generator=seeded())
    mimetic_init_(model, generator=seeded())
    for a, b in zip(attention_layers(reference), attention_layers(model), strict=True):
        assert torch.equal(a.W_Q.to(dtype), b.W_Q) and torch.equal(a.W_proj.to(dtype), b.W_proj)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_models_get_the_same_weights():
    reference, model = small_vit(), small_vit().cuda()
    mimetic_init_(reference, generator=seeded())
    mimetic_init_(model, generator=seeded())
    for a, b in zip(attention_layers(reference), attention_layers(model), strict=True):
        assert torch.equal(a.W_K, b.W_K.cpu()) and torch.equal(a.W_V, b.W_V.cpu())


def test_draws_come_from_the_generator_alone():
    model, again = small_vit(), small_vit()
    np.random.seed(0)
    torch.manual_seed(1)
    mimetic_init_(model, generator=seeded(5))
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    np.random.seed(7)
    torch.manual_seed(8)
    mimetic_init_(again, generator=seeded(5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    np.random.seed(0)
    torch.manual_seed(1)
    mimetic_init_(again, generator=seeded(5))
    assert (np.random.get_state()[1] == numpy_state).all() and torch.equal(torch.get_rng_state(), torch_state)


def test_torch_manual_seed_decides_where_no_generator_is_given():
    weights = []
    for numpy_seed in (0, 1):
        np.random.seed(numpy_seed)
        model = small_vit()  # seeds torch
        mimetic_init_(model)
        weights.append(model.blocks[0].attn.qkv.weight)
    assert torch.equal(*weights)


def test_defaults_of_torch_do_not_leak_in():
    reference, model = small_vit(), small_vit()
    mimetic_init_(reference, generator=seeded())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # stands for any default device that is not the CPU
            mimetic_init_(model, generator=seeded())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_wrapped_models_are_initialized_under_their_plain_names(tmp_path):
    reference, compiled, parallel = small_vit(), torch.compile(small_vit()), small_vit()
    names = mimetic_init_(reference, generator=seeded())
    assert mimetic_init_(compiled, generator=seeded()) == names
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(parallel)
        assert mimetic_init_(wrapped, generator=seeded()) == names
    finally:
        torch.distributed.destroy_process_group()
    for model in (compiled, parallel):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_blocks_compiled_one_by_one_are_found():
    model = small_vit()
    model.blocks[1] = torch.compile(model.blocks[1])
    assert mimetic_init_(model) == ["blocks.0.attn", "blocks.1.attn"]


def test_a_model_on_the_meta_device_is_refused_and_works_once_it_is_real():
    with torch.device("meta"):
        model = small_vit()
    with pytest.raises(ValueError, match="meta device.*to_empty"):
        mimetic_init_(model)
    model = model.to_empty(device="cpu")
    model.init_weights()
    assert mimetic_init_(model) == ["blocks.0.attn", "blocks.1.attn"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_model_without_attention_is_an_error_not_a_silent_no_op():
    with pytest.raises(ValueError, match="no self-attention layer found in Sequential"):
        mimetic_init_(nn.Sequential(nn.Linear(4, 4)))


def test_heads_that_do_not_divide_the_width_are_refused():
    model = small_vit()
    model.blocks[1].attn.num_heads = 5
    with pytest.raises(ValueError, match="blocks.1.attn: 5 heads do not divide"):
        mimetic_init_(model)


def test_an_error_comes_before_anything_is_written():
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, kdim=6, vdim=8)])
    before = copy.deepcopy(model.state_dict())
    for bad in (dict(), dict(alpha1=math.nan), dict(beta2=math.inf)):
        with pytest.raises(ValueError, match="kdim is not 8" if not bad else "finite"):
            mimetic_init_(model, **bad)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_ablation_shares_its_draws_with_the_full_method():
    both, qk, vp, no_noise = (small_vit(dim=24, depth=3) for _ in range(4))
    for model, parts in [(both, {}), (qk, dict(vp=False)), (vp, dict(qk=False)), (no_noise, dict(alpha1=0))]:
        mimetic_init_(model, generator=seeded(), **parts)
    for a, b, c, d in zip(*map(attention_layers, (both, qk, vp, no_noise)), strict=True):
        assert torch.equal(a.W_Q, b.W_Q) and torch.equal(a.W_V, c.W_V) and torch.equal(a.W_proj, d.W_proj)


def test_factors_do_not_depend_on_the_number_of_threads():
    threads, factors = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            factors.append(query_key(256, 64, generator=seeded())[0])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*factors, atol=1e-6, rtol=0)


@pytest.mark.parametrize("wrap", [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.spectral_norm])
def test_weights_computed_from_others_are_refused_not_written_in_vain(wrap):
    model = small_vit()
    wrap(model.blocks[0].attn.qkv)
    with pytest.raises(ValueError, match="weight is computed from other tensors"):
        mimetic_init_(model)


def test_nothing_to_do_is_an_error():
    with pytest.raises(ValueError, match="nothing to initialize"):
        mimetic_init_(small_vit(), qk=False, vp=False)


# ---- why it works


def test_expected_attention_is_the_softmax_of_the_mean_logits():
    beta, n, d, k = 0.7, 5, 8, 4
    P, draws = sinusoids_1d(n, d), seeded()
    mean = torch.zeros(n, n)
    for _ in range(200):
        X = torch.randn(500, n, d, generator=draws) + P  # zero mean and identity covariance, plus P
        M = beta * torch.eye(d) + torch.randn(500, d, d, generator=draws) / math.sqrt(d)
        mean += (X @ M @ X.transpose(1, 2)).mean(0) / 200
    torch.testing.assert_close(expected_attention(P, beta, k), (mean / math.sqrt(k)).softmax(-1), atol=0.02, rtol=0)


def test_expected_attention_favours_the_token_then_its_neighbours():
    A = expected_attention(sinusoids_2d(6, 6, 32), beta1=0.1, head_dim=32)
    torch.testing.assert_close(A.sum(-1), torch.ones(36))
    torch.testing.assert_close(A, expected_attention(sinusoids_2d(6, 6, 32)[None], 0.1, 32))  # as a ViT keeps them
    row = A[14].view(6, 6)  # the token in row 2, column 2
    assert row.argmax() == 14
    assert row[2, 3] == pytest.approx(row[3, 2].item(), rel=1e-4) and row[2, 3] > row[2, 4] > row[2, 5]
