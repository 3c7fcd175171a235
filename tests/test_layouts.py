"""Views are right where the layer itself, run forward, acts as the paper's equations say."""

import math

import pytest
import torch
from torch import nn

from layouts import attention_layers
from mimetic import mimetic_init_
from vit import Attention

D, HEADS, N = 24, 3, 7
K = D // HEADS


def ours():
    attention = Attention(D, HEADS)
    attention.qkv, attention.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)  # with biases, as timm and DeiT have them
    return attention, attention, attention.attention_map


def multihead(**sizes):
    attention = nn.MultiheadAttention(D, HEADS, batch_first=True, **sizes)

    def forward(x):
        return attention(x, x, x, need_weights=False)[0]

    def maps(x):
        return attention(x, x, x, average_attn_weights=False)[1]

    return attention, forward, maps


LAYERS = {"vit.Attention": ours, "nn.MultiheadAttention": multihead}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]()


def randomize(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)


def test_with_uniform_attention_the_layer_acts_as_W_V_W_proj(layer):
    module, forward, _ = layer
    mimetic_init_(module)
    (view,) = attention_layers(module)
    view.W_Q.zero_()  # all logits equal: each output is the mean of x W_V W_proj over the tokens
    x = torch.eye(D)[:, None].expand(D, N, D)  # N times the same unit vector
    torch.testing.assert_close(forward(x)[:, 0], view.W_V @ view.W_proj, atol=1e-5, rtol=0)


def test_logits_are_x_W_Q_W_K_x_over_root_k(layer):
    module, _, maps = layer
    randomize(module)
    (view,) = attention_layers(module)
    for bias in (view.b_Q, view.b_K):
        bias.zero_()
    x = torch.randn(2, N, D)
    M = view.W_Q @ view.W_K.transpose(1, 2)  # (H, D, D)
    logits = torch.einsum("bnd,hde,bme->bhnm", x, M, x) / math.sqrt(K)
    torch.testing.assert_close(maps(x), logits.softmax(-1), atol=1e-5, rtol=1e-4)


def test_the_whole_layer_is_what_the_views_say_biases_included(layer):
    module, forward, _ = layer
    randomize(module)
    (view,) = attention_layers(module)
    x = torch.randn(2, N, D)
    b_Q, b_K = view.b_Q.view(HEADS, 1, K), view.b_K.view(HEADS, 1, K)
    q, k = x[:, None] @ view.W_Q + b_Q, x[:, None] @ view.W_K + b_K  # (B, H, N, K)
    v = (x @ view.W_V + view.b_V).view(2, N, HEADS, K).transpose(1, 2)
    y = (q @ k.transpose(-2, -1) / math.sqrt(K)).softmax(-1) @ v
    expected = y.transpose(1, 2).reshape(2, N, D) @ view.W_proj + view.b_proj
    torch.testing.assert_close(forward(x), expected, atol=1e-5, rtol=1e-4)


def test_views_write_the_parameters_themselves(layer):
    module = layer[0]
    (view,) = attention_layers(module)
    for number, tensor in enumerate(view[2:], start=1):
        tensor.fill_(number)
    values = sorted({value.item() for parameter in module.parameters() for value in parameter.unique()})
    assert values == list(range(1, 9))


def test_separate_projections_of_multihead_attention_are_read_from_their_own_matrices():
    module = nn.MultiheadAttention(D, HEADS, batch_first=True, vdim=10)
    (view,) = attention_layers(module)
    assert view.W_K.shape == (HEADS, D, K) and view.W_V.shape == (10, D)
    mimetic_init_(module, vp=False)  # queries and keys fit the method, values of another width do not
    x, value = torch.randn(2, N, D), torch.randn(2, N, 10)
    M = view.W_Q @ view.W_K.transpose(1, 2)
    logits = torch.einsum("bnd,hde,bme->bhnm", x, M, x) / math.sqrt(K)
    maps = module(x, x, value, average_attn_weights=False)[1]
    torch.testing.assert_close(maps, logits.softmax(-1), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="W_V W_proj must be 24 by 24"):
        mimetic_init_(module)


def test_projections_without_bias_have_none():
    (view,) = attention_layers(nn.MultiheadAttention(D, HEADS, bias=False))
    assert view[6:] == (None,) * 4
    attention = nn.MultiheadAttention(D, HEADS, bias=False)
    assert mimetic_init_(nn.Sequential(attention)) == ["0"]


def test_layers_come_in_the_order_of_registration_and_under_their_names():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS), 3, enable_nested_tensor=False)
    assert [view.name for view in attention_layers(encoder)] == [f"layers.{i}.self_attn" for i in range(3)]
