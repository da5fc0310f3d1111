"""The `lossless` codec: a whole block as one exact run. It needs neither profile nor position."""

from __future__ import annotations

from torch import Tensor

from kvtcd.codec.exact import decode_exact, encode_exact
from kvtcd.codec.ports import Encoded
from kvtcd.codec.sections import by_run
from kvtcd.codec.transform import views
from kvtcd.core.blob import Blob, CodecId, Header, assemble
from kvtcd.core.errors import BadField, BlockMismatch
from kvtcd.core.layout import Layout

_VERSION = 1


class Lossless:
    """Encoder and decoder of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def encode(self, raw: Tensor, *, tokens: int, first_token: int | None, after: int) -> Encoded:  # noqa: ARG002 - `after` changes nothing where all is exact
        """Encode a block; see `Encoder`."""
        check_raw(raw, self._layout, tokens)
        header = Header(
            codec=CodecId.LOSSLESS,
            codec_version=_VERSION,
            dtype=self._layout.dtype,
            layout=self._layout.digest,
            tokens=tokens,
            raw_bytes=raw.numel(),
            first_token=first_token,
        )
        sections = encode_exact(views(raw, self._layout, tokens), 0, tokens)
        return Encoded(assemble(header, sections), CodecId.LOSSLESS)

    def decode(self, blob: Blob, out: Tensor) -> None:
        """Decode a block; see `BlobDecoder`."""
        check_blob(blob, self._layout, CodecId.LOSSLESS, _VERSION)
        tokens = blob.header.tokens
        check_raw(out, self._layout, tokens)
        found = by_run(blob)
        if len(found) != 1:
            raise BadField("blob", f"a lossless block has one run of tokens, not {len(found)}")
        decode_exact(blob, found[0, tokens], views(out, self._layout, tokens), 0, tokens)


def check_raw(raw: Tensor, layout: Layout, tokens: int) -> None:
    """Compare the length of a raw block with its layout.

    Raises:
        BlockMismatch: they differ.
    """
    if raw.numel() != layout.nbytes(tokens):
        raise BlockMismatch("bytes", f"{layout.nbytes(tokens)} for {tokens} tokens", raw.numel())


def check_blob(blob: Blob, layout: Layout, codec: CodecId, version: int) -> None:
    """Compare the header of a blob with layout and codec.

    Raises:
        BadField: of another codec or codec version, or its raw length is not that of its tokens.
        BlockMismatch: of another layout.
    """
    header = blob.header
    if (header.codec, header.codec_version) != (codec, version):
        found = f"codec {header.codec} version {header.codec_version}"
        raise BadField("blob", f"{found} is not {codec} version {version}")
    if header.layout != layout.digest or header.dtype is not layout.dtype:
        raise BlockMismatch("layout", layout.digest.hex(), header.layout.hex())
    if header.raw_bytes != layout.nbytes(header.tokens):
        raise BadField("blob", f"{header.raw_bytes} raw bytes for {header.tokens} tokens")
