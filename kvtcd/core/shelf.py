"""One tier, or one GPU: its bytes, in all and of each tenant and namespace, and who goes first in it."""

from __future__ import annotations

from dataclasses import dataclass

from kvtcd.core.account import Account
from kvtcd.core.devices import GpuName
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.policy import Amount, DiskTier, Evict, HostTier, Policy, Share
from kvtcd.core.replacement import Block, Replacement, Seat, replacement
from kvtcd.core.sightings import Sightings


class Part:
    """The READY copies of one namespace in one place.

    Args:
        evict: what its policy says.
        capacity: bytes of the namespace in this tier.
        sightings: the catalog's; its clock is the one that copies are stamped with.

    Attributes:
        leaves_first: no block goes before those that continue it.
        blocks: copies.
        nbytes: bytes of them.
        held: those that came to their turn while others continue them.
    """

    def __init__(self, evict: Evict, capacity: int, sightings: Sightings) -> None:
        self._sightings = sightings
        self._made_of = evict, capacity
        self.leaves_first = evict.leaves_first
        self.order: Replacement = replacement(evict, capacity, sightings)
        self.blocks = self.nbytes = 0
        self.held: dict[RecordKey, Seat] = {}

    def reorder(self, evict: Evict, capacity: int) -> None:
        """Follow another policy from now on; the coldest stay so.

        If it differs, that takes 2 to 7 microseconds per copy: some seconds for 1,000,000.
        """
        if self._made_of == (evict, capacity):
            return
        seats = [*self.held.values(), *self.order.coldest()]  # those that are held came to their turn first
        for seat in seats:
            self.order.discard(seat)
        self.held.clear()
        self._made_of, self.leaves_first = (evict, capacity), evict.leaves_first
        self.order = replacement(evict, capacity, self._sightings)
        for seat in seats:
            self.order.insert(seat)

    def insert(self, seat: Seat) -> None:
        """Take in a copy."""
        seat.used = self._sightings.now
        self.order.insert(seat)
        self.blocks += 1
        self.nbytes += seat.nbytes

    def discard(self, seat: Seat) -> None:
        """Forget a copy."""
        self.order.discard(seat)
        self.held.pop(seat.block.key, None)
        self.blocks -= 1
        self.nbytes -= seat.nbytes

    def use(self, seat: Seat) -> None:
        """Count a use of a copy."""
        seat.used = self._sightings.now
        self.held.pop(seat.block.key, None)
        self.order.use(seat)

    def renew(self, seat: Seat) -> None:
        """Make a copy the youngest of its like."""
        seat.used = self._sightings.now
        self.held.pop(seat.block.key, None)
        self.order.renew(seat)

    def hold(self, seat: Seat) -> None:
        """Pass a copy over until nothing continues it."""
        self.order.hold(seat)
        self.held[seat.block.key] = seat

    def release(self, key: RecordKey) -> None:
        """Nothing continues this copy any more."""
        self.order.release(self.held.pop(key))


@dataclass(frozen=True, slots=True)
class Marks:
    """Shares of a capacity: above `high` copies are moved out ahead of need, down to `low`."""

    high: float = 1.0
    low: float = 1.0


class Shelf:
    """One tier; of the GPU tier, one device.

    Args:
        tier: which.
        capacity: bytes.
        marks: of the whole tier, and of each tenant's share.
        sightings: the catalog's.
        granule: bytes that room is given out in.
        tenant_share: what one tenant may have of it.
        device: the GPU, if it is one.

    Attributes:
        whole: the account of all copies.
        parts: by place and namespace.
    """

    def __init__(
        self,
        tier: Tier,
        capacity: int,
        marks: Marks,
        sightings: Sightings,
        *,
        granule: int = 1,
        tenant_share: Amount = 1.0,
        device: GpuName | None = None,
    ) -> None:
        self.tier, self.granule, self.device = tier, granule, device
        self.whole = Account(capacity, marks.high, marks.low)
        self.parts: dict[Place, dict[int, Part]] = {place: {} for place in Place if place.tier is tier}
        self._sightings, self._marks = sightings, marks
        self._tenant_share = tenant_share
        self._tenants: dict[str, Account] = {}
        self._namespaces: dict[int, Account] = {}
        self._booked: dict[int, tuple[Account, ...]] = {}

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self.whole.capacity

    def govern(self, namespace: int, tenant: str, share: Amount, marks: Marks, evict: Evict) -> None:
        """Let a namespace have copies here, or change what holds for them.

        Args:
            namespace: its number.
            tenant: whose it is.
            share: what it may have.
            marks: of that.
            evict: in which order its copies go.
        """
        if namespace not in self._booked:
            size = self._size(self._tenant_share)
            tenants = self._tenants.setdefault(tenant, Account(size, self._marks.high, self._marks.low))
            own = self._namespaces[namespace] = Account(0, 1.0, 1.0)
            self._booked[namespace] = accounts = (own, tenants, self.whole)
            for account in accounts:
                account.namespaces.add(namespace)
        capacity = self._size(share)
        self._namespaces[namespace].limit(capacity, marks.high, marks.low)
        for parts in self.parts.values():
            if namespace in parts:
                parts[namespace].reorder(evict, capacity)
            else:
                parts[namespace] = Part(evict, capacity, self._sightings)

    def ungovern(self, namespace: int) -> None:
        """Forget a namespace that has no copies."""
        for account in self._booked.pop(namespace, ()):
            account.namespaces.discard(namespace)
        self._namespaces.pop(namespace, None)
        self._tenants = {name: account for name, account in self._tenants.items() if account.namespaces}
        for parts in self.parts.values():
            parts.pop(namespace, None)

    def remark(self, marks: Marks) -> None:
        """Set the marks of the whole tier and of each tenant's share."""
        self._marks = marks
        for account in (self.whole, *self._tenants.values()):
            account.limit(account.meant, marks.high, marks.low)

    def _size(self, share: Amount) -> int:
        capacity = self.whole.capacity
        return min(capacity, int(share * capacity) if isinstance(share, float) else share)

    def footprint(self, nbytes: int) -> int:
        """Return the bytes a copy of `nbytes` takes here."""
        return -(-nbytes // self.granule) * self.granule

    def accounts(self, namespace: int) -> tuple[Account, ...]:
        """Return the accounts that its copies are booked on: its own, its tenant's, the whole tier's."""
        return self._booked[namespace]

    def run_short(self, namespace: int, need: int, now: int) -> bool:
        """Keep less of its tenant, whose device is full; tell whether that makes room for `need` bytes."""
        account = self._booked[namespace][1]
        parts = (parts[n] for parts in self.parts.values() for n in account.namespaces)
        return account.run_short(sum(part.nbytes for part in parts), need, now)

    def try_more(self, now: int) -> None:
        """After a while, see whether devices that were full hold more."""
        for account in self._tenants.values():
            account.try_more(now)

    @property
    def withheld(self) -> int:
        """Bytes that tenants were meant to have, and full devices do not hold."""
        return sum(account.meant - account.capacity for account in self._tenants.values())

    def _bounds(self, account: Account) -> bool:
        return account is self.whole or account.capacity < self.whole.capacity

    def bounds(self) -> list[Account]:
        """Return every account that bounds something, the narrow ones first."""
        accounts = (*self._namespaces.values(), *self._tenants.values(), self.whole)
        return [account for account in accounts if self._bounds(account)]

    def room(self, namespace: int) -> int:
        """Return the largest copy that a namespace may ever have here, in bytes."""
        return min(account.capacity for account in self._booked[namespace])

    def tight(self, namespace: int, nbytes: int) -> Account | None:
        """Return the narrowest bound that so many bytes more do not fit now, None if there is none."""
        accounts = self._booked[namespace]
        return next((a for a in accounts if not a.fits(nbytes) and self._bounds(a)), None)

    def book(self, namespace: int, nbytes: int) -> None:
        """Count bytes as used; negative ones as free again."""
        for account in self._booked[namespace]:
            account.used += nbytes

    def leave(self, namespace: int, nbytes: int) -> None:
        """Count bytes as leaving once they have been moved; negative ones no more."""
        for account in self._booked[namespace]:
            account.leaving += nbytes

    def drop(self, namespace: int, nbytes: int) -> None:
        """Count bytes as being dropped; negative ones no more."""
        for account in self._booked[namespace]:
            account.dropping += nbytes

    def admits(self, namespace: int, block: Block, place: Place) -> bool:
        """Tell whether a newcomer, for whom another copy in `place` must go, is worth it."""
        return self.parts[place][namespace].order.admits(block)


def _marks(tier: HostTier | DiskTier) -> Marks:
    return Marks(tier.high, tier.low)


def marks(policy: Policy, tier: Tier) -> Marks:
    """Return what a policy says of host or disk."""
    return _marks(policy.disk if tier is Tier.DISK else policy.host)


def shelves(
    policy: Policy,
    sightings: Sightings,
    *,
    host: int,
    disk: int = 0,
    granule: int = 1,
    tenants: Share = Share(),  # noqa: B008 - a frozen value
) -> dict[Tier, Shelf]:
    """Return the host tier, and that of the disk if there is one.

    Args:
        policy: the one that matches all: its marks are those of the whole tiers.
        sightings: the catalog's.
        host: bytes of the host tier.
        disk: bytes of the disk tier; 0: there is none.
        granule: bytes that memory is given out in.
        tenants: what one tenant may have.
    """
    sizes = {Tier.HOST: (host, granule, tenants.host), Tier.DISK: (disk, 1, tenants.disk)}
    return {
        tier: Shelf(tier, capacity, marks(policy, tier), sightings, granule=unit, tenant_share=share)
        for tier, (capacity, unit, share) in sizes.items()
        if capacity or tier is Tier.HOST
    }
