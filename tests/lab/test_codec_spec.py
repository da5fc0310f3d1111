"""Codecs as a command line names them."""

from pathlib import Path

import pytest
from support.codec_world import World, kv

from kvtcd.codec.choose import NamespaceCodec
from kvtcd.codec.lossless import Lossless
from kvtcd.codec.profile import store
from kvtcd.core.blob import CodecId
from kvtcd.core.errors import ConfigError, ProfileMismatch, UnknownProfile
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import codec_source
from kvtcd.lab.codec_source import ProfileSource, open_codecs
from kvtcd.lab.codec_spec import Spec, spelled

WORLD = World(kv())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return store(WORLD.profile()[1], tmp_path)


def open_all(path: Path | None, *codecs: str):
    source = ProfileSource(path, WORLD.identity)
    return open_codecs(WORLD.identity, [Spec.parse(c) for c in codecs], source)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("kvtc:16", Spec("kvtc", 16)),
        ("kvtc2:28.5", Spec("kvtc2", 28.5)),
        ("kvtc2:0.02", Spec("kvtc2", 0.02)),
        ("kvtc2", Spec("kvtc2")),
        ("lossless", Spec("lossless")),
        ("tq:3", Spec("tq", 3)),
        ("tq:3,mean,haar", Spec("tq", 3, ("mean", "haar"))),
        ("tq,mean", Spec("tq", None, ("mean",))),
        ("xkv:4", Spec("xkv", 4)),
        ("cachegen:2,delta", Spec("cachegen", 2, ("delta",))),
        ("fp8", Spec("fp8")),
    ],
)
def test_a_codec_is_a_name_and_perhaps_a_dial(text: str, spec: Spec) -> None:
    assert Spec.parse(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("zip", "not one of kvtc"),
        ("zip:3", "not one of kvtc"),
        ("lossless:2", "has no dial"),
        ("kvtc:", "no number above zero"),
        ("kvtc:0", "no number above zero"),
        ("kvtc2:-0.1", "no number above zero"),
        ("kvtc2:inf", "no number above zero"),
        ("kvtc2:nan", "no number above zero"),
        ("kvtc2:many", "no number above zero"),
        ("kvtc:0.5", "kvtc takes a ratio"),
        ("tq:9", "from 1 to 8"),
        ("tq:2.5", "a whole number"),
        ("tq:0.5", "a whole number"),
        ("tq:3,fast", "does not know 'fast'; it knows mean and haar"),
        ("tq,delta", "does not know 'delta'"),
        ("xkv:0.5", "xkv takes a ratio"),
        ("fp8:8", "has no dial"),
    ],
)
def test_what_is_no_codec_is_said_to_be_none(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Spec.parse(text)


def test_a_spec_is_what_a_policy_says() -> None:
    assert Spec("kvtc", 32.0).choice(sinks=2, window=64) == CodecChoice("kvtc", ratio=32, sinks=2, window=64)
    divergence = CodecChoice("kvtc2", ratio=None, max_kl=0.02)
    assert Spec("kvtc2", 0.02).choice(sinks=4, window=128) == divergence
    assert Spec("lossless").choice(sinks=4, window=128) == CodecChoice("lossless", None)
    assert Spec("tq", 3.0, ("mean",)).choice(sinks=2) == CodecChoice(
        "tq", None, bits=3, sinks=2, options=("mean",)
    )


def test_kvtc_without_a_dial_is_put_at_every_plan_of_the_profile(path: Path) -> None:
    opened = open_all(path, "kvtc", "lossless")
    assert list(opened) == [Spec("kvtc", 4), Spec("kvtc", 8), Spec("lossless")]


def test_a_codec_with_options_is_spelled_as_it_is_read() -> None:
    assert spelled("tq,mean,haar", 3) == "tq:3,mean,haar"
    assert spelled("tq,mean", None) == "tq,mean"
    assert spelled("kvtc2", 28.5) == "kvtc2:28.5"


def test_codecs_of_bits_and_levels_are_put_at_what_they_have() -> None:
    opened = open_all(None, "tq")
    assert [str(spec) for spec in opened] == ["tq:2", "tq:3", "tq:4"]


def test_no_stand_of_a_dial_is_measured_twice(path: Path) -> None:
    assert list(open_all(path, "kvtc:8", "kvtc")) == [Spec("kvtc", 8), Spec("kvtc", 4)]


def test_a_codec_with_a_free_dial_is_swept_around_ratios(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    asked: list[float | None] = []

    def codec_for(identity, choice, _source):
        asked.append(choice.ratio)
        reason = "too far" if (choice.ratio or 0) > 40 else None
        return NamespaceCodec(Lossless(identity.layout), None, choice.name, reason)

    monkeypatch.setattr(codec_source, "codec_for", codec_for)
    opened = open_all(path, "kvtc:16", "kvtc2:0.01", "kvtc2")
    steps = [11, 16, 23, 32, 45, 64, 91, 128]
    assert asked == [16, None, *steps]
    assert [spec.dial for spec in opened] == [16, 0.01, *steps[:4]]
    with pytest.raises(ConfigError, match="kvtc2 is swept around the ratios of others"):
        open_all(path, "kvtc2:0.01", "kvtc2")
    with pytest.raises(ConfigError, match="kvtc2:120 cannot be had: too far"):
        open_all(path, "kvtc2:120")


def test_codecs_are_those_of_a_daemon_with_this_policy(path: Path) -> None:
    opened = open_all(path, "kvtc:8", "lossless")
    encoder = opened[Spec("kvtc", 8)].encoder
    assert opened[Spec("kvtc", 8)].name == "kvtc 8"
    assert isinstance(opened[Spec("lossless")].encoder, Lossless)
    raw = WORLD.block(256, seed=1)
    in_window = encoder.encode(raw, tokens=256, first_token=32, after=0)
    coded = encoder.encode(raw, tokens=256, first_token=32, after=128)
    assert in_window.codec == coded.codec == CodecId.KVTC
    assert len(coded.blob) < 0.7 * len(in_window.blob)  # half of it is in the window of 128


def test_a_codec_that_would_not_be_used_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvtc:7 cannot be had: .* plans for 4, 8, not for 7"):
        open_all(path, "kvtc:4", "kvtc:7")
    with pytest.raises(ConfigError, match="no profile"):
        open_all(None, "kvtc:8")


def test_only_the_given_profile_counts(path: Path, tmp_path: Path) -> None:
    other = World(kv(), noise=0.1).profile()
    store(other[1], tmp_path)  # a newer one of the same model in the same folder
    source = ProfileSource(path, WORLD.identity)
    found = source.find(WORLD.identity)
    assert found is not None
    assert found.digest.hex() == path.stem
    assert source.get(found.digest) is found
    with pytest.raises(UnknownProfile):
        source.get(other[0].digest)


def test_a_profile_of_another_model_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ProfileMismatch):
        ProfileSource(path, World(kv(layers=2)).identity)
    with pytest.raises(ConfigError, match="cannot be read"):
        ProfileSource(tmp_path / "none.safetensors", WORLD.identity)
