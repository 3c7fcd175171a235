"""The paper's tables and ours: the runs behind each row, the paper's numbers, and how a table is written.

reproduce.py runs them.
"""

import math
from typing import NamedTuple

from training import records


class Row(NamedTuple):
    label: str
    flags: str  # for the script, after those of the table
    paper: dict  # the paper's number for each init; None if it has none
    small: str = ""  # at the cpu scale, flags after these


class Table(NamedTuple):
    about: str
    script: str
    metric: str  # a key of result.json
    full: str  # flags of every row at the full scale
    cpu: str  # at the cpu scale
    rows: list[Row]


def pair(default: float | None, mimetic: float | None) -> dict:
    return dict(default=default, mimetic=mimetic)


SMALL = "--limit 10000 --augment crop --batch-size 128 --lr 1e-3"
SMALL_IMAGES = f"{SMALL} --width 96 --depth 6 --epochs 8 --eval-every 8"  # the README's first small setting
QUICK = (  # minutes per run on a CPU core
    "--limit 10000 --augment crop --batch-size 100 --lr 1e-3 --width 64 --depth 4 --heads 2 --patch-size 4 --epochs 10 "
    "--eval-every 2 --precision fp32"
)
SIZES = [
    (96, 6, 3, 84.75, 87.90), (96, 12, 3, 84.75, 88.84), (192, 6, 3, 85.85, 89.68), (192, 12, 1, 85.25, 89.88),
    (192, 12, 3, 86.07, 90.78), (192, 12, 6, 86.74, 91.38), (192, 24, 3, 86.36, 91.85), (384, 12, 3, 86.26, 91.56),
    (384, 12, 6, 84.40, 92.17), (384, 12, 12, 86.39, 92.30),
]  # fmt: skip
RESOLUTIONS = [
    (2, 32, 85.79, 90.46), (4, 64, 90.24, 92.38), (8, 128, 90.03, 92.49), (16, 256, 88.85, 92.74),
    (4, 32, 88.43, 90.47), (8, 64, 88.00, 90.96), (16, 128, 87.90, 91.90), (32, 256, 86.27, 90.15),
]  # fmt: skip
MIMETIC = "--init mimetic"
SMALL_TEXT = "--width 192 --depth 6 --heads 6 --context 256 --batch-size 32 --steps 600 --warmup 0.1667"
EITHER = pair(None, None)
WORDS = "--dataset ptb-word"
PART = "--text data/ptb/ptb.valid.txt"
SHRINKING = [(1, 0.2), (1, 0.1), (2, 0.4), (2, 0.2), (2, 0.1)]  # γ and α₂ = β₂; the paper has (1, 0.4)
DATA = [(2_500, 2000, 40), (5_000, 1000, 20), (10_000, 500, 10), (20_000, 250, 5), (50_000, 100, 2)]  # images, epochs
SCALES_OF_POSITIONS = [(0.5, None), (1, 90.8), (2, 91.4), (4, None)]  # the first and last are not in the paper

TABLES = {
    "sizes": Table(
        "CIFAR-10, width, depth, heads (cpu: width and depth halved, 5 000 images, 5 epochs)",
        "train_cifar.py", "test_acc", "",
        "--limit 5000 --augment crop --batch-size 64 --lr 1e-3 --epochs 5 --eval-every 5",
        [
            Row(f"width {w}, depth {d}, heads {h}", f"--width {w} --depth {d} --heads {h}", pair(a, b),
                f"--width {w // 2} --depth {d // 2}")
            for w, d, h, a, b in SIZES
        ],
    ),
    "depth": Table(
        "CIFAR-10, does the shrinking of the residual stream slow a deep model down? (cpu: the sizes' model and "
        "recipe, but for patches of 4)", "train_cifar.py", "test_acc", "",
        "--limit 5000 --augment crop --batch-size 64 --lr 1e-3 --epochs 5 --eval-every 5 --patch-size 4 "
        "--precision fp32",
        [
            row
            for d, paper in ((24, pair(86.36, 91.85)), (12, pair(86.07, 90.78)))
            for row in (
                Row(f"depth {d}, twice the learning rate", f"--depth {d} --lr 6e-3", dict(default=None),
                    f"--width 96 --depth {d // 2} --lr 2e-3"),
                Row(f"depth {d}", f"--depth {d}", paper, f"--width 96 --depth {d // 2}"),
                *(
                    Row(f"depth {d}, γ = {g}, α₂ = β₂ = {b}", f"--depth {d} --pos-scale {g} --alpha2 {b} --beta2 {b}",
                        dict(mimetic=None), f"--width 96 --depth {d // 2}")
                    for g, b in SHRINKING
                ),
                Row(f"depth {d}, three times as long", f"--depth {d} --epochs 300", EITHER,
                    f"--width 96 --depth {d // 2} --epochs 15 --eval-every 3"),
            )
        ],
    ),
    "ablations": Table(
        "CIFAR-10, what each part contributes (the paper says 3 heads; its full score is that of 6)", "train_cifar.py",
        "test_acc", "--heads 6", f"{SMALL_IMAGES} --heads 3",
        [
            Row("sinusoidal positions, default init", "--init default", dict(default=87.39)),
            Row("full", MIMETIC, dict(mimetic=91.38)),
            Row("learned positions", f"{MIMETIC} --pos learned", dict(mimetic=88.70)),
            Row("W_Q, W_K only", f"{MIMETIC} --parts qk", dict(mimetic=89.17)),
            Row("W_V, W_proj only", f"{MIMETIC} --parts vp", dict(mimetic=87.23)),
            Row("positive diagonal", f"{MIMETIC} --beta2 -0.4", dict(mimetic=89.65)),
            Row("control: scaled", "--init scaled", dict(scaled=None)),
            Row("control: orthogonal", "--init orthogonal", dict(orthogonal=None)),
            Row("control: conditioned", "--init conditioned", dict(conditioned=None)),
            Row("full, and the MLPs", "--init mimetic-mlp", {"mimetic-mlp": None}),
            Row("structured", "--init structured", dict(structured=None)),
            Row("structured, closed form", "--init structured --method closed_form", dict(structured=None)),
            Row("GPSA, 8 heads", "--init default --attention gpsa --heads 8", dict(default=90.03)),
            Row("GPSA, 4 heads", "--init default --attention gpsa --heads 4", dict(default=90.83)),
            Row("GPSA, 4 heads, W_V, W_proj mimetic", f"{MIMETIC} --attention gpsa --heads 4 --parts vp",
                dict(mimetic=91.21)),
        ],
    ),
    "transfer": Table(
        "CIFAR-10 from ImageNet-pretrained attention and positions (--flags '--transfer-from FILE', a ViT-Tiny's)",
        "train_cifar.py", "test_acc", "--transfer-from deit_tiny_patch16_224.pth",
        f"{SMALL} --epochs 8 --eval-every 8 --transfer-from deit_tiny_patch16_224.pth",
        [Row("ImageNet-pretrained", "--init transfer --pos learned", dict(transfer=91.15))],
    ),
    "convolution": Table(
        "CIFAR-10, convolution mixed into attention", "train_cifar.py", "test_acc", "--init default",
        f"{SMALL_IMAGES} --init default",
        [
            Row("vanilla", "", dict(default=88.1)),
            Row("inside the softmax", "--attention conv-inside", dict(default=87.5)),
            Row("beside the softmax", "--attention conv-outside", dict(default=89.9)),
            Row("softmax of it beside", "--attention conv-softmax", dict(default=75.0)),
        ],
    ),
    "pos-scale": Table(
        "CIFAR-10, scale of the positions (the paper's numbers are read off a figure; cpu: width 64, depth 4, patch 4)",
        "train_cifar.py", "test_acc", MIMETIC, f"{QUICK} {MIMETIC}",
        [Row(f"γ = {g}", f"--pos-scale {g}", dict(mimetic=p)) for g, p in SCALES_OF_POSITIONS],
    ),
    "resolutions": Table(
        "CIFAR-10 upsampled: patch @ image size (cpu: width 64, depth 4, 3 epochs)", "train_cifar.py", "test_acc", "",
        f"{QUICK} --epochs 3 --eval-every 3",
        [Row(f"{p} @ {s}", f"--patch-size {p} --image-size {s}", pair(a, b)) for p, s, a, b in RESOLUTIONS],
    ),
    "data": Table(
        "CIFAR-10, does more data mean less gain? Class-balanced subsets, the same number of steps (cpu: 1 000 steps "
        "of 100 images, width 64, depth 4, patch 4)", "train_cifar.py", "test_acc", "--eval-every 100", QUICK,
        [
            Row(f"{n} images", f"--limit {n} --epochs {full}", EITHER,
                f"--epochs {cpu} --eval-every {max(1, cpu // 5)}")
            for n, full, cpu in DATA
        ],
    ),
    "neighbours": Table(
        "CIFAR-10, the method beside related ones and controls (cpu: width 64, depth 4, patch 4)", "train_cifar.py",
        "test_acc", "", QUICK,
        [
            Row("default, mimetic", "", pair(86.07, 90.78)),
            *(
                Row(f"mimetic-mlp, mean = {mean}", f"--mlp-mean {mean}", {"mimetic-mlp": None})
                for mean in (0.02, -0.02)
            ),
            Row("conditioned", "", dict(conditioned=None)),
            Row("conditioned W_Q, W_K only", "--parts qk", dict(conditioned=None)),
            Row("scaled", "", dict(scaled=None)),
            Row("orthogonal", "", dict(orthogonal=None)),
            Row("structured", "", dict(structured=None)),
        ],
    ),
    "datasets": Table(
        "other data sets", "train_cifar.py", "test_acc", "", SMALL_IMAGES,
        [
            Row("Tiny ImageNet", "--dataset tiny-imagenet", pair(45.24, 50.87)),
            Row("CIFAR-100", "--dataset cifar100", pair(60.94, 67.33)),
            Row("SVHN", "--dataset svhn", pair(96.40, 96.79)),
        ],
    ),
    "imagenet": Table(
        "ImageNet-1k (--flags '--data-dir ...'; several GPUs: run the commands of --dry-run under torchrun)",
        "train_imagenet.py", "test_acc", "",
        "--image-size 64 --patch-size 8 --width 96 --depth 6 --epochs 2 --warmup-epochs 0.2",
        [
            Row("ViT-Tiny, resnet pipeline, batch 640", "--batch-size 640", pair(70.28, 73.08)),
            Row("ViT-Tiny, resnet pipeline, batch 1024", "--batch-size 1024", pair(67.80, 71.92)),
            Row("ViT-Tiny, DeiT pipeline", "--pipeline deit", pair(72.08, 72.65)),
            Row("ViT-Small, DeiT pipeline", "--pipeline deit --width 384 --heads 6", pair(79.83, 80.36),
                "--width 192"),
        ],
    ),
    "language": Table(
        "Penn Treebank, bits per character (cpu: 600 steps of a smaller model)", "train_lm.py", "test_bpc", "",
        SMALL_TEXT,
        [Row("characters", "", pair(1.233, 1.210))],
    ),
    "signs": Table(
        "Penn Treebank by characters: a negative diagonal of W_V W_proj (β₂ > 0) or a positive one?", "train_lm.py",
        "test_bpc", "--init mimetic", f"{SMALL_TEXT} --init mimetic",
        [Row(f"β₂ = {b}", f"--beta2 {b}", dict(mimetic=None)) for b in (0.2, 0.0, -0.2)],
    ),
    "text-choices": Table(
        "Penn Treebank by characters: what the paper leaves open, one choice at a time (β₁I of rank k: which axes?)",
        "train_lm.py", "test_bpc", "", SMALL_TEXT,
        [
            Row("all as we chose", "", EITHER),
            Row("each head axes of its own", "--init own-axes", {"own-axes": None}),
            Row("each head a random basis", "--init random-axes", {"random-axes": None}),
            Row("positions, γ = 0.5", "--pos-scale 0.5", EITHER),
            Row("positions, γ = 2", "--pos-scale 2", EITHER),
            Row("embeddings as drawn, not times √width", "--embed-scale 1", EITHER),
            Row("embeddings times 50", "--embed-scale 50", EITHER),
        ],
    ),
    "dropout": Table(
        "Penn Treebank by characters, with a model that overfits: trained on nine tenths of ptb.valid.txt, 359 804 "
        "characters (the rest, in two halves, validates and tests)", "train_lm.py", "valid_bpc", PART,
        f"{PART} --width 128 --depth 4 --heads 4 --context 128 --epochs 15 --precision fp32",
        [Row(f"dropout {p}", f"--dropout {p}", EITHER) for p in (0.0, 0.1, 0.2)],
    ),
    "words": Table(
        "Penn Treebank by words, perplexity", "train_lm.py", "test_ppl", WORDS,
        f"{WORDS} --width 192 --depth 6 --heads 6 --context 128 --batch-size 32 --steps 600",
        [Row("words", "", pair(84.84, 82.34))],
    ),
    "wikitext": Table(
        "WikiText-103, perplexity", "train_lm.py", "test_ppl",
        "--dataset wikitext-103",
        "--dataset wikitext-103 --width 80 --depth 4 --heads 4 --context 128 --steps 300",
        [Row("WikiText-103", "", pair(28.87, 28.21))],
    ),
}  # fmt: skip


# ---- as Markdown


def has_paper(table: str) -> bool:
    """Whether the paper has numbers for this table."""
    return any(paper is not None for row in TABLES[table].rows for paper in row.paper.values())


def markdown(table: str, scales: dict[str, list[dict]], only_run: bool = False) -> str:
    """A row per init of each row of the table: for each scale, mean ± deviation over seeds and n; the paper's number.

    scales: title -> results, each with the `row` it belongs to. A table that only we have has no column for the paper.
    If there are curves, a last column says when a run had caught up with the default of its row, or of the nearest row
    above that has one. only_run: leave out rows without a run.
    """
    rows, metric, papers = TABLES[table].rows, TABLES[table].metric, has_paper(table)
    titles = [*(f"{scale} | n" for scale in scales), *["the paper"] * papers]
    lines = [f"| | init | {' | '.join(titles)} |", "|---|---" + "|---|---" * len(scales) + "|---" * papers + "|"]
    paces, defaults = [], []  # one per line; the default's runs above it, at each scale
    for label, init, paper in ((row.label, init, paper) for row in rows for init, paper in row.paper.items()):
        runs = [[r for r in results if (r["row"], r["init"]) == (label, init)] for results in scales.values()]
        if init == "default":
            defaults = runs
        if only_run and not any(runs):
            continue
        cells = [label, init]
        for values in ([r[metric] for r in found] for found in runs):
            shown = records.mean_and_deviation(values, records.decimals(metric)) if values else "not run yet"
            cells += [shown, str(len(values))]
        cells += ["" if paper is None else str(paper)] * papers
        lines.append("| " + " | ".join(cells) + " |")
        told = [catch_up(*pair) for pair in zip(runs, defaults) if init != "default"]
        paces.append(next(filter(None, reversed(told)), ""))
    if any(paces):
        lines = append_column(lines, paces)
    return "\n".join(lines)


TRAIN_IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257, "tiny-imagenet": 100_000, "shapes": 10_000}


def catch_up(results: list[dict], default: list[dict]) -> str:
    """ "5, 6 of 8 epochs (395 to 474 steps)": when each run of `results`, all of one init, was first
    evaluated at the final score of the run of its seed in `default`, or better; "never" if none. Empty without curves.
    """
    final = {r["seed"]: r["curve"][-1][1] for r in default if r.get("curve")}
    found, steps = [], []
    for r in results:
        if len(r.get("curve") or []) < 2 or r["seed"] not in final:
            continue
        reaches = float.__ge__ if "test_acc" in r else float.__le__
        epoch = next((e for e, score in r["curve"] if reaches(float(score), float(final[r["seed"]]))), None)
        found.append("never" if epoch is None else f"{epoch:g}")
        if epoch is not None:
            steps.append(min(round(epoch * steps_per_epoch(r)), r.get("steps", math.inf)))
    if not found:
        return ""
    if not steps:
        return f"not within {results[0]['curve'][-1][0]:g} epochs"
    span = " to ".join(f"{n:,}" for n in sorted({min(steps), max(steps)}))
    return f"{', '.join(found)} of {results[0]['curve'][-1][0]:g} epochs ({span} steps)"


def steps_per_epoch(result: dict) -> float:
    if "steps" in result:  # older results on images lack it
        return result["steps"] / result["epochs"]
    config = result["config"]
    return math.ceil((config["limit"] or TRAIN_IMAGES[config["dataset"]]) / config["batch_size"])


def append_column(lines: list[str], cells: list[str]) -> list[str]:
    """The lines of a Markdown table with one more column."""
    heads = [f"{lines[0]} reaches the default's final score after |", f"{lines[1]}---|"]
    return heads + [f"{line} {cell} |" for line, cell in zip(lines[2:], cells, strict=True)]


def summary(results: list[dict], metrics: dict[str, str]) -> str:
    """records.summary_table and, if there are curves, a column that says when an init caught up with the default."""
    lines = records.summary_table(results, metrics).splitlines()
    default = [r for r in results if r["init"] == "default"]
    inits = [line.split("|")[1].strip() for line in lines[2:]]
    cells = [
        catch_up([r for r in results if r["init"] == init], default) if init != "default" else "" for init in inits
    ]
    if any(cells):
        lines = append_column(lines, cells)
    return "\n".join(lines)
