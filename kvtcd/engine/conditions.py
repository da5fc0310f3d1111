"""What is wrong with tenants' disk environments, and who is refused for it."""

from __future__ import annotations

from collections import Counter

from kvtcd.core.errors import StoreFailed
from kvtcd.core.keys import TenantKeys
from kvtcd.core.messages import Fault
from kvtcd.engine.namespaces import Registry


class Conditions:
    """The faults of environments by their tenants' tags, which is all that is known of one that is not read.

    Args:
        master: the master key, from which the tag of a tenant's name follows.
        registry: of tenants, whose environments may fail while they are used.
    """

    def __init__(self, master: bytes, registry: Registry) -> None:
        self._master, self._registry = master, registry
        self._faults: dict[str, Fault] = {}

    def note(self, tag: str, fault: Fault) -> None:
        """Note what the start found wrong with an environment."""
        self._faults[tag] = fault

    def purged(self, tenant: str) -> None:
        """A purge has ended: what of this tenant was set aside as damaged went with it."""
        if self.has(tenant, "set-aside"):
            del self._faults[self._tag(tenant)]

    @property
    def all(self) -> Counter[Fault]:
        """What is wrong now, and with how many of them."""
        found, tenants = Counter(self._faults.values()), self._registry.tenants.values()
        found["out-of-use"] = sum(each.writer.environment.failed for each in tenants if each.writer)
        return +found

    @property
    def hopeless(self) -> bool:
        """Whether something lies on disk, and not one tenant that could be read is under the master key."""
        return not self._registry.tenants and bool({"other-key", "left-out"} & {*self._faults.values()})

    def tags(self, fault: Fault) -> list[str]:
        """Return the environments that have this fault."""
        return [tag for tag, each in self._faults.items() if each == fault]

    def has(self, tenant: str, fault: Fault) -> bool:
        """Tell whether the environment of a tenant has this fault."""
        return fault in self._faults.values() and self._faults.get(self._tag(tenant)) == fault

    def admit(self, tenant: str) -> None:
        """Refuse who would otherwise be told that nothing of his is here, while it lies on disk unread.

        Raises:
            StoreFailed: his environment could not be opened at the start.
        """
        if self.has(tenant, "left-out"):
            raise StoreFailed(
                "open", "what this tenant has could not be opened at the start; the daemon's log has more"
            )

    def _tag(self, tenant: str) -> str:
        return TenantKeys.derive(self._master, tenant).tag.hex()
