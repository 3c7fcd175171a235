"""A GPU for tests, where there is none: tensors that claim to be on cuda:0 and are computed on the CPU, with its bits.

    with EmulatedGPU() as gpu:
        train_cifar.main([...])
    gpu.waits  # Counter of Wait(what="item", place="harness.accuracy", line="harness.py:310")

Every tensor is an ordinary one on the CPU; a table says which storages are "on the GPU". A function mode answers
`x.device` and `x.to(...)` by it. A dispatch mode sees every operation, those of backward too, and enters their results.
As on a GPU, it raises RuntimeError where CPU and CUDA tensors meet in an operation, or where a CPU generator draws on
CUDA. It counts what makes the host wait, by the line of the project that asks: copies that block, and reads.
Copies with non_blocking=True do not wait, and pin_memory() does nothing.

It does not see: a GPU's kernels (numbers, memory, speed, determinism); CUDA's own list of autocast (the CPU's acts);
non-blocking copies of memory that is not pinned; what torch.save copies; devices that Python code asks for inside
torch's own functions (hooks and autograd.Functions in backward); torch.compile, nccl, CUDA's generators and streams.
"""

import contextlib
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.cuda.amp.common
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT, NAME, CPU = str(Path(__file__).resolve().parent.parent), "Emulated GPU", torch.device("cpu")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# The host must know the values, or how many there are.
READS = """_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive repeat_interleave bincount
    equal""".split()


class Wait(NamedTuple):
    what: str  # "to" or "from" the GPU, a copy that blocks; else the operation that reads
    place: str  # the innermost function of the project, file.function
    line: str  # the line that asks, file:line


class EmulatedGPU:
    storages = {}  # those on the GPU, by number; code that caches a constant finds it there in the next test too

    def __init__(self, count: int = 1):
        self.count, self.waits, self.inside = count, Counter(), contextlib.ExitStack()
        self.within = False  # a function of torch that got CUDA tensors: what it makes goes where they are

    def __enter__(self):
        synchronize = mock.patch.object(torch.cuda, "synchronize", lambda *_: self.record("synchronize"))
        groups = mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", self.group_tensors)
        for context in (patched_cuda(self.count), synchronize, groups, Functions(self), Operations(self)):
            self.inside.enter_context(context)
        return self

    def __exit__(self, *error):
        self.inside.close()
        for number in [number for number, storage in self.storages.items() if storage.expired()]:
            del self.storages[number]

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self.storages

    def hold(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self.storages[storage._cdata] = StorageWeakRef(storage)  # while this lives, no other gets the same number
        return x

    def device_of(self, x: Tensor) -> torch.device:
        return torch.device("cuda:0" if self.holds(x) else "cpu")

    def group_tensors(self, lists: list, with_indices: bool, group=torch._C._group_tensors_by_device_and_dtype) -> dict:
        """As optimizers and clipping ask for it, past both modes."""
        found = group(lists, with_indices).items()
        return {(self.device_of(lists[0][0]), dtype): (lists, indices) for (_, dtype), (lists, indices) in found}

    def record(self, what: str) -> None:
        self.waits[Wait(what, *caller())] += 1


# ---- every operation


class Operations(TorchDispatchMode):
    def __init__(self, gpu: EmulatedGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunction():
            if torch.is_inference_mode_enabled():  # there, operations that are made of others come whole
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            on_gpu = self.check(func._schema.name.partition("::")[2], args, kwargs)
            kwargs |= {name: value for name, value in (("device", CPU), ("pin_memory", False)) if kwargs.get(name)}
            result = func(*args, **kwargs)
            for x in leaves(result):
                if on_gpu and isinstance(x, Tensor):
                    self.gpu.hold(x)
            return result

    def check(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether the results are on the GPU. Records what waits; raises RuntimeError where devices meet."""
        values = list(leaves((args, kwargs.values())))
        tensors = [x for x in values if isinstance(x, Tensor)]
        held, device = [self.gpu.holds(x) for x in tensors], kwargs.get("device")
        if name == "copy_":
            on_gpu = held[0]
        elif self.gpu.within:  # torch's own code asks for the device that tensors really are on
            on_gpu = any(held) or not tensors
        else:
            on_gpu = any(held) if device is None else torch.device(device).type == "cuda"

        if name in ("copy_", "_to_copy"):
            if held[-1] != on_gpu and not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.gpu.record("to" if on_gpu else "from")
        elif any(held):
            self.check_operation(name, args, [x for x, there in zip(tensors, held) if not there])
        if on_gpu and any(isinstance(x, torch.Generator) for x in values):
            raise RuntimeError(f"{name}: a CPU generator draws on cuda:0, in {', '.join(caller())}")
        return on_gpu

    def check_operation(self, name: str, args: tuple, plain: list[Tensor]) -> None:
        """plain: the CPU tensors among the operation's arguments."""
        if name in INDEXING:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.gpu.record("mask")
            if any(x is y for x in indices for y in plain):
                self.gpu.record("to")
            plain = [x for x in plain if not any(x is y for y in indices)]
        if name in READS:
            self.gpu.record("item" if name == "_local_scalar_dense" else name)
        if any(x.dim() or name in ("cat", "stack") for x in plain):  # numbers may come from the CPU
            raise RuntimeError(f"{name}: tensors on cuda:0 and on the CPU, in {', '.join(caller())}")


def leaves(values):
    """What lies in nested lists, as operations take and return them."""
    if isinstance(values, (list, tuple, type({}.values()))):
        for value in values:
            yield from leaves(value)
    else:
        yield values


def caller() -> tuple[str, str]:
    """The innermost function of the project on the stack, as file.function, and the line that asked, as file:line."""
    frame, line = sys._getframe(), None
    while frame := frame.f_back:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(ROOT) and file != __file__ and "site-packages" not in file:
            line = line or f"{Path(file).name}:{frame.f_lineno}"
            if function[0] != "<":  # who consumes a generator expression, calls a lambda
                return f"{Path(file).stem}.{function}", line
    return "torch", line or ""


# ---- what Python sees of a tensor's device


class Functions(TorchFunctionMode):
    def __init__(self, gpu: EmulatedGPU):
        super().__init__()
        self.gpu = gpu
        self.instead = {
            Tensor.device.__get__: gpu.device_of,
            Tensor.is_cuda.__get__: gpu.holds,
            Tensor.pin_memory: lambda x, *_: x,
            Tensor.to: self.to,
            Tensor.cpu: lambda x, **kwargs: self.to(x, "cpu", **kwargs),
            Tensor.cuda: lambda x, device=None, **kwargs: self.to(x, "cuda:0", **kwargs),
            Tensor.numpy: partial(self.numpy, Tensor.numpy),
            Tensor.__array__: partial(self.numpy, Tensor.__array__),
            Tensor.tolist: lambda x: self.to(x, "cpu").tolist(),
            Tensor.__deepcopy__: partial(self.unseen, Tensor.__deepcopy__),  # of storages, which no operation copies
            F.one_hot: partial(self.unseen, F.one_hot),  # reads its labels on a CPU alone
            torch.tensor: partial(self.tensor, torch.tensor),
            torch.as_tensor: partial(self.tensor, torch.as_tensor),
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, before = kwargs or {}, self.gpu.within
        on_gpu = [x for x in leaves(args) if isinstance(x, Tensor) and self.gpu.holds(x)]
        self.gpu.within = bool(on_gpu) and "device" not in kwargs
        try:
            return self.instead.get(func, func)(*args, **kwargs)
        finally:
            self.gpu.within = before

    def to(self, x: Tensor, *args, **kwargs) -> Tensor:
        if args and isinstance(args[0], Tensor):  # another tensor, whose device and dtype are wanted
            args = (self.gpu.device_of(args[0]), args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        moves = device is not None and device.type != self.gpu.device_of(x).type
        if not (moves or copy or dtype not in (None, x.dtype)):
            return x
        move = dict(device=device, non_blocking=non_blocking) if moves else {}
        self.gpu.within = False
        return torch.ops.aten._to_copy(x, dtype=dtype, memory_format=memory_format, **move)

    def numpy(self, func, x: Tensor, *args, **kwargs):
        if self.gpu.holds(x):
            raise TypeError("can't convert a cuda:0 tensor to numpy: .cpu() first")
        return func(x, *args, **kwargs)

    def unseen(self, func, x: Tensor, *args, **kwargs) -> Tensor:
        """func as one operation, whatever it does inside."""
        with _disable_current_modes():
            made = func(x, *args, **kwargs)
        return self.gpu.hold(made) if self.gpu.holds(x) else made

    def tensor(self, func, data, *, device=None, **kwargs) -> Tensor:
        made = func(data, **kwargs)
        return made if device is None else self.to(made, device)


# ---- what torch tells of the machine


@contextlib.contextmanager
def patched_cuda(count: int = 1):
    """torch.cuda reports so many GPUs, on which this torch cannot compute. set_device stays torch's own."""
    real = torch.autocast

    @contextlib.contextmanager
    def autocast(device_type, *args, **kwargs):  # both: code asks for CUDA's, the CPU's acts
        both = real("cpu", *args, **kwargs) if device_type == "cuda" else contextlib.nullcontext()
        with real(device_type, *args, **kwargs), both:
            yield

    properties = SimpleNamespace(name=NAME, total_memory=2**37, major=9, minor=0, multi_processor_count=132)
    answers = dict(
        is_available=True, device_count=count, current_device=0, _lazy_init=None, is_initialized=False,
        is_bf16_supported=True, is_current_stream_capturing=False, manual_seed_all=None, get_device_name=NAME,
        get_device_properties=properties,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for module, name, value in (
            (torch._C, "_cuda_setDevice", lambda index: None),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.accelerator, "is_available", lambda: False),  # optimizers and loaders would ask its real stream
            (torch.accelerator, "current_accelerator", lambda check_available=False: None),
            (torch, "autocast", autocast),
            (torch, "compile", lambda model, **_: model),
        ):
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        yield
