"""Watches a forward pass of unmodified model code, one torch function at a time.

A `Tracer` is a torch-function mode: every function called inside it comes by once, composites such as
`rms_norm` whole. It knows in which module and on which line of the model's code a call happens. What is
watched for is up to its two subclasses in `check`: layouts on the whole model, shapes on the localised one.

Parameters may be on the meta device while inputs and buffers are real, so that `.item()`, masks and lengths
just work; where the two meet in one call, the real tensor is taken to the meta device for it.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from shardwise.plan.answers import Answers
from shardwise.plan.flex import plain_flex_attention
from shardwise.plan.rules import tensors_in
from shardwise.plan.rules.shape import VIEWS
from shardwise.plan.shortcuts import shortcut

_NOT_MODEL_CODE = (os.path.dirname(torch.__file__), str(Path(__file__).parents[1]), "<")

QUERIES = frozenset(
    """__format__ __hash__ __iter__ __len__ __repr__ _version broadcast_shapes can_cast data_ptr device dim dtype
    element_size get_device grad grad_fn is_complex is_contiguous is_cpu is_cuda is_floating_point is_inference
    is_leaf is_meta is_mps is_nested is_nonzero is_quantized is_same_size is_sparse is_tensor is_xpu itemsize layout
    names nbytes ndim nelement numel requires_grad result_type shape size storage_offset stride
    untyped_storage""".split()
)
"""Functions that answer something about a tensor and make none."""


_POSITIONS = frozenset(["arange", "linspace"])
"""Functions that make positions, and are not written into."""


@dataclass(frozen=True)
class Event:
    """One call, as the two passes compare it.

    Attributes:
        name: The function, or `"module"` for an opaque planned module.
        path, source: Where: the module, and `file:line` of the model's code.
        shapes: Shape of each output on a rank: predicted (sizes may be alternatives, None is anything) or seen.
        scalars: Numbers among the arguments that must not depend on a local size.
        places: Indices, and where slices start: predicted (alternatives, where a size may be a part) or seen.
        met: Tensors with values that meet those without, each with its shape, predicted or seen.
        hot: Whether a shard goes in or comes out.
        weightless: Whether the outputs have values: nothing without went in.
    """

    name: str
    path: str
    source: str
    shapes: tuple[Any, ...]
    scalars: tuple[float, ...] = ()
    places: tuple[Any, ...] = ()
    met: tuple[tuple[Tensor, tuple[Any, ...] | None], ...] = ()
    hot: bool = False
    weightless: bool = False


class Tracer(TorchFunctionMode):
    """Follows a forward pass of `model`; `watch` sees each call outside of opaque modules.

    Attributes:
        path: Path of the module whose code runs.
        failed_at: (path, source, function) of the first call that raised, if one did.
        events: What was recorded.
        met: Tensors with values that the current call, or opaque module, was given beside those without.
        output: What the model returned, once it has been run; diffusers' and transformers' output classes as tuples.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.path = ""
        self.failed_at: tuple[str, str, str] | None = None
        self.events: list[Event] = []
        self.met: list[Tensor] = []
        self.output: Any = None
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._stack: list[str] = []
        self._opaque = 0
        self._answers = Answers()
        self._handles: list[RemovableHandle] = []
        self._names: dict[Any, tuple[str, str]] = {}

    def run(self, inputs: Mapping[str, Any]) -> None:
        """Run the model on a copy of its keyword arguments, without weights."""
        with meta_forward(), self:
            output = self.model(**copy.deepcopy(dict(inputs)))
        self.output = output.to_tuple() if hasattr(output, "to_tuple") else output

    def watch(self, name: str, full_name: str, args: Any, kwargs: Any, output: Any) -> None:
        """See one call of a torch function that returned."""
        raise NotImplementedError

    def left(self, path: str, output: Any) -> None:
        """See the output of a module whose code has ended."""

    def open_box(self, path: str, inputs: list[Tensor]) -> None:
        """See the inputs of an opaque module."""

    def close_box(self, path: str, outputs: list[Tensor]) -> None:
        """See the outputs of an opaque module."""

    def seal_box(self, path: str, outputs: list[Tensor]) -> None:
        """See what the code of a gathering module returned, before it is gathered."""

    def opaque_paths(self) -> Sequence[str]:
        """Return the paths of the modules whose inside is not watched."""
        return ()

    def gathering_paths(self) -> Sequence[str]:
        """Return the paths of the modules whose slices or sums are made whole behind their code, in a box."""
        return ()

    def slicing_paths(self) -> Sequence[str]:
        """Return the paths of the modules whose code sees slices of what they are given, cut in a box of its own."""
        return ()

    def hand_over(self, path: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """See what a slicing module is given; what is returned replaces its arguments."""
        return None

    def __enter__(self) -> Any:
        """Start watching."""
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        for path in self.opaque_paths():
            module = self.model.get_submodule(path)
            # In front of other hooks, so that what they do (slicing an output) happens inside of the box.
            opening, closing = self._opener(path), self._closer(path)
            self._handles.append(module.register_forward_pre_hook(opening, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(closing, with_kwargs=True))
        for path in self.gathering_paths():
            module, sealing, closing = self.model.get_submodule(path), self._sealer(path), self._closer(path)
            # In front of the hook that gathers, and behind it.
            self._handles.append(module.register_forward_hook(sealing, prepend=True))
            self._handles.append(module.register_forward_hook(closing, with_kwargs=True))
        for path in self.slicing_paths():
            module = self.model.get_submodule(path)
            # Around the hook that slices.
            self._handles.append(module.register_forward_pre_hook(self._shutter, prepend=True))
            self._handles.append(module.register_forward_pre_hook(self._giver(path), with_kwargs=True))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *details: Any) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and show it to `watch`."""
        name, full_name = self._name(func)
        kwargs = kwargs or {}
        if name in QUERIES:
            return func(*args, **kwargs)
        if not self._opaque:
            self.met = []
        args, kwargs = self._meet(name, *_stay(name, args, kwargs))
        try:
            output = self._answers.answer(name, args)
            output = shortcut(func, args, kwargs) if output is None else output
            output = func(*args, **kwargs) if output is None else output
            self._answers.note(name, args, kwargs, output)
        except Exception:
            self.failed_at = self.failed_at or (self.path, model_source(), name)
            raise
        if name == "scaled_dot_product_attention":
            output = _as_kernels_leave_it(output)
        if not self._opaque:
            # Also where it is not another tensor but a device that takes values to the weights.
            if any(tensor.is_meta for tensor in tensors_in(output)):
                self.met += [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_meta]
            self.watch(name, full_name, args, kwargs, output)
        return output

    def same_tag(self, real: Tensor, meta: Tensor) -> None:
        """Carry what is known of a real tensor over to its meta twin."""

    def _meet(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with real tensors taken to the meta device, if any of them is there."""
        on_meta = {tensor.is_meta for tensor in tensors_in((args, kwargs))}
        if len(on_meta) < 2:
            return args, kwargs
        if name in ("__getitem__", "__setitem__") and args[0].is_meta:
            args = (args[0], _plain_index(args[1]), *args[2:])
        elif name == "repeat_interleave" and args[0].is_meta:
            kwargs = {"output_size": _repeats(*args, **kwargs), **kwargs}
        elif name in VIEWS and args[0].is_meta:
            args = (args[0], *_map_tensors(args[1:], int))  # sizes that code computed as tensors
        return _map_tensors((args, kwargs), self._to_meta)  # type: ignore[no-any-return]

    def _to_meta(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        with torch._C.DisableTorchFunction():
            twin = tensor.to("meta")
        self.same_tag(tensor, twin)
        if not self._opaque:
            self.met.append(tensor)
        return twin

    def _name(self, func: Any) -> tuple[str, str]:
        """Return the last part of a function's name, and all of it."""
        if func not in self._names:
            full = resolve_name(func) or getattr(func, "__name__", str(func))
            parts = full.split(".")
            accessor = parts[-1] in ("__get__", "__set__") and len(parts) > 1
            self._names[func] = (parts[-2] if accessor else parts[-1], full)
        return self._names[func]

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(self.path)
        self.path = self._paths.get(id(module), self.path)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._stack:
            path, self.path = self.path, self._stack.pop()
            if not self._opaque:
                self.left(path, output)

    def _opener(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._opaque:
                inputs = list(tensors_in((args, kwargs)))
                self.met = [tensor for tensor in inputs if not tensor.is_meta]
                self.open_box(path, inputs)
            self._opaque += 1

        return hook

    def _sealer(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._opaque:
                self.met = []
                self.seal_box(path, list(tensors_in(output)))
            self._opaque += 1

        return hook

    def _shutter(self, module: nn.Module, args: Any) -> None:
        self._opaque += 1

    def _giver(self, path: str) -> Callable[..., tuple[Any, Any] | None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            self._opaque -= 1
            if self._opaque:
                return None
            self.met = []
            return self.hand_over(path, args, kwargs)

        return hook

    def _closer(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._opaque -= 1
            if not self._opaque:
                self.close_box(path, list(tensors_in(output)))

        return hook


def model_source() -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor this library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            not frame.f_code.co_filename.startswith(_NOT_MODEL_CODE)
            and "contextlib" not in frame.f_code.co_filename
        ):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextmanager
def meta_forward() -> Iterator[None]:
    """Let forward passes run on the meta device: without gradients, autocast and FlexAttention, which refuse it."""
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "meta":
            original(self, "cpu", enabled=False)
        else:
            original(self, device_type, *args, **kwargs)

    with _same_random_numbers(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the code warns of is for those who run it
        with mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", init), plain_flex_attention():
            yield


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Draw from seed 0 inside, on the CPU and on the accelerators that are in use, and leave no trace of it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cuda")
    module = torch.get_device_module(accelerator)
    used = getattr(module, "is_initialized", bool)()  # torch.mps does not say
    with torch.random.fork_rng(range(module.device_count()) if used else (), device_type=accelerator.type):
        torch.default_generator.manual_seed(0)
        if used:
            module.manual_seed_all(0)
        yield


class _Quiet(Tracer):
    """Only lets real and meta tensors meet."""

    def watch(self, name: str, full_name: str, args: Any, kwargs: Any, output: Any) -> None:
        """See nothing."""


def quiet_forward(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Run a forward once and watch nothing: for what the model caches, or what a group counts."""
    with meta_forward(), _Quiet(model):
        model(**inputs)


def _stay(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, without the wish to take a tensor with values to where the weights are.

    Code looks into masks and numbers that it has moved to the device of its input. Positions that are made there keep
    their values too: tables made of them may come from a cache, and are compared where they meet the weights.
    """
    if name not in _POSITIONS and (name != "to" or args[0].is_meta):
        return args, kwargs
    device = args[0].device if name == "to" else torch.device("cpu")

    def here(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    return tuple(map(here, args)), {key: here(value) for key, value in kwargs.items()}


def _as_kernels_leave_it(attention: Tensor) -> Tensor:
    """Return what attention gives on the meta device with the strides that the fused kernels leave.

    They write heads beside each other for each token, and code that joins the heads by a view counts on it.
    """
    if not attention.is_meta or attention.ndim != 4:
        return attention
    with torch._C.DisableTorchFunction():
        return attention.transpose(1, 2).contiguous().transpose(1, 2)


def _repeats(x: Tensor, repeats: Tensor, dim: int | None = None, **kwargs: Any) -> int:
    """Return the size that numbers of repetitions give, which torch cannot add up on the meta device."""
    size = x.numel() if dim is None else x.shape[dim]
    return int(repeats.expand(size).sum())


def _plain_index(index: Any) -> Any:
    """Return an index of a meta tensor without real masks and numbers: masks as positions, 0-d tensors as ints."""
    items = index if isinstance(index, tuple) else (index,)
    plain: list[Any] = []
    for item in items:
        if isinstance(item, Tensor) and not item.is_meta and item.dtype == torch.bool and item.ndim:
            plain += item.nonzero(as_tuple=True)
        elif isinstance(item, Tensor) and not item.is_meta and item.ndim == 0 and item.dtype != torch.bool:
            plain.append(int(item))
        else:
            plain.append(item)
    return tuple(plain) if isinstance(index, tuple) or len(plain) > 1 else plain[0]


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested lists, tuples and dicts with each tensor replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_map_tensors(item, change) for item in value)
    if isinstance(value, list):
        return [_map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    return value
