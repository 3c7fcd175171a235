"""A causal Transformer language model by hand (section 7 of the paper): pre-norm blocks, input and output weights tied.

The default initialization is normal with standard deviation 0.02 for linear weights and embeddings, biases 0, LayerNorm
1 and 0: GPT-2's, without the factor 1/√(2 depth) at the end of each branch. Positions are fixed sinusoids. Mimetic
initialization is a second, visible step, with the paper's setting for text:

    model = TransformerLM(vocab_size=50)
    mimetic_init_(model, alpha1=0, beta1=0.5, alpha2=0.2, beta2=0.2)

B batch, T tokens, D width, H heads, K = head_dim = D / H, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mimetic import sinusoids_1d
from vit import Attention, Block, LayerNorm

LOGITS_AT_ONCE = 2**26  # per chunk of the loss: 256 MiB of float32 logits; more on a GPU with enough memory


class TransformerLM(nn.Module):
    """Token ids (B, T), with T at most `context`, to the logits of each next token (B, T, V).

    dropout: on the embeddings, the attention weights and both branches of each block.
    embed_dropout: word-level, as in AWD-LSTM: whole rows of the embedding matrix are dropped, with one mask per forward
    pass, and the others divided by 1 − p. This applies to the input only: the output layer keeps all its rows.
    pos_scale: the positions are added once, times this (the paper's γ).
    embed_scale: embeddings are multiplied by this; None is √dim, as in Vaswani et al. (2017).
    Raises ValueError if sizes do not divide.
    """

    def __init__(
        self, vocab_size, *, context=512, dim=384, depth=12, heads=8, mlp_ratio=4, dropout=0.0, embed_dropout=0.0,
        pos_scale=1.0, embed_scale=None,
    ):  # fmt: skip
        super().__init__()
        if not 0 <= embed_dropout < 1:
            raise ValueError(f"embed_dropout is a probability below 1, not {embed_dropout}.")
        self.context, self.embed_dropout, self.pos_scale = context, embed_dropout, pos_scale
        self.embed_scale = math.sqrt(dim) if embed_scale is None else embed_scale
        self.token_embed = nn.Embedding(vocab_size, dim)  # also the output layer: always one tensor
        self.register_buffer("pos_embed", torch.zeros(context, dim))
        self.blocks = nn.ModuleList(
            Block(dim, Attention(dim, heads, causal=True, dropout=dropout), mlp_ratio, dropout) for _ in range(depth)
        )
        self.norm = LayerNorm(dim)
        self.drop = nn.Dropout(dropout)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give every parameter its default, and the sinusoids; call it again after `to_empty`."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        self.pos_embed.copy_(sinusoids_1d(*self.pos_embed.shape))

    def embed(self, ids: Tensor) -> Tensor:
        """What the first block reads: tokens (B, T, D)."""
        if ids.ndim != 2 or ids.shape[1] > self.context:
            raise ValueError(f"ids must be (batch, tokens) with at most {self.context} tokens, not {tuple(ids.shape)}.")
        x = self.embed_scale * self.token_embed(ids)
        if self.training and self.embed_dropout:
            kept = torch.rand(self.token_embed.num_embeddings, 1, device=ids.device) >= self.embed_dropout
            x = x * kept[ids] / (1 - self.embed_dropout)
        x = x + self.pos_scale * self.pos_embed[: ids.shape[1]]
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # then the residual stream is bfloat16, as in vit.py
            x = x.to(torch.get_autocast_dtype(kind))
        return self.drop(x)

    def hidden(self, ids: Tensor) -> Tensor:
        """What the output layer reads, after the last LayerNorm: (B, T) -> (B, T, D)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits; given targets, their summed `loss` (wrappers like torch.compile and DDP only call forward)."""
        if targets is not None:
            return self.loss(ids, targets, reduction="sum")
        return F.linear(self.hidden(ids), self.token_embed.weight)

    def loss(self, ids: Tensor, targets: Tensor, chunk: int | None = None, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats of `targets` (B, T), `chunk` tokens at a time: no more logits exist at once.

        Targets of −100 do not count. reduction: "mean" over those that count, or "sum". chunk: None stands for what
        `logits_at_once` allows. Value and gradients equal those of F.cross_entropy(model(ids), targets).
        """
        V = self.token_embed.num_embeddings
        if chunk is None:
            chunk = max(1, logits_at_once(ids.numel() * V, ids.device) // V)
        if chunk < 1 or reduction not in ("mean", "sum"):
            raise ValueError(f"chunk is at least 1, reduction 'mean' or 'sum'; not {chunk} and {reduction!r}.")
        x, targets, weight = self.hidden(ids).flatten(0, 1), targets.flatten(), self.token_embed.weight
        if len(x) > chunk and torch.is_grad_enabled():
            total = ChunkedCrossEntropy.apply(x, weight, targets, chunk)
        else:
            chunks = zip(x.split(chunk), targets.split(chunk), strict=True)
            total = sum(summed_loss(x_chunk, weight, targets_chunk) for x_chunk, targets_chunk in chunks)
        return total / (targets >= 0).sum() if reduction == "mean" else total

    @torch.no_grad()
    def generate(
        self, ids: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """Continue each row of ids (B, T) by `n` tokens: (B, T + n). Uses no dropout; restores the modules' modes.

        Each token is drawn from the `top_k` likeliest (None: from all), with logits divided by `temperature`; at 0 the
        likeliest is taken. The model sees the last `context` tokens. Draws come from `generator`, on its device, or
        from torch's global one. Raises ValueError for arguments outside these ranges.
        """
        if ids.ndim != 2 or ids.shape[1] < 1 or n < 0:
            raise ValueError(f"generate continues ids (batch, tokens) by n ≥ 0, not {tuple(ids.shape)} by {n}.")
        if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature is finite, 0 or more, top_k at least 1; not {temperature} and {top_k}.")
        top_k, temperature = (1, 1.0) if temperature == 0 else (top_k, temperature)
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            for _ in range(n):
                x = self.hidden(ids[:, -self.context :])[:, -1]  # (B, D)
                logits = F.linear(x, self.token_embed.weight).double()  # (B, V)
                best, choices = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # the likeliest first
                p = ((best - best[:, :1]) / temperature).softmax(-1)
                drawn = torch.multinomial(p.to(generator.device if generator else p.device), 1, generator=generator)
                ids = torch.cat([ids, choices.gather(1, drawn.to(p.device))], dim=1)
        finally:
            for module, mode in modes:
                module.training = mode
        return ids


def logits_at_once(wanted: int, device: torch.device) -> int:
    """How many of the `wanted` logits may exist at once: with copies and gradients, they take an eighth of a GPU's
    memory."""
    if wanted <= LOGITS_AT_ONCE or device.type != "cuda":
        return LOGITS_AT_ONCE
    return max(LOGITS_AT_ONCE, torch.cuda.get_device_properties(device).total_memory // 128)


def summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy of the logits x weightᵀ (N, V) and targets (N,), in float32 or better."""
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")


class ChunkedCrossEntropy(torch.autograd.Function):
    """`summed_loss`, chunk by chunk. The forward pass takes each chunk's gradients while its logits exist.

    So nothing is recomputed, backward only scales, and what is kept has the size of x and of the weight. (Checkpointing
    each chunk would add a fourth product with the weight to these three, and under autocast sum the weight's gradient
    in bfloat16; here it is summed in the weight's own dtype.)
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        total, x_grads, weight_grad = 0, [], torch.zeros_like(weight)
        if torch.is_autocast_enabled(x.device.type):  # once for all chunks
            weight = weight.to(torch.get_autocast_dtype(x.device.type))
        weight = weight.detach().requires_grad_()
        for x_chunk, targets_chunk in zip(x.detach().split(chunk), targets.split(chunk), strict=True):
            x_chunk.requires_grad_()
            with torch.enable_grad():
                loss = summed_loss(x_chunk, weight, targets_chunk)
            x_grad, chunk_grad = torch.autograd.grad(loss, (x_chunk, weight))
            total += loss.detach()
            x_grads.append(x_grad)
            weight_grad += chunk_grad
        ctx.save_for_backward(torch.cat(x_grads), weight_grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, weight_grad * grad, None, None
