"""When the remote tier is asked on behalf of blocks: for what is not here, and about what is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtcd.core.catalog import Catalog
from kvtcd.core.keys import EngineKey, RecordKey
from kvtcd.core.place import Place
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.remote.tier import RemoteTier


class Sharing:
    """Knows what is here, and hands on what concerns the remote tier. All methods belong to the loop.

    Args:
        catalog: only asked.
        remote: the remote tier, if there is one.

    Attributes:
        unshared: told of blocks that the remote tier had and that were deleted, with their salt.
    """

    def __init__(self, catalog: Catalog, remote: RemoteTier | None) -> None:
        self._catalog, self._remote = catalog, remote
        self.unshared: Callable[[Namespace, Sequence[EngineKey], bytes], None] = lambda *_: None

    async def fetched(self, namespace: Namespace, record_key: RecordKey, deadline: float) -> bool:
        """Bring a block from the remote tier that is not here; tell whether it came from there."""
        if self._remote is None or self._catalog.places(record_key):
            return False
        return await self._remote.bring(namespace, record_key, deadline)

    def there(
        self, namespace: Namespace, keys: Sequence[EngineKey], record_keys: Sequence[RecordKey]
    ) -> dict[EngineKey, RecordKey]:
        """Return those of some blocks that the remote tier is known to have."""
        if self._remote is None:
            return {}
        pairs = zip(keys, record_keys, strict=True)
        return {key: name for key, name in pairs if self._remote.has(namespace, name)}

    def needed(self, namespace: Namespace, record_key: RecordKey) -> None:
        """Have the remote tier look after a block that was used and lies on disk."""
        if self._remote and Place.DISK in self._catalog.places(record_key):
            self._remote.needed(namespace, record_key)
