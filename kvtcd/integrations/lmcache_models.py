"""The models behind an LMCache server's objects: what the adapter's JSON says, and what their files do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version
from typing import Any

from kvtcd.core.errors import BadRequest, KvtcdError
from kvtcd.integrations.lmcache_identity import Facts
from kvtcd.integrations.model_files import FileWatch, Settings, settings_digest
from kvtcd.integrations.options import read


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The adapter's JSON.

    Attributes:
        socket: the daemon's address; default ``$KVTCD_SOCKET``, else ``/run/kvtcd/kvtcd.sock``.
        models: folder of each model's weight files, where the engine was given it by another name.
        variant: names what else changes the cache, see `Settings`; the engine's release too, where the
            engine is not installed beside LMCache.
        full_digest: read every byte of the weights.
        salt: parts these objects from others of the same user.
        lookup_seconds: how long the daemon may take for a lookup.
        timeout_seconds: how long it may take for a load or store.
        short_hashes: take keys of less than 32 bytes too, which anybody can make collide.
    """

    socket: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""
    full_digest: bool = False
    salt: str = ""
    lookup_seconds: float = 2.0
    timeout_seconds: float = 10.0
    short_hashes: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Parameters:
        """Read the JSON.

        Raises:
            BadRequest: a parameter is unknown, or cannot be meant.
        """
        return read(cls, given)


def engine_release(variant: str) -> str:
    """Return the vLLM that is installed here, nothing where none is and `variant` names it.

    Raises:
        BadRequest: neither; LMCache does not say whose pages it has, and releases order them differently.
    """
    found = [f"{name}-{version(name)}" for name in sorted(set(packages_distributions().get("vllm", ())))]
    if not found and not variant:
        raise BadRequest("variant", "name the engine and its release, which is not installed beside LMCache")
    return "-".join(found)


class Models:
    """What is known of models by the names under which engines serve them. Any thread may use it."""

    def __init__(self, parameters: Parameters, log: logging.Logger) -> None:
        self._parameters, self._log = parameters, log
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Facts, Callable[[], str]] | None] = {}

    def facts(self, model: str) -> Facts | None:
        """Return the facts of a model, from its files at first; None where they cannot be had or changed."""
        with self._lock:
            if model not in self._known:
                self._known[model] = self._look(model)
            if (known := self._known[model]) is None:
                return None
            facts, changed = known
            if why := changed():
                self._refuse(model, f"{why}; start LMCache again")
                self._known[model] = None
                return None
            return facts

    def _look(self, model: str) -> tuple[Facts, Callable[[], str]] | None:
        given = self._parameters
        try:
            settings = Settings.of(
                model,
                weights=given.models.get(model),
                adapters=(),
                variant=given.variant,
                full_digest=given.full_digest,
            )
            watch = FileWatch("the model", [settings.folder])  # from before their digest
            digest = settings_digest(settings.folder, given.variant)
            return Facts(settings.name, settings.weights_digest(), digest), watch
        except KvtcdError as error:
            self._refuse(model, str(error))
            return None

    def _refuse(self, model: str, why: str) -> None:
        self._log.error("kvtcd: nothing of model %s is stored or loaded: %s", model, why)
