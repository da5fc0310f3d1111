"""What was wrong with tenants' disk environments at the start, and who is refused for it."""

from __future__ import annotations

from collections.abc import Iterable

from kvtcd.core.errors import StoreFailed
from kvtcd.core.keys import TenantKeys
from kvtcd.core.messages import Fault


class Conditions:
    """The faults of environments by their tenants' tags, which is all that is known of one that is not read.

    Args:
        master: the master key, from which the tag of a tenant's name follows.
    """

    def __init__(self, master: bytes) -> None:
        self._master = master
        self._faults: dict[str, Fault] = {}

    def note(self, tag: str, fault: Fault) -> None:
        """Note what is wrong with an environment."""
        self._faults[tag] = fault

    def purged(self, tag: str) -> None:
        """A purge has ended: what was set aside as damaged went with it."""
        if self._faults.get(tag) == "set-aside":
            del self._faults[tag]

    def all(self) -> Iterable[Fault]:
        """Return them, one for each environment."""
        return self._faults.values()

    def admit(self, tenant: str) -> None:
        """Refuse who would otherwise be told that nothing of his is here, while it lies on disk unread.

        Raises:
            StoreFailed: his environment could not be opened at the start.
        """
        if "left-out" not in self._faults.values():
            return
        if self._faults.get(TenantKeys.derive(self._master, tenant).tag.hex()) == "left-out":
            raise StoreFailed(
                "open", "what this tenant has could not be opened at the start; the daemon's log has more"
            )
