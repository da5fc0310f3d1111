"""Why memory of a GPU is not shared between two processes; a branch of the tree in `errors`.

::

    DeviceUnshared          memory of a GPU that cannot be shared between two processes
    ├── DeviceRegionsOff    the daemon was not told to
    ├── NoDriver            no CUDA driver, or it finds no device; `why`
    ├── UnknownDevice       a GPU that this process does not see; `uuid`, `visible`
    ├── NotExportable       memory that was allocated such that it has no handle; `nbytes`
    ├── BadHandle           a handle that the driver does not open; `what`, `why`
    ├── DeviceFailed        a GPU that failed under the memory that was open on it; `uuid`, `why`
    └── SameProcess         a handle can only be opened by another process
"""

from __future__ import annotations

from kvtcd.core.errors import KvtcdError


class DeviceUnshared(KvtcdError):
    """Memory of a GPU that cannot be shared between two processes; its bytes can go through host memory."""


class DeviceRegionsOff(DeviceUnshared):
    """The daemon was not told to open memory of GPUs."""

    def __init__(self) -> None:
        super().__init__("the daemon opens no memory of GPUs: regions is false in [gpu] of its config.toml")


class NoDriver(DeviceUnshared):
    """No CUDA driver, or none that finds a device."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"there is no CUDA driver with a device: {why}. Install NVIDIA's driver, or give the container"
            " its GPUs"
        )


class UnknownDevice(DeviceUnshared):
    """A GPU that a process does not see."""

    def __init__(self, uuid: str, visible: tuple[str, ...]) -> None:
        self.uuid, self.visible = uuid, visible
        super().__init__(
            f"GPU {uuid} is none of those that are seen here ({', '.join(visible)}); "
            "let CUDA_VISIBLE_DEVICES or the container of the daemon include it"
        )


class NotExportable(DeviceUnshared):
    """Memory that was allocated such that no other process can open it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        super().__init__(
            f"{nbytes} bytes of GPU memory have no handle that another process could open: they lie in"
            " expandable segments or a memory pool. Allocate them with cudaMalloc; with PyTorch, start the"
            " engine without expandable_segments and backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"
        )


class BadHandle(DeviceUnshared):
    """A handle of memory or of an event that the driver does not open."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why
        super().__init__(
            f"the {what} cannot be opened ({why}): who made it must run, with the memory allocated, as a user"
            " that CUDA lets share it, and in the daemon's PID namespace (docker: --pid=host --ipc=host)"
        )


class DeviceFailed(DeviceUnshared):
    """A GPU failed, and with it all use that a process made of it; until it is started again."""

    def __init__(self, uuid: str, why: str) -> None:
        self.uuid, self.why = uuid, why
        super().__init__(f"GPU {uuid} has failed this process ({why}), which opens no memory on it any more")


class SameProcess(DeviceUnshared):
    """A handle that was made by the very process that is to open it, which CUDA refuses."""

    def __init__(self) -> None:
        super().__init__(
            "CUDA opens no handle in the process that made it; let the daemon be another process"
        )
