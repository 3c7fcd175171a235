"""Does each layer act as its view says? Asked of the model's own forward pass, whatever its names and shapes say.

In three passes the projections hold random weights and no biases, and multiples of one token x enter them: 0, whose
logits are what masks and position biases add; x everywhere, so that the output is x W_V W_proj whatever the map; and x
or -x, so that tokens differ, yet the logit of each with itself is x W_Q W_Kᵀ xᵀ/√k in every head.
"""

from collections import defaultdict, namedtuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import AttentionView, attention_layers, unwrap
from writing import misfit, span

Verdict = namedtuple("Verdict", ["name", "right", "value_error", "logit_error", "note"])


class Probe(TorchDispatchMode):
    """Sends multiples of one token into the projections, and records each layer's logits and outputs."""

    def __init__(self, layers: list[AttentionView], multiples: list[int]):
        super().__init__()
        self.multiples, self.layer, self.inputs, self.tokens = torch.tensor(multiples), None, {}, {}
        self.logits, self.outputs = defaultdict(list), defaultdict(list)
        self.weights = [(*span(layer[i]), layer.name, layer._fields[i]) for layer in layers for i in range(2, 6)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op, kwargs, layer, role = func.overloadpacket.__name__, kwargs or {}, self.layer, None
        if layer is not None and op in ("_softmax", "_safe_softmax"):
            L, dim = args[0].cpu().double(), args[1]
            self.logits[layer].append(L if dim in (-1, L.dim() - 1) else torch.zeros(1, 2))  # else not over keys
        elif layer is not None and op.startswith("_scaled_dot_product"):  # the fused calls of every device
            q, k = (tensor.cpu().double() for tensor in args[:2])
            self.logits[layer].append(q @ k.mT * (kwargs.get("scale") or q.shape[-1] ** -0.5))
        elif op in ("mm", "addmm", "bmm", "baddbmm"):  # what a linear layer becomes
            (*bias, x, weight), (first, last) = args, span(args[-1])
            for layer, role in [(layer, role) for a, b, layer, role in self.weights if a <= last and first <= b]:
                self.inputs[layer, role], self.layer = x, layer
            if role not in (None, "W_proj"):
                random = torch.Generator().manual_seed(0)
                token = torch.randn(x.shape[-1], generator=random).to(x)
                multiples = self.multiples[torch.randint(len(self.multiples), (*x.shape[:-1], 1), generator=random)]
                self.tokens[layer], args = token.cpu().double(), (*bias, multiples.to(x) * token, weight)
        y = func(*args, **kwargs)
        if role == "W_proj":
            self.outputs[layer].append(y.cpu().double())
            self.layer, y = None, torch.zeros_like(y)  # the rest of the model sees numbers of an ordinary size
        return y


@torch.no_grad()
def verify(model: nn.Module, *example_inputs) -> list[Verdict]:
    """A verdict on each layer of `attention_layers(model, strict=False)`, from `model(*example_inputs)` in eval mode.

    A dict at the end holds keyword arguments. right is None for a layer that is not reached; errors are relative to the
    largest number expected. Raises nothing, and leaves weights, modes and random state as they were."""
    *args, kwargs = example_inputs if isinstance((None, *example_inputs)[-1], dict) else (*example_inputs, {})
    model, layers, note = unwrap(model), attention_layers(model, strict=False), "this input does not come to it"
    probes, drawn, random = [Probe(layers, m) for m in ([0], [1], [1, -1])], {}, torch.Generator().manual_seed(0)
    saved = [(tensor, tensor.clone()) for layer in layers for tensor in layer[2:] if tensor is not None]
    modes, no_fast_path = [(m, m.training) for m in model.modules()], torch.overrides.BaseTorchFunctionMode
    try:
        for tensor, _ in saved:  # so large that clamped queries and capped logits show; biases are left out
            draw = torch.randn(tensor.shape, generator=random) * (30 if tensor.dim() > 1 else 0)
            drawn[id(tensor)] = tensor.copy_(draw / tensor.shape[-2:][0] ** 0.5).cpu().double()
        for probe in probes:
            with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), no_fast_path(), probe:
                model.eval()(*args, **kwargs)
    except Exception as error:
        note = f"the model raised {type(error).__name__}: {error}"
    finally:
        for tensor, value in reversed(saved):  # tied ones were drawn twice
            tensor.copy_(value)
        for module, mode in modes:
            module.training = mode
    return [judge(layer, drawn, *probes, note) for layer in layers]


def judge(layer: AttentionView, drawn: dict, zero: Probe, same: Probe, signed: Probe, note: str) -> Verdict:
    (name, H), reason = layer[:2], misfit(layer, qk=True, vp=True)
    if reason or not (same.outputs[name] and signed.outputs[name]):
        return Verdict(name, None, torch.inf, torch.inf, reason or note)
    x, (W_Q, W_K, W_V, W_proj) = same.tokens[name], (drawn[id(tensor)] for tensor in layer[2:6])
    logits, output = ((x @ W_Q) * (x @ W_K)).sum(-1) / W_Q.shape[-1] ** 0.5, x @ W_V @ W_proj  # (H,), (D,)
    value = float(max((y - output).abs().max() for y in same.outputs[name]) / output.abs().max())
    own = every = 0.0 if same.logits[name] else torch.inf  # errors of a token's logit with itself, and of all
    for L_0, *others in zip(zero.logits[name], same.logits[name], signed.logits[name]):
        if L_0.shape[-2] != L_0.shape[-1] or L_0.numel() % (H * L_0.shape[-1] ** 2):
            return Verdict(name, False, value, torch.inf, "its map is not tokens by tokens for each head")
        changes = ((L - L_0).masked_fill(L_0 < -1e4, torch.nan).reshape(-1, H, *L_0.shape[-2:]) for L in others)
        wrong, wrong_signed = ((L - logits.view(H, 1, 1)).abs().nan_to_num(0) / logits.abs().max() for L in changes)
        own, every = max(own, float(wrong_signed.diagonal(0, -2, -1).max())), max(every, float(wrong.max()))
    q, k = (same.inputs.get((name, role)) for role in ("W_Q", "W_K"))
    if q is not k and (q is None or k is None or not torch.equal(q, k)):
        return Verdict(name, False, value, every, "its queries come from other tokens than its keys")
    if max(value, own) < (tolerance := max(1e-3, 4 * torch.finfo(layer.W_Q.dtype).eps)):
        return Verdict(name, True, value, own, "rotary positions: a token's logit with itself" * (every > tolerance))
    return Verdict(name, False, value, every, f"x W_V W_proj is off by {value:.0e}, the logits by {every:.0e}")
