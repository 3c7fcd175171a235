"""The pictures: what attention weights look like, what maps a model starts with, how accuracy grows.

python figures.py weights CHECKPOINT...     W_Q W_K^T of each head and W_V W_proj of each layer, and a table of them
python figures.py attention [RUN...]        the expected map beside the mean maps of default, mimetic, trained models
python figures.py impulses                  the maps that heads start with, beside the impulses of structured.py
python figures.py stream RUN|INIT...        the scale of the residual stream, and cosine with the embedding, by layer
python figures.py curves RUN...             the score against epoch (images: test accuracy; text: validation)

A CHECKPOINT is a file of ours (or the folder of its run), a torch or safetensors state dict, or timm:NAME or hf:NAME,
a pretrained model of those libraries. A RUN of `attention` is one such folder of ours, of `curves` a training script's
--out, or a results/*.jsonl with curves. `stream` takes a RUN of train_cifar.py, or the name of an init for an untrained
model, in quotes with flags of train_cifar.py behind it ("mimetic --beta2 0.2"); --flags are for all. Pictures go to
--out (.png or .svg) and need matplotlib; tables do not. Light is positive (in maps: more than uniform), dark negative,
in colours whose lightness alone tells the order.
"""

import argparse
import math
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # under PYTHONSAFEPATH as well

import torch
from torch import Tensor

from inits import VISION_INITS
from layouts import AttentionView, attention_layers
from measures import (
    SIZES,
    build_untrained,
    checkpoint_file,
    load_model,
    mean_map,
    products,
    read_curves,
    stream_of,
    stream_table,
    weights_table,
)
from training import checkpoint, ranks, records
from training.start import run_script

# ---- weights


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


def plot_attention(runs: list[str], layer: int, data_set: str, data_dir: str, out: str) -> None:
    """Maps of the trained models of `runs` beside those that the first one's sizes start with."""
    from inputs.augment import normalize
    from inputs.images import load_images
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
    default, mimetic = build_untrained(config, data), build_untrained(config, data)
    mimetic_init_(mimetic, generator=torch.Generator().manual_seed(0))
    head_dim = config["width"] // config["heads"]
    P = config["pos_scale"] * mimetic.pos_embed.detach()
    maps = {"expected": expected_attention(P, beta1=0.7, head_dim=head_dim)}
    maps |= {"default": mean_map(default, images, layer), "mimetic": mean_map(mimetic, images, layer)}
    pictures = list(maps.items())
    for run, saved in trained.items():
        model = build_untrained(config, data)
        checkpoint.load_weights(model, saved["model"], Path(run))
        pictures.append((f"trained: {Path(run).stem}", mean_map(model, images, layer)))
    figure, axes = subplots(1, len(pictures), 2.6)
    for axis, (title, map_) in zip(axes[0], pictures, strict=True):
        show_map(axis, map_, title)
    save(figure, out)


def plot_impulses(layer: int, data_set: str, data_dir: str, out: str) -> None:
    """A row an init; of each head of one layer its map of positions alone, the impulse of a 3x3 kernel nearest to that,
    and its mean map of 64 test images. Above a map, its error, 0 for the impulse and 1 for a uniform map."""
    from inputs.augment import normalize
    from inputs.images import load_images
    from mimetic import mimetic_init_
    from structured import impulse, map_error, nearest_impulse, pseudo_maps, structured_init_

    if not 0 <= layer < SIZES["depth"]:
        raise ValueError(f"--layer is 0 to {SIZES['depth'] - 1} here, not {layer}.")
    data = load_images(data_set, data_dir)
    images = normalize(data.test_images[:64], data.mean, data.std)
    models = {init: build_untrained(SIZES, data) for init in ("default", "mimetic", "structured")}
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


# ---- the residual stream


STYLES = list(
    zip(["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7"] * 3, ["--", "-", ":", "-.", (0, (5, 1, 1, 1))] * 3)
)


def plot_stream(sources: list[str], flags: list[str], out: str) -> None:
    """Scale and cosine of each model against layers; crosses are what the recursion predicts for an untrained one."""
    streams = {source: stream_of(source, flags) for source in sources}
    print(stream_table({source: measured for source, (measured, _) in streams.items()}))
    figure, axes = subplots(1, 2, 4.2, 3.2)
    for (source, (measured, predicted)), (colour, style) in zip(streams.items(), STYLES):
        for axis, key in zip(axes[0], ("scale", "cosine")):
            axis.plot(measured[key], color=colour, linestyle=style, label=source)
            if predicted:
                axis.plot(predicted[key], color=colour, linestyle="none", marker="x", markersize=4)
    axes[0][0].set(xlabel="layers before", ylabel="scale of the centred stream", ylim=(0, None))
    axes[0][1].set(xlabel="layers before", ylabel="cosine with the embedding")
    axes[0][0].legend(frameon=False, fontsize=7)
    save(figure, out)


# ---- curves


def plot_curves(runs: list[str], out: str) -> None:
    score, curves = read_curves(runs)
    figure, axes = subplots(1, 1, 6.5, 3.2)
    for (init, points), (colour, style) in zip(curves.items(), STYLES):
        epochs = sorted(points)
        values = [list(points[epoch].values()) for epoch in epochs]
        n = sorted({*map(len, values)})  # several where not all seeds were evaluated after each epoch
        label = f"{init} (n = {' to '.join(map(str, n[:: max(1, len(n) - 1)]))})"
        means = list(map(statistics.mean, values))
        axes[0][0].plot(epochs, means, color=colour, linestyle=style, marker=".", label=label)
        axes[0][0].fill_between(epochs, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.2, lw=0)
    axes[0][0].set(xlabel="epoch", ylabel=records.SCORES[score][0])
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
    stream = commands.add_parser("stream", help="scale of the residual stream and cosine with the embedding, by layer")
    stream.add_argument("sources", nargs="+", metavar="RUN|INIT", help=f"a run, or one of {', '.join(VISION_INITS)}")
    stream.add_argument("--flags", default="", help="of train_cifar.py, for all: '--width 96 --data-dir /data'")
    for command in (attention, impulses):
        command.add_argument("--layer", type=int, default=0)
        command.add_argument(
            "--dataset", default="shapes", help="images to measure on, where no checkpoint says [shapes]"
        )
        command.add_argument("--data-dir", default="data")
    curves = commands.add_parser("curves", help="the score against epoch, mean and range over seeds")
    curves.add_argument("runs", nargs="+", metavar="RUN")
    for command in (weights, attention, impulses, stream, curves):
        command.add_argument("--out", default="", help="picture to write, .png or .svg; weights: empty, the table only")
    a = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if a.command == "weights" and a.corner < 1:
        parser.error(f"--corner is at least 1, not {a.corner}")
    try:
        if a.command == "weights":
            for number, source in enumerate(a.checkpoints):
                model = load_model(source, a.heads)
                layers = attention_layers(model, strict=False) or attention_layers(model)  # which says what is wrong
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
        elif a.command == "stream":
            plot_stream(a.sources, shlex.split(a.flags), a.out or "stream.png")
        else:
            plot_curves(a.runs, a.out or "curves.png")
    except (ValueError, OSError, ImportError) as error:
        ranks.fail(str(error))


if __name__ == "__main__":
    run_script(main)
