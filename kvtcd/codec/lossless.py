"""The `lossless` codec: a whole block as one exact run. It needs neither profile nor position."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvtcd.codec.exact import exact_sizes, from_planes, to_planes
from kvtcd.codec.ports import BlobDecoder, Encoder, Reason, Symbols
from kvtcd.codec.sections import Scratch, by_run, check_runs, require
from kvtcd.codec.transform import views
from kvtcd.core.blob import Blob, CodecId, Header
from kvtcd.core.errors import BadField, BlockMismatch
from kvtcd.core.layout import Layout

_VERSION = 1


class Lossless(Encoder, BlobDecoder):
    """Encoder and decoder of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def analyze(
        self,
        raw: Tensor,
        *,
        tokens: int,
        first_token: int | None,
        after: int,  # noqa: ARG002 - it changes nothing where all is exact
        scratch: Scratch,
    ) -> Symbols:
        """Take a block apart into byte planes; see `Encoder`."""
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
        return Symbols(header, to_planes(views(raw, self._layout, tokens), 0, tokens, scratch))

    def instead(
        self,
        reason: Reason,
        raw: Tensor,
        *,
        tokens: int,
        first_token: int | None,
        after: int,
        scratch: Scratch,
    ) -> Symbols:
        """Do what another encoder cannot, and say why it is not its own work."""
        symbols = self.analyze(raw, tokens=tokens, first_token=first_token, after=after, scratch=scratch)
        return replace(symbols, reason=reason)

    def check(self, blob: Blob) -> None:
        """Compare a blob with the layout; see `BlobDecoder`."""
        check_blob(blob, self._layout, CodecId.LOSSLESS, _VERSION)
        runs = check_runs(blob)
        if len(runs) != 1:
            raise BadField("blob", f"a lossless block has one run of tokens, not {len(runs)}")
        require(runs[0, blob.header.tokens], exact_sizes(self._layout, blob.header.tokens))

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Put a block together from its byte planes; see `BlobDecoder`."""
        tokens = symbols.header.tokens
        check_raw(out, self._layout, tokens)
        found = by_run(symbols.sections)[0, tokens]
        from_planes(found, views(out, self._layout, tokens), 0, tokens)


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
