"""A GPU of paper: what code would do on CUDA, recorded on a machine without one.

    with paper_gpu() as recorder:
        x = torch.zeros(4, 8, device="cuda").bfloat16()     # says that it is on cuda:0; has a shape and no values
        x @ x.T
    recorder.ops                                            # an Op each: bytes, flops, launches, waits

Tensors are on torch's meta device. A function mode has them say that they are on cuda:0, so the code takes its CUDA
path, casts as CUDA's autocast does and takes the flash attention. A dispatch mode records what is launched, below
autograd. Against a CUDA device emulated below PyTorch's C++ autocast and autograd, a step of train_cifar.py and of
train_lm.py launches the same operations, one for one. What the host reads of such tensors is 0, and every question is
answered with yes; code that needs the values themselves (nonzero, a mask as an index) raises.
"""

import contextlib
import math
import os
import sys
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

# Kernels of operations that have several; how many tensors a multi-tensor kernel takes, by the lists that it is given.
KERNELS = dict(native_layer_norm_backward=2, _scaled_dot_product_flash_attention_backward=3, argsort=2, sort=2)
TENSORS = (110, 64, 48, 36, 30)
LOOKUPS = {"index", "index_select", "gather", "embedding"}
OVERWRITES = {"zero_", "fill_", "copy_", "normal_", "uniform_"}  # write their first argument without reading it
# Of CUDA's autocast lists, what these scripts may call.
LOWER = set("linear matmul __matmul__ mm bmm addmm baddbmm einsum conv2d scaled_dot_product_attention".split())
FLOAT32 = set("layer_norm softmax log_softmax cross_entropy nll_loss mse_loss norm exp log pow".split())
TRAINED = "forward and backward"


class Op(NamedTuple):
    """One operation on the GPU; bytes are by storage."""

    phase: str
    name: str
    step: int  # optimizer steps done before it
    launches: int = 1
    flop: int = 0
    reads: dict = {}
    writes: dict = {}
    size: int = 0  # elements of its largest tensor
    waits: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


# ---- counting


def bytes_of(x: torch.Tensor) -> int:
    """An expanded dimension repeats the elements that are there."""
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride()) if stride)


def tensors_in(value) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def phase() -> str:
    """The part of a step that asks, by the functions on the stack."""
    frame, names = sys._getframe(2), set()
    while frame:
        names |= {frame.f_code.co_name, os.path.basename(frame.f_code.co_filename)}
        frame = frame.f_back
    if "evaluate" in names:
        return "evaluation"
    if names & {"prepare_images", "augment.py", "randaugment.py"}:
        return "augmentation"
    if names & {"optimizer.py", "clip_grad_norm_"}:
        return "optimizer"
    return TRAINED if names & {"backward", "_call_impl"} else "the loop"


class Recorder(TorchDispatchMode):
    """Keeps an Op for each operation on meta tensors, once `first` optimizer steps are done."""

    def __init__(self, first: int):
        super().__init__()
        self.ops: list[Op] = []
        self.first, self.step = first, 0
        self.kept = []  # storages, so that no two have one address

    def add(self, name: str, **values) -> None:
        if self.step >= self.first:
            self.ops.append(Op(phase(), name, self.step, **values))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):  # inference mode
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        inputs = tensors_in((args, kwargs))
        if name == "_local_scalar_dense" and inputs[0].is_meta:
            self.add("read", waits=True)
            return True if inputs[0].dtype == torch.bool else 0
        if name == "copy_" and args[0].is_meta != args[1].is_meta:
            self.add("copy", waits=not (args[2:] or kwargs.get("non_blocking")))
            return args[0] if args[0].is_meta else args[0].zero_()
        if name == "_to_copy" and kwargs.get("device") and args[0].is_meta != (kwargs["device"].type == "meta"):
            self.add("copy", waits=not kwargs.get("non_blocking"))
            return torch.zeros_like(args[0], dtype=kwargs.get("dtype"), device=kwargs["device"])
        out = func(*args, **kwargs)
        if self.step >= self.first and any(x.is_meta for x in [*inputs, *tensors_in(out)]):
            self.count(func, name, args, kwargs, out)
        self.step += name.startswith("_fused_adam")
        return out

    def count(self, func, name: str, args, kwargs, out) -> None:
        arguments = func._schema.arguments
        given = [*zip(arguments, args), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
        inputs = [x for _, value in given for x in tensors_in(value) if x.is_meta]
        written = [x for a, value in given if a.alias_info and a.alias_info.is_write for x in tensors_in(value)]
        outputs = written or tensors_in(out)
        known = {self.storage(x) for x in inputs}
        if "empty" in name or not written and all(self.storage(x) in known for x in outputs):
            return  # an address, a view
        reads = {}
        for x in inputs[name in OVERWRITES :]:
            fetched = min(bytes_of(x), sum(map(bytes_of, outputs))) if name in LOOKUPS and x is args[0] else bytes_of(x)
            reads[self.storage(x)] = reads.get(self.storage(x), 0) + fetched
        counter, launches = flop_registry.get(func.overloadpacket), KERNELS.get(name, 1)
        if name.startswith(("_foreach", "_fused")):
            lists = [tensors_in(value) for _, value in given if isinstance(value, (list, tuple)) and len(value)]
            blocks = sum(-(-x.numel() // 65536) for x in lists[0])
            launches = max(-(-len(lists[0]) // TENSORS[min(len(lists), 5) - 1]), -(-blocks // 320))
        self.add(
            name, launches=launches, flop=counter(*args, **kwargs, out_val=out) if counter else 0, reads=reads,
            writes={self.storage(x): bytes_of(x) for x in outputs}, size=max(x.numel() for x in [*inputs, *outputs]),
        )  # fmt: skip

    def storage(self, x: torch.Tensor) -> int:
        self.kept.append(x.untyped_storage())
        return self.kept[-1]._cdata


# ---- a GPU of paper


class SaysCuda(TorchFunctionMode):
    """Within, meta tensors say that they are on cuda:0, and functions do with them what they do there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, dict(kwargs or {})
        if name == "__get__" and func.__self__.__name__ in ("device", "is_cuda") and args[0].is_meta:
            return func.__self__.__name__ == "is_cuda" or torch.device("cuda:0")
        if name in ("pin_memory", "is_pinned"):
            return args[0] if name == "pin_memory" else True
        kwargs.pop("pin_memory", None)
        moved = name in ("to", "cuda")  # whose device may be a word
        args = tuple(on_meta(x) if isinstance(x, torch.device) or moved else x for x in args)
        if name == "cuda":
            func, args = torch.Tensor.to, (args[0], "meta")
        if "device" in kwargs:
            kwargs["device"] = on_meta(kwargs["device"])
        if name in ("tensor", "as_tensor") and str(kwargs.get("device")) == "meta":  # made on the host
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        if name == "tolist":
            args = (args[0].to("cpu"),)
        if name in LOWER | FLOAT32 and torch.is_autocast_enabled("cuda") and any(x.is_meta for x in tensors_in(args)):
            dtype = torch.float32 if name in FLOAT32 else torch.get_autocast_dtype("cuda")
            args, kwargs = tree_map(lambda x: cast(x, dtype), (args, kwargs))
        if name == "scaled_dot_product_attention" and args[0].is_meta and kwargs.get("attn_mask") is None:
            p, causal = kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False)
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3], p, causal)[0]
        return func(*args, **kwargs)


def on_meta(device):
    """Devices and words for CUDA become meta, all else stays."""
    return "meta" if isinstance(device, (str, torch.device)) and str(device).startswith("cuda") else device


def cast(x, dtype: torch.dtype):
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


@contextlib.contextmanager
def paper_gpu(first: int = 0):
    """Within, torch reports one GPU, of 141 GB. Yields the Recorder of what is done on it."""
    memory, foreach = 141 * 10**9, torch.utils._foreach_utils
    supported = [*foreach._get_foreach_kernels_supported_devices(), "meta"]
    cuda = dict(
        is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0, set_device=lambda device: None,
        get_device_name=lambda device=None: "a GPU of paper", get_device_capability=lambda device=None: (9, 0),
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=memory, major=9, minor=0),
        is_bf16_supported=lambda *_, **__: True, is_current_stream_capturing=lambda: False,
        manual_seed_all=lambda seed: None, synchronize=lambda device=None: None, empty_cache=lambda: None,
        mem_get_info=lambda device=None: (memory, memory), max_memory_allocated=lambda: 0,
        reset_peak_memory_stats=lambda: None,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.multiple(torch.cuda, **cuda),
            mock.patch.object(torch, "compile", lambda model, **_: model),
            mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
            mock.patch.object(foreach, "_get_foreach_kernels_supported_devices", lambda: supported),
            torch.autograd.set_multithreading_enabled(False),  # backward keeps the stack that phase() reads
        ):
            stack.enter_context(patch)
        recorder = stack.enter_context(Recorder(first))
        stack.enter_context(SaysCuda())
        yield recorder
