"""The pictures: what attention weights look like, what maps a model starts with, how accuracy grows.

python figures.py weights CHECKPOINT...     W_Q W_K^T of each head and W_V W_proj of each layer, and a table of them
python figures.py attention [RUN...]        the expected map beside the mean maps of default, mimetic, trained models
python figures.py impulses                  the maps that heads start with, beside the impulses of structured.py
python figures.py curves RUN...             the score against epoch (images: test accuracy; text: validation)

A CHECKPOINT is a file of ours (or the folder of its run), a torch or safetensors state dict, or timm:NAME or hf:NAME,
a pretrained model of those libraries. A RUN of `attention` is one such folder of ours, of `curves` a training script's
--out, or a results/*.jsonl with curves. Pictures go to --out (.png or .svg) and need matplotlib; the table does not.
Light is positive (in maps: more than uniform), dark negative, in colours whose lightness alone tells the order.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

import checkpoint
import harness
import ranks
import torch
from torch import Tensor, nn

from inits import read_checkpoint
from layouts import AttentionView, attention_layers

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


def plot_weights(layers: list[AttentionView], out: str, corner: int) -> None:
    """A row a layer (three, evenly spaced, of a deeper model): up to six heads' W_Q W_Kᵀ, then W_V W_proj; their first
    `corner` rows and columns, where a diagonal is still a line that one sees."""
    chosen = [layers[round(i)] for i in torch.linspace(0, len(layers) - 1, min(3, len(layers))).tolist()]
    columns = min(6, max(layer.heads for layer in chosen))
    figure, axes = subplots(len(chosen), columns + 1, 1.5)
    for layer, row in zip(chosen, axes, strict=True):
        qk, vp = products(layer)
        for axis, M in zip(row[:-1], qk):
            show(axis, M[:corner, :corner])
        for axis in row[len(qk) : -1]:
            axis.axis("off")
        show(row[-1], vp[:corner, :corner])
        row[0].set_ylabel(layer.name, fontsize=7)
    for h, axis in enumerate(axes[0]):
        axis.set_title(f"W_Q W_Kᵀ, head {h}" if h < columns else "W_V W_proj", fontsize=8)
    save(figure, out)


# ---- attention maps


def mean_map(model: nn.Module, images: Tensor, layer: int) -> Tensor:
    """The map of one layer of a ViT, mean over images and heads (N, N), without the class token if there is one."""
    maps = model.eval().attention_maps(images)[layer].mean((0, 1))
    return maps[-model.pos_embed.shape[1] :, -model.pos_embed.shape[1] :]


SIZES = dict(width=192, depth=12, heads=3, patch_size=4, pool="mean", pos="sinusoidal", pos_scale=1.0)


def untrained(config: dict, data) -> nn.Module:
    """A vit.ViT of the sizes in `config` for these images (images.ImageData), with the default init of seed 0."""
    from vit import ViT

    torch.manual_seed(0)
    return ViT(
        image_size=data.test_images.shape[-1], patch_size=config["patch_size"], num_classes=len(data.classes),
        dim=config["width"], depth=config["depth"], heads=config["heads"], pool=config["pool"],
        pos=config["pos"], pos_scale=config["pos_scale"],
    )  # fmt: skip


def plot_attention(runs: list[str], layer: int, data_set: str, data_dir: str, out: str) -> None:
    """Maps of the trained models of `runs` beside those that the first one's sizes start with."""
    from augment import normalize
    from images import load_images

    from mimetic import expected_attention, mimetic_init_

    trained = {run: checkpoint.read(Path(checkpoint_file(run))) for run in runs}
    first = next(iter(trained.values()), {})
    config = {**SIZES, **first.get("config", {})}
    if config.get("attention", "softmax") != "softmax" or config.get("image_size") or "vocabulary" in first:
        raise ValueError(f"{runs[0]}: maps are drawn of plain ViTs of train_cifar.py, without --image-size.")
    if not 0 <= layer < config["depth"]:
        raise ValueError(f"--layer is 0 to {config['depth'] - 1} here, not {layer}.")
    for run, saved in trained.items():
        other = [key for key in SIZES if saved.get("config", {}).get(key) != first.get("config", {}).get(key)]
        if other:
            raise ValueError(f"{run} has another {other[0]} than {runs[0]}; draw each in a picture of its own.")
    data = load_images(config.get("dataset", data_set), data_dir)
    images = normalize(data.test_images[:64], data.mean, data.std)
    default, mimetic = untrained(config, data), untrained(config, data)
    mimetic_init_(mimetic, generator=torch.Generator().manual_seed(0))
    head_dim = config["width"] // config["heads"]
    P = config["pos_scale"] * mimetic.pos_embed.detach()
    maps = {"expected": expected_attention(P, beta1=0.7, head_dim=head_dim)}
    maps |= {"default": mean_map(default, images, layer), "mimetic": mean_map(mimetic, images, layer)}
    pictures = list(maps.items())
    for run, saved in trained.items():
        model = untrained(config, data)
        checkpoint.load_weights(model, saved["model"], Path(run))
        pictures.append((f"trained: {Path(run).stem}", mean_map(model, images, layer)))
    figure, axes = subplots(1, len(pictures), 2.6)
    for axis, (title, map_) in zip(axes[0], pictures, strict=True):
        show_map(axis, map_, title)
    save(figure, out)


def plot_impulses(layer: int, data_set: str, data_dir: str, out: str) -> None:
    """A row an init; of each head of one layer its map of positions alone, the impulse of a 3x3 kernel nearest to that,
    and its mean map of 64 test images. Above a map, its error, 0 for the impulse and 1 for a uniform map."""
    from augment import normalize
    from images import load_images

    from mimetic import mimetic_init_
    from structured import impulse, map_error, nearest_impulse, pseudo_maps, structured_init_

    if not 0 <= layer < SIZES["depth"]:
        raise ValueError(f"--layer is 0 to {SIZES['depth'] - 1} here, not {layer}.")
    data = load_images(data_set, data_dir)
    images = normalize(data.test_images[:64], data.mean, data.std)
    models = {init: untrained(SIZES, data) for init in ("default", "mimetic", "structured")}
    P, grid = models["default"].pos_embed, models["default"].grid
    mimetic_init_(models["mimetic"], generator=torch.Generator().manual_seed(0))
    structured_init_(models["structured"], P, grid, generator=torch.Generator().manual_seed(0))
    figure, axes = subplots(3, 3 * SIZES["heads"], 1.4)
    for row, (init, model) in zip(axes, models.items(), strict=True):
        of_positions = list(pseudo_maps(model, P, grid).values())[layer]  # (heads, n, n)
        of_images = model.eval().attention_maps(images)[layer]  # (64, heads, n, n)
        offsets, errors = nearest_impulse(of_positions, grid)
        for h, offset in enumerate(offsets.tolist()):
            H = impulse(grid, tuple(offset))
            error = map_error(of_images[:, h], H).mean()
            show_map(row[3 * h], of_positions[h], f"positions: {errors[h]:.2f}")
            show_map(row[3 * h + 1], H, "impulse ({:+d}, {:+d})".format(*offset))
            show_map(row[3 * h + 2], of_images[:, h].mean(0), f"images: {error:.2f}")
        row[0].set_ylabel(init)
    save(figure, out)


# ---- curves


def read_curves(runs: list[str]) -> tuple[str, dict[str, dict[int, dict[int, float]]]]:
    """A score of harness.SCORES and init -> epoch -> seed -> its value, from folders and result files with curves."""
    scores, curves = set(), {}
    for run in map(Path, runs):
        if run.is_file():
            results = [r for r in harness.read_log(run) if isinstance(r, dict)]
            found = [(r["init"], r["seed"], r["curve"], r) for r in results if {"init", "seed", "curve"} <= r.keys()]
        else:
            found = []
            for log in sorted([*run.glob("log.jsonl"), *run.glob("*-seed*/log.jsonl")]):
                records = harness.read_log(log)
                init, _, seed = log.parent.name.rpartition("-seed")
                curve = harness.curve(records)
                if curve and not seed.isdigit():
                    raise ValueError(f"{log.parent} is not called INIT-seedK, as a training script calls its runs.")
                found += [(init, int(seed), curve, set().union(*records))] if curve else []
        if not found:
            raise ValueError(f"{run} holds no runs with a score after an epoch; give a training script's --out.")
        for init, seed, curve, keys in found:
            scores |= {score for score in harness.SCORES if score in keys}
            for epoch, value in curve:
                if curves.setdefault(init, {}).setdefault(epoch, {}).setdefault(seed, value) != value:
                    raise ValueError(
                        f"{run}: another run has {init}, seed {seed} too; draw each in a picture of its own."
                    )
    if len(scores) > 1:
        raise ValueError(f"these runs have several scores, {', '.join(sorted(scores))}; draw each in its own picture.")
    return min(scores, default="test_acc"), curves


def plot_curves(runs: list[str], out: str) -> None:
    score, curves = read_curves(runs)
    figure, axes = subplots(1, 1, 6.5, 3.2)
    styles = zip(
        ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7"] * 3, ["--", "-", ":", "-.", (0, (5, 1, 1, 1))] * 3
    )
    for (init, points), (colour, style) in zip(curves.items(), styles):
        epochs = sorted(points)
        values = [list(points[epoch].values()) for epoch in epochs]
        n = sorted({*map(len, values)})  # several where not all seeds were evaluated after each epoch
        label = f"{init} (n = {' to '.join(map(str, n[:: max(1, len(n) - 1)]))})"
        means = list(map(statistics.mean, values))
        axes[0][0].plot(epochs, means, color=colour, linestyle=style, marker=".", label=label)
        axes[0][0].fill_between(epochs, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.2, lw=0)
    axes[0][0].set(xlabel="epoch", ylabel=harness.SCORES[score])
    axes[0][0].legend(frameon=False)
    save(figure, out)


# ---- drawing


def subplots(rows: int, columns: int, width: float, height: float = 0.0):
    """A figure and its rows of axes, each so many inches (height 0: square). Raises ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install matplotlib.") from None
    matplotlib.use("Agg")  # draws into files, without a screen
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=(width * columns, (height or width) * rows + 0.3), squeeze=False, layout="constrained"
    )


def show(axis, matrix: Tensor, limit: float = 0.0) -> None:
    """Zero in the middle of the colours, which end at -limit and limit (0: nearly the largest entry)."""
    limit = limit or float(matrix.abs().flatten().kthvalue(math.ceil(0.999 * matrix.numel())).values)
    axis.imshow(matrix.numpy(), cmap="cividis", vmin=-limit, vmax=limit)
    axis.set(xticks=[], yticks=[])


def show_map(axis, A: Tensor, title: str) -> None:
    """An attention map (n, n) in logarithmic colours, 0 where attention is uniform, 1/n."""
    show(axis, (len(A) * A).clamp_min(1e-6).log(), limit=math.log(16))
    axis.set_title(title, fontsize=8)


def save(figure, out: str) -> None:
    figure.savefig(out, dpi=150)
    print(f"{out} written")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    weights = commands.add_parser("weights", help="weight products and a table of their diagonals")
    weights.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    weights.add_argument("--heads", type=int, default=0, help="heads a layer, where the file does not say")
    weights.add_argument("--corner", type=int, default=48, help="rows and columns of each matrix to draw [48]")
    attention = commands.add_parser("attention", help="expected and measured attention maps")
    attention.add_argument("runs", nargs="*", metavar="RUN", help="trained models of one size")
    impulses = commands.add_parser("impulses", help="initial maps beside the impulses of structured initialization")
    for command in (attention, impulses):
        command.add_argument("--layer", type=int, default=0)
        command.add_argument(
            "--dataset", default="shapes", help="images to measure on, where no checkpoint says [shapes]"
        )
        command.add_argument("--data-dir", default="data")
    curves = commands.add_parser("curves", help="the score against epoch, mean and range over seeds")
    curves.add_argument("runs", nargs="+", metavar="RUN")
    for command in (weights, attention, impulses, curves):
        command.add_argument("--out", default="", help="picture to write, .png or .svg; weights: empty, the table only")
    a = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if a.command == "weights" and a.corner < 1:
        parser.error(f"--corner is at least 1, not {a.corner}")
    try:
        if a.command == "weights":
            for number, source in enumerate(a.checkpoints):
                layers = attention_layers(load_model(source, a.heads), strict=False)
                if not layers:
                    raise ValueError(f"{source} holds no self-attention layer of a known layout.")
                print(f"{source}\n\n{weights_table(layers)}\n")
                if a.out:
                    out = Path(a.out)
                    plot_weights(layers, str(out.with_stem(out.stem + f"-{number}") if number else out), a.corner)
        elif a.command == "attention":
            plot_attention(a.runs, a.layer, a.dataset, a.data_dir, a.out or "attention.png")
        elif a.command == "impulses":
            plot_impulses(a.layer, a.dataset, a.data_dir, a.out or "impulses.png")
        else:
            plot_curves(a.runs, a.out or "curves.png")
    except (ValueError, OSError, ImportError) as error:
        ranks.fail(str(error))


if __name__ == "__main__":
    harness.run(main)
