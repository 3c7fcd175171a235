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
                views.append(view_of(name.replace("_orig_mod.", ""), *weights))
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
    if q.shape[0] % heads:
        raise ValueError(f"{name}: {heads} heads do not divide its inner width {q.shape[0]}; choose a divisor.")
    q, k, v, proj = (weight.detach() for weight in (q, k, v, proj))  # detached, yet the same storage
    biases = [None if bias is None else bias.detach() for bias in biases]
    W_Q = q.view(heads, -1, q.shape[1]).transpose(1, 2)  # (H*K, D) -> (H, K, D) -> (H, D, K)
    W_K = k.view(heads, -1, k.shape[1]).transpose(1, 2)
    return AttentionView(name, heads, W_Q, W_K, v.T, proj.T, *biases)


# A layout takes any module, and answers None, or (heads, q, k, v, proj, (b_q, b_k, b_v, b_proj)) as stored.


def fused_qkv(module: nn.Module) -> tuple | None:
    """`qkv` = [q; k; v] in one Linear, `proj`, `num_heads`: our own vit.Attention."""
    qkv, proj = getattr(module, "qkv", None), getattr(module, "proj", None)
    if not (isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and hasattr(module, "num_heads")):
        return None
    b_qkv = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
    return module.num_heads, *qkv.weight.chunk(3), proj.weight, (*b_qkv, proj.bias)


def torch_multihead(module: nn.Module) -> tuple | None:
    """`nn.MultiheadAttention`: packed [q; k; v], or three matrices where kdim or vdim is not the width."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if module.in_proj_weight is not None:
        q, k, v = module.in_proj_weight.chunk(3)
    else:
        q, k, v = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    b_qkv = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return module.num_heads, q, k, v, module.out_proj.weight, (*b_qkv, module.out_proj.bias)


LAYOUTS = [fused_qkv, torch_multihead]
