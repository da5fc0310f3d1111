"""Whether every way into a daemon and out of it works, and how fast: blocks are stored, fetched and compared.

They go into a trial: a namespace that the daemon keeps in memory alone, lists and counts nowhere, and forgets
in the end.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtcd import config
from kvtcd.admin.findings import Finding
from kvtcd.client import BlockHead, Client
from kvtcd.client.device import DevicePart
from kvtcd.client.regions import Region
from kvtcd.core.device_errors import NoDriver
from kvtcd.core.errors import BadRequest, KvtcdError, ServerError
from kvtcd.core.identity import TRIAL, Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype, Layout, Stream
from kvtcd.cuda.driver import Failure
from kvtcd.cuda.own import DeviceMemory

_BLOCKS = 8
_TOKENS = 256
_LAYOUT = Layout((Stream("v", heads=8, head_dim=256, rope=False),), layers=4, dtype=Dtype.BF16)
"""4 MiB a block, of a stream without RoPE."""
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to ask what listens everywhere
_UNAUTHORIZED = 401


@contextmanager
def trial(client: Client) -> Iterator[str]:
    """Yield the name of a namespace that leaves nothing; others may look at the same time."""
    mark = secrets.token_hex(8)
    identity = Identity(
        engine=TRIAL, hash_scheme="none", model=f"trial {mark}", weights="00" * 32,
        layout=_LAYOUT, rope=None, block_tokens=_TOKENS,
    )  # fmt: skip
    name = client.register(f"{TRIAL}.{mark}", identity).name
    try:
        yield name
    finally:
        client.purge(name)


def by_socket(client: Client, name: str) -> Iterator[Finding]:
    """Store and fetch blocks by each way that a socket opens."""
    nbytes = _LAYOUT.nbytes(_TOKENS)
    memory = memoryview(bytearray(os.urandom(nbytes)))
    yield _way(client, name, "http", memory, memory.tobytes)
    with client.region(nbytes) as region:
        if region.path == "region":
            region.memory[:] = os.urandom(nbytes)
            yield _way(client, name, "region", region.memory, region.memory.tobytes)
        else:
            yield _unshared(region)
    yield _by_device(client, name, nbytes)


def by_tcp(tcp: config.daemon.Tcp) -> Finding:
    """Store and fetch blocks by TCP, as a client that knows ``$KVTCD_TOKEN`` and trusts ``$KVTCD_CA``."""
    if tcp.address is None:
        return Finding("by TCP", "ok", "not configured: [tcp] listen is empty")
    host, port = tcp.address
    host = _ANYWHERE.get(host, host)
    url = f"http{'s' if tcp.tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    nbytes = _LAYOUT.nbytes(_TOKENS)
    memory = memoryview(bytearray(os.urandom(nbytes)))
    try:
        with Client(url) as client, trial(client) as name:
            return _way(client, name, "TCP", memory, memory.tobytes)
    except ServerError as error:
        if error.status != _UNAUTHORIZED:
            return Finding("by TCP", "wrong", f"{url}: {error}")
        given = "the one in KVTCD_TOKEN is none of its" if os.environ.get("KVTCD_TOKEN") else "none is given"
        said = f"{url} answers, and asks for a token: {given}; give yours, KVTCD_TOKEN=…, to move blocks"
        return Finding("by TCP", "note", said)
    except KvtcdError as error:
        return Finding("by TCP", "wrong", str(error))


def _unshared(region: Region) -> Finding:
    return Finding("by region", "note", f"{region.why}; clients send bytes over HTTP instead")


def _by_device(client: Client, name: str, nbytes: int) -> Finding:
    """Do the same from memory of the first GPU that this process sees, if there is one."""
    try:
        with DeviceMemory(nbytes) as memory, client.device_region((memory.pointer, nbytes)) as region:
            if region.path != "device":
                return Finding("by device", "note", f"{region.why}; engines' blocks go through the host")
            memory.write(os.urandom(nbytes))
            return _way(client, name, "device", region[:], memory.read)
    except NoDriver as error:
        return Finding("by device", "ok", f"not looked at: {error}")
    except (Failure, BadRequest) as error:
        return Finding("by device", "note", f"not looked at: no memory of a GPU is to be had: {error}")


def _way(
    client: Client, name: str, way: str, memory: memoryview | DevicePart, look: Callable[[], bytes]
) -> Finding:
    """Move blocks in and out of memory, whose bytes `look` returns; the same must come back."""
    sent, taken, given = look(), 0.0, 0.0
    for _ in range(_BLOCKS):
        key = EngineKey(secrets.token_bytes(16))
        begun = time.perf_counter()
        result = client.put(name, BlockHead(key, _TOKENS, first_token=0), memory)
        stored = time.perf_counter()
        if result.outcome != "stored":
            why = f"a block of 4 MiB was not stored ({result.reason or result.outcome})"
            return Finding(f"by {way}", "note", f"{why}; is there room for it in [host] capacity?")
        client.fill(name, [key], [memory])
        given += time.perf_counter() - stored
        taken += stored - begun
        client.delete(name, key)
        if look() != sent:
            return Finding(f"by {way}", "wrong", "other bytes came back than were stored; report this")
    moved = _BLOCKS * len(sent) / 1e9
    return Finding(
        f"by {way}",
        "ok",
        f"in {moved / taken:.2f} GB/s, out {moved / given:.2f} GB/s, blocks of 4 MiB, by the clock",
    )
