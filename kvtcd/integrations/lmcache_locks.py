"""LMCache's locks on what a lookup found, as leases of the daemon."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    keys: set[Hashable]
    until: float


class Locks:
    """Leases by what they hold. The daemon ends each by itself in the end, so none can leak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: OrderedDict[str, _Held] = OrderedDict()

    def taken(self, lease: str, keys: Sequence[Hashable], until: float) -> None:
        """Note a lease, and when the daemon will end it."""
        with self._lock:
            self._leases[lease] = _Held(set(keys), until)

    def released(self, keys: Sequence[Hashable], now: float) -> list[str]:
        """Note keys that need no lease any more; return the leases that can be given back."""
        over = []
        with self._lock:
            for lease in [name for name, held in self._leases.items() if held.until <= now]:
                del self._leases[lease]
            for key in keys:
                for lease, held in self._leases.items():
                    if key in held.keys:
                        held.keys.discard(key)
                        if not held.keys:
                            over.append(lease)
                            del self._leases[lease]
                        break
        return over

    def __len__(self) -> int:
        """Leases that are held."""
        return len(self._leases)
