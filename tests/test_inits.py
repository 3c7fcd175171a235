import torch

from inits import rebased_init_, scaled_init_
from layouts import attention_layers
from mimetic import mimetic_init_
from vit import ViT


def test_scaled_control_has_the_norms_of_a_mimetic_draw_and_none_of_its_structure():
    models = []
    for init in (scaled_init_, mimetic_init_):
        torch.manual_seed(0)
        model = ViT(image_size=8, dim=96, depth=2, heads=3)
        init(model, alpha1=0.6, generator=torch.Generator().manual_seed(0))
        models.append(model)
    for a, b in zip(*map(attention_layers, models), strict=True):
        torch.testing.assert_close(a.W_Q.norm(dim=(1, 2)), b.W_Q.norm(dim=(1, 2)))
        torch.testing.assert_close(a.W_K.norm(dim=(1, 2)), b.W_K.norm(dim=(1, 2)))
        torch.testing.assert_close(a.W_V.norm(), b.W_V.norm())
        torch.testing.assert_close(a.W_proj.norm(), b.W_proj.norm())
        assert abs((a.W_V @ a.W_proj).diagonal().mean()) < 0.05
        assert (a.W_Q @ a.W_K.mT).diagonal(dim1=1, dim2=2).mean().abs() < 0.05
    attention = {id(p) for block in models[0].blocks for p in block.attn.parameters()}
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert id(p) in attention or torch.equal(p, q)


def test_scaled_control_leaves_alone_what_a_part_leaves_alone():
    for parts, untouched in [(dict(vp=False), "W_V"), (dict(qk=False), "W_Q")]:
        torch.manual_seed(0)
        model = ViT(image_size=8, dim=24, depth=1, heads=3)
        before = getattr(attention_layers(model)[0], untouched).clone()
        scaled_init_(model, **parts)
        (layer,) = attention_layers(model)
        assert torch.equal(getattr(layer, untouched), before)
        assert getattr(layer, {"W_V": "W_Q", "W_Q": "W_V"}[untouched]).std() > 0.05  # 0.02 by default


def test_other_bases_keep_a_projection_times_beta_and_choose_its_axes():
    language, models = dict(alpha1=0.0, beta1=0.5, alpha2=0.2, beta2=0.2), {}
    for basis in ("first", "own", "random"):
        torch.manual_seed(0)
        model, generator = ViT(image_size=8, dim=24, depth=1, heads=3), torch.Generator().manual_seed(0)
        init = mimetic_init_ if basis == "first" else lambda *a, **k: rebased_init_(*a, basis=basis, **k)  # noqa: B023
        init(model, **language, generator=generator)
        (models[basis],) = attention_layers(model)
        for W_Q, W_K in zip(models[basis].W_Q, models[basis].W_K):
            P = W_Q @ W_K.T / 0.5
            torch.testing.assert_close(P @ P, P, atol=1e-5, rtol=0)
            assert abs(P.trace() - 8) < 1e-4
    axes = {basis: (layer.W_Q @ layer.W_K.mT).diagonal(dim1=1, dim2=2) for basis, layer in models.items()}
    assert torch.equal(axes["first"][0], axes["first"][2])
    torch.testing.assert_close(axes["own"].sum(0), torch.full((24,), 0.5))  # heads share no axis and leave none out
    assert (axes["random"] > 0.05).float().mean() > 0.5
    assert torch.equal(models["random"].W_V, models["first"].W_V)
