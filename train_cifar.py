"""Train a Vision Transformer on CIFAR-10, default against mimetic initialization.

python train_cifar.py --demo                      minutes on two CPU cores: the effect in small
python train_cifar.py --out runs/paper            the paper's recipe (one GPU, 100 epochs)
python train_cifar.py --seeds 0,1,2 --init default,mimetic --limit 10000 --augment crop --batch-size 128 --lr 1e-3 \\
    --width 96 --depth 6 --epochs 8 --out runs/small

What the paper does not say is our choice: the settings marked "(ours)", and these. Training images are shifted by up to
4 pixels and mirrored, then RandAugment, whose magnitude has a deviation of 0.5 for each operation of each image, then
Cutout. AdamW decays all parameters. Attention has no biases. The patch embedding has torch's default initialization.
Positions are fixed sinusoids, half of the width for the row and half for the column, temperature 10 000.
"""

import dataclasses
import math
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import harness
from augment import cutout, normalize, rand_augment, random_crop, random_flip
from harness import flag
from images import DATASETS, ImageData, balanced_subset, is_available, load_images
from inits import INITS
from vit import ViT


@dataclass
class Settings:
    # compare
    init: tuple = flag(("default", "mimetic"), "initializations to compare, the baseline first")
    seeds: tuple = flag((0,), "one run a seed and init; a seed fixes weights, data order and augmentation")
    # data
    dataset: str = flag("cifar10", "what to train on", tuple(DATASETS))
    data_dir: str = flag("data", "where the data sets lie, or go")
    limit: int = flag(0, "train on a class-balanced subset of so many images; 0: all", low=0)
    holdout: int = flag(
        0, "for tuning: hold out so many training images and report on them, not on the test set", low=0
    )
    # model: ViT-Tiny (paper)
    width: int = flag(192, "token width (paper)", low=1)
    depth: int = flag(12, "layers (paper)", low=1)
    heads: int = flag(3, "heads a layer (paper)", low=1)
    patch_size: int = flag(2, "pixels (paper)", low=1)
    pos: str = flag("sinusoidal", "position embeddings: fixed, or random and learned", ("sinusoidal", "learned"))
    pos_scale: float = flag(1.0, "their scale, the paper's gamma")
    pool: str = flag("mean", "mean of all tokens or a class token (ours: mean, better and faster)", ("mean", "cls"))
    # mimetic initialization (paper)
    alpha1: float = flag(0.7, "W_Q W_K^T = alpha1 Z + beta1 I")
    beta1: float = flag(0.7, "")
    alpha2: float = flag(0.4, "W_V W_proj = alpha2 Z - beta2 I")
    beta2: float = flag(0.4, "")
    parts: str = flag("both", "which of the two products to initialize", ("both", "qk", "vp"))
    # structured initialization (arXiv 2404.01139, 2505.19985)
    kernel_size: int = flag(3, "structured: side of the kernel whose impulses heads draw", (3, 5))
    method: str = flag("gradient", "structured: how W_Q, W_K are solved for", ("gradient", "closed_form"))
    qk_norm: float = flag(0.0, "structured: Frobenius norm of a head's W_Q, and W_K; 0: the method's own", low=0)
    # recipe (paper)
    epochs: int = flag(100, "(paper)", low=1)
    batch_size: int = flag(512, "images a step (paper)", low=1)
    lr: float = flag(3e-3, "peak learning rate of AdamW (paper)", low=0)
    weight_decay: float = flag(0.01, "(paper)", low=0)
    augment: str = flag("randaugment", "randaugment: crop, flip, RandAugment, Cutout", ("randaugment", "crop", "none"))
    # recipe: what the paper leaves open, our choices
    warmup: float = flag(0.1, "share of the steps with a linear warm-up; a cosine to 0 follows (ours)", low=0, high=1)
    clip: float = flag(1.0, "clip the gradient's norm; 0: never (ours)", low=0)
    ra_ops: int = flag(2, "RandAugment: operations an image (ours: the usual N = 2)", low=0)
    ra_magnitude: float = flag(9.0, "RandAugment: magnitude of 30 (ours: the usual M = 9)", low=0, high=30)
    cutout: int = flag(16, "Cutout: side of the square in pixels (ours: its authors' for CIFAR-10)", low=0)
    # machine
    device: str = flag("auto", "auto, cpu, cuda, cuda:1, ...")
    precision: str = flag("auto", "of matrix products; auto: bf16 where the hardware has it", ("auto", "bf16", "fp32"))
    micro_batch: int = flag(
        0, "images a forward pass, gradients added up; 0: 64 on a CPU (its caches), all on a GPU", low=0
    )
    eval_every: int = flag(1, "epochs from one evaluation to the next; the last epoch is always evaluated", low=1)
    out: str = flag("", "folder for logs and results; empty: write nothing")


# --demo, by what there is to train on: small patches, where the method shows; lr tuned for the *default* init.
DEMO = dict(width=64, depth=4, heads=2, batch_size=64, augment="crop")
DEMOS = {
    "cifar10": dict(DEMO, patch_size=2, limit=5000, epochs=5, lr=2e-3, eval_every=5),
    "shapes": dict(DEMO, patch_size=4, epochs=10, lr=1e-3, eval_every=2, dataset="shapes"),
}


def load_data(s: Settings) -> ImageData:
    """The data set, cut down by --limit, with --holdout images of train in the place of the test set."""
    data = load_images(s.dataset, s.data_dir)
    if s.holdout:
        if s.holdout >= len(data.train_labels):
            raise ValueError(f"--holdout {s.holdout} leaves none of the {len(data.train_labels)} images to train on.")
        held = balanced_subset(data.train_labels, s.holdout)
        kept = torch.ones(len(data.train_labels), dtype=torch.bool)
        kept[held] = False
        data = data._replace(
            test_images=data.train_images[held], test_labels=data.train_labels[held],
            train_images=data.train_images[kept], train_labels=data.train_labels[kept],
        )  # fmt: skip
    if s.limit:
        subset = balanced_subset(data.train_labels, s.limit)
        data = data._replace(train_images=data.train_images[subset], train_labels=data.train_labels[subset])
    return data


def build(s: Settings, init: str, seed: int, data: ImageData, device: torch.device) -> ViT:
    """The model with its default weights, which depend on the seed alone, and then the init on top."""
    torch.manual_seed(1000 * seed)  # a stream apart from those of harness.generator
    _, channels, size, _ = data.train_images.shape
    model = ViT(
        image_size=size, patch_size=s.patch_size, in_channels=channels, num_classes=len(data.classes), dim=s.width,
        depth=s.depth, heads=s.heads, pos=s.pos, pos_scale=s.pos_scale, pool=s.pool,
    )  # fmt: skip
    INITS[init](model, s, harness.generator(seed, stream=1))
    return model.to(device)


def augmented(images: torch.Tensor, s: Settings, data: ImageData, draws: torch.Generator) -> torch.Tensor:
    """uint8 (B, 3, S, S) to normalized float of the same shape; the draws do not depend on the pixels."""
    if s.augment != "none":
        images = random_flip(random_crop(images, generator=draws), generator=draws)
    if s.augment == "randaugment":
        images = rand_augment(images, s.ra_ops, s.ra_magnitude, generator=draws)
        return cutout(normalize(images, data.mean, data.std), s.cutout, generator=draws)
    return normalize(images, data.mean, data.std)


@torch.no_grad()
def evaluate(model: ViT, s: Settings, data: ImageData, precision: torch.dtype, batch: int) -> tuple[float, float]:
    """Test accuracy in percent, and mean cross-entropy in nats."""
    model.eval()
    correct, loss = 0, 0.0
    for images, labels in zip(data.test_images.split(batch), data.test_labels.split(batch), strict=True):
        with harness.autocast(images.device, precision):
            logits = model(normalize(images, data.mean, data.std)).float()
        correct += (logits.argmax(-1) == labels).sum()
        loss += F.cross_entropy(logits, labels, reduction="sum")
    model.train()
    return 100 * float(correct) / len(data.test_labels), float(loss) / len(data.test_labels)


def backward(
    model: ViT, images: torch.Tensor, labels: torch.Tensor, micro: int, precision: torch.dtype
) -> torch.Tensor:
    """Gradients of the mean cross-entropy over the batch, added up `micro` images at a time; returns that mean."""
    mean = torch.zeros((), device=images.device)
    for x, y in zip(images.split(micro), labels.split(micro), strict=True):
        with harness.autocast(images.device, precision):
            loss = F.cross_entropy(model(x).float(), y, reduction="sum") / len(labels)
        loss.backward()
        mean += loss.detach()
    return mean


def train(s: Settings, init: str, seed: int, data: ImageData, device: torch.device, precision: torch.dtype) -> dict:
    """One run: `s.epochs` over `data` (on the device already). Returns what result.json holds."""
    name, folder = f"{init}-seed{seed}", harness.run_folder(s.out, init, seed)
    model = build(s, init, seed, data, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=s.weight_decay, fused=True)
    draws = harness.generator(seed, stream=2)  # data order and augmentation: the same for every init
    n, micro = len(data.train_labels), s.micro_batch or (64 if device.type == "cpu" else s.batch_size)
    steps, step, done = s.epochs * -(-n // s.batch_size), 0, 0
    training_seconds, started = 0.0, time.time()
    facts = dict(parameters=sum(p.numel() for p in model.parameters()), config=dataclasses.asdict(s))
    facts["environment"] = harness.environment(device, precision)
    if folder:
        harness.append_record(folder / "log.jsonl", dict(run=name, **facts))

    for epoch in range(1, s.epochs + 1):
        epoch_started, total_loss = time.time(), torch.zeros((), device=device)
        for batch in torch.randperm(n, generator=draws).to(device).split(s.batch_size):
            images, labels = augmented(data.train_images[batch], s, data, draws), data.train_labels[batch]
            lr = harness.learning_rate(step, steps, s.lr, s.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = backward(model, images, labels, micro, precision)
            if s.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            optimizer.step()
            optimizer.zero_grad()
            step, done, total_loss = step + 1, done + len(batch), total_loss + loss * len(batch)
            harness.live(f"{name}  epoch {epoch}/{s.epochs}", step, steps, loss, done, started, "images")
        train_loss = float(total_loss) / n  # waits for the device, so the clock is read after it
        if not math.isfinite(train_loss):
            harness.fail(f"{name}: the loss is {train_loss} in epoch {epoch}; lower --lr, or keep --clip on.")
        training_seconds += time.time() - epoch_started
        speed, seconds = done / training_seconds, round(time.time() - started, 1)
        record = dict(epoch=epoch, step=step, lr=lr, train_loss=train_loss, seconds=seconds)
        report = f"{name}  epoch {epoch}/{s.epochs}  loss {train_loss:.3f}  {speed:.0f} images/s"
        if epoch % s.eval_every == 0 or epoch == s.epochs:
            record["test_acc"], record["test_loss"] = evaluate(model, s, data, precision, max(micro, 128))
            report += f"  accuracy {record['test_acc']:.2f} %"
        harness.line(report)
        if folder:
            harness.append_record(folder / "log.jsonl", record)

    result = dict(
        dataset=s.dataset, init=init, seed=seed, test_acc=record["test_acc"], test_loss=record["test_loss"],
        train_loss=train_loss, epochs=s.epochs, images_per_second=round(speed, 1),
        seconds=round(time.time() - started, 1), **facts,
    )  # fmt: skip
    if folder:
        harness.write_json(folder / "result.json", result)
    return result


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    s = harness.parse_settings(Settings, argv, __doc__, DEMOS["cifar10"])
    if s.dataset == "shapes" or (
        "--demo" in argv and s.dataset == "cifar10" and not is_available("cifar10", s.data_dir)
    ):
        s = harness.parse_settings(Settings, argv, __doc__, DEMOS["shapes"])
    try:
        harness.check_runs(s.init, s.seeds, INITS)
        device = harness.pick_device(s.device)
        precision = harness.pick_precision(s.precision, device)
        data = load_data(s)
        build(s, "default", 0, data, device)  # sizes that do not fit are found before any run begins
        harness.claim_folders(s)
    except (ValueError, OSError) as error:
        harness.fail(str(error))
    data = data._replace(**{k: v.to(device) for k, v in data._asdict().items() if isinstance(v, torch.Tensor)})
    print(f"{s.dataset}: {len(data.train_labels)} training images, {len(data.test_labels)} to evaluate; ", end="")
    print(f"{device}, {str(precision).removeprefix('torch.')}")
    results, metrics = [], {"test_acc": "held-out accuracy %" if s.holdout else "test accuracy %"}
    for seed in s.seeds:
        for init in s.init:
            results.append(train(s, init, seed, data, device, precision))
            if s.out:
                harness.save_summary(s.out, metrics)
    print("\n" + harness.summary_table(results, metrics))


if __name__ == "__main__":
    harness.run(main)
