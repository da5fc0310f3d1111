"""Errors that say that a GPU has no memory, in the words of those who raise them; and others."""

from __future__ import annotations

import pytest
import torch

from kvtcd.core.exhaustion import exhausted


def numbered(code: int) -> RuntimeError:
    """As torch makes one of CUDA's: with its number, whatever it says."""
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("40 bytes of bases do not fit on cuda:0"),
        torch.OutOfMemoryError(),
        numbered(2),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtCreate(&handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA Runtime API failure: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
    ids=repr,
)
def test_no_memory_is_told(error) -> None:
    assert exhausted(error)


@pytest.mark.parametrize(
    "error",
    [
        numbered(700),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("CUDA error: device-side assert triggered"),
        MemoryError("out of memory"),
        ValueError("out of memory"),
    ],
    ids=repr,
)
def test_anything_else_is_not(error) -> None:
    assert not exhausted(error)
