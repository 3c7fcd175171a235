"""Checkpoints: the weights, the optimizer's state and the run's position.

They hold no random state, for every draw is a function of the seed and the step (`step.derive_seed`): a run that is
killed and resumed ends with the same bits.
"""

import contextlib
import os
from pathlib import Path

import torch
from torch import nn

from training import ranks


def save(folder: Path | None, model: nn.Module, **rest) -> None:
    """Leave folder/last.pt: the weights of `model` under plain names, and `rest`; only rank 0 writes.

    Written under a temporary name and moved into place, so that there is a whole checkpoint at every moment.
    """
    if not folder or ranks.rank():
        return
    temporary, file = folder / f"last.{os.getpid()}.tmp", folder / "last.pt"
    try:
        torch.save(dict(model=model.state_dict(), **rest), temporary)
        os.replace(temporary, file)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else "is the disk full?"
        before = "the one before is whole: make room, then --resume" if file.exists() else "make room and begin again"
        ranks.fail(f"could not write a checkpoint to {folder} ({reason}); {before}.")


def load(folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, steps=2**31) -> None:
    """Put folder/last.pt, if it is there, into model, optimizer and `state`. Rank 0 reads and checks it for all.

    Ends the program if it is not a checkpoint of this model and of an unfinished run.
    """

    def read_here() -> dict:
        file = folder / "last.pt" if folder and ranks.rank() == 0 else None
        if not file or not file.exists():
            return {}
        saved = read(file)
        if "optimizer" not in saved:
            raise ValueError(f"{folder} is of a finished run without its result.json; delete it to run that again.")
        load_weights(model, saved["model"], file)
        try:
            check(saved, optimizer, state, steps)
        except Exception as error:  # a damaged one can cause nearly any error
            raise ValueError(f"{file} is damaged or too old ({error!r}); delete it to begin again.") from error
        return saved

    if saved := ranks.broadcast(ranks.call_in_turn(read_here)):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.update(saved["state"])


def check(saved: dict, optimizer: torch.optim.Optimizer, state: dict, steps: int) -> None:
    """Raises an error of any kind unless `saved` has a state like `state`, and all that this optimizer keeps."""
    for name, value in state.items():
        kept, most = saved["state"][name], steps if name == "step" else 1e300
        if type(kept) is not type(value) or not (isinstance(kept, dict) or 0 <= kept <= most):
            raise ValueError(f"{name} is {kept}")
    optimizer.load_state_dict(saved["optimizer"])
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        kept = optimizer.state[parameter].values()
        if saved["state"]["step"] and not {parameter.shape} <= {tensor.shape for tensor in kept}:
            raise ValueError("the optimizer is another model's")


def read(file: Path) -> dict:
    """The dict that save wrote, on the CPU. Raises ValueError for any other file, and runs no code of it."""
    if not file.is_file():
        raise ValueError(f"there is no checkpoint {file}.")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # another kind of file can cause nearly any error
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} cannot be read as a checkpoint ({reason}); delete it to begin again.") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise ValueError(f"{file} is not a checkpoint of these scripts; delete it to begin again.")
    return saved


def load_weights(model: nn.Module, weights: dict, file: Path | None) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{file} holds another model ({str(error).splitlines()[-1].strip()})") from error
