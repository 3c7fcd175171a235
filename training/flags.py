"""Settings: one dataclass per script, one flag per field."""

import argparse
import dataclasses
import difflib
import math
import os
import re
import shlex


def flag(default, help: str, choices=None, low: float = -math.inf, high: float = math.inf, free: bool = False):
    """A dataclass field that is also a command-line flag; its type is that of the default, numbers in low..high.
    Whole ones end at 2**31 - 1 in any case.

    free: says nothing about what a run computes, so `--resume` may change it. A flag whose default is False takes no
    value.
    """
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high, free=free))


@dataclasses.dataclass
class Common:
    """The settings of every script; each adds its own."""

    demo: bool = flag(False, "", free=True)
    init: tuple = flag(("default", "mimetic"), "", free=True)  # the scripts add the choices
    seeds: tuple = flag((0,), "one run per seed and init; fixes weights, data order and every draw", low=0, free=True)
    out: str = flag("", "folder for logs, results and checkpoints; empty: write nothing", free=True)
    resume: bool = flag(False, "continue the runs in --out: finished ones are read, the others go on", free=True)
    save_every: float = flag(
        10.0, "minutes between checkpoints within an epoch; one follows each epoch", low=0, free=True
    )
    device: str = flag("auto", "auto, cpu, cuda, cuda:1, ...", free=True)
    precision: str = flag(
        "auto", "of matrix products; auto: bf16 if the hardware has it", ("auto", "bf16", "fp32", "tf32")
    )
    threads: int = flag(0, "CPU threads; 0: torch's choice (torchrun: 1 per process)", low=0, high=1024, free=True)
    compile: str = flag("auto", "torch.compile the model; auto: on a GPU", ("auto", "on", "off"), free=True)
    deterministic: bool = flag(False, "refuse operations that do not repeat bit by bit (on a CPU there are none)")


def init_flag(known) -> dataclasses.Field:
    """The flag --init of a script that knows these initializations."""
    return flag(
        ("default", "mimetic"), "initializations to compare, with default if it is there, else with the first",
        tuple(known), free=True,
    )  # fmt: skip


def parse_settings(cls, argv: list[str], usage: str, demo: dict, preset: dict | None = None):
    """An instance of the dataclass `cls` from flags named like its fields; `--demo` puts `demo` for the defaults.

    `preset` stands for other defaults, behind `demo`; flags win over both. Values of a tuple are separated by commas or
    spaces. Unknown flags and values end the program.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--FLAG VALUE ...]; --help lists them",
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # argparse itself takes -4e-1 and -1,0 for flags
    small = "minutes on two CPU cores: " + " ".join(f"{flag_name(k)} {v}" for k, v in demo.items())
    defaults = {**(preset or {}), **(demo if "--demo" in argv else {})}
    for field in dataclasses.fields(cls):
        if field.default is False:
            help = f"{small}; other flags go on top" if field.name == "demo" else field.metadata["help"]
            parser.add_argument("--" + field.name, action="store_true", help=help)
            continue
        many = isinstance(field.default, tuple)
        kind = type(field.default[0] if many else field.default)
        default = defaults.get(field.name, field.default)
        shown = ",".join(map(str, default)) if many else default
        parser.add_argument(
            flag_name(field.name),
            type=reader(kind, many, **{key: field.metadata[key] for key in ("choices", "low", "high")}),
            nargs="+" if many else None,
            default=default,
            metavar="|".join(map(str, field.metadata["choices"] or ()))
            or kind.__name__.upper() + ("S" if many else ""),
            help=f"{field.metadata['help']} [{shown}]".replace("%", "%%"),
        )
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        parser.error(f"unknown argument {unknown[0]}{did_you_mean(name, parser._option_string_actions)}")
    return cls(**{name: sum(value, ()) if isinstance(value, list) else value for name, value in vars(values).items()})


def format_flags(s: Common) -> str:
    """What of `s` is not as --help says, as flags: --demo, a data set or the command line has changed it."""
    words = []
    for field in dataclasses.fields(s):
        name, value = flag_name(field.name), getattr(s, field.name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if value != field.default:
            words += [name] if value is True else [f"{name}={text}"] if text.startswith("-") else [name, text]
    return shlex.join(words)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def did_you_mean(name: str, known) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def reader(kind: type, many: bool, choices, low: float, high: float):
    """A function from a flag's text to its value: one of `choices`; if a number, a finite one in low..high; if text,
    with its user's home for a ~.
    """
    high = min(high, 2**31 - 1) if kind is int else high
    convert = os.path.expanduser if kind is str else kind

    def read(text: str):
        values = tuple(map(convert, text.split(","))) if many else (convert(text),)
        for value in values:
            if choices and value not in choices:
                known = list(map(str, choices))
                hint = did_you_mean(str(value), known)
                raise argparse.ArgumentTypeError(f"{value or repr(value)} is none of {', '.join(known)}{hint}")
            if kind in (int, float) and not (low <= value <= high and math.isfinite(value)):
                words = f"at most {high}" if kind is int and value > high else f"at least {low}"
                words = f"between {low} and {high}" if kind is float and high < math.inf else words
                raise argparse.ArgumentTypeError(f"{value} is not {'finite' if low == -math.inf else words}")
        return values if many else values[0]

    read.__name__ = f"list of {kind.__name__}s" if many else kind.__name__  # argparse's "invalid ... value"
    return read


def check_runs(s: Common) -> None:
    """Raises ValueError if a run is asked for twice."""
    for name, values in (("--init", s.init), ("--seeds", s.seeds)):
        if len(set(values)) < len(values):
            raise ValueError(f"{name} names one of {', '.join(map(str, values))} twice; each is run once.")
