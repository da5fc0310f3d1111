"""The slot files of llama.cpp's server: which tokens they hold, and in which form the cache lies in them.

A file says nothing of the model. Its layout (version 4) is little endian::

    u32 magic "ggsq", version, words; i32 words: tokens, or -1, 1, count, tokens, media (0 of them)
    u32 streams; for each: u32 cells; if there are any,
        i32 position, u32 n, i32 n sequences       of each cell
        u32 transposed, layers, rotations of keys and of values
        i32 type, u64 row size, cells rows         of the keys of each layer
        the same of the values, or if transposed   i32 type, u32 size, u32 width, size * width * cells bytes
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

from kvtcd.core.errors import BadField, BadMagic, BadVersion, Truncated, UnsupportedCache
from kvtcd.core.keys import tokens_from_bytes

_MAGIC, _VERSION = 0x67677371, 4
_PACKED, _PACKED_VERSION = -1, 1
_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
"""Types that `--cache-type-k` takes, by their number in ggml."""
_SEQUENCES = 4096
_WHAT = "slot file"


@dataclass(frozen=True, slots=True)
class Form:
    """How a cache lies in a file: what a server must have in common with it to read it.

    Attributes:
        streams: 1, or as many as the server has slots.
        transposed: whether values lie by rows of features, as without flash attention.
        layers: of the model.
        keys, values: types and row sizes, of all layers, by first occurrence.
        rotations: sizes of the Hadamard matrices that keys and values are stored under, 0 for none: quantized
            ones are, if the width of a head is a multiple of 64.
    """

    streams: int
    transposed: bool
    layers: int
    keys: tuple[str, ...]
    values: tuple[str, ...]
    rotations: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        order = "transposed" if self.transposed else "rows"
        rotated = " r={}+{}".format(*self.rotations) if any(self.rotations) else ""
        told = f"s{self.streams} l{self.layers} {order}{rotated}"
        return f"{told} k={'+'.join(self.keys)} v={'+'.join(self.values)}"


@dataclass(frozen=True, slots=True)
class SlotFile:
    """What a file holds; no form if there is not one token."""

    tokens: array[int]
    form: Form | None


def read(data: memoryview) -> SlotFile:
    """Read what a slot file says of itself, and check that it is whole.

    Raises:
        BadMagic, BadVersion, Truncated, BadField: it is no slot file, or of another version, or not whole.
        UnsupportedCache: it holds more than a plain cache (images, sliding windows, recurrent states).
    """
    at = _Reader(data)
    if at.u32() != _MAGIC:
        raise BadMagic(_WHAT, "does not begin like one of llama.cpp's")
    if (version := at.u32()) != _VERSION:
        raise BadVersion(_WHAT, f"has version {version}; this release reads {_VERSION}")
    tokens = _tokens(at.take(4 * at.u32()))
    streams = at.u32()
    forms = [_form(at, streams, cells) for _ in range(streams) if (cells := at.u32())]
    if at.left:
        raise UnsupportedCache(
            f"the slot file goes on for {at.left} bytes behind a plain cache: the model has a sliding window "
            "or a recurrent state, of which no prefix can be restored"
        )
    if len(forms) > 1:
        raise UnsupportedCache("the slot file has cells in several streams")
    return SlotFile(tokens, forms[0] if forms else None)


def _tokens(words: memoryview) -> array[int]:
    """Return the tokens: plain ones, or those of a prompt as newer servers pack it."""
    ids = array("i", words.tobytes())
    if ids[:1].tolist() != [_PACKED]:
        return tokens_from_bytes(words.tobytes())
    if len(ids) < 3 or ids[1] != _PACKED_VERSION:
        raise BadVersion(_WHAT, "has a prompt of a version that this release does not read")
    end = 3 + ids[2]
    if any(ids[end:]):
        raise UnsupportedCache(
            "the prompt in the slot file holds images or sound, which are not in its tokens"
        )
    if not 3 <= end <= len(ids):
        raise BadField(_WHAT, f"has {len(ids) - 3} words for {ids[2]} tokens")
    return tokens_from_bytes(words[12 : 4 * end].tobytes())


def _form(at: _Reader, streams: int, cells: int) -> Form:
    for _ in range(cells):
        at.u32()
        if (sequences := at.u32()) > _SEQUENCES:
            raise UnsupportedCache("the slot file has cells of another form: does the model read images?")
        at.take(4 * sequences)
    transposed, layers, *rotations = (at.u32() for _ in range(4))
    if transposed > 1 or not all(map(_is_rotation, rotations)):
        raise UnsupportedCache("the slot file has a cache of another form than that of plain attention")
    keys = [_row(at, cells) for _ in range(layers)]
    values = [_column(at, cells) if transposed else _row(at, cells) for _ in range(layers)]
    types = tuple(dict.fromkeys(keys)), tuple(dict.fromkeys(values))
    return Form(streams, bool(transposed), layers, *types, (rotations[0], rotations[1]))


def _is_rotation(size: int) -> bool:
    """Tell whether there is a Hadamard matrix of this size: powers of two, and 0 for none."""
    return size != 1 and not size & (size - 1)


def _row(at: _Reader, cells: int) -> str:
    kind, nbytes = at.u32(), at.u64()
    at.take(nbytes * cells)
    return f"{_TYPES.get(kind, kind)}:{nbytes}"


def _column(at: _Reader, cells: int) -> str:
    kind, size, width = at.u32(), at.u32(), at.u32()
    at.take(size * width * cells)
    return f"{_TYPES.get(kind, kind)}:{size * width}"


class _Reader:
    """Reads a file from its beginning to its end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self.left:
            raise Truncated(_WHAT, f"ends at byte {len(self._data)}, before what it promises")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])
