"""Who makes room: the coldest are packed, moved down or dropped, as their policies say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvtcd.core.account import Account
from kvtcd.core.entry import Entry
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Place, Tier
from kvtcd.core.reason import Reason
from kvtcd.core.residency import Residents
from kvtcd.core.room import Room
from kvtcd.core.shelf import Shelf
from kvtcd.core.victims import victims


class Relief:
    """Makes room in the tiers, fastest first; what it moves goes one place down at a time.

    Args:
        residents: who is where.
        room: who waits for it.
        awaited: tells whether somebody waits for a block to be on disk.
    """

    def __init__(self, residents: Residents, room: Room, awaited: Callable[[RecordKey], bool]) -> None:
        self._residents, self._room, self._awaited = residents, room, awaited
        self._host = residents.shelves[Tier.HOST]

    def share_out(self) -> None:
        """Start whatever finds room, and make room for what does not."""
        residents, room = self._residents, self._room
        for gpu, need in room.start_lifts().items():
            for entry in victims(residents, gpu, Place.GPU, gpu.whole, gpu.whole.shortfall(need)):
                residents.drop(entry, Place.GPU)
        wanted: dict[Account, int] = {}
        room.start_promotions(wanted)
        urgent = room.grant_puts(wanted)
        below: dict[Account, int] = {}
        for account in self._host.bounds():
            self._relieve_host(account, wanted.get(account, 0), below)
        room.start_demotions(below)
        if room.descending >= room.descents:  # the packer is behind
            for account, need in urgent.items():
                self._press(account, need, below)
        room.start_refills()
        if disk := residents.shelves.get(Tier.DISK):
            for account in disk.bounds():
                self._relieve_disk(disk, account, below.get(account, 0))

    def _relieve_disk(self, disk: Shelf, account: Account, need: int) -> None:
        residents = self._residents
        excess = account.excess(need)
        account.easing = excess > 0
        leased = partial(residents.irreplaceable, place=Place.DISK)
        for entry in victims(residents, disk, Place.DISK, account, excess, spared=leased):
            residents.lose(entry, Place.DISK, Reason.NO_TIER)

    def _relieve_host(self, account: Account, need: int, below: dict[Account, int]) -> None:
        if not account.easing and not account.full(need):
            return
        # Moving down ahead of need costs little; losing ahead of need would cost hits.
        ahead = self._has_a_way_down(account)
        excess = account.excess(need) if ahead else account.shortfall(need)
        account.easing = ahead and excess > 0
        for place in (Place.HOST, Place.PACKED):
            stay = self._stay_raw(account) if excess and place is Place.HOST else frozenset[int]()
            for entry in victims(
                self._residents, self._host, place, account, excess, spared=self._stuck, without=stay
            ):
                if not self._relieve(entry, place, account, need, below):
                    if account.leaving or account.dropping:
                        return
                    need += self._headroom(entry, place, account)
                    break
                excess -= entry.raw_bytes
        if account.shortfall(need) and not account.leaving and not account.dropping:
            short = account.shortfall(need)
            for entry in victims(
                self._residents, self._host, Place.HOST, account, short, spared=self._stuck, packing=False
            ):
                if not entry.kept(without=(Place.HOST,)) and self._goes_to_disk(entry):
                    if self._room.descending < self._room.descents:
                        self._room.descend(entry, Place.HOST, Place.DISK, below, leaving=True)
                    return
                self._residents.lose(entry, Place.HOST, Reason.NO_TIER)

    def _headroom(self, entry: Entry, place: Place, account: Account) -> int:
        """Return what others must free so that a block without a disk can be packed above the high mark."""
        room = self._room
        if place is not Place.HOST or room.descending >= room.descents:
            return 0
        bound = room.packed_need(entry, Place.PACKED)
        packs = self._packs(entry) and not self._goes_to_disk(entry)
        return bound if packs and bound <= account.capacity - account.high else 0

    def _has_a_way_down(self, account: Account) -> bool:
        residents = self._residents
        return any(
            residents.on_disk(namespace) or residents.rules[namespace].policy.host.form != "raw"
            for namespace in account.namespaces
        )

    def _stay_raw(self, account: Account) -> frozenset[int]:
        """Return the namespaces whose raw copies stay, because they have packed ones that are to go first."""
        parts, stay = self._host.parts, set()
        for namespace in account.namespaces:
            raw, packed = parts[Place.HOST][namespace].nbytes, parts[Place.PACKED][namespace].nbytes
            share = self._residents.rules[namespace].policy.host.raw
            if packed and raw <= share * (raw + packed):
                stay.add(namespace)
        return frozenset(stay)

    def _stuck(self, entry: Entry) -> bool:
        """Tell whether a leased block in memory has nowhere to go."""
        leased = entry.key in self._residents.leases
        return leased and not entry.ready(Place.DISK) and not self._goes_to_disk(entry)

    def _goes_to_disk(self, entry: Entry) -> bool:
        residents = self._residents
        able = residents.on_disk(entry.namespace) and entry.key not in residents.failed
        return able and self._room.fits_ever(entry, Place.DISK) and self._room.welcome(entry)

    def _packs(self, entry: Entry) -> bool:
        """Tell whether a raw block is to be packed on the host."""
        rules = self._residents.rules[entry.namespace]
        able = rules.policy.host.form == "raw-then-packed" and entry.key not in self._residents.failed
        return able and self._room.fits_ever(entry, Place.PACKED)

    def _relieve(
        self, entry: Entry, place: Place, account: Account, need: int, below: dict[Account, int]
    ) -> bool:
        """Let one copy make room; return False when others must end their moves first."""
        residents, room = self._residents, self._room
        if entry.kept(without=(place,)):
            if place is Place.HOST and not entry.packed and self._packs(entry):
                room.refill_later(entry.key)
            residents.drop(entry, place)
            return True
        packs = place is Place.HOST and self._packs(entry)
        if not packs and not self._goes_to_disk(entry):
            if account.shortfall(need):
                residents.lose(entry, place, Reason.NO_TIER)
            return True
        if room.descending >= room.descents:
            return False
        if packs:
            if room.descend(entry, place, Place.PACKED, dict[Account, int](), leaving=True):
                return True
            if any(a.leaving or a.dropping for a in self._host.accounts(entry.namespace)):
                return False  # there will be room to pack it
            if not self._goes_to_disk(entry):
                return False
        return room.descend(entry, place, Place.DISK, below, leaving=True)

    def _press(self, account: Account, need: int, below: dict[Account, int]) -> None:
        """Find room for newcomers, who do not wait for the packer, as the policy of the coldest says."""
        residents, room = self._residents, self._room

        def spared(entry: Entry) -> bool:
            return self._awaited(entry.key) or residents.irreplaceable(entry, Place.HOST)

        shortage = account.shortage(need)
        for entry in victims(
            residents, self._host, Place.HOST, account, shortage, spared=spared, packing=False
        ):
            if entry.kept(without=(Place.HOST,)):
                residents.drop(entry, Place.HOST)
            elif residents.rules[entry.namespace].policy.packer_behind == "drop":
                residents.lose(entry, Place.HOST, Reason.PRESSURE)
            elif account.shortfall(need):
                hurried = room.descending < 2 * room.descents and self._goes_to_disk(entry)
                if not hurried or not room.descend(
                    entry, Place.HOST, Place.DISK, below, leaving=True, lossless=True
                ):
                    residents.lose(entry, Place.HOST, Reason.PRESSURE)
