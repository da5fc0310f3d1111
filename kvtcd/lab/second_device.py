"""A second device made of the CPU: its tensors compute, but only with each other.

They say that they are on the device ``meta``. As on a GPU, an operation on tensors of both devices is an
error, except for copies, for indices in host memory, and for tensors without dimensions; and what is made on
the device stays there until it is copied. So what runs on it leaves no tensor on the wrong side, and all that
a GPU would be told to do can be counted.
"""

# torch's own way to make a class of tensors goes through names that begin with an underscore, and through
# hooks that are given whatever an operator takes.
# ruff: noqa: SLF001, ANN401

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_.default, _ATEN._to_copy.default}
_INDEXING = {
    _ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default,
}  # fmt: skip
WAITING = {"nonzero", "_local_scalar_dense"}
"""Operators whose result the host must know."""
_LAUNCHING_NOTHING = {"empty", "empty_like", "empty_strided", "_unsafe_view", "_local_scalar_dense", "detach"}
"""Besides views."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What the second device was told to do.

    Attributes:
        name: of torch's operator.
        read, written: shapes of the tensors it reads and writes.
        nbytes: of them all; none for one that launches nothing.
        launches: whether the host tells the device of it.
        runs: whether it is work for the device; what is replayed is, without being told of.
        crosses: bytes that go from one side to the other; `to_host` says which way.
        waits: whether the host waits for the device to come so far.
    """

    name: str
    read: tuple[torch.Size, ...]
    written: tuple[torch.Size, ...]
    nbytes: int
    launches: bool
    runs: bool
    crosses: int
    to_host: bool
    waits: bool


class _There(torch.Tensor):
    """A tensor of the second device."""

    here: Tensor

    @staticmethod
    def __new__(cls: type[Self], here: Tensor) -> Self:
        there: Self = torch.Tensor._make_wrapper_subclass(
            cls, here.size(), strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=DEVICE,
        )  # fmt: skip
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as a method
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # what torch documents


class SecondDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """While it is active, the second device is there.

    Args:
        told: of every operation that it has done, views included.

    Attributes:
        watched: given what is computed by no operation of torch, and what came of it.
    """

    def __init__(self, told: Callable[[Operation], None] = lambda _: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._told = told
        self.watched: Callable[[Callable[[], Sequence[Tensor]], Sequence[Tensor]], None] | None = None

    @contextmanager
    def telling(self, told: Callable[[Operation], None]) -> Iterator[None]:
        """Tell someone else of operations meanwhile."""
        before, self._told = self._told, told
        try:
            yield
        finally:
            self._told = before

    def tell(self, operation: Operation) -> None:
        """Tell of an operation."""
        self._told(operation)

    def computed(self, compute: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """Return, on the device, what kernels that are no operations of torch make of its tensors."""
        made = [there(each) for each in compute()]
        if self.watched:
            self.watched(compute, made)
        return made

    def launched(
        self, name: str, *, read: Sequence[Tensor] = (), written: Sequence[Tensor] = (), waits: bool = False
    ) -> None:
        """Tell of a kernel that is no operation of torch; of a mere wait if it touches nothing."""
        self._told(
            Operation(
                name=name,
                read=tuple(tensor.size() for tensor in read),
                written=tuple(tensor.size() for tensor in written),
                nbytes=sum(map(_nbytes, (*read, *written))),
                launches=bool(read or written),
                runs=bool(read or written),
                crosses=0,
                to_host=waits,
                waits=waits,
            )
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _run(func, args, kwargs)
        read, written = tensors((args, kwargs)), tensors(result)
        if any(map(is_there, (*read, *written))):
            self._told(_operation(func, args, kwargs, read, written))
        return result


def is_there(tensor: Tensor) -> bool:
    """Tell whether a tensor is of the second device."""
    return isinstance(tensor, _There)


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors of what an operator takes or returns."""
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def here(tensor: Tensor) -> Tensor:
    """Return what a tensor of the second device holds, as one of the CPU."""
    return tensor.here if isinstance(tensor, _There) else tensor


def there(tensor: Tensor) -> Tensor:
    """Return a tensor of the second device that holds what one of the CPU does."""
    return _There(tensor)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = tensors((args, kwargs))
    asked = kwargs.get("device")
    there = any(map(is_there, given))
    if there and func not in _COPIES:
        checked = tensors([args[0], *args[2:]]) if func in _INDEXING else given
        strangers = [tensor for tensor in checked if not is_there(tensor) and tensor.dim()]
        assert not strangers, f"{func} of tensors on two devices"
    if asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*_here(args), **_here(kwargs))
    written = kwargs.get("out", args[0] if _in_place(func) else None)
    if written is not None:
        return written
    stays = there if asked is None else asked.type == DEVICE.type
    return tree_map_only(torch.Tensor, _There, result) if stays else result


def _operation(
    func: Any, args: Any, kwargs: dict[str, Any], read: list[Tensor], written: list[Tensor]
) -> Operation:
    name = func.__name__.partition(".")[0]
    if name == "copy_":
        read = read[1:]  # what was there before is not looked at
    sides = {isinstance(tensor, _There) for tensor in (*read, *written)}
    crosses = min(map(_nbytes, (*read, *written))) if func in _COPIES and len(sides) == 2 else 0
    lets_go = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
    to_host = crosses > 0 and not isinstance(written[0], _There)
    launches = not (func.is_view or name in _LAUNCHING_NOTHING)
    return Operation(
        name=name,
        read=tuple(tensor.size() for tensor in read),
        written=tuple(tensor.size() for tensor in written),
        nbytes=sum(map(_nbytes, (*read, *written))) if launches else 0,
        launches=launches,
        runs=launches,
        crosses=crosses,
        to_host=to_host,
        # A copy that has to be done when it returns ends with a wait for the stream, whichever way it goes.
        waits=name in WAITING or (crosses > 0 and not lets_go),
    )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _here(values: Any) -> Any:
    return tree_map_only(_There, lambda tensor: tensor.here, values)


def _in_place(func: Any) -> bool:
    """Tell whether an operation returns its first argument, changed."""
    name = func._schema.name
    return bool(name.endswith("_") and not name.endswith("__"))
