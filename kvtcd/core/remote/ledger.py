"""What outlives a daemon that shares a store: generations that it knows, and what is still to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtcd.core.errors import BadField, Corrupt
from kvtcd.core.fields import json_object
from kvtcd.core.keys import TenantKeys
from kvtcd.core.layout import canonical_json
from kvtcd.core.remote import names
from kvtcd.core.remote.names import FIRST


@dataclass(slots=True)
class Known:
    """A namespace of a tenant.

    Attributes:
        generation: the one that is valid, as far as this daemon knows.
        purging: the store has not heard of it yet, or may still hold something older.
        heard: the store has heard of it since this process started.
    """

    tenant: str
    namespace: bytes
    generation: int = FIRST
    purging: bool = False
    heard: bool = False


@dataclass(frozen=True, slots=True)
class Purge:
    """What a store is told of a namespace that was purged, without the keys that say so.

    Attributes:
        prefix: what names of the namespace begin with.
        generation: the one that is valid.
        stated: the object that says so.
    """

    prefix: str
    generation: int
    stated: bytes

    @classmethod
    def of(cls, keys: TenantKeys, namespace: bytes, generation: int) -> Purge:
        """Return what a tenant's keys say."""
        stated = names.state_generation(keys, namespace, generation)
        return cls(names.prefix(keys, namespace), generation, stated)

    @property
    def name(self) -> str:
        """The name of the object."""
        return self.prefix + names.GENERATION

    def dooms(self, name: str) -> bool:
        """Tell whether something of the namespace is to go."""
        return name != self.name and not name.startswith(f"{self.prefix}{self.generation}/")


@dataclass(slots=True)
class Ledger:
    """All of it.

    Attributes:
        deletes: names of records that are to go from the store.
        former: purges under the names of a master key that holds no more.
    """

    namespaces: dict[tuple[str, bytes], Known] = field(default_factory=dict)
    deletes: set[str] = field(default_factory=set)
    former: list[Purge] = field(default_factory=list)

    def of(self, tenant: str, namespace: bytes) -> Known:
        """Return what is known of a namespace."""
        known = self.namespaces.get((tenant, namespace))
        if known is None:
            known = self.namespaces[tenant, namespace] = Known(tenant, namespace)
        return known

    def purges(self) -> list[Known]:
        """Return the namespaces that the store still has to purge."""
        return [known for known in self.namespaces.values() if known.purging]

    @property
    def pending(self) -> int:
        """How much the store still has to do."""
        return len(self.purges()) + len(self.deletes) + len(self.former)

    def rekeyed(self, derive: Callable[[str], TenantKeys]) -> None:
        """Have purges go on under the names that a master key gives which will hold no more.

        Should it hold after all, they are the same purges.

        Args:
            derive: returns a tenant's keys under it.
        """
        for known in self.purges():
            self.former.append(Purge.of(derive(known.tenant), known.namespace, known.generation))
            known.purging = False

    def to_bytes(self) -> bytes:
        """Write it."""
        rows = [
            {
                "tenant": known.tenant, "namespace": known.namespace.hex(), "generation": known.generation,
                "purging": int(known.purging),
            }
            for known in self.namespaces.values()
            if known.generation != FIRST or known.purging
        ]  # fmt: skip
        former = [
            {"prefix": one.prefix, "generation": one.generation, "stated": one.stated.hex()}
            for one in self.former
        ]
        body = {"namespaces": rows, "deletes": sorted(self.deletes)} | ({"former": former} if former else {})
        return canonical_json(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """Read what `to_bytes` wrote.

        Raises:
            Corrupt: it is not that.
        """
        ledger = cls()
        try:
            body = json_object(data)
            for row in body["namespaces"]:
                known = ledger.of(_text(row["tenant"]), bytes.fromhex(row["namespace"]))
                known.generation, known.purging = _number(row["generation"]), bool(_number(row["purging"]))
            ledger.deletes = {_text(name) for name in body["deletes"]}
            ledger.former = [
                Purge(_text(row["prefix"]), _number(row["generation"]), bytes.fromhex(row["stated"]))
                for row in body.get("former", [])
            ]
        except BadField as fault:
            raise Corrupt("remote ledger", fault.why) from None
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt("remote ledger", str(error)) from None
        return ledger


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadField("remote ledger", f"{value!r} is no text")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise BadField("remote ledger", f"{value!r} is no number")
    return value


Save = Callable[[bytes], None]
"""Makes a ledger durable. Blocking."""
