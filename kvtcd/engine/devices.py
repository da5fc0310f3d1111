"""The GPUs that a start has prepared, and what policies ask of others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence

from kvtcd.core.devices import DeviceName, GpuName
from kvtcd.core.messages import Fault
from kvtcd.core.policy import Policy

_log = logging.getLogger(__name__)


class Devices:
    """What has streams, budget or memory until the next start.

    Args:
        packing: names of GPUs that pack and unpack.
        holding: those that hold blocks.
    """

    def __init__(self, packing: Collection[DeviceName] = (), holding: Collection[GpuName] = ()) -> None:
        self._packing, self._holding = frozenset(packing), frozenset(holding)
        self._unmet = 0

    def review(self, policies: Sequence[Policy]) -> None:
        """Say what policies ask of others, and count it from now on."""
        unmet = self.unmet(policies)
        for why in unmet:
            _log.warning(why)
        self._unmet = len(unmet)

    def unmet(self, policies: Sequence[Policy]) -> list[str]:
        """Return what policies ask of others, and what becomes of it."""
        return [why for policy in policies for why in self._unmet_by(policy)]

    def _unmet_by(self, policy: Policy) -> list[str]:
        packs, holds = policy.codec.device, policy.promote.device
        unmet = []
        if packs not in {None, "cpu", *self._packing}:
            unmet.append(
                f"policy {policy.name} has blocks packed on {packs}, for which this start has prepared "
                "nothing: the CPU does it until a restart"
            )
        if holds not in {None, *self._holding}:
            unmet.append(
                f"policy {policy.name} has blocks lifted to {holds}, for which this start has allocated "
                "nothing ([gpu] capacity is for those that were named then): they stay on the host"
            )
        return unmet

    @property
    def faults(self) -> Counter[Fault]:
        """How many wishes of policies for a GPU are not met."""
        return +Counter[Fault]({"unknown-gpu": self._unmet})
