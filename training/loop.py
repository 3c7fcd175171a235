"""A training run between its steps: resuming, progress, logs, checkpoints, Ctrl-C, what is not finite."""

import contextlib
import dataclasses
import math
import shutil
import signal
import sys
import threading
import time

import torch
from torch import Tensor, nn

from training import checkpoint, ranks, records
from training.flags import Common


class Run:
    """All that happens between the steps of a run.

        run = Run(...)                               # from the last checkpoint on, if there is one
        for step in run:
            ...                                      # the recipe: batch, learning rate, backward, clip, step
            if run.completed(loss, items):           # counts the step; True if the model is to be evaluated now
                run.record(test_acc=...)
        return run.finish(dataset=...)

    With a loader, zip(run, loader) in this order, or the last step's bookkeeping is never reached. `state`, with the
    weights and the optimizer's state, is the whole checkpoint. Losses stay on the device, unread, for up to 25 steps: a
    GPU would have to be waited for.
    """

    def __init__(
        self,
        s: Common,
        init: str,
        seed: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps_per_epoch: int,
        device: torch.device,
        precision: str,
        counted: str = "images",  # what a step's items are
        data: dict | None = None,  # what it trains on, for the fingerprint
        **about,  # more for the checkpoint to hold
    ):
        self.s, self.init, self.seed, self.model, self.optimizer = s, init, seed, model, optimizer
        self.steps = getattr(s, "steps", 0) or s.epochs * steps_per_epoch
        self.steps_per_epoch, self.device, self.counted = steps_per_epoch, device, counted
        self.name, self.folder = f"{init}-seed{seed}", records.run_folder(s.out, init, seed)
        self.state = dict(step=0, items=0, epoch_items=0, epoch_loss=0.0, record={}, training_seconds=0.0, seconds=0.0)
        if s.resume:
            checkpoint.load(self.folder, model, optimizer, self.state, self.steps)
        told = dict(config=dataclasses.asdict(s), data=records.fingerprint(data or {}) if self.folder else {})
        self.about = dict(**told, **about)
        self.facts = dict(
            parameters=sum(p.numel() for p in model.parameters()), **told,
            environment=records.environment(device, precision),
        )  # fmt: skip
        records.open_log(self.folder, self.state["step"], run=self.name, **self.facts)
        self.start_step, self.start_seconds, self.start_items = (self.state[k] for k in ("step", "seconds", "items"))
        self.started = self.clock = self.saved_at = time.monotonic()
        self.unread: list[tuple[Tensor, int]] = []
        self.loss, self.scores, self.stop, self.epoch_done = math.nan, {}, False, False

    def __iter__(self):
        while self.state["step"] < self.steps:
            yield self.state["step"]
            if self.unread:
                continue  # what follows would wait for the device
            if self.epoch_done:
                self.log_epoch()
            if self.epoch_done or self.stop or time.monotonic() - self.saved_at > 60 * self.s.save_every:
                self.save()
            if self.stop:
                resumable = f"the same command with --resume goes on from {self.folder}"
                ranks.print0(f"stopped; {resumable if self.folder else 'with --out DIR, a run can go on'}")
                sys.exit(143 if interrupted == signal.SIGTERM else 130)
            self.clock = time.monotonic()

    def completed(self, loss: Tensor, items: int) -> bool:
        """Count a step on `items` images or tokens. `loss`: this rank's part of the mean over them, not yet read.

        True after an epoch that is to be evaluated.
        """
        self.state["step"] += 1
        self.unread.append((loss.detach(), items))
        epoch, rest = divmod(self.state["step"], self.steps_per_epoch)
        last = self.state["step"] == self.steps
        self.epoch_done, self.scores = last or rest == 0, {}
        if self.epoch_done or self.device.type == "cpu" or len(self.unread) == 25:
            self.read_losses()
        self.show_progress()
        return self.epoch_done and (last or epoch % getattr(self.s, "eval_every", 1) == 0)

    def read_losses(self) -> None:
        """Wait for the device once, for the losses of all ranks and for whether one of them was asked to stop."""
        state, sizes = self.state, [items for _, items in self.unread]
        asked = self.unread[0][0].new_full((), float(interrupted > 0))
        *losses, stop = ranks.all_sum(torch.stack([*(loss for loss, _ in self.unread), asked])).tolist()
        for i, (loss, size) in enumerate(zip(losses, sizes, strict=True)):
            if not math.isfinite(loss):
                self.fail(f"the loss or its gradient became {loss}", state["step"] - len(losses) + i + 1)
            state["epoch_loss"] += loss * size
        state["epoch_items"] += sum(sizes)
        state["items"] += sum(sizes)
        state["training_seconds"] += time.monotonic() - self.clock
        self.loss, self.stop, self.unread, self.clock = losses[-1], stop > 0, [], time.monotonic()

    def fail(self, what: str, step: int) -> None:
        file, lr = self.folder / "last.pt" if self.folder else None, self.optimizer.param_groups[0]["lr"]
        kept = f"{file} is of step {checkpoint.read(file)['state']['step']}" if file and file.exists() else "none yet"
        ranks.fail(
            f"{self.name}: {what} in step {step} (learning rate {lr:.3g}). The last good checkpoint: {kept}. "
            "Lower --lr, or keep --clip on."
        )

    def record(self, **scores: float) -> None:
        """Keep the scores of this epoch's evaluation for the log and, after the last epoch, the result."""
        for name, value in scores.items():
            if not math.isfinite(value):
                self.fail(f"{name} became {value}", self.state["step"])
        self.scores = scores

    def seconds(self) -> float:
        return self.start_seconds + time.monotonic() - self.started

    def log_epoch(self) -> None:
        state, step = self.state, self.state["step"]
        epoch = step / self.steps_per_epoch if step % self.steps_per_epoch else step // self.steps_per_epoch
        state["record"] = dict(
            epoch=epoch, step=step, lr=self.optimizer.param_groups[0]["lr"],
            train_loss=state["epoch_loss"] / state["epoch_items"], **self.scores, seconds=round(self.seconds(), 1),
        )  # fmt: skip
        state.update(epoch_loss=0.0, epoch_items=0)
        shown = [records.SCORES[key][1].format(value) for key, value in self.scores.items() if key in records.SCORES]
        words = [f"loss {state['record']['train_loss']:.3f}", f"{self.speed():,.0f} {self.counted}/s", *shown]
        ranks.print0("  ".join([self.where(), *words]))
        records.append_record(self.folder, state["record"])

    def where(self) -> str:
        epoch, epochs = -(-self.state["step"] // self.steps_per_epoch), -(-self.steps // self.steps_per_epoch)
        return f"{self.name}  epoch {epoch}/{epochs}"

    def speed(self) -> float:
        return self.state["items"] / max(self.state["training_seconds"], 1e-9)

    def show_progress(self) -> None:
        """Rewrite the last line of a terminal, at every fifth step or slow one; write nothing to a file or pipe."""
        done, step = self.state["step"] - self.start_step, self.state["step"]
        pace = max(time.monotonic() - self.started, 1e-6) / done  # seconds per step
        if done == 20 and self.s.demo and pace * self.steps * len(self.s.init) * len(self.s.seeds) > 15 * 60:
            minutes = pace * self.steps / 60
            ranks.print0(
                f"slow: {minutes:.0f} minutes per run. If other programs keep the cores busy, try --threads 1."
            )
        if ranks.rank() or not sys.stdout.isatty() or (step % 5 and pace < 1):
            return
        left, width = int(pace * (self.steps - step)), shutil.get_terminal_size().columns - 1
        items = self.state["items"] - self.start_items
        text = f"{self.where()}  step {step}/{self.steps}  loss {self.loss:.3f}  {left // 60}:{left % 60:02d} left"
        text += f"  {items / done / pace:,.0f} {self.counted}/s"
        text = text if len(text) <= width else text.replace("  ", " ")
        ranks.print0(text[:width], end="")

    def save(self) -> None:
        if self.folder and not torch.stack([p.isfinite().all() for p in self.model.parameters()]).all():
            self.fail("the weights became infinite or not a number", self.state["step"])
        self.state["seconds"] = self.seconds()
        optimizer = self.optimizer.state_dict()
        checkpoint.save(self.folder, self.model, optimizer=optimizer, state=self.state, **self.about)
        self.saved_at = time.monotonic()

    def finish(self, dataset: str, **more) -> dict:
        """Write result.json, which marks the run as finished, and a last.pt without the optimizer's state."""
        self.record(**{k: v for k, v in more.items() if isinstance(v, float)})
        scores = {k: v for k, v in self.state["record"].items() if k not in ("epoch", "step", "lr", "seconds")}
        result = dict(
            dataset=dataset, init=self.init, seed=self.seed, **scores, **more, steps=self.steps,
            epochs=self.steps / self.steps_per_epoch, seconds=round(self.state["seconds"], 1), **self.facts,
        )  # fmt: skip
        result[f"{self.counted}_per_second"] = round(self.speed(), 1)
        if self.folder:
            records.write_json(self.folder / "result.json", result)
            checkpoint.save(self.folder, self.model, **self.about)
        return result


def compare(s: Common, metrics: dict[str, str], train) -> None:
    """train(init, seed) -> result, for each unfinished run that `s` names; then the closing table."""
    results = []
    with patient_interrupts():
        for seed in s.seeds:
            for init in s.init:
                folder = records.run_folder(s.out, init, seed)
                results.append(records.load_result(folder, metrics) or train(init, seed))
                if s.out:
                    records.save_summary(s, metrics)
    ranks.print0("\n" + records.summary_table(results, metrics))


interrupted = 0  # by which signal, while a run trains


@contextlib.contextmanager
def patient_interrupts():
    """A context in which Ctrl-C or a scheduler's SIGTERM is a request that a run reads between steps.

    A second one stops at once, except under torchrun, which sends its processes a signal that they already got.
    """

    global interrupted
    interrupted = 0

    def ask(number, frame):
        global interrupted
        if interrupted and ranks.world_size() == 1:
            raise KeyboardInterrupt
        interrupted = number
        ranks.print0("stopping after this step or evaluation")

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
