"""The codec of a namespace: an encoder by policy and profile, and a decoder of all that was ever written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtcd.codec.choices import choice_for
from kvtcd.codec.coded import Coder
from kvtcd.codec.encoders import encoder_for, expected_kl
from kvtcd.codec.foreign import Foreign
from kvtcd.codec.graphs import Graphs
from kvtcd.codec.lossless import Lossless
from kvtcd.codec.pages import PagedDecoder, PagedEncoder, page_map
from kvtcd.codec.ports import BlobDecoder, Encoded, Encoder, Symbols
from kvtcd.codec.profile import Profile
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.rivals.coder import RivalDecoder
from kvtcd.codec.sections import Scratch
from kvtcd.codec.staged import Accelerator, StagedDecoder, StagedEncoder, attempted
from kvtcd.codec.stepped import Stepped
from kvtcd.codec.uniform import Arithmetic
from kvtcd.codec.watch import Watched
from kvtcd.core.blob import BasisId, Blob, CodecId, Header
from kvtcd.core.device_bytes import DeviceBytes
from kvtcd.core.devices import DeviceName
from kvtcd.core.dials import DIALS
from kvtcd.core.drift import Drift
from kvtcd.core.errors import BadField
from kvtcd.core.identity import Identity, Rope
from kvtcd.core.layout import Layout
from kvtcd.core.policy import CodecChoice

_LOSSLESS = "lossless"
_CODERS = 4
"""Kept of each codec: that of the profile in use, and of those before it."""
_TABLES = 10 << 10
"""Room for header, sections and padding of a block of eight streams in float32, the most there can be."""


@dataclass(frozen=True, slots=True)
class Analyzed:
    """A block on its way down: the tensor half is done."""

    symbols: Symbols
    encoder: Encoder

    def deflate(self) -> Encoded:
        """Do the entropy half: write the blob."""
        return self.encoder.deflate(self.symbols)


@dataclass(frozen=True, slots=True)
class Inflated:
    """A block on its way up: the entropy half is done."""

    symbols: Symbols
    decoder: BlobDecoder
    foreign: Foreign | None = None

    def synthesize(self, out: npt.NDArray[np.uint8] | DeviceBytes) -> None:
        """Do the tensor half: write the block into flat bytes; see `BlobDecoder`.

        Args:
            out: in host memory, or on the GPU where the codec works.
        """
        if isinstance(out, DeviceBytes):
            assert self.foreign is not None, "the codec has said on which GPU"
            self.decoder.synthesize_there(self.symbols, self.foreign.tensor(out))
        else:
            self.decoder.synthesize(self.symbols, torch.from_numpy(out))


class NamespaceCodec:
    """Packs and unpacks blocks of a namespace that lie in host memory, one half at a time.

    Attributes:
        encoder, decoder: what it packs and unpacks with.
        name: what blocks are packed with, for people.
        reason: why that is not what the policy asks for, if so.
        profile: SHA-256 of the profile that the encoder uses, in hex.
        expected_kl: divergence that calibration measured where the dial stands, nats per token.
        device: where that works.
        gpu: CUDA's number of the GPU whose memory it can unpack into as well; None: of none.
    """

    def __init__(
        self, encoder: Encoder, decoder: BlobDecoder, name: str, reason: str | None = None,
        *, profile: str | None = None, expected_kl: float | None = None, watched: Watched | None = None,
        device: DeviceName = "cpu", on_cpu: Callable[[], NamespaceCodec] | None = None,
        foreign: Foreign | None = None,
    ) -> None:  # fmt: skip
        self.encoder, self.decoder = encoder, decoder
        self.name, self.reason = name, reason
        self.profile, self.expected_kl, self.device = profile, expected_kl, device
        self.gpu = foreign.gpu if foreign else None
        self._watched, self._on_cpu, self._foreign = watched, on_cpu, foreign

    @property
    def drift(self) -> Drift | None:
        """What sampled blocks say of the profile; None without one. May be read on any thread."""
        return self._watched.drift if self._watched else None

    def on_cpu(self) -> NamespaceCodec:
        """Return the same for a CPU: itself, if it works there."""
        return self._on_cpu() if self._on_cpu else self

    def analyze(
        self,
        raw: npt.NDArray[np.uint8],
        *,
        tokens: int,
        first_token: int | None,
        after: int,
        scratch: Scratch,
    ) -> Analyzed:
        """Begin to pack a block given as writable flat bytes; see `Encoder`."""
        return Analyzed(
            self.encoder.analyze(
                torch.from_numpy(raw), tokens=tokens, first_token=first_token, after=after, scratch=scratch
            ),
            self.encoder,
        )

    def inflate(self, blob: Blob, scratch: Scratch) -> Inflated:
        """Begin to unpack a blob; see `BlobDecoder` and `Decoder`."""
        return Inflated(self.decoder.inflate(blob, scratch), self.decoder, self._foreign)


class Decoder(BlobDecoder):
    """Decodes every blob of a layout, whichever codec, profile and plan wrote it.

    Args:
        layout: of the blocks.
        rope: of the rotated streams; None when there are none.
        lookup: profile by digest; raises `UnknownProfile` for one it does not have.
        device: where raw blocks lie.
        arithmetic: who turns codes into coefficients there; None: torch.
        graphs: replay there what recurs; None: nothing is replayed.
    """

    def __init__(
        self,
        layout: Layout,
        rope: Rope | None,
        lookup: Callable[[bytes], Profile],
        device: torch.device | str = "cpu",
        arithmetic: Arithmetic | None = None,
        *,
        graphs: Graphs | None = None,
    ) -> None:
        self._layout, self._rope, self._lookup, self._device = layout, rope, lookup, device
        self._arithmetic, self._graphs = arithmetic, graphs
        self._lossless = Lossless(layout)
        self._kvtc = lru_cache(maxsize=_CODERS)(self._make_kvtc)
        self._kvtc2 = lru_cache(maxsize=_CODERS)(self._make_kvtc2)
        self._rival = lru_cache(self._make_rival)

    def check(self, blob: Blob) -> None:
        """Compare a blob with its layout and profile; see `BlobDecoder`.

        Raises:
            UnknownProfile: the blob's profile is not to be had.
            ProfileMismatch: the blob's profile is of another model.
        """
        self._of(blob.header).check(blob)

    def synthesize(self, symbols: Symbols, out: Tensor) -> None:
        """Decode a block; see `BlobDecoder`."""
        self._of(symbols.header).synthesize(symbols, out)

    def parts(self, symbols: Symbols, out: Tensor, nbytes: int) -> Iterator[Sequence[slice]]:
        """Decode a block a few layers at a time; see `BlobDecoder`."""
        yield from self._of(symbols.header).parts(symbols, out, nbytes)

    def inflate(self, blob: Blob, scratch: Scratch) -> Symbols:
        """Check a blob and read its symbols; see `BlobDecoder`."""
        return self._of(blob.header).inflate(blob, scratch)

    def _of(self, header: Header) -> BlobDecoder:
        """The decoder of one codec and profile."""
        match header.codec:
            case CodecId.LOSSLESS:
                return self._lossless
            case CodecId.KVTC:
                return self._kvtc(self._lookup(header.profile))
            case CodecId.KVTC2:
                return self._kvtc2(self._lookup(header.profile))
            case CodecId.RAW:
                raise BadField("blob", "a raw block has no blob")
            case rival:
                return self._rival(rival, header.profile if header.basis is not BasisId.NONE else None)

    def _make_rival(self, codec: CodecId, profile: bytes | None) -> RivalDecoder:
        found = self._lookup(profile) if profile else None
        return RivalDecoder(self._layout, self._rope, codec, found, self._device)

    def _make_kvtc(self, profile: Profile) -> Coder:
        return Coder(self._layout, self._rope, profile, self._device, graphs=self._graphs)

    def _make_kvtc2(self, profile: Profile) -> Stepped:
        return Stepped(
            self._layout, self._rope, profile, self._device,
            arithmetic=self._arithmetic, graphs=self._graphs,
        )  # fmt: skip


def codec_for(
    identity: Identity,
    choice: CodecChoice,
    profiles: ProfileFolder,
    accelerator: Accelerator | None = None,
) -> NamespaceCodec:
    """Return the codec of a namespace; `lossless`, with the reason, where its policy's cannot be had.

    Args:
        identity: the namespace.
        choice: of its policy.
        profiles: those there are.
        accelerator: what does the work, if it has memory for what a codec keeps there; None: a CPU.
    """
    make = partial(_codec_for, identity, choice, profiles)
    return attempted(accelerator, lambda: make(accelerator), make) if accelerator else make()


def _codec_for(
    identity: Identity,
    choice: CodecChoice,
    profiles: ProfileFolder,
    accelerator: Accelerator | None = None,
) -> NamespaceCodec:
    layout, rope, pages = identity.layout, identity.rope, page_map(identity)
    device = accelerator.device if accelerator else torch.device("cpu")
    arithmetic = accelerator.arithmetic if accelerator else None
    graphs = accelerator.graphs if accelerator else None
    on_cpu = cache(partial(_codec_for, identity, choice, profiles))

    def codec(
        encoder: Encoder, name: str, reason: str | None = None, profile: Profile | None = None,
        choice: CodecChoice = choice,
    ) -> NamespaceCodec:  # fmt: skip
        decoder: BlobDecoder = Decoder(layout, rope, profiles.get, device, arithmetic, graphs=graphs)
        watched = None
        if profile:
            encoder = watched = Watched(
                encoder, layout, rope, profile, sinks=choice.sinks, on_drift=choice.on_drift, device=device
            )
        if pages:
            encoder, decoder = PagedEncoder(encoder, pages), PagedDecoder(decoder, pages)
        if accelerator:
            encoder = StagedEncoder(encoder, accelerator, lambda: on_cpu().encoder)
            decoder = StagedDecoder(decoder, accelerator, lambda: on_cpu().decoder)
        return NamespaceCodec(
            encoder, decoder, name, reason,
            profile=profile.digest.hex() if profile else None,
            expected_kl=expected_kl(profile, choice) if profile else None,
            watched=watched, device=accelerator.name if accelerator else "cpu",
            on_cpu=on_cpu if accelerator else None, foreign=accelerator.foreign if accelerator else None,
        )  # fmt: skip

    def losslessly(reason: str | None = None) -> NamespaceCodec:
        return codec(Lossless(layout), _LOSSLESS, reason)

    if choice.name == _LOSSLESS:
        return losslessly()
    if identity.page_format != "canonical" and pages is None:
        return losslessly(f"page format {identity.page_format} has no map to the canonical one")
    profile = profiles.find(identity) if DIALS[choice.name].calibrated else None
    if profile is None and DIALS[choice.name].calibrated:
        return losslessly(
            "no profile in the profiles folder is for this model, whole and named by its digest; "
            "run `kvtcd calibrate`"
        )
    told = ""
    if choice.name == "auto" and profile:
        chosen = choice_for(profile.choices, choice)
        if isinstance(chosen, str):
            return losslessly(f"profile {profile.digest.hex()} {chosen}")
        told, choice = f" (auto {choice.dial})", chosen.resolve(choice)
        profile = profile if DIALS[choice.name].calibrated else None
    encoder: Encoder | str = Lossless(layout)
    if choice.name != _LOSSLESS:
        encoder = encoder_for(identity, profile, choice, device, arithmetic, graphs=graphs)
    if isinstance(encoder, str):
        return losslessly(encoder)
    return codec(encoder, f"{choice.name} {choice.dial}".rstrip() + told, profile=profile, choice=choice)


def bound(raw_bytes: int) -> int:
    """Return the largest blob that any codec makes of so many raw bytes.

    Chunks that do not shrink are stored as they are, with four bytes of table for each 16 KiB.
    """
    return raw_bytes + raw_bytes // 1024 + _TABLES
