"""The attention variants that the paper compares with: GPSA, and convolution in attention.

Each replaces vit.Attention, with the same W_Q, W_K, W_V, W_proj (so that mimetic_init_ finds them), and adds a map M of
token pairs that depends only on positions, for H heads and n = height * width tokens:

    GPSA          (1 − g) Softmax(X W_Q W_Kᵀ Xᵀ / √k) + g Softmax(v · r)    ConViT, d'Ascoli et al. 2021 (2103.10697)
    ConvInside    Softmax(X W_Q W_Kᵀ Xᵀ / √k + γC)
    ConvOutside   Softmax(X W_Q W_Kᵀ Xᵀ / √k) + γC                          section 6 of the mimetic paper
    ConvSoftmax   Softmax(X W_Q W_Kᵀ Xᵀ / √k) + Softmax(γC)

    model = ViT(attention=GPSA, heads=4, pool="mean")           # every layer
    model = ConViT(attention=GPSA, heads=4, local_layers=10)    # two plain layers with a class token follow

A class token has no place in the grid: use mean pooling, or let it join after the local layers (ConViT). M is computed
once per forward pass, not per image; outside the softmax it multiplies V separately, without dropout.
"""

import math

import torch
from torch import Tensor, nn

from vit import Attention, ViT


class GridAttention(Attention):
    """What the variants share: maps of the form a Softmax(X W_Q W_Kᵀ Xᵀ / √k) + M, with one number a per head."""

    harmless_parameters = "v_pos|gate|kernel|gamma"  # those of M: layouts.py need not refuse the layer for them

    def __init__(self, dim: int, heads: int, grid: tuple[int, int], dropout: float = 0.0):
        super().__init__(dim, heads, dropout=dropout)
        self.grid = grid

    def scale_and_map(self) -> tuple[Tensor, Tensor]:
        """a (H, 1, 1) and M (H, n, n)."""
        raise NotImplementedError

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        height, width = self.grid
        if x.shape[1] != height * width:
            raise ValueError(
                f"{type(self).__name__} needs its grid of {height} by {width} tokens, not {x.shape[1]}; a class token "
                "must join later (ConViT), or not at all (pool='mean')."
            )
        return super().queries_keys_values(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, M = self.scale_and_map()
        y = torch.einsum("hnm,bhmk->bhnk", M.to(v.dtype), v)  # one product for all images: (n, n) @ (n, B*K) per head
        return a.to(y.dtype) * super().attend(q, k, v) + y

    def attention_map(self, x: Tensor) -> Tensor:
        a, M = self.scale_and_map()
        return a * super().attention_map(x) + M


# ---- gated positional self-attention


class GPSA(GridAttention):
    """(1 − g) Softmax(X W_Q W_Kᵀ Xᵀ / √k) + g Softmax(v · r); each head learns its gate g = sigmoid(λ) and v ∈ R³.

    r = (|δ|², δ₁, δ₂) for the offset δ (rows, columns) from the query's token to the key's. It starts as a convolution:
    v = −α (1, −2Δ₁, −2Δ₂), so that the positional logits are −α|δ − Δ|² plus a constant and each head looks at its own
    offset Δ (`head_offsets`); α is `locality`, the strength; W_V = I, λ = 1. W_Q, W_K, W_proj start as in any layer.
    """

    def __init__(self, dim, heads, grid, dropout=0.0, locality=1.0):
        super().__init__(dim, heads, grid, dropout)
        n, self.locality = math.prod(grid), locality
        self.v_pos = nn.Parameter(torch.empty(heads, 3))
        self.gate = nn.Parameter(torch.empty(heads))  # λ
        self.register_buffer("r", torch.empty(3, n, n), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """The convolutional initialization; `ViT.init_weights` calls it after the default one."""
        d = relative_offsets(*self.grid)  # (2, n, n)
        self.r.copy_(torch.stack([(d**2).sum(0), *d]))
        Delta = head_offsets(self.num_heads)  # (H, 2)
        self.v_pos.copy_(-self.locality * torch.cat([torch.ones(len(Delta), 1), -2 * Delta], dim=1))
        self.gate.fill_(1.0)
        nn.init.eye_(self.qkv.weight.chunk(3)[2])

    def positional_maps(self) -> Tensor:
        """Softmax(v · r) (H, n, n). Not a matrix product, which autocast would round: |δ|² has many digits."""
        v1, v2, v3 = self.v_pos.T[:, :, None, None]  # (H, 1, 1) each
        square, d1, d2 = self.r  # (n, n) each
        return (v1 * square + v2 * d1 + v3 * d2).softmax(-1)

    def scale_and_map(self) -> tuple[Tensor, Tensor]:
        g = self.gate.sigmoid()[:, None, None]
        return 1 - g, g * self.positional_maps()


def relative_offsets(height: int, width: int) -> Tensor:
    """(2, n, n): the number of rows, and of columns, from token i of a row-major grid to token j."""
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).T.float()  # (2, n)
    return places[:, None, :] - places[:, :, None]


def head_offsets(heads: int) -> Tensor:
    """The offsets that the heads start centred on (H, 2): those of the smallest k by k kernel with one for every head.

    Nine heads fill a 3 by 3 kernel. Four fill 2 by 2, whose offsets are ±½: a map peaks at four tokens at once, as in
    ConViT. If heads is not a square, the offsets farthest from the centre get no head: for eight, one corner.
    (ConViT's code takes the next smaller square and leaves the heads beyond it without an offset.)
    """
    k = math.isqrt(heads - 1) + 1
    line = torch.arange(k) - (k - 1) / 2
    offsets = torch.cartesian_prod(line, line)  # (k*k, 2)
    nearest = (offsets**2).sum(1).argsort(stable=True)[:heads]
    return offsets[nearest.sort().values]  # row-major again


# ---- convolution in attention


class Convolution(GridAttention):
    """The matrix γC of the three forms: C convolves the grid circularly with a small learned kernel, and γ is learned.

    The paper does not say how heads share them. Ours: one kernel per head, since C is added to the head's own map, and
    one γ per layer. The kernel has `kernel_size` rows and columns and starts as torch's depthwise convolution does, at
    U(±1/kernel_size); γ starts at 1.
    """

    def __init__(self, dim, heads, grid, dropout=0.0, kernel_size=3):
        super().__init__(dim, heads, grid, dropout)
        n = math.prod(grid)
        self.kernel = nn.Parameter(torch.empty(heads, kernel_size, kernel_size))
        self.gamma = nn.Parameter(torch.empty(()))
        self.register_buffer("shifts", torch.empty(kernel_size**2, n, n), persistent=False)
        with torch.random.fork_rng(devices=[]):  # so that the rest of a model draws what it would draw without C
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        size = self.kernel.shape[-1]
        self.shifts.copy_(shift_matrices(self.grid, size))
        nn.init.uniform_(self.kernel, -1 / size, 1 / size)
        self.gamma.fill_(1.0)

    def gamma_C(self) -> Tensor:
        """γC (H, n, n)."""
        return circulant(self.gamma * self.kernel, self.shifts)


class ConvOutside(Convolution):
    """Softmax(X W_Q W_Kᵀ Xᵀ / √k) + γC. The rows of these maps do not sum to one."""

    def scale_and_map(self) -> tuple[Tensor, Tensor]:
        return torch.ones_like(self.gamma), self.gamma_C()


class ConvSoftmax(Convolution):
    """Softmax(X W_Q W_Kᵀ Xᵀ / √k) + Softmax(γC). Rows sum to two; Softmax(γC) is positive everywhere, flat at first."""

    def scale_and_map(self) -> tuple[Tensor, Tensor]:
        return torch.ones_like(self.gamma), self.gamma_C().softmax(-1)


class ConvInside(Convolution):
    """Softmax(X W_Q W_Kᵀ Xᵀ / √k + γC)."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(1, 2)  # (B*H, N, N)
        scores = scores.unflatten(0, (-1, self.num_heads)) + self.gamma_C().to(scores.dtype)
        return scores.softmax(-1).flatten(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend_explicitly(q, k, v)  # on every device: the fused call cannot add C

    attention_map = Attention.attention_map  # which calls `weights` above


def shift_matrices(grid: tuple[int, int], kernel_size: int) -> Tensor:
    """Matrices S (kernel_size², n, n): S x is the grid x shifted circularly by one of the kernel's offsets, row by row.

    Raises ValueError for an even kernel, which has no centre.
    """
    if kernel_size % 2 == 0:
        raise ValueError(f"a kernel needs an odd side to have a centre, not {kernel_size}.")
    n, reach = math.prod(grid), range(-(kernel_size // 2), kernel_size // 2 + 1)
    tokens = torch.eye(n).view(n, *grid)  # row i of a matrix is the token that output i reads, as a grid
    return torch.stack([tokens.roll((r, c), dims=(1, 2)).view(n, n) for r in reach for c in reach])


def circulant(kernel: Tensor, shifts: Tensor) -> Tensor:
    """The doubly-block circulant matrices C (H, n, n) of kernels (H, s, s): C x convolves the grid x circularly.

    As usual in deep learning, the kernel is not flipped: row i of C holds the kernel, centred on i.
    """
    return torch.einsum("hs,snm->hnm", kernel.flatten(1), shifts)


# ---- local layers, then plain ones


class ConViT(ViT):
    """A ViT whose first `local_layers` layers have `attention`; plain Attention follows, and the class token, if there
    is one, joins after the local layers. Arguments and errors are those of `ViT`."""

    def __init__(self, *, local_layers=10, attention=GPSA, depth=12, pool="cls", **sizes):
        most = depth - (pool == "cls")
        if not 0 <= local_layers <= most:
            raise ValueError(
                f"with pool={pool!r}, local_layers is at most {most} of {depth} layers, not {local_layers}."
            )
        kinds = iter([attention] * local_layers + [Attention] * (depth - local_layers))
        super().__init__(depth=depth, pool=pool, attention=lambda *args, **kw: next(kinds)(*args, **kw), **sizes)
        self.local_layers = local_layers

    def embed(self, images: Tensor) -> Tensor:
        """Tokens (B, N, D), still without the class token."""
        return self.drop(self.embed_patches(images))

    def stream(self, images: Tensor):
        """What each block reads, and finally the output of the last one."""
        x = self.embed(images)
        for layer, block in enumerate(self.blocks):
            x = self.prepend_cls(x) if layer == self.local_layers else x
            yield x
            x = block(x)
        yield x

    def forward(self, images: Tensor) -> Tensor:
        *_, x = self.stream(images)
        return self.classify(x)

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """A list with the maps of each layer (B, H, N, N): after the local layers, N includes the class token."""
        return [block.attn.attention_map(block.norm1(x)) for block, x in zip(self.blocks, self.stream(images))]


ATTENTIONS = {
    "softmax": Attention,
    "gpsa": GPSA,
    "conv-inside": ConvInside,
    "conv-outside": ConvOutside,
    "conv-softmax": ConvSoftmax,
}
