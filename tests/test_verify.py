"""verify: right layers pass, and each thing that a layer may do differently shows in its forward pass."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layouts import attention_layers
from lm import TransformerLM
from mimetic import mimetic_init_
from verify import verify
from vit import ViT

D, HEADS, N, K = 24, 3, 7, 8
TOKENS = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """A layer of timm's layout, of which a subclass changes one step."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(D, 3 * D), nn.Linear(D, D), HEADS

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, K)).transpose(1, 2) for t in self.enter(self.qkv(x)).chunk(3, -1))
        return self.proj(self.leave(self.attend(q, k, self.values(v)).transpose(1, 2).flatten(2)))

    def enter(self, qkv):
        return qkv

    def values(self, v):
        return v

    def logits(self, q, k):
        return q @ k.mT / math.sqrt(K)

    def attend(self, q, k, v):
        return self.logits(q, k).softmax(-1) @ v

    def leave(self, y):
        return y


def rotate(x, turn=1.0):
    """Rotary positions on pairs of columns."""
    angle = torch.arange(x.shape[-2])[:, None] * turn / torch.arange(1, K // 2 + 1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


PAD = (0, 0, 0, 1)  # one row of zeros
RIGHT = {
    "plain": {},
    "the fused call": dict(attend=lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v)),
    "causal": dict(attend=lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "a bias of positions": dict(logits=lambda self, q, k: q @ k.mT / math.sqrt(K) - torch.arange(N).float()),
    "a mask": dict(logits=lambda self, q, k: (q @ k.mT / math.sqrt(K)).masked_fill(torch.eye(N) == 1, -torch.inf)),
    "rotary positions": dict(logits=lambda self, q, k: rotate(q) @ rotate(k).mT / math.sqrt(K)),
}
WRONG = {
    "norms on q and k": dict(logits=lambda self, q, k: F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT),
    "another scale": dict(logits=lambda self, q, k: q @ k.mT / math.sqrt(D)),
    "clamped q, k, v": dict(enter=lambda self, qkv: qkv.clamp(-8, 8)),
    "capped logits": dict(logits=lambda self, q, k: 50 * (q @ k.mT / math.sqrt(K) / 50).tanh()),
    "rotated values": dict(values=lambda self, v: rotate(v)),
    "a rotation that leaves no diagonal": dict(logits=lambda self, q, k: rotate(q, 2) @ rotate(k).mT / math.sqrt(K)),
    "a token of zeros": dict(attend=lambda self, q, k, v: self.logits(q, F.pad(k, PAD)).softmax(-1) @ F.pad(v, PAD)),
    "no softmax": dict(attend=lambda self, q, k, v: self.logits(q, k).relu() @ v / N),
    "heads interleaved in the output": dict(leave=lambda self, y: y.unflatten(-1, (HEADS, K)).mT.flatten(2)),
    "a norm before the projection": dict(leave=lambda self, y: F.layer_norm(y, (D,))),
    "channels attend": dict(attend=lambda self, q, k, v: ((q.mT @ k / math.sqrt(K)).softmax(-1) @ v.mT).mT),
    "heads mixed": dict(logits=lambda self, q, k: (q @ k.mT / math.sqrt(K)).roll(1, 1)),
}  # fmt: skip


def layer(changes):
    return type("Changed", (Layer,), changes)()


@pytest.mark.parametrize("kind", RIGHT)
def test_layers_that_do_what_the_paper_says_are_right(kind):
    (verdict,) = verify(layer(RIGHT[kind]), TOKENS)
    assert verdict.right and max(verdict.value_error, verdict.logit_error) < 1e-5
    assert ("rotary" in verdict.note) == (kind == "rotary positions")


@pytest.mark.parametrize("kind", WRONG)
def test_layers_that_do_something_else_are_wrong_and_with_an_example_refused(kind):
    model = nn.Sequential(layer({}), layer(WRONG[kind]))
    good, bad = verify(model, TOKENS)
    assert good.right and bad.right is False and bad.note
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="^1: .*(off by|its map is not)"):
        mimetic_init_(model, example=TOKENS)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="left as they are: 1"):
        assert mimetic_init_(model, strict=False, example=TOKENS) == ["0"]


def test_queries_of_other_tokens_than_the_keys_are_wrong():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(D, HEADS, batch_first=True)

        def forward(self, x, y, value):
            return self.attn(x, y, value)[0]

    x, y = TOKENS, TOKENS.flip(0)
    assert [verify(Calls(), *inputs)[0].right for inputs in [(x, x, x), (x, x, y), (x, y, y)]] == [True, True, False]
    assert "other tokens" in verify(Calls(), x, y, y)[0].note


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_s_encoder_and_decoder_are_right_in_both_orders_of_batch_and_tokens(batch_first):
    model = nn.Transformer(D, HEADS, 2, 2, 48, batch_first=batch_first)
    assert [verdict.right for verdict in verify(model, TOKENS, TOKENS)] == [True] * 4


def test_our_models_are_right_also_in_bfloat16_and_compiled():
    vit, images = ViT(image_size=8, patch_size=4, dim=D, depth=2, heads=HEADS), torch.randn(2, 3, 8, 8)
    lm, ids = TransformerLM(11, context=N, dim=D, depth=2, heads=HEADS), torch.arange(N)[None]
    cases = [(vit, images), (lm, ids), (torch.compile(vit), images), (copy.deepcopy(vit).bfloat16(), images.bfloat16())]
    for model, example in cases:
        assert [verdict.right for verdict in verify(model, example)] == [True, True]


def test_verify_leaves_weights_modes_and_random_state_as_they_were():
    model = ViT(image_size=8, patch_size=4, dim=D, depth=2, heads=HEADS, dropout=0.5).train()
    model.blocks[0].eval()
    before, modes, state = (
        copy.deepcopy(model.state_dict()),
        [m.training for m in model.modules()],
        torch.get_rng_state(),
    )
    verify(model, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    verify(model, "no image")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_the_input_does_not_come_to_is_neither_right_nor_wrong_and_an_example_must():
    model = nn.ModuleDict(dict(a=layer({}), b=layer({})))
    model.forward = lambda x: model["a"](x)
    a, b = verify(model, TOKENS)
    assert a.right and b.right is None and b.note == "this input does not come to it"
    with pytest.raises(ValueError, match="^b: this input does not come to it"):
        mimetic_init_(model, example=TOKENS)
    assert all("raised RuntimeError" in verdict.note for verdict in verify(model, TOKENS[..., 1:]))


def test_an_example_may_be_a_tensor_a_tuple_or_keywords():
    model = layer({})
    for example in (TOKENS, (TOKENS,), dict(x=TOKENS)):
        assert mimetic_init_(model, example=example) == [""]


def test_tied_weights_show_too():
    model = nn.ModuleDict({name: nn.Linear(D, D) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    model.num_heads = HEADS
    model.forward = lambda x: model["o_proj"](
        F.scaled_dot_product_attention(
            *(model[f"{n}_proj"](x).unflatten(-1, (HEADS, K)).transpose(1, 2) for n in "qkv")
        ).transpose(1, 2).flatten(2)
    )  # fmt: skip
    assert verify(model, TOKENS)[0].right
    model["k_proj"].weight = model["q_proj"].weight
    assert verify(model, TOKENS)[0].right is False


def test_a_shared_module_is_right():
    shared = layer({})
    assert [verdict.right for verdict in verify(nn.Sequential(shared, shared), TOKENS)] == [True]
    assert len(attention_layers(nn.Sequential(shared, shared))) == 1
