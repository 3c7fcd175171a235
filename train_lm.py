"""Train a causal Transformer on text, default against mimetic initialization (section 7 of the paper).

python train_lm.py --demo                             a small character model, minutes on two CPU cores
python train_lm.py --out runs/ptb                     the paper's character model (one GPU, 100 epochs)
python train_lm.py --dataset ptb-word --embed-dropout 0.1 --dropout 0.3 --out runs/ptb-word
python train_lm.py --text book.txt --init mimetic --out runs/book
python train_lm.py --sample runs/book/mimetic-seed0   text from a finished run
"""

import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import harness
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
class Settings:
    # compare
    init: tuple = flag(("default", "mimetic"), "initializations to compare, the baseline first")
    seeds: tuple = flag((0,), "one run a seed and init; a seed fixes weights and data order")
    # data
    dataset: str = flag("ptb-char", "what to train on", tuple(DATASETS))
    data_dir: str = flag("data", "where the texts lie, or go")
    text: tuple = flag(("",), "files of your own to train on instead, comma-separated, as characters")
    # model (paper)
    context: int = flag(512, "tokens a window (ours)", low=1)
    width: int = flag(384, "token width (paper; WikiText-103: 410)", low=1)
    depth: int = flag(12, "layers (paper; WikiText-103: 16)", low=1)
    heads: int = flag(8, "heads a layer (paper; WikiText-103: 10)", low=1)
    dropout: float = flag(0.0, "on embeddings, attention weights and branches (ours)", low=0, high=1)
    embed_dropout: float = flag(
        0.0, "word-level: whole rows of the embedding (paper: on, rate not given)", low=0, high=1
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
    epochs: int = flag(100, "(paper)", low=1)
    steps: int = flag(0, "stop after so many steps instead; 0: after --epochs", low=0)
    batch_size: int = flag(32, "windows a step (ours)", low=1)
    lr: float = flag(1e-3, "peak learning rate of AdamW (ours)", low=0)
    weight_decay: float = flag(0.01, "(ours: the paper's for images)", low=0)
    beta2_adam: float = flag(
        0.95, "AdamW's second decay rate; the first is 0.9 (ours: usual for language)", low=0, high=1
    )
    warmup: float = flag(0.1, "share of the steps with a linear warm-up; a cosine to 0 follows (ours)", low=0, high=1)
    clip: float = flag(1.0, "clip the gradient's norm; 0: never (ours)", low=0)
    eval_stride: int = flag(0, "each target sees at least context - stride earlier tokens; 0: stride = context", low=0)
    # machine
    device: str = flag("auto", "auto, cpu, cuda, cuda:1, ...")
    precision: str = flag("auto", "of matrix products; auto: bf16 where the hardware has it", ("auto", "bf16", "fp32"))
    out: str = flag("", "folder for logs, results and final weights; empty: write nothing")
    sample: str = flag("", "print text from the finished run in this folder, and train nothing")
    prompt: str = flag("\n", "what --sample goes on from")
    length: int = flag(500, "tokens of text that --sample and --demo print", low=0)
    temperature: float = flag(0.8, "of the sampled text; 0: always the likeliest token", low=0)


DEMO = dict(context=128, width=128, depth=4, heads=4, batch_size=32, steps=400, lr=1e-3)


def load_data(s: Settings) -> TextData:
    return load_files(s.text) if any(s.text) else load_text(s.dataset, s.data_dir)


def build(s: Settings, vocabulary: int) -> TransformerLM:
    return TransformerLM(
        vocabulary, context=s.context, dim=s.width, depth=s.depth, heads=s.heads, dropout=s.dropout,
        embed_dropout=s.embed_dropout, pos_scale=s.pos_scale, embed_scale=s.embed_scale or None,
    )  # fmt: skip


def initialized(s: Settings, init: str, seed: int, data: TextData, device: torch.device) -> TransformerLM:
    """The model with its default weights, which depend on the seed alone, and then the init on top."""
    torch.manual_seed(1000 * seed)  # a stream apart from those of harness.generator
    model = build(s, len(data.vocabulary))
    INITS[init](model, s, harness.generator(seed, stream=1))
    return model.to(device)


@torch.no_grad()
def evaluate(model: TransformerLM, s: Settings, tokens: torch.Tensor, precision: torch.dtype) -> float:
    """Mean loss in nats over every target of the stream, each counted once."""
    model.eval()
    device, total = model.pos_embed.device, 0.0
    for inputs, targets in eval_windows(tokens, s.context, s.eval_stride or None, s.batch_size):
        with harness.autocast(device, precision):
            total += float(model.loss(inputs.to(device), targets.to(device), reduction="sum"))
    model.train()
    return total / (len(tokens) - 1)


def score(nats: float, unit: str) -> dict[str, float]:
    """Bits per character, or perplexity, of a mean loss in nats."""
    return {"bpc": nats / math.log(2)} if unit == "char" else {"ppl": math.exp(min(nats, 700.0))}


def train(s: Settings, init: str, seed: int, data: TextData, device: torch.device, precision: torch.dtype):
    """One run. Returns what result.json holds, and the trained model. Validates after each epoch, tests once."""
    name, folder = f"{init}-seed{seed}", harness.run_folder(s.out, init, seed)
    model = initialized(s, init, seed, data, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.lr, betas=(0.9, s.beta2_adam), weight_decay=s.weight_decay, fused=True
    )
    draws = harness.generator(seed, stream=2)  # data order: the same for every init
    steps_an_epoch = -(-len(epoch_starts(len(data.train), s.context)) // s.batch_size)
    steps = s.steps or s.epochs * steps_an_epoch
    step, epoch, done, training_seconds, started = 0, 0, 0, 0.0, time.time()
    facts = dict(parameters=sum(p.numel() for p in model.parameters()), config=dataclasses.asdict(s))
    facts["environment"] = harness.environment(device, precision)
    if folder:
        harness.append_record(folder / "log.jsonl", dict(run=name, **facts))

    while step < steps:
        epoch, first, epoch_started, total_loss = epoch + 1, step, time.time(), torch.zeros((), device=device)
        for starts in epoch_starts(len(data.train), s.context, draws).split(s.batch_size)[: steps - step]:
            inputs, targets = (ids.to(device) for ids in windows(data.train, starts, s.context))
            lr = harness.learning_rate(step, steps, s.lr, s.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            with harness.autocast(device, precision):
                loss = model.loss(inputs, targets)
            loss.backward()
            if s.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            optimizer.step()
            optimizer.zero_grad()
            step, done, total_loss = step + 1, done + inputs.numel(), total_loss + loss.detach()
            harness.live(f"{name}  epoch {epoch}", step, steps, loss, done, started, "tokens")
        train_loss = float(total_loss) / (step - first)  # waits for the device, so the clock is read after it
        if not math.isfinite(train_loss):
            harness.fail(f"{name}: the loss is {train_loss} in epoch {epoch}; lower --lr, or keep --clip on.")
        training_seconds += time.time() - epoch_started
        ((metric, valid),) = score(evaluate(model, s, data.valid, precision), data.unit).items()
        speed, seconds = done / training_seconds, round(time.time() - started, 1)
        harness.line(
            f"{name}  step {step}/{steps}  loss {train_loss:.3f}  valid {valid:.3f} {metric}  {speed:,.0f} tokens/s"
        )
        if folder:
            record = dict(epoch=epoch, step=step, lr=lr, train_loss=train_loss, seconds=seconds)
            harness.append_record(folder / "log.jsonl", {**record, f"valid_{metric}": valid})

    test = score(evaluate(model, s, data.test, precision), data.unit)[metric]
    result = {
        "dataset": data.name, "init": init, "seed": seed, f"valid_{metric}": valid, f"test_{metric}": test,
        "train_loss": train_loss, "steps": steps, "epochs": step / steps_an_epoch, "tokens_per_second": round(speed),
        "seconds": round(time.time() - started, 1), **facts,
    }  # fmt: skip
    if folder:
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        saved = dict(model=weights, config=facts["config"], vocabulary=list(data.vocabulary), unit=data.unit)
        torch.save(saved, folder / "model.pt")
        harness.write_json(folder / "result.json", result)
    return result, model


def sample(s: Settings, model: TransformerLM, vocabulary: tuple, unit: str, seed: int) -> str:
    """`s.length` tokens of text after `s.prompt`."""
    ids = encode(s.prompt, vocabulary, unit).long()[None].to(model.pos_embed.device)
    ids = model.generate(ids, s.length, s.temperature, generator=harness.generator(seed, stream=3))
    return decode(ids[0].cpu(), vocabulary, unit)


def sample_from_run(s: Settings) -> str:
    file = Path(s.sample) / "model.pt"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; --sample wants the folder of a finished run, OUT/INIT-seedK.")
    saved = torch.load(file, map_location="cpu", weights_only=True)
    known = {field.name for field in dataclasses.fields(Settings)}
    model = build(Settings(**{k: v for k, v in saved["config"].items() if k in known}), len(saved["vocabulary"]))
    model.load_state_dict(saved["model"])
    return sample(s, model.to(harness.pick_device(s.device)), tuple(saved["vocabulary"]), saved["unit"], s.seeds[0])


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    s = harness.parse_settings(Settings, argv, __doc__, DEMO)
    if "--demo" in argv and not any(s.text) and not is_available(s.dataset, s.data_dir):
        s.dataset = "pydoc"
    try:
        if s.sample:
            return print(sample_from_run(s))
        harness.check_runs(s.init, s.seeds, [init for init in INITS if init != "structured"])  # that needs a grid
        device = harness.pick_device(s.device)
        precision = harness.pick_precision(s.precision, device)
        data = load_data(s)
        build(s, len(data.vocabulary))  # sizes that do not fit are found before any run begins
        harness.claim_folders(s)
    except (ValueError, OSError) as error:
        harness.fail(str(error))
    print(f"{data.name}: {len(data.train):,} / {len(data.valid):,} / {len(data.test):,} {data.unit} tokens, ", end="")
    print(f"{len(data.vocabulary):,} types; {device}, {str(precision).removeprefix('torch.')}")
    metric, title = ("bpc", "bits per character") if data.unit == "char" else ("ppl", "perplexity")
    results, metrics = [], {f"valid_{metric}": f"valid {title}", f"test_{metric}": f"test {title}"}
    for seed in s.seeds:
        for init in s.init:
            result, model = train(s, init, seed, data, device, precision)
            results.append(result)
            if s.out:
                harness.save_summary(s.out, metrics)
    print("\n" + harness.summary_table(results, metrics))
    if "--demo" in argv:
        print(f"\n{s.init[-1]}-seed{s.seeds[-1]} writes:\n{sample(s, model, data.vocabulary, data.unit, s.seeds[-1])}")


if __name__ == "__main__":
    harness.run(main)
