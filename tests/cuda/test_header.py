"""What `kvtcd.cuda.driver` calls and means is what NVIDIA's own header says, where there is one."""

from __future__ import annotations

import os
import re
from ctypes import c_int, c_size_t, c_uint, c_uint64
from pathlib import Path

import pytest

from kvtcd.core.device_regions import HANDLE_BYTES
from kvtcd.cuda import driver

HOMES = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *sorted(Path("/usr/local").glob("cuda-*"))]
HEADER = next((path for home in HOMES if (path := home / "include" / "cuda.h").exists()), None)
pytestmark = pytest.mark.skipif(HEADER is None, reason="there is no cuda.h (CUDA_HOME)")
BY_VALUE = {
    "CUdeviceptr": c_uint64, "size_t": c_size_t, "unsigned int": c_uint, "int": c_int, "CUdevice": c_int,
    "CUresult": c_int, "CUpointer_attribute": c_int,
    "CUipcMemHandle": driver.Bytes64, "CUipcEventHandle": driver.Bytes64,
}  # fmt: skip
POINTERS = {"CUcontext", "CUstream", "CUevent"}


@pytest.fixture(scope="module")
def text() -> str:
    return HEADER.read_text(errors="replace")


def is_pointer(kind: object) -> bool:
    return hasattr(kind, "contents") or kind in {driver.c_void_p, driver.c_char_p}


@pytest.mark.parametrize("name", driver.PROTOTYPES)
def test_a_function_takes_what_it_is_given(name, text):
    plain = name.removesuffix("_v2")
    if plain != name:
        pattern = rf"#define\s+{plain}\s+(?:__CUDA_API_PT\w+\()?{name}\b|CUDAAPI {name}\("
        assert re.search(pattern, text), "the symbol of this version"
    declared = re.search(rf"CUresult CUDAAPI {plain}\(([^)]*)\);", text)
    parameters = [part.strip() for part in declared.group(1).split(",")]
    given = driver.PROTOTYPES[name]
    assert len(parameters) == len(given)
    for parameter, kind in zip(parameters, given, strict=True):
        of = re.sub(r"\w+$", "", parameter).replace("const", "").strip()
        if "*" in of or of in POINTERS:
            assert is_pointer(kind), parameter
        else:
            assert kind is BY_VALUE[of], parameter


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", driver.DEVICE_ORDINAL),
        ("CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", driver.LEGACY_IPC_CAPABLE),
        ("CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS", driver.LAZY_PEER_ACCESS),
        ("CU_STREAM_NON_BLOCKING", driver.NON_BLOCKING),
        ("CU_EVENT_BLOCKING_SYNC", driver.BLOCKING_SYNC),
        ("CU_EVENT_DISABLE_TIMING", driver.DISABLE_TIMING),
        ("CU_EVENT_INTERPROCESS", driver.INTERPROCESS),
        ("CUDA_ERROR_NOT_READY", driver.NOT_READY),
    ],
)
def test_a_number_is_the_one_of_its_name(name, value, text):
    assert int(re.search(rf"\b{name}\s*=\s*(0x[0-9a-f]+|\d+)", text).group(1), 0) == value


def test_handles_have_the_size_that_is_said(text):
    assert int(re.search(r"#define CU_IPC_HANDLE_SIZE (\d+)", text).group(1)) == HANDLE_BYTES


def test_every_error_that_leaves_a_process_inconsistent_is_sticky(text):
    errors = text[: text.index("} CUresult;")].rsplit("typedef enum cudaError_enum", 1)[1]
    entries = re.findall(r"/\*\*(.*?)\*/\s*(CUDA_ERROR_\w+)\s*=\s*(\d+)", errors, re.DOTALL)
    said = {int(code) for why, _, code in entries if "inconsistent state" in why}
    assert {700, 719} <= said
    assert said <= driver.STICKY
