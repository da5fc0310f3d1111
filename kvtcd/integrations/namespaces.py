"""The name under which an identity is registered."""

from __future__ import annotations

import re

from kvtcd.client import Client
from kvtcd.core.errors import IdentityConflict
from kvtcd.core.identity import Identity


def register(client: Client, identity: Identity, *, deadline: float | None = None) -> str:
    """Register an identity; return its name, made of model and digest unless it has another already.

    Raises:
        IdentityConflict: the name is taken by another identity.
    """
    model = re.sub(r"[^a-z0-9._-]+", "-", identity.model.lower()).strip("-._") or "model"
    name = f"{model[:40]}-{identity.digest.hex()[:16]}"
    try:
        return client.register(name, identity, deadline=deadline).name
    except IdentityConflict as conflict:
        if conflict.registered_as is None:
            raise
        return conflict.registered_as
