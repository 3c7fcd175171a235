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


def two_and_one(names, sizes):
    to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0)) if "to_q" in names else nn.Linear(D, D)
    module = with_children(**{name: nn.Linear(D, size) for name, size in zip(names, sizes)}, num_heads=HEADS)
    setattr(module, "to_out" if "to_q" in names else "proj", to_out)
    return module, lambda x: attend(*torch.cat([getattr(module, n)(x) for n in names], -1).chunk(3, -1)), to_out


def parallel():
    module = with_children(in_proj=nn.Linear(D, 5 * D), attn_out_proj=nn.Linear(D, D), num_heads=HEADS)
    module.register_buffer("unused", torch.zeros(1))
    return module, lambda x: attend(*module.in_proj(x)[..., 2 * D :].chunk(3, -1)), module.attn_out_proj


def packed(qkv, output):
    module = with_children(**{qkv: nn.Linear(D, 3 * D), output: nn.Linear(D, D)}, head_dim=K)
    return module, lambda x: attend(*getattr(module, qkv)(x).chunk(3, -1)), getattr(module, output)


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
    "to_q, to_kv of vit-pytorch": by_hand(two_and_one, ("to_q", "to_kv"), (D, 2 * D)),
    "TNT of timm": by_hand(two_and_one, ("qk", "v"), (2 * D, D)),
    "x-transformers, diffusers": by_hand(separate, "to_q to_k to_v", "to_out", heads=HEADS),
    "MPNet": by_hand(separate, "q k v", "o", num_attention_heads=HEADS),
    "ModernBERT": by_hand(packed, "Wqkv", "Wo"),
    "BLIP": by_hand(packed, "qkv", "projection"),
    "Phi-3": by_hand(packed, "qkv_proj", "o_proj"),
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


# ---- nothing is half written: memory that is shared, or cannot be written


def untouched(model, reason):
    """A model of two layers is refused for the second, and the first is as it was."""
    before = copy.deepcopy(model[0].state_dict())
    with pytest.raises(ValueError, match=reason):
        mimetic_init_(model)
    assert all(torch.equal(value, before[key]) for key, value in model[0].state_dict().items())


@pytest.mark.parametrize(
    "tie", ["module", "parameter", "view", "v to proj", "across layers", "a head", "a norm's bias"]
)
def test_weights_that_share_memory_are_refused_before_anything_is_written(tie):
    first, second = (sized(num_heads=HEADS) for _ in range(2))
    model = nn.Sequential(first, second)
    if tie == "module":
        second.k_proj = second.q_proj
    elif tie == "parameter":
        second.k_proj.weight = second.q_proj.weight
    elif tie == "view":
        both = torch.randn(D + 2, D)
        second.q_proj.weight, second.k_proj.weight = nn.Parameter(both[:D]), nn.Parameter(both[2:])
    elif tie == "v to proj":
        second.v_proj.weight = second.o_proj.weight
    elif tie == "across layers":
        second.q_proj.weight = first.q_proj.weight
    elif tie == "a head":
        model.head = nn.Linear(D, D)
        model.head.weight = second.o_proj.weight
    else:
        model.norm = nn.LayerNorm(D)
        model.norm.bias = second.o_proj.bias
    untouched(model, "shares? memory with another parameter")
    if tie == "across layers":
        return
    with pytest.warns(UserWarning, match="left as they are: 1"):
        assert mimetic_init_(model, strict=False) == ["0"]


def test_disjoint_parts_of_one_buffer_and_tied_embeddings_are_no_obstacle():
    model = sized(num_heads=HEADS)
    buffer = torch.randn(2 * D, D)
    model.q_proj.weight, model.k_proj.weight = nn.Parameter(buffer[:D]), nn.Parameter(buffer[D:])
    model.embedding, model.head = nn.Embedding(5, D), nn.Linear(D, 5)
    model.head.weight = model.embedding.weight
    model.embedding.weight.requires_grad_(False)
    model.harmless_parameters = "embedding|head"
    assert mimetic_init_(model) == [""]
    assert mimetic_init_(nn.Sequential(by_hand(gpt2)()[0])) == ["0"]  # q, k, v are columns of one matrix


@pytest.mark.parametrize("kind", ["meta", "expanded", "sparse", "inference", "lazy"])
def test_a_weight_that_cannot_be_written_stops_the_whole_init(kind):
    model = nn.Sequential(sized(num_heads=HEADS), sized(num_heads=HEADS))
    reason = {"meta": "meta device", "inference": "inference mode", "lazy": "no size yet"}.get(
        kind, "sparse or expanded"
    )
    if kind == "lazy":
        model[1].k_proj = nn.LazyLinear(D)
    else:
        with torch.inference_mode(kind == "inference"):
            weight = {
                "meta": lambda: torch.empty(D, D, device="meta"),
                "expanded": lambda: torch.zeros(D, 1).expand(D, D),
                "sparse": lambda: torch.eye(D).to_sparse(),
                "inference": lambda: torch.zeros(D, D),
            }[kind]()
            model[1].k_proj.weight = nn.Parameter(weight, requires_grad=False)
    untouched(model, f"^1: .*{reason}")


def test_looking_does_not_move_the_vectors_of_spectral_norm():
    model = sized(num_heads=HEADS)
    torch.nn.utils.parametrizations.spectral_norm(model.q_proj)
    before = copy.deepcopy(model.state_dict())
    refused(model, "computed from other tensors")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_true_is_no_number_of_heads():
    with pytest.raises(ValueError, match="looks like attention"):
        mimetic_init_(with_children(attn=sized(num_heads=True)))


# ---- refused and accepted by reason


def test_layers_that_say_that_they_differ_are_refused():
    def plain(**attributes):
        module = by_hand(timm)()[0]
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    class L2Norm(nn.Module):
        pass

    refused(plain(q_norm=L2Norm(), k_norm=L2Norm()), "does not have .k_norm, q_norm")  # without parameters
    refused(plain(config=with_children(), clip_qkv=8.0), "clamps")
    refused(plain(attn_logit_softcapping=50.0), "caps its logits")
    refused(plain(rotary_value=True), "rotates values")
    refused(nn.MultiheadAttention(D, HEADS, add_zero_attn=True), "a token of zeros")
    for name in ("ChannelAttentionV2", "LinearAttention", "NystromformerSelfAttention"):
        module = plain()
        module.__class__ = type(name, (nn.Module,), {})
        refused(module, "tokens are channels|approximation")
    assert mimetic_init_(plain(q_norm=nn.Identity(), clip_qkv=None, rotary_value=False)) == [""]


CROSS = ["cross_attention.attention", "x_attn", "visn_to_lang.attn", "encoder_attn_text", "pooler.attn", "xattn"]
SELF = [
    "cross_layers.0.self_attn",
    "cross_encoder.layer.0.attn",
    "poolformer.attn",
    "to_out_block.attn",
    "decoder.attn",
]


@pytest.mark.parametrize("path", [*CROSS, *SELF])
def test_the_nearest_word_of_the_path_says_whether_it_is_cross_attention(path):
    module = LAYERS["CLIP, OPT, BART"]()[0]
    for part in reversed(path.split(".")):
        module = nn.ModuleDict({part: module})
    if path in CROSS:
        with pytest.raises(ValueError, match=f"^{path}: cross-attention"):
            mimetic_init_(module)
    else:
        assert mimetic_init_(module) == [path]


def test_the_class_of_a_parent_says_it_only_if_it_is_named_after_attention():
    for name, accepted in [("AttentionPoolingHead", False), ("CrossAttentionLayer", False), ("CrossFormerBlock", True)]:
        parent = type(name, (nn.Module,), {})()
        parent.attn = nn.MultiheadAttention(D, HEADS)
        assert [view.name for view in attention_layers(parent, strict=False)] == ["attn"] * accepted
        parent.self_attn = nn.MultiheadAttention(D, HEADS)
        assert "self_attn" in [view.name for view in attention_layers(parent, strict=False)]


def test_an_adapter_is_called_one_and_squeeze_and_excite_is_no_attention():
    module = sized(num_heads=HEADS)
    module.q_proj.base_layer = nn.Linear(D, D)
    refused(module, "adapter .LoRA")
    squeeze = nn.Sequential(nn.Conv2d(D, 4, 1), nn.Conv2d(4, D, 1))
    model = with_children(good=nn.MultiheadAttention(D, HEADS), attention=squeeze)
    assert mimetic_init_(model) == ["good"]


def test_attention_of_another_name_is_named_too():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D) for _ in range(4))

    model = with_children(block=Mixer(), good=nn.MultiheadAttention(D, HEADS))
    with pytest.raises(ValueError, match=r"looks like attention.*: block \(Mixer\)"):
        mimetic_init_(model)
    with pytest.warns(UserWarning, match="left as they are: block"):
        assert mimetic_init_(model, strict=False) == ["good"]
    gated = linears("key value receptance output")  # RWKV's
    mlp = nn.Sequential(*(nn.Linear(D, D) for _ in range(5)))
    assert mimetic_init_(with_children(gated=gated, mlp=mlp, good=nn.MultiheadAttention(D, HEADS))) == ["good"]


def test_esm_scales_its_queries_first():
    module = separate("q_proj k_proj v_proj", "o_proj", num_heads=HEADS, scaling=1.0)[0]
    refused(module, "does not scale")
    module.__class__ = type("EsmSelfAttention", (nn.Module,), {})
    assert mimetic_init_(module) == [""]


def test_timm_s_parallel_block_keeps_q_k_v_behind_its_mlp():
    module, attention, proj = parallel()
    with torch.no_grad():
        mlp = module.in_proj.weight[: 2 * D].clone()
    assert mimetic_init_(module) == [""]
    assert torch.equal(module.in_proj.weight[: 2 * D], mlp)
    (view,) = attention_layers(module)
    x = torch.randn(D)
    with torch.no_grad():
        v_and_proj = proj(module.in_proj(x)[-D:]) - module.attn_out_proj.bias
    torch.testing.assert_close(v_and_proj, x @ view.W_V @ view.W_proj)


def test_a_norm_before_the_layer_that_bert_s_relatives_hold_does_no_harm():
    for name in ("ln", "self_attn_layer_norm"):
        module = LAYERS["BERT"]()[0]
        setattr(module, name, nn.LayerNorm(D))
        assert mimetic_init_(module) == [""]
