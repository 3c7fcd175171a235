"""The views are right for the attention layers of the libraries themselves, run forward inside their own models.

Skipped where a library is not installed. With all of them, from a clone of this repository:

    pip install timm transformers torchvision vit-pytorch pytest
    PYTHONPATH=/path/to/nanoGPT python -m pytest tests/test_libraries.py -rs
"""

import math

import pytest
import torch
from torch import nn

from layouts import attention_layers
from mimetic import mimetic_init_
from verify import verify

D, HEADS, K = 24, 3, 8
VIT = dict(hidden_size=D, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=48, image_size=16)
TEXT = dict(hidden_size=D, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=48, vocab_size=11)
GLOBAL = [[["global"], 1]]
BART = dict(d_model=D, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS)
images, ids = dict(pixel_values=torch.randn(D, 3, 16, 16)), dict(input_ids=torch.arange(D * 6).view(D, 6) % 11)


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def hugging_face(model, **config):
    """`model`, a class of transformers, from a configuration."""
    library("transformers")
    import transformers

    kind = getattr(transformers, model)
    return kind(kind.config_class(**config))


def run_layer(model, inputs, name, fill):
    """What the layer `name` returns for the input that `fill` makes of its shape, in a forward pass of its model."""
    module, calls = model.get_submodule(name), []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    hook.remove()
    args, kwargs = calls[0]
    hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    x = fill(hidden)

    def swap(key, value):
        if key == "position_embeddings":  # rotations by no angle
            return torch.ones_like(value[0]), torch.zeros_like(value[1])
        return x if value is hidden else value

    y = module(*(swap(None, value) for value in args), **{key: swap(key, value) for key, value in kwargs.items()})
    return x, y[0] if isinstance(y, tuple) else y


def check(model, inputs, names, causal=False, residual=False):
    """The layers called `names` are found; the last acts as x W_V W_proj, its heads' logits are x W_Q W_Kᵀ xᵀ/√k."""
    model.eval()
    assert mimetic_init_(model, generator=torch.Generator().manual_seed(0), strict=False) == names
    view = attention_layers(model, strict=False)[-1]
    module = model.get_submodule(view.name)
    with torch.no_grad():
        for child in list(module.modules()):
            for name, norm in child.named_children():
                if isinstance(norm, nn.LayerNorm):
                    setattr(child, name, nn.Identity())  # before the layer (vit-pytorch) or after the sum (BERT)
        for name, parameter in module.named_parameters():
            if "relative_position" in name:
                parameter.zero_()

    def layer(fill):
        x, y = run_layer(model, inputs, view.name, fill)
        return (x, y - x) if residual else (x, y)

    # N times the same unit vector in each of D batches: all attention is the same, so the layer is W_V W_proj.
    _, y = layer(lambda hidden: torch.eye(D)[torch.arange(len(hidden)) % D][:, None].expand(hidden.shape).contiguous())
    assert len(y) >= D
    torch.testing.assert_close(y[:D, -1], view.W_V @ view.W_proj, atol=1e-5, rtol=0)

    # With W_V the pseudo-inverse of x, the values of every head are the identity, and W_proj = I hands out its map.
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(1))

    def repeat(hidden):
        N = hidden.shape[1]
        assert N <= 6 < K
        view.W_V.copy_(nn.functional.pad(torch.linalg.pinv(x[:N]), (0, K - N)).repeat(1, HEADS))
        view.W_proj.copy_(torch.eye(D))
        return x[:N].expand(hidden.shape).contiguous()

    x, y = layer(repeat)
    N = x.shape[1]
    maps = y[0].view(N, HEADS, K).transpose(0, 1)[:, :, :N]  # (H, N, N)
    logits = x[0] @ view.W_Q @ view.W_K.transpose(1, 2) @ x[0].T / math.sqrt(K)
    if causal:
        logits = logits + torch.full((N, N), -torch.inf).triu(1)
    torch.testing.assert_close(maps, logits.softmax(-1), atol=1e-4, rtol=0)
    assert maps.std(0).mean() > 0.01  # the heads differ, so their order is checked


def layers(pattern, depth=2):
    return [pattern.format(i) for i in range(depth)]


# ---- torch and torchvision


def test_torch_encoder():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, HEADS, 48, 0.0, batch_first=True), 2)
    check(model, [torch.randn(D, 6, D)], layers("layers.{}.self_attn"))


def test_torchvision_vit():
    vision = library("torchvision.models.vision_transformer")
    model = vision.VisionTransformer(16, 8, 2, HEADS, D, 48)
    check(model, [images["pixel_values"]], layers("encoder.layers.encoder_layer_{}.self_attention"))


def test_torchvision_swin():
    swin = library("torchvision.models.swin_transformer")
    sizes = dict(patch_size=[4, 4], embed_dim=D, depths=[2], num_heads=[HEADS], window_size=[2, 2])
    names = layers("features.1.{}.attn")
    model = swin.SwinTransformer(**sizes)
    assert mimetic_init_(model) == names  # the layer shifts and cuts its windows itself, so it is called as a whole
    attention = model.features[1][0].attn
    with torch.no_grad():
        attention.qkv.weight[:D] = 0
        attention.relative_position_bias_table.zero_()
    view = attention_layers(model)[0]
    x = torch.eye(D)[:, None, None].expand(D, 4, 4, D)
    torch.testing.assert_close(attention(x)[:, 0, 0], view.W_V @ view.W_proj, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="does not have .cpb_mlp"):
        mimetic_init_(swin.SwinTransformer(**sizes, block=swin.SwinTransformerBlockV2))


# ---- timm


def timm_vit(**changes):
    library("timm")
    from timm.models.vision_transformer import VisionTransformer

    sizes = dict(img_size=16, patch_size=8, embed_dim=D, depth=2, num_heads=HEADS)
    return VisionTransformer(**{**sizes, **changes})


def test_timm_vit():
    check(timm_vit(), [images["pixel_values"]], layers("blocks.{}.attn"))


def test_timm_beit_and_swin():
    library("timm")
    from timm.models.beit import Beit
    from timm.models.swin_transformer import SwinTransformer

    sizes = dict(img_size=16, embed_dim=D)
    beit = Beit(**sizes, patch_size=8, depth=2, num_heads=HEADS, use_rel_pos_bias=True)
    check(beit, [images["pixel_values"]], layers("blocks.{}.attn"))
    swin = SwinTransformer(**sizes, patch_size=4, depths=(2,), num_heads=(HEADS,), window_size=2)
    check(swin, [images["pixel_values"]], layers("layers.0.blocks.{}.attn"))


def test_timm_eva_fused_and_separate():
    library("timm")
    from timm.models.eva import Eva

    for fused in (True, False):
        model = Eva(16, 8, embed_dim=D, depth=2, num_heads=HEADS, qkv_fused=fused, use_rot_pos_emb=False)
        check(model, [images["pixel_values"]], layers("blocks.{}.attn"))


@pytest.mark.parametrize(
    "name, reason, sizes",
    [
        ("vit_base_patch16_siglip_224", "attn_pool: cross-attention or attention pooling", dict(embed_dim=D, depth=1)),
        ("swinv2_tiny_window8_256", "does not have .cpb_mlp.*logit_scale", dict(embed_dim=D, depths=(1,))),
        ("xcit_nano_12_p16_224", "does not have .temperature", dict(embed_dim=D, depth=1)),
        ("cait_xxs24_224", "does not have .proj_l", dict(embed_dim=D, depth=1)),
        ("davit_tiny", "its tokens are channels", dict(embed_dims=(D,), depths=(1,))),
        ("maxvit_rmlp_pico_rw_256", "head by head", {}),
        ("efficientformer_l1", "1536 outputs, not 3 times", {}),
        ("tiny_vit_5m_224", "does not have .attention_biases, norm", {}),
        ("levit_128s", "looks like attention.*blocks.0.attn .Attention", {}),
    ],
)
def test_timm_models_with_attention_of_another_kind_are_refused(name, reason, sizes):
    heads = dict(num_heads=(HEADS,) if "depths" in sizes else HEADS) if sizes else {}
    with pytest.raises(ValueError, match=reason):
        mimetic_init_(library("timm").create_model(name, **sizes, **heads))


def test_timm_vit_with_normalized_queries_is_refused():
    with pytest.raises(ValueError, match="does not have .k_norm, q_norm"):
        mimetic_init_(timm_vit(qk_norm=True))


# ---- vit-pytorch


def test_vit_pytorch_vit_and_simple_vit():
    vit, simple = library("vit_pytorch.vit"), library("vit_pytorch.simple_vit")
    sizes = dict(image_size=16, patch_size=8, num_classes=3, dim=D, depth=2, heads=HEADS, mlp_dim=48, dim_head=K)
    for kind in (vit.ViT, simple.SimpleViT):
        check(kind(**sizes), [images["pixel_values"]], layers("transformer.layers.{}.0"))
    with pytest.raises(ValueError, match="inner width 3 x 64 is 192, not the model's 24"):
        mimetic_init_(vit.ViT(**{**sizes, "dim_head": 64}))
    with pytest.raises(ValueError, match="no output projection"):
        mimetic_init_(vit.ViT(**{**sizes, "heads": 1, "dim_head": D}))
    with pytest.raises(ValueError, match="does not have .*k_norm"):
        mimetic_init_(library("vit_pytorch.simple_vit_with_qk_norm").SimpleViT(**sizes))


# ---- transformers


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2"])
def test_hugging_face_vit(kind):
    model = hugging_face(f"{kind}Model", **VIT, patch_size=8)
    names = [view.name for view in attention_layers(model)]
    assert len(names) == 2 and all(name.startswith(("encoder.layer.", "layers.", "layer.")) for name in names)
    check(model, images, names)


def test_hugging_face_swin():
    sizes = dict(image_size=16, patch_size=4, embed_dim=D, depths=[2], num_heads=[HEADS], window_size=2)
    model = hugging_face("SwinModel", **sizes)
    names = [view.name for view in attention_layers(model)]
    assert len(names) == 2
    check(model, images, names)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra"])
def test_hugging_face_bert(kind):
    check(hugging_face(f"{kind}Model", **TEXT), ids, layers("encoder.layer.{}.attention"), residual=True)


def test_hugging_face_bert_decoder_has_cross_attention():
    model = hugging_face("BertModel", **TEXT, is_decoder=True, add_cross_attention=True)
    with pytest.raises(ValueError, match="encoder.layer.0.crossattention: cross-attention"):
        mimetic_init_(model)
    assert mimetic_init_(model, strict=False) == layers("encoder.layer.{}.attention")


def test_hugging_face_albert_shares_one_layer():
    names = ["encoder.albert_layer_groups.0.albert_layers.0.attention"]
    check(hugging_face("AlbertModel", **TEXT, embedding_size=16), ids, names, residual=True)


def test_hugging_face_distilbert():
    model = hugging_face("DistilBertModel", dim=D, n_heads=HEADS, n_layers=2, hidden_dim=48, vocab_size=11)
    check(model, ids, layers("transformer.layer.{}.attention"))


def test_hugging_face_clip():
    model = hugging_face("CLIPVisionModel", **VIT, patch_size=8)
    names = [view.name for view in attention_layers(model)]
    assert len(names) == 2
    check(model, images, names)
    model = hugging_face("CLIPTextModel", **TEXT, max_position_embeddings=8)
    check(model, ids, [view.name for view in attention_layers(model)], causal=True)


def test_hugging_face_siglip_pools_with_a_query_of_its_own():
    model = hugging_face("SiglipVisionModel", **VIT, patch_size=8)
    with pytest.raises(ValueError, match="head.attention: cross-attention or attention pooling"):
        mimetic_init_(model)
    assert len(mimetic_init_(model, strict=False)) == 2


def test_hugging_face_opt():
    sizes = dict(hidden_size=D, num_attention_heads=HEADS, num_hidden_layers=2, ffn_dim=48, vocab_size=11)
    model = hugging_face("OPTModel", **sizes, word_embed_proj_dim=D, max_position_embeddings=8, use_cache=False)
    check(model, ids, layers("decoder.layers.{}.self_attn"), causal=True)


def test_hugging_face_bart():
    model = hugging_face("BartModel", **BART, vocab_size=11, max_position_embeddings=8, use_cache=False)
    with pytest.raises(ValueError, match="decoder.layers.0.encoder_attn: cross-attention"):
        mimetic_init_(model)
    names = layers("encoder.layers.{}.self_attn") + layers("decoder.layers.{}.self_attn")
    check(model, ids, names, causal=True)  # the last is the decoder's
    check(model.get_encoder(), ids, layers("layers.{}.self_attn"))


def test_hugging_face_llama():
    model = hugging_face("LlamaModel", **TEXT, num_key_value_heads=HEADS, use_cache=False)
    check(model, ids, layers("layers.{}.self_attn"), causal=True)
    with pytest.raises(ValueError, match="layers.0.self_attn: grouped-query attention"):
        mimetic_init_(hugging_face("LlamaModel", **TEXT, num_key_value_heads=1))


def gpt2(**changes):
    sizes = dict(n_embd=D, n_head=HEADS, n_layer=2, n_positions=8, vocab_size=11, use_cache=False)
    return hugging_face("GPT2Model", **sizes, **changes)


def test_hugging_face_gpt2_stores_the_transpose():
    check(gpt2(), ids, layers("h.{}.attn"), causal=True)


def test_hugging_face_gpt2_with_other_scales_or_cross_attention_is_refused():
    for flag in (dict(scale_attn_weights=False), dict(scale_attn_by_inverse_layer_idx=True)):
        with pytest.raises(ValueError, match="does not scale its logits by 1/√"):
            mimetic_init_(gpt2(**flag))
    model = gpt2(add_cross_attention=True)
    with pytest.raises(ValueError, match="has 48 outputs, not 3 times.*cross-attention"):
        mimetic_init_(model)
    assert mimetic_init_(model, strict=False) == layers("h.{}.attn")


@pytest.mark.parametrize(
    "kind, reason, config",
    [
        ("GPTNeoX", "head by head in GPT-NeoX", TEXT),
        ("Bloom", "head by head", dict(hidden_size=D, n_head=HEADS, n_layer=1, vocab_size=11)),
        ("GPTNeo", "does not scale", dict(hidden_size=D, num_heads=HEADS, num_layers=1, attention_types=GLOBAL)),
        ("GPTBigCode", "head by head", dict(n_embd=D, n_head=HEADS, n_layer=1, multi_query=False)),
        ("T5Encoder", "does not scale", dict(d_model=D, num_heads=HEADS, num_layers=1)),
        ("Swinv2", "parts that the paper's layer does not have", dict(embed_dim=D, depths=[1], num_heads=[HEADS])),
    ],
)  # fmt: skip
def test_hugging_face_models_with_attention_of_another_kind_are_refused(kind, reason, config):
    with pytest.raises(ValueError, match=reason):
        mimetic_init_(hugging_face(f"{kind}Model", **config))


@pytest.mark.parametrize(
    "kind, config",
    [
        ("Esm", dict(TEXT, pad_token_id=1)),
        ("MPNet", TEXT),
        ("ModernBert", dict(TEXT, pad_token_id=0)),
        ("Phi3", dict(TEXT, num_key_value_heads=HEADS, pad_token_id=0)),
        ("MegatronBert", TEXT),
        ("XLMRobertaXL", TEXT),
        ("Bart", dict(BART, vocab_size=11, max_position_embeddings=8)),  # encoder and decoder, with a cache
    ],
)
def test_hugging_face_text_models_pass_verify(kind, config):
    model = hugging_face(f"{kind}Model", **config)
    verdicts = verify(model, dict(input_ids=ids["input_ids"][:2]))
    assert verdicts and all(verdict.right for verdict in verdicts), verdicts


def test_hugging_face_blip_and_timm_s_tnt_and_parallel_block_pass_verify():
    blip = hugging_face("BlipVisionModel", **VIT, patch_size=8)
    timm = library("timm")
    tnt = timm.create_model("tnt_s_legacy_patch16_224", depth=1)
    block = library("timm.models.vision_transformer").ParallelScalingBlock
    image = torch.randn(1, 3, 224, 224)
    for model, example in [
        (blip, images["pixel_values"][:2]),
        (tnt, image),
        (timm_vit(block_fn=block), image[..., :16, :16]),
    ]:
        verdicts = verify(model, example)
        assert verdicts and all(verdict.right for verdict in verdicts), verdicts


def test_v_jepa_2_turns_a_token_s_own_logit_and_is_refused():
    sizes = dict(hidden_size=D, num_attention_heads=HEADS, num_hidden_layers=1, crop_size=32, frames_per_clip=2)
    with pytest.raises(ValueError, match="changes a token's logit with itself"):
        mimetic_init_(hugging_face("VJEPA2Model", **sizes, pred_hidden_size=D, pred_num_attention_heads=HEADS))


# ---- nanoGPT


def test_nano_gpt():
    nano_gpt = pytest.importorskip("model", reason="nanoGPT's model.py is not on PYTHONPATH")
    if not hasattr(nano_gpt, "GPTConfig"):
        pytest.skip("the module called model on PYTHONPATH is not nanoGPT's")
    sizes = dict(block_size=8, vocab_size=11, n_layer=2, n_head=HEADS, n_embd=D, dropout=0.0)
    for bias in (True, False):
        model = nano_gpt.GPT(nano_gpt.GPTConfig(**sizes, bias=bias))
        check(model, [ids["input_ids"]], layers("transformer.h.{}.attn"), causal=True)
        assert model.transformer.wte.weight is model.lm_head.weight
