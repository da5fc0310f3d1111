"""Daemons for `bench ttft`: each keeps caches in one place and one form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, get_args

from transformers import DynamicCache

from kvtcd.client import Client
from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.core.identity import Identity
from kvtcd.core.policy import CodecChoice
from kvtcd.integrations.namespaces import register
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.lab.bench_index import cpu_s
from kvtcd.lab.codec_spec import policy_text
from kvtcd.lab.daemon import Daemon

Stored = Literal["host-raw", "host-packed", "disk"]
STORED: tuple[Stored, ...] = get_args(Stored)
_SETTLE_SECONDS = 300.0
_POLICY = {
    "host-raw": '[tiers]\nhost = { form = "raw" }\n',
    # Above these marks all that is raw gets packed, and what is asked for does not stay raw.
    "host-packed": "[tiers]\nhost = { raw = 0.0, high = 0.00001, low = 0.00001 }\n[promote]\non_hit = 15\n",
    "disk": "",
}


class Shelf:
    """A daemon that keeps caches in one place and form.

    Args:
        daemon: runs.
        client: of that daemon.
        identity: of the caches.
        source: the place.
    """

    def __init__(self, daemon: Daemon, client: Client, identity: Identity, source: Stored) -> None:
        self._daemon, self._client, self._source = daemon, client, source
        register(client, identity, deadline=_SETTLE_SECONDS)  # it reads a profile of some hundred megabytes
        self._prefixes = PrefixCache(client, identity)
        why = client.namespace(self._prefixes.namespace).codec_reason
        if why and source != "host-raw":
            raise ConfigError("command line", "--profiles", f"nothing would be packed: {why}")

    def store(self, cache: DynamicCache, prompt: Sequence[int]) -> None:
        """Store the cache of a prompt, whatever its beginning has in common with others."""
        saved = self._prefixes.save(
            cache, prompt, durable=self._source == "disk", salt=_salt(prompt), deadline=_SETTLE_SECONDS
        )
        assert saved.complete, "there is room for all of them"

    def settle(self, prompt: Sequence[int]) -> None:
        """Wait until a prompt is where it should be, and nowhere faster."""
        namespace, salt = self._prefixes.namespace, _salt(prompt)
        found = self._client.match_tokens(namespace, prompt, salt=salt).prefix
        if self._source == "disk":
            self._client.demote(
                namespace, [block.key for block in found], salt=salt, deadline=_SETTLE_SECONDS
            )
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._unsettled(prompt):
            if time.monotonic() > deadline:
                raise Unavailable(f"the daemon does not keep blocks {self._source} in {_SETTLE_SECONDS:g} s")
            time.sleep(0.05)

    def load(self, prompt: Sequence[int]) -> DynamicCache:
        """Fetch the cache of a prompt but its last token."""
        known = self._prefixes.load(prompt, salt=_salt(prompt), deadline=_SETTLE_SECONDS)
        assert known.tokens == len(prompt) - 1, "all of it was stored"
        return known.cache

    def cpu_s(self) -> float:
        """Return the processor time that the daemon has taken, in seconds."""
        return cpu_s(self._daemon.pid)

    def _unsettled(self, prompt: Sequence[int]) -> bool:
        namespace = self._prefixes.namespace
        found = self._client.match_tokens(namespace, prompt, salt=_salt(prompt)).prefix
        forms = self._client.stats()["own"][namespace]["tiers"]["host"]
        match self._source:
            case "host-raw":
                return forms["packed"]["blocks"] > 0 or any(block.tier != "host" for block in found)
            case "host-packed":
                return bool(forms["raw"]["blocks"])
            case "disk":
                return any(block.tier != "disk" for block in found)


@contextmanager
def shelves(
    folder: Path, identity: Identity, tokens: int, profiles: Path, choice: CodecChoice
) -> Iterator[dict[Stored, Shelf]]:
    """Yield a daemon for each place, with room for so many tokens.

    Args:
        folder: for their files.
        identity: of the caches.
        tokens: of all of them.
        profiles: folder of profiles.
        choice: what is packed is packed like this.

    Raises:
        ConfigError: there is no profile for it.
        Unavailable: a daemon does not start.
    """
    raw_bytes = identity.layout.nbytes(tokens)
    with ExitStack() as stack:
        found: dict[Stored, Shelf] = {}
        for source in STORED:
            root = folder / source
            root.mkdir()
            policy = root / "policy.toml"
            policy.write_text(policy_text(choice) + _POLICY[source])
            daemon = Daemon(
                root, host=2 * raw_bytes + (64 << 20), disk=4 * raw_bytes if source == "disk" else 0,
                profiles=profiles, policy=policy,
            )  # fmt: skip
            stack.enter_context(daemon)
            found[source] = Shelf(daemon, stack.enter_context(daemon.client()), identity, source)
        yield found


def _salt(prompt: Sequence[int]) -> str:
    return str(len(prompt))
