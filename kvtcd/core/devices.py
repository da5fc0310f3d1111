"""How devices are called that pack, unpack and hold blocks."""

from __future__ import annotations

from typing import Annotated

from kvtcd.core.forms import Pattern

GPU = Pattern("cuda:(0|[1-9][0-9]{0,2})", '"cuda:1", say')
GpuName = Annotated[str, GPU]
"""A GPU by CUDA's number."""
DEVICE = Pattern(f"cpu|cuda|{GPU.regex}", f'"cpu", "cuda", or {GPU.shown}')
DeviceName = Annotated[str, DEVICE]
"""``cpu``; ``cuda``, the GPU that the daemon has for codecs; or a `GpuName`."""
