"""Where each library keeps the attention weights: one view of them all, in the paper's orientation.

The paper multiplies rows, `x @ W_Q`, `x @ W_V @ W_proj`. `torch.nn.Linear` stores the transpose and computes
`x @ weight.T`; GPT-2's Conv1D does not; some libraries fuse Q, K and V into one matrix. This file alone knows about
that, by attributes and shapes, and imports none of them. Every tensor it hands out is a *view*: `view.W_Q.copy_(...)`
writes the model's own parameter. What is not Softmax(X W_Q W_Kᵀ Xᵀ / √k) X W_V W_proj is refused by name.

D width, H heads, K = head_dim. To teach it another layer, write a function like `fused_qkv` below and append it to
`LAYOUTS`.
"""

import re
from collections.abc import Iterator
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


def attention_layers(model: nn.Module, strict: bool = True) -> list[AttentionView]:
    """A view of every self-attention layer of `model`, in the order in which the model registers them.

    Wrappers (`torch.compile`, DistributedDataParallel) are looked through, and left out of the names. Raises ValueError
    where a layer is attention that the paper's equations do not describe, or looks like attention and is unknown;
    strict=False leaves such layers out instead.
    """
    found = list(find(unwrap(model)))
    refused = [f"{name or 'attention'}: {reason}" for name, _, reason in found if isinstance(reason, str)]
    unknown = [f"{name or 'the model'} ({type(module).__name__})" for name, module, result in found if result is None]
    if strict and refused:
        raise ValueError(f"{refused[0]} (strict=False leaves out what is refused; here, layers: {len(refused)}.)")
    if strict and unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"this looks like attention, layout unknown: {', '.join(unknown[:3])}{more}. Append to layouts.LAYOUTS "
            "a function that returns (heads, q, k, v, proj, (b_q, b_k, b_v, b_proj)) for such a module, weights as in "
            "nn.Linear, and None for others (README.md has an example); strict=False leaves out what is unknown."
        )
    return [view for _, _, view in found if isinstance(view, AttentionView)]


def find(
    module: nn.Module, name: str = "", parent: nn.Module | None = None, seen: set | None = None
) -> Iterator[tuple[str, nn.Module, AttentionView | str | None]]:
    """Name, module and view of each attention layer; in the view's place the reason why it is refused, or None where
    a module is only called attention. Nothing inside a layer is looked at again, and no module twice."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    try:
        for layout in [*LAYOUTS, *KNOWN]:
            if (weights := layout(module)) is not None:
                if layout in KNOWN:
                    refuse_cross(module, name, parent)
                yield name, module, view_of(name, *weights)
                return
        inside = []
        for child_name, child in module.named_children():
            wrapped = child_name in WRAPPED
            path = name if wrapped else f"{name}.{child_name}".lstrip(".")
            inside += find(child, path, parent if wrapped else module, seen)
        yield from inside
        if not inside and looks_like_attention(module, name):
            refuse_cross(module, name, parent)
            yield name, module, None
    except ValueError as reason:
        yield name, module, str(reason)


WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


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
        raise ValueError(f"{heads} heads do not divide its inner width {q.shape[0]}; choose a divisor.")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"grouped-query attention (queries of width {q.shape[0]}, keys of {k.shape[0]}, values of {v.shape[0]}), "
            "while the method needs keys and values for each head of queries."
        )
    q, k, v, proj = (weight.detach() for weight in (q, k, v, proj))  # detached, yet the same storage
    biases = [None if bias is None else bias.detach() for bias in biases]
    W_Q = q.view(heads, -1, q.shape[1]).transpose(1, 2)  # (H*K, D) -> (H, K, D) -> (H, D, K)
    W_K = k.view(heads, -1, k.shape[1]).transpose(1, 2)
    return AttentionView(name, heads, W_Q, W_K, v.T, proj.T, *biases)


def addresses(tensor: Tensor) -> tuple[int, int]:
    """Of the first and the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()


# ---- what the layouts share


def stored(module: nn.Module, name: str) -> Tensor | None:
    """The parameter `name` of a projection, a matrix (out, in) or a bias (out).

    Raises ValueError where it is not one tensor of ordinary numbers that can be written.
    """
    kind = f"{type(module).__name__}.{name}"
    if callable(getattr(module, name, None)) or hasattr(module, "qweight"):
        raise ValueError(f"{kind} is quantized: initialize the model before you quantize it.")
    if name not in module._parameters:
        raise ValueError(
            f"{kind} is computed from other tensors (weight_norm or a parametrization), so writing it would have no "
            "effect: remove that, initialize, and apply it again."
        )
    parameter = module._parameters[name]
    if parameter is None:
        return None
    ordinary = type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.element_size() > 1
    if not ordinary or parameter.dim() != (2 if name.endswith("weight") else 1):
        raise ValueError(
            f"{kind} is quantized or sharded (a {type(parameter).__name__} of {parameter.dtype} and shape "
            f"{tuple(parameter.shape)}): initialize the model before that."
        )
    return parameter.T if hasattr(module, "nf") and name == "weight" else parameter  # GPT-2's Conv1D stores (in, out)


def linear(module: nn.Module, name: str) -> nn.Module | None:
    """The linear layer called `name` ("output.dense": of a child), or with its dropout in a Sequential of that name."""
    for part in name.split("."):
        module = getattr(module, part, None)
    if isinstance(module, nn.Sequential) and all(isinstance(layer, nn.Dropout) for layer in list(module)[1:]):
        module = next(iter(module), None)
    return module if any(hasattr(module, size) for size in ("in_features", "nf", "qweight")) else None


def heads_of(module: nn.Module, inner: int) -> int | None:
    """The number of heads, as the module says it or by the size of one."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"):
        if isinstance(getattr(module, name, None), int):
            return getattr(module, name)
    head_dim = getattr(module, "head_dim", None)
    return inner // head_dim if isinstance(head_dim, int) else None


def thirds(tensor: Tensor | None) -> tuple:
    return (None, None, None) if tensor is None else tensor.chunk(3)


def looks_like_attention(module: nn.Module, name: str) -> bool:
    """Whether a module with two matrices or more, or its class, is called attention."""
    called = f"{name.rpartition('.')[2]} {type(module).__name__}"
    named_so = re.search(r"attn|attention|mhs?a\b|multi_?head", called, re.IGNORECASE)
    return bool(named_so) and sum(parameter.dim() >= 2 for parameter in module.parameters()) > 1


def refuse_cross(module: nn.Module, name: str, parent: nn.Module | None) -> None:
    """A ValueError where names or attributes say that the queries are not the tokens that the keys are."""
    name = name.rpartition(".")[2]
    called = [name, type(module).__name__, type(parent).__name__]
    if (
        any(re.search("cross|pool|encdec", text, re.IGNORECASE) for text in called)
        or any(getattr(module, flag, False) for flag in ("is_cross_attention", "encoder_decoder_attention"))
        or name in ("encoder_attn", "encoder_attention")
        or (name == "multihead_attn" and isinstance(parent, nn.TransformerDecoderLayer))
    ):
        raise ValueError(
            "cross-attention or attention pooling: its queries come from other tokens than its keys, while the method "
            "makes tokens attend to themselves."
        )


def refuse_unlike(module: nn.Module, core: nn.Module, head_dim: int, tensors: tuple, beside: str) -> None:
    """A ValueError where `module` does something else with its weights, `tensors`, than the paper's layer.

    core: the module that knows its heads.  beside: pattern of further parameters that do no harm; a class of yours can
    name its own in an attribute `harmless_parameters`.
    """
    reasons = [UNLIKE[kind.__name__] for kind in type(core).__mro__ if kind.__name__ in UNLIKE]
    if reasons or getattr(core, "head_first", False):
        raise ValueError(reasons[0] if reasons else UNTOLD)
    own = {id(tensor if tensor._base is None else tensor._base) for tensor in tensors if tensor is not None}  # of views
    patterns = [r"(.*\.)?(rel_pos|relative_position)\w*", beside, getattr(core, "harmless_parameters", "")]
    harmless = re.compile(rf"({'|'.join(filter(None, patterns))})(\.|$)")
    names = [name for name, p in module.named_parameters() if id(p) not in own and not harmless.match(name)]
    names = sorted({re.sub(r"\.(weight|bias)$", "", name) for name in names})
    if names:
        raise ValueError(f"it has parameters that the paper's layer does not have ({', '.join(names[:4])}).")
    scale = getattr(core, "scaling", getattr(core, "scale", None))
    unlike = isinstance(scale, (int, float)) and scale is not True and abs(scale * head_dim**0.5 - 1) > 1e-3
    unlike |= not getattr(core, "scale_attn_weights", True)  # GPT-2's two flags
    if unlike or getattr(core, "scale_attn_by_inverse_layer_idx", False):
        raise ValueError(f"it does not scale its logits by 1/√{head_dim}, as the paper's layer does.")


UNTOLD = (
    "it packs q, k and v in an order that the shape does not tell (head by head in GPT-NeoX); no one view fits W_V."
)
UNLIKE = {  # layers that have the attributes of a known layout, but not its meaning
    "GPTBigCodeAttention": UNTOLD,
    "GPTNeoSelfAttention": "it does not scale its logits by 1/√k, as the paper's layer does.",
    "ChannelAttention": "its tokens are channels.",
}


def weights_of(
    module: nn.Module, core: nn.Module, q: Tensor, k: Tensor, v: Tensor, proj: Tensor, biases: tuple, beside: str = ""
) -> tuple | None:
    """What a layout returns, once the layer is the paper's for sure; None where no attribute tells the heads."""
    heads = heads_of(core, q.shape[0])
    if heads is None:
        return None
    refuse_unlike(module, core, q.shape[0] // max(heads, 1), (q, k, v, proj, *biases), beside)
    return heads, q, k, v, proj, biases


# ---- the layouts: each takes any module and answers None, or (heads, q, k, v, proj, (b_q, b_k, b_v, b_proj)) as stored

FUSED = [("qkv", "proj", ""), ("c_attn", "c_proj", ""), ("to_qkv", "to_out", "norm")]  # vit-pytorch holds its pre-norm
SEPARATE = ["query key value", "q_proj k_proj v_proj", "q_lin k_lin v_lin"]
OUTPUT = ["out_proj", "o_proj", "proj", "dense", "out_lin"]


def fused_qkv(module: nn.Module) -> tuple | None:
    """[q; k; v] in one matrix: our vit.Attention, timm, DINO; nanoGPT and (transposed) GPT-2; vit-pytorch."""
    for name, output, beside in FUSED:
        qkv, proj = linear(module, name), linear(module, output)
        if qkv is not None and isinstance(getattr(module, output, None), nn.Identity):
            raise ValueError("it has one head and no output projection, so there is no W_proj to write.")
        if qkv is None or proj is None:
            continue
        packed, proj_weight = stored(qkv, "weight"), stored(proj, "weight")
        if packed.shape[0] != 3 * proj_weight.shape[1]:
            raise ValueError(
                f"its {name} has {packed.shape[0]} outputs, not 3 times the {proj_weight.shape[1]} inputs of {output} "
                "(grouped-query or cross-attention); the method needs queries, keys and values of one width."
            )
        biases = thirds(stored(qkv, "bias"))
        if qkv.bias is None:  # BEiT keeps them apart, and has none for keys
            biases = tuple(module._parameters.get(f"{letter}_bias") for letter in "qkv")
        return weights_of(module, module, *packed.chunk(3), proj_weight, (*biases, stored(proj, "bias")), beside)
    if linear(module, "query_key_value") is not None:
        raise ValueError(UNTOLD)
    return None


def separate(module: nn.Module) -> tuple | None:
    """Three matrices and the output projection in one module (CLIP, OPT, BART, Llama, current Hugging Face ViTs), or
    q, k, v in a child and the projection in `output.dense` beside it (Hugging Face BERT, and ViTs before 2026)."""
    for core in (module, *module.children()):
        outputs = OUTPUT if core is module else ["output.dense"]
        proj = next(filter(None, (linear(module, name) for name in outputs)), None)
        for names in SEPARATE if core is module else SEPARATE[:1]:
            layers = [*(linear(core, name) for name in names.split()), proj]
            if None in layers:
                continue
            weights = [stored(layer, "weight") for layer in layers]
            if core is not module and weights[3].shape[1] != weights[2].shape[0]:
                continue  # a neighbour of another kind, such as the MLP's second matrix
            biases = tuple(stored(layer, "bias") for layer in layers)
            return weights_of(module, core, *weights, biases, beside=r"(output\.)?LayerNorm")  # it comes after the sum
    return None


def torch_multihead(module: nn.Module) -> tuple | None:
    """`nn.MultiheadAttention` (nn.TransformerEncoder, torchvision): packed [q; k; v], or, where kdim or vdim is not the
    width, three matrices."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if module.in_proj_weight is not None:
        q, k, v = stored(module, "in_proj_weight").chunk(3)
    else:
        q, k, v = (stored(module, f"{name}_proj_weight") for name in "qkv")
    biases = (*thirds(stored(module, "in_proj_bias")), stored(module.out_proj, "bias"))
    return weights_of(module, module, q, k, v, stored(module.out_proj, "weight"), biases)


KNOWN = [fused_qkv, separate, torch_multihead]
LAYOUTS: list = []  # yours, asked before these
