"""Where each library keeps the attention weights: one view of them all, in the paper's orientation.

The paper multiplies rows, `x @ W_Q`, `x @ W_V @ W_proj`. `torch.nn.Linear` stores the transpose and computes
`x @ weight.T`; GPT-2's Conv1D does not; some libraries fuse Q, K and V into one matrix. This file alone knows about
that, by attributes and shapes, and imports none of them. Every tensor it hands out is a *view*: `view.W_Q.copy_(...)`
writes the model's own parameter. What is not Softmax(X W_Q W_Kᵀ Xᵀ / √k) X W_V W_proj is refused, with the reason;
verify.py asks the model's forward pass whether the views are right.

D width, H heads, K = head_dim. To teach it another layer, write a function as in docs/any-model.md and append it to
`LAYOUTS`.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


class AttentionView(NamedTuple):
    """The four weights of one self-attention layer as the paper writes them, sharing the model's storage."""

    name: str
    heads: int
    W_Q: Tensor  # (H, D, K): one matrix per head, since W_Q W_Kᵀ is a product within a head
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
    if a layer is attention that the paper's equations do not describe, or looks like attention and is unknown;
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
            "nn.Linear, and None for others (docs/any-model.md has an example); strict=False leaves these out."
        )
    return [view for _, _, view in found if isinstance(view, AttentionView)]


def find(
    module: nn.Module, name: str = "", above: tuple = (), seen: set | None = None
) -> Iterator[tuple[str, nn.Module, AttentionView | str | None]]:
    """Name, module and view of each attention layer; instead of the view the reason why it is refused, or None if a
    module only looks like attention. Nothing inside a layer is looked at again, and no module twice."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    try:
        for layout in [*LAYOUTS, *KNOWN]:
            if (weights := layout(module)) is not None:
                if layout in KNOWN:
                    refuse_cross(module, name, above)
                yield name, module, view_of(name, *weights)
                return
        inside = []
        for child_name, child in module.named_children():
            wrapped = child_name in WRAPPED
            path = name if wrapped else f"{name}.{child_name}".lstrip(".")
            inside += find(child, path, above if wrapped else (*above, module), seen)
        yield from inside
        if not inside and looks_like_attention(module, name):
            refuse_cross(module, name, above)
            yield name, module, None
    except ValueError as reason:
        yield name, module, str(reason)


WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DataParallel and DistributedDataParallel wrappers (they share its weights)."""
    parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    inner = model.module if parallel else getattr(model, "_orig_mod", model)
    return model if inner is model else unwrap(inner)


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


# ---- the layouts: each takes any module and answers None, or (heads, q, k, v, proj, (b_q, b_k, b_v, b_proj)) as stored

ROWS = [  # the linear layers' names: one for [q; k; v], or one for each, or two; then the output's. *: any of OUTPUT
    "qkv proj", "qkv projection", "c_attn c_proj", "to_qkv to_out", "to_qkv merge", "Wqkv Wo", "qkv_proj o_proj",
    "query key value *", "q_proj k_proj v_proj *", "q_lin k_lin v_lin *", "to_q to_k to_v to_out", "q k v o",
    "to_q to_kv to_out", "qk v proj", "in_proj attn_out_proj",
]  # fmt: skip
OUTPUT = ["out_proj", "o_proj", "proj", "dense", "out_lin"]
BESIDE = {  # by output: what may lie before the layer or after its residual sum, and the MLP of a parallel block
    "to_out": "norm", "dense": "LayerNorm", "output.dense": r"(output\.)?(\w*layer_?norm|ln)",
    "attn_out_proj": r"in_norm|in_proj|mlp_\w+|ls",
}  # fmt: skip


def linears(module: nn.Module) -> tuple | None:
    """Linear layers in `module`: our vit.Attention, timm, vit-pytorch, transformers, nanoGPT; or q, k, v in a child and
    the projection in `output.dense` beside it (Hugging Face BERT, and ViTs before 2026)."""
    for core in (module, *module.children()):
        for *names, output in map(str.split, ROWS if core is module else ["query key value output.dense"]):
            layers = [linear(core, name) for name in names]
            output = next((o for o in OUTPUT if linear(module, o)), output) if output == "*" else output
            proj = linear(module, output)
            if proj is None and len(names) == 1 and layers[0] and isinstance(getattr(core, output, None), nn.Identity):
                raise ValueError("it has one head and no output projection, so there is no W_proj to write.")
            if None in (*layers, proj):
                continue
            weights, biases, W_proj = [], [], parameter_of(proj, "weight")
            for name, layer in zip(names, layers):
                n = 2 if name in ("to_kv", "qk") else 3 // len(names)  # how many of q, k, v it holds
                weight, bias = parameter_of(layer, "weight"), parameter_of(layer, "bias")
                if n == 3 and weight.shape[0] != (rows := 3 * W_proj.shape[1]):
                    if name != "in_proj":
                        raise ValueError(
                            f"its {name} has {weight.shape[0]} outputs, not 3 times the {rows // 3} {UNEVEN}"
                        )
                    weight, bias = weight[-rows:], None if bias is None else bias[-rows:]  # the MLP's come first
                weights += weight.chunk(n)
                biases += (None,) * n if bias is None else bias.chunk(n)
            if core is not module and W_proj.shape[1] != weights[2].shape[0]:
                continue  # a neighbour of another kind, such as the MLP's second matrix
            if "qkv" in names and biases[0] is None:  # BEiT keeps them apart, and has none for keys
                own = core._parameters
                biases = [parameter_of(core, f"{x}_bias") if f"{x}_bias" in own else None for x in "qkv"]
            biases = (*biases, parameter_of(proj, "bias"))
            return weights_of(module, core, *weights, W_proj, biases, BESIDE.get(output, ""))
    if linear(module, "query_key_value") is not None:
        raise ValueError(UNTOLD)
    return None


def torch_multihead(module: nn.Module) -> tuple | None:
    """`nn.MultiheadAttention` (nn.TransformerEncoder, torchvision): packed [q; k; v], or three matrices if kdim or vdim
    is not the width."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if module.in_proj_weight is not None:
        q, k, v = parameter_of(module, "in_proj_weight").chunk(3)
    else:
        q, k, v = (parameter_of(module, f"{name}_proj_weight") for name in "qkv")
    bias = parameter_of(module, "in_proj_bias")
    biases = (*((None,) * 3 if bias is None else bias.chunk(3)), parameter_of(module.out_proj, "bias"))
    return weights_of(module, module, q, k, v, parameter_of(module.out_proj, "weight"), biases)


KNOWN = [linears, torch_multihead]
LAYOUTS: list = []  # yours, asked before these


def weights_of(
    module: nn.Module, core: nn.Module, q: Tensor, k: Tensor, v: Tensor, proj: Tensor, biases: tuple, beside: str = ""
) -> tuple | None:
    """What a layout returns, once nothing speaks against the layer; None if no attribute tells the heads."""
    heads = heads_of(core, q.shape[0])
    if heads is None:
        return None
    refuse_unlike(module, core, q.shape[0] // max(heads, 1), (q, k, v, proj, *biases), beside)
    return heads, q, k, v, proj, biases


def linear(module: nn.Module, name: str) -> nn.Module | None:
    """The linear layer called `name` ("output.dense": of a child), or with its dropout in a container of that name."""
    for part in name.split("."):
        module = module._modules.get(part) if isinstance(module, nn.Module) else None
    if isinstance(module, (nn.Sequential, nn.ModuleList)) and all(isinstance(x, nn.Dropout) for x in list(module)[1:]):
        module = next(iter(module), None)
    return module if any(hasattr(module, size) for size in ("in_features", "nf", "qweight")) else None


def heads_of(module: nn.Module, inner: int) -> int | None:
    """The number of heads, as the module says it or by the size of one."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"):
        if type(getattr(module, name, None)) is int:
            return getattr(module, name)
    head_dim = getattr(module, "head_dim", None)
    return inner // head_dim if type(head_dim) is int else None


def parameter_of(module: nn.Module, name: str) -> Tensor | None:
    """The parameter `name` of a projection, a matrix (out, in) or a bias (out).

    Raises ValueError if it is not one tensor of ordinary numbers that can be written. Looks at no attribute that a
    parametrization would compute: spectral_norm's vectors move when they are looked at.
    """
    reason, p = None, module._parameters.get(name)
    if hasattr(module, "base_layer"):
        reason = "carries an adapter (LoRA): initialize the model before you add one."
    elif callable(getattr(type(module), name, None)) or hasattr(module, "qweight"):
        reason = "is quantized: initialize the model before you quantize it."
    elif name not in module._parameters:
        reason = (
            "is computed from other tensors (weight_norm or a parametrization), so writing it would have no effect: "
            "remove that, initialize, and apply it again."
        )
    elif p is None:
        return None
    elif nn.parameter.is_lazy(p):
        reason = "has no size yet (a lazy module): run the model once, then initialize it."
    elif p.is_inference():
        reason = "was made in inference mode, so that it cannot be written: build the model outside of it."
    elif p.layout is not torch.strided or (0 in p.stride() and p.numel() > 1):
        reason = "is sparse or expanded, so that its entries cannot be written one by one."
    elif (
        type(p) is not nn.Parameter
        or not p.is_floating_point()
        or p.element_size() == 1
        or p.dim() != (1 if "bias" in name else 2)
    ):
        kind = f"a {type(p).__name__} of {p.dtype} and shape {tuple(p.shape)}"
        reason = f"is quantized or sharded ({kind}): initialize the model before that."
    if reason:
        raise ValueError(f"{type(module).__name__}.{name} {reason}")
    return p.T if hasattr(module, "nf") and name == "weight" else p  # GPT-2's Conv1D stores (in, out)


# ---- why a layer is refused


def looks_like_attention(module: nn.Module, name: str) -> bool:
    """Whether a module of unknown layout holds the matrices of attention, by its name or by theirs."""
    shapes = {
        key: tuple(p.shape) for key, p in module.named_parameters() if not nn.parameter.is_lazy(p) and p.dim() > 1
    }
    if re.search(r"attn|attention|mhs?a\b|multi_?head", f"{name.rpartition('.')[2]} {type(module).__name__}", re.I):
        first, *rest = [shape[:2] for shape in shapes.values()] or [()]
        return bool(rest) and (rest != [first[::-1]] or first in rest)  # not squeeze-and-excite: (r, d) and (d, r)
    own = {key: shape for key, shape in shapes.items() if key.count(".") <= 1}
    entering = [own.pop(key) for key in list(own) if re.search(QKV, key, re.I)]
    widths = {shape[1] for shape in entering}
    return any(sum(n for n, *dim in entering if dim == [d]) == 3 * d and (d, d) in own.values() for d in widths)


QKV = r"(^|_|to|w)[qkv]{1,3}(_|\d|\.|$|proj|lin)|quer|key|value"
CROSS = r"cross(?!_?encod)|(^|_)x_?attn|enc_?dec|encoder_att|_to_|pool(?!former)|class_?att|^cls_"


def refuse_cross(module: nn.Module, name: str, above: tuple) -> None:
    """A ValueError if names or attributes say that the queries are not the tokens that the keys are.

    The nearest word decides: `crossattention.self` is cross, `cross_layer.self_attn` is not.
    """
    own, *path = reversed(name.split("."))
    words = [own, type(module).__name__, *path]
    said = next((word for word in words if re.search(f"self|{CROSS}", word, re.I)), "self")
    parent = above[-1] if above else None
    if (
        not re.search("self", said, re.I)
        or any(getattr(module, flag, False) for flag in ("is_cross_attention", "encoder_decoder_attention"))
        or any(getattr(outer, "cross_attend", False) for outer in above)  # x-transformers calls all layers alike
        or (own == "multihead_attn" and hasattr(parent, "self_attn"))
        or any(re.search("cross_?transformer", type(outer).__name__, re.I) for outer in above)
        or ("self" not in own and re.search(r"attention_?pool|cross_?att", type(parent).__name__, re.I))
    ):
        raise ValueError(
            "cross-attention or attention pooling: its queries come from other tokens than its keys, while the method "
            "makes tokens attend to themselves."
        )


def refuse_unlike(module: nn.Module, core: nn.Module, head_dim: int, tensors: tuple, beside: str) -> None:
    """A ValueError if `module` does something else with its weights, `tensors`, than the paper's layer.

    core: the module that knows its heads.  beside: pattern of further parameters that do no harm; a class of yours can
    name its own in an attribute `harmless_parameters`.
    """
    kinds = " ".join(f"{kind.__module__}.{kind.__name__}" for kind in type(core).__mro__)
    told = [core, getattr(core, "config", None)]
    for pattern, reason in UNLIKE.items():
        names = pattern.split()
        if re.search(rf"{pattern}\b", kinds) or any(getattr(x, name, None) for x in told for name in names):
            raise ValueError(reason)
    own = {id(tensor if tensor._base is None else tensor._base) for tensor in tensors if tensor is not None}  # of views
    patterns = [r"(.*\.)?(rel_pos|relative_position)\w*", beside, getattr(core, "harmless_parameters", "")]
    harmless = re.compile(rf"({'|'.join(filter(None, patterns))})(\.|$)", re.I)
    names = [name for name, p in module.named_parameters() if id(p) not in own]
    names += [name for name, m in module.named_modules() if re.search("norm", type(m).__name__, re.I)]
    names = sorted({re.sub(r"\.(weight|bias)$", "", name) for name in names if not harmless.match(name)})
    if names:
        raise ValueError(f"it has parts that the paper's layer does not have ({', '.join(names[:4])}).")
    if any(getattr(core, name, 1) != 1 for name in ("q_stride", "query_stride")):
        raise ValueError("it pools its queries.")
    scales = (getattr(core, name, None) for name in ("scaling", "scale", "scale_factor"))
    scale = next((scale for scale in scales if type(scale) in (int, float)), head_dim**-0.5)
    unlike = abs(scale * head_dim**0.5 - 1) > 1e-3 and not re.search(r"\bEsm", kinds)  # Esm scales q, then says 1
    if unlike or not getattr(core, "scale_attn_weights", True):
        raise ValueError(UNSCALED.format(head_dim))


UNEVEN = (
    "inputs of its output (grouped-query or cross-attention); the method needs queries, keys and values of one width."
)
UNTOLD = (
    "it packs q, k and v in an order that the shape does not tell (head by head in GPT-NeoX); no one view fits W_V."
)
UNSCALED = "it does not scale its logits by 1/√{}, as the paper's layer does."
UNLIKE = {  # what has the attributes of a known layout, but not its meaning: patterns of class names, or attributes
    "GPTBigCodeAttention": UNTOLD,
    "GPTNeoSelfAttention": UNSCALED.format("k"),
    r"Channel_?Att\w+": "its tokens are channels.",
    r"\.nest\.Attention": "it hands out its heads interleaved, so that no one view fits W_V.",
    r"Clvp\w*Attention": "it rotates values.",
    r"MiMoV2Flash\w*Attention": "it scales its values.",
    r"VJEPA2\w*Attention": "its rotation changes a token's logit with itself.",
    r"Bros\w*Attention": "its logits hold products of queries and positions.",
    r"(Mra|Yoso|Nystromformer|BigBird|GlobalLocal|Efficient|Linear)\w*Att\w+": "its map is an approximation.",
    "head_first": UNTOLD,
    "key_value_proj_dim scale_attn_by_inverse_layer_idx": UNSCALED.format("k"),
    "clip_qkv": "it clamps queries, keys and values.",
    "attn_logit_softcapping softcap softclamp_logits": "it caps its logits.",
    "rotary_value": "it rotates values.",
    "add_zero_attn": "it adds a token of zeros to the keys.",
    "qk_norm use_qk_norm qk_layernorm": "it normalizes queries and keys.",
}
