"""What blocks of a namespace are packed with: chosen when it comes, and anew when policies or profiles do."""

from __future__ import annotations

import logging

from kvtcd.core.identity import Identity
from kvtcd.core.policy import CodecChoice, Policy
from kvtcd.engine.lanes import Lane
from kvtcd.engine.metrics import Metrics
from kvtcd.engine.namespaces import Namespace
from kvtcd.engine.ports import Codec, CodecFactory

_log = logging.getLogger(__name__)


class Chooser:
    """Chooses codecs, on a thread that may read profiles.

    Args:
        codecs: chooses profile and codec.
        lane: the thread.
        metrics: told of namespaces whose profile is missing.
    """

    def __init__(self, codecs: CodecFactory, lane: Lane, metrics: Metrics) -> None:
        self._codecs, self._lane, self._metrics = codecs, lane, metrics

    async def first(self, tenant: str, name: str, identity: Identity, policy: Policy) -> Codec:
        """Return the codec that a policy gives a namespace; if it is not as that asks, say and count it."""
        codec = await self._lane.run(self._codecs, identity, policy.codec)
        if codec.reason:
            self._metrics.unprofiled.inc()
            _log.warning(
                "namespace %s of tenant %s is packed with %s: %s",
                name,
                tenant,
                codec.name,
                codec.reason,
                extra={"tenant": tenant, "namespace": name},
            )
        return codec

    async def lossless(self, identity: Identity, policy: Policy) -> Codec:
        """Return what packs in a hurry."""
        choice = CodecChoice("lossless", device=policy.codec.device)
        return await self._lane.run(self._codecs, identity, choice)

    async def hurried(self, namespace: Namespace, policy: Policy) -> Codec:
        """Return what packs a namespace in a hurry under a policy; its own, if that works where it is to."""
        if policy.codec.device == namespace.policy.codec.device:
            return namespace.lossless
        return await self.lossless(namespace.identity, policy)

    async def renewed(self, namespace: Namespace, policy: Policy) -> Codec:
        """Return the codec that a policy gives a namespace with the profiles of now; its own, if the same."""
        if policy.codec != namespace.policy.codec:
            return await self.first(namespace.tenant, namespace.name, namespace.identity, policy)
        held = namespace.codec
        codec = await self._lane.run(self._codecs, namespace.identity, policy.codec)
        if (codec.profile, codec.reason) == (held.profile, held.reason):
            return held
        _log.info(
            "namespace %s of tenant %s is packed with %s from now on, profile %s: %s",
            namespace.name, namespace.tenant, codec.name, codec.profile, codec.reason or "as its policy asks",
            extra=namespace.named,
        )  # fmt: skip
        return codec
