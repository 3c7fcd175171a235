"""The language script from end to end, on a small text."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import sample
import train_lm
from inputs.text import load_files
from inputs.windows import epoch_starts, eval_windows, windows
from lm import TransformerLM
from official_formats import write_ptb
from train_lm import DEMO, Settings, evaluate, initialize, score, train
from training import records
from training.flags import parse_settings
from training.start import pick_precision
from training.step import DROPOUT, ORDER, derive_seed, generator, learning_rate

CPU = torch.device("cpu")
TINY = "--context 16 --width 24 --depth 1 --heads 2 --batch-size 4 --lr 1e-2 --precision fp32 --device cpu".split()


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "book.txt"
    file.write_text("the cat sat on the mat, and the dog on the log.\n" * 60, encoding="utf-8")
    return str(file)


def settings(book, *flags):
    return parse_settings(Settings, [*TINY, "--text", book, *flags], "", DEMO)


def run(book, *flags):
    train_lm.main([*TINY, "--text", book, *flags])


def test_a_comparison_leaves_logs_results_weights_and_a_table(book, tmp_path, capsys):
    run(book, "--epochs", "2", "--seeds", "0,1", "--out", str(tmp_path))
    folders = sorted(folder.name for folder in tmp_path.iterdir() if folder.is_dir())
    assert folders == ["default-seed0", "default-seed1", "mimetic-seed0", "mimetic-seed1"]
    head, *epochs = map(json.loads, (tmp_path / "mimetic-seed0" / "log.jsonl").read_text().splitlines())
    result = json.loads((tmp_path / "mimetic-seed0" / "result.json").read_text())
    assert head["config"]["alpha1"] == 0 and head["config"]["beta1"] == 0.5
    assert [record["epoch"] for record in epochs] == [1, 2] and result["epochs"] == 2
    assert result["valid_bpc"] == epochs[-1]["valid_bpc"] and result["test_bpc"] > 0
    assert (tmp_path / "summary.md").read_text() in capsys.readouterr().out


def test_a_run_is_the_plain_loop_of_the_recipe(book):
    flags = "--steps 44 --lr 1e-3 --weight-decay 0.3 --clip 0.5 --beta2-adam 0.9 --warmup 0.3 --dropout 0.1"
    s, data = settings(book, *flags.split()), load_files([book])
    result, trained = train(s, "mimetic", 1, data, CPU, "fp32")
    model = initialize(s, "mimetic", 1, data, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.9), weight_decay=0.3, fused=True)
    losses = []
    for step in range(44):  # an epoch has 41
        epoch, i = divmod(step, 41)
        starts = epoch_starts(len(data.train), 16, generator(1, ORDER, epoch)).split(4)[i]
        inputs, targets = windows(data.train, starts, 16)
        optimizer.param_groups[0]["lr"] = learning_rate(step, 44, 1e-3, 0.3)
        torch.manual_seed(derive_seed(1, DROPOUT, step))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for a, b in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
    assert result["train_loss"] == pytest.approx(sum(losses[41:]) / 3, rel=1e-4)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])  # it learns


def test_validation_and_test_are_of_their_own_parts_of_the_text_and_without_dropout(book):
    data, s = load_files([book]), settings(book, "--steps", "2", "--dropout", "0.3", "--eval-stride", "5")
    data = data._replace(valid=data.train[:200], test=data.train[7:130])
    result, model = train(s, "default", 0, data, CPU, "fp32")
    for part in ("valid", "test"):
        nats = [evaluate(model, s, getattr(data, part), "fp32") for _ in range(2)]
        assert nats[0] == nats[1] and result[f"{part}_bpc"] == pytest.approx(
            score(part, nats[0], "char")[f"{part}_bpc"], rel=1e-6
        )
    assert result["valid_bpc"] != result["test_bpc"]


@pytest.mark.parametrize(
    "flags",
    ["--lr 2e-3", "--weight-decay 0.5", "--beta2-adam 0.5", "--warmup 0.5", "--clip 0.01", "--batch-size 5",
     "--context 17", "--dropout 0.3", "--embed-dropout 0.3", "--pos-scale 2", "--embed-scale 1", "--heads 3",
     "--depth 2", "--width 36", "--alpha1 0.1", "--beta1 0.1", "--alpha2 0.1", "--beta2 0.1", "--parts qk",
     "--parts vp", "--precision bf16"],
)  # fmt: skip
def test_every_setting_of_the_recipe_reaches_the_run(book, flags):
    data, losses = load_files([book]), []
    for extra in ([], flags.split()):
        s = settings(book, "--steps", "4", *extra)
        result, _ = train(s, "mimetic", 0, data, CPU, pick_precision(s.precision, CPU))
        losses.append(result["train_loss"])
    assert losses[0] != losses[1]


def test_a_stride_gives_targets_more_context_and_without_one_windows_do_not_overlap(book):
    data = load_files([book])
    for a, b in zip(eval_windows(data.valid, 16), eval_windows(data.valid, 16, 16), strict=True):
        assert all(map(torch.equal, a, b))
    model = initialize(settings(book), "mimetic", 0, data, CPU)
    plain, strided = (evaluate(model, settings(book, *s), data.valid, "fp32") for s in ([], ["--eval-stride", "5"]))
    assert plain != strided


def test_text_of_a_finished_run_is_one_command(book, tmp_path, capsys):
    run(book, "--init", "mimetic", "--steps", "30", "--out", str(tmp_path))
    capsys.readouterr()
    command = [str(tmp_path / "mimetic-seed0"), "--prompt", "the c", "--length", "40"]
    for _ in range(2):
        sample.main(command)
    printed = capsys.readouterr().out
    text = printed[: len(printed) // 2]
    assert printed == 2 * text and text.startswith("the c") and len(text) == len("the c") + 40 + 1
    for flags, words in [
        ([str(tmp_path)], "there is no checkpoint .*last.pt"),
        ([*command[:1], "--prompt", "日"], "日"),
        ([*command, "--temperature", "-1"], "temperature is finite, 0 or more"),
        ([*command, "--length", "-1"], "by n ≥ 0"),
        ([*command, "--device", "cuda:9"], "torch sees only cpu"),
    ]:
        with pytest.raises(SystemExit, match=words):
            sample.main(flags)


def test_steps_end_a_run_within_an_epoch(book, tmp_path):
    run(book, "--init", "default", "--steps", "3", "--out", str(tmp_path))
    result = json.loads((tmp_path / "default-seed0" / "result.json").read_text())
    assert result["steps"] == 3 and 0 < result["epochs"] < 1
    log = records.read_log(tmp_path / "default-seed0" / "log.jsonl")
    assert records.curve(log) == [(result["epochs"], result["valid_bpc"])]


def test_evaluation_is_the_same_for_every_batch_size_and_counts_every_target(book):
    data = load_files([book])
    losses = []
    for batch in ("1", "3", "50"):
        s = settings(book, "--batch-size", batch, "--eval-stride", "5")
        model = initialize(s, "default", 0, data, CPU)
        losses.append(evaluate(model, s, data.valid, "fp32"))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    uniform = TransformerLM(len(data.vocabulary), context=16, dim=24, depth=1, heads=2)
    with torch.no_grad():
        uniform.token_embed.weight.zero_()  # all logits equal
    nats = evaluate(uniform, settings(book), data.valid, "fp32")
    assert score("test", nats, "char")["test_bpc"] == pytest.approx(math.log2(len(data.vocabulary)))
    assert score("test", nats, "word")["test_ppl"] == pytest.approx(len(data.vocabulary))


def test_inits_differ_in_attention_alone(book):
    data, s = load_files([book]), settings(book)
    states = [initialize(s, init, 0, data, CPU).state_dict() for init in ("default", "mimetic")]
    changed = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert changed and all(".attn." in name for name in changed)
    another = initialize(s, "mimetic", 1, data, CPU).state_dict()
    assert all(not torch.equal(another[name], states[1][name]) for name in changed | {"token_embed.weight"})


def test_the_demo_falls_back_to_the_text_inside_python_and_prints_a_sample(tmp_path, capsys):
    small = "--steps 1 --context 32 --width 24 --depth 1 --heads 2".split()
    train_lm.main(["--demo", "--data-dir", str(tmp_path), *small])
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].startswith("pydoc:")  # after the settings
    assert "| mimetic |" in printed and "mimetic-seed0 writes:" in printed


LINES = " the cat sat on the mat \n the dog <unk> on the log \n" * 40


def test_the_demo_takes_penn_treebank_where_it_is(tmp_path, monkeypatch):
    write_ptb(tmp_path, monkeypatch, LINES, LINES, LINES)
    assert train_lm.settings(["--demo", "--data-dir", str(tmp_path)]).dataset == "ptb-char"


def test_words_are_judged_by_perplexity(tmp_path, monkeypatch, capsys):
    write_ptb(tmp_path, monkeypatch, LINES, LINES, LINES)
    flags = ["--dataset", "ptb-word", "--data-dir", str(tmp_path), "--steps", "60", "--out", str(tmp_path / "out")]
    train_lm.main([*TINY, *flags])
    result = json.loads((tmp_path / "out" / "mimetic-seed0" / "result.json").read_text())
    assert result["test_ppl"] == result["valid_ppl"] and 1 < result["test_ppl"] < 4  # equal files; nine types
    printed = capsys.readouterr().out
    assert "valid perplexity | minus default | test perplexity" in printed and "560 word tokens, 9 types" in printed


def test_sizes_are_the_papers_for_each_text():
    def sizes(*flags):
        s = train_lm.settings(list(flags))
        return s.width, s.depth, s.heads, s.epochs, s.embed_dropout > 0

    assert sizes() == sizes("--dataset", "ptb-char") == (384, 12, 8, 100, False)
    assert sizes("--dataset", "ptb-word") == (384, 12, 8, 100, True)
    assert sizes("--dataset", "wikitext-103") == (410, 16, 10, 50, False)
    assert sizes("--dataset", "wikitext-103", "--depth", "2") == (410, 2, 10, 50, False)
    assert sizes("--dataset", "wikitext-103", "--text", "a.txt") == sizes()
    assert sizes("--dataset", "wikitext-103", "--demo")[:3] == (128, 4, 4)
    s = train_lm.settings([])
    assert (s.alpha1, s.beta1, s.alpha2, s.beta2) == (0, 0.5, 0.2, 0.2)


def test_files_of_ones_own_follow_each_other_whatever_separates_their_names(book):
    for names in (["--text", book, book], ["--text", f"{book},{book}"]):
        assert train_lm.settings(names).text == (book, book)
    assert len(train_lm.load_data(settings(book)).train) * 2 == len(train_lm.load_data(train_lm.settings(names)).train)


def test_a_demo_of_a_named_text_is_of_no_other(tmp_path):
    for argv, name in [([], "pydoc"), (["--dataset", "ptb-word"], "ptb-word")]:
        assert train_lm.settings(["--demo", "--data-dir", str(tmp_path), *argv]).dataset == name
