"""Slots of llama.cpp's server in the daemon: saved as they are, found by the tokens they begin with.

A slot file can only be read as a whole, so what is stored is the file, in blocks (`llamacpp_blocks`).
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtcd.client import BlockHead, Client
from kvtcd.client.call import Salt
from kvtcd.client.weights import adapter_digest, weights_digest
from kvtcd.core.errors import BadMagic, BadRequest, NotFound, Unavailable
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey, token_array
from kvtcd.integrations.llamacpp_blocks import (
    BLOCK_UNITS,
    HASH_SCHEME,
    UNIT,
    Head,
    chained,
    head_key,
    pieces,
    prefix_keys,
)
from kvtcd.integrations.llamacpp_file import Form, SlotFile, read
from kvtcd.integrations.llamacpp_server import LlamaServer, Props
from kvtcd.integrations.namespaces import register
from kvtcd.integrations.opaque import opaque

_ASKED = 4096
"""Keys of one match."""
_DEADLINE = 600.0
_GGUF = b"GGUF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the server computes with, beside what it says of itself.

    Attributes:
        file: of the model (GGUF).
        adapters: files of all adapters (LoRA) that are applied.
        variant: names arguments that change what the cache holds and are in no file: scaled RoPE, scales of
            adapters.
        full_digest: read every byte of the model instead of its header and sampled pages.
    """

    file: Path
    adapters: tuple[Path, ...] = ()
    variant: str = ""
    full_digest: bool = False


@dataclass(frozen=True, slots=True)
class SlotReport:
    """Tokens and bytes of a slot that was saved or restored; 0 if none was.

    `new`: whether bytes were sent: what was there already is not. `why`: why nothing was saved.
    """

    tokens: int
    nbytes: int
    new: bool = False
    why: str | None = None


class Slots:
    """Moves slots of a server into a daemon and back.

    Args:
        client: of the daemon.
        server: whose slots.
        model: what it computes with.
        salt: parts these slots from others of the same user.

    Raises:
        Unavailable: the model's file is not where it is said to be, or there is no server.
        BadMagic: it, or an adapter's, is no GGUF file.
    """

    def __init__(self, client: Client, server: LlamaServer, model: Model, *, salt: Salt = "") -> None:
        self._client, self._server, self._salt = client, server, salt
        props = server.props()
        self._count, self._facts = props.slots, _facts(props, model)

    def save(self, slot: int) -> SlotReport:
        """Store a slot, durably.

        Raises:
            BadRequest: the server has no such slot.
            UnsupportedCache: it holds more than a plain cache.
            Corrupt: the server has written what is no slot file.
        """
        self._require(slot)
        with self._server.saved(slot) as path:
            data = _mapped(path)
            held = read(data)
            if held.form is None:
                return SlotReport(0, 0, why="the slot is empty")
            name, head = self._namespace(held.form), Head.of(data)
            key = head_key(self._identity(held.form).digest, held.tokens)
            if self._whole(name, key) is not None:
                return SlotReport(len(held.tokens), head.nbytes)
            self._client.delete(name, key, salt=self._salt)  # of a file that is not whole any more
            keys = head.keys()
            last = BlockHead(key, 1, parent=keys[-1]), head.to_bytes()
            for sent in (zip(chained(keys, head.nbytes), pieces(data), strict=True), [last]):
                results = self._client.put_many(
                    name, sent, durable=True, salt=self._salt, deadline=_DEADLINE
                )  # fmt: skip
                if lost := next((one for one in results if one.outcome == "dropped"), None):
                    return SlotReport(0, 0, why=f"the daemon has dropped a block: {lost.reason}")
            return SlotReport(len(held.tokens), head.nbytes, new=True)

    def restore(self, slot: int, tokens: Sequence[int]) -> SlotReport:
        """Put the longest saved prefix of a sequence into a slot, which keeps what it has if there is none.

        An empty slot reads one token for this: nothing else tells in which form the server keeps its cache.

        Raises:
            BadRequest: the server has no such slot.
            ServerError: the server does not take the file.
            Unavailable: it has taken another number of tokens than the file has.
        """
        self._require(slot)
        form = self._form(slot)
        name, digest = self._namespace(form), self._identity(form).digest
        for count, key in self._saved_prefixes(name, digest, token_array(tokens)):
            with self._server.file() as path:
                nbytes = self._fetch(name, key, path)
                if nbytes is None:
                    continue
                restored = self._server.restore(slot, path)
                if restored != count:
                    raise Unavailable(
                        f"the server has restored {restored} tokens of {count}; erase slot {slot}"
                    )
                return SlotReport(count, nbytes)
        return SlotReport(0, 0)

    def _require(self, slot: int) -> None:
        """Refuse a slot that is not there: the server would take another for it."""
        if not 0 <= slot < self._count:
            raise BadRequest("slot", f"{slot} is none of the server's, which are 0 to {self._count - 1}")

    def _form(self, slot: int) -> Form:
        held = self._look(slot)
        if held.form is None:
            self._server.evaluate_one(slot)
            held = self._look(slot)
        if held.form is None:
            raise Unavailable(f"slot {slot} is empty after it has read a token")
        return held.form

    def _look(self, slot: int) -> SlotFile:
        with self._server.saved(slot) as path:
            return read(_mapped(path))

    def _saved_prefixes(
        self, name: str, digest: bytes, tokens: array[int]
    ) -> Iterator[tuple[int, EngineKey]]:
        """Yield prefixes whose head is there, the longest first."""
        keys = list(enumerate(prefix_keys(digest, tokens), start=1))[::-1]
        for first in range(0, len(keys), _ASKED):
            asked = keys[first : first + _ASKED]
            found = self._client.match(name, [key for _, key in asked], salt=self._salt).blocks
            yield from (one for one, match in zip(asked, found, strict=True) if match.tier is not None)

    def _whole(self, name: str, key: EngineKey) -> Head | None:
        """Return the head of a file that is there as a whole."""
        try:
            head = Head.from_bytes(self._client.get(name, key, salt=self._salt, deadline=_DEADLINE))
        except NotFound:
            return None
        keys = head.keys()
        for first in range(0, len(keys), _ASKED):
            asked = keys[first : first + _ASKED]
            if len(self._client.match(name, asked, salt=self._salt).prefix) < len(asked):
                return None
        return head

    def _fetch(self, name: str, key: EngineKey, path: Path) -> int | None:
        """Write a file; return its length, None if it is not whole."""
        if (head := self._whole(name, key)) is None:
            return None
        seen, left = hashlib.sha256(), head.nbytes
        with path.open("wb") as file:
            for _, data in self._client.get_many(name, head.keys(), salt=self._salt, deadline=_DEADLINE):
                if data is None:
                    return None
                piece = data[:left]
                seen.update(piece)
                file.write(piece)
                left -= len(piece)
        return head.nbytes if seen.digest() == head.digest else None

    def _namespace(self, form: Form) -> str:
        return register(self._client, self._identity(form))

    def _identity(self, form: Form) -> Identity:
        name, weights, adapter, settings = self._facts
        layout, _ = opaque(UNIT, 1, ["float16"])
        return Identity(
            engine=f"llama.cpp {settings}",
            hash_scheme=HASH_SCHEME,
            model=name,
            weights=weights,
            adapter=adapter,
            layout=layout,
            rope=None,
            scales=str(form)[:256],
            block_tokens=BLOCK_UNITS,
            page_format="llamacpp-slot",
        )


def _facts(props: Props, model: Model) -> tuple[str, str, str, str]:
    """Return the model's name, digests of its file and of adapters, and one of all that is in no file."""
    for file in (model.file, *model.adapters):
        if not file.is_file():
            raise Unavailable(f"{file} is no file; give that of the model or adapter as this host sees it")
        with file.open("rb") as begin:
            if begin.read(len(_GGUF)) != _GGUF:
                raise BadMagic(str(file), "is no GGUF file; give that which the server has loaded")
    settings = hashlib.sha256(f"{props.build}\n{props.n_ctx}\n{model.variant}".encode()).hexdigest()[:32]
    name = "".join(c if c.isascii() and c.isprintable() else "-" for c in model.file.stem).strip()[:64]
    return (
        name or "model",
        weights_digest(model.file, full=model.full_digest),
        adapter_digest(model.adapters) if model.adapters else "none",
        settings,
    )


def _mapped(path: Path) -> memoryview:
    """Return the bytes of a file, which nobody needs in memory at once."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
