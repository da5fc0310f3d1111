"""Live blocks held against calibration: what raises it, what does not, and what is done then."""

import numpy as np
import pytest
import torch
from support.codec_world import World, kv

from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.watch import BLOCKS, EVERY, ROWS, Window, first_components
from kvtcd.config import load_policy
from kvtcd.core.blob import CodecId, parse
from kvtcd.core.drift import TURNS
from kvtcd.core.errors import Drifted
from kvtcd.core.policy import CodecChoice

WORLD = World(kv())
OTHER = World(kv(), latent=40, noise=0.4)
"""Another model of the same shape, as far as a basis can tell: other directions, and more of them."""
TOKENS = 32
A_VERDICT = EVERY * BLOCKS * TURNS
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles")
    store(WORLD.profile()[1], path)
    return ProfileFolder(path)


@pytest.fixture(params=["kvtc2", "kvtc", "sq"])
def choice(request):
    return {
        "kvtc2": CodecChoice("kvtc2", 12, window=0),
        "kvtc": CodecChoice("kvtc", 4, window=0),
        "sq": CodecChoice("sq", None, bits=3, window=0),
    }[request.param]


def pack(codec, raw, first_token=64):
    return codec.analyze(
        raw.numpy(), tokens=TOKENS, first_token=first_token, after=0, scratch=HeapScratch()
    ).deflate()


def feed(codec, world, count, seed=0):
    return [pack(codec, world.block(TOKENS, seed + n, 64)) for n in range(count)]


def with_policy(tmp_path, on_drift):
    """Read what to do from a policy file, as a daemon does."""
    file = tmp_path / "p.toml"
    file.write_text(f'[codec]\nname = "kvtc2"\nratio = 12\nwindow = 0\n[quality]\non_drift = "{on_drift}"\n')
    found = load_policy(file).codec
    assert found == CodecChoice("kvtc2", 12, window=0, on_drift=on_drift)
    return found


def test_figures_are_those_of_plain_arithmetic():
    profile = WORLD.profile()[0].streams["k"]
    rows = WORLD.rows(300, 5)["k"] * 1.1
    window = Window(profile, CPU)
    for part in rows.split(70):
        window.add(window.sums(part))
    found = window.reading()
    x = (rows - profile.mean).double().numpy()
    energy = (x**2).sum() / len(x)
    promised = 1 - np.cumsum(profile.spectrum.double().numpy()) / profile.total
    rank = next((n for n, share in enumerate(promised) if share <= 0.1), len(promised) - 1) + 1
    assert rank == first_components(profile.spectrum, profile.total)
    kept = ((x @ profile.basis[:rank].double().numpy().T) ** 2).sum() / len(x)
    own = x - x.mean(axis=0)
    kurtosis = np.sort((own**4).mean(axis=0) / (own**2).mean(axis=0) ** 2)
    assert found.energy == pytest.approx(energy / profile.total, rel=1e-4)
    assert found.missed == pytest.approx((1 - kept / energy) / promised[rank - 1], rel=1e-3)
    assert found.kurtosis == pytest.approx(kurtosis[(len(kurtosis) - 1) // 2], rel=1e-3)


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_features_that_do_not_vary_have_no_tails(share):
    profile = WORLD.profile()[0].streams["k"]
    rows = WORLD.rows(300, 5)["k"]
    still = int(share * rows.shape[1])
    rows[:, :still] = 3.1
    window = Window(profile, CPU)
    for part in rows.split(70):
        window.add(window.sums(part))
    own = rows[:, still:].double().numpy()
    own -= own.mean(axis=0)
    kurtosis = np.sort((own**4).mean(axis=0) / (own**2).mean(axis=0) ** 2)
    found = window.reading()
    assert found.kurtosis == pytest.approx(
        kurtosis[(len(kurtosis) - 1) // 2] if len(kurtosis) else 0, rel=1e-3
    )
    assert "tails" not in " ".join(found.faults)


def test_blocks_like_those_of_calibration_are_usual(folder, choice):
    codec = codec_for(WORLD.identity, choice, folder)
    assert (codec.drift.state, codec.drift.blocks) == ("unknown", 0)
    feed(codec, WORLD, 2 * A_VERDICT)
    assert (codec.drift.state, codec.drift.why) == ("usual", "")
    assert set(codec.drift.streams) == {"k", "v"}


def test_a_bounded_share_of_blocks_and_rows_is_looked_at(folder, monkeypatch):
    seen = []
    add = Window.add
    monkeypatch.setattr(Window, "add", lambda self, rows: (seen.append(len(rows)), add(self, rows)))
    codec = codec_for(WORLD.identity, CodecChoice("kvtc2", 12, window=0), folder)
    feed(codec, WORLD, 5 * EVERY)
    assert codec.drift.blocks == 5
    assert len(seen) == 5 * 2
    assert max(seen) <= ROWS


def test_a_long_block_is_looked_at_from_end_to_end(folder, monkeypatch):
    """So many rows as there may be, each with the RoPE of its own position undone."""
    seen = []
    sums = Window.sums
    monkeypatch.setattr(Window, "sums", lambda self, rows: seen.append(rows) or sums(self, rows))
    codec = codec_for(WORLD.identity, CodecChoice("kvtc2", 12, window=0), folder)
    raw = WORLD.block(300, 3, 0)
    codec.analyze(raw.numpy(), tokens=300, first_token=0, after=0, scratch=HeapScratch())
    want = WORLD.rows(300, 3)["k"][4:300:5]
    assert len(seen[0]) == len(want) <= ROWS
    assert torch.allclose(seen[0], want, atol=0.1)


def test_blocks_of_another_kind_raise_it_after_more_than_one_window(folder, choice):
    codec = codec_for(WORLD.identity, choice, folder)
    feed(codec, OTHER, EVERY * BLOCKS)
    assert codec.drift.state == "unknown"
    feed(codec, OTHER, A_VERDICT)
    assert codec.drift.state == "drifting"
    assert "outside of the basis" in codec.drift.why
    feed(codec, WORLD, A_VERDICT + EVERY * BLOCKS)
    assert codec.drift.state == "usual"


@pytest.mark.parametrize("fault", ["keys three times as large", "RoPE of other positions", "fat tails"])
def test_faults_raise_it(folder, fault):
    codec = codec_for(WORLD.identity, CodecChoice("kvtc", 4, window=0), folder)
    torch.manual_seed(0)
    for n in range(A_VERDICT):
        raw = WORLD.block(TOKENS, n, 64)
        values = raw.view(torch.bfloat16)
        keys = values[: len(values) // 2]
        first_token = 64
        if fault.startswith("keys"):
            keys *= 3
        elif fault.startswith("RoPE"):
            first_token = 64 + 37
        else:
            drawn = torch.distributions.StudentT(2.1).sample(keys.shape)
            keys += 2.0 * drawn.to(torch.bfloat16)
        pack(codec, raw, first_token)
    assert codec.drift.state == "drifting"
    assert codec.drift.why.startswith("k: ")
    assert "v: " not in codec.drift.why
    assert ("kurtosis" in codec.drift.why) is (fault == "fat tails")


def test_what_is_not_finite_is_no_drift(folder):
    codec = codec_for(WORLD.identity, CodecChoice("kvtc2", 12, window=0), folder)
    for n in range(A_VERDICT):
        raw = WORLD.block(TOKENS, n, 64)
        raw.view(torch.bfloat16)[5] = float("nan")
        pack(codec, raw)
    assert codec.drift.state == "usual"
    assert all(np.isfinite(reading.missed) for reading in codec.drift.streams.values())


def test_the_policy_may_have_them_packed_as_ever(folder, tmp_path):
    codec = codec_for(WORLD.identity, with_policy(tmp_path, "warn"), folder)
    feed(codec, OTHER, A_VERDICT)
    assert codec.drift.state == "drifting"
    assert all(packed.reason != "drift" for packed in feed(codec, OTHER, 3, seed=500))


def test_the_policy_may_have_them_packed_losslessly(folder, tmp_path):
    codec = codec_for(WORLD.identity, with_policy(tmp_path, "lossless"), folder)
    assert not any(packed.reason == "drift" for packed in feed(codec, OTHER, A_VERDICT - EVERY))
    feed(codec, OTHER, EVERY)
    raw = WORLD.block(TOKENS, 900, 64)
    packed = pack(codec, raw)
    assert (packed.codec, packed.reason) == (CodecId.LOSSLESS, "drift")
    out = np.zeros(raw.numel(), np.uint8)
    codec.inflate(parse(memoryview(packed.blob)), HeapScratch()).synthesize(out)
    assert (out == raw.numpy()).all()
    later = feed(codec, WORLD, A_VERDICT + EVERY * BLOCKS)
    assert later[-1].codec is CodecId.KVTC2, "blocks are looked at all the while, so that it ends"


def test_the_policy_may_refuse_them(folder, tmp_path):
    codec = codec_for(WORLD.identity, with_policy(tmp_path, "refuse"), folder)
    with pytest.raises(Drifted, match=r"outside of the basis.*on_drift"):
        feed(codec, OTHER, A_VERDICT)
    for n in range(A_VERDICT + EVERY * BLOCKS):
        try:
            last = pack(codec, WORLD.block(TOKENS, n, 64))
        except Drifted:
            last = None
    assert last is not None, "blocks are looked at all the while, so that it ends"


def test_what_needs_no_profile_has_nothing_to_drift_from(folder):
    assert codec_for(WORLD.identity, CodecChoice("tq", None, bits=3), folder).drift is None
    assert codec_for(WORLD.identity, CodecChoice("lossless"), folder).drift is None


def test_blocks_of_unknown_position_are_not_looked_at(folder):
    codec = codec_for(WORLD.identity, CodecChoice("kvtc2", 12, window=0), folder)
    for n in range(A_VERDICT):
        pack(codec, OTHER.block(TOKENS, n, 64), first_token=None)
    assert codec.drift.blocks == 0
