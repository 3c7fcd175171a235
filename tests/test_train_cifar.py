"""The script from end to end, on small files in the official format."""

import json

import pytest
import torch
import torch.nn.functional as F

import train_cifar
from inits import INITS
from inputs.augment import cutout, normalize, random_crop, random_flip
from inputs.randaugment import rand_augment
from layouts import attention_layers
from official_formats import write_cifar10, write_cifar100
from train_cifar import DEMOS, Settings, batches, build, load_data, prepare_images, train
from training.flags import parse_settings
from training.start import pick_precision, run_script
from training.step import AUGMENT, ORDER, generator, learning_rate
from variants import ATTENTIONS
from vit import Attention, ViT

TINY = "--width 24 --depth 1 --patch-size 8 --epochs 2 --batch-size 16 --lr 1e-3 --precision fp32 --device cpu".split()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder, per_batch=20)
    write_cifar100(folder, train_size=200, test_size=100)
    return str(folder)


def settings(data_dir, *flags):
    return parse_settings(Settings, [*TINY, "--data-dir", data_dir, *flags], "", DEMOS["cifar10"])


def run(data_dir, *flags, **kwargs):
    train_cifar.main([*TINY, "--data-dir", data_dir, *flags], **kwargs)


def test_a_comparison_leaves_logs_results_and_a_table(data_dir, tmp_path, capsys):
    out = tmp_path / "out"
    run(data_dir, "--init", "default,mimetic", "--seeds", "0,1", "--out", str(out))
    folders = sorted(folder.name for folder in out.iterdir() if folder.is_dir())
    assert folders == ["default-seed0", "default-seed1", "mimetic-seed0", "mimetic-seed1"]
    head, *epochs = map(json.loads, (out / "mimetic-seed1" / "log.jsonl").read_text().splitlines())
    assert head["config"]["width"] == 24 and head["environment"]["torch"] == torch.__version__
    assert [record["epoch"] for record in epochs] == [1, 2] and epochs[-1]["step"] == 2 * 7  # 100 images by 16
    result = json.loads((out / "mimetic-seed1" / "result.json").read_text())
    wanted = {"dataset", "init", "seed", "test_acc", "epochs", "parameters", "images_per_second", "config"}
    assert wanted <= set(result) and result["test_acc"] == epochs[-1]["test_acc"]
    table = (out / "summary.md").read_text()
    assert table in capsys.readouterr().out and "| mimetic | 2 |" in table
    assert not list(out.rglob("*.tmp"))


def test_a_run_is_the_plain_loop_of_the_recipe(data_dir, monkeypatch):
    flags = "--augment randaugment --weight-decay 0.3 --clip 0.5 --warmup 0.3 --epochs 2 --init mimetic"
    s, made = settings(data_dir, *flags.split()), []
    data, built = load_data(s), train_cifar.build
    monkeypatch.setattr(train_cifar, "build", lambda *args: made.append(built(*args)) or made[-1])
    result = train(s, "mimetic", 1, data, torch.device("cpu"), "fp32")
    model = built(s, "mimetic", 1, data, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=0.3, fused=True)
    losses = []
    for step in range(14):
        epoch, i = divmod(step, 7)  # 100 images, batches of 16
        batch = torch.randperm(100, generator=generator(1, ORDER, epoch))[16 * i : 16 * (i + 1)]
        draws = generator(1, AUGMENT, step)
        x = random_flip(random_crop(data.train_images[batch], 4, draws), draws)
        x = cutout(normalize(rand_augment(x, 2, 9.0, 0.5, draws), data.mean, data.std), 16, draws)
        optimizer.param_groups[0]["lr"] = learning_rate(step, 14, s.lr, 0.3)
        loss = F.cross_entropy(model(x), data.train_labels[batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * len(batch))
    for a, b in zip(made[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
    assert result["train_loss"] == pytest.approx(sum(losses[7:]) / 100, rel=1e-4)


def test_a_folder_that_holds_a_run_is_not_overwritten(data_dir, tmp_path):
    flags = ("--init", "default", "--epochs", "1", "--out", str(tmp_path))
    run(data_dir, *flags)
    before = (tmp_path / "default-seed0" / "log.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="default-seed0 holds a run already"):
        run(data_dir, *flags, "--init", "mimetic,default")
    assert (tmp_path / "default-seed0" / "log.jsonl").read_bytes() == before
    assert not (tmp_path / "mimetic-seed0").exists()  # refused before anything is begun


def test_inits_differ_in_attention_alone_and_share_data_order_and_draws(data_dir):
    s = settings(data_dir)
    data = load_data(s)
    models = {init: build(s, init, 0, data, torch.device("cpu")).state_dict() for init in INITS}
    for init, state in models.items():
        changed = {name for name in state if not torch.equal(state[name], models["default"][name])}
        where = (".attn.", ".mlp.0.weight") if init == "mimetic-mlp" else (".attn.",)
        assert all(any(part in name for part in where) for name in changed) and bool(changed) == (init != "default")
    other = build(s, "mimetic", 1, data, torch.device("cpu")).state_dict()
    for name in ("head.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"):
        assert not torch.equal(other[name], models["mimetic"][name])  # another seed draws everything anew


def recorded(data_dir, monkeypatch, init, *flags):
    """Train, and return every batch and the learning rates as they reached the model, beside the result."""
    seen, s, original = [], settings(data_dir, *flags), train_cifar.backward

    def backward(model, images, labels, *rest):
        seen.append((images.clone(), labels.clone()))
        return original(model, images, labels, *rest)

    monkeypatch.setattr(train_cifar, "backward", backward)
    result = train(s, init, 0, load_data(s), torch.device("cpu"), "fp32")
    monkeypatch.setattr(train_cifar, "backward", original)
    return seen, result


def test_every_init_of_a_seed_sees_the_same_batches_each_image_once_an_epoch_in_a_new_order(data_dir, monkeypatch):
    runs = {init: recorded(data_dir, monkeypatch, init, "--augment", "randaugment")[0] for init in INITS}
    for seen in runs.values():
        for (images, labels), (first_images, first_labels) in zip(seen, runs["default"], strict=True):
            assert torch.equal(images, first_images) and torch.equal(labels, first_labels)
    plain, _ = recorded(data_dir, monkeypatch, "default", "--augment", "none")
    data = load_data(settings(data_dir))
    files = normalize(data.train_images, data.mean, data.std)
    epochs = [torch.cat([images for images, _ in plain[i : i + 7]]) for i in (0, 7)]  # 100 images, batches of 16
    for epoch in epochs:
        assert not torch.equal(epoch, files)
        assert {image.numpy().tobytes() for image in epoch} == {image.numpy().tobytes() for image in files}
    assert not torch.equal(*epochs)


@pytest.mark.parametrize(
    "flags",
    ["--lr 2e-3", "--weight-decay 0.5", "--warmup 0.5", "--clip 0.01", "--batch-size 20", "--pos learned",
     "--pos-scale 2", "--pool cls", "--heads 2", "--depth 2", "--patch-size 16", "--alpha1 0.1", "--beta1 0.1",
     "--alpha2 0.1", "--beta2 0.1", "--parts qk", "--parts vp", "--precision bf16", "--augment crop", "--cutout 4",
     "--ra-ops 1", "--ra-magnitude 20", "--limit 90", "--holdout 10", "--width 36", "--image-size 40",
     "--attention gpsa", "--attention conv-inside", "--attention conv-outside", "--attention conv-softmax",
     "--attention gpsa --depth 2 --local-layers 1 --pool cls"],
)  # fmt: skip
def test_every_setting_of_the_recipe_reaches_the_run(data_dir, flags):
    losses = []
    for extra in ([], flags.split()):
        s = settings(data_dir, "--weight-decay", "0.01", "--augment", "randaugment", *extra)
        precision = pick_precision(s.precision, torch.device("cpu"))
        losses.append(train(s, "mimetic", 0, load_data(s), torch.device("cpu"), precision)["train_loss"])
    assert losses[0] != losses[1]


def test_the_log_holds_the_schedule(data_dir, tmp_path):
    run(data_dir, "--init", "default", "--out", str(tmp_path))
    _, *epochs = map(json.loads, (tmp_path / "default-seed0" / "log.jsonl").read_text().splitlines())
    assert [record["lr"] for record in epochs] == [learning_rate(i, 14, 1e-3, 0.1) for i in (6, 13)]


def test_accuracy_is_counted_on_the_evaluation_images(data_dir):
    s = settings(data_dir)
    data = load_data(s)
    data = data._replace(
        test_labels=torch.zeros_like(data.test_labels), train_labels=torch.ones_like(data.train_labels)
    )
    model = build(s, "default", 0, data, torch.device("cpu"))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.eye(10)[0] * 100)  # always class 0
    accuracy, loss = train_cifar.evaluate(model, s, data, "fp32", 7)
    assert accuracy == 100.0 and loss == pytest.approx(0.0, abs=1e-6) and model.training


def test_a_run_repeats_and_micro_batches_add_up_to_the_batch(data_dir):
    flags = ("--init", "mimetic", "--augment", "crop")
    whole, again, parts = (settings(data_dir, *flags, "--micro-batch", m) for m in ("16", "16", "5"))
    data, device = load_data(whole), torch.device("cpu")
    results = [train(s, "mimetic", 0, data, device, "fp32") for s in (whole, again, parts)]
    assert results[0]["train_loss"] == results[1]["train_loss"]
    assert results[0]["train_loss"] == pytest.approx(results[2]["train_loss"], rel=1e-4)


def test_training_learns(data_dir):
    s = settings(data_dir, "--epochs", "30", "--augment", "none")
    result = train(s, "mimetic", 0, load_data(s), torch.device("cpu"), "fp32")
    assert result["test_acc"] > 40  # the ten classes of the made-up files differ in brightness; chance is 10


@pytest.mark.parametrize("augment", ["none", "crop", "randaugment"])
def test_augmentations_repeat_with_their_seed(data_dir, augment):
    s = settings(data_dir, "--augment", augment, "--batch-size", "32")
    data, a_batch = load_data(s), torch.arange(32)
    draws = [next(batches(s, seed, data, 0, torch.device("cpu")))[1] for seed in (0, 0, 1)]
    a, b, c = (prepare_images(data.train_images[a_batch], s, data, draw) for draw in draws)
    assert a.shape == (32, 3, 32, 32) and a.dtype == torch.float32
    assert torch.equal(a, b) and torch.equal(a, c) == (augment == "none")


def test_cifar100_gets_a_hundred_outputs(data_dir):
    s = settings(data_dir, "--dataset", "cifar100")
    assert build(s, "default", 0, load_data(s), torch.device("cpu")).head.out_features == 100


def test_limit_is_class_balanced_and_holdout_takes_from_train_alone(data_dir):
    s = settings(data_dir, "--limit", "40", "--holdout", "30")
    data, full = load_data(s), load_data(settings(data_dir))
    assert data.train_labels.bincount().tolist() == [4] * 10 and len(data.test_labels) == 30
    training = {image.numpy().tobytes() for image in full.train_images}
    kept = {image.numpy().tobytes() for image in data.train_images}
    held = {image.numpy().tobytes() for image in data.test_images}
    assert kept <= training and held <= training and not kept & held


def test_parts_and_products_reach_the_model(data_dir):
    data = load_data(settings(data_dir))
    states = {}
    for parts in ("both", "qk", "vp"):
        s = settings(data_dir, "--parts", parts, "--beta2", "-0.4", "--depth", "3")
        states[parts] = attention_layers(build(s, "mimetic", 0, data, torch.device("cpu")))[-1]
    default = attention_layers(build(s, "default", 0, data, torch.device("cpu")))[-1]
    assert torch.equal(states["vp"].W_Q, default.W_Q) and torch.equal(states["qk"].W_V, default.W_V)
    assert torch.equal(states["qk"].W_Q, states["both"].W_Q) and torch.equal(states["vp"].W_V, states["both"].W_V)
    assert (states["both"].W_V @ states["both"].W_proj).diagonal().mean() > 0.2


def test_ablations_of_the_paper_share_every_other_weight(data_dir):
    data = load_data(settings(data_dir))

    def state(*flags, init="mimetic"):
        return build(settings(data_dir, *flags), init, 0, data, torch.device("cpu")).state_dict()

    def changed(a, b):
        return {name for name in a if not torch.equal(a[name], b[name])}

    full = state()
    assert changed(full, state("--pos", "learned")) == {"pos_embed"}
    assert changed(full, state("--beta2", "-0.4")) == {"blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"}
    assert changed(full, state(init="default")) == {"blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"}
    assert changed(full, state("--parts", "qk")) == {"blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"}
    assert changed(full, state("--pos-scale", "2")) == set()
    learned = build(settings(data_dir, "--pos", "learned"), "mimetic", 0, data, torch.device("cpu")).pos_embed
    assert learned.requires_grad and 0.015 < learned.std() < 0.025
    (positive,) = attention_layers(
        build(settings(data_dir, "--beta2", "-0.4"), "mimetic", 0, data, torch.device("cpu"))
    )
    (negative,) = attention_layers(build(settings(data_dir), "mimetic", 0, data, torch.device("cpu")))
    difference = positive.W_V @ positive.W_proj - negative.W_V @ negative.W_proj
    torch.testing.assert_close(difference, 0.8 * torch.eye(24), atol=1e-5, rtol=0)  # the same Z


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_and_local_layers_reach_the_model(data_dir, name):
    s = settings(data_dir, "--attention", name, "--depth", "3", "--local-layers", "2", "--pool", "cls")
    model = build(s, "mimetic", 0, load_data(s), torch.device("cpu"))
    assert [type(block.attn) for block in model.blocks] == [ATTENTIONS[name]] * 2 + [Attention]
    assert model.local_layers == 2 and len(attention_layers(model)) == 3
    s = settings(data_dir, "--attention", name, "--depth", "3")
    assert {type(block.attn) for block in build(s, "default", 0, load_data(s), torch.device("cpu")).blocks} == {
        ATTENTIONS[name]
    }


def test_images_are_upsampled_after_augmentation_which_stays_as_it_was(data_dir, monkeypatch):
    seen, forward = [], ViT.forward
    monkeypatch.setattr(ViT, "forward", lambda model, images: seen.append(images) or forward(model, images))
    flags = ("--augment", "randaugment", "--epochs", "1")
    small, _ = recorded(data_dir, monkeypatch, "default", *flags)
    plain, seen = seen, []
    large, _ = recorded(data_dir, monkeypatch, "default", *flags, "--image-size", "64")
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(small, large, strict=True))
    assert len(plain) == len(seen) > 7  # 7 batches and the evaluation
    for a, b in zip(plain, seen, strict=True):
        assert a.shape[-2:] == (32, 32) and b.shape[-2:] == (64, 64)
        near, far = a[..., 1:-1, 1:-1], a[..., 1:-1, :-2]  # a pixel becomes four, each a quarter of the way to a corner
        across = 0.75 * near + 0.25 * far
        vertical = 0.75 * a[..., :-2, 1:-1] + 0.25 * a[..., :-2, :-2]
        torch.testing.assert_close(b[..., 2:-2:2, 2:-2:2], 0.75 * across + 0.25 * vertical)


def test_transfer_copies_from_a_run_to_another_grid_and_reports_it(data_dir, tmp_path, capsys):
    s, file = settings(data_dir), tmp_path / "last.pt"
    source = build(s, "mimetic", 5, load_data(s), torch.device("cpu"))
    torch.save(dict(model=source.state_dict()), file)
    flags = ("--patch-size", "4", "--pos", "learned", "--transfer-from", str(file))
    s = settings(data_dir, *flags)
    default, transfer = (build(s, init, 0, load_data(s), torch.device("cpu")) for init in ("default", "transfer"))
    changed = {k for k, v in transfer.state_dict().items() if not torch.equal(v, default.state_dict()[k])}
    assert changed == {"blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight", "pos_embed"}
    assert torch.equal(attention_layers(transfer)[0].W_Q, attention_layers(source)[0].W_Q)
    run(data_dir, *flags, "--init", "default,transfer", "--epochs", "1")
    printed = capsys.readouterr().out
    assert "transfer: 3 tensors from" in printed and "pos_embed" in printed and "| transfer |" in printed


def test_the_demo_falls_back_to_shapes_and_flags_beside_it_win(tmp_path, capsys):
    train_cifar.main(
        ["--demo", "--data-dir", str(tmp_path), "--limit", "50", "--epochs", "1", "--depth", "1", "--width", "24"]
    )
    printed = capsys.readouterr().out
    assert "shapes: 50 training images" in printed and "| mimetic |" in printed


def test_a_demo_of_a_named_data_set_has_the_settings_for_it(tmp_path):
    for name in ("cifar10", "shapes"):
        s = train_cifar.settings(["--demo", "--dataset", name, "--data-dir", str(tmp_path)])
        assert s.dataset == name and all(getattr(s, key) == value for key, value in DEMOS[name].items())


def test_the_demo_takes_cifar10_where_it_is(data_dir, capsys):
    train_cifar.main(
        ["--demo", "--data-dir", data_dir, "--limit", "50", "--epochs", "1", "--depth", "1", "--width", "24"]
    )
    assert "cifar10: 50 training images" in capsys.readouterr().out


def test_ctrl_c_ends_without_a_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run_script(interrupted)
    assert stop.value.code == 130


def test_a_fresh_machine_without_network_is_told_what_to_do(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(SystemExit, match="cifar-10-python.tar.gz.*--demo"):
        run(str(tmp_path))


def test_a_loss_that_is_not_finite_stops_the_run(data_dir):
    s = settings(data_dir, "--lr", "1e30", "--clip", "0")
    with pytest.raises(SystemExit, match="became .* in step .*Lower --lr"):
        train(s, "default", 0, load_data(s), torch.device("cpu"), "fp32")


def test_evaluations_may_be_spared_but_not_the_last(data_dir, tmp_path):
    run(data_dir, "--init", "default", "--epochs", "3", "--eval-every", "2", "--out", str(tmp_path))
    _, *epochs = map(json.loads, (tmp_path / "default-seed0" / "log.jsonl").read_text().splitlines())
    assert ["test_acc" in record for record in epochs] == [False, True, True]
