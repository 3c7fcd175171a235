"""Text from a finished run of train_lm.py.

python sample.py runs/ptb/mimetic-seed0 --prompt "the company said " --length 300 --temperature 0.8
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads: no traceback
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # under PYTHONSAFEPATH as well

import argparse
from pathlib import Path

import torch

import train_lm
from inputs.text import encode
from runs import load_run
from training import ranks
from training.flags import reader
from training.start import run_script


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=lambda text: Path(text).expanduser(), help="the folder of a run, OUT/INIT-seedK")
    parser.add_argument("--prompt", default="", help="what the text goes on from [the first symbol of the vocabulary]")
    parser.add_argument("--length", type=int, default=500, help="tokens [500]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token [0.8]")
    parser.add_argument("--seed", type=reader(int, False, None, 0, 2**31 - 1), default=0, help="[0]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    a = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        model, _, text = load_run(a.run, a.device)
        if text is None:
            raise ValueError(f"{a.run} is a run on images; give one of train_lm.py, OUT/INIT-seedK.")
        ids = encode(a.prompt, text.vocabulary, text.unit)
        ids = ids if len(ids) else torch.zeros(1)
        ranks.print0(train_lm.sample(model, text, a.seed, ids, a.length, a.temperature))
    except (ValueError, OSError) as error:
        ranks.fail(str(error))


if __name__ == "__main__":
    run_script(main)
