"""A CUDA device simulated on the CPU: runs GPU code paths, refuses mixed devices, counts synchronizations.

Tensors of the simulated device have the device `cuda:0` and wrap a CPU tensor. Operations for which the host waits are
counted: reads of values by the host (`.item()`, `.tolist()`, `.cpu()`), operations whose output shape depends on
values (`nonzero`, a boolean mask as an index, `repeat_interleave` without its output size), and copies to the device
that are not `non_blocking` from pinned memory, and events that the host waits for. Operations on the device are counted
too: each is a launch of at least one kernel.
"""

from __future__ import annotations

import collections
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

CUDA, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
aten = torch.ops.aten

READ, SHAPE, UPLOAD = "device-to-host read", "shape from values", "blocking copy to the device"
EVENT = "event that the host waits for"
# Operations that synchronize because the shape of their output depends on values on the device.
SHAPE_FROM_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}  # fmt: skip
# Products of bf16 matrices in float32, which a CPU does not have.
MIXED_PRODUCTS = {aten.mm.dtype_out, aten.addmm.dtype_out}
COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class SimulatedTensor(torch.Tensor):
    """A tensor on the simulated device."""

    inner: Tensor
    is_recorded: bool = False

    @staticmethod
    def __new__(cls, inner: Tensor) -> SimulatedTensor:
        """Wrap a CPU tensor."""
        wrapper: SimulatedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=META,
        )  # fmt: skip
        wrapper.inner = inner
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the simulated device."""
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Return True, as on a GPU."""
        return True

    def record_stream(self, stream: Any) -> None:
        """Record that another stream uses its memory."""
        self.is_recorded = True

    def to_local(self) -> SimulatedTensor:
        """Return itself: xtk accepts an output head whose matrix is not an `nn.Parameter` only if it is sharded."""
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return shape and dtype without values: reading those would be counted."""
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail: operations must run inside of `SimulatedCuda`."""
        raise AssertionError(f"{func} on the simulated device, outside of its context")


class _DeviceNames(TorchFunctionMode):
    """Replaces `cuda` in calls by `meta`, which needs no driver, and simulates pinned memory."""

    def __init__(self, owner: SimulatedCuda) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            self._owner.pinned[pinned.untyped_storage().data_ptr()] = pinned
            return pinned
        if func is torch.Tensor.is_pinned:
            return args[0].untyped_storage().data_ptr() in self._owner.pinned
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and isinstance(args[0], SimulatedTensor):
            if func is torch.Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            self._owner.count(READ, "tolist()")
            return args[0].inner.tolist()
        if func in (torch.tensor, torch.as_tensor) and _is_cuda(kwargs.get("device")):
            self._owner.count(UPLOAD, str(func))
            return _wrapped(func(*args, **{name: one for name, one in kwargs.items() if name != "device"}))
        args, kwargs = tree_map(lambda one: META if _is_cuda(one) else one, (args, kwargs))
        return func(*args, **kwargs)


class SimulatedCuda(TorchDispatchMode):
    """Context in which `torch.device("cuda")` is simulated.

    Args:
        only_as_on_a_gpu: tensors reach the device by torch's own calls; `to_device`, which a GPU does not have, fails.

    Attributes:
        waits: number of times the host waited, by kind.
        wait_locations: the same by line of code.
        operations: number of operations on the device that are not views, by name.
        pinned: pinned tensors by the address of their memory.
    """

    forbids_to_device = False  # that of the context that is entered

    def __init__(self, *, only_as_on_a_gpu: bool = False) -> None:
        super().__init__()
        self._only_as_on_a_gpu = only_as_on_a_gpu
        self.waits: collections.Counter[str] = collections.Counter()
        self.wait_locations: collections.Counter[str] = collections.Counter()
        self.operations: collections.Counter[str] = collections.Counter()
        self.pinned: dict[int, Tensor] = {}
        self._names = _DeviceNames(self)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> SimulatedCuda:
        # On a real GPU, too, the state of the random generator is on the host.
        self._patch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(0, dtype=torch.uint8))
        self._patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
        self._patch.setattr(SimulatedCuda, "forbids_to_device", self._only_as_on_a_gpu)
        self._patch.setattr(torch.cuda, "Event", lambda: _Event(self))
        self._patch.setattr(torch.cuda, "current_stream", _Stream)
        super().__enter__()
        self._names.__enter__()
        return self

    def __exit__(self, *exception_info: Any) -> None:
        self._names.__exit__(*exception_info)
        super().__exit__(*exception_info)
        self._patch.undo()

    def count(self, kind: str, what: str) -> None:
        """Count a wait of the host, and the last line of the call stack that is not in torch."""
        self.waits[kind] += 1
        frames = [one for one in traceback.extract_stack() if "simulated_cuda" not in one.filename]
        caller_frames = [one for one in frames if "/torch/" not in one.filename]
        location = "/".join(caller_frames[-1].filename.split("/")[-3:]) if caller_frames else "?"
        self.wait_locations[f"{kind}: {what} at {location}:{caller_frames[-1].lineno if caller_frames else 0}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        device_tensors = [one for one in leaves if isinstance(one, SimulatedTensor)]
        target = kwargs.get("device")
        if not device_tensors and target != META:
            return func(*args, **kwargs)
        if func is aten._fused_sdp_choice.default:
            return 0  # the math backend, composed of other operations
        if not func.is_view:
            self.operations[str(func)] += 1
        self._check(func, leaves, device_tensors, args, kwargs)
        plain_args, plain_kwargs = tree_map(lambda one: one.inner if isinstance(one, SimulatedTensor) else one,
                                            (args, kwargs))  # fmt: skip
        if "device" in plain_kwargs and plain_kwargs["device"] in (META, CUDA):
            plain_kwargs["device"] = CPU
        output = (_mixed_product if func in MIXED_PRODUCTS else func)(*plain_args, **plain_kwargs)
        if func is aten._to_copy.default and device_tensors and target == CPU:
            return output.clone() if output is plain_args[0] else output
        if func is aten.copy_.default and not isinstance(args[0], SimulatedTensor):
            return args[0]
        output = tree_map(lambda one: _wrapped(one) if isinstance(one, Tensor) else one, output)
        return return_and_correct_aliasing(func, args, kwargs, output) if device_tensors else output

    def _check(self, func: Any, leaves: list[Any], device_tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        """Count operations for which the host waits, and refuse operations on tensors of two devices."""
        host_tensors = [one for one in leaves if isinstance(one, Tensor) and not isinstance(one, SimulatedTensor)]
        if func is aten._local_scalar_dense.default:
            self.count(READ, "item()")
        elif func in SHAPE_FROM_VALUES and device_tensors:
            if func is not aten.repeat_interleave.Tensor or kwargs.get("output_size") is None:
                self.count(SHAPE, str(func))
        elif func in COPIES:
            source = args[1] if func is not aten._to_copy.default else args[0]
            is_to_host = (
                kwargs.get("device") == CPU
                if func is aten._to_copy.default
                else host_tensors and args[0] is host_tensors[0]
            )
            if isinstance(source, SimulatedTensor) and is_to_host:
                is_async = func is aten.copy_.default and (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
                if not (is_async and args[0].untyped_storage().data_ptr() in self.pinned):
                    self.count(READ, str(func))
            elif not isinstance(source, SimulatedTensor):
                is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
                if not (is_async and source.untyped_storage().data_ptr() in self.pinned):
                    self.count(UPLOAD, str(func))
        elif func in INDEXED:
            indices = [one for one in args[1] if one is not None]
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                self.count(SHAPE, "boolean index")
            if any(not isinstance(one, SimulatedTensor) for one in indices):
                self.count(UPLOAD, "index on the CPU")
            if host_tensors and any(one.dim() for one in host_tensors if one not in indices):
                raise RuntimeError(f"{func}: tensors on two devices")
        elif device_tensors and any(one.dim() for one in host_tensors):
            raise RuntimeError(f"{func}: tensors on two devices")


class _Stream:
    """A stream of a device."""

    def __init__(self, device: torch.device) -> None:
        assert device == CUDA

    def wait_event(self, event: Any) -> None:
        """Wait in the stream; the host does not."""


class _Event:
    """An event in the queue of the simulated device."""

    def __init__(self, owner: SimulatedCuda) -> None:
        self._owner = owner

    def record(self, stream: Any = None) -> None:
        """Put the event into the queue of a stream, named by its device; without one it may be that of another GPU."""
        assert stream is not None, "an event needs the stream of the device whose work it follows"

    def synchronize(self) -> None:
        """Wait for the event."""
        self._owner.count(EVENT, "synchronize()")


def to_device(tensor: Tensor) -> Tensor:
    """Return a CPU tensor on the simulated device, without counting a copy."""
    assert not SimulatedCuda.forbids_to_device, "a test that also runs on a GPU cannot use `to_device`"
    return _wrapped(tensor)


def move_to_device(model: nn.Module) -> nn.Module:
    """Move a model's parameters and buffers to the simulated device in place; tied parameters stay tied."""
    moved_parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                moved_parameter = moved_parameters.setdefault(
                    id(parameter), nn.Parameter(to_device(parameter.detach()), requires_grad=parameter.requires_grad)
                )
                module._parameters[name] = moved_parameter
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = to_device(buffer.detach())
    return model


def to_host(tensor: Tensor) -> Tensor:
    """Return the CPU tensor inside of a tensor on the simulated device."""
    return tensor.inner if isinstance(tensor, SimulatedTensor) else tensor


def _mixed_product(*matrices: Any, out: Tensor, alpha: float = 1.0) -> Tensor:
    """Compute `mm` or `addmm` of some matrices and a dtype into `out`."""
    *total, left, right, dtype = matrices
    assert out.dtype == dtype
    assert left.dtype == right.dtype != dtype
    assert all(one is out for one in total)
    product = alpha * (left.to(dtype) @ right.to(dtype))
    return out.add_(product) if total else out.copy_(product)


def _wrapped(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, SimulatedTensor) else SimulatedTensor(tensor)


def _is_cuda(value: Any) -> bool:
    return (value.type if isinstance(value, torch.device) else str(value)[:4]) == "cuda"
