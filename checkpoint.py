"""Runs that survive: checkpoints, Ctrl-C, and losses that are not finite.

A checkpoint is the weights, the optimizer's state and where the run is. It holds no random state, for every draw is a
function of the seed and the step (`harness.seeded`): a run that is killed and resumed ends with the same bits.
"""

import contextlib
import math
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

import harness
import ranks


def save(folder: Path | None, model: nn.Module, **rest) -> None:
    """Leave folder/last.pt: the weights of `model` under plain names, and `rest`; rank 0 alone writes.

    Written under a temporary name and moved into place, so that there is a whole checkpoint at every moment.
    """
    if not folder or ranks.rank():
        return
    temporary, file = folder / "last.tmp", folder / "last.pt"
    try:
        torch.save(dict(model=model.state_dict(), **rest), temporary)
        os.replace(temporary, file)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else "is the disk full?"
        before = "the one before is whole: make room, then --resume" if file.exists() else "make room and begin again"
        ranks.fail(f"could not write a checkpoint to {folder} ({reason}); {before}.")


def load(folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, now: dict) -> dict:
    """Put folder/last.pt, if it is there, into model and optimizer; returns `now`, or what it holds in its place.

    Rank 0 reads it for all. Ends the program where it is not a checkpoint of this model.
    """

    def read_here() -> dict:
        file = folder / "last.pt" if folder and ranks.rank() == 0 else None
        if not file or not file.exists():
            return {}
        saved = read(file)
        if "optimizer" not in saved:
            raise ValueError(f"{folder} is of a finished run without its result.json; delete it to run that again.")
        load_weights(model, saved["model"], file)
        return saved

    saved = ranks.from_rank0(ranks.together(read_here))
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return {key: saved.get(key, value) for key, value in now.items()}


def read(file: Path) -> dict:
    """The dict that save wrote, on the CPU. Raises ValueError for any other file, and runs no code of it."""
    if not file.is_file():
        raise ValueError(f"there is no checkpoint {file}.")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the reader stumbles on in a file that is something else
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


def finished(folder: Path | None) -> dict | None:
    """The result of a run that is finished already, on every rank."""
    file = folder / "result.json" if folder and ranks.rank() == 0 else None
    return ranks.from_rank0(harness.read_json(file) if file and file.exists() else None)


def finish(folder: Path | None, model: nn.Module, result: dict, **about) -> None:
    """Leave result.json, which says that the run is over, and a last.pt without the optimizer's state."""
    if folder:
        harness.write_json(folder / "result.json", result)
        save(folder, model, **about)


def compare(s: harness.Common, metrics: dict[str, str], train) -> None:
    """train(init, seed) -> result, for each run that `s` names and that is not finished yet; then the closing table."""
    results = []
    with patient_interrupts():
        for seed in s.seeds:
            for init in s.init:
                results.append(finished(harness.run_folder(s.out, init, seed)) or train(init, seed))
                if s.out:
                    harness.save_summary(s, metrics)
    ranks.line("\n" + harness.summary_table(results, metrics))


asked_to_stop = False  # by Ctrl-C, while a run trains


@contextlib.contextmanager
def patient_interrupts():
    """Within, Ctrl-C is a request that the loop reads between steps; a second one stops at once.

    Not under torchrun, which passes on the Ctrl-C that its processes got already.
    """

    global asked_to_stop
    asked_to_stop = False

    def ask(number, frame):
        global asked_to_stop
        if asked_to_stop and ranks.count() == 1:
            raise KeyboardInterrupt
        asked_to_stop = True
        ranks.line("stopping after this step or evaluation")

    before = signal.signal(signal.SIGINT, ask) if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def stopping(device: torch.device) -> bool:
    """Whether any rank was asked to stop."""
    return bool(ranks.all_sum(torch.tensor(float(asked_to_stop), device=device)))


def time_to_look(step: int, device: torch.device) -> bool:
    """Whether to read the losses at this step: always on a CPU, seldom on a GPU, which would have to be waited for."""
    return device.type == "cpu" or step % 25 == 24


def check_finite(name: str, losses: list[Tensor], step: int, lr: float, folder: Path | None) -> None:
    """End the run where one of the last `losses`, up to that of `step`, is not finite."""
    values = torch.stack(losses[-25:]).tolist()
    bad = next((i for i, loss in enumerate(values) if not math.isfinite(loss)), None)
    if bad is not None:
        file = folder / "last.pt" if folder else None
        kept = f"{file} is of step {read(file)['step']}" if file and file.exists() else "no checkpoint yet"
        ranks.fail(
            f"{name}: the loss or its gradient became {values[bad]} in step {step - len(values) + bad + 2} (learning "
            f"rate {lr:.3g}). The last good checkpoint: {kept}. Lower --lr, or keep --clip on."
        )


def stop(folder: Path | None) -> None:
    """Ctrl-C's end: say how to go on, exit with 130."""
    how = f"the same command with --resume goes on from {folder}" if folder else "with --out DIR, a run can go on"
    ranks.line(f"stopped; {how}")
    sys.exit(130)
