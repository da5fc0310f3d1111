"""Between raw blocks and coefficients: RoPE undone, mean removed, principal components taken, and back.

A stream's view ``[L, T, H, D]`` of a raw block becomes rows of ``p = L*H*D`` features per token, in that
order, so one basis spans all layers and heads (paper section 3.1). Layers are gathered and scattered a few at
a time, to stay in cache; products are of all layers at once, which is a few percent faster than by layer.

Products run in bfloat16 where the hardware multiplies it (twice the speed of float32 on AVX-512 BF16, more on
AMX and tensor cores), with sums in float32, which a GPU gives out as coefficients. Its rounding, 55 dB below
the signal, is far under the quantiser's; the mean, which in some models is ten times the signal, is removed
in float32 before and added after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvtcd.codec.rope import Rotation
from kvtcd.codec.stages import stage
from kvtcd.core.layout import Dtype, Layout

_TORCH_DTYPE = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
_CACHED = 1 << 19
"""Elements handled at a time on a CPU: 2 MB of float32, which stay in cache. On a GPU all at once."""
_SPOT = 64
"""Components whose orthonormality is tested."""
_NATIVE = (8, 0)
"""Compute capability from which a GPU multiplies bfloat16."""
_ORTHONORMAL = 0.02
"""Deviation that float16 entries may cause, with room to spare."""


def views(raw: Tensor, layout: Layout, tokens: int) -> tuple[Tensor, ...]:
    """Return the streams of a raw block.

    Args:
        raw: flat uint8 of ``layout.nbytes(tokens)`` bytes, its start aligned for the element type.
        layout: what the bytes mean.
        tokens: of the block.

    Returns:
        One view ``[L, T, H, D]`` per stream, of the layout's dtype.
    """
    return tuple(
        raw[offset : offset + nbytes]
        .view(_TORCH_DTYPE[layout.dtype])
        .view(layout.layers, tokens, stream.heads, stream.head_dim)
        for stream, offset, nbytes in layout.spans(tokens)
    )


def rows(view: Tensor, rotation: Rotation | None) -> Tensor:
    """Return a stream ``[L, T, H, D]`` as what a basis is fitted to: float32 rows ``[T, p]``, RoPE undone."""
    plain = view.to(torch.float32) if rotation is None else rotation(view)
    return plain.transpose(0, 1).reshape(view.shape[1], -1)


class Transform:
    """The affine map of one stream between features and coefficients.

    Args:
        mean: ``[p]``.
        encode: ``[r, p]``; a coefficient is a row times the features about their mean.
        decode: ``[r, p]``; what a coefficient adds to the features. The very same tensor for an orthonormal
            basis, whose rows are its components.
        layers: ``L``.
        device: where the products run.
    """

    def __init__(
        self, mean: Tensor, encode: Tensor, decode: Tensor, layers: int, device: torch.device | str = "cpu"
    ) -> None:
        dtype = product_dtype(torch.device(device))
        self._mean = mean.to(device, torch.float32).view(layers, 1, -1)
        self._encode = encode.to(device, dtype)
        # By columns of [r, p], which is up to 8 % faster to multiply with, unless it is there by rows anyway.
        self._decode = self._encode.t() if decode is encode else decode.to(device, dtype).t().contiguous()

    @staticmethod
    def nbytes(rank: int, features: int, *, orthonormal: bool, device: torch.device) -> int:
        """Return the bytes that a transform of these sizes takes on a device."""
        bases = 1 if orthonormal else 2
        return features * (bases * rank * product_dtype(device).itemsize + torch.float32.itemsize)

    def in_use(self) -> None:
        """Let its memory be reused only behind what the current stream of its device has been told so far."""
        if self._mean.is_cuda:
            for tensor in (self._mean, self._encode, self._decode):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def centred(self, view: Tensor, rotation: Rotation | None) -> Tensor:
        """Return the features of every token about their mean, ``[T, p]`` of the products' element type.

        Args:
            view: ``[L, T, H, D]`` of any float dtype.
            rotation: undoes RoPE; None for a stream without.
        """
        layers, tokens = view.shape[:2]
        centred = torch.empty((tokens, self._encode.shape[1]), dtype=self._encode.dtype, device=view.device)
        by_layer = centred.view(tokens, layers, -1).transpose(0, 1)
        with stage("rotate"):
            for part in layer_blocks(view):
                plain = view[part] if rotation is None else rotation(view[part])
                by_layer[part] = plain.flatten(2) - self._mean[part]  # in float32, as the mean is
        return centred

    def forward(self, centred: Tensor, rank: int, further: Tensor | None = None) -> Tensor:
        """Return the first `rank` coefficients of every token, float32 ``[rank, T]``.

        Args:
            centred: features about their mean.
            rank: at most r.
            further: other rows ``[s, p]`` whose products are wanted too, behind the coefficients.
        """
        with stage("product"):
            # On a CPU up to 8 % faster than the product the other way round, and a few rows a third slower.
            products = _product(centred, self._encode[:rank].t()).t().contiguous()
            if further is not None:
                products = torch.cat((products, _product(further, centred.t())))
            return products.to(torch.float32)

    def inverse(self, coefficients: Tensor, rotation: Rotation | None, out: Tensor) -> None:
        """Write what `features` yields into the view `out`, ``[L, T, H, D]``, of any float dtype."""
        parts = layer_blocks(out)
        found = self.features(coefficients, rotation, out.shape, out.dtype, parts)
        for part, values in zip(parts, found, strict=True):
            out[part] = values

    def features(
        self, coefficients: Tensor, rotation: Rotation | None, shape: Sequence[int], dtype: torch.dtype,
        parts: Sequence[slice],
    ) -> Iterator[Tensor]:  # fmt: skip
        """Yield what float32 coefficients ``[rank, T]`` stand for.

        Args:
            coefficients: later ones are zero.
            rotation: applies RoPE; None for a stream without.
            shape: ``L, T, H, D``.
            dtype: that they are wanted for. Values beyond float16 are clamped to its range.
            parts: layers, a few at a time.

        Yields:
            Float32 ``[layers of the part, T, H, D]``.
        """
        layers, tokens, heads, head_dim = shape
        with stage("product"):
            by_token = coefficients.to(self._decode.dtype).t().contiguous()
            product = torch.mm(by_token, self._decode[:, : len(coefficients)].t())
        by_layer = product.view(tokens, layers, -1).transpose(0, 1)
        for part in parts:
            with stage("rotate"):
                plain = by_layer[part].to(torch.float32).add_(self._mean[part])
                values = plain.view(-1, tokens, heads, head_dim)
                if rotation is not None:
                    values = rotation(values)
                if dtype == torch.float16:
                    limit = torch.finfo(torch.float16).max
                    values = values.clamp(-limit, limit)
            yield values


def orthonormal(basis: Tensor) -> bool:
    """Tell whether rows ``[r, p]`` are orthonormal, by some of them."""
    rank = len(basis)
    rows = torch.linspace(0, max(rank - 1, 0), min(rank, _SPOT)).to(torch.int64)
    some = basis[rows].to(torch.float32)
    return not rank or bool((some @ some.t() - torch.eye(len(some))).abs().max() <= _ORTHONORMAL)


def product_dtype(device: torch.device) -> torch.dtype:
    """Element type of the matrix products on a device: bfloat16 where it is native."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= _NATIVE else torch.float32
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - torch has no public name for it
    return torch.bfloat16 if native else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return a product; of bfloat16 on CUDA in the float32 it was summed up in, which a CPU does not give."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right)


def layer_blocks(view: Tensor) -> list[slice]:
    """Return the layers of a view ``[L, T, H, D]``, as many at a time as the device of its tensor likes."""
    layers = len(view)
    at_once = layers if view.device.type != "cpu" else max(1, _CACHED // view[0].numel())
    return [slice(first, min(layers, first + at_once)) for first in range(0, layers, at_once)]
