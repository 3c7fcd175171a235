"""python bench.py structured: structured_init_, and the settings of its papers, by time and by the maps they reach."""

import math
import time

import torch
import torch.nn.functional as F

from bench import time_in_turn
from structured import attention, impulse, map_error, nearest_impulse, pseudo_input, pseudo_maps, structured_init_
from training.start import keep_freed_memory
from vit import ViT


def published_init(X: torch.Tensor, H: torch.Tensor, head_dim: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """W_Q, W_K (heads, d, k) of one layer by the settings of 2404.01139 and its code: H (heads, n, n).

    Uniform draws, Adam at 1e-4 on the mean squared error, norms reset every 100 steps: of the k columns of W_Q, and of
    the d columns of W_K as that code stores it, k by d.
    """
    bound = math.sqrt(1 / (head_dim * len(H)))
    draws = torch.Generator().manual_seed(0)
    W_Q, W_K = (
        (bound * (2 * torch.rand(len(H), X.shape[1], head_dim, generator=draws) - 1)).requires_grad_() for _ in "QK"
    )
    norm = W_Q.detach().norm(dim=1).mean()
    optimizer = torch.optim.Adam([W_Q, W_K], lr=1e-4)
    for step in range(steps):
        if step % 100 == 0:
            with torch.no_grad():
                W_Q *= norm / W_Q.norm(dim=1, keepdim=True)
                W_K *= norm / W_K.norm(dim=2, keepdim=True)
        loss = F.mse_loss(attention(X, W_Q, W_K), H)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return W_Q.detach(), W_K.detach()


def main(argv: list[str], steps=10_000, rounds=5) -> None:
    """Width 192, depth 12, 3 heads, 256 tokens. Published: one layer in full, heads at 3 of the 9 offsets, times 12.

    One thread and its processor time, since minutes of a busy machine are not comparable.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    model, draws = ViT(pool="mean"), torch.Generator().manual_seed(0)
    P, grid = model.pos_embed, model.grid
    X, offsets = pseudo_input(P, grid), [(0, 0), (0, 1), (-1, 1)]
    rows = []
    for border in ("clamp", "zero"):
        runs = {
            method: lambda method=method, border=border: structured_init_(
                model, P, grid, method=method, border=border, generator=draws
            )
            for method in ("closed_form", "gradient")
        }
        seconds = time_in_turn(runs, rounds, time.process_time)
        for method, run in runs.items():
            run()
            error = nearest_impulse(torch.stack(list(pseudo_maps(model, P, grid).values())), grid, border=border)[1]
            rows.append((f"{method}, {border}", error.mean(), error.max(), seconds[method]))
        H = torch.stack([impulse(grid, offset, border) for offset in offsets])
        started = time.process_time()
        error = map_error(attention(X, *published_init(X, H, 64, steps)), H)
        rows.append((f"published, {border}", error.mean(), error.max(), 12 * (time.process_time() - started)))
    print(f"ViT-Tiny/2, 12 layers, one thread, torch {torch.__version__}; map error: uniform 1")
    print("| | map error | worst head | CPU seconds | published takes … times as long |\n|---|---|---|---|---|")
    for i, (name, mean, worst, spent) in enumerate(rows):
        print(f"| {name} | {mean:.3f} | {worst:.3f} | {spent:.2f} | {rows[i // 3 * 3 + 2][3] / spent:.0f} |")
