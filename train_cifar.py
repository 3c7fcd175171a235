"""Train a Vision Transformer on CIFAR-10 and other small images, default against mimetic initialization.

python train_cifar.py --demo                      minutes on two CPU cores: the effect in small
python train_cifar.py --out runs/paper            the paper's recipe (one GPU, 100 epochs)
python train_cifar.py --seeds 0,1,2 --init default,mimetic --limit 10000 --augment crop --batch-size 128 --lr 1e-3 \\
    --width 96 --depth 6 --epochs 8 --out runs/small

What the paper does not say is our choice: the settings marked "(ours)", and these. Training images are shifted by up to
4 pixels and mirrored, then RandAugment, whose magnitude has a deviation of 0.5 for each operation of each image, then
Cutout. AdamW decays all parameters. Attention has no biases. The patch embedding has torch's default initialization.
Positions are fixed sinusoids, half of the width for the row and half for the column, temperature 10 000. --image-size
upsamples the augmented and normalized batch, bilinearly, so that augmentation sees the data set's own pixels. SVHN's
digits are not mirrored.
"""

import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import checkpoint
import harness
import ranks
from augment import cutout, normalize, rand_augment, random_crop, random_flip
from harness import backward, flag
from images import DATASETS, ImageData, balanced_subset, is_available, load_images
from inits import VISION_INITS, transfer_init_
from variants import ATTENTIONS
from vit import ViT


@dataclass
class Settings(harness.Common):
    # data
    dataset: str = flag("cifar10", "what to train on", tuple(DATASETS))
    data_dir: str = flag("data", "where the data sets lie, or go", free=True)
    limit: int = flag(0, "train on a class-balanced subset of so many images; 0: all", low=0)
    holdout: int = flag(
        0, "for tuning: hold out so many training images and report on them, not on the test set", low=0
    )
    image_size: int = flag(0, "pixels a side that images are upsampled to, after augmentation; 0: their own", low=0)
    # model: ViT-Tiny (paper)
    width: int = flag(192, "token width (paper)", low=1)
    depth: int = flag(12, "layers (paper)", low=1)
    heads: int = flag(3, "heads a layer (paper)", low=1)
    patch_size: int = flag(2, "pixels (paper; Tiny ImageNet: 4)", low=1)
    pos: str = flag("sinusoidal", "position embeddings: fixed, or random and learned", ("sinusoidal", "learned"))
    pos_scale: float = flag(1.0, "their scale, the paper's gamma")
    attention: str = flag("softmax", "plain, or one of the variants in variants.py", tuple(ATTENTIONS))
    local_layers: int = flag(0, "so many layers have it, then plain ones follow; 0: all (ConViT: 10 of 12)", low=0)
    pool: str = flag("mean", "mean of all tokens or a class token (ours: mean, better and faster)", ("mean", "cls"))
    # mimetic initialization (paper)
    alpha1: float = flag(0.7, "W_Q W_K^T = alpha1 Z + beta1 I")
    beta1: float = flag(0.7, "")
    alpha2: float = flag(0.4, "W_V W_proj = alpha2 Z - beta2 I")
    beta2: float = flag(0.4, "")
    parts: str = flag("both", "which of the two products to initialize", ("both", "qk", "vp"))
    transfer_from: str = flag("", "the checkpoint that --init transfer copies attention and positions from")
    # structured initialization (arXiv 2404.01139, 2505.19985)
    kernel_size: int = flag(3, "structured: side of the kernel whose impulses heads draw", (3, 5))
    method: str = flag("gradient", "structured: how W_Q, W_K are solved for", ("gradient", "closed_form"))
    qk_norm: float = flag(0.0, "structured: Frobenius norm of a head's W_Q, and W_K; 0: its own", low=0, high=1e6)
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
    micro_batch: int = flag(
        0, "images a forward pass, gradients added up; 0: 64 on a CPU (its caches), all on a GPU", low=0
    )
    eval_every: int = flag(
        1, "epochs from one evaluation to the next; the last epoch is always evaluated", low=1, free=True
    )


# --demo, by what there is to train on: small patches, where the method shows; lr tuned for the *default* init.
DEMO = dict(width=64, depth=4, heads=2, batch_size=64, augment="crop")
DEMOS = {
    "cifar10": dict(DEMO, patch_size=2, limit=5000, epochs=5, lr=2e-3, eval_every=5),
    "shapes": dict(DEMO, patch_size=4, epochs=10, lr=1e-3, eval_every=2, dataset="shapes"),
}
PRESETS = {"tiny-imagenet": dict(patch_size=4)}  # the paper's, where not those of CIFAR


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
    torch.manual_seed(harness.seeded(seed, harness.WEIGHTS))
    _, channels, size, _ = data.train_images.shape
    if 0 < s.image_size < size:
        raise ValueError(f"--image-size {s.image_size} is less than the images' own {size}; they are only made larger.")
    if s.attention != "softmax" and s.pool == "cls" and not s.local_layers:
        raise ValueError(f"--attention {s.attention} has no place for a class token: --pool mean, or --local-layers.")
    model = ViT(
        image_size=s.image_size or size, patch_size=s.patch_size, in_channels=channels, num_classes=len(data.classes),
        dim=s.width, depth=s.depth, heads=s.heads, pos=s.pos, pos_scale=s.pos_scale, pool=s.pool,
        attention=ATTENTIONS[s.attention], local_layers=s.local_layers or None,
    )  # fmt: skip
    VISION_INITS[init](model, s, harness.generator(seed, harness.INIT))
    return model.to(device)


def augmented(images: torch.Tensor, s: Settings, data: ImageData, draws: torch.Generator) -> torch.Tensor:
    """uint8 (B, 3, S, S) to normalized float of the same shape; the draws do not depend on the pixels."""
    if s.augment != "none":
        images = random_crop(images, generator=draws)
        images = images if data.name == "svhn" else random_flip(images, generator=draws)
    if s.augment == "randaugment":
        images = rand_augment(images, s.ra_ops, s.ra_magnitude, generator=draws)
        return cutout(normalize(images, data.mean, data.std), s.cutout, generator=draws)
    return normalize(images, data.mean, data.std)


def upsampled(images: torch.Tensor, size: int) -> torch.Tensor:
    """Float images (B, 3, S, S) to (B, 3, size, size), bilinearly; size 0 leaves them as they are."""
    if size in (0, images.shape[-1]):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", align_corners=False)


def evaluate(model: ViT, s: Settings, data: ImageData, precision: str, batch: int) -> tuple[float, float]:
    """Test accuracy in percent, and mean cross-entropy in nats; each rank takes its share of the images."""
    shares = ranks.share(data.test_images).split(batch), ranks.share(data.test_labels).split(batch)
    batches = (
        (upsampled(normalize(images, data.mean, data.std), s.image_size), labels)
        for images, labels in zip(*shares, strict=True)
    )
    return harness.accuracy(model, batches, data.test_labels.device, precision)


def train(s: Settings, init: str, seed: int, data: ImageData, device: torch.device, precision: str) -> dict:
    """One run: `s.epochs` over `data` (on the device already). Returns what result.json holds."""
    name, folder = f"{init}-seed{seed}", harness.run_folder(s.out, init, seed)
    model = ranks.together(build, s, init, seed, data, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=s.weight_decay, fused=True)
    now = dict(step=0, losses=[], record={}, training_seconds=0.0, seconds=0.0)  # with the weights, all of a checkpoint
    now = checkpoint.load(folder, model, optimizer, now)
    trained, micro = ranks.wrapped(model, s.compile), s.micro_batch or (64 if device.type == "cpu" else s.batch_size)
    n, first, before = len(data.train_labels), now["step"], now["seconds"]
    steps_an_epoch = -(-n // s.batch_size)
    steps = s.epochs * steps_an_epoch
    order, losses = None, [torch.tensor(loss, device=device) for loss in now["losses"]]
    facts = dict(parameters=sum(p.numel() for p in model.parameters()), config=dataclasses.asdict(s))
    facts["environment"] = harness.environment(device, precision)
    harness.open_log(folder, first, run=name, **facts)
    started = clock = saved = time.time()

    for step in range(first, steps):
        epoch, i = divmod(step, steps_an_epoch)
        if order is None or i == 0:
            order = torch.randperm(n, generator=harness.generator(seed, harness.ORDER, epoch)).to(device)
        batch = order[i * s.batch_size : (i + 1) * s.batch_size]
        # Every rank augments the whole batch, which is cheap and draws what one process would, and trains on its share.
        images = augmented(data.train_images[batch], s, data, harness.generator(seed, harness.AUGMENT, step))
        images, labels = ranks.share(images), ranks.share(data.train_labels[batch])
        lr = harness.learning_rate(step, steps, s.lr, s.warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr
        larger = partial(upsampled, size=s.image_size)
        loss = backward(trained, images, labels, len(batch), micro, precision, larger)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ranks.all_sum(loss + 0 * norm))  # not finite where either is not
        text = f"{name}  epoch {epoch + 1}/{s.epochs}"
        harness.live(text, step + 1, steps, losses[-1], first, started, s.batch_size, "images")

        ended = i + 1 == steps_an_epoch
        if not (ended or checkpoint.time_to_look(step, device)):
            continue  # what follows waits for the device
        checkpoint.check_finite(name, losses, step, lr, folder)
        stop = checkpoint.stopping(device)
        now["training_seconds"] += time.time() - clock
        if ended:
            sizes = [len(batch) for batch in order.split(s.batch_size)]
            train_loss = sum(float(loss) * size for loss, size in zip(losses, sizes, strict=True)) / n
            speed, losses = (step + 1) * n / steps_an_epoch / now["training_seconds"], []
            text += f"  loss {train_loss:.3f}  {speed:.0f} images/s"
            now["record"] = dict(epoch=epoch + 1, step=step + 1, lr=lr, train_loss=train_loss)
            if (epoch + 1) % s.eval_every == 0 or step + 1 == steps:
                accuracy, loss = evaluate(model, s, data, precision, max(micro, 128))
                now["record"].update(test_acc=accuracy, test_loss=loss)
                text += f"  accuracy {accuracy:.2f} %"
            now["record"]["seconds"] = round(before + time.time() - started, 1)
            ranks.line(text)
            harness.append_record(folder, now["record"])
        if ended or stop or time.time() - saved > 60 * s.save_every:
            now.update(step=step + 1, losses=list(map(float, losses)), seconds=before + time.time() - started)
            checkpoint.save(folder, model, optimizer=optimizer.state_dict(), config=facts["config"], **now)
            saved = time.time()
        if stop:
            checkpoint.stop(folder)
        clock = time.time()

    figures = {key: now["record"][key] for key in ("test_acc", "test_loss", "train_loss")}
    speed = round(s.epochs * n / now["training_seconds"], 1)
    result = dict(
        dataset=s.dataset, init=init, seed=seed, **figures, epochs=s.epochs, images_per_second=speed,
        seconds=round(now["seconds"], 1), **facts,
    )  # fmt: skip
    checkpoint.finish(folder, model, result, config=facts["config"])
    return result


def prepare(s: Settings) -> ImageData:
    """The data, once all that the user asked for is known to fit: nothing is begun that could not end."""
    harness.check_runs(s.init, s.seeds, VISION_INITS)
    harness.free_folders(s)  # before a download
    data = load_data(s)
    model = build(s, "default", 0, data, torch.device("cpu"))
    if "transfer" in s.init:
        copied = transfer_init_(model, s.transfer_from)
        ranks.line(f"transfer: {len(copied)} tensors from {s.transfer_from}, {copied[0]} ... {copied[-1]}")
    harness.claim_folders(s)
    return data


def settings(argv: list[str]) -> Settings:
    """From flags, and what --demo and the data set put in the place of defaults."""
    s, drawn = (harness.parse_settings(Settings, argv, __doc__, DEMOS[name]) for name in ("cifar10", "shapes"))
    if drawn.dataset == "shapes" and (s.dataset == "shapes" or not is_available(s.dataset, s.data_dir)):
        s = drawn  # and no flag says otherwise
    if preset := PRESETS.get(s.dataset):
        s = harness.parse_settings(Settings, argv, __doc__, {**DEMOS["cifar10"], **preset}, preset)
    return s


def main(argv: list[str] | None = None) -> None:
    s = settings(sys.argv[1:] if argv is None else argv)
    device, precision = harness.start(s)
    data = ranks.together(prepare, s)
    data = data._replace(**{k: v.to(device) for k, v in data._asdict().items() if isinstance(v, torch.Tensor)})
    what = f"{s.dataset}: {len(data.train_labels)} training images, {len(data.test_labels)} to evaluate"
    ranks.line(f"{what}; {harness.describe(device, precision)}")
    metrics = {"test_acc": "held-out accuracy %" if s.holdout else "test accuracy %"}
    checkpoint.compare(s, metrics, lambda init, seed: train(s, init, seed, data, device, precision))


if __name__ == "__main__":
    harness.run(main)
