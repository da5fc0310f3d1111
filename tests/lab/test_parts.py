"""Ranks of a model: together they hold all of it, and a profile is fitted to each as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.calibration import TEXTS, WINDOW, tiny_model
from support.toy import IDENTITY

from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.core.blob import CodecId
from kvtcd.core.errors import ConfigError
from kvtcd.core.layout import Dtype, kv_layout
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import evaluate, models
from kvtcd.lab.calibration import Calibration, calibrate
from kvtcd.lab.gather import Gathered, Taker, gather
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.parts import Part, parts_of
from kvtcd.lab.phases import Phases
from kvtcd.lab.reading import plan_reading

DIM = IDENTITY.rope.rotary_dim
WHOLE = replace(IDENTITY, layout=kv_layout(layers=5, kv_heads=4, head_dim=DIM, dtype=Dtype.F32))
TOKENS = 3


def raw_block() -> tuple[torch.Tensor, torch.Tensor]:
    """A block whose elements are all different, and its streams as ``[S, L, T, H, D]``."""
    values = torch.arange(2 * 5 * TOKENS * 4 * DIM).float().view(2, 5, TOKENS, 4, DIM)
    return values.flatten().view(torch.uint8), values


@pytest.mark.parametrize(
    ("split", "stages", "layers", "heads"),
    [
        ("tp2", (), [(0, 5), (0, 5)], [(0, 2), (2, 4)]),
        ("tp8", (), [(0, 5)] * 8, [(n // 2, n // 2 + 1) for n in range(8)]),
        ("pp2", (3, 2), [(0, 3), (3, 5)], [(0, 4), (0, 4)]),
        ("pp5-tp2", (), [(n, n + 1) for n in range(5) for _ in "01"], [(0, 2), (2, 4)] * 5),
    ],
)
def test_a_rank_has_its_layers_and_heads_and_nothing_else(split, stages, layers, heads) -> None:
    raw, values = raw_block()
    parts = parts_of(WHOLE, split, stages)
    assert len(parts) == len(layers)
    again = torch.zeros_like(raw)
    for part, (top, bottom), (left, right) in zip(parts, layers, heads, strict=True):
        own = part.take(raw, WHOLE.layout, TOKENS)
        assert len(own) == part.identity.layout.nbytes(TOKENS)
        assert torch.equal(own.view(torch.float32), values[:, top:bottom, :, left:right].flatten())
        part.put(own, again, WHOLE.layout, TOKENS)
    assert torch.equal(again, raw)
    assert len({part.identity.digest for part in parts}) == len(parts)


def test_ranks_are_named_as_engines_name_them() -> None:
    assert [part.identity.parallel for part in parts_of(WHOLE, "tp2")] == ["tp2-rank0", "tp2-rank1"]
    assert parts_of(WHOLE, "pp5-tp2")[3].identity.parallel == "pp5-rank1-tp2-rank1"
    assert Part.whole(WHOLE).identity is WHOLE


@pytest.mark.parametrize(
    ("split", "stages", "why"),
    [
        ("tp3", (), "4 heads of k cannot be dealt out to 3 ranks"),
        ("pp2", (), "5 layers for 2 stages"),
        ("pp2", (4, 2), "5 layers for 2 stages"),
        ("pp2", (5, 0), "5 layers for 2 stages"),
        ("tp2", (5, 5), "5 layers for 1 stages"),
        *((split, (), "is not for instance tp4") for split in ("", "4", "cp2", "tp2-rank0", "tp2-tp2", "tp")),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(split, stages, why) -> None:
    with pytest.raises(ConfigError, match=why):
        parts_of(WHOLE, split, stages)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ranks(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Calibration]:
    identity = models.identity(loaded, Dtype.F32)
    return calibrate(
        loaded, identity, TEXTS, parts=parts_of(identity, "pp2-tp2"), tokens=24 * WINDOW, window=WINDOW,
        checkpoints=tmp_path_factory.mktemp("checkpoints"),
    )  # fmt: skip


def test_moments_of_a_rank_are_those_of_its_features(loaded: LoadedModel) -> None:
    identity = models.identity(loaded, Dtype.F32)
    reading = plan_reading([range(60), range(3, 60)], 96, seed=0, window=16)
    takers = [
        Taker(part, Gathered(), lambda _: None)
        for part in (Part.whole(identity), *parts_of(identity, "pp2-tp2"))
    ]
    gather(loaded, identity, reading, takers, phases=Phases())
    whole, *shares = (taker.gathered for taker in takers)
    layout = identity.layout
    for stream in layout.streams:
        features = torch.arange(layout.features(stream)).view(layout.layers, stream.heads, stream.head_dim)
        half = layout.layers // 2, stream.heads // 2
        for number, share in enumerate(shares):
            rows, columns = (
                slice(n * size, (n + 1) * size) for n, size in zip(divmod(number, 2), half, strict=True)
            )
            mine = features[rows, columns].flatten()
            assert torch.allclose(share.moments[stream.name].mean, whole.moments[stream.name].mean[mine])
            covariance = whole.moments[stream.name].covariance()[mine][:, mine]
            assert torch.allclose(share.moments[stream.name].covariance(), covariance, atol=1e-6)
            assert torch.equal(share.samples[stream.name], whole.samples[stream.name][:, mine])


def test_every_rank_gets_a_profile_that_packs_its_blocks_and_the_curve_is_that_of_all(
    ranks: list[Calibration], loaded: LoadedModel, tmp_path: Path
) -> None:
    identity = models.identity(loaded, Dtype.F32)
    curves = [made.profile.curve for made in ranks]
    assert len({(point.ratio, point.kl) for curve in curves for point in curve.points}) == len(
        curves[0].points
    )
    assert len({curve.points[0].error for curve in curves}) == len(ranks), "a guard goes by its own errors"
    for made in ranks:
        store(made.data, tmp_path)
    profiles = ProfileFolder(tmp_path)
    point = curves[0].points[len(curves[0].points) // 2]
    document = evaluate.read(loaded, identity, [n * 7 % 61 for n in range(3 * WINDOW)], 3 * WINDOW - 8)
    behind = [torch.zeros_like(block.raw) for block in document.blocks]
    for part in parts_of(identity, "pp2-tp2"):
        codec = codec_for(part.identity, CodecChoice("kvtc2", ratio=point.ratio, window=8), profiles)
        assert codec.reason is None
        blocks = [
            replace(block, raw=part.take(block.raw, identity.layout, block.tokens))
            for block in document.blocks
        ]
        encoded = evaluate.encode(codec.encoder, blocks)
        assert {packed.codec for packed in encoded} == {CodecId.KVTC2}
        for raw, block, whole in zip(
            evaluate.decode(codec.decoder, blocks, encoded), blocks, behind, strict=True
        ):
            part.put(raw, whole, identity.layout, block.tokens)
    logits = evaluate.continue_behind(loaded, behind, identity.layout, document.continuation)
    kl = evaluate.quality(document.logits, logits, document.continuation).kl
    assert point.kl / 5 < kl < point.kl * 5


def test_a_profile_of_one_rank_is_for_no_other(ranks: list[Calibration], tmp_path: Path) -> None:
    profile = ranks[0].profile
    assert [made.profile.origin.parallel for made in ranks] == [
        f"pp2-rank{stage}-tp2-rank{rank}" for stage in (0, 1) for rank in (0, 1)
    ]
    store(ranks[0].data, tmp_path)
    other = replace(
        WHOLE, parallel=ranks[1].profile.origin.parallel, weights=profile.origin.weights,
        rope=profile.origin.rope, layout=replace(WHOLE.layout, streams=profile.origin.streams, layers=2),
    )  # fmt: skip
    assert ProfileFolder(tmp_path).find(other) is None
