"""Which layers an initialization may write, and writing them: what `mimetic_init_` and `structured_init_` share.

Nothing is written before every tensor of every layer is known to exist, to fit the method and to share its memory with
no other; what is written is read back.
"""

import warnings

import torch
from torch import Tensor, nn

from layouts import AttentionView, attention_layers, find, unwrap


def layers_to_write(model: nn.Module, qk: bool, vp: bool, strict: bool = True, bad: dict | None = None) -> list:
    """The views of the layers that an initialization may write. Raises ValueError for others, and if there are none;
    strict=False leaves them out, with a warning. bad: what `verify` says of layers that are not right, by name."""
    if not (qk or vp):
        raise ValueError("with qk=False and vp=False there is nothing to initialize; ask for at least one.")
    layers = attention_layers(model, strict)
    reasons = {layer.name: reason for layer in layers if (reason := misfit(layer, qk, vp))}
    shared = shared_memory(unwrap(model), [layer for layer in layers if layer.name not in reasons])
    reasons |= {name: "its weights share memory with another parameter, which would be written too." for name in shared}
    reasons |= bad or {}
    if strict and reasons:
        raise ValueError("{}: {}".format(*next(iter(reasons.items()))))
    layers = [layer for layer in layers if layer.name not in reasons]
    if not layers:
        why = "layouts.py lists those known" if strict else "the same call without strict=False says why"
        raise ValueError(f"no self-attention layer found in {type(model).__name__}; {why}.")
    written = {layer.name for layer in layers}
    left = [name or type(module).__name__ for name, module, _ in find(unwrap(model)) if name not in written]
    if left:
        warnings.warn(f"left as they are: {', '.join(left)}.", stacklevel=4)
    return layers


def misfit(layer: AttentionView, qk: bool, vp: bool) -> str | None:
    """Why the method says nothing about such a layer, or its weights do not exist yet; None if it fits."""
    dim, head_dim = layer.W_Q.shape[1:]
    inner = layer.heads * head_dim
    if any(tensor is not None and tensor.is_meta for tensor in layer[2:]):
        return (
            "it is on the meta device and has no weights: call model.to_empty(device=...) and the model's own "
            "initialization (vit.ViT: model.init_weights()) first, then this one."
        )
    if head_dim > dim or (vp and inner != dim):
        return f"its inner width {layer.heads} x {head_dim} is {inner}, not the model's {dim}, which W_V W_proj needs."
    if qk and layer.W_K.shape != layer.W_Q.shape:
        return f"keys have another width than queries (kdim is not {dim}); W_Q W_Kᵀ needs one."
    if vp and not layer.W_V.shape == layer.W_proj.shape == (dim, dim):
        return f"W_V W_proj must be {dim} by {dim} matrices (vdim and the output width are the model's)."
    return None


def shared_memory(model: nn.Module, layers: list[AttentionView]) -> set[str]:
    """Names of the layers with an entry that belongs to more than one of their tensors or of the model's parameters."""
    targets = [(layer.name, tensor) for layer in layers for tensor in layer[2:] if tensor is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor for _, tensor in targets}
    uses = {  # how many tensors hold each entry of a storage
        key: torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.uint8, device="cpu")
        for key, tensor in storages.items()
    }

    def entries(tensor: Tensor) -> Tensor:
        size = [1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride())]
        return uses[tensor.untyped_storage().data_ptr()].as_strided(size, tensor.stride(), tensor.storage_offset())

    parameters = (p for module in model.modules() for p in module._parameters.values())  # a module used twice: once
    ordinary = (p for p in parameters if type(p) is nn.Parameter and p.layout is torch.strided)
    for tensor in (*(p for p in ordinary if p.untyped_storage().data_ptr() in uses), *(t for _, t in targets)):
        entries(tensor).add_(1)
    return {name for name, tensor in targets if entries(tensor).max() > 2}  # its parameter and itself


def span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first and the last entry."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()


def write_(layer: AttentionView, **weights: Tensor) -> None:
    """Writes W_Q=..., W_K=... and so on, and zeros into their biases, then reads them back."""
    for field, value in weights.items():
        getattr(layer, field).copy_(value)
        if (bias := getattr(layer, field.replace("W", "b"))) is not None:
            bias.zero_()
    for field, value in weights.items():
        if not torch.equal(getattr(layer, field), value.to(getattr(layer, field))):
            raise RuntimeError(f"{layer.name}: {field} did not keep what was written into it.")
