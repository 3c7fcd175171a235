"""Whether a GPU computes what the CPU does: the first part of `python bench.py gpu`, and the steps that it measures."""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

import train_cifar
from inits import VISION_INITS
from inputs.images import ImageData
from lm import TransformerLM
from training.step import INIT, autocast, backward, generator
from vit import ViT

HERE = Path(__file__).parent.parent
LOSSES = 1e-3  # tolerated in losses of ten fp32 steps, relative: sums in another order, through AdamW
GRADIENTS = {"fp32": 1e-4, "bf16": 3e-2}  # in a gradient, relative to its norm, by precision


# ---- models and steps


def random_images(count: int, device: torch.device) -> ImageData:
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=draws).to(device)
    labels = torch.randint(10, (count,), generator=draws).to(device)
    return ImageData("random", images, labels, images, labels, tuple("0123456789"), (0.5,) * 3, (0.25,) * 3)


def random_tokens(windows: int, context: int, device: torch.device) -> torch.Tensor:
    return torch.randint(50, (windows, context + 1), generator=torch.Generator().manual_seed(0)).to(device)


def made(kind, seed: int = 0, **sizes) -> torch.nn.Module:
    """ViT or TransformerLM, on the CPU."""
    torch.manual_seed(seed)
    return kind(50, **sizes) if kind is TransformerLM else kind(**sizes)


def image_step(model, data: ImageData, batch: int, augment: str, precision: str, lr: float = 1e-4):
    """A function of no arguments: the next step of train_cifar.py over `data`. It returns the loss."""
    s = train_cifar.Settings(augment=augment, batch_size=batch)
    batches = train_cifar.batches(s, 0, data, 0, data.train_images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step() -> torch.Tensor:
        indices, draws = next(batches)
        images = train_cifar.prepare_images(data.train_images[indices], s, data, draws)
        loss = backward(model, images, data.train_labels[indices], batch, batch, precision)
        return finish_step(model, optimizer, loss)

    return step


def text_step(model, ids: torch.Tensor, precision: str, lr: float = 1e-4):
    """The same of train_lm.py, or of nanoGPT's model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step() -> torch.Tensor:
        with autocast(ids.device, precision):
            loss = model(ids[:, :-1], ids[:, 1:].contiguous())
            loss = loss[1] if isinstance(loss, tuple) else loss / ids[:, 1:].numel()
        loss.backward()
        return finish_step(model, optimizer, loss.detach())

    return step


def finish_step(model, optimizer, loss: torch.Tensor) -> torch.Tensor:
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def set_fused(model, fused: bool | None):
    for block in model.blocks:
        block.attn.fused = fused
    return model


def step_of(b, kind, device: torch.device, precision: str, fused: bool | None = None, lr: float = 1e-4):
    """A small model and a step of it."""
    model = set_fused(made(kind, **b.sizes[kind]), fused).to(device)
    if kind is ViT:
        batch = b.sizes["check_batch"]
        return model, image_step(model, random_images(4 * batch, device), batch, "none", precision, lr)
    ids = random_tokens(b.sizes["check_windows"], b.sizes[TransformerLM]["context"], device)
    return model, text_step(model, ids, precision, lr)


# ---- checks: each returns its figures, of which `ok` says whether it holds


def checks(b):
    """Names and calls. b: of benchmarks/gpu.py, for device, precision and sizes."""
    for kind in (ViT, TransformerLM):
        yield f"{kind.__name__}, ten fp32 steps, CPU against {b.device}", partial(losses_agree, b, kind)
        for precision in dict.fromkeys(("fp32", b.precision)):
            yield (
                f"{kind.__name__}, fused against explicit attention, {precision}",
                partial(paths_agree, b, kind, precision),
            )
    for init in VISION_INITS:
        if init != "transfer":  # which reads a file
            yield f"init {init}, CPU against {b.device}", partial(init_agrees, b, init)
    yield "killed and resumed, --deterministic", partial(resumed_agrees, b)


def losses_agree(b, kind) -> dict:
    losses = []
    for device in (torch.device("cpu"), b.device):
        _, step = step_of(b, kind, device, "fp32", lr=1e-3)
        losses.append(torch.stack([step() for _ in range(10)]).cpu())
    difference = ((losses[0] - losses[1]).abs() / losses[0]).max().item()
    return dict(ok=difference < LOSSES, difference=difference, tolerated=LOSSES)


def paths_agree(b, kind, precision: str) -> dict:
    def gradient(fused: bool) -> torch.Tensor:
        (model, step), kept = step_of(b, kind, b.device, precision, fused), []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.flatten().clone()))  # before clipping
        step()
        return torch.cat(kept)

    fused, explicit = gradient(True), gradient(False)
    difference = ((fused - explicit).norm() / explicit.norm()).item()
    return dict(ok=difference < GRADIENTS[precision], difference=difference, tolerated=GRADIENTS[precision])


def init_agrees(b, init: str) -> dict:
    """Bit by bit, the weights of a model that is on the device already and of one on the CPU."""
    models = [made(ViT, **b.sizes[ViT] | dict(depth=2, patch_size=8)).to(device) for device in ("cpu", b.device)]
    for model in models:
        VISION_INITS[init](model, train_cifar.Settings(), generator(0, INIT))
    pairs = zip(*(model.state_dict().values() for model in models))
    return dict(ok=all(torch.equal(here, there.cpu()) for here, there in pairs))


def resumed_agrees(b) -> dict:
    """Bit by bit, the weights of a whole run and of one that is killed after a checkpoint and goes on."""
    flags = f"--dataset shapes --init mimetic --deterministic --device {b.device} {b.sizes['run']}"
    words = ["train_cifar.py", *flags.split(), "--out"]
    with tempfile.TemporaryDirectory() as folder:
        whole, parted = (Path(folder) / name / "mimetic-seed0" for name in ("whole", "parted"))
        b.script(*words, str(whole.parent))
        command = [sys.executable, *words, str(parted.parent)]
        run = subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while run.poll() is None and not (parted / "last.pt").exists():
            time.sleep(0.02)
        run.kill()
        run.wait()
        killed = not (parted / "result.json").exists()
        b.script(*words, str(parted.parent), "--resume")
        ends = [torch.load(run / "last.pt", map_location="cpu", weights_only=True)["model"] for run in (whole, parted)]
    same = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    return dict(ok=killed and same, killed_before_its_end=killed, weights_bit_equal=same)
