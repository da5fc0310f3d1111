"""Profile files: equal content is equal bytes, and nothing damaged or foreign is accepted."""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from support.codec_world import LLAMA3, World, kv, mla
from support.memory import bounded_memory
from support.mutations import changed, damaged

from kvtcd.codec.dial import Curve, Point
from kvtcd.codec.origin import Origin
from kvtcd.codec.plan import Group, Plan
from kvtcd.codec.profile import Profile, build, load, store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.core.errors import BadField, BadVersion, Corrupt, ProfileMismatch, UnknownProfile
from kvtcd.core.layout import Dtype

WORLD = World(kv())


@pytest.fixture(scope="module")
def made():
    return WORLD.profile()


@pytest.mark.parametrize("world", [WORLD, World(kv(), LLAMA3), World(mla())], ids=["kv", "llama3", "mla"])
def test_a_profile_survives_its_file(world, tmp_path):
    profile, data = world.profile()
    path = store(data, tmp_path)
    assert path.name == hashlib.sha256(data).hexdigest() + ".safetensors"
    again = load(path)
    assert (again.origin, again.digest) == (profile.origin, profile.digest)
    assert again.digest == hashlib.sha256(path.read_bytes()).digest()
    assert again.ratios == (4, 8)
    for name, stream in profile.streams.items():
        for field in ("mean", "basis", "spectrum"):
            assert torch.equal(getattr(again.streams[name], field), getattr(stream, field))
        assert again.streams[name].plans == stream.plans
        assert again.streams[name].total == pytest.approx(stream.total)


def test_equal_content_gives_equal_bytes(made):
    profile, data = made
    assert build(profile.origin, profile.streams, profile.weighted)[1] == data
    shuffled = {
        name: dataclasses.replace(stream, plans=dict(sorted(stream.plans.items(), reverse=True)))
        for name, stream in reversed(profile.streams.items())
    }
    assert build(profile.origin, shuffled, profile.weighted)[1] == data


def test_the_basis_is_trimmed_to_what_the_plans_use(made):
    for stream in made[0].streams.values():
        assert len(stream.basis) == len(stream.spectrum) == max(plan.rank for plan in stream.plans.values())
        assert stream.basis.dtype == torch.float16


def test_the_spectrum_is_the_energy_along_the_basis(made):
    rows = WORLD.rows(600, seed=100)
    for name, stream in made[0].streams.items():
        c = (rows[name] - stream.mean) @ stream.basis.float().t()
        assert torch.allclose(c.var(dim=0, unbiased=False), stream.spectrum, rtol=0.02, atol=1e-3)
        assert stream.total == pytest.approx(float(rows[name].var(dim=0, unbiased=False).sum()), rel=1e-3)


def rewritten(data, change=None, meta=None) -> bytes:
    tensors = read_tensors(data)
    body = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    if change:
        change(tensors)
    if meta:
        fields = json.loads(body["kvtcd"])
        meta(fields)
        body = {"kvtcd": json.dumps(fields)}
    return write_tensors(tensors, body)


def set_(name, value):
    def change(tensors):
        tensors[name] = value(tensors[name])

    return change


def scale_one_row(basis):
    return torch.cat((2 * basis[:1], basis[1:]))


@pytest.mark.parametrize(
    ("change", "meta"),
    [
        (lambda t: t.pop("plain.k.mean"), None),
        (lambda t: t.pop("plain.v.plan.8"), None),
        (lambda t: t.update(extra=torch.zeros(1)), None),
        (set_("plain.k.basis", scale_one_row), None),
        (set_("plain.k.basis", lambda b: b.float()), None),
        (set_("plain.k.basis", lambda b: b[:, :-1].contiguous()), None),
        (set_("plain.k.basis", lambda b: b[:-1].contiguous()), None),
        (set_("plain.v.mean", lambda m: m * float("nan")), None),
        (set_("plain.v.spectrum", lambda s: s * float("inf")), None),
        (set_("plain.v.total", lambda _: torch.zeros(2)), None),
        (set_("plain.k.plan.4", lambda p: p.long()), None),
        (set_("plain.k.plan.4", lambda p: p + 10_000), None),
        (set_("plain.k.plan.4", lambda p: p.flip(0)), None),
        (None, lambda m: m.pop("weights")),
        (None, lambda m: m.update(surprise=1)),
        (None, lambda m: m.update(layers=4)),
        (None, lambda m: m.update(layers="3")),
        (None, lambda m: m.update(seed=True)),
        (None, lambda m: m.update(streams=[])),
        (None, lambda m: m.update(texts=[{"name": "x"}])),
        (None, lambda m: m["rope"].update(kind="longrope")),
        (None, lambda m: m.update(curve=3)),
        (None, lambda m: m.update(curve=[{"ratio": 4, "kl": "0.01"}])),
    ],
)
def test_a_profile_with_anything_out_of_place_is_refused(made, tmp_path, change, meta):
    path = tmp_path / "p.safetensors"
    path.write_bytes(rewritten(made[1], change, meta))
    with pytest.raises(BadField):
        load(path)


def test_the_helper_changes_nothing_by_itself(made, tmp_path):
    path = tmp_path / "p.safetensors"
    path.write_bytes(rewritten(made[1], lambda _: None, lambda _: None))
    assert load(path).origin == made[0].origin


def test_a_later_format_is_refused_as_such(made, tmp_path):
    path = tmp_path / "p.safetensors"
    path.write_bytes(rewritten(made[1], meta=lambda m: m.update(format=4)))
    with pytest.raises(BadVersion, match="format 4"):
        load(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d[:0],
        lambda d: d[:7],
        lambda d: d[:-1],
        lambda d: d[: len(d) // 2],
        lambda d: d + b"\0",
        lambda d: (1 << 40).to_bytes(8, "little") + d[8:],
        lambda d: (1 << 20).to_bytes(8, "little") + d[8:],
        lambda d: b"\x80\x02" + d,
        lambda d: d[:8] + b"[" + d[9:],
    ],
)
def test_a_damaged_file_is_refused(made, tmp_path, damage):
    path = tmp_path / "p.safetensors"
    path.write_bytes(damage(made[1]))
    with pytest.raises(Corrupt):
        load(path)


GOLDEN = [path.read_bytes() for path in sorted((Path(__file__).parent / "golden").glob("*.safetensors"))]


def loaded_or_refused(data: bytes) -> Profile | None:
    """Load a profile; what is refused names its file."""
    with tempfile.TemporaryDirectory() as folder, bounded_memory():
        path = Path(folder) / "p.safetensors"
        path.write_bytes(data)
        try:
            profile = load(path)
        except Corrupt as fault:
            assert fault.what == "profile p.safetensors"  # noqa: PT017 - there may be none
            return None
    assert [stream.name for stream in profile.origin.streams] == list(profile.streams)
    assert profile.ratios
    return profile


@given(damaged(GOLDEN))
def test_a_changed_file_is_loaded_or_refused(data):
    loaded_or_refused(data)


@given(st.data())
def test_a_file_whose_header_says_something_else_is_loaded_or_refused(data):
    original = data.draw(st.sampled_from(GOLDEN))
    length = int.from_bytes(original[:8], "little")
    head = json.loads(original[8 : 8 + length])
    if data.draw(st.booleans()):
        head["__metadata__"]["kvtcd"] = json.dumps(
            data.draw(changed(json.loads(head["__metadata__"]["kvtcd"])))
        )
    else:
        head = data.draw(changed(head))
    text = json.dumps(head).encode()
    loaded_or_refused(len(text).to_bytes(8, "little") + text + original[8 + length :])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "9" * 5_000,
        '{"format": NaN}',
        '{"format": 1, "format": 2}',
        '{"curve": [' + "9" * 400 + "]}",
    ],
    ids=["deep", "digits", "NaN", "twice", "beyond floats"],
)
def test_metadata_that_json_cannot_hold_is_refused(made, text):
    tensors = read_tensors(made[1])
    assert loaded_or_refused(write_tensors(tensors, {"kvtcd": text})) is None


def test_a_header_out_of_proportion_is_refused(made, tmp_path):
    path = tmp_path / "p.safetensors"
    path.write_bytes(rewritten(made[1], meta=lambda m: m.update(model="x" * (1 << 20))))
    with pytest.raises(BadField, match="header claims"):
        load(path)


def test_a_file_that_is_not_what_its_name_says_is_refused(made, tmp_path):
    path = store(made[1], tmp_path)
    data = bytearray(made[1])
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="copy it again"):
        load(path)


def test_nothing_is_built_from_contradictions(made):
    profile = made[0]
    k = profile.streams["k"]
    with pytest.raises(BadField, match="same plans"):
        build(profile.origin, {**profile.streams, "k": dataclasses.replace(k, plans={4: k.plans[4]})}, {})
    with pytest.raises(BadField, match="same plans"):
        build(profile.origin, {"k": k}, {})
    beyond = {ratio: Plan((Group(len(k.basis), 1, 2),)) for ratio in k.plans}
    with pytest.raises(BadField, match="needs more"):
        build(profile.origin, {**profile.streams, "k": dataclasses.replace(k, plans=beyond)}, {})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("weights digest", lambda i: dataclasses.replace(i, weights="11" * 32)),
        ("adapter digest", lambda i: dataclasses.replace(i, adapter="22" * 32)),
        ("rope", lambda i: dataclasses.replace(i, rope=dataclasses.replace(i.rope, theta=500.0))),
        ("streams", lambda i: dataclasses.replace(i, layout=mla())),
        ("layers", lambda i: dataclasses.replace(i, layout=kv(layers=4))),
        ("parallel part", lambda i: dataclasses.replace(i, parallel="tp2-rank1")),
        ("scales", lambda i: dataclasses.replace(i, scales="fp8-per-head")),
    ],
)
def test_a_profile_of_another_model_is_refused_and_the_error_names_the_difference(made, field, change):
    made[0].check(WORLD.identity)
    with pytest.raises(ProfileMismatch, match=field):
        made[0].check(change(WORLD.identity))


@pytest.mark.parametrize("dtype", Dtype)
def test_one_profile_serves_every_element_type(made, dtype):
    made[0].check(World(kv(dtype)).identity)


def test_a_curve_is_kept(made, tmp_path):
    points = [Point(step, 4 * step, 0.01, step, step, step, 0.9) for step in (1.0, 2.0)]
    curve = Curve(tuple(points), floor=0.001)
    origin = dataclasses.replace(made[0].origin, curve=tuple(curve.to_json()))
    assert load(store(build(origin, made[0].streams, made[0].weighted)[1], tmp_path)).origin == origin


def test_origin_survives_json():
    origin = WORLD.origin
    assert Origin.from_json(json.loads(json.dumps(origin.to_json()))) == origin
    without_rope = dataclasses.replace(origin, rope=None)
    assert Origin.from_json(without_rope.to_json()) == without_rope


def test_a_folder_finds_the_newest_profile_that_fits_and_skips_the_rest(made, tmp_path, caplog):
    other = World(kv(layers=2))
    old, new = store(made[1], tmp_path), store(WORLD.profile(ratios=(4, 8, 16))[1], tmp_path)
    foreign = store(other.profile()[1], tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for age, path in enumerate((foreign, new, old)):
        os.utime(path, (1000 - age, 1000 - age))
    folder = ProfileFolder(tmp_path)
    assert folder.find(WORLD.identity).ratios == (4, 8, 16)
    assert "broken.safetensors is passed over" in caplog.text
    assert folder.find(other.identity).origin.layers == 2
    assert folder.find(World(kv(layers=5)).identity) is None


@pytest.mark.parametrize(("tokens", "warned"), [(8191, True), (8192, False)])
def test_a_profile_of_few_tokens_is_used_with_a_warning(made, tmp_path, caplog, tokens, warned):
    origin = dataclasses.replace(made[0].origin, tokens=tokens)
    store(build(origin, made[0].streams, made[0].weighted)[1], tmp_path)
    assert ProfileFolder(tmp_path).find(WORLD.identity).origin == origin
    assert ("is used, but was fitted to 8,191 tokens, fewer than 8,192" in caplog.text) is warned


def test_a_folder_gives_the_profile_a_blob_names_and_loads_it_once(made, tmp_path):
    folder = ProfileFolder(tmp_path)
    with pytest.raises(UnknownProfile):
        folder.get(made[0].digest)
    store(made[1], tmp_path)
    assert folder.get(made[0].digest) is folder.get(made[0].digest) is folder.find(WORLD.identity)
    assert folder.get(made[0].digest).digest == made[0].digest


def test_a_profile_comes_in_parts_and_is_there_once_it_is_whole(made, tmp_path):
    folder, data = ProfileFolder(tmp_path / "new"), made[1]
    draft = folder.draft(made[0].digest)
    for start in (1000, 0, 2000):
        draft.write(start, memoryview(data)[start : None if start == 2000 else start + 1000])
    with pytest.raises(UnknownProfile):
        folder.get(made[0].digest)
    draft.finish()
    (file,) = (tmp_path / "new").iterdir()

    assert (file.name, file.read_bytes()) == (f"{made[0].digest.hex()}.safetensors", data)
    assert folder.get(made[0].digest).digest == made[0].digest
    assert folder.size(made[0].digest) == len(data)
    assert folder.piece(made[0].digest, 5, 100) == data[5:105]
    with pytest.raises(UnknownProfile):
        folder.piece(made[0].digest, len(data) - 5, 6)
    with pytest.raises(UnknownProfile):
        folder.size(bytes(32))


@pytest.mark.parametrize("what", ["of another digest", "no profile", "given up", "not begun"])
def test_what_is_no_profile_leaves_nothing_in_the_folder(made, tmp_path, what):
    data = b"no profile" if what == "no profile" else made[1]
    digest = bytes(32) if what == "of another digest" else hashlib.sha256(data).digest()
    draft = ProfileFolder(tmp_path).draft(digest)
    if what != "not begun":
        draft.write(0, data)
    if what == "given up":
        draft.discard()
    else:
        with pytest.raises(Corrupt):
            draft.finish()
    draft.discard()

    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_there_is_empty(tmp_path):
    assert ProfileFolder(tmp_path / "none").find(WORLD.identity) is None


def test_a_flipped_bit_is_never_packed_with_whatever_the_file_is_called(made, tmp_path, caplog):
    old, new = store(made[1], tmp_path), store(WORLD.profile(ratios=(4, 8, 16))[1], tmp_path)
    os.utime(old, (1, 1))
    flipped = bytearray(new.read_bytes())
    flipped[-1] ^= 1
    digest = hashlib.sha256(flipped).hexdigest()
    new.unlink()
    for name, why in {
        "new.safetensors": f"call it {digest}.safetensors",
        new.name: f"does not hold what its name says, but {digest}",
    }.items():
        (tmp_path / name).write_bytes(flipped)
        caplog.clear()
        assert ProfileFolder(tmp_path).find(WORLD.identity).digest == made[0].digest
        assert f"{name} is passed over" in caplog.text
        assert why in caplog.text
        (tmp_path / name).unlink()


def test_what_a_profile_has_packed_is_read_whatever_its_file_is_called(made, tmp_path):
    store(made[1], tmp_path).rename(tmp_path / "mine.safetensors")
    newer = store(WORLD.profile(ratios=(4, 8, 16))[1], tmp_path)
    folder = ProfileFolder(tmp_path)
    assert folder.get(made[0].digest).digest == made[0].digest
    (tmp_path / "mine.safetensors").write_bytes(newer.read_bytes())
    with pytest.raises(UnknownProfile):
        ProfileFolder(tmp_path).get(made[0].digest)
