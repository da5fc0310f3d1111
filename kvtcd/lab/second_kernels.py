"""The codec's kernels on a second device made of the CPU: what they say, and what a GPU would be told.

They need Triton and a card; what they say is what torch says, so torch says it here. What a device would be
told is written down as `codec.kernels` launches it: a change there is one here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvtcd.codec.stages import stage
from kvtcd.codec.uniform import Arithmetic, InTorch, Quantised, Restored
from kvtcd.codec.widths import Widths
from kvtcd.lab.second_device import SecondDevice, here


class SecondKernels(Arithmetic):
    """Arithmetic of codes by kernels of a second device.

    Args:
        device: that is active.
    """

    def __init__(self, device: SecondDevice) -> None:
        self._launched: Callable[..., None] = device.launched
        self._computed = device.computed

    def quantise(self, coefficients: Tensor, steps: Tensor, order: Tensor, widths: Widths) -> Quantised:
        """Round and pack, in two kernels with a sum between them; see `Arithmetic`."""
        rows = _here(widths)
        capacity = len(rows.order) * coefficients.shape[1]

        def compute() -> tuple[Tensor, ...]:
            said = InTorch().quantise(here(coefficients), here(steps), here(order), rows)
            room = (0, capacity - said.escapes.shape[1])
            return said.codes, torch.nn.functional.pad(said.escapes, room), said.found, said.lost

        said = Quantised(*self._computed(compute))
        counts = torch.empty((rows.rank + 1, 2), dtype=torch.int64)
        given = (coefficients, steps, order, rows.every)
        with stage("quantise"):
            self._launched("zeros", written=[counts, said.escapes])
            self._launched("_pack", read=given, written=[said.codes, coefficients, counts])
            self._launched("sum", read=[coefficients], written=[said.lost])
        with stage("pack"):
            self._launched("cumsum", read=[counts], written=[counts])
            self._launched("_escape", read=[*given, counts])
        return said

    def restore(
        self, codes: Tensor, escapes: Tensor, steps: Tensor, order: Tensor, widths: Widths
    ) -> Restored:
        """Unpack and multiply, in two kernels with a sum between them; see `Arithmetic`."""
        rows = _here(widths)

        def compute() -> Restored:
            return InTorch().restore(here(codes), here(escapes), here(steps), here(order), rows)

        said = Restored(*self._computed(compute))
        counts = torch.empty(len(rows.order) + 1, dtype=torch.int64)
        with stage("unpack"):
            self._launched("zeros", written=[counts])
            self._launched("_count", read=[codes], written=[counts])
            self._launched("cumsum", read=[counts], written=[counts])
        with stage("dequantise"):
            given = (codes, escapes, counts, steps, order, rows.every)
            self._launched("_unpack", read=given, written=[said.coefficients])
        return said


def _here(widths: Widths) -> Widths:
    rows = {bits: here(each) for bits, each in widths.rows.items()}
    return replace(widths, rows=rows, every=here(widths.every), most=here(widths.most))
