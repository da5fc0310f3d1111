"""Whether kernels of our own do the arithmetic of codes on a device, or torch."""

from __future__ import annotations

import logging

import torch

from kvtcd.codec.uniform import Arithmetic, InTorch
from kvtcd.codec.widths import Widths

_log = logging.getLogger(__name__)
_CLOSE = 0.05
"""Squared errors are compared with: of coefficients up to 45,000 a product that is rounded before it is taken
away has lost .002 more or less than one that is not."""
_TOKENS = 301
"""More than a kernel takes at a time, and no multiple of anything."""


def load(device: torch.device) -> Arithmetic:
    """Return the kernels for a CUDA device; torch, with a warning that says why, where they cannot be had.

    That Triton can be imported says nothing: it needs a compiler for C, and a folder to write to. So kernels
    have to say what torch says, which compiles them before the first block comes.
    """
    try:
        from kvtcd.codec.kernels import InTriton  # noqa: PLC0415 - Triton comes with torch for CUDA alone
    except ImportError:
        why = "Triton is not installed"
    else:
        try:
            with torch.cuda.device(device):
                prove(InTriton(), device)
        except Exception as error:  # noqa: BLE001 - whatever it is, torch does the work
            why = f"a trial of them failed: {error!r}"
        else:
            return InTriton()
    _log.warning("codes are rounded and packed by torch's operations, kernels cannot be used: %s", why)
    return InTorch()


def prove(arithmetic: Arithmetic, device: torch.device) -> None:
    """Raise unless it says what torch says on a CPU, of codes of all widths, escapes and ties."""
    draw = torch.Generator().manual_seed(0)
    widths = Widths.of(torch.tensor([40.0, 0.05, 1.2, 0.2, 0.12, 0.3, 3.0]), 1.0)
    steps = torch.rand(_TOKENS, generator=draw) + 0.5
    coefficients = steps * torch.randint(-60, 61, (widths.rank, _TOKENS), generator=draw) / 2
    coefficients[::2, ::17] *= 1000
    order = torch.randperm(_TOKENS, generator=draw)
    right, there = InTorch().quantise(coefficients, steps, order, widths), widths.to(device)
    given = steps.to(device), order.to(device), there
    told = arithmetic.quantise(coefficients.to(device), *given)
    escapes, beyond = told.found.tolist()
    restored = arithmetic.restore(told.codes, told.escapes[:, :escapes].contiguous(), *given)
    again = InTorch().restore(right.codes, right.escapes, steps, order, widths)
    if not (
        right.found.tolist() == [escapes, beyond]
        and torch.equal(told.codes.cpu(), right.codes)
        and torch.equal(told.escapes[:, :escapes].cpu(), right.escapes)
        and torch.allclose(told.lost.cpu(), right.lost, atol=_CLOSE)
        and int(restored.asked) == escapes
        and torch.equal(restored.coefficients.cpu(), again.coefficients)
    ):
        raise RuntimeError("they say other codes than torch")
