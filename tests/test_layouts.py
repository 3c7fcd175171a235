"""Views are right where the layer itself, run forward, acts as the paper's equations say."""

import copy
import math

import pytest
import torch
from torch import nn

import layouts
from layouts import attention_layers
from mimetic import mimetic_init_
from vit import Attention

D, HEADS, N = 24, 3, 7
K = D // HEADS


def attend(q, k, v):
    """What every library does between the projections, (B, N, D) each: the output of all heads, and the maps."""
    q, k, v = (tensor.unflatten(-1, (HEADS, K)).transpose(1, 2) for tensor in (q, k, v))  # (B, H, N, K)
    maps = (q @ k.transpose(-2, -1) / math.sqrt(K)).softmax(-1)
    return (maps @ v).transpose(1, 2).flatten(2), maps


class Conv1D(nn.Module):  # GPT-2's linear layer: x @ weight + bias, the weight (in, out)
    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def with_children(**children):
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def linears(names, **children):
    return with_children(**{name: nn.Linear(D, D) for name in names.split()}, **children)


def timm():
    module = with_children(qkv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D), num_heads=HEADS, scale=K**-0.5)
    return module, lambda x: attend(*module.qkv(x).chunk(3, -1)), module.proj


def nano_gpt():
    module = with_children(c_attn=nn.Linear(D, 3 * D), c_proj=nn.Linear(D, D), n_head=HEADS)
    return module, lambda x: attend(*module.c_attn(x).split(D, -1)), module.c_proj


def gpt2():
    module = with_children(c_attn=Conv1D(3 * D, D), c_proj=Conv1D(D, D), num_heads=HEADS, scale_attn_weights=True)
    return module, lambda x: attend(*module.c_attn(x).split(D, -1)), module.c_proj


def vit_pytorch():
    to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0))
    module = with_children(to_qkv=nn.Linear(D, 3 * D), to_out=to_out, norm=nn.Identity(), heads=HEADS)
    return module, lambda x: attend(*module.to_qkv(x).chunk(3, -1)), to_out


def neighbours(child):
    core = linears("query key value", num_attention_heads=HEADS, attention_head_size=K)
    module = with_children(**{child: core}, output=linears("dense"))
    return module, lambda x: attend(core.query(x), core.key(x), core.value(x)), module.output.dense


def separate(names, proj, **heads):
    module = linears(f"{names} {proj}", **heads)
    q, k, v = (getattr(module, name) for name in names.split())
    return module, lambda x: attend(q(x), k(x), v(x)), getattr(module, proj)


def by_hand(build, *args, **kwargs):
    def build_layer():
        module, attention, proj = build(*args, **kwargs)
        return module, lambda x: proj(attention(x)[0]), lambda x: attention(x)[1]

    return build_layer


def ours():
    attention = Attention(D, HEADS)
    attention.qkv, attention.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
    return attention, attention, attention.attention_map


def multihead(**sizes):
    attention = nn.MultiheadAttention(D, HEADS, batch_first=True, **sizes)

    def forward(x):
        return attention(x, x, x, need_weights=False)[0]

    def maps(x):
        return attention(x, x, x, average_attn_weights=False)[1]

    return attention, forward, maps


LAYERS = {
    "vit.Attention": ours,
    "nn.MultiheadAttention": multihead,
    "timm, DINO": by_hand(timm),
    "nanoGPT": by_hand(nano_gpt),
    "GPT-2": by_hand(gpt2),
    "vit-pytorch": by_hand(vit_pytorch),
    "BERT": by_hand(neighbours, "self"),
    "ViT of transformers 4": by_hand(neighbours, "attention"),
    "ALBERT": by_hand(separate, "query key value", "dense", num_attention_heads=HEADS),
    "CLIP, OPT, BART": by_hand(separate, "q_proj k_proj v_proj", "out_proj", num_heads=HEADS, scaling=K**-0.5),
    "Llama, ViT of transformers 5": by_hand(separate, "q_proj k_proj v_proj", "o_proj", head_dim=K),
    "DistilBERT": by_hand(separate, "q_lin k_lin v_lin", "out_lin", n_heads=HEADS),
}


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


# ---- what is refused, by name and with the reason


def refused(module, reason, name="attn"):
    """The module is refused for `reason` and left out by strict=False; a good layer beside it is initialized."""
    good = nn.MultiheadAttention(D, HEADS)
    model = with_children(**{name: module}, good=good)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"^{name}\S*: .*{reason}"):
        mimetic_init_(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert mimetic_init_(model, strict=False) == ["good"]
    assert all(torch.equal(v, before[key]) for key, v in model.state_dict().items() if not key.startswith("good"))
    with pytest.raises(
        ValueError, match="no self-attention layer found in Module; the same call without strict=False says why"
    ):
        mimetic_init_(with_children(**{name: module}), strict=False)


def sized(inner=D, kv=D, **attributes):
    sizes = dict(q_proj=(D, inner), k_proj=(D, kv), v_proj=(D, kv), o_proj=(inner, D))
    return with_children(**{name: nn.Linear(*size) for name, size in sizes.items()}, **attributes)


def test_grouped_query_attention_is_refused():
    refused(sized(kv=K, num_heads=HEADS), "grouped-query attention .queries of width 24, keys of 8")
    refused(
        with_children(c_attn=nn.Linear(D, D + 2 * K), c_proj=nn.Linear(D, D), n_head=HEADS), "has 40 outputs.*grouped"
    )


@pytest.mark.parametrize("name", ["crossattention", "encoder_attn", "cross_attn"])
def test_cross_attention_is_refused_by_its_name(name):
    refused(LAYERS["CLIP, OPT, BART"]()[0], "cross-attention", name)
    refused(LAYERS["BERT"]()[0], "cross-attention", name)


def test_cross_attention_is_refused_by_attributes_and_classes():
    refused(sized(num_heads=HEADS, is_cross_attention=True), "cross-attention")
    for name in ("CrossAttention", "AttentionPool"):
        refused(type(name, (nn.MultiheadAttention,), {})(D, HEADS), "cross-attention or attention pooling")


def test_the_second_attention_of_a_torch_decoder_is_cross_attention():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS), 2)
    with pytest.raises(ValueError, match="layers.0.multihead_attn: cross-attention.*here, layers: 2"):
        mimetic_init_(decoder)
    assert mimetic_init_(decoder, strict=False) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert mimetic_init_(with_children(multihead_attn=nn.MultiheadAttention(D, HEADS))) == ["multihead_attn"]


def test_another_inner_width_than_the_models_is_refused():
    for inner in (2 * D, D // 2):
        refused(sized(inner, inner, num_heads=HEADS), f"inner width 3 x {inner // 3} is {inner}, not the model's 24")
    refused(nn.MultiheadAttention(D, HEADS, kdim=10), "kdim is not 24")
    refused(nn.MultiheadAttention(D, HEADS, vdim=10), "W_V W_proj must be 24 by 24")
    assert mimetic_init_(sized(2 * D, 2 * D, num_heads=HEADS), vp=False) == [""]  # the heads of queries and keys fit
    refused(with_children(to_qkv=nn.Linear(D, 3 * D), to_out=nn.Identity(), heads=1), "no output projection")


class Quantized(nn.Module):  # as torch.ao's: sizes, and a weight that is computed on demand
    in_features = out_features = D

    def weight(self):
        return torch.zeros(D, D)


class Packed(nn.Parameter):
    pass


def test_quantized_and_sharded_weights_are_refused():
    for weight in (Packed(torch.zeros(D, D)), nn.Parameter(torch.zeros(D, D, dtype=torch.int8), requires_grad=False)):
        module = sized(num_heads=HEADS)
        module.q_proj.weight = weight
        refused(module, "Linear.weight is quantized or sharded")
    module = sized(num_heads=HEADS)
    module.v_proj.weight = nn.Parameter(torch.zeros(0))  # as ZeRO-3 and FSDP leave it between two steps
    refused(module, "sharded .*shape .0,")
    module = sized(num_heads=HEADS)
    module.o_proj = Quantized()
    refused(module, "Quantized.weight is quantized")


def test_a_sharded_tensor_is_refused(tmp_path):
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        module = sized(num_heads=HEADS)
        module.k_proj.weight = nn.Parameter(distribute_tensor(module.k_proj.weight.detach(), DeviceMesh("cpu", [0])))
        with pytest.raises(ValueError, match="quantized or sharded .a DTensor"):
            mimetic_init_(module)
    finally:
        torch.distributed.destroy_process_group()


def test_projections_packed_head_by_head_are_refused():
    refused(with_children(query_key_value=nn.Linear(D, 3 * D), dense=nn.Linear(D, D), num_heads=HEADS), "head by head")
    module = with_children(qkv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D), num_heads=HEADS, head_first=True)
    refused(module, "head by head")


def test_layers_that_compute_something_else_are_refused():
    def changed(**attributes):
        module = by_hand(timm)()[0]
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    refused(changed(scale=1.0), "does not scale its logits by 1/√8")
    refused(changed(temperature=nn.Parameter(torch.ones(1))), "parts that the paper's layer does not have .temper")
    refused(changed(q_norm=nn.LayerNorm(K)), "does not have .q_norm")
    refused(changed(norm=nn.LayerNorm(D)), "does not have .norm")  # timm's comes between attention and projection
    refused(nn.MultiheadAttention(D, HEADS, add_bias_kv=True), "does not have .bias_k, bias_v")
    assert mimetic_init_(changed(relative_position_bias_table=nn.Parameter(torch.zeros(9, HEADS)))) == [""]


def test_norms_before_and_after_the_layer_do_no_harm():
    for library, path in [("vit-pytorch", "norm"), ("BERT", "output.LayerNorm"), ("ALBERT", "LayerNorm")]:
        module = LAYERS[library]()[0]
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, nn.LayerNorm(D))
        assert mimetic_init_(module) == [""]


# ---- which modules are layers


def test_a_layer_is_found_once_and_under_the_module_that_holds_its_projection():
    layers = [nn.Module() for _ in range(2)]
    for layer in layers:
        layer.attention, layer.output = LAYERS["ViT of transformers 4"]()[0], linears("dense")  # the MLP's output
    assert mimetic_init_(nn.ModuleList(layers)) == ["0.attention", "1.attention"]
    shared = nn.MultiheadAttention(D, HEADS)
    assert mimetic_init_(with_children(first=shared, second=shared)) == ["first"]


def test_an_mlp_beside_the_attention_is_not_taken_for_its_projection():
    core = linears("query key value", num_attention_heads=HEADS)
    block = with_children(attention=core, output=with_children(dense=nn.Linear(4 * D, D)))
    with pytest.raises(ValueError, match="looks like attention"):
        mimetic_init_(block)


class StrangeAttention(nn.Module):
    """A layout of nobody's: one matrix for queries and keys, names of its own."""

    def __init__(self):
        super().__init__()
        self.wqk, self.wv, self.wo, self.h = nn.Linear(D, 2 * D), nn.Linear(D, D), nn.Linear(D, D), HEADS


def test_unknown_attention_is_named_and_a_layout_can_be_registered(monkeypatch):
    model = nn.Sequential(*(StrangeAttention() for _ in range(5)))
    looks = r"looks like attention.*: 0 \(StrangeAttention\), 1 .*, 2 .* and 2 more.*layouts.LAYOUTS.*b_proj"
    with pytest.raises(ValueError, match=looks):
        mimetic_init_(model)
    with pytest.raises(ValueError, match=r"the model \(StrangeAttention\)"):
        mimetic_init_(StrangeAttention())
    assert mimetic_init_(nn.Sequential(model, nn.MultiheadAttention(D, HEADS)), strict=False) == ["1"]

    def strange(module):
        if isinstance(module, StrangeAttention):
            q, k = module.wqk.weight.chunk(2)
            biases = (*module.wqk.bias.chunk(2), module.wv.bias, module.wo.bias)
            return module.h, q, k, module.wv.weight, module.wo.weight, biases

    monkeypatch.setattr(layouts, "LAYOUTS", [strange])
    assert mimetic_init_(model) == list("01234")
    q, k = (model[0].wqk(torch.eye(D)) - model[0].wqk(torch.zeros(D))).chunk(2, -1)
    view = attention_layers(model)[0]
    torch.testing.assert_close(q[:, :K] @ k[:, :K].T, view.W_Q[0] @ view.W_K[0].T)


def test_a_module_can_name_parameters_of_its_own_that_do_no_harm():
    module = by_hand(timm)()[0]
    module.gate, module.harmless_parameters = nn.Parameter(torch.ones(HEADS)), "gate|v_pos"
    assert mimetic_init_(module) == [""]
    module.gate_proj = nn.Linear(D, D)  # another one, though its name begins alike
    refused(module, "does not have .gate_proj")


def test_a_module_can_look_like_attention_by_its_own_name_alone():
    block = nn.ModuleDict(dict(attn=with_children(qk=nn.Linear(D, 2 * D), v=nn.Linear(D, D)), mlp=nn.Linear(D, D)))
    with pytest.raises(ValueError, match=r"looks like attention.*: attn \(Module\)\."):
        mimetic_init_(block)


def test_a_layout_of_ones_own_comes_before_those_known(monkeypatch):
    module = by_hand(timm)()[0]
    module.head_first = True  # refused, but its owner knows better
    biases = (None,) * 4
    mine = lambda m: (HEADS, *m.qkv.weight.chunk(3), m.proj.weight, biases) if m is module else None  # noqa: E731
    monkeypatch.setattr(layouts, "LAYOUTS", [mine])
    assert mimetic_init_(module) == [""]


def test_beit_keeps_its_biases_beside_the_matrix():
    module = by_hand(timm)()[0]
    module.qkv = nn.Linear(D, 3 * D, bias=False)
    module.q_bias, module.v_bias = (nn.Parameter(torch.ones(D)) for _ in range(2))
    mimetic_init_(module)
    assert (module.q_bias == 0).all() and (module.v_bias == 0).all()
