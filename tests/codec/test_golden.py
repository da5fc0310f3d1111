"""Blobs and profiles that were written once and must be read for ever. `golden/make.py` wrote them."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.codec_reference import coded_tokens, content
from support.codec_world import YARN, World, kv, mla
from support.kvtc2_reference import runs
from support.memory import bounded_memory
from support.mutations import damaged
from support.resealed import resealed

from kvtcd.codec.choose import Decoder
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.core.blob import BasisId, CodecId, Kind, parse
from kvtcd.core.errors import BlockMismatch, Corrupt, ProfileMismatch, UnknownProfile
from kvtcd.core.layout import Dtype

GOLDEN = Path(__file__).parent / "golden"
WORLDS = {
    "kv-float32": World(kv(Dtype.F32, layers=2)),
    "kv-bfloat16": World(kv(Dtype.BF16, layers=2)),
    "kv-float16": World(kv(Dtype.F16, layers=2)),
    "mla-yarn-bfloat16": World(mla(Dtype.BF16), YARN),
}
FOLDER = ProfileFolder(GOLDEN)
CODES = {
    "kvtc-1-kv-bfloat16": "b0bca9deb598bdfb6655bb3c3ac7737589a5fc93eb7cfe4f90a47ab6d0b2adbc",
    "kvtc-1-mla-yarn-bfloat16": "21db685a2d56054505169a0ae7d0424d3de3ddaaa8c6ef9b66c5c7211c80150d",
    "kvtc-1-kv-float32": "8c91692dbcf41eb7ae84b100e1f0a54927da824451c8b0299a64344c61b30091",
}
"""SHA-256 of all codes and ranges in order, which every device must decode alike."""
STEPPED = {
    "kvtc2-1-kv-bfloat16": "176a5d75878f1ecef90cba1d9c028fdd9810dcdb125effa5487beba4b6b2b1b6",
    "kvtc2-1-mla-yarn-bfloat16": "15e7269d729d66c21c8cb788dd34efb4d0caafcace3e554cfe8c9fe26484c2e8",
    "kvtc2-1-kv-float32": "f33d1ee969202da8b3334ee343c1a63779ec66ab08a1362d629254b545cd2611",
}
"""SHA-256 of all classes, codes and escapes in order."""
RIVALS = {
    "tq-1-1-kv-bfloat16": "74cdb50c6734e308017f455649bdd0dee95258cfdc34ead7048b88028be9b866",
    "tq-3-mean-norm-1-kv-bfloat16": "431e204c0be2fbd95dbc1073d23ac46ea670c5c10db2b48fb7891e34823d08ba",
    "tq-4-haar-unbiased-1-kv-bfloat16": "a67eb62aca6811a4eae98ee3a923b094e43a4d0227d15808b3995df1f3cca9c8",
    "tq-prod-3-1-kv-bfloat16": "ea1ad4fca8ba1b8a5ed9a982eabcb75a08d85a455e77c57cb376e7046b651a73",
    "tq-prod-1-1-kv-bfloat16": "44a4b73d492643b6ab94c17657e4d625300eebbe146f89567e0d4e301d417459",
    "qjl-2-1-kv-bfloat16": "9935cc4fe59a5e5afc2cf791311e951338899cef17195b2ca683f4b03214c579",
    "sq-3-1-kv-bfloat16": "9da680cc258ae25e942fc2647f4e6434649e78fd965119f44d25a5365afe4f8a",
    "sq-3-norm-1-kv-bfloat16": "ff5405a51cdbc803f907e046964eed42dddf957cfac1e72bd98bac2d91415ac0",
    "sq-2-raw-1-kv-bfloat16": "5a3c7650164fa41f7a099d7560b475fe14e4739630da75ac4f0b2d405d87f8a5",
    "kivi-2-1-kv-bfloat16": "45d7fa39020617fb09a1a82160f2ea5b689cee7278364818743442498f6cb3b9",
    "kivi-3-mean-1-kv-bfloat16": "f5767af5f3a38d10010caafef300c33c3beb447875a104714dbc6d8e2181f4c0",
    "gear-2-1-kv-bfloat16": "c21715006a8997082304d3cfb490ccd7900c2b967cacee21f17d23a3a1390620",
    "xkv-2-1-kv-bfloat16": "5fff1ba0c11eb95f95bbaf0a76b65228786ef6abd805c17decccd2095aa0fd43",
    "cachegen-1-1-kv-bfloat16": "0401915fc86a7d5340ceafda1c816b859e3f49e6a158e840779d2f69900bd1b8",
    "cachegen-1-delta-1-kv-bfloat16": "6f1fbfd99bfc8f741fedccd7e67c6510005c5b6d8030bfc4bb805f796f2319c6",
    "fp8-1-kv-bfloat16": "3d51a2eb65c87691c666efa7643851799997dcd50082e3a2b558c7fba168c9d0",
}
"""SHA-256 of all arrays in order. The name says what the codec was told."""


def read(name):
    world = next(world for suffix, world in WORLDS.items() if name.endswith(f"-1-{suffix}"))
    blob = parse(memoryview((GOLDEN / f"{name}.blob").read_bytes()))
    out = torch.empty(blob.header.raw_bytes, dtype=torch.uint8)
    Decoder(world.layout, world.rope, ProfileFolder(GOLDEN).get).decode(blob, out)
    want = torch.frombuffer(bytearray((GOLDEN / f"{name}.raw").read_bytes()), dtype=torch.uint8)
    return world, blob, out, want


@pytest.mark.parametrize("name", ["lossless-1-kv-float32", "lossless-1-kv-bfloat16", "lossless-1-kv-float16"])
def test_a_lossless_blob_decodes_to_its_bytes(name):
    _, blob, out, want = read(name)
    assert blob.header.codec is CodecId.LOSSLESS
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", CODES)
def test_a_coded_blob_decodes_to_its_codes_and_values(name):
    world, blob, out, want = read(name)
    assert blob.header.codec is CodecId.KVTC
    start, count = coded_tokens(blob)
    assert (start, count) == (4, 28)
    codes = hashlib.sha256()
    for section in blob.sections:
        if section.kind in (Kind.CODES, Kind.RANGES):
            codes.update(content(blob, section.kind, section.stream, section.part, start))
    assert codes.hexdigest() == CODES[name]
    got, expected = world.values(out, 40), world.values(want, 40)
    for stream, values in expected.items():
        assert torch.equal(got[stream][:, :4], values[:, :4])
        assert torch.equal(got[stream][:, 32:], values[:, 32:])
        # Products may round differently on another machine.
        assert (got[stream] - values).abs().max() < 0.02 * values.abs().max()


@pytest.mark.parametrize("name", STEPPED)
def test_a_stepped_blob_decodes_to_its_codes_and_values(name):
    world, blob, out, want = read(name)
    assert (blob.header.codec, blob.header.basis) == (CodecId.KVTC2, BasisId.WEIGHTED)
    assert runs(blob) == [(4, 28), (32, 8)]
    codes = hashlib.sha256()
    for section in blob.sections:
        if section.kind in (Kind.CLASSES, Kind.CODES, Kind.ESCAPES):
            codes.update(content(blob, section.kind, section.stream, section.part, section.token_start))
    assert codes.hexdigest() == STEPPED[name]
    got, expected = world.values(out, 40), world.values(want, 40)
    for stream, values in expected.items():
        assert torch.equal(got[stream][:, :4], values[:, :4])
        # Products may round differently on another machine.
        assert (got[stream] - values).abs().max() < 0.02 * values.abs().max()


@pytest.mark.parametrize("name", RIVALS)
def test_a_blob_of_a_rival_decodes_to_its_arrays_and_values(name):
    world, blob, out, want = read(name)
    assert name.startswith(blob.header.codec.name.lower().replace("_", "-"))
    arrays = hashlib.sha256()
    for section in blob.sections:
        if section.kind is Kind.ARRAY:
            assert (section.token_start, section.token_count) == (4, 28)
            arrays.update(blob.payload(section)[: section.raw_bytes])
    assert arrays.hexdigest() == RIVALS[name]
    got, expected = world.values(out, 40), world.values(want, 40)
    for stream, values in expected.items():
        assert torch.equal(got[stream][:, :4], values[:, :4])
        assert torch.equal(got[stream][:, 32:], values[:, 32:])
        # Products may round differently on another machine.
        assert (got[stream] - values).abs().max() < 0.02 * values.abs().max()


def test_profiles_of_both_formats_are_read():
    folder = ProfileFolder(GOLDEN)
    of = {
        name: folder.get(parse(memoryview((GOLDEN / f"{name}.blob").read_bytes())).header.profile)
        for name in (*CODES, *STEPPED)
    }
    assert all(not of[name].weighted and of[name].origin.sensitivity == "none" for name in CODES)
    assert all(of[name].weighted and len(of[name].origin.curve) == 4 for name in STEPPED)


@pytest.mark.parametrize("world", WORLDS)
@given(st.data())
def test_a_damaged_blob_with_right_checksums_decodes_to_a_block_or_is_refused(world, data):
    """Nothing but the MAC of its record stands between a decoder and such a blob."""
    names = sorted(path for path in GOLDEN.glob(f"*-{world}.blob"))
    content = resealed(data.draw(damaged([path.read_bytes() for path in names])))
    decoder = Decoder(WORLDS[world].layout, WORLDS[world].rope, FOLDER.get)
    with bounded_memory():
        try:
            blob = parse(memoryview(content))
            decoder.check(blob)
            out = torch.empty(blob.header.raw_bytes, dtype=torch.uint8)
            decoder.decode(blob, out)
        except (Corrupt, BlockMismatch, ProfileMismatch, UnknownProfile):
            return

    assert len(out) == WORLDS[world].layout.nbytes(blob.header.tokens)


def test_every_golden_file_is_read_by_a_test():
    names = {path.stem for path in GOLDEN.iterdir() if path.suffix in (".blob", ".raw")}
    assert names == {
        *CODES,
        *STEPPED,
        *RIVALS,
        "lossless-1-kv-float32",
        "lossless-1-kv-bfloat16",
        "lossless-1-kv-float16",
    }
