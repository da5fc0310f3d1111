"""The GPUs that hold blocks: sums of each, the home of each namespace, and where each copy lies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvtcd.core.devices import GpuName
from kvtcd.core.events import Govern
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Tier
from kvtcd.core.shelf import Marks, Shelf
from kvtcd.core.sightings import Sightings


class Gpus:
    """The GPU tier.

    A namespace has one home, and blocks are lifted there and nowhere else. When its home changes, copies on
    another GPU are strangers: they go as soon as no move needs them.

    Args:
        shelves: by device; the home of namespaces whose policy names no device is the first one.

    Attributes:
        shelves: as given. All know every namespace, since any may have strangers there.
    """

    def __init__(self, shelves: Mapping[GpuName, Shelf] = MappingProxyType({})) -> None:
        self.shelves = dict(shelves)
        self._homes: dict[int, Shelf | None] = {}
        self._lying: dict[RecordKey, Shelf] = {}

    @classmethod
    def of(cls, capacities: Mapping[GpuName, int], sightings: Sightings, *, granule: int = 1) -> Gpus:
        """Return GPUs of so many bytes each; those of none hold no blocks.

        Args:
            capacities: by device, the first one as for `Gpus`.
            sightings: the catalog's.
            granule: bytes that memory is given out in.
        """
        # Filled to the brim: dropping a copy costs nothing.
        return cls(
            {
                device: Shelf(Tier.GPU, capacity, Marks(), sightings, granule=granule, device=device)
                for device, capacity in capacities.items()
                if capacity
            }
        )

    def govern(self, rules: Govern) -> bool:
        """Let a namespace have copies, or change what holds for them; tell whether its home has changed."""
        for shelf in self.shelves.values():
            shelf.govern(rules.namespace, rules.tenant, 1.0, Marks(), rules.policy.evict)
        named = rules.policy.promote.device
        home = self.shelves.get(named) if named else next(iter(self.shelves.values()), None)
        before = self._homes.get(rules.namespace)
        self._homes[rules.namespace] = home
        return home is not before

    def ungovern(self, namespace: int) -> None:
        """Forget a namespace that has no copies."""
        self._homes.pop(namespace, None)
        for shelf in self.shelves.values():
            shelf.ungovern(namespace)

    def home(self, namespace: int) -> Shelf | None:
        """Return where blocks of a namespace are lifted to; None: nowhere."""
        return self._homes.get(namespace)

    def where(self, key: RecordKey) -> Shelf:
        """Return where the copy of a block lies."""
        return self._lying[key]

    def enter(self, key: RecordKey, namespace: int) -> None:
        """Note that a block gets a copy at home."""
        home = self._homes[namespace]
        assert home is not None, "who has no home is not lifted"
        self._lying[key] = home

    def leave(self, key: RecordKey) -> None:
        """Note that the copy of a block is gone."""
        del self._lying[key]

    def at_home(self, key: RecordKey, namespace: int) -> bool:
        """Tell whether a block has a copy, and that is no stranger."""
        lies = self._lying.get(key)
        return lies is not None and lies is self._homes[namespace]

    def lifted(self) -> tuple[RecordKey, ...]:
        """Return the blocks that have copies, strangers included."""
        return tuple(self._lying)
