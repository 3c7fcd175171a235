"""The initializations that the scripts compare, by name, and the controls among them.

A control keeps something of a mimetic draw and loses the rest: what does its *structure* add to its mere scale?
"""

import copy

import torch
from torch import nn

from layouts import attention_layers
from mimetic import mimetic_init_, zero_
from structured import map_errors, structured_init_


@torch.no_grad()
def scaled_init_(
    model: nn.Module, generator: torch.Generator | None = None, qk: bool = True, vp: bool = True, **mimetic
) -> list[str]:
    """Gaussian W_Q, W_K, W_V, W_proj with the Frobenius norms of a mimetic draw, block by block; biases zero.

    A block is one head's W_Q or W_K, or a layer's W_V or W_proj. All arguments go to `mimetic_init_`, whose draw, made
    on a copy, sets the norms. Returns the layers' names; raises what `mimetic_init_` raises.
    """
    target = copy.deepcopy(model)
    names = mimetic_init_(target, generator=generator, qk=qk, vp=vp, **mimetic)
    for layer, drawn in zip(attention_layers(model), attention_layers(target), strict=True):
        blocks = list(zip([*layer.W_Q, *layer.W_K], [*drawn.W_Q, *drawn.W_K], strict=True)) * qk
        blocks += [(layer.W_V, drawn.W_V), (layer.W_proj, drawn.W_proj)] * vp
        for W, M in blocks:
            noise = torch.randn(W.shape, generator=generator, device="cpu", dtype=torch.float32)
            W.copy_(noise * (M.float().norm().cpu() / noise.norm()))
        if qk:
            zero_(layer.b_Q, layer.b_K)
        if vp:
            zero_(layer.b_V, layer.b_proj)
    return names


def structured(model: nn.Module, s, generator: torch.Generator) -> list[str]:
    """Structured initialization of a vit.ViT by a script's settings; prints the map error that it reached."""
    names = structured_init_(
        model, model.pos_embed, model.grid, s.kernel_size, s.method, norm=s.qk_norm or None, alpha2=s.alpha2,
        beta2=s.beta2, qk=s.parts != "vp", vp=s.parts != "qk", generator=generator,
    )  # fmt: skip
    errors = torch.cat(list(map_errors(model, model.pos_embed, model.grid, s.kernel_size).values()))
    print(f"structured: map error {errors.mean():.3f} of positions alone, worst head {errors.max():.3f} (uniform: 1)")
    return names


INITS = {  # each gets (model, settings, generator) after the model has its default weights; add yours here
    "default": lambda model, s, generator: None,
    "mimetic": lambda model, s, generator: mimetic_init_(model, **products(s), generator=generator),
    "scaled": lambda model, s, generator: scaled_init_(model, **products(s), generator=generator),
    "structured": structured,
}


def products(s) -> dict:
    """mimetic_init_'s arguments from a script's settings alpha1 ... beta2 and parts ("both", "qk" or "vp")."""
    alphas_betas = dict(alpha1=s.alpha1, beta1=s.beta1, alpha2=s.alpha2, beta2=s.beta2)
    return dict(alphas_betas, qk=s.parts != "vp", vp=s.parts != "qk")
