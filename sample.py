"""Text from a finished run of train_lm.py.

python sample.py runs/ptb/mimetic-seed0 --prompt "the company said " --length 300 --temperature 0.8
"""

import argparse
import sys
from pathlib import Path

import torch

import train_lm
from inputs.text import TextData, encode
from training import checkpoint, ranks, records
from training.flags import reader
from training.start import pick_device, run_script


def load_run(folder: Path, device: torch.device) -> tuple[torch.nn.Module, TextData]:
    """The model of a run, and its vocabulary as a TextData without text. Raises ValueError for other folders."""
    saved = checkpoint.read(folder / "last.pt")
    try:
        model = train_lm.build(records.restore_settings(train_lm.Settings, saved["config"]), len(saved["vocabulary"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not a run of train_lm.py; give one, OUT/INIT-seedK.") from error
    checkpoint.load_weights(model, saved["model"], folder / "last.pt")
    none = torch.zeros(0, dtype=torch.int32)
    data = TextData(folder.name, none, none, none, tuple(saved["vocabulary"]), saved["unit"])
    return model.to(device), data


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
        model, data = load_run(a.run, pick_device(a.device))
        ids = encode(a.prompt, data.vocabulary, data.unit)
        ids = ids if len(ids) else torch.zeros(1)
        ranks.print0(train_lm.sample(model, data, a.seed, ids, a.length, a.temperature))
    except (ValueError, OSError) as error:
        ranks.fail(str(error))


if __name__ == "__main__":
    run_script(main)
