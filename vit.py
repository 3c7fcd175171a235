"""A plain Vision Transformer (Dosovitskiy et al., 2021) by hand: pre-norm blocks, a class token or mean pooling.

The default initialization is the usual one for ViTs (DeiT, timm): truncated normal with standard deviation 0.02 for
linear weights, class token and learned positions; biases 0, LayerNorm 1 and 0. The patch embedding keeps torch's
default for the equivalent convolution, U(±1/√fan_in), so that positions do not drown out the patches. Mimetic
initialization is a second, visible step:

    model = ViT(dim=192, depth=12, heads=3)
    mimetic_init_(model)

B batch, N tokens, D width, H heads, K = head_dim = D / H.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimetic import sinusoids_2d


class Attention(nn.Module):
    """Softmax(X W_Q W_Kᵀ Xᵀ / √k) X W_V W_proj, for H heads at once; like the equation, without biases.

    Variants of attention may need the tokens' `grid` (height, width); this class does not.
    """

    def __init__(self, dim: int, heads: int, grid: tuple[int, int] | None = None, causal=False, dropout=0.0):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide the width {dim}; choose a divisor of {dim}.")
        self.num_heads, self.causal, self.dropout = heads, causal, dropout
        self.fused = None  # None: the fused call on CUDA, three plain steps elsewhere (on a CPU they train faster)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)  # [W_Q, W_K, W_V], each the transpose of the paper's
        self.proj = nn.Linear(dim, dim, bias=False)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, D) to three of (B, H, N, K), views of one product, so that one copy joins their gradients."""
        return tuple(part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The attention maps, rows summing to one. q, k: (B*H, N, K) -> (B*H, N, N)."""
        N, K = q.shape[1:]
        mask = q.new_full((N, N), -torch.inf).triu(1) if self.causal else q.new_zeros(())
        # mask + q kᵀ / √k in one call, faster on a CPU than scaling separately; beta = 0 leaves the mask out.
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), beta=int(self.causal), alpha=1 / math.sqrt(K))
        return scores.softmax(-1)

    def attention_map(self, x: Tensor) -> Tensor:
        """The maps (B, H, N, N) for a normalized input x (B, N, D), by the explicit path on every device."""
        q, k, _ = self.queries_keys_values(x)
        return self.weights(q.flatten(0, 1), k.flatten(0, 1)).unflatten(0, (len(x), self.num_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The maps times V, (B, H, N, K)."""
        if q.is_cuda if self.fused is None else self.fused:
            dropout = self.dropout if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.attend_explicitly(q, k, v)

    def attend_explicitly(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # (B*H, N, K): a copy here saves one in every product
        maps = F.dropout(self.weights(q, k), self.dropout, self.training)
        return (maps @ v).unflatten(0, (-1, self.num_heads))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*self.queries_keys_values(x))
        return self.proj(y.transpose(1, 2).flatten(2))  # (B, H, N, K) -> (B, N, H, K) -> (B, N, D)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in the dtype of its input: CUDA's autocast would compute and return float32."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(x)
        with torch.autocast("cuda", enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class MLP(nn.Sequential):
    def __init__(self, dim: int, hidden: int):
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); dropout on both branches, and each is dropped with `drop_path`."""

    def __init__(
        self, dim: int, attention: nn.Module, mlp_ratio: float = 4, dropout: float = 0.0, drop_path: float = 0.0
    ):
        super().__init__()
        self.norm1, self.attn = LayerNorm(dim), attention
        self.norm2, self.mlp = LayerNorm(dim), MLP(dim, int(mlp_ratio * dim))
        self.drop, self.drop_path = nn.Dropout(dropout), drop_path

    def branch(self, y: Tensor) -> Tensor:
        """Stochastic depth (Huang et al., 2016): some images skip this branch; for the others it is scaled up."""
        y = self.drop(y)
        if not (self.training and self.drop_path):
            return y
        kept = torch.rand(len(y), 1, 1, device=y.device) >= self.drop_path
        return y * (kept / (1 - self.drop_path)).to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(self.attn(self.norm1(x)))
        return x + self.branch(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Images (B, C, S, S) to logits (B, num_classes).

    pos: "sinusoidal" (fixed) or "learned" (random, trained); added once, times `pos_scale` (the paper's γ). The class
    token has no position of its own: it is a learned vector already.   pool: "cls", or "mean" (without a class token).
    attention: a module class, called as attention(dim, heads, grid=(height, width), dropout=...); if it has a method
    init_weights, that is called after the default initialization.   drop_path: the rate at which training drops the
    branches of the last block; it rises linearly from 0 at the first block.
    Raises ValueError if sizes do not divide or a name is unknown.
    """

    def __init__(
        self, *, image_size=32, patch_size=2, in_channels=3, num_classes=10, dim=192, depth=12, heads=3,
        mlp_ratio=4, pos="sinusoidal", pos_scale=1.0, pool="cls", dropout=0.0, attention=Attention,
        drop_path=0.0,
    ):  # fmt: skip
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            raise ValueError(f"patches of {patch_size} pixels do not tile an image of {image_size}; choose a divisor.")
        if pos not in ("sinusoidal", "learned") or pool not in ("cls", "mean"):
            raise ValueError(f"pos is 'sinusoidal' or 'learned', pool is 'cls' or 'mean'; not {pos!r} and {pool!r}.")
        if not 0 <= drop_path < 1:
            raise ValueError(f"drop_path is a probability below 1, not {drop_path}.")
        self.patch_size, self.grid, self.pos_scale = patch_size, (image_size // patch_size,) * 2, pos_scale
        self.patch_embed = nn.Linear(in_channels * patch_size**2, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if pool == "cls" else None
        positions = torch.zeros(1, self.grid[0] * self.grid[1], dim)
        if pos == "learned":
            self.pos_embed = nn.Parameter(positions)
        else:
            self.register_buffer("pos_embed", positions)
        rates = [drop_path * layer / max(1, depth - 1) for layer in range(depth)]
        self.blocks = nn.ModuleList(
            Block(dim, attention(dim, heads, grid=self.grid, dropout=dropout), mlp_ratio, dropout, rate)
            for rate in rates
        )
        self.norm = LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.drop = nn.Dropout(dropout)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give every parameter its default, and the sinusoids; call it again after `to_empty`."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        self.patch_embed.reset_parameters()
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        else:
            self.pos_embed.copy_(sinusoids_2d(*self.grid, self.pos_embed.shape[-1]))
        for block in self.blocks:
            if hasattr(block.attn, "init_weights"):
                block.attn.init_weights()

    def patches(self, images: Tensor) -> Tensor:
        """Images (B, C, S, S) cut into flattened patches (B, N, C*P*P), row by row."""
        (B, C, *_), (rows, columns), P = images.shape, self.grid, self.patch_size
        x = images.reshape(B, C, rows, P, columns, P).permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, P, P)
        return x.reshape(B, rows * columns, C * P * P)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Tokens (B, N, D) with their positions."""
        x = self.patch_embed(self.patches(images))
        # In the dtype of x: under autocast this keeps the whole residual stream in bfloat16, a fifth faster on a CPU.
        return x + (self.pos_scale * self.pos_embed).to(x.dtype)

    def prepend_cls(self, x: Tensor) -> Tensor:
        """(B, N, D) to (B, 1 + N, D), if there is a class token."""
        if self.cls_token is None:
            return x
        return torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), x], dim=1)

    def embed(self, images: Tensor) -> Tensor:
        """What the first block reads: tokens (B, N, D), or (B, 1 + N, D) with the class token first."""
        return self.drop(self.prepend_cls(self.embed_patches(images)))

    def classify(self, x: Tensor) -> Tensor:
        x = x.mean(1) if self.cls_token is None else x[:, 0]  # (B, D)
        return self.head(self.norm(x))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.classify(x)

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> Tensor:
        """The maps of every layer and head (depth, B, H, N, N): softmaxes, plus what a variant adds to them. Call
        eval() first if the model has dropout."""
        x, maps = self.embed(images), []
        for block in self.blocks:
            maps.append(block.attn.attention_map(block.norm1(x)))
            x = block(x)
        return torch.stack(maps)
