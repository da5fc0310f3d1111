"""A connector whose daemon evicts a chunk just when a step begins to load it, as real ones may."""

from __future__ import annotations

from kvtcd.client import Client
from kvtcd.integrations.vllm_connector import KvtcdConnector


class EvictingConnector(KvtcdConnector):
    """Deletes the second chunk of the first load there is."""

    evicted = False

    def start_load_kv(self, forward_context, **kwargs) -> None:
        loads = self._get_connector_metadata().step.loads
        if len(loads) > 1 and not self.evicted:
            with Client(self._options.socket) as client:
                (namespace,) = client.namespaces()
                self.evicted = client.delete(namespace.name, loads[1].key)
        super().start_load_kv(forward_context, **kwargs)
