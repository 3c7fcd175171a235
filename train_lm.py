"""Train a causal Transformer on text, to compare default and mimetic initialization (section 7 of the paper).

python train_lm.py --demo                             a small character model, minutes on two CPU cores
python train_lm.py --out runs/ptb                     the paper's character model (one GPU, 100 epochs)
python train_lm.py --dataset ptb-word --out runs/ptb-word
python train_lm.py --text *.txt --init mimetic --out runs/book
python sample.py runs/book/mimetic-seed0              text from a finished run
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads: no traceback
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # under PYTHONSAFEPATH as well

import dataclasses
import itertools
import math

import torch

from inits import INITS, InitFlags
from inputs.text import DATASETS, TextData, decode, is_available, load_files, load_text
from inputs.windows import epoch_starts, eval_windows, windows
from lm import TransformerLM
from training import ranks, records
from training.flags import Common, check_runs, flag, init_flag, parse_settings
from training.loop import Run, compare
from training.start import compile_and_parallelize, run_script, start
from training.step import (
    DROPOUT,
    INIT,
    ORDER,
    SAMPLE,
    WEIGHTS,
    autocast,
    derive_seed,
    generator,
    learning_rate,
    set_learning_rate,
    to_device,
)


@dataclasses.dataclass
class Settings(InitFlags, Common):
    init: tuple = init_flag(INITS)
    # mimetic initialization (paper, for language)
    alpha1: float = flag(0.0, "W_Q W_K^T = alpha1 Z + beta1 I")
    beta1: float = flag(0.5, "")
    alpha2: float = flag(0.2, "W_V W_proj = alpha2 Z - beta2 I")
    beta2: float = flag(0.2, "")
    # data
    dataset: str = flag("ptb-char", "what to train on, at the paper's size for it", tuple(DATASETS))
    data_dir: str = flag("data", "folder of the texts, or for their download", free=True)
    text: tuple = flag(("",), "files of your own to train on instead, as characters; no commas in their names")
    # model (paper)
    context: int = flag(512, "tokens per window (ours)", low=1)
    width: int = flag(384, "token width (paper; WikiText-103: 410)", low=1)
    depth: int = flag(12, "layers (paper; WikiText-103: 16)", low=1, high=1000)
    heads: int = flag(8, "heads per layer (paper; WikiText-103: 10)", low=1)
    dropout: float = flag(0.0, "on embeddings, attention weights and branches (ours)", low=0, high=1)
    embed_dropout: float = flag(
        0.0, "whole rows of the embedding (paper: on for ptb-word, rate not given; ours there: 0.1)", low=0, high=1
    )
    pos_scale: float = flag(1.0, "scale of the position embeddings, the paper's gamma")
    embed_scale: float = flag(0.0, "scale of the token embeddings; 0: the square root of the width (ours)", low=0)
    # recipe
    epochs: int = flag(100, "(paper; WikiText-103: 50)", low=1)
    steps: int = flag(0, "stop after this many steps instead; 0: after --epochs", low=0)
    batch_size: int = flag(32, "windows per step (ours)", low=1)
    lr: float = flag(1e-3, "peak learning rate of AdamW (ours)", low=0)
    weight_decay: float = flag(0.01, "(ours: the paper's for images)", low=0)
    beta2_adam: float = flag(
        0.95, "AdamW's second decay rate; the first is 0.9 (ours: usual for language)", low=0, high=0.999999
    )
    warmup: float = flag(0.1, "share of the steps with a linear warm-up; a cosine to 0 follows (ours)", low=0, high=1)
    clip: float = flag(1.0, "clip the gradient's norm; 0: never (ours)", low=0)
    eval_stride: int = flag(0, "each target sees at least context - stride earlier tokens; 0: stride = context", low=0)


DEMO = dict(context=128, width=128, depth=4, heads=4, batch_size=32, steps=400, lr=1e-3)
PRESETS = {  # if they differ from those for ptb-char
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


def initialize(s: Settings, init: str, seed: int, data: TextData, device: torch.device) -> TransformerLM:
    """The model with its default weights, which depend only on the seed, and the init applied on top."""
    torch.manual_seed(derive_seed(seed, WEIGHTS))
    model = build(s, len(data.vocabulary))
    INITS[init](model, s, generator(seed, INIT))
    return model.to(device)


def batches(s: Settings, seed: int, data: TextData, first_step: int):
    """For each step from `first_step` on: the starts of its windows, on the device of the data."""
    first_epoch, i = divmod(first_step, steps_per_epoch(s, data))
    for epoch in itertools.count(first_epoch):
        starts = epoch_starts(len(data.train), s.context, generator(seed, ORDER, epoch))
        yield from to_device(starts, data.train.device).split(s.batch_size)[i:]
        i = 0


def steps_per_epoch(s: Settings, data: TextData) -> int:
    return -(-len(epoch_starts(len(data.train), s.context)) // s.batch_size)


@torch.no_grad()
def evaluate(model: TransformerLM, s: Settings, tokens: torch.Tensor, precision: str) -> float:
    """Mean loss in nats over every target of the stream, counted once; each rank takes its share of the windows."""
    model.eval()
    device = model.pos_embed.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets in eval_windows(tokens, s.context, s.eval_stride or None, s.batch_size * ranks.world_size()):
        inputs, targets = ranks.shard(inputs), ranks.shard(targets)
        if len(inputs):
            with autocast(device, precision):
                total += model(inputs, targets)
    model.train()
    return float(ranks.all_sum(total)) / (len(tokens) - 1)  # the one wait


def score(part: str, nats: float, unit: str) -> dict[str, float]:
    """Bits per character, or perplexity, from a mean loss in nats, under its name in result.json."""
    return {f"{part}_bpc": nats / math.log(2)} if unit == "char" else {f"{part}_ppl": math.exp(min(nats, 700.0))}


def train(s: Settings, init: str, seed: int, data: TextData, device: torch.device, precision: str):
    """One run on `data`, which is on the device already. Returns the contents of result.json, and the trained model.

    Validates after each epoch and tests once.
    """
    model = ranks.call_in_turn(initialize, s, init, seed, data, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.lr, betas=(0.9, s.beta2_adam), weight_decay=s.weight_decay, fused=True
    )
    about = dict(data=data._asdict(), vocabulary=list(data.vocabulary), unit=data.unit)  # the last two for sample.py
    run = Run(s, init, seed, model, optimizer, steps_per_epoch(s, data), device, precision, "tokens", **about)
    trained = compile_and_parallelize(model, s, device)

    for step, starts in zip(run, batches(s, seed, data, run.start_step)):
        inputs, targets = map(ranks.shard, windows(data.train, starts, s.context))
        tokens = len(starts) * s.context
        set_learning_rate(optimizer, learning_rate(step, run.steps, s.lr, s.warmup))
        torch.manual_seed(derive_seed(seed, DROPOUT, step * ranks.world_size() + ranks.rank()))
        with autocast(device, precision):
            loss = trained(inputs, targets) / tokens
        (loss * ranks.world_size()).backward()  # DistributedDataParallel averages over ranks; ours is a sum
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if run.completed(loss + 0 * norm, tokens):  # not finite if either is not
            run.record(**score("valid", evaluate(model, s, data.valid, precision), data.unit))
    test = score("test", evaluate(model, s, data.test, precision), data.unit)
    return run.finish(dataset=data.name, **test), model


def sample(model: TransformerLM, data: TextData, seed: int, ids: torch.Tensor, length=500, temperature=0.8) -> str:
    """The ids (N,) and `length` tokens after them, as text."""
    ids = ids.long()[None].to(model.pos_embed.device)
    ids = model.generate(ids, length, temperature, generator=generator(seed, SAMPLE))
    return decode(ids[0].cpu(), data.vocabulary, data.unit)


def load_and_check(s: Settings) -> TextData:
    """Load the data and check that all the user asked for fits, so that no run starts that cannot finish."""
    check_runs(s)
    records.check_folders(s)  # before a download
    data = load_data(s)
    build(s, len(data.vocabulary))
    epoch_starts(len(data.train), s.context)
    next(iter(eval_windows(data.valid, s.context, s.eval_stride or None)))
    records.claim_folders(s, data._asdict())
    return data


def settings(argv: list[str]) -> Settings:
    """Settings from flags; --demo and the data set change the defaults."""
    quiet = [word for word in argv if word not in ("-h", "--help")]  # --help shows the values that will really run
    s, demo = parse_settings(Settings, quiet, __doc__, DEMO), DEMO
    own = any(s.text)
    if s.demo and not own and not is_available(s.dataset, s.data_dir):
        demo = {**DEMO, "dataset": "pydoc"}  # unless a flag names one
    return parse_settings(Settings, argv, __doc__, demo, {} if own else PRESETS.get(s.dataset))


def main(argv: list[str] | None = None) -> None:
    s = settings(sys.argv[1:] if argv is None else argv)
    device, precision = start(s)
    data = ranks.call_in_turn(load_and_check, s)
    data = data._replace(**{part: getattr(data, part).to(device) for part in ("train", "valid", "test")})
    sizes = f"{len(data.train):,} / {len(data.valid):,} / {len(data.test):,} {data.unit} tokens"
    what = f"{data.name}: {sizes}, {len(data.vocabulary):,} types"
    ranks.print0(f"{what}; {records.describe(device, precision)}")
    metric, title = ("bpc", "bits per character") if data.unit == "char" else ("ppl", "perplexity")
    metrics = {f"valid_{metric}": f"valid {title}", f"test_{metric}": f"test {title}"}
    trained = {}  # the model trained last, by its run

    def run(init: str, seed: int) -> dict:
        trained.clear()
        result, trained[init, seed] = train(s, init, seed, data, device, precision)
        return result

    compare(s, metrics, run)
    for (init, seed), model in trained.items() if s.demo else ():
        ranks.print0(f"\n{init}-seed{seed} writes:\n{sample(model, data, seed, data.test[:1])}")


if __name__ == "__main__":
    run_script(main)
