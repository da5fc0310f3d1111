"""Layouts: sizes and spans, against arithmetic by hand."""

from __future__ import annotations

import pytest

from kvtcd.core.errors import BadIdentity
from kvtcd.core.layout import Dtype, Layout, Stream, kv_layout


def test_sizes_of_a_known_model() -> None:
    """SmolLM2-135M: 30 layers of 3 KV heads of 64, 23,040 bytes a token in 16 bits."""
    layout = kv_layout(layers=30, kv_heads=3, head_dim=64, dtype=Dtype.BF16)

    assert layout.features(layout.streams[0]) == 5_760
    assert layout.token_bytes == 23_040
    assert layout.nbytes(256) == 256 * 23_040


def test_streams_of_different_shapes_lie_one_after_the_other() -> None:
    """An MLA layout of 2 layers: latent 512 and rotated keys 64, in float32."""
    layout = Layout((Stream("latent", 1, 512, rope=False), Stream("k_pe", 1, 64, rope=True)), 2, Dtype.F32)

    spans = [(stream.name, offset, nbytes) for stream, offset, nbytes in layout.spans(10)]

    assert spans == [("latent", 0, 40_960), ("k_pe", 40_960, 5_120)]
    assert layout.nbytes(10) == 46_080


@pytest.mark.parametrize("layers", [0, -1, 1 << 21])
def test_impossible_layers_are_refused(layers: int) -> None:
    with pytest.raises(BadIdentity, match="layers"):
        kv_layout(layers=layers, kv_heads=1, head_dim=1, dtype=Dtype.F16)


def test_too_many_streams_are_refused() -> None:
    streams = tuple(Stream(f"s{i}", 1, 1, rope=False) for i in range(9))

    with pytest.raises(BadIdentity, match="9 streams"):
        Layout(streams, 1, Dtype.F16)
