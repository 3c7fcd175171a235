"""Mimetic initialization of self-attention (Trockman & Kolter, ICML 2023, arXiv 2305.09828).

Pretrained Transformers look alike: in a head, W_Q W_Kᵀ has a strong positive diagonal; in a layer,
W_V W_proj has a negative one. Start there instead of at Gaussian noise:

    W_Q W_Kᵀ   ≈ α₁ Z₁ + β₁ I     rank k = head_dim; Z₁ drawn anew for each head of each layer
    W_V W_proj = α₂ Z₂ − β₂ I     full rank, all heads together; Z₂ drawn anew for each layer

with Z ~ N(0, I/d), both products split by SVD, M = U Σ Vᵀ = (U Σ^½)(Σ^½ Vᵀ), and add sinusoidal position
embeddings. Each token then attends to itself and its neighbours, and each layer starts close to a shrinking
of the residual stream. Vision: α₁ = β₁ = 0.7, α₂ = β₂ = 0.4. Language: α₁ = 0, β₁ = 0.5, α₂ = β₂ = 0.2.

Everything here multiplies rows, as the paper does (`x @ W_Q`, `x @ W_V @ W_proj`); only layouts.py knows how
a library stores the weights. n tokens, d = dim = width, k = head_dim.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from verify import verify
from writing import layers_to_write, write_

# ---- position embeddings


def sinusoids_1d(length: int, dim: int, temperature: float = 10_000.0) -> Tensor:
    """Sinusoidal positions (length, dim): column 2i is sin(p ωᵢ), column 2i+1 cos(p ωᵢ), ωᵢ = temperature^(−2i/dim).

    The interleaved layout of Vaswani et al. (2017), highest frequency first. Raises ValueError for an odd `dim`.
    """
    if dim % 2:
        raise ValueError(f"sinusoids_1d needs an even width (a sine and a cosine per frequency), not {dim}.")
    omega = temperature ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (dim/2,)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * omega  # (length, dim/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


def sinusoids_2d(height: int, width: int, dim: int, temperature: float = 10_000.0) -> Tensor:
    """Sinusoidal positions for a grid (height*width, dim), row-major like flattened patches.

    The first half of the columns encodes the row, the second half the column, each as in `sinusoids_1d`.
    Raises ValueError if `dim` is not a multiple of four.
    """
    if dim % 4:
        raise ValueError(f"sinusoids_2d needs a width divisible by 4 (sine and cosine, row and column), not {dim}.")
    rows = sinusoids_1d(height, dim // 2, temperature)[:, None].expand(height, width, dim // 2)
    columns = sinusoids_1d(width, dim // 2, temperature)[None].expand(height, width, dim // 2)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)


# ---- the two products


def query_key(
    dim: int, head_dim: int, alpha: float = 0.7, beta: float = 0.7, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """W_Q, W_K of one head, each (dim, head_dim): W_Q @ W_K.T is the best rank-k approximation of αZ + βI.

    Both are float32 on the CPU; the draw comes from `generator`, or from torch's global one. Truncation keeps the k
    largest singular values, so the product's mean diagonal is less than β: 0.39 for α = β = 0.7 and k = dim/3.
    """
    if not 1 <= head_dim <= dim:
        raise ValueError(f"head_dim must be between 1 and the width {dim}, not {head_dim}.")
    Z = gaussian(dim, generator)  # drawn even if alpha is 0, so that no other draw depends on alpha
    if alpha == 0:
        # βI has no preferred singular vectors. We take what LAPACK returns for it, the first k axes for every head, but
        # write them down instead of calling it: another library could return any other basis. On text these axes, the
        # highest frequencies of the positions, do better than other axes or a random basis per head (docs/text.md).
        W_Q = math.sqrt(abs(beta)) * torch.eye(dim, head_dim, device="cpu", dtype=torch.float32)
        return W_Q, math.copysign(1.0, beta) * W_Q
    W_Q, W_K_T = svd_split(alpha * Z + beta * identity(dim), rank=head_dim)
    return W_Q, W_K_T.T


def value_proj(
    dim: int, alpha: float = 0.4, beta: float = 0.4, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """W_V, W_proj of one layer, all heads together, each (dim, dim): W_V @ W_proj equals αZ − βI.

    With attention near the identity, a layer then does X ← X + LN(X)(α₂Z₂ − β₂I): if LayerNorm leaves tokens as they
    are, this is the paper's (1 − β₂)X + α₂ X Z₂ (docs/depth.md).
    The paper's listing ends in V Σ^½, whose transpose gives the target; the layer applies W_proj itself, so ours is
    Σ^½ Vᵀ. Both are float32 on the CPU.
    """
    return svd_split(alpha * gaussian(dim, generator) - beta * identity(dim), rank=dim)


def gaussian(dim: int, generator: torch.Generator | None) -> Tensor:
    """Z (dim, dim) with entries N(0, 1/dim): a standard deviation of 1/√dim, so that |xZ| ≈ |x|."""
    return torch.randn(dim, dim, generator=generator, device="cpu", dtype=torch.float32) / math.sqrt(dim)


def identity(dim: int) -> Tensor:
    return torch.eye(dim, device="cpu", dtype=torch.float32)


def svd_split(M: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A (d, rank) and B (rank, d): A @ B is the best rank-`rank` approximation of M, and |A| = |B|."""
    U, S, V_T = torch.linalg.svd(M.double())  # in float32 the factors would depend on the number of threads (1e-3)
    U, S, V_T = U[:, :rank], S[:rank], V_T[:rank]
    # A column of U and its row of V_T may flip sign together, and LAPACKs differ: make U's largest entry positive.
    sign = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()  # (1, rank)
    return (U * sign * S.sqrt()).float(), (V_T * sign.T * S.sqrt()[:, None]).float()


# ---- into a model


@torch.no_grad()
def mimetic_init_(
    model: nn.Module,
    alpha1: float = 0.7,
    beta1: float = 0.7,
    alpha2: float = 0.4,
    beta2: float = 0.4,
    qk: bool = True,
    vp: bool = True,
    generator: torch.Generator | None = None,
    strict: bool = True,
    example: Any = None,
) -> list[str]:
    """Initialize every self-attention layer of `model` in place; return the layers' names.

    qk: write W_Q, W_K.  vp: write W_V, W_proj.  beta2 = −0.4 is the paper's positive-diagonal ablation. Biases of
    the projections written become zero; nothing else in the model changes. Draws (float32; `generator` is a CPU one)
    and SVDs (float64) run on the CPU, so a seed gives the same weights on every device and, rounded, in every dtype.
    Both products are drawn whatever `qk` and `vp` say, so that an ablation shares its draws with the full method.
    Raises ValueError, before it writes anything, if there is no attention layer, one that the method does not fit
    (cross-attention, grouped queries and more: the message says which and why) or one that layouts.py does not know;
    strict=False leaves such layers as they are, and warns. example: an input of the model (a tensor, a tuple of
    arguments or a dict of them); if it is given, layers that the model's own forward pass does not prove right are
    refused too. Only this shows how nn.MultiheadAttention is called.
    """
    if not all(abs(factor) < 1e30 for factor in (alpha1, beta1, alpha2, beta2)):  # beyond that, float32 overflows
        raise ValueError(f"alpha and beta must be finite numbers, not {alpha1}, {beta1}, {alpha2}, {beta2}.")
    inputs = example if isinstance(example, tuple) else (example,)
    bad = {} if example is None else {name: note for name, right, *_, note in verify(model, *inputs) if not right}
    layers = layers_to_write(model, qk, vp, strict, bad)
    for layer in layers:
        dim, head_dim = layer.W_Q.shape[1:]
        heads = [query_key(dim, head_dim, alpha1, beta1, generator) for _ in range(layer.heads)]  # Z₁ anew for each
        W_V, W_proj = value_proj(dim, alpha2, beta2, generator)
        if qk:
            W_Q, W_K = map(torch.stack, zip(*heads, strict=True))  # (H, D, K)
            write_(layer, W_Q=W_Q, W_K=W_K)
        if vp:
            write_(layer, W_V=W_V, W_proj=W_proj)
    return [layer.name for layer in layers]


# ---- why it works


def expected_attention(pos_embed: Tensor, beta1: float, head_dim: int) -> Tensor:
    """The softmax of the mean logits that a layer starts with (n, n): Softmax((β₁ d I + β₁ P Pᵀ)/√k), rows sum to one.

    For inputs X of zero mean and identity covariance and positions P = `pos_embed` (n, d),
    E[(X+P) W_Q W_Kᵀ (X+P)ᵀ] = β₁ d I + β₁ P Pᵀ. This ignores the truncation to rank k, and that patches of an image
    resemble each other. Both make a real map much softer: see `ViT.attention_maps`.
    """
    P = pos_embed.flatten(0, -2)  # also (1, n, d)
    n, d = P.shape
    mean_logits = beta1 * d * torch.eye(n, dtype=P.dtype, device=P.device) + beta1 * P @ P.T
    return (mean_logits / math.sqrt(head_dim)).softmax(dim=-1)
