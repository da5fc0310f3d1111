"""Live checks on SmolLM2-135M: texts of kinds that its profile has seen, one that it has not, and faults."""

from pathlib import Path

import pytest
import torch
from support.codec_world import TORCH_DTYPE
from support.models import real_model

from kvtcd.codec import watch
from kvtcd.codec.choose import codec_for
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.scratch import HeapScratch
from kvtcd.core.policy import CodecChoice
from kvtcd.integrations.transformers_blocks import raw_block
from kvtcd.lab.calibrate import profile_for
from kvtcd.lab.capture import prefill
from kvtcd.lab.models import identity, tokenize

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

TOKENS, BLOCK = 1024, 256
DATA = Path(__file__).parents[1] / "data"
ENCYCLOPEDIA = (DATA / "encyclopedia.txt").read_text("utf-8")
RUSSIAN = (DATA / "russian.txt").read_text("utf-8")
"""In no calibration."""


@pytest.fixture(scope="module")
def world():
    loaded = real_model("smollm2")
    folder = ProfileFolder(Path(profile_for(loaded)).parent)

    def cache(text):
        return prefill(loaded, tokenize(loaded, text)[:TOKENS])

    return identity(loaded), folder, cache


def drift(world, monkeypatch, cache, change=lambda raw: raw):
    """Have every block looked at, and a window of two: four blocks make a verdict."""
    monkeypatch.setattr(watch, "EVERY", 1)
    monkeypatch.setattr(watch, "BLOCKS", 2)
    named, folder, _ = world
    codec = codec_for(named, CodecChoice("kvtc2", 32), folder)
    for first in range(0, TOKENS, BLOCK):
        raw = change(raw_block(cache, first, first + BLOCK, named.layout))
        codec.analyze(raw.numpy(), tokens=BLOCK, first_token=first, after=1024, scratch=HeapScratch())
    return codec.drift


@pytest.mark.parametrize(
    "text", [ENCYCLOPEDIA, Path(watch.__file__).read_text("utf-8") * 2], ids=["encyclopedia", "source"]
)
def test_texts_of_known_kinds_are_usual(world, monkeypatch, text):
    found = drift(world, monkeypatch, world[2](text))
    assert found.state == "usual", found


def test_a_language_that_calibration_had_not_is_seen(world, monkeypatch):
    found = drift(world, monkeypatch, world[2](RUSSIAN * 12))
    assert found.state == "drifting", found
    assert "outside of the basis" in found.why


@pytest.mark.parametrize("fault", ["noise", "scaled"])
def test_faults_of_the_model_are_seen(world, monkeypatch, fault):
    torch.manual_seed(0)

    def change(raw):
        values = raw.clone().view(TORCH_DTYPE[world[0].layout.dtype])
        values += 0.7 * values.std() * torch.randn_like(values) if fault == "noise" else 0.4 * values
        return values.view(torch.uint8)

    found = drift(world, monkeypatch, world[2](ENCYCLOPEDIA), change)
    assert found.state == "drifting", found
