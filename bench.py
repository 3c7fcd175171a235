"""Speed against what people would use instead: ratios, measured alternately in one run on this machine.

python bench.py step        a training step: vit.ViT, the same through the fused attention, vit-pytorch's SimpleViT
python bench.py augment     RandAugment of a batch: augment.py, torchvision image by image (one thread)
python bench.py init        mimetic_init_ of ViT-Tiny and ViT-Base, and the share of the SVDs

What it compares with goes into an environment of its own: pip install torch torchvision vit-pytorch.
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F

import harness
from augment import rand_augment
from mimetic import mimetic_init_
from vit import ViT


def alternately(runs: dict, rounds: int) -> dict[str, float]:
    """Median seconds of each call, one call of each a round, so that a slow moment of the machine hits all alike."""
    seconds = {name: [] for name in runs}
    for round_ in range(rounds + 1):  # the first warms up
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name] += [time.perf_counter() - started] if round_ else []
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(seconds: dict[str, float], images: int) -> None:
    """A Markdown row for each: images a second, and how many times as fast the first one is."""
    first = next(iter(seconds.values()))
    print("| | images/s | ours is … times as fast |\n|---|---|---|")
    for name, median in seconds.items():
        print(f"| {name} | {images / median:,.0f} | {median / first:.2f} |")


def training_step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor):
    """A function of no arguments: forward, backward and AdamW under bf16 autocast."""
    model = model.to(images.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with harness.autocast(images.device, torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_step(batch=128, rounds=7) -> None:
    """Width 192, depth 12, 3 heads, patch 4, mean pooling: 64 tokens for each."""
    device = harness.pick_device("auto")
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
    report(alternately({name: training_step(model, images, labels) for name, model in runs.items()}, rounds), batch)


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
    seconds = alternately(runs, rounds)
    seconds["augment.rand_augment"] /= 10  # ten calls a turn, since one is over too soon
    print(f"RandAugment, batch {batch}, one thread, torch {torch.__version__}")
    report(seconds, batch)


def bench_init(rounds=3) -> None:
    print("| | seconds | of that SVD |\n|---|---|---|")
    for name, dim, heads in [("ViT-Tiny, 12 layers", 192, 3), ("ViT-Base, 12 layers", 768, 12)]:
        model, M = ViT(dim=dim, heads=heads), (torch.randn(dim, dim) / dim**0.5 + torch.eye(dim)).double()
        runs = {"init": lambda: mimetic_init_(model), "svd": lambda: torch.linalg.svd(M)}  # noqa: B023, called at once
        seconds = alternately(runs, rounds)
        print(f"| {name} | {seconds['init']:.2f} | {12 * (heads + 1) * seconds['svd'] / seconds['init']:.0%} |")


def main() -> None:
    benches = {"step": bench_step, "augment": bench_augment, "init": bench_init}
    if len(sys.argv) != 2 or sys.argv[1] not in benches:
        sys.exit(__doc__)
    harness.keep_freed_memory()  # as the training scripts do; it serves all that are compared
    benches[sys.argv[1]]()


if __name__ == "__main__":
    main()
