"""What outlives a daemon that shares a store: generations that it knows, and what is still to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtcd.core.errors import BadField, Corrupt
from kvtcd.core.fields import json_object
from kvtcd.core.layout import canonical_json
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


@dataclass(slots=True)
class Ledger:
    """All of it.

    Attributes:
        deletes: names of records that are to go from the store.
    """

    namespaces: dict[tuple[str, bytes], Known] = field(default_factory=dict)
    deletes: set[str] = field(default_factory=set)

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
        return len(self.purges()) + len(self.deletes)

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
        return canonical_json({"namespaces": rows, "deletes": sorted(self.deletes)})

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
