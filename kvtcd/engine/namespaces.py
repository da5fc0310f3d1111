"""The namespaces of all tenants: names, identities, and the tenants' disk environments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtcd.core.errors import BadField, Corrupt, IdentityConflict, UnknownNamespace
from kvtcd.core.identity import Identity, differing, is_trial
from kvtcd.core.keys import RecordKey, TenantKeys
from kvtcd.core.layout import canonical_json
from kvtcd.core.policy import Policy
from kvtcd.engine.ports import Codec
from kvtcd.engine.writer import Writer

TENANT_NAME = "@tenant"
"""Under this name an environment keeps its tenant's name; no namespace may begin with ``@``."""


@dataclass(slots=True)
class Tenant:
    """One tenant: keys, disk environment (None without a disk tier), namespaces by name.

    What is packed from now on is encrypted if it `encrypts`; what was is read either way. A `guest` has done
    nothing yet but try whether the daemon works.
    """

    keys: TenantKeys
    writer: Writer | None
    encrypts: bool = False
    guest: bool = False
    namespaces: dict[str, Namespace] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Namespace:
    """One registered identity of one tenant. Only `policy`, the codecs and `drifting` ever change.

    `number` stands for (tenant, digest) in the catalog. `generation` is written into every envelope, so that
    records of a purged namespace are never taken for those of its successor. `lossless` packs in a hurry.
    `drifting`: it was told that blocks are unlike the calibration of its profile.
    """

    name: str
    tenant: str
    identity: Identity
    digest: bytes
    number: int
    generation: int
    policy: Policy
    codec: Codec
    lossless: Codec
    drifting: bool = False

    @property
    def trial(self) -> bool:
        """Whether it is there to try the daemon; see `is_trial`."""
        return is_trial(self.name)

    @property
    def named(self) -> dict[str, str]:
        """Whose it is, and which, as fields of what is logged."""
        return {"tenant": self.tenant, "namespace": self.name}


class Registry:
    """Tenants by name, namespaces by number."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._by_number: dict[int, Namespace] = {}
        self._numbers = 0
        self.closing: set[int] = set()
        """Namespaces that are being purged: nothing new enters them."""

    def find(self, tenant: str, name: str) -> Namespace:
        """Return a namespace.

        Raises:
            UnknownNamespace: this tenant has none of that name.
        """
        known = self.tenants.get(tenant)
        namespace = known.namespaces.get(name) if known else None
        if namespace is None or namespace.number in self.closing:
            raise UnknownNamespace(name)
        return namespace

    def admits(self, namespace: Namespace) -> bool:
        """Tell whether blocks may still enter a namespace that was found earlier."""
        return namespace.number in self._by_number and namespace.number not in self.closing

    def record_keys(self, namespace: Namespace, salt: bytes) -> Callable[[bytes], RecordKey]:
        """Return what makes, of its key, the key under which a block is known here.

        Raises:
            BadRequest: the salt is over 255 bytes.
        """
        return self.tenants[namespace.tenant].keys.record_keys(namespace.digest, salt)

    def numbered(self, number: int) -> Namespace | None:
        """Return the namespace that the catalog knows by this number, None once it is purged."""
        return self._by_number.get(number)

    def held(self, tenant: str, name: str, identity: Identity) -> Namespace | None:
        """Return the namespace if it is registered with this very identity, None if the name is free.

        Raises:
            IdentityConflict: the name, or the identity, is taken by another.
        """
        for namespace in self.tenants[tenant].namespaces.values():
            if namespace.name == name and namespace.identity == identity:
                return namespace
            if namespace.name == name:
                raise IdentityConflict(name, differs=differing(namespace.identity, identity))
            if namespace.identity == identity:
                raise IdentityConflict(name, registered_as=namespace.name)
        return None

    def add(
        self, tenant: str, name: str, identity: Identity, *,
        generation: int, policy: Policy, codec: Codec, lossless: Codec,
    ) -> Namespace:  # fmt: skip
        """Register a namespace under a fresh number."""
        self._numbers += 1
        namespace = Namespace(
            name, tenant, identity, identity.digest, self._numbers, generation, policy, codec, lossless
        )
        self.tenants[tenant].namespaces[name] = namespace
        self._by_number[self._numbers] = namespace
        return namespace

    def remove(self, namespace: Namespace) -> None:
        """Forget a namespace."""
        del self.tenants[namespace.tenant].namespaces[namespace.name]
        del self._by_number[namespace.number]

    def all(self) -> list[Namespace]:
        """Return every namespace."""
        return list(self._by_number.values())


def persisted(identity: Identity, generation: int) -> bytes:
    """Return the value an environment keeps under a namespace's name."""
    return canonical_json({"generation": generation, "identity": identity.to_json()})


def restored(name: str, value: bytes) -> tuple[Identity, int]:
    """Read what `persisted` wrote.

    Raises:
        Corrupt: it is not that.
    """
    try:
        body = json.loads(value)
        generation = body["generation"]
        if not isinstance(generation, int):
            raise BadField("namespace", f"{name}: generation is not an integer")
        return Identity.from_json(body["identity"]), generation
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt("namespace", f"{name}: {error}") from None
