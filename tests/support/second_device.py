"""A second device made of the CPU: its tensors compute, but only with each other.

They say that they are on the device ``meta``. As on a GPU, an operation on tensors of both devices is an
error, except for copies, for indices in host memory, and for tensors without dimensions; and what is made on
the device stays there until it is copied.
"""

from __future__ import annotations

from typing import Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_INDEXING = {
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
}  # fmt: skip


class _There(torch.Tensor):
    """A tensor of the second device."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Self:
        there = torch.Tensor._make_wrapper_subclass(
            cls, here.size(), strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=DEVICE,
        )  # fmt: skip
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class SecondDevice(TorchDispatchMode):
    """While it is active, the second device is there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    asked = kwargs.get("device")
    there = any(isinstance(tensor, _There) for tensor in tensors)
    if there and func not in _COPIES:
        checked = [args[0], *args[2:]] if func in _INDEXING else tensors
        strangers = [
            value
            for value in tree_flatten(checked)[0]
            if isinstance(value, torch.Tensor) and not isinstance(value, _There) and value.dim()
        ]
        assert not strangers, f"{func} of tensors on two devices"
    if asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*_here(args), **_here(kwargs))
    written = kwargs.get("out", args[0] if _writes(func) else None)
    if written is not None:
        return written
    stays = there if asked is None else asked.type == DEVICE.type
    return tree_map_only(torch.Tensor, _There, result) if stays else result


def _here(values):
    return tree_map_only(_There, lambda tensor: tensor.here, values)


def _writes(func) -> bool:
    """Tell whether an operation returns its first argument, changed."""
    return func._schema.name.endswith("_") and not func._schema.name.endswith("__")
