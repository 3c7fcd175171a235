"""Train a causal Transformer on text, default against mimetic initialization (section 7 of the paper).

python train_lm.py --demo                             a small character model, minutes on two CPU cores
python train_lm.py --out runs/ptb                     the paper's character model (one GPU, 100 epochs)
python train_lm.py --dataset ptb-word --out runs/ptb-word
python train_lm.py --text *.txt --init mimetic --out runs/book
python train_lm.py --sample runs/book/mimetic-seed0   text from a finished run
"""

import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import harness
import ranks
from harness import flag
from inits import INITS
from lm import TransformerLM
from text import (
    DATASETS,
    TextData,
    decode,
    encode,
    epoch_starts,
    eval_windows,
    is_available,
    load_files,
    load_text,
    windows,
)


@dataclass
class Settings(harness.Common):
    # data
    dataset: str = flag("ptb-char", "what to train on, at the paper's size for it", tuple(DATASETS))
    data_dir: str = flag("data", "where the texts lie, or go", free=True)
    text: tuple = flag(("",), "files of your own to train on instead, as characters; no commas in their names")
    # model (paper)
    context: int = flag(512, "tokens a window (ours)", low=1)
    width: int = flag(384, "token width (paper; WikiText-103: 410)", low=1)
    depth: int = flag(12, "layers (paper; WikiText-103: 16)", low=1)
    heads: int = flag(8, "heads a layer (paper; WikiText-103: 10)", low=1)
    dropout: float = flag(0.0, "on embeddings, attention weights and branches (ours)", low=0, high=1)
    embed_dropout: float = flag(
        0.0, "whole rows of the embedding (paper: on for ptb-word, rate not given; ours there: 0.1)", low=0, high=1
    )
    pos_scale: float = flag(1.0, "scale of the position embeddings, the paper's gamma")
    embed_scale: float = flag(0.0, "scale of the token embeddings; 0: the root of the width (ours)", low=0)
    # mimetic initialization (paper, for language)
    alpha1: float = flag(0.0, "W_Q W_K^T = alpha1 Z + beta1 I")
    beta1: float = flag(0.5, "")
    alpha2: float = flag(0.2, "W_V W_proj = alpha2 Z - beta2 I")
    beta2: float = flag(0.2, "")
    parts: str = flag("both", "which of the two products to initialize", ("both", "qk", "vp"))
    # recipe
    epochs: int = flag(100, "(paper; WikiText-103: 50)", low=1)
    steps: int = flag(0, "stop after so many steps instead; 0: after --epochs", low=0)
    batch_size: int = flag(32, "windows a step (ours)", low=1)
    lr: float = flag(1e-3, "peak learning rate of AdamW (ours)", low=0)
    weight_decay: float = flag(0.01, "(ours: the paper's for images)", low=0)
    beta2_adam: float = flag(
        0.95, "AdamW's second decay rate; the first is 0.9 (ours: usual for language)", low=0, high=0.999999
    )
    warmup: float = flag(0.1, "share of the steps with a linear warm-up; a cosine to 0 follows (ours)", low=0, high=1)
    clip: float = flag(1.0, "clip the gradient's norm; 0: never (ours)", low=0)
    eval_stride: int = flag(0, "each target sees at least context - stride earlier tokens; 0: stride = context", low=0)
    # text from a finished run
    sample: str = flag("", "print text from the finished run in this folder, and train nothing", free=True)
    prompt: str = flag("\n", "what --sample goes on from", free=True)
    length: int = flag(500, "tokens of text that --sample and --demo print", low=0, free=True)
    temperature: float = flag(0.8, "of the sampled text; 0: always the likeliest token", low=0, free=True)


DEMO = dict(context=128, width=128, depth=4, heads=4, batch_size=32, steps=400, lr=1e-3)
PRESETS = {  # where not those of ptb-char
    "ptb-word": dict(embed_dropout=0.1),  # paper: on; the rate is ours
    "wikitext-103": dict(width=410, depth=16, heads=10, epochs=50),  # paper
}


def load_data(s: Settings) -> TextData:
    return load_files(s.text) if any(s.text) else load_text(s.dataset, s.data_dir)


def build(s: Settings, vocabulary: int) -> TransformerLM:
    return TransformerLM(
        vocabulary, context=s.context, dim=s.width, depth=s.depth, heads=s.heads, dropout=s.dropout,
        embed_dropout=s.embed_dropout, pos_scale=s.pos_scale, embed_scale=s.embed_scale or None,
    )  # fmt: skip


def initialized(s: Settings, init: str, seed: int, data: TextData, device: torch.device) -> TransformerLM:
    """The model with its default weights, which depend on the seed alone, and then the init on top."""
    torch.manual_seed(harness.seeded(seed, harness.WEIGHTS))
    model = build(s, len(data.vocabulary))
    INITS[init](model, s, harness.generator(seed, harness.INIT))
    return model.to(device)


@torch.no_grad()
def evaluate(model: TransformerLM, s: Settings, tokens: torch.Tensor, precision: str) -> float:
    """Mean loss in nats over every target of the stream, each counted once; a rank takes its share of the windows."""
    model.eval()
    device, total = model.pos_embed.device, torch.zeros((), dtype=torch.float64)
    for inputs, targets in eval_windows(tokens, s.context, s.eval_stride or None, s.batch_size * ranks.count()):
        inputs, targets = ranks.share(inputs).to(device), ranks.share(targets).to(device)
        if len(inputs):
            with harness.autocast(device, precision):
                total += float(model(inputs, targets))
    model.train()
    return float(ranks.all_sum(total.to(device))) / (len(tokens) - 1)


def score(nats: float, unit: str) -> dict[str, float]:
    """Bits per character, or perplexity, of a mean loss in nats."""
    return {"bpc": nats / math.log(2)} if unit == "char" else {"ppl": math.exp(min(nats, 700.0))}


def train(s: Settings, init: str, seed: int, data: TextData, device: torch.device, precision: str):
    """One run. Returns what result.json holds, and the trained model. Validates after each epoch, tests once."""
    name, folder = f"{init}-seed{seed}", harness.run_folder(s.out, init, seed)
    model = ranks.together(initialized, s, init, seed, data, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.lr, betas=(0.9, s.beta2_adam), weight_decay=s.weight_decay, fused=True
    )
    now = dict(step=0, losses=[], record={}, tokens=0, training_seconds=0.0, seconds=0.0)  # with weights: a checkpoint
    now = checkpoint.load(folder, model, optimizer, now)
    trained, first, before = ranks.wrapped(model, s.compile), now["step"], now["seconds"]
    steps_an_epoch = -(-len(epoch_starts(len(data.train), s.context)) // s.batch_size)
    steps = s.steps or s.epochs * steps_an_epoch
    order, losses = None, [torch.tensor(loss, device=device) for loss in now["losses"]]
    facts = dict(parameters=sum(p.numel() for p in model.parameters()), config=dataclasses.asdict(s))
    facts["environment"] = harness.environment(device, precision)
    harness.open_log(folder, first, run=name, **facts)
    about = dict(config=facts["config"], vocabulary=list(data.vocabulary), unit=data.unit)  # all that --sample needs
    started = clock = saved = time.time()

    for step in range(first, steps):
        epoch, i = divmod(step, steps_an_epoch)
        if order is None or i == 0:
            draws = harness.generator(seed, harness.ORDER, epoch)
            order = epoch_starts(len(data.train), s.context, draws).split(s.batch_size)
        inputs, targets = (ranks.share(ids).to(device) for ids in windows(data.train, order[i], s.context))
        lr = harness.learning_rate(step, steps, s.lr, s.warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr
        torch.manual_seed(harness.seeded(seed, harness.DROPOUT, step * ranks.count() + ranks.rank()))
        with harness.autocast(device, precision):
            loss = trained(inputs, targets) / (len(order[i]) * s.context)
        (loss * ranks.count()).backward()  # DistributedDataParallel averages over ranks; ours is a sum
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ranks.all_sum(loss.detach() + 0 * norm))  # not finite where either is not
        now["tokens"] += len(order[i]) * s.context
        text, size = f"{name}  epoch {epoch + 1}", s.batch_size * s.context
        harness.live(text, step + 1, steps, losses[-1], first, started, size, "tokens")

        ended = i + 1 == steps_an_epoch or step + 1 == steps
        if not (ended or checkpoint.time_to_look(step, device)):
            continue  # what follows waits for the device
        checkpoint.check_finite(name, losses, step, lr, folder)
        stop = checkpoint.stopping(device)
        now["training_seconds"] += time.time() - clock
        if ended:
            sizes = [len(batch) for batch in order[: i + 1]]
            train_loss = sum(float(loss) * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
            ((metric, valid),) = score(evaluate(model, s, data.valid, precision), data.unit).items()
            seconds, losses = round(before + time.time() - started, 1), []
            now["record"] = dict(epoch=(step + 1) / steps_an_epoch, step=step + 1, lr=lr, train_loss=train_loss)
            now["record"] |= {"seconds": seconds, f"valid_{metric}": valid}
            ranks.line(f"{name}  step {step + 1}/{steps}  loss {train_loss:.3f}  valid {valid:.3f} {metric}")
            harness.append_record(folder, now["record"])
        if ended or stop or time.time() - saved > 60 * s.save_every:
            now.update(step=step + 1, losses=list(map(float, losses)), seconds=before + time.time() - started)
            checkpoint.save(folder, model, optimizer=optimizer.state_dict(), **now, **about)
            saved = time.time()
        if stop:
            checkpoint.stop(folder)
        clock = time.time()

    ((metric, test),) = score(evaluate(model, s, data.test, precision), data.unit).items()
    last = now["record"]
    result = {
        "dataset": data.name, "init": init, "seed": seed, f"valid_{metric}": last[f"valid_{metric}"],
        f"test_{metric}": test, "train_loss": last["train_loss"], "steps": steps, "epochs": steps / steps_an_epoch,
        "tokens_per_second": round(now["tokens"] / now["training_seconds"]), "seconds": round(now["seconds"], 1),
        **facts,
    }  # fmt: skip
    checkpoint.finish(folder, model, result, **about)
    return result, model


def sample(s: Settings, model: TransformerLM, vocabulary: tuple, unit: str, seed: int) -> str:
    """`s.length` tokens of text after `s.prompt`."""
    ids = encode(s.prompt, vocabulary, unit).long()[None].to(model.pos_embed.device)
    ids = model.generate(ids, s.length, s.temperature, generator=harness.generator(seed, harness.SAMPLE))
    return decode(ids[0].cpu(), vocabulary, unit)


def sample_from_run(s: Settings, folder: Path, seed: int) -> str:
    file = folder / "last.pt"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; --sample wants the folder of a run, OUT/INIT-seedK.")
    saved = checkpoint.read(file)
    if "vocabulary" not in saved:
        raise ValueError(f"{file} is not of a language model; --sample wants a run of train_lm.py.")
    model = build(harness.settings_from(Settings, saved["config"]), len(saved["vocabulary"]))
    checkpoint.load_weights(model, saved["model"], file)
    return sample(s, model.to(harness.pick_device(s.device)), tuple(saved["vocabulary"]), saved["unit"], seed)


def prepare(s: Settings, demo: bool) -> TextData:
    """The data, once all that the user asked for is known to fit: nothing is begun that could not end."""
    harness.check_runs(s.init, s.seeds, INITS)
    harness.free_folders(s)  # before a download
    data = load_data(s)
    build(s, len(data.vocabulary))
    epoch_starts(len(data.train), s.context)
    next(iter(eval_windows(data.valid, s.context, s.eval_stride or None)))
    if demo and not len(encode(s.prompt, data.vocabulary, data.unit)):  # it ends with a sample
        raise ValueError("--prompt is empty; begin with a character or word of the text.")
    harness.claim_folders(s)
    return data


def settings(argv: list[str]) -> Settings:
    """From flags, and what --demo and the data set put in the place of defaults."""
    s = harness.parse_settings(Settings, argv, __doc__, DEMO)
    if "--demo" in argv and not any(s.text) and not is_available(s.dataset, s.data_dir):
        s = harness.parse_settings(Settings, argv, __doc__, {**DEMO, "dataset": "pydoc"})  # unless a flag names one
    if (preset := PRESETS.get(s.dataset)) and not any(s.text):
        s = harness.parse_settings(Settings, argv, __doc__, DEMO, preset)
    return s


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    s = settings(argv)
    if s.sample:
        try:
            if s.threads:
                torch.set_num_threads(s.threads)
            return ranks.line(sample_from_run(s, Path(s.sample), s.seeds[0]))
        except (ValueError, OSError) as error:
            ranks.fail(str(error))
    device, precision = harness.start(s)
    data = ranks.together(prepare, s, "--demo" in argv)
    sizes = f"{len(data.train):,} / {len(data.valid):,} / {len(data.test):,} {data.unit} tokens"
    what = f"{data.name}: {sizes}, {len(data.vocabulary):,} types"
    ranks.line(f"{what}; {harness.describe(device, precision)}")
    metric, title = ("bpc", "bits per character") if data.unit == "char" else ("ppl", "perplexity")
    metrics = {f"valid_{metric}": f"valid {title}", f"test_{metric}": f"test {title}"}
    made = {}  # the model trained last, by its run

    def run(init: str, seed: int) -> dict:
        made.clear()
        result, made[init, seed] = train(s, init, seed, data, device, precision)
        return result

    checkpoint.compare(s, metrics, run)
    if "--demo" in argv and ranks.rank() == 0:
        init, seed = s.init[-1], s.seeds[-1]
        if model := made.get((init, seed)):
            text = sample(s, model, data.vocabulary, data.unit, seed)
        else:  # finished by an earlier call
            text = sample_from_run(s, harness.run_folder(s.out, init, seed), seed)
        print(f"\n{init}-seed{seed} writes:\n{text}")


if __name__ == "__main__":
    harness.run(main)
