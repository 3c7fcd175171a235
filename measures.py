"""What figures.py draws, measured: products of weights, attention maps, the residual stream, scores against epoch."""

import math
import shlex
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inits import VISION_INITS, read_checkpoint
from layouts import AttentionView
from training import checkpoint, records

# ---- weights


def load_model(source: str, heads: int) -> nn.Module:
    """The model behind a CHECKPOINT. Raises ValueError, FileNotFoundError or ImportError in one clear sentence."""
    library, _, name = source.partition(":")
    try:
        if name and library == "timm":
            import timm

            return timm.create_model(name, pretrained=True)
        if name and library == "hf":
            import transformers

            return transformers.AutoModel.from_pretrained(name)
    except ImportError as error:
        raise ImportError(f"{source} needs a package that is missing: pip install {error.name}.") from None
    except RuntimeError as error:  # timm's, for a name that it does not know
        raise ValueError(f"{source}: {error}") from None
    weights, told = read_checkpoint(checkpoint_file(source))
    return skeleton(weights, heads or told or 0)


def checkpoint_file(source: str) -> str:
    """A file, or the checkpoint in the folder of a run."""
    return str(Path(source) / "last.pt") if Path(source).is_dir() else source


def skeleton(weights: dict[str, Tensor], heads: int) -> nn.Module:
    """Modules without a forward, as the names in a state dict tell them, for `attention_layers` to look at.

    Raises ValueError where `heads` is 0: weights alone do not tell how many there are.
    """
    if heads < 1:
        raise ValueError("the file does not say how many heads a layer has; add --heads.")
    root = nn.Module()
    for name, tensor in weights.items():
        *path, last = name.replace("_orig_mod.", "").removeprefix("module.").split(".")
        holder = root
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder._modules[part]
        if tensor.is_floating_point() and tensor.dim() <= 2:  # the others are masks and convolutions
            holder.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    for module in list(root.modules()):
        module.num_heads = heads
        for name, child in module.named_children():
            if "in_proj_weight" in child._parameters:
                module._modules[name] = packed = nn.MultiheadAttention(heads, heads, device="meta")
                packed.num_heads, packed._parameters, packed._modules = heads, child._parameters, child._modules
                packed._parameters.setdefault("in_proj_bias", None)
            if list(child._modules) == ["0"]:
                module._modules[name] = nn.Sequential(child._modules["0"])  # vit-pytorch's to_out
            weight = child._parameters.get("weight")
            if weight is not None and weight.dim() == 2:
                child._parameters.setdefault("bias", None)
                conv1d = hasattr(module, "c_attn") and 3 * len(module.c_attn.weight) == module.c_attn.weight.shape[1]
                setattr(child, "nf" if conv1d else "in_features", weight.shape[1])  # GPT-2 stores the transpose
    return root


def products(layer: AttentionView) -> tuple[Tensor, Tensor]:
    """W_Q W_Kᵀ of each head (H, D, D), and W_V W_proj (D, D), in float32 on the CPU."""
    W_Q, W_K, W_V, W_proj = (weight.float().cpu() for weight in layer[2:6])
    return W_Q @ W_K.transpose(1, 2), W_V @ W_proj


def diagonal(M: Tensor) -> tuple[float, float]:
    """Of square matrices (..., D, D): the mean of the diagonal over the standard deviation of the rest, and the share
    of the diagonal's entries that are positive; means over the matrices."""
    D = M.shape[-1]
    diagonals = M.diagonal(dim1=-2, dim2=-1)  # (..., D)
    rest = M[..., ~torch.eye(D, dtype=torch.bool)]  # (..., D*(D-1))
    return float((diagonals.mean(-1) / rest.std(-1)).mean()), float((diagonals > 0).float().mean())


def weights_table(layers: list[AttentionView]) -> str:
    """Markdown: a row a layer, for both products what `diagonal` says."""
    rows = ["| layer | W_Q W_Kᵀ: diagonal / deviation | positive | W_V W_proj: diagonal / deviation | positive |"]
    rows.append("|---|---|---|---|---|")
    for layer in layers:
        (qk, qk_share), (vp, vp_share) = map(diagonal, products(layer))
        rows.append(f"| {layer.name} | {qk:+.2f} | {qk_share:.0%} | {vp:+.2f} | {vp_share:.0%} |")
    return "\n".join(rows)


# ---- attention maps


def mean_map(model: nn.Module, images: Tensor, layer: int) -> Tensor:
    """The map of one layer of a ViT, mean over images and heads (N, N), without the class token if there is one."""
    maps = model.eval().attention_maps(images)[layer].mean((0, 1))
    return maps[-model.pos_embed.shape[1] :, -model.pos_embed.shape[1] :]


SIZES = dict(width=192, depth=12, heads=3, patch_size=4, pool="mean", pos="sinusoidal", pos_scale=1.0)


def build_untrained(config: dict, data) -> nn.Module:
    """A vit.ViT of the sizes in `config` for these images (images.ImageData), with the default init of seed 0."""
    from vit import ViT

    torch.manual_seed(0)
    return ViT(
        image_size=data.test_images.shape[-1], patch_size=config["patch_size"], num_classes=len(data.classes),
        dim=config["width"], depth=config["depth"], heads=config["heads"], pool=config["pool"],
        pos=config["pos"], pos_scale=config["pos_scale"],
    )  # fmt: skip


# ---- the residual stream (docs/depth.md)


def stream_of(source: str, flags: list[str]) -> tuple[dict, dict]:
    """`stream` and `directions` of the model behind a SOURCE on test images, and, if untrained, what is predicted."""
    import train_cifar
    from inputs.augment import normalize

    name, *own = shlex.split(source)
    s = train_cifar.settings([*flags, *own])
    saved = None
    if name not in VISION_INITS:
        saved = checkpoint.read(Path(checkpoint_file(name)))
        if "patch_size" not in saved.get("config", {}):
            raise ValueError(f"{name} is no run of train_cifar.py, nor one of the inits {', '.join(VISION_INITS)}.")
        s = records.restore_settings(train_cifar.Settings, {**saved["config"], "data_dir": s.data_dir})
    if s.local_layers:
        raise ValueError(f"{source}: the stream is that of ViTs without --local-layers.")
    data = train_cifar.load_data(s)
    model = train_cifar.build(s, "default" if saved else name, 0, data, torch.device("cpu"))
    if saved:
        checkpoint.load_weights(model, saved["model"], Path(name))
    images = train_cifar.upsample(normalize(data.test_images[:64], data.mean, data.std), s.image_size)
    measured = dict(stream(model, images), directions=directions(model, images[:2]))
    if name not in ("default", "mimetic"):
        return measured, {}
    factors = (s.alpha2, s.beta2) if name == "mimetic" and s.parts != "qk" else (0.0, 0.0)
    return measured, predict_stream(measured["scale"][0], measured["kept"], *factors)


@torch.no_grad()
def stream(model: nn.Module, images: Tensor) -> dict[str, list[float]]:
    """A ViT's patch tokens before each layer and after the last, as a LayerNorm sees them: without their mean over
    channels. "scale": their root mean square; "cosine": with the embedding, mean over tokens (depth + 1 each).
    "kept": the inner product of a layer's normalized input with its average by the layer's attention maps, 1 if each
    token attends to itself alone (depth).
    """
    x, n = model.eval().embed(images), model.pos_embed.shape[1]  # (B, N, D), the class token first if there is one
    first, found = center(x[:, -n:]), dict(scale=[], cosine=[], kept=[])
    for layer in range(len(model.blocks) + 1):
        centered = center(x[:, -n:])
        found["scale"].append(float(centered.square().mean().sqrt()))
        found["cosine"].append(float(F.cosine_similarity(centered, first, dim=-1).mean()))
        if layer < len(model.blocks):
            block = model.blocks[layer]
            y = block.norm1(x)
            averaged = block.attn.attention_map(y).mean(1) @ y  # mean over heads
            found["kept"].append(float((averaged * y)[:, -n:].sum() / y[:, -n:].square().sum()))
            x = block(x)
    return found


def directions(model: nn.Module, images: Tensor) -> float:
    """How many of a ViT's D directions come through, mean over images: the singular values s of the derivative of what
    the head reads, by a shift of all tokens of an image alike, have the participation ratio (Σ s²)² / Σ s⁴. D if all
    are equal, 1 if one is left.
    """
    counts = []
    for embedded in model.eval().embed(images).detach():

        def read(shift: Tensor) -> Tensor:
            x = (embedded + shift)[None]  # noqa: B023
            for block in model.blocks:
                x = block(x)
            return model.norm(x.mean(1) if model.cls_token is None else x[:, 0])[0]

        J = torch.autograd.functional.jacobian(read, torch.zeros(embedded.shape[-1]))  # (D, D)
        squares = torch.linalg.svdvals(J.double()).square()
        counts.append(float(squares.sum().square() / squares.square().sum()))
    return sum(counts) / len(counts)


def center(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def predict_stream(scale: float, kept: list[float], alpha2: float, beta2: float) -> dict[str, list[float]]:
    """`stream` of an untrained model from the scale σ of its embedding, by the recursion of docs/depth.md:

    σ² ← σ² − 2 β₂ κ σ + (α₂² + β₂²) κ, and the share of the embedding in it times 1 − β₂ κ / σ; κ as `kept` has it.
    """
    scales, shares = [scale], [1.0]
    for kappa in kept:
        shares.append(shares[-1] * (1 - beta2 * kappa / scales[-1]))
        scales.append(math.sqrt(scales[-1] ** 2 - 2 * beta2 * kappa * scales[-1] + (alpha2**2 + beta2**2) * kappa))
    return dict(scale=scales, cosine=[share * scale / s for share, s in zip(shares, scales, strict=True)])


def stream_table(streams: dict[str, dict]) -> str:
    """Markdown: a row per layer, scale / cosine of each model before it, then after the last; then `directions`."""
    rows = ["| layers before | " + " | ".join(streams) + " |", "|---" * (1 + len(streams)) + "|"]
    for layer in range(max(len(found["scale"]) for found in streams.values())):
        pairs = [list(zip(found["scale"], found["cosine"]))[layer : layer + 1] for found in streams.values()]
        cells = [f"{pair[0][0]:.2f} / {pair[0][1]:.2f}" if pair else "" for pair in pairs]
        rows.append(f"| {layer} | " + " | ".join(cells) + " |")
    through = " | ".join(f"{found['directions']:.1f}" for found in streams.values())
    return "\n".join([*rows, f"| directions that come through | {through} |"])


# ---- curves


def read_curves(runs: list[str]) -> tuple[str, dict[str, dict[int, dict[int, float]]]]:
    """A score of records.SCORES and init -> epoch -> seed -> its value, from folders and result files with curves."""
    scores, curves = set(), {}
    for run in map(Path, runs):
        if run.is_file():
            results = [r for r in records.read_log(run) if isinstance(r, dict)]
            found = [(r["init"], r["seed"], r["curve"], r) for r in results if {"init", "seed", "curve"} <= r.keys()]
        else:
            found = []
            for log in sorted([*run.glob("log.jsonl"), *run.glob("*-seed*/log.jsonl")]):
                lines = records.read_log(log)
                init, _, seed = log.parent.name.rpartition("-seed")
                curve = records.curve(lines)
                if curve and not seed.isdigit():
                    raise ValueError(f"{log.parent} is not called INIT-seedK, as a training script calls its runs.")
                found += [(init, int(seed), curve, set().union(*lines))] if curve else []
        if not found:
            raise ValueError(f"{run} holds no runs with a score after an epoch; give a training script's --out.")
        for init, seed, curve, keys in found:
            scores |= {score for score in records.SCORES if score in keys}
            for epoch, value in curve:
                if curves.setdefault(init, {}).setdefault(epoch, {}).setdefault(seed, value) != value:
                    raise ValueError(
                        f"{run}: another run has {init}, seed {seed} too; draw each in a picture of its own."
                    )
    if len(scores) > 1:
        raise ValueError(f"these runs have several scores, {', '.join(sorted(scores))}; draw each in its own picture.")
    return min(scores, default="test_acc"), curves
