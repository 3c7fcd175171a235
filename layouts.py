"""Where each library keeps the attention weights: one view of them all, in the paper's orientation.

The paper multiplies rows, `x @ W_Q`, `x @ W_V @ W_proj`. `torch.nn.Linear` stores the transpose and
computes `x @ weight.T`; some libraries fuse Q, K and V into one matrix. This file alone knows about that.
Every tensor it hands out is a *view*: `view.W_Q.copy_(...)` writes the model's own parameter.

D width, H heads, K = head_dim. To teach it another library, write one function like `fused_qkv` below and
append it to `LAYOUTS`.
"""

from typing import NamedTuple

from torch import Tensor, nn


class AttentionView(NamedTuple):
    """The four weights of one self-attention layer as the paper writes them, sharing the model's storage."""

    name: str
    heads: int
    W_Q: Tensor  # (H, D, K): one matrix a head, since W_Q W_Kᵀ is a product within a head
    W_K: Tensor  # (H, D, K)
    W_V: Tensor  # (D, H*K): all heads side by side, since W_V W_proj sums over them
    W_proj: Tensor  # (H*K, D)
    b_Q: Tensor | None
    b_K: Tensor | None
    b_V: Tensor | None
    b_proj: Tensor | None


def attention_layers(model: nn.Module) -> list[AttentionView]:
    """A view of every self-attention layer of `model`, in the order in which the model registers them.

    Wrappers (`torch.compile`, DistributedDataParallel) are looked through, and left out of the names.
    Raises ValueError where a layer's inner width is not a multiple of its heads.
    """
    views = []
    for name, module in unwrap(model).named_modules():
        for layout in LAYOUTS:
            weights = layout(module)
            if weights is not None:
                plain = name.replace("_orig_mod.", "").removesuffix("._orig_mod")
                views.append(view_of(plain, *weights))
                break
    return views


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DataParallel and DistributedDataParallel wrappers (they share its weights)."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def view_of(name: str, heads: int, q: Tensor, k: Tensor, v: Tensor, proj: Tensor, biases: tuple) -> AttentionView:
    """From matrices as `nn.Linear` stores them, (out, in): transposed, and Q and K cut into heads."""
    if heads < 1 or q.shape[0] % heads:
        raise ValueError(
            f"{name or 'attention'}: {heads} heads do not divide its inner width {q.shape[0]}; choose a divisor."
        )
    q, k, v, proj = (weight.detach() for weight in (q, k, v, proj))  # detached, yet the same storage
    biases = [None if bias is None else bias.detach() for bias in biases]
    W_Q = q.view(heads, -1, q.shape[1]).transpose(1, 2)  # (H*K, D) -> (H, K, D) -> (H, D, K)
    W_K = k.view(heads, -1, k.shape[1]).transpose(1, 2)
    return AttentionView(name, heads, W_Q, W_K, v.T, proj.T, *biases)


def stored(module: nn.Module, name: str) -> Tensor | None:
    """The parameter `name` of `module`. Raises ValueError where it is computed anew from others at each call."""
    if name not in module._parameters:
        raise ValueError(
            f"{type(module).__name__}.{name} is computed from other tensors (weight_norm or a parametrization), so "
            "writing it would have no effect: remove that, initialize, and apply it again."
        )
    return module._parameters[name]


def thirds(bias: Tensor | None) -> tuple:
    return (None, None, None) if bias is None else bias.chunk(3)


# A layout takes any module, and answers None, or (heads, q, k, v, proj, (b_q, b_k, b_v, b_proj)) as stored.


def fused_qkv(module: nn.Module) -> tuple | None:
    """`qkv` = [q; k; v] in one Linear, `proj`, `num_heads`: our own vit.Attention."""
    qkv, proj = getattr(module, "qkv", None), getattr(module, "proj", None)
    if not (isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and hasattr(module, "num_heads")):
        return None
    biases = (*thirds(stored(qkv, "bias")), stored(proj, "bias"))
    return module.num_heads, *stored(qkv, "weight").chunk(3), stored(proj, "weight"), biases


def torch_multihead(module: nn.Module) -> tuple | None:
    """`nn.MultiheadAttention`: packed [q; k; v], or three matrices where kdim or vdim is not the width."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if module.in_proj_weight is not None:
        q, k, v = stored(module, "in_proj_weight").chunk(3)
    else:
        q, k, v = (stored(module, f"{name}_proj_weight") for name in "qkv")
    biases = (*thirds(stored(module, "in_proj_bias")), stored(module.out_proj, "bias"))
    return module.num_heads, q, k, v, stored(module.out_proj, "weight"), biases


LAYOUTS = [fused_qkv, torch_multihead]
