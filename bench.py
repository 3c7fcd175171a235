"""Speed against what people would use instead: ratios, measured alternately in one run on this machine.

python bench.py step        a training step: vit.ViT, the same through the fused attention, vit-pytorch's SimpleViT
python bench.py peak        the paper's CIFAR-10 model: which share of what one large bf16 product reaches here
python bench.py augment     RandAugment of a batch: augment.py, torchvision image by image (one thread)
python bench.py init        mimetic_init_ of ViT-Tiny and ViT-Base, and the share of the SVDs
python bench.py lm          a training step: lm.TransformerLM, the same through the fused attention, nanoGPT's model.py
python bench.py checkpoint  what a checkpoint costs at the paper's size, and reading it
python bench.py loader      photographs decoded and augmented as DeiT does: folders.py, timm's loader, one worker each
python bench.py ranks       two processes of one CPU thread under torchrun, one process of two threads
python bench.py memory      the most memory that the paper's CIFAR-10 recipe takes (two steps, and an evaluation)
python bench.py structured  structured_init_ of ViT-Tiny/2, and the published settings for one of its layers (minutes):
                            benchmarks/structured.py
python bench.py gpu         the first fifteen minutes on a GPU: benchmarks/gpu.py
python bench.py roofline    a step's bytes, products and launches on a GPU, counted without one: benchmarks/roofline.py

What it compares with goes into an environment of its own: pip install torch==2.14.1 torchvision==0.29.1
vit-pytorch==1.26.14 timm==1.0.31. nanoGPT's model.py is found where PYTHONPATH names its folder.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # under PYTHONSAFEPATH as well

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from inputs import folders
from inputs.augment import normalize
from inputs.randaugment import rand_augment
from lm import TransformerLM
from mimetic import mimetic_init_
from training import checkpoint, records, start
from training.step import autocast
from vit import ViT


def time_in_turn(runs: dict, rounds: int, clock=time.perf_counter) -> dict[str, float]:
    """Median seconds of each call, one call of each a round, so that a slow moment of the machine hits all alike."""
    seconds = {name: [] for name in runs}
    for round_ in range(rounds + 1):  # the first warms up
        for name, run in runs.items():
            started = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name] += [clock() - started] if round_ else []
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(seconds: dict[str, float], items: int, unit: str = "images") -> None:
    """A Markdown row for each: items a second, and how many times as fast the first one is."""
    first = next(iter(seconds.values()))
    print(f"| | {unit}/s | ours is … times as fast |\n|---|---|---|")
    for name, median in seconds.items():
        print(f"| {name} | {items / median:,.0f} | {median / first:.2f} |")


def training_step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, optimizer=None):
    """A function of no arguments: forward, backward and AdamW under bf16 autocast."""
    model = model.to(images.device)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with autocast(images.device, "bf16"):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_step(batch=128, rounds=7) -> None:
    """Width 192, depth 12, 3 heads, patch 4, mean pooling: 64 tokens for each."""
    device = start.pick_device("auto")
    images, labels = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    sizes = dict(patch_size=4, dim=192, depth=12, heads=3, pool="mean")
    fused, explicit = ViT(**sizes), ViT(**sizes)
    for block in fused.blocks:
        block.attn.fused = True
    for block in explicit.blocks:
        block.attn.fused = False
    runs = {"vit.ViT, explicit": explicit, "vit.ViT, fused call": fused}
    if device.type == "cuda":  # there the fused call is our default
        runs = dict(reversed(runs.items()))
    try:
        from vit_pytorch import SimpleViT

        runs["vit-pytorch SimpleViT"] = SimpleViT(
            image_size=32, patch_size=4, num_classes=10, dim=192, depth=12, heads=3, mlp_dim=768, dim_head=64
        )
    except ImportError:
        print("vit-pytorch is not installed here: compared without it (pip install vit-pytorch)")
    print(f"training step, batch {batch}, bf16, {device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    report(time_in_turn({name: training_step(model, images, labels) for name, model in runs.items()}, rounds), batch)


def bench_peak(rounds=5) -> None:
    """Width 192, depth 12, 3 heads, patches of 2: floating-point operations of products alone, two a multiply-add."""
    device = start.pick_device("auto")
    batch, n = (512, 8192) if device.type == "cuda" else (32, 2048)
    model = ViT(pool="mean")
    images, labels = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    step, square = training_step(model, images, labels), torch.randn(n, n, device=device, dtype=torch.bfloat16)
    for block in model.blocks:  # count on the explicit path: the fused call computes some products twice
        block.attn.fused = False
    with FlopCounterMode(display=False) as counter:
        step()
    for block in model.blocks:
        block.attn.fused = None
    seconds = time_in_turn({"step": step, "product": lambda: square @ square}, rounds)
    flop = counter.get_total_flops()
    speed, peak = flop / seconds["step"] / 1e12, 2 * n**3 / seconds["product"] / 1e12
    print(f"ViT-Tiny/2, batch {batch}, {records.describe(device, 'bf16')}")
    print(f"{batch / seconds['step']:,.0f} images/s, each {flop / batch / 1e9:.1f} GFLOP forward and backward")
    print(f"{speed:.2f} TFLOP/s, {speed / peak:.0%} of the {peak:.2f} that a product of {n} x {n} matrices reaches")


def bench_augment(batch=512, rounds=15) -> None:
    """Two operations an image, magnitude 9, both on one thread."""
    torch.set_num_threads(1)
    images = torch.randint(256, (batch, 3, 32, 32), dtype=torch.uint8)
    runs = {"augment.rand_augment": lambda: [rand_augment(images, magnitude_std=0.0) for _ in range(10)]}
    try:
        from torchvision.transforms import RandAugment
        from torchvision.transforms.functional import to_pil_image

        theirs, pil = RandAugment(num_ops=2, magnitude=9), [to_pil_image(image) for image in images]
        runs["torchvision, PIL images"] = lambda: [theirs(image) for image in pil]
        runs["torchvision, tensors"] = lambda: [theirs(image) for image in images]
    except ImportError:
        print("torchvision is not installed here: measured alone")
    seconds = time_in_turn(runs, rounds)
    seconds["augment.rand_augment"] /= 10  # ten calls a turn, since one is over too soon
    print(f"RandAugment, batch {batch}, one thread, torch {torch.__version__}")
    report(seconds, batch)


def bench_init(rounds=3) -> None:
    print("| | seconds | of that SVD |\n|---|---|---|")
    for name, dim, heads in [("ViT-Tiny, 12 layers", 192, 3), ("ViT-Base, 12 layers", 768, 12)]:
        model, M = ViT(dim=dim, heads=heads), (torch.randn(dim, dim) / dim**0.5 + torch.eye(dim)).double()
        runs = {"init": lambda: mimetic_init_(model), "svd": lambda: torch.linalg.svd(M)}  # noqa: B023, called at once
        seconds = time_in_turn(runs, rounds)
        print(f"| {name} | {seconds['init']:.2f} | {12 * (heads + 1) * seconds['svd'] / seconds['init']:.0%} |")


def bench_lm(batch=32, context=256, rounds=5) -> None:
    """Width 192, depth 6, 6 heads, 50 types: characters of Penn Treebank."""
    device = start.pick_device("auto")
    ids = torch.randint(50, (batch, context + 1), device=device)
    sizes = dict(context=context, dim=192, depth=6, heads=6)
    models = {
        "lm.TransformerLM, explicit": TransformerLM(50, **sizes),
        "the same, fused call": TransformerLM(50, **sizes),
    }
    for fused, model in enumerate(models.values()):
        for block in model.blocks:
            block.attn.fused = bool(fused)
    if device.type == "cuda":  # ours is what the device gets
        models = dict(reversed(models.items()))
    try:
        from model import GPT, GPTConfig

        models["nanoGPT"] = GPT(
            GPTConfig(block_size=context, vocab_size=50, n_layer=6, n_head=6, n_embd=192, bias=True)
        )
    except ImportError:
        print("nanoGPT's model.py is not on PYTHONPATH: compared without it")

    def step_of(model):
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step():
            with autocast(device, "bf16"):
                if isinstance(model, TransformerLM):
                    loss = model.loss(ids[:, :-1], ids[:, 1:])
                else:
                    loss = model(ids[:, :-1], ids[:, 1:].contiguous())[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    what = f"training step, batch {batch}, context {context}, bf16, {device}, torch {torch.__version__}"
    print(f"{what}, {torch.get_num_threads()} threads")
    report(time_in_turn({name: step_of(model) for name, model in models.items()}, rounds), batch * context, "tokens")


def bench_checkpoint(rounds=9) -> None:
    """ViT-Tiny, patch 2, as the paper trains it: 98 steps of 512 images an epoch, one checkpoint after each."""
    device = start.pick_device("auto")
    model = ViT().to(device)
    images, labels = torch.randn(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = training_step(model, images, labels, optimizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "step": step,
            "save": lambda: checkpoint.save(folder, model, optimizer=optimizer.state_dict(), state=dict(step=0)),
            "load": lambda: checkpoint.load(folder, model, optimizer, dict(step=0)),
        }
        seconds = time_in_turn(runs, rounds)
        size = (folder / "last.pt").stat().st_size
    epoch = 50_000 / 64 * seconds["step"]
    print(f"checkpoint of {size / 1e6:.0f} MB: {seconds['save']:.2f} s to write, {seconds['load']:.2f} s to read")
    print(f"an epoch: {epoch:.0f} s, of which the checkpoint adds {seconds['save'] / epoch:.2%}")


def bench_loader(count=1024, batch=64, rounds=3) -> None:
    """Photographs of 500x375, as ImageNet's are on average, to normalized batches of 224x224 in the main process.

    In processor seconds of the worker and the main process together, which other programs hardly disturb.
    """
    import numpy as np
    from PIL import Image

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    crop = partial(folders.random_crop, ra_ops=2, ra_magnitude=27.0, erasing=0.25)
    with tempfile.TemporaryDirectory() as root:
        for i in range(count):  # blurred colours and some grain: about 90 kB
            colours = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((500, 375))
            pixels = np.asarray(colours) + rng.normal(0, 12, (375, 500, 3))
            path = Path(root) / f"class{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        folder = folders.read_folder(root)

        def ours():
            plan = [[(i, i) for i in part.tolist()] for part in torch.arange(count).split(batch)]
            for images, _ in folders.batches(folder, plan, crop, 224, workers=1):
                normalize(images, folders.MEAN, folders.STD)

        runs = {"folders.py": ours}
        try:
            from timm.data import ImageDataset, create_loader

            def theirs():
                loader = create_loader(
                    ImageDataset(root), (3, 224, 224), batch, is_training=True, re_prob=0.25, re_mode="pixel",
                    auto_augment="rand-m9-inc1", interpolation="bicubic", num_workers=1,
                    persistent_workers=False, device=torch.device("cpu"),
                )  # fmt: skip
                for _ in loader:
                    pass

            runs["timm's loader"] = theirs
        except ImportError:
            print("timm is not installed here: measured alone (pip install timm)")
        seconds = time_in_turn(runs, rounds, clock=lambda: sum(os.times()[:4]))  # with its workers, once they ended
    print(f"{count} photographs, batch {batch}, one worker, torch {torch.__version__}; a core is busy all the time")
    report(seconds, count, "images/core")


def bench_ranks(rounds=3) -> None:
    """The procedural shapes, batch 128, width 96, depth 6, patch 4: images/s of whole runs, as their results tell."""
    flags = (
        "--dataset shapes --limit 2560 --epochs 1 --width 96 --depth 6 --patch-size 4 --batch-size 128 --init default"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    starts = {
        "one process, two threads": [sys.executable, "train_cifar.py", "--threads", "2"],
        "two processes, one thread each": [*torchrun, "train_cifar.py", "--threads", "1"],
    }
    speeds = {name: [] for name in starts}
    for _ in range(rounds):
        for name, command in starts.items():
            with tempfile.TemporaryDirectory() as out:
                here = Path(__file__).parent
                command = [*command, *flags.split(), "--device", "cpu", "--out", out]
                subprocess.run(command, cwd=here, check=True, capture_output=True)
                result = json.loads((Path(out) / "default-seed0" / "result.json").read_text(encoding="utf-8"))
            speeds[name].append(result["images_per_second"])
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print("| | images/s | times as fast as one process |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:,.0f} | {median / medians['one process, two threads']:.2f} |")


def bench_memory() -> None:
    """Two steps of the paper's CIFAR-10 recipe and an evaluation, on the CPU, in a process of their own.

    And the images that --limit leaves out. CIFAR-10 is in data/, or goes there.
    """
    import resource  # not on Windows

    command = "train_cifar.py --init default --limit 1024 --epochs 1 --device cpu"
    subprocess.run([sys.executable, *command.split()], cwd=Path(__file__).parent, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"peak memory: {(peak + (50_000 - 1024) * 3 * 32 * 32) / 1e9:.2f} GB")


def main() -> None:
    benches = {
        "step": bench_step, "peak": bench_peak, "augment": bench_augment, "init": bench_init, "lm": bench_lm,
        "checkpoint": bench_checkpoint, "loader": bench_loader, "ranks": bench_ranks, "memory": bench_memory,
        }  # fmt: skip
    if sys.argv[1:2] in (["gpu"], ["roofline"], ["structured"]):
        return importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
    if len(sys.argv) != 2 or sys.argv[1] not in benches:
        sys.exit(__doc__)
    start.keep_freed_memory()  # as the training scripts do; it serves all that are compared
    benches[sys.argv[1]]()


if __name__ == "__main__":
    main()
