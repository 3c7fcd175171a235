"""The initializations that the scripts compare, by name: the default, mimetic, its neighbours, controls, and transfer.

A control keeps one property of a mimetic draw and loses the rest: what does the *structure* add to the mere scale?
"""

import argparse
import copy
import dataclasses
import math
import os
import re
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layouts import attention_layers
from mimetic import mimetic_init_
from structured import map_errors, structured_init_
from training import ranks
from training.flags import flag
from writing import write_

# ---- controls


def scaled_init_(
    model: nn.Module, generator: torch.Generator | None = None, qk: bool = True, vp: bool = True, **mimetic
) -> list[str]:
    """Gaussian W_Q, W_K, W_V, W_proj with the Frobenius norms of a mimetic draw, block by block; biases zero.

    A block is one head's W_Q or W_K, or a layer's W_V or W_proj. All arguments go to `mimetic_init_`, whose draw, made
    on a copy, sets the norms. Returns the layers' names; raises what `mimetic_init_` raises.
    """
    return control_init_(model, lambda noise: noise, generator, qk, vp, mimetic)


def orthogonal_init_(
    model: nn.Module, generator: torch.Generator | None = None, qk: bool = True, vp: bool = True, **mimetic
) -> list[str]:
    """Random orthogonal W_Q, W_K, W_V, W_proj; norms, blocks, arguments and errors are those of `scaled_init_`.

    A block is a multiple of a matrix with orthonormal columns, drawn separately: the scale is right and all singular
    values are equal, yet W_Q W_Kᵀ and W_V W_proj have no diagonal. What mimetic gains beyond it is due to the diagonal.
    """
    return control_init_(model, orthogonalize, generator, qk, vp, mimetic)


def orthogonalize(noise: Tensor) -> Tensor:
    """A matrix with orthonormal columns, uniformly distributed, from Gaussian noise (dim, k), k ≤ dim."""
    Q, R = torch.linalg.qr(noise.double())
    return (Q * R.diagonal().sign()).float()  # LAPACK's QR chooses the columns' signs, and not uniformly


@torch.no_grad()
def control_init_(
    model: nn.Module, shape: Callable, generator: torch.Generator | None, qk: bool, vp: bool, mimetic: dict
) -> list[str]:
    """Set each block to shape(Gaussian noise), scaled to the norm that a mimetic draw gives the block."""
    target = copy.deepcopy(model)
    names = mimetic_init_(target, generator=generator, qk=qk, vp=vp, **mimetic)
    for layer, drawn in zip(attention_layers(model, strict=False), attention_layers(target, strict=False), strict=True):
        if layer.name not in names:
            continue

        def block(M: Tensor) -> Tensor:
            noise = shape(torch.randn(M.shape, generator=generator, device="cpu", dtype=torch.float32))
            return noise * (M.float().norm().cpu() / noise.norm())

        if qk:
            write_(layer, **{name: torch.stack([*map(block, getattr(drawn, name))]) for name in ("W_Q", "W_K")})
        if vp:
            write_(layer, W_V=block(drawn.W_V), W_proj=block(drawn.W_proj))
    return names


@torch.no_grad()
def rebased_init_(
    model: nn.Module, basis: str, generator: torch.Generator | None = None, qk: bool = True, **mimetic
) -> list[str]:
    """Mimetic initialization with W_Q, W_K of each head moved to another basis of the model's width.

    Meant for alpha1 = 0: there W_Q W_Kᵀ is β₁ times the projection onto the first k axes in each head, and the paper
    does not say which k directions a head should get. basis: "own" shifts head h by h·k axes, so that heads share none;
    "random" gives each head a random orthonormal set. Other arguments and errors are those of `mimetic_init_`.
    """
    if basis not in ("own", "random"):
        raise ValueError(f"basis is 'own' or 'random', not {basis!r}.")
    names = mimetic_init_(model, generator=generator, qk=qk, **mimetic)
    for layer in attention_layers(model, strict=False) if qk else []:
        if layer.name not in names:
            continue
        heads, dim, k = layer.W_Q.shape
        for h in range(heads):
            R = torch.eye(dim, device="cpu").roll(h * k, dims=0)
            if basis == "random":
                R = orthogonalize(torch.randn(dim, dim, generator=generator, device="cpu", dtype=torch.float32))
            for W in (layer.W_Q[h], layer.W_K[h]):
                W.copy_(R @ W.float().cpu())
    return names


# ---- related methods


@torch.no_grad()
def conditioned_init_(
    model: nn.Module, generator: torch.Generator | None = None, qk: bool = True, vp: bool = True, strict: bool = True
) -> list[str]:
    """Conditioned initialization (Saratchandran & Lucey, "Conditioned Initialization for Attention", ICLR 2026).

    Each head's W_Q and W_K are semi-orthogonal, drawn separately, and W_V is the identity. So all have condition number
    1, since their condition numbers bound that of the layer's Jacobian. It serves as a control: all singular values are
    equal, and W_Q W_Kᵀ has no diagonal. W_proj and biases stay. The authors write W_V per head, as the (dim, head_dim)
    identity; ours is the layer's, so that X W_V = X, as they say. qk, vp: write W_Q, W_K; write W_V. Raises what
    `mimetic_init_` raises.
    """
    names = mimetic_init_(copy.deepcopy(model), qk=qk, vp=vp, strict=strict, generator=torch.Generator())
    for layer in attention_layers(model, strict=False):
        if layer.name not in names:
            continue
        for W in [*layer.W_Q, *layer.W_K] if qk else []:
            # Theirs is U Vᵀ from the SVD of a random matrix, which for Gaussian noise is uniform too.
            W.copy_(orthogonalize(torch.randn(W.shape, generator=generator, device="cpu", dtype=torch.float32)))
        if vp:
            layer.W_V.copy_(torch.eye(len(layer.W_V), device="cpu"))
    return names


@torch.no_grad()
def mimetic_mlp_init_(model: nn.Module, mean: float = 0.02) -> None:
    """Mimetic initialization of MLPs (Trockman & Kolter, 2026, arXiv 2602.07156), for a vit.ViT or lm.TransformerLM.

    "To give the first layer a nonzero mean": `mean` is added to every weight of each block's first linear layer. We
    could not find out its size and sign; the default, one standard deviation of those weights, is ours. The inputs come
    from a LayerNorm (gain 1, bias 0) and sum to zero, so the model computes the same as before: the mean acts only
    through the gradients.
    """
    for block in model.blocks:
        block.mlp[0].weight.add_(mean)


def mimetic_with_mlps_(model: nn.Module, mean: float, **mimetic) -> list[str]:
    """Mimetic initialization of the attention layers and of the MLPs."""
    mimetic_mlp_init_(model, mean)
    return mimetic_init_(model, **mimetic)


# ---- transfer


@torch.no_grad()
def transfer_init_(model: nn.Module, file: str) -> list[str]:
    """Copy W_Q, W_K, W_V, W_proj and positions of a trained Vision Transformer into a vit.ViT; nothing else changes.

    file: a checkpoint of ours or of timm's ViT; both call them blocks.0.attn.qkv.weight, ...proj.weight and pos_embed.
    Biases are not copied, nor are the positions of class tokens, which have none here. Positions of another grid are
    resampled. The positions stay fixed or learned as the model has them: in a model with sinusoids, the copied ones are
    not trained. Returns the names of the tensors written. Raises FileNotFoundError, and ValueError for a file that does
    not fit, before it writes anything. The number of heads must match too, but only files of ours say it.
    """
    trained, heads = read_checkpoint(file)
    if not (source := attention_weights(trained)):
        raise ValueError(f"{file} has no blocks.0.attn.qkv.weight, but {', '.join(list(trained)[:3]) or 'nothing'}.")
    target = attention_weights(model.state_dict())  # these share the model's storage
    if {name: W.shape for name, W in source.items()} != {name: W.shape for name, W in target.items()}:
        raise ValueError(f"{file} has attention of {sizes(source)}, but the model of {sizes(target)}; they must match.")
    if heads not in (None, model.blocks[0].attn.num_heads):
        raise ValueError(f"{file} has {heads} heads per layer, but the model {model.blocks[0].attn.num_heads}.")
    source["pos_embed"] = grid_positions(trained, model.grid, model.pos_embed.shape[-1], file)
    target["pos_embed"] = model.pos_embed
    for name, tensor in target.items():
        tensor.copy_(source[name])
    return list(target)


def attention_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a state dict that are [W_Q, W_K, W_V] or W_proj of a layer."""
    return {name: W for name, W in weights.items() if name.endswith((".attn.qkv.weight", ".attn.proj.weight"))}


def sizes(weights: dict[str, Tensor]) -> str:
    width = next((W.shape[-1] for W in weights.values()), 0)
    return f"{len(weights) // 2} layers of width {width}"


def grid_positions(weights: dict[str, Tensor], grid: tuple[int, int], dim: int, file: str) -> Tensor:
    """The checkpoint's positions for our grid (1, n, dim), without those of its class tokens (at most two).

    Its grid must be square; if it differs from ours, it is resampled: bicubic with antialiasing, as in timm.
    """
    P = weights.get("pos_embed", torch.empty(0))
    for extra in (0, 1, 2):
        n = P.shape[1] - extra if P.ndim == 3 and P.shape[2] == dim else 0
        side = math.isqrt(max(n, 0))
        if n > 0 and side**2 == n:
            P = P[:, extra:]
            if (side, side) == grid:
                return P
            P = P.float().transpose(1, 2).unflatten(2, (side, side))  # (1, dim, side, side)
            return F.interpolate(P, grid, mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
    raise ValueError(f"{file} has no positions of a square grid, {dim} wide: its pos_embed is {tuple(P.shape)}.")


KEYS = "model", "state_dict", "state_dict_ema", "model_ema"  # ours and DeiT's, timm's, and their averages
HARMLESS = [  # what others' checkpoints hold besides tensors
    argparse.Namespace,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
    *((np.int64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


def read_checkpoint(file: str) -> tuple[dict[str, Tensor], int | None]:
    """The state dict in a file, and the number of heads if the file says it. Runs no code from the file.

    Takes a bare state dict or one under the usual KEYS, and removes what wrappers put before its names. .safetensors
    files need that package.
    """
    if not os.path.isfile(file):
        raise FileNotFoundError(f"there is no file {file!r}; name a checkpoint, with its folder.")
    try:
        if file.endswith(".safetensors"):
            from safetensors.torch import load_file

            saved = load_file(file)
        else:
            with torch.serialization.safe_globals(HARMLESS):
                saved = torch.load(file, map_location="cpu", weights_only=True)
        weights = next((saved[key] for key in KEYS if isinstance(saved.get(key), dict)), saved)
        weights = {name: W for name, W in weights.items() if isinstance(W, Tensor)}
        first = next((name for name in weights if name.endswith("blocks.0.attn.qkv.weight")), "")
        weights = {name.removeprefix(first.removesuffix("blocks.0.attn.qkv.weight")): W for name, W in weights.items()}
        config = saved.get("config")
        return weights, config.get("heads") if isinstance(config, dict) else None
    except ImportError as error:
        raise ValueError(f"reading {file} needs another package: pip install safetensors.") from error
    except OSError:
        raise
    except Exception as error:  # damaged files raise nearly anything
        found = re.search(r"GLOBAL (\S+)", str(error))
        holds = f" (it holds a {found[1]}: save the state_dict() alone)" if found else ""
        kind = f"not a state dict in a file of torch.save or safetensors{holds}"
        raise ValueError(f"{file} is damaged, or {kind}.") from error


# ---- structured


def structured(model: nn.Module, s, generator: torch.Generator) -> list[str]:
    """Structured initialization of a vit.ViT with a script's settings; prints the map error that it reached."""
    names = structured_init_(
        model, model.pos_embed, model.grid, s.kernel_size, s.method, norm=s.qk_norm or None, alpha2=s.alpha2,
        beta2=s.beta2, qk=s.parts != "vp", vp=s.parts != "qk", generator=generator,
    )  # fmt: skip
    if s.parts != "vp":
        errors = torch.cat(list(map_errors(model, model.pos_embed, model.grid, s.kernel_size).values()))
        worst = f"worst head {errors.max():.3f} (uniform: 1)"
        ranks.print0(f"structured: map error {errors.mean():.3f} on positions alone, {worst}")
    return names


# ---- flags


@dataclasses.dataclass
class InitFlags:
    """Defaults are the paper's values for images; train_lm.py has those for text."""

    alpha1: float = flag(0.7, "W_Q W_K^T = alpha1 Z + beta1 I")
    beta1: float = flag(0.7, "")
    alpha2: float = flag(0.4, "W_V W_proj = alpha2 Z - beta2 I")
    beta2: float = flag(0.4, "")
    parts: str = flag("both", "which of the two products to initialize", ("both", "qk", "vp"))
    mlp_mean: float = flag(0.02, "mimetic-mlp: added to each first weight of the MLPs (ours)")


@dataclasses.dataclass
class VisionInitFlags(InitFlags):
    transfer_from: str = flag("", "the checkpoint that --init transfer copies attention and positions from")
    # structured initialization (arXiv 2404.01139, 2505.19985)
    kernel_size: int = flag(3, "structured: side of the kernel whose impulses heads draw", (3, 5))
    method: str = flag("gradient", "structured: how to solve for W_Q, W_K", ("gradient", "closed_form"))
    qk_norm: float = flag(0.0, "structured: Frobenius norm of a head's W_Q and W_K; 0: the method's", low=0, high=1e6)


# ---- by name: each is called with (model, settings, generator) once the model has its default weights; add yours here

INITS = {
    "default": lambda model, s, generator: None,
    "mimetic": lambda model, s, generator: mimetic_init_(model, **products(s), generator=generator),
    "scaled": lambda model, s, generator: scaled_init_(model, **products(s), generator=generator),
    "orthogonal": lambda model, s, generator: orthogonal_init_(model, **products(s), generator=generator),
    "own-axes": lambda model, s, generator: rebased_init_(model, "own", **products(s), generator=generator),
    "random-axes": lambda model, s, generator: rebased_init_(model, "random", **products(s), generator=generator),
    "conditioned": lambda model, s, generator: conditioned_init_(model, generator, s.parts != "vp", s.parts != "qk"),
    "mimetic-mlp": lambda model, s, generator: mimetic_with_mlps_(
        model, s.mlp_mean, **products(s), generator=generator
    ),
}
VISION_INITS = {  # those that need a grid of positions
    **INITS,
    "structured": structured,
    "transfer": lambda model, s, generator: transfer_init_(model, s.transfer_from),
}


def products(s) -> dict:
    """Arguments of mimetic_init_ from a script's settings alpha1 ... beta2 and parts ("both", "qk" or "vp")."""
    alphas_betas = dict(alpha1=s.alpha1, beta1=s.beta1, alpha2=s.alpha2, beta2=s.beta2)
    return dict(alphas_betas, qk=s.parts != "vp", vp=s.parts != "qk")
