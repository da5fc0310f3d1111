import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.codec.pack import pack, packed_width, unpack


@given(
    bits=st.sampled_from([2, 4, 8]),
    components=st.integers(1, 5),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_unpack_is_the_inverse_of_pack(bits, components, tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (components, tokens), dtype=torch.uint8, generator=draw)
    packed = pack(codes, bits)
    assert packed.shape == (components, packed_width(tokens, bits))
    assert packed.is_contiguous()
    assert torch.equal(unpack(packed, bits, tokens), codes)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("tokens", [1, 7, 16, 252, 256])
def test_byte_j_holds_the_codes_of_tokens_j_and_every_width_after(bits, tokens):
    codes = torch.randint(0, 2**bits, (3, tokens), dtype=torch.uint8)
    width = -(-tokens * bits // 8)
    want = torch.zeros(3, width, dtype=torch.uint8)
    for c in range(3):
        for t in range(tokens):
            want[c, t % width] += int(codes[c, t]) << (bits * (t // width))
    assert torch.equal(pack(codes, bits), want)


def test_packing_leaves_its_input_alone():
    codes = torch.randint(0, 4, (3, 9), dtype=torch.uint8)
    before = codes.clone()
    pack(codes, 2)
    assert torch.equal(codes, before)
