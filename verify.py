"""Does each layer act as its view says? Asked of the model's own forward pass, whatever its names and shapes say.

In two passes the projections hold random weights and chosen tokens enter them: zeros, whose logits are what masks and
position biases add; then one token x everywhere, which adds x W_Q W_Kᵀ xᵀ/√k to every logit of a head, and whose output
is x W_V W_proj whatever the map.
"""

from collections import defaultdict, namedtuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import AttentionView, attention_layers, unwrap
from writing import misfit, span

Verdict = namedtuple("Verdict", ["name", "right", "value_error", "logit_error", "note"])


class Probe(TorchDispatchMode):
    """Sends one kind of tokens into the projections, and records by layer what reaches its softmax and its output."""

    def __init__(self, layers: list[AttentionView], scale: float):
        super().__init__()
        self.scale, self.layer, self.inputs, self.tokens = scale, None, {}, {}
        self.logits, self.outputs = defaultdict(list), defaultdict(list)
        self.weights = [(*span(layer[i]), layer.name, layer._fields[i]) for layer in layers for i in range(2, 6)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op, kwargs, layer, role = func.overloadpacket.__name__, kwargs or {}, self.layer, None
        if layer is not None and op in ("_softmax", "_safe_softmax"):
            over_keys = args[1] in (-1, args[0].dim() - 1)
            self.logits[layer].append(args[0].cpu().double() if over_keys else torch.zeros(0))
        elif layer is not None and op.startswith("_scaled_dot_product"):  # the fused calls of every device
            q, k, scale = *args[:2], kwargs.get("scale") or args[0].shape[-1] ** -0.5
            self.logits[layer].append(q.cpu().double() @ k.cpu().double().mT * scale)
        elif op in ("mm", "addmm", "bmm", "baddbmm"):  # what a linear layer becomes
            (*bias, x, weight), (first, last) = args, span(args[-1])
            for layer, role in [(layer, role) for a, b, layer, role in self.weights if a <= last and first <= b]:
                self.inputs[layer, role], self.layer = x, layer
            if role not in (None, "W_proj"):
                token = self.scale * torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x)
                self.tokens[layer], args = token.cpu().double(), (*bias, token.expand(x.shape), weight)
        y = func(*args, **kwargs)
        if role == "W_proj":
            self.outputs[layer].append(y.cpu().double())
            self.layer, y = None, torch.zeros_like(y)  # the rest of the model sees numbers of an ordinary size
        return y


@torch.no_grad()
def verify(model: nn.Module, *example_inputs) -> list[Verdict]:
    """A verdict on each layer of `attention_layers(model, strict=False)`, from `model(*example_inputs)` in eval mode.

    A dict at the end holds keyword arguments; right is None for a layer that the passes do not reach, errors relative
    to the largest number expected. Raises nothing, and leaves weights, modes and random state as they were."""
    *args, kwargs = example_inputs if isinstance((None, *example_inputs)[-1], dict) else (*example_inputs, {})
    model, layers, note = unwrap(model), attention_layers(model, strict=False), "this input does not come to it"
    zeros, one, drawn, random = Probe(layers, 0.0), Probe(layers, 1.0), {}, torch.Generator().manual_seed(0)
    saved = [(tensor, tensor.clone()) for layer in layers for tensor in layer[2:] if tensor is not None]
    modes, fast = [(module, module.training) for module in model.modules()], torch.backends.mha.get_fastpath_enabled()
    try:
        for tensor, _ in saved:  # so large that clamped queries and capped logits show; biases are left out
            draw = torch.randn(tensor.shape, generator=random) * (30 if tensor.dim() > 1 else 0)
            drawn[id(tensor)] = tensor.copy_(draw / tensor.shape[-2:][0] ** 0.5).cpu().double()
        torch.backends.mha.set_fastpath_enabled(False)
        for probe in (zeros, one):
            with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), probe:
                model.eval()(*args, **kwargs)
    except Exception as error:
        note = f"the model raised {type(error).__name__}: {error}"
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for tensor, value in reversed(saved):  # tied ones were drawn twice
            tensor.copy_(value)
        for module, mode in modes:
            module.training = mode
    return [judge(layer, drawn, zeros, one, note) for layer in layers]


def judge(layer: AttentionView, drawn: dict, zeros: Probe, one: Probe, note: str) -> Verdict:
    (name, H), reason = layer[:2], misfit(layer, qk=True, vp=True)
    if reason or not (zeros.outputs[name] and one.outputs[name]):
        return Verdict(name, None, torch.inf, torch.inf, reason or note)
    x, (W_Q, W_K, W_V, W_proj) = one.tokens[name], (drawn[id(tensor)] for tensor in layer[2:6])  # x is (D,)
    logits, output = ((x @ W_Q) * (x @ W_K)).sum(-1) / W_Q.shape[-1] ** 0.5, x @ W_V @ W_proj  # (H,), (D,)
    value = float(max((y - output).abs().max() for y in one.outputs[name]) / output.abs().max())
    own = every = 0.0 if one.logits[name] else torch.inf  # of a token's logits with itself, and of all
    for L, L_0 in zip(one.logits[name], zeros.logits[name]):
        if not len(L) or L.numel() % (H * L.shape[-1] ** 2):
            return Verdict(name, False, value, torch.inf, "its map is not tokens by tokens for each head")
        wrong = (L - L_0).view(-1, H, *[L.shape[-1]] * 2) - logits.view(H, 1, 1)
        wrong = wrong.masked_fill(L_0.view(wrong.shape) < -1e4, 0).abs() / logits.abs().max()
        own, every = max(own, float(wrong.diagonal(0, -2, -1).max())), max(every, float(wrong.max()))
    if not torch.equal(*(one.inputs.get((name, role), torch.zeros(0)) for role in ("W_Q", "W_K"))):
        return Verdict(name, False, value, every, "its queries come from other tokens than its keys")
    if max(value, own) < max(1e-3, 4 * torch.finfo(layer.W_Q.dtype).eps):
        return Verdict(name, True, value, own, "rotary positions: a token's logit with itself" * (every > 1e-3))
    note = f"x W_V W_proj is off by {value:.0e} of its largest entry, the logits by {every:.0e}"
    return Verdict(name, False, value, every, note)
