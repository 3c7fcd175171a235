"""Does each layer act as its view says? Asked of the model's own forward pass, whatever names and shapes say.

    for verdict in verify(model, images):        # or verify(model, input_ids=ids)
        print(verdict)                           # blocks.0.attn: right (x W_V W_proj to 2e-07, logits to 3e-07)

For three passes the projections hold random weights, and tokens that decide enter them: zeros, whose logits are what
masks and position biases add; one token everywhere, so that the output is x W_V W_proj whatever the map; different ones,
so that each head's softmax gets x W_Q W_Kᵀ xᵀ/√k. Then weights, modes and random state are put back.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import AttentionView, attention_layers, unwrap

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)  # what a linear layer becomes: (bias, if any), input, weight


def addresses(tensor: Tensor) -> tuple[int, int]:
    """Of the first and the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()


class Verdict(NamedTuple):
    name: str
    right: bool | None  # None: not reached by this input
    value_error: float = torch.inf  # relative to the largest entry of x W_V W_proj
    logit_error: float = torch.inf  # of x W_Q W_Kᵀ xᵀ/√k
    note: str = ""

    def __str__(self) -> str:
        says = {True: "right", False: "wrong", None: "not reached by this input"}[self.right]
        errors = f" (x W_V W_proj to {self.value_error:.0e}, logits to {self.logit_error:.0e})"
        return f"{self.name}: {says}{'' if self.right is None else errors}{self.note and ': ' + self.note}"


class Probe(TorchDispatchMode):
    """Sends tokens of one kind into the projections, and records what reaches each layer's softmax and output."""

    def __init__(self, layers: list[AttentionView], kind: str):
        super().__init__()
        self.kind, self.current = kind, None  # the layer whose softmax comes next
        self.entered, self.crossed = {}, set()  # the model's own inputs; layers in which q's and k's differ
        self.tokens, self.logits, self.outputs = {}, defaultdict(list), defaultdict(list)  # by layer
        self.weights = defaultdict(list)
        for i, layer in enumerate(layers):
            for role in ("W_Q", "W_K", "W_V", "W_proj"):
                weight = getattr(layer, role)
                self.weights[weight.untyped_storage().data_ptr()].append((addresses(weight), i, role))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        op, i = func.overloadpacket, None
        if op in (aten._softmax, aten._safe_softmax) and self.current is not None:
            last = args[1] in (-1, args[0].dim() - 1)
            self.logits[self.current].append(args[0].double().cpu() if last else torch.zeros(1, 1))
        if op.__name__.startswith("_scaled_dot_product") and self.current is not None:  # the fused calls of all devices
            q, k, scale = *args[:2], (kwargs or {}).get("scale") or args[0].shape[-1] ** -0.5
            self.logits[self.current].append((q.double() @ k.double().mT * scale).cpu())
        if op in PRODUCTS:
            *bias, x, weight = args
            near, own = self.weights.get(weight.untyped_storage().data_ptr(), ()), addresses(weight)
            for i, role in [(i, role) for (first, last), i, role in near if first <= own[1] and own[0] <= last]:
                self.entered[i, role], self.current = x, i
                args = args if role == "W_proj" else (*bias, self.token_like(i, x), weight)
        y = func(*args, **(kwargs or {}))
        if i is None or role != "W_proj":
            return y
        q, k = (self.entered.get((i, role)) for role in ("W_Q", "W_K"))
        if q is not k and (q is None or k is None or q.shape != k.shape or not torch.allclose(q, k)):
            self.crossed.add(i)
        self.outputs[i].append((y.double().cpu(), bool(bias)))
        self.current = None
        return torch.zeros_like(y)  # the rest of the model sees numbers of an ordinary size

    def token_like(self, i: int, x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        token = {"zero": 0 * drawn, "one": drawn.flatten(0, -2)[:1].expand(x.shape), "all": drawn}[self.kind].to(x)
        self.tokens[i] = token.double().cpu().flatten(0, -2)
        return token


@torch.no_grad()
def verify(model: nn.Module, *args: Any, **kwargs: Any) -> list[Verdict]:
    """A verdict on each layer of `attention_layers(model, strict=False)`, from `model(*args, **kwargs)` in eval mode.

    Raises nothing: layers that the pass does not come to, or not before it fails, are "not reached". Rotary positions
    pass if they leave a token's logit with itself as it is; the note says so.
    """
    model, layers = unwrap(model), attention_layers(model, strict=False)
    probes, note = [Probe(layers, kind) for kind in ("zero", "one", "all")], ""
    targets = [tensor for layer in layers for tensor in layer[2:] if tensor is not None]
    saved, modes = [target.clone() for target in targets], [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        drawn = [draw_into(layer, seed) for seed, layer in enumerate(layers)]
        model.eval()
        for probe in probes:
            with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), probe:
                model(*args, **kwargs)
    except Exception as error:
        note = f"the model raised {type(error).__name__}: {error}"
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for target, value in zip(reversed(targets), reversed(saved)):
            target.copy_(value)
        for module, mode in modes:
            module.training = mode
    return [
        judge(i, view, *probes, max(1e-3, 4 * torch.finfo(layers[i].W_Q.dtype).eps), note)
        for i, view in enumerate(drawn)
    ]


def not_right(model: nn.Module, example: Any) -> dict[str, str]:
    """Names of the layers that `example` (a tensor, a tuple of arguments, or a dict of them) does not show to be right."""
    args = () if isinstance(example, dict) else example if isinstance(example, tuple) else (example,)
    verdicts = verify(model, *args, **(example if isinstance(example, dict) else {}))
    return {verdict.name: str(verdict) for verdict in verdicts if not verdict.right}


def draw_into(layer: AttentionView, seed: int) -> AttentionView:
    """Writes random weights, so large that clamped queries and capped logits show; returns them in float64."""
    generator, dim, drawn = torch.Generator().manual_seed(seed), layer.W_Q.shape[1], []
    for field, tensor in zip(layer._fields[2:], layer[2:]):
        scale = 10.0 if field[0] == "b" else (1 if field == "W_proj" else 30) / dim**0.5
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        drawn.append(torch.zeros(1).double() if tensor is None else tensor.double().cpu())
    return AttentionView(layer.name, layer.heads, *drawn)


def judge(i: int, layer: AttentionView, zero: Probe, one: Probe, every: Probe, tolerance: float, note: str) -> Verdict:
    if not (one.outputs[i] and every.outputs[i]):
        return Verdict(layer.name, None, note=note)
    expected = (one.tokens[i][0] @ layer.W_V + layer.b_V) @ layer.W_proj
    value = max(relative(y - biased * layer.b_proj - expected, expected) for y, biased in one.outputs[i])
    errors = [logit_errors(*pair, every.tokens[i], layer) for pair in zip(every.logits[i], zero.logits[i])]
    full, own = map(max, zip(*errors)) if errors else (torch.inf, torch.inf)
    if i in every.crossed:
        return Verdict(layer.name, False, value, full, "its queries come from other tokens than its keys")
    note = "a token's logit with itself (rotary positions)" if own < tolerance < full else ""
    return Verdict(layer.name, value < tolerance and own < tolerance, value, own if note else full, note)


def logit_errors(logits: Tensor, zero: Tensor, tokens: Tensor, layer: AttentionView) -> tuple[float, float]:
    """The error of all logits, and of each token's with itself, in the best order of batch, tokens and heads."""
    N, H, (T, D) = logits.shape[-1], layer.heads, tokens.shape
    if logits.shape[-2] != N or T % N or logits.numel() != T * H * N:
        return torch.inf, torch.inf
    errors = []
    for x in (tokens.view(T // N, 1, N, D), tokens.view(N, T // N, 1, D).transpose(0, 1).transpose(1, 2)):
        q, k = x @ layer.W_Q, x @ layer.W_K  # (B, H, N, K)
        b_q, b_k = ((b + 0 * layer.W_Q[:, 0].flatten()).view(H, 1, -1) for b in (layer.b_Q, layer.b_K))
        expected = (q @ k.mT + q @ b_k.mT + b_q @ k.mT) / q.shape[-1] ** 0.5  # what zero input does not have
        for L, L_0 in [(logits.view(-1, H, N, N), zero.view(-1, H, N, N))] + [
            (logits.view(H, -1, N, N).transpose(0, 1), zero.view(H, -1, N, N).transpose(0, 1))
        ]:
            wrong = (L - L_0 - expected).masked_fill(L_0 < -1e4, 0)  # masked
            errors.append((relative(wrong, expected), relative(wrong.diagonal(dim1=-2, dim2=-1), expected)))
    return min(errors)


def relative(wrong: Tensor, expected: Tensor) -> float:
    return (wrong.abs().max() / expected.abs().max()).nan_to_num(torch.inf).item()
