"""What `auto` stands for: kept in a profile, read back, and met by a policy."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.choices import CHOICES, chosen_profile
from support.codec_world import World, kv

from kvtcd.codec.choices import Choice
from kvtcd.codec.choose import codec_for
from kvtcd.codec.origin import Origin
from kvtcd.codec.profile import load, store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.config import load_policy
from kvtcd.core.blob import CodecId, parse
from kvtcd.core.errors import BadField, BadVersion, ConfigError
from kvtcd.core.policy import CodecChoice

WORLD = World(kv())
GOLDEN = Path(__file__).parent / "golden"


def folder(path, choices=CHOICES):
    store(chosen_profile(WORLD, choices)[1] if choices else WORLD.profile()[1], path)
    return ProfileFolder(path)


def asked(tmp_path, ratio, more=""):
    """Read it from a policy file, as a daemon does."""
    (tmp_path / "p.toml").write_text(f'[codec]\nname = "auto"\nratio = {ratio}\nwindow = 0\n{more}')
    return load_policy(tmp_path / "p.toml").codec


def test_choices_come_back_as_they_were(tmp_path):
    profile, data = chosen_profile(WORLD)
    assert load(store(data, tmp_path)).choices == profile.choices == CHOICES


def test_a_profile_without_choices_is_written_as_ever():
    body = WORLD.profile()[0].origin.to_json()
    assert body["format"] == 2
    assert "choices" not in body
    assert not WORLD.profile()[0].choices


@pytest.mark.parametrize(
    ("ratio", "name", "codec", "profile"),
    [
        (4, "tq 3 bits mean norm (auto 4)", CodecId.TQ, False),
        (12, "kvtc2 12 (auto 12)", CodecId.KVTC2, True),
        (2, "kivi 4 bits (auto 2)", CodecId.KIVI, False),
    ],
)
def test_a_policy_meets_what_was_chosen(tmp_path, ratio, name, codec, profile):
    made = codec_for(WORLD.identity, asked(tmp_path, ratio), folder(tmp_path))
    assert (made.name, made.reason) == (name, None)
    assert (made.profile is not None) is profile
    assert (made.drift is not None) is profile
    raw = WORLD.block(32, 1, 64)
    packed = made.analyze(raw.numpy(), tokens=32, first_token=64, after=0, scratch=HeapScratch()).deflate()
    assert packed.codec is codec
    out = np.zeros(raw.numel(), np.uint8)
    made.inflate(parse(memoryview(packed.blob)), HeapScratch()).synthesize(out)
    values, want = WORLD.values(torch.from_numpy(out), 32), WORLD.values(raw, 32)
    assert float((values["v"] - want["v"]).norm() / want["v"].norm()) < 0.3


def test_sinks_and_window_and_the_rest_are_those_of_the_policy(tmp_path):
    more = 'sinks = 7\n[quality]\non_drift = "lossless"\n'
    resolved = CHOICES[1].resolve(asked(tmp_path, 12, more))
    assert resolved == CodecChoice("kvtc2", 12, sinks=7, window=0, on_drift="lossless")


@pytest.mark.parametrize(
    ("choices", "ratio", "reason"),
    [
        ((), 4, "has no choice for auto; make one with `kvtcd profile choose`"),
        (CHOICES, 5, "ratios of 4, 12, 2, not 5"),
    ],
)
def test_what_was_not_chosen_is_stored_losslessly_with_the_reason(tmp_path, choices, ratio, reason):
    made = codec_for(WORLD.identity, asked(tmp_path, ratio), folder(tmp_path, choices))
    assert made.name == "lossless"
    assert reason in made.reason


@pytest.mark.parametrize("more", ['name = "auto"', 'name = "auto"\nbits = 3', 'name = "auto"\nmax_kl = 0.1'])
def test_a_policy_has_to_say_a_ratio(tmp_path, more):
    (tmp_path / "p.toml").write_text(f"[codec]\n{more}\n")
    with pytest.raises(ConfigError, match="auto takes a ratio"):
        load_policy(tmp_path / "p.toml")


def test_the_best_of_each_stream_is_told():
    assert CHOICES[0].best_of("k").name == "kvtc 4"
    assert CHOICES[0].best_of("v").name == "tq 3 bits mean norm"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["choices"][0]["candidates"].clear(),
        lambda body: body["choices"][0]["candidates"][0].update(codec="auto"),
        lambda body: body["choices"][0]["candidates"][0].update(codec="zip"),
        lambda body: body["choices"][0]["candidates"][0].update(kl="nan"),
        lambda body: body["choices"][0]["candidates"][0].update(kl=0.1),
        lambda body: body["choices"][0]["candidates"][0].update(options=["strange"]),
        lambda body: body["choices"][0]["candidates"][0].update(dial={"bits": "99"}),
        lambda body: body["choices"][0].pop("ratio"),
        lambda body: body["choices"].append(3),
    ],
)
def test_choices_that_are_none_are_refused(change):
    body = json.loads(json.dumps(chosen_profile(WORLD)[0].origin.to_json()))
    change(body)
    with pytest.raises(BadField, match=r"auto"):
        tuple(map(Choice.from_json, Origin.from_json(body).choices))


def test_choices_belong_to_the_format_that_has_them():
    body = chosen_profile(WORLD)[0].origin.to_json()
    with pytest.raises(BadField, match="format 2"):
        Origin.from_json(body | {"format": 2})
    with pytest.raises(BadVersion, match="1 to 3"):
        Origin.from_json(body | {"format": 4})


def test_the_golden_profile_of_format_3_has_its_choices():
    found = [profile for profile in map(load, GOLDEN.glob("*.safetensors")) if profile.choices]
    assert [profile.choices for profile in found] == [CHOICES]
