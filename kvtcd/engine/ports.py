"""What the engine needs of the rooms below it. Nothing below imports this."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtcd.core.blob import Blob, CodecId
from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.devices import DeviceName
from kvtcd.core.drift import Drift
from kvtcd.core.identity import Identity
from kvtcd.core.keys import RecordKey
from kvtcd.core.place import Form
from kvtcd.core.policy import CodecChoice

Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Blocks in host memory, raw and packed. `allocate` and `free` belong to the loop thread."""

    capacity: int

    def allocate(self, key: RecordKey, nbytes: int, form: Form = Form.RAW) -> None:
        """Take room for a copy."""

    def free(self, key: RecordKey, form: Form = Form.RAW) -> None:
        """Give it back; a copy that has none is ignored."""

    def pieces(self, key: RecordKey, form: Form = Form.RAW) -> Sequence[Bytes]:
        """Return the writable bytes of a copy in order."""


class DeviceMemory(Protocol):
    """Raw blocks on a GPU. `allocate` and `free` belong to the loop thread, the copies to one stream."""

    capacity: int

    def allocate(self, key: RecordKey, nbytes: int) -> None:
        """Take room for a block."""

    def free(self, key: RecordKey) -> None:
        """Give it back."""

    def upload(self, key: RecordKey, pieces: Sequence[Bytes]) -> None:
        """Copy a block from host memory."""

    def download(self, key: RecordKey, pieces: Sequence[Bytes]) -> None:
        """Copy a block to host memory."""

    def deliver(self, key: RecordKey, out: DeviceBytes) -> None:
        """Copy a block to memory of the same GPU that its reader has."""


class StoredPage(Protocol):
    """A part of a scan: many records without their blobs, in columns."""

    @property
    def keys(self) -> Sequence[bytes]:
        """The record keys."""

    @property
    def envelopes(self) -> Sequence[bytes]:
        """The envelopes."""

    @property
    def footprints(self) -> npt.NDArray[np.int64]:
        """Bytes that each is accounted with."""


class Packed(Protocol):
    """What an encoder made of a block."""

    @property
    def blob(self) -> bytearray:
        """The blob."""

    @property
    def codec(self) -> CodecId:
        """The codec that was used in the end."""

    @property
    def reason(self) -> str | None:
        """Why it is not the one that was asked for, if so."""


class Scratch(Protocol):
    """Memory for one block in flight, used again for the next. One thread at a time."""

    def take(self, nbytes: int) -> Bytes:
        """Return so many bytes that nobody else uses until `clear`."""

    def clear(self) -> None:
        """Take everything back."""


class Analyzed(Protocol):
    """A block on its way down, between the two halves of its codec."""

    def deflate(self) -> Packed:
        """Do the entropy half: write the blob."""


class Inflated(Protocol):
    """A block on its way up, between the two halves of its codec."""

    def synthesize(self, out: Bytes | DeviceBytes) -> None:
        """Do the tensor half: write the block.

        Args:
            out: in host memory, or on the codec's `gpu`; what is in it if this fails, is undefined.
        """


class Codec(Protocol):
    """Raw block <-> blob, for one namespace. Blocking; called from streams only."""

    @property
    def name(self) -> str:
        """What the namespace's blocks are packed with, for people."""

    @property
    def reason(self) -> str | None:
        """Why it is not what the policy asks for, if so."""

    @property
    def profile(self) -> str | None:
        """SHA-256 of the profile that they are packed with, in hex."""

    @property
    def expected_kl(self) -> float | None:
        """Divergence that calibration measured where the dial stands, nats per token."""

    @property
    def device(self) -> DeviceName:
        """Where it works."""

    @property
    def gpu(self) -> int | None:
        """CUDA's number of the GPU whose memory it can unpack into as well; None: of none."""

    def on_cpu(self) -> Codec:
        """Return the same for a CPU: itself, if it works there."""

    @property
    def drift(self) -> Drift | None:
        """What sampled blocks say of the profile; None without one. Any thread may ask."""

    def analyze(
        self, raw: Bytes, *, tokens: int, first_token: int | None, after: int, scratch: Scratch
    ) -> Analyzed:
        """Begin to pack a block of which `after` tokens are known to follow: the tensor half."""

    def inflate(self, blob: Blob, scratch: Scratch) -> Inflated:
        """Begin to unpack a blob of this namespace's layout: the entropy half.

        Raises:
            Corrupt: it breaks a rule of its format.
            UnknownProfile: it was made with a profile that is not here.
        """


CodecFactory = Callable[[Identity, CodecChoice], Codec]
"""Chooses profile and codec for a namespace. Blocking: it may read a profile."""


class PutRecord(Protocol):
    """Makes one record for `Environment.write`."""

    def __call__(self, key: bytes, envelope: bytes, blob: bytearray | Bytes) -> Any:  # noqa: ANN401 - the tier's own type
        """Return a value that `Environment.write` takes."""


class Environment(Protocol):
    """One tenant's records on disk. Blocking; reads from any thread, writes from one."""

    quarantined: bool
    failed: bool
    recovered: bool

    @property
    def set_aside(self) -> tuple[str, ...]:
        """Names of what was damaged, now or earlier, and lies beside it."""

    def drop_set_aside(self) -> None:
        """Remove that, durably."""

    @property
    def used(self) -> int:
        """Bytes of all records."""

    def write(self, puts: Sequence[Any], drops: Sequence[bytes]) -> None:
        """Drop, then put, in one transaction."""

    def read(self, key: bytes, take: Callable[[int], Bytes]) -> tuple[bytes, Bytes] | None:
        """Return (envelope, blob), both copies, the blob in memory that `take` gives."""

    def envelope(self, key: bytes) -> bytes | None:
        """Return the envelope of a record alone."""

    def scan(self) -> Iterator[StoredPage]:
        """Yield what is stored."""

    def check_readers(self) -> int:
        """Clear reader slots that killed processes left behind; return how many."""

    def drop_orphans(self) -> int:
        """Remove chunks that belong to no record; return how many."""

    def namespaces(self) -> dict[str, bytes]:
        """Return the values stored under namespace names."""

    def put_namespace(self, name: str, identity: bytes) -> None:
        """Store one, durably."""

    def rewrite(self, keep: Callable[[bytes], bool], namespaces: dict[str, bytes]) -> bool:
        """Leave no byte of records whose envelope is not kept; tell whether the others are all there."""

    def sync(self) -> None:
        """Make the last commit final."""

    def close(self) -> None:
        """Close it cleanly."""


Value = bytes | memoryview
"""What a store holds under a name."""
Came = Callable[[str, Value], None]
"""Told of a name and its value."""
Item = tuple[str, tuple[Value, ...], int | None]
"""A value on its way to a store: its name; the parts that it is, one behind the other; seconds that it is
kept if the store keeps time, None: as long as the store likes."""


class RemoteStore(Protocol):
    """A store that several daemons share. Some answers, or all, may be errors; or one is raised.

    An `OSError` among answers says that there was nobody to be asked, any other error that it was refused.
    """

    async def get(self, names: Sequence[str], most: int, came: Came) -> list[bool | Exception]:
        """Hand out values, each as soon as it is here; what is larger than `most` is not what it was.

        Args:
            names: of values.
            most: bytes.
            came: told of each name that has a value, once; it does not raise.

        Returns:
            which names have one.
        """

    async def piece(self, name: str, start: int, nbytes: int) -> Value:
        """Return some bytes of a value: fewer where it ends, none where there is nothing."""

    async def put(self, items: Sequence[Item]) -> list[Exception | None]:
        """Store values under names; nobody writes to the memory that they lie in meanwhile."""

    async def exists(self, names: Sequence[str]) -> list[bool | Exception]:
        """Tell which names have a value."""

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        """Remove values; one that is not there is no error."""

    def listing(self, prefix: str) -> AsyncIterator[str]:
        """Yield all names that begin so, perhaps some of them twice."""

    async def close(self) -> None:
        """End the connections."""
