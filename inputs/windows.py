"""Windows of a stream of tokens: which ones an epoch trains on, and how every target is evaluated once."""

from collections.abc import Iterator

import torch
from torch import Tensor

IGNORED = -100  # a target that does not count; torch's own convention


def epoch_starts(length: int, context: int, generator: torch.Generator | None = None) -> Tensor:
    """Where the windows of one epoch start, shuffled: the stream cut every `context` tokens from a random offset on.

    No target occurs twice in an epoch. The number of windows does not depend on the offset, so an epoch leaves out less
    than two windows' worth of tokens, before the first and after the last, different ones each time.
    Raises ValueError if the stream is shorter than one window and its last target.
    """
    if not 1 <= context < length:
        raise ValueError(f"{length} tokens are too few for a window of {context} and a target; lower the context")
    n = max(1, (length - context) // context)
    offset = torch.randint(length - n * context, (1,), generator=generator)
    return offset + context * torch.randperm(n, generator=generator)


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, the tokens that follow, each (B, context) int64."""
    window = tokens[starts[:, None] + torch.arange(context + 1, device=starts.device)].long()
    return window[:, :-1], window[:, 1:]


def eval_windows(
    tokens: Tensor, context: int, stride: int | None = None, batch_size: int = 16
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of inputs and targets, each (B, context) int64, in which every target of the stream counts exactly once.

    A window starts every `stride` tokens (None: every `context`). The first counts all its targets, each other its
    last `stride`, the rest are IGNORED; so a target sees at least context − stride earlier tokens, except at the
    stream's beginning. Past the stream's end inputs are filled up, which a causal model cannot see.
    Raises ValueError for fewer than two tokens and a stride outside 1..context.
    """
    stride, last = context if stride is None else stride, len(tokens) - 1  # the place of the last target
    if not 1 <= stride <= context:
        raise ValueError(f"a stride lies between 1 and the context {context}, or targets are left out; not {stride}")
    if last < 1:
        raise ValueError(f"{last + 1} tokens are too few: a text has two, one to see and one to predict")
    inside = torch.arange(context + 1, device=tokens.device)

    def batch(starts: Tensor) -> tuple[Tensor, Tensor]:
        places = starts[:, None] + inside
        window = tokens[places.clamp(max=last)].long()
        counts = (places <= last) & ((starts[:, None] == 0) | (inside > context - stride))
        return window[:, :-1], window[:, 1:].masked_fill(~counts[:, 1:], IGNORED)

    starts = torch.arange(0, max(1, last - context + stride), stride, device=tokens.device)
    return map(batch, starts.split(batch_size))
