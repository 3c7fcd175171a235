"""What a training step is made of: seeds, the learning rate, autocast, gradients; and accuracy after it."""

import contextlib
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import ranks

# What a random draw is for: a stream of its own for each, so that one never shifts another's.
WEIGHTS, INIT, ORDER, AUGMENT, DROPOUT, SAMPLE, MIX = range(7)


def derive_seed(seed: int, use: int, step: int = 0) -> int:
    """A 32-bit seed for a use at a step. Every draw of a run is a function of these three: there is no random state
    to save, so a run that is resumed, or has other inits beside it, or more ranks, draws the same.
    """
    return int(np.random.SeedSequence((seed, use, step)).generate_state(1)[0])


def generator(seed: int, use: int, step: int = 0) -> torch.Generator:
    """A CPU generator for one use at one step."""
    return torch.Generator().manual_seed(derive_seed(seed, use, step))


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share `warmup` of `steps`, then a cosine to 0. A function of the step: no state.

    The first step (0) already learns, and `warmup` may be 0 or 1.
    """
    warm = round(warmup * steps)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def autocast(device: torch.device, precision: str):
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that a GPU does not wait for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def backward(
    model: nn.Module, images: Tensor, labels: Tensor, total: int, micro: int, precision: str, prepare=None
) -> Tensor:
    """Gradients of the mean cross-entropy over a batch of `total` images, of which these are this rank's shard.

    labels are classes (B,), or probabilities (B, classes). Gradients are added up over `micro` images at a time; only
    those does `prepare` make larger at once. Returns the shard's part of that mean.
    """
    mean, parts = torch.zeros((), device=images.device), list(zip(images.split(micro), labels.split(micro)))
    for i, (x, y) in enumerate(parts):
        with contextlib.nullcontext() if i + 1 == len(parts) else ranks.no_sync(model):
            with autocast(images.device, precision):
                loss = F.cross_entropy(model(prepare(x) if prepare else x).float(), y, reduction="sum") / total
            (loss * ranks.world_size()).backward()  # DistributedDataParallel averages over ranks; ours is a sum
        mean += loss.detach()
    return mean


@torch.no_grad()
def accuracy(model: nn.Module, batches, device: torch.device, precision: str) -> tuple[float, float]:
    """Accuracy in percent and mean cross-entropy in nats over `batches` of (images, labels), of each rank its own."""
    model.eval()
    sums, count = torch.zeros(2, dtype=torch.float64, device=device), 0
    for images, labels in batches:
        with autocast(device, precision):
            logits = model(images).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([(logits.argmax(-1) == labels).sum(), loss])
        count += len(labels)
    model.train()
    correct, loss, count = ranks.all_sum(torch.cat([sums, sums.new_full((1,), count)])).tolist()  # the one wait
    return 100 * correct / max(count, 1), loss / max(count, 1)
