"""Facts about lm.py: it never looks ahead, its weights stay tied, the chunked loss is the plain one, it generates."""

import copy
import io
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lm
from lm import TransformerLM
from mimetic import mimetic_init_, sinusoids_1d

SMALL = dict(vocab_size=11, context=8, dim=24, depth=2, heads=3)
LANGUAGE = dict(alpha1=0, beta1=0.5, alpha2=0.2, beta2=0.2)


def small_lm(**sizes):
    torch.manual_seed(0)
    return TransformerLM(**{**SMALL, **sizes})


def lively_lm(**sizes):
    """Weights far from their small beginnings, so that nothing is hidden by being almost zero; float64."""
    model = small_lm(**sizes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def some_ids(*shape, vocab_size=11):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


def set_fused(model, fused):
    for block in model.blocks:
        block.attn.fused = fused
    return model


# ---- the model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("context", [1, 2, 7, 16])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_output_depends_on_a_later_input_and_each_on_every_earlier_one(depth, context, fused):
    model = set_fused(lively_lm(depth=depth, context=context), fused)
    x = model.embed(some_ids(1, context)).detach()
    model.embed = lambda embedded: embedded  # so that gradients of the logits reach the embedded tokens
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x)[0].logsumexp(-1), x)[:, 0]  # (T out, T in, D)
    reached = jacobian.abs().amax(-1) > 0
    assert torch.equal(reached, torch.ones(context, context).tril().bool() if depth else torch.eye(context).bool())


@pytest.mark.parametrize("depth, context", [(1, 3), (2, 8), (4, 16)])
def test_changing_a_token_changes_no_earlier_logit_and_a_shorter_input_gives_the_same(depth, context):
    model, ids = lively_lm(depth=depth, context=context), some_ids(2, context)
    with torch.no_grad():
        before = model(ids)
        for t in range(context):
            changed = ids.clone()
            changed[:, t] = (changed[:, t] + 1) % 11
            after = model(changed)
            assert torch.equal(after[:, :t], before[:, :t]) and not torch.equal(after[:, t], before[:, t])
            torch.testing.assert_close(model(ids[:, : t + 1]), before[:, : t + 1])


def test_input_and_output_weights_are_one_tensor_after_init_save_load_copy_and_conversion():
    model, fresh = small_lm(), small_lm(depth=2)
    mimetic_init_(model, **LANGUAGE)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for each in (model, fresh, copy.deepcopy(model), small_lm().double()):
        shaped_like_it = [name for name, p in each.named_parameters() if 11 in p.shape]
        assert shaped_like_it == ["token_embed.weight"]
        E = each.token_embed.weight
        with torch.no_grad():
            E.zero_()
            assert (each(some_ids(1, 8)) == 0).all()  # the output layer is that very tensor
            E[3, :] = 1  # and so is the input
            assert not torch.equal(each.embed(some_ids(1, 1) * 0 + 3), each.embed(some_ids(1, 1) * 0))
    assert "token_embed.weight" in model.state_dict() and "pos_embed" in model.state_dict()


def test_parameter_count_is_what_the_formula_says():
    for V, D, L, T in [(11, 24, 2, 8), (50, 48, 3, 16)]:
        model = small_lm(vocab_size=V, dim=D, depth=L, context=T)
        block = 3 * D * D + D * D + (4 * D * D + 4 * D) + (4 * D * D + D) + 4 * D
        assert sum(p.numel() for p in model.parameters()) == V * D + L * block + 2 * D
    with torch.device("meta"):  # the paper's: character PTB and WikiText-103
        ptb = TransformerLM(50)
        wiki = TransformerLM(267_735, dim=410, depth=16, heads=10)
    assert sum(p.numel() for p in ptb.parameters()) == 50 * 384 + 12 * (12 * 384**2 + 9 * 384) + 2 * 384 == 21_295_104
    assert sum(p.numel() for p in wiki.parameters()) == 267_735 * 410 + 16 * (12 * 410**2 + 9 * 410) + 2 * 410


def test_the_whole_model_gives_the_same_numbers_and_gradients_explicit_and_fused():
    explicit = set_fused(lively_lm(), False)
    fused = set_fused(copy.deepcopy(explicit), True)
    ids, targets = some_ids(3, 8), some_ids(3, 8).flip(0)
    for model in (explicit, fused):
        model.loss(ids, targets).backward()
    torch.testing.assert_close(explicit(ids), fused(ids))
    for a, b in zip(explicit.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("pos_scale, embed_scale", [(1.0, None), (2.5, 1.0), (0.0, 7.0)])
def test_embeddings_are_scaled_by_root_dim_unless_told_and_positions_are_added_once(pos_scale, embed_scale):
    model, ids = small_lm(pos_scale=pos_scale, embed_scale=embed_scale), some_ids(2, 5)
    scale = math.sqrt(24) if embed_scale is None else embed_scale
    expected = scale * model.token_embed.weight[ids] + pos_scale * sinusoids_1d(5, 24)
    torch.testing.assert_close(model.embed(ids), expected)


def test_default_initialization_is_normal_and_comes_back_after_to_empty():
    model = small_lm(dim=96, vocab_size=200)
    with torch.device("meta"):
        empty = TransformerLM(**{**SMALL, "dim": 96, "vocab_size": 200})
    empty.to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.detach().fill_(torch.nan)
    empty.init_weights()
    for each in (model, empty):
        for module in each.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                assert abs(module.weight.std() - 0.02) < 0.001 and module.weight.abs().max() > 0.06  # not truncated
                assert getattr(module, "bias", None) is None or (module.bias == 0).all()
            elif isinstance(module, nn.LayerNorm):
                assert (module.weight == 1).all() and (module.bias == 0).all()
        assert torch.equal(each.pos_embed, sinusoids_1d(8, 96))


def test_mimetic_initialization_works_on_it_unchanged_and_leaves_the_embeddings_alone():
    model = small_lm()
    before = copy.deepcopy(model.state_dict())
    names = mimetic_init_(model, **LANGUAGE, generator=torch.Generator().manual_seed(0))
    assert names == ["blocks.0.attn", "blocks.1.attn"]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")}
    qkv, proj = model.blocks[0].attn.qkv.weight, model.blocks[0].attn.proj.weight
    q, k = (weight.view(3, 8, 24) for weight in qkv.chunk(3)[:2])
    torch.testing.assert_close(torch.einsum("hkd,hkd->h", q, k), torch.full((3,), 0.5 * 8))  # traces of W_Q W_Kᵀ
    product = (proj @ qkv.chunk(3)[2]).T  # W_V W_proj = 0.2 Z − 0.2 I
    assert abs(product.diagonal().mean() + 0.2) < 0.03 and abs(product.std() - 0.2 / 24**0.5) < 0.02


def test_every_parameter_gets_a_gradient():
    model = lively_lm(dropout=0.1, embed_dropout=0.1)
    model.loss(some_ids(4, 8), some_ids(4, 8)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_reaches_embeddings_attention_and_branches_and_falls_silent_in_eval_mode(fused):
    ids = some_ids(2, 8)
    for module in ("drop", "blocks.0.attn", "blocks.0.drop", "blocks.1.drop"):
        model = set_fused(lively_lm(dropout=0.5), fused)
        assert torch.equal(model.eval()(ids), model(ids))
        model.get_submodule(module).train()  # this one alone
        assert not torch.equal(model(ids), model(ids))


def test_embedding_dropout_drops_whole_rows_once_a_batch_and_rescales_the_others():
    model = small_lm(vocab_size=400, embed_dropout=0.3, pos_scale=0.0, embed_scale=1.0)
    ids = torch.arange(400).view(50, 8)
    ids = torch.cat([ids, ids.flip(0)])  # each type twice, in different rows and places
    rows = model.embed(ids).detach().flatten(0, 1)
    first, again = rows[:400], model.embed(ids).detach().flatten(0, 1)[:400]
    mirrored = rows[400:].view(50, 8, -1).flip(0).flatten(0, 1)
    assert torch.equal(first, mirrored)  # one mask a batch: a type is dropped everywhere or nowhere
    dropped = (first == 0).all(-1)
    assert 0.2 < dropped.float().mean() < 0.4 and not torch.equal(first, again)
    torch.testing.assert_close(first[~dropped], model.token_embed.weight[~dropped].detach() / 0.7)
    assert torch.equal(model.eval().embed(ids).detach(), model.token_embed.weight[ids].detach())


def test_embedding_dropout_leaves_the_output_side_alone():
    model = small_lm(embed_dropout=0.9, depth=0)
    hidden = torch.randn(1, 4, 24)
    model.hidden = lambda ids: hidden
    torch.testing.assert_close(model(None), hidden @ model.token_embed.weight.T)


def test_sizes_that_do_not_fit_are_named():
    for sizes, sentence in [
        (dict(heads=5), "5 heads do not divide the width 24"),
        (dict(dim=27), "even width"),
        (dict(embed_dropout=1.0), "embed_dropout is a probability below 1"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            small_lm(**sizes)
    for ids in (some_ids(1, 9), some_ids(8)):
        with pytest.raises(ValueError, match="at most 8 tokens") as error:
            small_lm()(ids)
        assert "\n" not in str(error.value)


# ---- the loss in chunks


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 5, 24, 100, None])
@pytest.mark.parametrize("some_ignored", [False, True])
def test_the_chunked_loss_is_the_plain_one_with_its_gradients(chunk, reduction, some_ignored):
    model, ids, targets = lively_lm(), some_ids(3, 8), some_ids(3, 8).roll(1, 0)
    if some_ignored:
        targets[0, :7] = targets[2, 5] = -100
    losses, gradients = [], []
    for loss in (
        lambda: F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction=reduction),
        lambda: model.loss(ids, targets, chunk=chunk, reduction=reduction),
    ):
        model.zero_grad()
        losses.append(loss())
        (losses[-1] * 3).backward()
        gradients.append([p.grad for p in model.parameters()])
        with torch.no_grad():
            torch.testing.assert_close(loss(), losses[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(losses[1], losses[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("chunk", [7, 64])
def test_the_chunked_loss_works_under_autocast_and_stays_in_float32(chunk):
    model, ids, targets = small_lm(), some_ids(8, 8), some_ids(8, 8).roll(1, 0)
    model.loss(ids, targets, chunk=64).backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.embed(ids).dtype == torch.bfloat16
        loss = model.loss(ids, targets, chunk=chunk)
    assert loss.dtype == torch.float32 and abs(loss - math.log(11)) < 0.1
    loss.backward()
    for p, expected in zip(model.parameters(), exact, strict=True):
        assert p.grad.dtype == torch.float32 and (p.grad - expected).norm() < 0.03 * expected.norm() + 1e-5


class Sizes(TorchDispatchMode):
    """Numbers in the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("training", [True, False])
def test_logits_of_more_than_a_chunk_never_exist_forward_or_backward(training):
    model = small_lm(vocab_size=1000, dim=4, heads=1, depth=1)
    ids = some_ids(16, 8, vocab_size=1000)  # 128 tokens: 128 000 logits
    for chunk, largest in [(32, 32_000), (8, 8_000), (128, 128_000)]:
        with Sizes() as sizes, torch.set_grad_enabled(training):
            loss = model.loss(ids, ids.roll(1), chunk=chunk)
            if training:
                loss.backward()
        assert sizes.largest == largest


def test_no_logits_are_kept_for_backward():
    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()
            alive.add(self)

    model, ids, alive = small_lm(vocab_size=1000, dim=4, heads=1, depth=1), some_ids(16, 8), weakref.WeakSet()
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        loss = model.loss(ids, ids.roll(1), chunk=8)
    assert max(kept.tensor.numel() for kept in alive) < 8 * 1000
    loss.backward()


def test_a_chunk_bounds_the_logits_whatever_the_vocabulary(monkeypatch):
    monkeypatch.setattr(lm, "LOGITS_AT_ONCE", 4_000)
    with Sizes() as sizes:
        small_lm(vocab_size=1000, dim=4, heads=1).loss(some_ids(4, 8), some_ids(4, 8)).backward()
    assert sizes.largest <= 4_000
    monkeypatch.setattr(lm, "LOGITS_AT_ONCE", 1)  # less than one token's
    small_lm().loss(some_ids(1, 3), some_ids(1, 3)).backward()


def test_arguments_that_the_loss_does_not_know_are_named():
    for wrong in (dict(chunk=0), dict(reduction="none")):
        with pytest.raises(ValueError, match="chunk is at least 1, reduction 'mean' or 'sum'"):
            small_lm().loss(some_ids(1, 3), some_ids(1, 3), **wrong)


# ---- generation


def greedy(model, ids, n):
    for _ in range(n):
        ids = torch.cat([ids, model(ids[:, -8:])[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize("how", [dict(top_k=1), dict(temperature=0), dict(temperature=1e-9), dict(temperature=1e-60)])
def test_generation_is_greedy_with_one_candidate_or_without_temperature(how):
    model = lively_lm()
    continued = model.generate(some_ids(3, 2), 15, **how)  # beyond the context of 8
    assert continued.shape == (3, 17) and torch.equal(continued, greedy(model, some_ids(3, 2), 15))


def test_generation_is_repeated_by_its_generator_and_not_by_another():
    model, ids = lively_lm(), some_ids(2, 3)
    draw = lambda seed: model.generate(ids, 20, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(0)[:, :3], ids) and torch.equal(model.generate(ids, 0), ids)


def test_tokens_are_drawn_with_the_models_probabilities():
    model, ids = small_lm(embed_scale=20.0), torch.zeros(20_000, 1, dtype=torch.int64)
    logits = model(ids[:1])[0, -1] / 0.5
    for top_k in (None, 4, 11, 99):
        drawn = model.generate(ids, 1, temperature=0.5, top_k=top_k, generator=torch.Generator().manual_seed(0))[:, 1]
        allowed = logits.topk(min(top_k or 11, 11)).indices
        p = torch.zeros(11).index_copy(0, allowed, logits[allowed].softmax(0))
        assert (drawn.bincount(minlength=11) / 20_000 - p).abs().max() < 0.015
        assert (drawn.bincount(minlength=11)[p == 0] == 0).all()


def test_generation_never_drops_out_and_leaves_every_module_in_its_mode():
    model = lively_lm(dropout=0.5, embed_dropout=0.5).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    ids = some_ids(2, 3)
    assert torch.equal(model.generate(ids, 9, top_k=1), model.generate(ids, 9, top_k=1))
    with pytest.raises(IndexError):
        model.generate(ids + 11, 1)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    "ids, n, how",
    [
        (some_ids(1, 0), 1, {}),
        (some_ids(3), 1, {}),
        (some_ids(1, 3), -1, {}),
        (some_ids(1, 3), 1, dict(temperature=-0.1)),
        (some_ids(1, 3), 1, dict(temperature=math.nan)),
        (some_ids(1, 3), 1, dict(temperature=math.inf)),
        (some_ids(1, 3), 1, dict(top_k=0)),
    ],
)
def test_generation_refuses_what_it_cannot_do(ids, n, how):
    with pytest.raises(ValueError, match="generate continues|temperature is finite"):
        small_lm().generate(ids, n, **how)
