"""Does each layer act as its view says? Asked of the model's own forward pass, whatever its names and shapes say.

For three passes the projections hold random weights, and tokens that decide enter them: zeros, whose logits are what
masks and position biases add; one token everywhere, so that the output is x W_V W_proj whatever the map; different
tokens, so that each head's logits are x W_Q W_Kᵀ xᵀ/√k. Afterwards weights, modes and random state are put back.
"""

from collections import defaultdict, namedtuple
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import AttentionView, attention_layers, unwrap
from writing import misfit, span

aten = torch.ops.aten


# right is None if the input does not come to the layer; errors are relative to the largest entry of what is expected
Verdict = namedtuple("Verdict", ["name", "right", "value_error", "logit_error", "note"])


class Probe(TorchDispatchMode):
    """Sends one kind of tokens into the projections, and records by layer what reaches its softmax and its output."""

    def __init__(self, layers: list[AttentionView], kind: str):
        super().__init__()
        self.kind, self.layer, self.inputs, self.tokens = kind, None, {}, {}
        self.logits, self.outputs = defaultdict(list), defaultdict(list)
        self.weights = [(*span(layer[i]), layer.name, layer._fields[i]) for layer in layers for i in range(2, 6)]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        op, kwargs, layer, role = func.overloadpacket, kwargs or {}, self.layer, None
        if layer is not None and op in (aten._softmax, aten._safe_softmax):
            self.logits[layer].append(args[0].cpu().double() if args[1] % args[0].dim() == args[0].dim() - 1 else None)
        elif layer is not None and op.__name__.startswith("_scaled_dot_product"):  # the fused calls of every device
            q, k, scale = *args[:2], kwargs.get("scale") or args[0].shape[-1] ** -0.5
            self.logits[layer].append(q.cpu().double() @ k.cpu().double().mT * scale)
        elif op in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):  # what a linear layer becomes
            (*bias, x, weight), (first, last) = args, span(args[-1])
            for layer, role in [(layer, role) for a, b, layer, role in self.weights if a <= last and first <= b]:
                self.inputs[layer, role], self.layer = x, layer
            if role not in (None, "W_proj"):
                token = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * (self.kind != "zeros")
                token = (token.flatten(0, -2)[:1].expand(x.shape) if self.kind == "one" else token).to(x)
                self.tokens[layer], args = token.cpu().double().flatten(0, -2), (*bias, token, weight)
        y = func(*args, **kwargs)
        if role == "W_proj":
            self.outputs[layer].append((y.cpu().double(), len(args) == 3))
            self.layer, y = None, torch.zeros_like(y)  # the rest of the model sees numbers of an ordinary size
        return y


@torch.no_grad()
def verify(model: nn.Module, *example_inputs: Any) -> list[Verdict]:
    """A verdict on each layer of `attention_layers(model, strict=False)`, from `model(*example_inputs)` in eval mode.

    A dict at the end holds keyword arguments. Raises nothing: right is None for what the pass does not come to, or not
    before it fails. Rotary positions are right if they leave a token's logit with itself as it is; the note says so.
    """
    *args, kwargs = example_inputs if isinstance((None, *example_inputs)[-1], dict) else (*example_inputs, {})
    model, layers, note = unwrap(model), attention_layers(model, strict=False), "this input does not come to it"
    tensors = [tensor for layer in layers for tensor in layer[2:] if tensor is not None]
    saved, modes = [tensor.clone() for tensor in tensors], [(module, module.training) for module in model.modules()]
    probes, drawn = [Probe(layers, kind) for kind in ("zeros", "one", "different")], {}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for seed, tensor in enumerate(tensors):  # so large that clamped queries and capped logits show
            draw = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
            drawn[id(tensor)] = tensor.copy_(draw * 30 / tensor.shape[-2:][0] ** 0.5).cpu().double()
        torch.backends.mha.set_fastpath_enabled(False)
        for probe in probes:
            with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), probe:
                model.eval()(*args, **kwargs)
    except Exception as error:
        note = f"the model raised {type(error).__name__}: {error}"
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for tensor, value in [*zip(tensors, saved)][::-1]:  # backwards, since tied ones were drawn twice
            tensor.copy_(value)
        for module, mode in modes:
            module.training = mode
    return [judge(layer, drawn, *probes, note) for layer in layers]


def judge(layer: AttentionView, drawn: dict, zeros: Probe, one: Probe, different: Probe, note: str) -> Verdict:
    name, H, reason = layer.name, layer.heads, misfit(layer, qk=True, vp=True)
    if reason or not (one.outputs[name] and different.outputs[name]):
        return Verdict(name, None, torch.inf, torch.inf, reason or note)
    W_Q, W_K, W_V, W_proj, *biases = (drawn.get(id(tensor)) for tensor in layer[2:])
    b_Q, b_K, b_V, b_proj = (torch.zeros_like(W_V[0]) if b is None else b for b in biases)
    xVP, x, errors = (one.tokens[name][0] @ W_V + b_V) @ W_proj, different.tokens[name], []
    values = [y - xVP - biased * b_proj for y, biased in one.outputs[name]]
    for L, L_0 in zip(different.logits[name], zeros.logits[name]):
        N, found = 1 if L is None else L.shape[-1], [(torch.inf, torch.inf)]
        fits = L is not None and L.numel() == len(x) * H * N and len(x) % N == 0
        for tokens in (x.view(-1, 1, N, len(W_V)), x.view(N, -1, 1, len(W_V)).permute(1, 2, 0, 3)) if fits else ():
            q, k = tokens @ W_Q + b_Q.view(H, 1, -1), tokens @ W_K + b_K.view(H, 1, -1)  # (B, H, N, K)
            expected = (q @ k.mT - (b_Q * b_K).view(H, 1, -1).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
            for order in (lambda t: t.view(-1, H, N, N), lambda t: t.view(H, -1, N, N).transpose(0, 1)):  # noqa: B023
                wrong = (order(L - L_0) - expected).masked_fill(order(L_0) < -1e4, 0).abs() / expected.abs().max()
                found.append((float(wrong.diagonal(dim1=-2, dim2=-1).max()), float(wrong.max())))
        errors.append(min(found))
    value = float(max(wrong.abs().max() for wrong in values) / xVP.abs().max())
    own, full = map(max, zip(*errors or [(torch.inf, torch.inf)]))
    tolerance = max(1e-3, 4 * torch.finfo(layer.W_Q.dtype).eps)
    q, k = (different.inputs.get((name, role)) for role in ("W_Q", "W_K"))
    crossed = q is not k and (q is None or k is None or q.shape != k.shape or not torch.allclose(q, k))
    right = value < tolerance and own < tolerance and not crossed
    note = f"x W_V W_proj is off by {value:.0e} of its largest entry, the logits by {full:.0e}"
    note = "its queries come from other tokens than its keys" if crossed else note
    note = ("rotary positions: a token's logit with itself" if full > tolerance else "") if right else note
    return Verdict(name, right, value, own if right else full, note)
