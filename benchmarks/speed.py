"""How fast a GPU trains our models, eager, compiled, and beside other libraries': parts of `python bench.py gpu`.

b is benchmarks/gpu.py's Bench: device, precision and sizes.
"""

import contextlib
import math
import statistics
import sys
import time
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import time_in_turn
from benchmarks.check import image_step, made, random_images, random_tokens, set_fused, text_step
from lm import TransformerLM
from vit import ViT


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_step(b, step) -> tuple[float, float]:
    """The median over stretches of many steps; and the first step, which compiles."""

    def seconds_for(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(b.device)
        return (time.perf_counter() - started) / steps

    first, _, once = seconds_for(1), seconds_for(2), seconds_for(1)
    steps = max(1, int(b.sizes["seconds"] / b.sizes["repeat"] / once))
    return statistics.median(seconds_for(steps) for _ in range(b.sizes["repeat"])), first


def speed(b):
    n = b.sizes["product"]
    yield f"bf16 product of {n} x {n} matrices", partial(product, b, n)
    for compiled in ("eager", "compiled"):
        for augment in ("none", "randaugment"):
            yield f"ViT-Tiny/2, {compiled}, augmentation {augment}", partial(step_speed, b, ViT, compiled, augment)
        yield f"language model, {compiled}", partial(step_speed, b, TransformerLM, compiled)


def product(b, n: int) -> dict:
    square = torch.randn(n, n, device=b.device, dtype=torch.bfloat16)
    b.peak = 2 * n**3 / seconds_per_step(b, lambda: square @ square)[0]
    return dict(tflop_per_second=b.peak / 1e12)


def step_speed(b, kind, compiled: str, augment: str = "none") -> dict:
    """Of the paper's sizes: items a second, and the products' share of the peak."""
    if b.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, step, items = step_and_items(b, kind, augment, b.sizes["backend"] if compiled == "compiled" else None)
    seconds, first = seconds_per_step(b, step)
    figures = {f"{'images' if kind is ViT else 'tokens'}_per_second": items / seconds, "ms_per_step": 1e3 * seconds}
    figures["share_of_peak"] = flop_per_item(b, kind) * items / seconds / getattr(b, "peak", math.nan)
    figures["first_step_seconds"] = first
    if b.device.type == "cuda":
        figures["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def step_and_items(b, kind, augment: str, backend: str | None, model=None):
    """The model, ours if none is given; a step of it, and the images or tokens of that."""
    model = model or made(kind, **b.sizes[kind]).to(b.device)
    model = torch.compile(model, backend=backend) if backend else model
    if kind is ViT:
        batch = b.sizes["batch"]
        return model, image_step(model, random_images(16 * batch, b.device), batch, augment, b.precision), batch
    ids = random_tokens(b.sizes["windows"], b.sizes[TransformerLM]["context"], b.device)
    return model, text_step(model, ids, b.precision), ids[:, 1:].numel()


def flop_per_item(b, kind) -> float:
    """Forward and backward, of the explicit path: the fused call computes some products twice."""
    model, images = (
        set_fused(made(kind, **b.sizes[kind]), False),
        torch.randn(1, 3, 32, 32),
    )
    inputs = images if kind is ViT else random_tokens(1, b.sizes[TransformerLM]["context"] - 1, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    return counter.get_total_flops() / (1 if kind is ViT else inputs.numel())


# ---- peers


def peers(b):
    yield "ViT-Tiny/2, eager", partial(in_turn, b, ViT, "images", vit_peers(b))
    yield "language model, eager", partial(in_turn, b, TransformerLM, "tokens", text_peers(b))


def vit_peers(b) -> dict:
    """Functions that make a model of the same sizes, by library; each raises ImportError where that is missing."""
    v = b.sizes[ViT]
    sizes = dict(patch_size=v["patch_size"], num_classes=10, depth=v["depth"])

    def timm():
        from timm.models.vision_transformer import VisionTransformer

        heads = dict(embed_dim=v["dim"], num_heads=v["heads"], class_token=False, global_pool="avg")
        return VisionTransformer(img_size=32, **sizes, **heads)

    def vit_pytorch():
        from vit_pytorch import SimpleViT

        heads = dict(dim=v["dim"], heads=v["heads"], mlp_dim=4 * v["dim"], dim_head=v["dim"] // v["heads"])
        return SimpleViT(image_size=32, **sizes, **heads)

    return dict(timm=timm, vit_pytorch=vit_pytorch)


def text_peers(b) -> dict:
    def nanogpt():
        from model import GPT, GPTConfig

        t = b.sizes[TransformerLM]
        sizes = dict(block_size=t["context"], n_layer=t["depth"], n_head=t["heads"], n_embd=t["dim"])
        return GPT(GPTConfig(vocab_size=50, bias=True, **sizes))

    return dict(nanogpt=nanogpt)


def in_turn(b, kind, unit: str, libraries: dict) -> dict:
    """Items per second of ours and of each library's model: one stretch of each per round."""
    _, ours, items = step_and_items(b, kind, "none", None)
    steps, missing = {"ours": ours}, []
    for library, make in libraries.items():
        try:
            with contextlib.redirect_stdout(sys.stderr):  # nanoGPT tells how many parameters it has
                model = make().to(b.device)
        except ImportError:
            missing.append(library)
            continue
        _, steps[library], _ = step_and_items(b, kind, "none", None, model)
    n = 10 if b.device.type == "cuda" else 1
    runs = {name: lambda step=step: [step() for _ in range(n)] for name, step in steps.items()}
    figures = {f"{name}_{unit}_per_second": n * items / s for name, s in time_in_turn(runs, b.sizes["repeat"]).items()}
    return figures | (dict(not_installed=", ".join(missing)) if missing else {})
