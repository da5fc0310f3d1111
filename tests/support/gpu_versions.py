"""What runs here: card, driver, libraries; and which wheel of nvCOMP the driver takes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from support.gpu_nvcomp import Wrong

if TYPE_CHECKING:
    from collections.abc import Iterable

_DRIVER = Path("/proc/driver/nvidia/version")
_LIBRARIES = (
    "torch",
    "triton",
    "numpy",
    *(f"nvidia-{lib}nvcomp-cu{major}" for major in (13, 12) for lib in ("", "lib")),
)
_TRY = """
import sys, torch
from kvtcd.codec import nvcomp
from kvtcd.codec.residency import Residency
found = nvcomp.load(torch.device(sys.argv[1]), Residency())
from nvidia import nvcomp as api
print(api.__version__)
sys.exit(found is None)
"""
_TRY_S = 20


def versions(device: torch.device, driver: Path = _DRIVER) -> dict[str, object]:
    """Say what card, driver and libraries there are."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "driver_cuda": _driver_cuda(),
        "cuda": torch.version.cuda,
    } | {name: _version(name) for name in _LIBRARIES}
    if device.type != "cuda":
        return found
    card = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return found | {
        "card": card.name, "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count, "memory": total, "memory_free": free,
    }  # fmt: skip


def wheels(device: torch.device, folder: str | None = None) -> list[dict[str, object]]:
    """Try nvCOMP as it is installed, then the wheels of CUDA 13 and 12 in a folder; each in its own process.

    Raises:
        Wrong: what is installed does not load.
    """
    folder = os.environ.get("WHEELS") if folder is None else folder
    rows = [{"wheel": "installed"} | _tried(device, ())]
    for major in (13, 12) if folder else ():
        brought = sorted(Path(folder).glob(f"nvidia_*nvcomp_cu{major}-*.whl"))
        if not brought:
            rows.append({"wheel": f"cu{major}", "loads": None, "version": None, "why": f"none in {folder}"})
            continue
        with tempfile.TemporaryDirectory(prefix="kvtcd-gpu-") as unpacked:
            for each in brought:
                with zipfile.ZipFile(each) as archive:
                    archive.extractall(unpacked)
            rows.append({"wheel": f"cu{major}"} | _tried(device, (unpacked,)))
    if not rows[0]["loads"]:
        raise Wrong(f"what is installed does not load: {rows[0]['why']}", rows)
    return rows


def _tried(device: torch.device, ahead: Iterable[str]) -> dict[str, object]:
    path = os.pathsep.join([*ahead, *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", _TRY, str(device)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=_TRY_S, check=False,
    )  # fmt: skip
    said = result.stderr.strip().splitlines()
    why = "" if not result.returncode else f"ends with {result.returncode}: {said[-1] if said else ''}"
    return {"loads": not result.returncode, "version": result.stdout.strip() or None, "why": why}


def _driver_cuda() -> str | None:
    """Return the newest CUDA that the driver speaks."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except OSError:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
