"""The scripts on a GPU, as tests/emulated_gpu.py emulates one: they start, mix no devices, and seldom wait for it."""

import copy
import functools
import importlib.util
import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import sample
import train_cifar
import train_imagenet
import train_lm
from emulated_gpu import NAME, EmulatedGPU, patched_cuda
from inits import INITS, VISION_INITS
from lm import TransformerLM
from official_formats import write_cifar10, write_folders
from training import start
from variants import ATTENTIONS
from vit import ViT

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")

# Where a run may wait: never for a step, but when it begins, and to read losses or a score.
PLACES = set(
    """train_cifar.main train_cifar.build train_lm.main train_lm.initialize train_lm.evaluate train_imagenet.build
    augment.scale_and_shift step.accuracy loop.read_losses""".split()
)
COPIES_A_STEP = {"cifar": 0, "lm": 0, "imagenet": 0}  # to the GPU that block; copies from it and reads: none
SCRIPTS = {"cifar": train_cifar, "lm": train_lm, "imagenet": train_imagenet}
TINY = {
    "cifar": "--data-dir {data} --width 24 --depth 1 --patch-size 8 --epochs 1 --batch-size 4 --limit 8",
    "lm": "--text {data}/book.txt --width 24 --depth 1 --heads 2 --context 16 --steps 2 --batch-size 4",
    "imagenet": "--data-dir {data}/photos --width 24 --depth 1 --patch-size 8 --epochs 1 --batch-size 6 "
    "--image-size 16 --workers 0",
}
LONGER = {"cifar": "--limit 16", "lm": "--steps 4", "imagenet": "--data-dir {data}/photos-twice"}
STEPS_MORE = {"cifar": 2, "lm": 2, "imagenet": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder, per_batch=64)
    (folder / "book.txt").write_text("the cat sat on the mat, and the dog on the log.\n" * 60, encoding="utf-8")
    if importlib.util.find_spec("PIL"):
        for name, sizes in {"photos": (6, 2), "photos-twice": (12, 2), "photos-to-evaluate": (6, 6)}.items():
            write_folders(folder / name, *sizes)
    return folder


@pytest.fixture(scope="module")
def run(data):
    """run("lm", "--steps 3", ...) runs a script, of tiny settings, on an emulated GPU; returns what it waited for."""

    def main(which, *flags, precision="bf16", gpu=True):
        if which == "imagenet":
            pytest.importorskip("PIL", reason="photographs need Pillow")
        flags = " ".join([TINY[which], f"--init mimetic --precision {precision}", *flags]).format(data=data).split()
        if not gpu:
            return SCRIPTS[which].main([*flags, "--device", "cpu"])
        with EmulatedGPU() as gpu:
            SCRIPTS[which].main(flags)
        return gpu.waits

    return main


@pytest.fixture(params=SCRIPTS)
def which(request):
    return request.param


# ---- the emulation


def test_devices_are_claimed_and_never_mixed():
    with EmulatedGPU() as gpu:
        x, w = torch.ones(2, 3, device="cuda"), torch.randn(3, 4)
        assert x.is_cuda and str((2 * x).T.device) == "cuda:0" and not w.is_cuda and x.to("cuda:0") is x
        assert copy.deepcopy(x[0]).is_cuda and not x.cpu().is_cuda and (x + torch.tensor(1.0)).is_cuda
        assert [wait.what for wait in gpu.waits] == ["from"]
        torch.testing.assert_close((x @ w.to(x)).cpu(), torch.ones(2, 3) @ w, atol=0, rtol=0)
        for mixed in (lambda: x @ w, lambda: w.add_(x[0, 0]), lambda: torch.stack([x[0, 0], torch.tensor(1.0)]),
                      lambda: F.linear(x, w.T), lambda: w[x[0].long()]):  # fmt: skip
            with pytest.raises(RuntimeError, match="on cuda:0 and on the CPU"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        with torch.autocast("cuda", torch.bfloat16):
            assert (x @ x.T).dtype == torch.bfloat16 and torch.is_autocast_enabled("cuda")
    assert not x.is_cuda and torch.ones(1).device.type == "cpu"


def test_gradients_and_optimizer_are_on_the_device_and_have_the_bits_of_the_cpu():
    def step(device):
        torch.manual_seed(0)
        model = ViT(image_size=16, patch_size=8, dim=24, depth=1, heads=2)
        model.blocks[0].attn.fused = True  # as on a GPU
        optimizer = torch.optim.AdamW(model.to(device).parameters(), fused=True)
        loss = F.cross_entropy(model(torch.ones(2, 3, 16, 16).to(device)), torch.tensor([1, 2]).to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        assert all(p.device.type == p.grad.device.type == torch.device(device).type for p in model.parameters())
        return model.state_dict()

    expected = step("cpu")
    with EmulatedGPU() as gpu:
        found = step("cuda")
    assert {wait.line.partition(":")[0] for wait in gpu.waits} == {"test_device.py"}
    assert {wait.what for wait in gpu.waits} == {"to"}
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_runs_on_the_device_learn_what_they_learn_on_the_cpu(which, run, tmp_path):
    run(which, f"--out {tmp_path}/gpu", precision="fp32")
    run(which, f"--out {tmp_path}/cpu", precision="fp32", gpu=False)
    gpu, cpu = (json.loads((tmp_path / name / "mimetic-seed0/result.json").read_text()) for name in ("gpu", "cpu"))
    assert gpu["train_loss"] == pytest.approx(cpu["train_loss"], rel=1e-5)
    assert gpu["environment"]["device"] == NAME


# ---- starting


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_scripts_start(which, device, run, capsys):
    run(which, f"--device {device}")
    assert NAME in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, rank, device",
    [("auto", None, "cuda:0"), ("cuda", None, "cuda:0"), ("cuda:1", None, "cuda:1"), ("cpu", None, "cpu"),
     ("auto", 1, "cuda:1"), ("cuda", 1, "cuda:1"), ("cuda:0", 1, "cuda:1"), ("cpu", 1, "cpu")],
)  # fmt: skip
def test_the_device_has_its_index_and_under_torchrun_it_is_the_processs_own(name, rank, device, monkeypatch):
    if rank is not None:
        for key, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2).items():
            monkeypatch.setenv(key, str(value))
    with EmulatedGPU(count=2):
        assert start.pick_device(name) == torch.device(device)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    for key, value in dict(WORLD_SIZE="3", LOCAL_RANK="2", LOCAL_WORLD_SIZE="3").items():
        monkeypatch.setenv(key, value)
    with EmulatedGPU(count=2), pytest.raises(ValueError, match="--nproc-per-node 2"):
        start.pick_device("auto")


def refusal(which: str, device: str) -> str:
    """What a script says when it ends for want of a device."""
    with pytest.raises(SystemExit) as ended:
        SCRIPTS[which].main(["--device", device])
    assert "\n" not in str(ended.value)
    return str(ended.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps"])
def test_a_device_that_is_not_here_is_one_sentence(which, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert f"--device {device}" in refusal(which, device)


def test_a_gpu_that_is_not_here_is_one_sentence(which):
    with EmulatedGPU():
        assert "cpu, cuda, cuda:0" in refusal(which, "cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch can compute on a GPU")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_this_torch_is_not_built_for_is_one_sentence(which, device):
    with patched_cuda():
        assert "cannot compute on cuda:0" in refusal(which, device)


# ---- all that runs on the device mixes nothing


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_step_of_each_attention(attention, run):
    run("cifar", f"--limit 4 --augment none --attention {attention}")


@pytest.mark.parametrize(
    "script, flags",
    [("cifar", "--augment crop --depth 2 --attention gpsa --local-layers 1 --pool cls --pos learned"),
     ("cifar", "--augment none --image-size 40 --micro-batch 2"), ("lm", "--dropout 0.1 --embed-dropout 0.1"),
     ("imagenet", "--pipeline deit")],
)  # fmt: skip
def test_a_step_with_other_flags(script, flags, run):
    run(script, flags)


@pytest.mark.parametrize(
    "init, language", [*((init, False) for init in VISION_INITS), *((init, True) for init in INITS)]
)
def test_inits_have_the_same_bits_on_a_model_that_is_on_the_device(init, language, tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        if language:
            return TransformerLM(20, context=16, dim=24, depth=2, heads=2)
        return ViT(image_size=32, patch_size=8, dim=24, depth=2, heads=2)

    torch.save(build(seed=1).state_dict(), tmp_path / "trained.pt")
    if language:
        s = train_lm.Settings()
    else:
        s = train_cifar.Settings(method="closed_form", transfer_from=str(tmp_path / "trained.pt"))
    initialize, models = (INITS if language else VISION_INITS)[init], {}
    with EmulatedGPU():
        for device in ("cpu", "cuda"):
            models[device] = build(seed=0).to(device)
            initialize(models[device], s, torch.Generator().manual_seed(2))
            assert all(tensor.device.type == device for tensor in models[device].state_dict().values())
    expected, found = (model.state_dict() for model in models.values())
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert init == "default" or not torch.equal(
        expected["blocks.0.attn.qkv.weight"], build(0).state_dict()["blocks.0.attn.qkv.weight"]
    )


def test_text_from_a_run_and_attention_maps(run, tmp_path, capsys):
    run("lm", f"--out {tmp_path}")
    capsys.readouterr()
    with EmulatedGPU():
        sample.main([f"{tmp_path}/mimetic-seed0", "--prompt", "the", "--length", "3"])
        assert capsys.readouterr().out.startswith("the")
        model = ViT(image_size=16, patch_size=8, dim=24, depth=1, heads=2).to("cuda")
        assert model.attention_maps(torch.rand(2, 3, 16, 16, device="cuda")).is_cuda


@pytest.mark.parametrize("temperature, top_k", [(0.0, None), (1.0, None), (1.0, 3)])
def test_a_sampled_token_costs_one_read_and_one_copy(temperature, top_k):
    torch.manual_seed(0)
    model, waits = TransformerLM(20, context=8, dim=24, depth=1, heads=2), []
    expected = model.generate(torch.tensor([[1]]), 5, temperature, top_k, torch.Generator().manual_seed(3))
    for n in (0, 5):
        with EmulatedGPU() as gpu:
            ids = torch.ones(1, 1, dtype=torch.int64, device="cuda")
            ids = model.to("cuda").generate(ids, n, temperature, top_k, torch.Generator().manual_seed(3))
        waits.append(gpu.waits)
    assert torch.equal(ids, expected)
    assert (waits[1] - waits[0]).total() <= 2 * 5


def test_a_run_that_was_killed_goes_on_with_the_same_bits(run, tmp_path, monkeypatch):
    flags, results = "--limit 4 --augment none --epochs 2", []
    run("cifar", flags, f"--out {tmp_path}/whole")
    evaluate, scores = train_cifar.evaluate, iter([(10.0, 2.0)])  # the second evaluation raises StopIteration
    monkeypatch.setattr(train_cifar, "evaluate", lambda *_: next(scores))
    with pytest.raises(StopIteration):
        run("cifar", flags, f"--out {tmp_path}/killed")
    monkeypatch.setattr(train_cifar, "evaluate", evaluate)
    run("cifar", flags, f"--out {tmp_path}/killed --resume")
    for name in ("whole", "killed"):
        results.append(torch.load(tmp_path / name / "mimetic-seed0" / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(results[1][name], weight) for name, weight in results[0].items())


# ---- nothing waits


def excess(which: str, shorter: Counter, longer: Counter) -> list[str]:
    """What STEPS_MORE more steps cost in waits, where that is more than COPIES_A_STEP, or in augmentation."""
    more = longer - shorter
    copies = sum(count for wait, count in more.items() if wait.what == "to")
    too_many = copies > COPIES_A_STEP[which] * STEPS_MORE[which]
    wrong = [wait for wait in longer if "augment." in wait.place or (more[wait] and (wait.what != "to" or too_many))]
    return [f"{more[wait]} x {wait.what}, {wait.place}, {wait.line}" for wait in wrong]


@pytest.fixture(scope="module")
def waits(run):
    """waits("lm"): those of a run, and of one with STEPS_MORE steps more in its only epoch."""
    return functools.cache(lambda which: (run(which), run(which, LONGER[which])))


def test_a_step_waits_for_a_copy_or_two_at_most(which, waits):
    wrong = excess(which, *waits(which))
    assert not wrong, "\n".join(wrong)


def test_a_run_waits_in_known_places_alone(which, waits):
    elsewhere = [f"{wait.what}, {wait.place}, {wait.line}" for wait in waits(which)[0] if wait.place not in PLACES]
    assert not elsewhere, "\n".join(elsewhere)


def test_losses_are_read_every_25_steps_at_most(run):
    looks = run("lm", "--steps 26") - run("lm", "--steps 22")
    assert looks.total() <= 3, looks  # the losses, and whether a rank was asked to stop


@pytest.mark.parametrize(
    "script, few, many",
    [("cifar", "--limit 4 --holdout 128", "--limit 4 --holdout 256"), ("lm", "", "--eval-stride 4"),
     ("imagenet", "", "--data-dir {data}/photos-to-evaluate")],
)  # fmt: skip
def test_an_evaluation_waits_once_and_not_for_each_batch(script, few, many, run):
    augment = " --augment none" if script == "cifar" else ""
    longer = run(script, many + augment) - run(script, few + augment)
    assert not longer, "\n".join(map(str, longer))


# ---- each of these mistakes is caught, made in a step of train_cifar.py

MIXED = {
    "a constant left on the CPU": lambda x: x + torch.zeros(3, 1, 1),
    "a CPU generator on CUDA": lambda x: x + torch.rand(x.shape, device=x.device, generator=torch.Generator()),
    "a CPU generator in place": lambda x: x.uniform_(generator=torch.Generator()),
}
SLOW = {
    "item": lambda x: x * x.max().item(),
    "mask": lambda x: x - x[x > 0].mean(),
    "nonzero": lambda x: x * len(x.nonzero()),
    "from": lambda x: x.cpu().to(x.device),
    "to": lambda x: sum(x * torch.tensor(1.0, device=x.device) for _ in range(3)),
}


@pytest.fixture
def spoil(monkeypatch):
    """spoil(mistake) has each step of train_cifar.py make it with its images."""

    def with_mistake(mistake):
        backward = train_cifar.backward

        def spoiled(model, images, *rest):
            return backward(model, mistake(images), *rest)

        monkeypatch.setattr(train_cifar, "backward", spoiled)

    return with_mistake


@pytest.mark.parametrize("words", MIXED)
def test_mixed_devices_end_a_run(words, run, spoil):
    spoil(MIXED[words])
    with pytest.raises(RuntimeError, match=r"in test_device\.spoiled"):
        run("cifar", "--augment none")


@pytest.mark.parametrize("what", SLOW)
def test_waits_in_a_step_are_seen(what, run, spoil):
    spoil(SLOW[what])
    found = excess("cifar", run("cifar", "--augment none"), run("cifar", "--augment none", LONGER["cifar"]))
    assert any(f" x {what}, test_device.spoiled" in wait for wait in found)


def test_a_buffer_that_stays_behind_ends_a_run(run, monkeypatch):
    build = train_cifar.build

    def forgetful(*args):
        model = build(*args)
        model.pos_embed = model._buffers.pop("pos_embed").cpu()
        return model

    monkeypatch.setattr(train_cifar, "build", forgetful)
    with pytest.raises(RuntimeError, match="on cuda:0 and on the CPU, in vit.embed"):
        run("cifar", "--augment none")


def test_a_device_without_index_ends_a_run(run, monkeypatch):
    monkeypatch.setattr(start, "pick_device", torch.device)
    with pytest.raises(ValueError, match="index"):
        run("cifar", "--device cuda")
