"""Structured initialization of self-attention (Zheng, Li & Lucey, arXiv 2404.01139; closed form: arXiv 2505.19985).

Mimetic initialization fixes the product W_Q W_Kᵀ; this one fixes the attention *map*. Each head draws one impulse of a
small kernel: H (n, n) has a single 1 in each row, at a fixed offset in the grid of tokens, so that H X moves every
token by that offset, as a depthwise convolution with the impulse does. W_Q and W_K then solve

    Softmax(X̃ W_Q W_Kᵀ X̃ᵀ / √k) ≈ H        X̃ = LayerNorm(position embeddings), the same for every layer

by descent on the squared error ("gradient") or by pseudo-inverse and SVD ("closed_form"). W_V and W_proj are the
mimetic ones in 2505.19985; 2404.01139 leaves them at their default (`vp=False`).

A 3x3 kernel poses only 9 problems (5x5: 25), whatever the depth and the number of heads: we solve each once, and all of
them in one batch. Besides its offset, a head draws a rotation of its k columns, on which no map depends. The docstrings
say where the papers are silent or our code differs.

n tokens, d = dim = width, k = head_dim, m impulses. As in mimetic.py, everything multiplies rows (`x @ W_Q`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layouts import attention_layers
from mimetic import value_proj
from writing import layers_to_write, write_

# ---- the target and the pseudo-input


def kernel_offsets(kernel_size: int) -> list[tuple[int, int]]:
    """The (row, column) offsets of a kernel, row by row: (-1, -1) ... (1, 1) for 3. Raises ValueError if it is even."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, so that the kernel has a centre, not {kernel_size}.")
    steps = range(-(kernel_size // 2), kernel_size // 2 + 1)
    return [(row, column) for row in steps for column in steps]


def impulse(grid: tuple[int, int], offset: tuple[int, int], border: str = "clamp") -> Tensor:
    """H (n, n) for a grid (rows, columns) of n tokens, row-major: row i has its 1 at the token `offset` away from i.

    border: if that token is outside the grid, "clamp" takes the nearest one inside, so that every row keeps a 1 (ours);
    "zero" leaves the row empty, which is zero padding (the authors' code). No softmax has an empty row, and sinusoids
    make such a token attend to the edge anyway: clamped impulses can be reached, zero-padded ones cannot.
    """
    if border not in ("clamp", "zero"):
        raise ValueError(f"border is 'clamp' or 'zero', not {border!r}.")
    wanted = [torch.arange(size, device="cpu") + step for size, step in zip(grid, offset, strict=True)]
    rows, columns = (index.clamp(0, size - 1) for index, size in zip(wanted, grid, strict=True))
    H = F.one_hot((rows[:, None] * grid[1] + columns).flatten(), grid[0] * grid[1]).float()
    if border == "zero":
        inside = (rows == wanted[0])[:, None] & (columns == wanted[1])  # (rows, columns)
        H *= inside.view(-1, 1)
    return H


def pseudo_input(pos_embed: Tensor, grid: tuple[int, int]) -> Tensor:
    """X̃ (n, d): the layer-normalized positions of the grid's tokens, float32 on the CPU. γ (`pos_scale`) cancels.

    pos_embed: (n, d) or (1, n, d), without the class token. Raises ValueError if that does not fit the grid.
    """
    P = pos_embed.detach().to("cpu", torch.float32).flatten(0, -2)
    if len(P) != grid[0] * grid[1]:
        raise ValueError(
            f"{len(P)} position embeddings for a grid of {grid[0]} by {grid[1]} tokens; pass only those of the grid, "
            "without that of a class token."
        )
    X = F.layer_norm(P, P.shape[-1:])
    if not X.isfinite().all() or not X.any():
        raise ValueError("the position embeddings are zero, constant or not finite, so no map can be made from them.")
    return X


def attention(X: Tensor, W_Q: Tensor, W_K: Tensor) -> Tensor:
    """Softmax(X W_Q W_Kᵀ Xᵀ / √k): (n, d) and two (..., d, k) to maps (..., n, n)."""
    return ((X @ W_Q) @ (X @ W_K).mT / math.sqrt(W_Q.shape[-1])).softmax(-1)


def map_error(A: Tensor, H: Tensor) -> Tensor:
    """The squared distance between a row of the map A and that of H, averaged over rows: (..., n, n) -> (...).

    It is n times the papers' mean squared error, so that it does not shrink with n: 0 for the impulse itself, 1 - 1/n
    for a uniform map, 2 for another impulse.
    """
    return (A - H).square().sum(-1).mean(-1)


# ---- the two solvers: (n, d), (m, n, n) -> W_Q, W_K (m, d, k), each of Frobenius norm `norm`


def closed_form(X: Tensor, H: Tensor, head_dim: int, norm: float | None = None) -> tuple[Tensor, Tensor]:
    """W_Q W_Kᵀ ∝ the best rank-k approximation of X⁺ H (X⁺)ᵀ, X⁺ a truncated pseudo-inverse of X (2505.19985).

    X W_Q W_Kᵀ Xᵀ is then the projection of H onto what X spans, and the norm makes a softmax map of it. Positions span
    little: only 17 singular values of 16 by 16 sinusoids of width 192 exceed 1/1000 of the largest, and dividing by
    small ones drowns the rest. So each impulse gets the truncation, at 1/2, 1/4, ... 1/64 of the largest singular
    value, whose map is nearest (the paper keeps k, of random positions, which span more; we leave out its small noise
    beside the ones). A head_dim below the rank in use cuts the product and blurs the map.
    norm: by default 7, the authors' for every width. Only the norm keeps a map soft. float64 inside.
    """
    norm = 7.0 if norm is None else norm
    U, S, V_T = torch.linalg.svd(X.double(), full_matrices=False)
    solutions = []
    for rank in sorted({int((S[0] / 2**j < S).sum()) for j in range(1, 7)}):
        U_r, S_r, V_r = U[:, :rank], S[:rank], V_T[:rank].T
        core = (U_r.T @ H.double() @ U_r) / (S_r[:, None] * S_r)  # (m, r, r): X⁺ H (X⁺)ᵀ in the basis V_r
        u, s, v_T = torch.linalg.svd(core)
        W = torch.stack([V_r @ u, V_r @ v_T.mT]) * s.sqrt()[:, None]  # (2, m, d, r)
        W = F.pad(W, (0, max(0, head_dim - rank)))[..., :head_dim].float()
        solutions.append(W * (norm / W.norm(dim=(-2, -1), keepdim=True)))
    errors = torch.stack([map_error(attention(X, *W), H) for W in solutions])  # (truncations, m)
    best = errors.argmin(0)
    W_Q, W_K = torch.stack(solutions)[best, :, torch.arange(len(H), device="cpu")].unbind(1)
    return W_Q, W_K


def gradient(
    X: Tensor, H: Tensor, head_dim: int, norm: float | None = None, steps: int = 50, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """W_Q, W_K that minimize the squared error of the maps at a fixed norm (2404.01139), all impulses in one batch.

    The paper draws W_Q, W_K and takes 10 000 steps of Adam. We start from the closed form and move along the sphere
    |W| = norm, with momentum and a cosine to 0, by steps whose length does not depend on the size of the gradient,
    which is tiny far from a solution: 50 are enough. Random starts reach the same error in twice the steps.
    norm: by default (dk)^¼/√3, 6.1 for ViT-Tiny. The authors' code starts from uniform draws whose columns have norm
    √⅓ and resets the k columns of W_Q, and the d of W_K as stored, to it: |W_Q| |W_K| = √(k/3) √(d/3).
    """
    norm = (X.shape[1] * head_dim) ** 0.25 / math.sqrt(3) if norm is None else norm
    W = torch.stack(closed_form(X, H, head_dim, norm)).to(device)  # (2, m, d, k)
    velocity = torch.zeros_like(W)
    X, H = X.to(device), H.to(device)
    for step in range(steps):
        with torch.enable_grad():
            W.requires_grad_()
            (G,) = torch.autograd.grad(map_error(attention(X, *W), H).sum(), W)
        W = W.detach()
        G -= W * (G * W).sum((-2, -1), keepdim=True) / norm**2  # minus what would only change the norm
        velocity = 0.9 * velocity + G / (G.norm(dim=(-2, -1), keepdim=True) + 1e-4)  # still once the map fits
        W -= 0.015 * norm * 0.5 * (1 + math.cos(math.pi * step / steps)) * velocity
        W *= norm / W.norm(dim=(-2, -1), keepdim=True)
    return W[0].cpu(), W[1].cpu()


SOLVERS = {"gradient": gradient, "closed_form": closed_form}


def rotate(W_Q: Tensor, W_K: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """W_Q R, W_K R (d, k) with R the orthogonal matrix nearest to W_Qᵀ G: the same map, spread over all k columns.

    A map needs less than rank k, and columns that are zero in both W_Q and W_K would get no gradient in training. With
    a Gaussian G (d, k) there are none, heads with the same impulse differ, and the weights do not depend on the basis
    that LAPACK chooses if singular values coincide.
    """
    U, _, V_T = torch.linalg.svd((W_Q.T @ G).double())
    R = (U @ V_T).float()
    return W_Q @ R, W_K @ R


# ---- into a model


@torch.no_grad()
def structured_init_(
    model: nn.Module,
    pos_embed: Tensor,
    grid: tuple[int, int],
    kernel_size: int = 3,
    method: str = "gradient",
    border: str = "clamp",
    norm: float | None = None,
    alpha2: float = 0.4,
    beta2: float = 0.4,
    qk: bool = True,
    vp: bool = True,
    generator: torch.Generator | None = None,
) -> list[str]:
    """Initialize every self-attention layer of `model` in place; return the layers' names.

    `map_errors` gives the map error that was reached.
    pos_embed: positions of the tokens of `grid` (rows, columns), see `pseudo_input`.   method: "gradient" (2404.01139)
    or "closed_form" (2505.19985).   kernel_size: heads draw from its offsets, uniformly and with replacement.
    border, norm: see `impulse` and the solvers.   alpha2, beta2: for W_V W_proj, as in `mimetic_init_`.
    qk, vp: which weights to write; all draws are made in either case.

    This is made for mean pooling. A class token stays outside the grid: maps among the other tokens are as they would
    be without it, and its own row is left to chance. The maps are those of positions alone; what an image adds moves
    real maps away from H, so positions should not be small beside the patches. Biases of the projections written become
    zero; nothing else in the model changes. All is drawn and solved on the CPU, so a seed gives the same weights on
    every device, up to rounding. Raises ValueError, before it writes anything, for what does not fit.
    """
    layers = layers_to_write(model, qk, vp)
    if method not in SOLVERS:
        raise ValueError(f"method is 'gradient' or 'closed_form', not {method!r}.")
    if not (norm is None or 1e-6 < norm < 1e9) or not (math.isfinite(alpha2) and math.isfinite(beta2)):
        raise ValueError(f"norm must be positive, alpha2 and beta2 finite; not {norm}, {alpha2}, {beta2}.")
    X = pseudo_input(pos_embed, grid)
    dim = X.shape[1]
    for layer in layers:
        if layer.W_Q.shape[1] != dim:
            raise ValueError(f"{layer.name} has width {layer.W_Q.shape[1]}, but the position embeddings have {dim}.")
    H = torch.stack([impulse(grid, offset, border) for offset in kernel_offsets(kernel_size)])  # (m, n, n)
    if not H.flatten(1).any(1).all():  # border="zero" on a grid narrower than the kernel's reach
        raise ValueError(f"an impulse of this kernel leaves the grid {grid} everywhere; take border='clamp'.")
    head_dims = {layer.W_Q.shape[2] for layer in layers} if qk else ()
    solved = {head_dim: SOLVERS[method](X, H, head_dim, norm) for head_dim in head_dims}
    for layer in layers:
        drawn = torch.randint(len(H), (layer.heads,), generator=generator, device="cpu")
        G = torch.randn(layer.W_Q.shape, generator=generator, device="cpu", dtype=torch.float32)  # (heads, d, k)
        W_V, W_proj = value_proj(dim, alpha2, beta2, generator)
        if qk:
            W_Qs, W_Ks = solved[layer.W_Q.shape[2]]
            heads = [rotate(W_Qs[i], W_Ks[i], G[h]) for h, i in enumerate(drawn.tolist())]
            W_Q, W_K = map(torch.stack, zip(*heads))  # (heads, d, k)
            write_(layer, W_Q=W_Q, W_K=W_K)
        if vp:
            write_(layer, W_V=W_V, W_proj=W_proj)
    return [layer.name for layer in layers]


# ---- the result


@torch.no_grad()
def pseudo_maps(model: nn.Module, pos_embed: Tensor, grid: tuple[int, int]) -> dict[str, Tensor]:
    """The maps (heads, n, n) of each attention layer of `model` on the pseudo-input, by the layer's name."""
    X = pseudo_input(pos_embed, grid)
    layers = attention_layers(model)
    return {layer.name: attention(X, layer.W_Q.cpu().float(), layer.W_K.cpu().float()) for layer in layers}


def nearest_impulse(
    maps: Tensor, grid: tuple[int, int], kernel_size: int = 3, border: str = "clamp"
) -> tuple[Tensor, Tensor]:
    """The impulse nearest to each map (..., n, n): its offset (..., 2) and the map's error (...).

    For figures: `ViT.attention_maps(images)` of any initialization beside `impulse(grid, offset)`.
    """
    offsets = kernel_offsets(kernel_size)
    errors = torch.stack([map_error(maps, impulse(grid, offset, border).to(maps)) for offset in offsets])
    error, index = errors.min(0)
    return torch.tensor(offsets, device=maps.device)[index], error


def map_errors(model: nn.Module, pos_embed: Tensor, grid: tuple[int, int], kernel_size: int = 3) -> dict[str, Tensor]:
    """Each head's map error on the pseudo-input, relative to the nearest impulse: (heads,), by the layer's name."""
    maps = pseudo_maps(model, pos_embed, grid)
    return {name: nearest_impulse(A, grid, kernel_size)[1] for name, A in maps.items()}
