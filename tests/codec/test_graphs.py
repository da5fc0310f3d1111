"""What is replayed writes what operations one by one write, whatever differs between blocks; else it is not.

The device is the CPU (`second_device`), with recordings that are as strict as captures on CUDA
(`second_tapes`); on a card where there is one, graphs themselves.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.codec_world import World, kv, mla
from support.patience import PATIENCE_S

from kvtcd.codec import graphs as module
from kvtcd.codec.choose import codec_for
from kvtcd.codec.graphs import DUE, Graphs
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.codec.residency import Residency
from kvtcd.codec.scratch import HeapScratch
from kvtcd.codec.staged import Accelerator
from kvtcd.codec.stages import Stopwatch
from kvtcd.codec.uniform import InTorch
from kvtcd.core.blob import parse
from kvtcd.core.layout import Dtype
from kvtcd.core.policy import CodecChoice
from kvtcd.lab.second_device import DEVICE, SecondDevice, here, there
from kvtcd.lab.second_kernels import SecondKernels
from kvtcd.lab.second_tapes import SecondTapes

WORLDS = [World(kv()), World(mla()), World(kv(Dtype.F16))]
CHOICES = [CodecChoice("kvtc", 4, window=20), CodecChoice("kvtc2", 12, window=20)]
TOKENS = 96
ROUNDS = 2 * DUE


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles")
    for world in WORLDS:
        store(world.profile()[1], path)
    return path


def blocks(world):
    """Draw blocks of few shapes: each differs in content, position and what follows."""
    places = [(TOKENS, 64, 99), (TOKENS, 0, 99), (TOKENS, 5_000, 0), (33, 8, 99)]
    for number in range(ROUNDS):
        for tokens, first, after in places:
            position = first + number * TOKENS * (first > 0)
            raw = world.block(tokens, seed=number, first_token=position)
            yield raw, {"tokens": tokens, "first_token": position, "after": after}


def encoded(codec, raw, place):
    """Return what a codec makes of a block."""
    return codec.analyze(raw.numpy(), **place, scratch=HeapScratch()).deflate()


def decoded(codec, blob, nbytes):
    """Return the block that a blob stands for."""
    out = np.full(nbytes, 0xEE, np.uint8)
    codec.inflate(parse(memoryview(blob)), HeapScratch()).synthesize(out)
    return out


class Site:
    """A second device with recordings, while it is entered."""

    def __init__(self, path, *, kernels=False, limit=None) -> None:
        self.told, self.failed, self.spared = [], [], []
        self.device = SecondDevice(self.told.append)
        self.residency = Residency()
        if limit is not None:
            self.residency.limit(DEVICE, limit)
        self.graphs = Graphs(DEVICE, SecondTapes(self.device), self.residency, self.failed.append)
        self.accelerator = Accelerator(
            DEVICE, residency=self.residency, graphs=self.graphs, spared=self.spared.append,
            arithmetic=SecondKernels(self.device) if kernels else InTorch(),
        )  # fmt: skip
        self.profiles = ProfileFolder(path, self.residency)
        self.codec = cache(
            lambda world, choice: codec_for(world.identity, choice, self.profiles, self.accelerator)
        )

    @property
    def replays(self) -> int:
        """How many there were."""
        return sum(operation.name == "graph" for operation in self.told)


@contextmanager
def site(path, **how):
    made = Site(path, **how)
    with made.device:
        yield made


def same(one, other) -> bool:
    return (one.blob, one.codec, one.reason) == (other.blob, other.codec, other.reason)


@pytest.mark.parametrize(("world", "kernels"), [(0, False), (0, True), (1, True), (2, False)])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_whatever_differs_between_blocks_is_no_part_of_a_recording(path, world, choice, kernels):
    world, reasons = WORLDS[world], set()
    plain, decodes = codec_for(world.identity, choice, ProfileFolder(path)), 0
    with site(path, kernels=kernels) as there_:
        codec = there_.codec(world, choice)
        for raw, place in blocks(world):
            want = encoded(plain, raw, place)
            got = encoded(codec, raw, place)
            assert same(got, want), place
            reasons.add(got.reason)
            block = decoded(plain, want.blob, raw.numel())
            decodes -= there_.replays
            assert np.array_equal(decoded(codec, want.blob, raw.numel()), block), place
            decodes += there_.replays

    assert reasons & {None, Reason.FINER}, "most are coded"
    assert there_.failed == there_.spared == []
    assert decodes > 2 * ROUNDS
    assert there_.replays - decodes > 2 * ROUNDS


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_cannot_be_coded_is_found_by_a_replay_too(path, choice):
    world = WORLDS[0]
    plain, place = (
        codec_for(world.identity, choice, ProfileFolder(path)),
        {"tokens": TOKENS, "first_token": 64, "after": 99},
    )
    wrong = [world.block(TOKENS, seed=9, first_token=64) for _ in range(4)]
    for raw, value in zip(wrong, (float("nan"), float("inf"), 3e38, None), strict=True):
        if value is not None:
            raw.view(torch.bfloat16)[1000] = value
    with site(path) as there_:
        codec = there_.codec(world, choice)
        for number in range(DUE):
            raw = world.block(TOKENS, seed=number, first_token=64)
            encoded(codec, raw, place)
        before, reasons = there_.replays, []
        for raw in wrong:
            want, got = encoded(plain, raw, place), encoded(codec, raw, place)
            assert same(got, want)
            reasons.append(got.reason)
    assert None not in reasons[:3]
    assert reasons[3] is None
    assert there_.replays >= before + len(wrong)


def test_a_step_is_part_of_what_is_recorded(path):
    """Two that differ by a hair: components have the same widths, blobs the same sizes."""
    world, place = WORLDS[0], {"tokens": TOKENS, "first_token": 64, "after": 99}
    choices = [CodecChoice("kvtc2", ratio, window=20) for ratio in (12, 12.001)]
    with site(path) as there_:
        for number in range(ROUNDS):
            raw = world.block(TOKENS, seed=number, first_token=64)
            for choice in choices:
                plain, codec = (
                    codec_for(world.identity, choice, ProfileFolder(path)),
                    there_.codec(world, choice),
                )
                want = encoded(plain, raw, place)
                assert same(encoded(codec, raw, place), want)
                block = decoded(plain, want.blob, raw.numel())
                assert np.array_equal(decoded(codec, want.blob, raw.numel()), block)
    assert there_.failed == []


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_lanes_at_the_same_time_do_not_meet(path, choice):
    """Encoding and decoding on two lanes each, of the same shapes."""
    world = WORLDS[0]
    plain = codec_for(world.identity, choice, ProfileFolder(path))
    place = {"tokens": TOKENS, "first_token": 64, "after": 99}
    made = [world.block(TOKENS, seed=seed, first_token=64) for seed in range(ROUNDS)]
    want = [encoded(plain, raw, place) for raw in made]
    whole = [decoded(plain, each.blob, raw.numel()) for each, raw in zip(want, made, strict=True)]
    shared, wrong = Site(path), []
    with shared.device:
        codec = shared.codec(world, choice)
        decoded(codec, want[0].blob, made[0].numel())

    def lane(turn):
        with SecondDevice():
            for number in range(3 * ROUNDS):
                one = (number * (turn + 1)) % ROUNDS
                if turn < 2 and not same(encoded(codec, made[one], place), want[one]):
                    wrong.append(("encode", turn, number))
                if turn >= 2 and not np.array_equal(
                    decoded(codec, want[one].blob, made[one].numel()), whole[one]
                ):
                    wrong.append(("decode", turn, number))

    lanes = [threading.Thread(target=lane, args=(turn,)) for turn in range(4)]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join(PATIENCE_S)
    assert wrong == shared.failed == []


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_recording_is_not_used_with_bases_that_have_come_back_elsewhere(path, choice):
    world, place = WORLDS[0], {"tokens": TOKENS, "first_token": 64, "after": 99}
    plain = codec_for(world.identity, choice, ProfileFolder(path))
    with site(path) as there_:
        codec = there_.codec(world, choice)
        for number in range(3 * DUE + 2):
            raw = world.block(TOKENS, seed=number, first_token=64)
            want = encoded(plain, raw, place)
            if number == DUE + 1:
                before = there_.replays
                there_.residency._first.clear()  # as if it were in use, and nobody had given it up
                there_.residency.drop_unused(DEVICE)
                gc.collect()
            assert same(encoded(codec, raw, place), want)
            decoded(codec, want.blob, raw.numel())
    assert there_.failed == []
    assert there_.replays > before > 0, "it was made anew"


# ---- what it costs, and who gives way


def shape_of(site_, tokens, seed=0):
    world, place = WORLDS[0], {"tokens": tokens, "first_token": 64, "after": 99}
    codec = site_.codec(world, CHOICES[1])
    encoded(codec, world.block(tokens, seed=seed, first_token=64), place)


def test_a_recording_counts_against_the_budget_and_gives_it_back(path):
    with site(path) as there_:
        for _ in range(DUE - 1):
            shape_of(there_, 64)
        gc.collect()
        before = there_.residency.used(DEVICE)
        shape_of(there_, 64)
        gc.collect()
        raw = WORLDS[0].layout.nbytes(64)
        assert there_.residency.used(DEVICE) > before + raw
        there_.graphs.drop()
        gc.collect()
        assert there_.residency.used(DEVICE) == before


def test_when_bases_need_room_recordings_go_first(path):
    with site(path) as there_:
        for _ in range(DUE):
            shape_of(there_, 64)
        gc.collect()
        used = there_.residency.used(DEVICE)
        there_.residency.limit(DEVICE, used + 10)
        with there_.residency.hold("another", DEVICE, 11, list):
            gc.collect()
            kept = {key for _, key in there_.residency._entries}
            assert len(kept) == 2, "the bases are still there"
            assert there_.residency.used(DEVICE) < used
    assert there_.failed == []


def test_without_room_nothing_is_recorded_and_no_basis_leaves_for_it(path):
    with site(path) as there_:
        shape_of(there_, 64)
        with there_.residency.hold("idle", DEVICE, 5, list):
            pass
        gc.collect()
        there_.residency.limit(DEVICE, there_.residency.used(DEVICE) + 100)
        for _ in range(3 * DUE):
            shape_of(there_, 64)
        assert (DEVICE, "idle") in there_.residency._entries
    assert there_.failed == ["memory"], "once, and never tried again"
    assert there_.replays == 1, "to prove it"


def test_there_are_so_many_recordings_and_the_least_recently_used_goes(path, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    with site(path) as there_:
        for tokens in (64, 65, 64, 65, 64, 65, 64, 66, 66, 66):
            shape_of(there_, tokens)
        shapes = {place[3][0][1]: shape for place, shape in there_.graphs._shapes.items()}
        assert {tokens: shape.graph is not None for tokens, shape in shapes.items()} == {
            64: True,
            65: False,
            66: True,
        }
        for _ in range(2 * DUE - 1):
            shape_of(there_, 65)
            assert shapes[65].graph is None, "another takes twice as many uses"
        shape_of(there_, 65)
        assert shapes[65].graph is not None


def test_uses_are_remembered_of_so_many_shapes(path, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 3)
    with site(path) as there_:
        for tokens in range(40, 50):
            shape_of(there_, tokens)
        assert len(there_.graphs._shapes) == 3


# ---- what cannot be recorded


class Base:
    """What a recording is of."""


BASES = [Base()]


def made(work, graphs, value, times):
    """Run work on a tensor that holds a value, so many times; return what came last."""
    for _ in range(times):
        told = [tuple(map(here, each)) for each in graphs.run(BASES, "key", work, [torch.tensor([value])])]
        value += 1
    return [each[0].tolist() for each in told]


def fine(_, x):
    x = x.to(DEVICE)
    yield (x + 1,)
    yield (x * 2,)


def waits(_, x):
    x = x.to(DEVICE)
    yield (x + int(x.sum()),)


def leaves(_, x):
    yield (there(x.to(DEVICE).cpu() + 1),)


def brings(_, x):
    yield (x.to(DEVICE) + torch.tensor(1.0),)


def freed(_, x):
    yield (x.to(DEVICE) + there(torch.ones(1)),)


@pytest.mark.parametrize(
    ("work", "why"), [(waits, "capture"), (leaves, "capture"), (brings, "capture"), (freed, "capture")]
)
def test_what_a_capture_refuses_is_told_one_by_one_for_good_and_counted(path, caplog, work, why):
    with site(path) as there_:
        want = [
            each[0].tolist()
            for each in ([here(t) for t in told] for told in work(BASES, torch.tensor([9.0])))
        ]
        assert made(work, there_.graphs, 9.0 - 2 * DUE, 2 * DUE + 1) == want
    assert there_.failed == [why]
    assert "cannot be replayed" in caplog.text


def test_parts_are_recorded_and_replayed_one_after_the_other(path):
    with site(path) as there_:
        assert made(fine, there_.graphs, 0.0, 2 * DUE) == [[2.0 * DUE], [2 * (2.0 * DUE - 1)]]
        assert there_.replays == 2 * (DUE + 1)
        one = there_.graphs.run(BASES, "key", fine, [torch.tensor([5.0])])
        first = next(one)
        assert here(first[0]).tolist() == [6.0]
        assert [here(each[0]).tolist() for each in one] == [[10.0]]
    assert there_.failed == []


def test_what_differs_from_what_was_recorded_is_not_replayed(path):
    calls = []

    def fickle(_, x):
        calls.append(None)
        yield (x.to(DEVICE) + (1 if len(calls) <= DUE else 2),)

    with site(path) as there_:
        made(fickle, there_.graphs, 0.0, 2 * DUE)
    assert there_.failed == ["different"]


def test_lanes_have_recordings_of_their_own(path, monkeypatch):
    with site(path) as there_:
        lane = SimpleNamespace(now=1)
        monkeypatch.setattr(SecondTapes, "lane", lambda _: lane.now)
        for lane.now in (1, 2):
            made(fine, there_.graphs, 0.0, DUE)
        lane.now = 1
        one = there_.graphs.run(BASES, "key", fine, [torch.tensor([5.0])])
        (first,) = next(one)
        lane.now = 2
        made(fine, there_.graphs, 70.0, 1)
        assert here(first).tolist() == [6.0]
        (second,) = next(one)
        assert here(second).tolist() == [10.0]
        lane.now = None
        before = there_.replays
        assert made(fine, there_.graphs, 1.0, 2 * DUE) == [[2.0 * DUE + 1], [4.0 * DUE]]
        assert there_.replays == before, "nothing can be recorded there"


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("begin", range(0, 300, 37))
def test_without_memory_to_record_in_blocks_are_the_same(path, choice, begin):
    world, place = WORLDS[0], {"tokens": TOKENS, "first_token": 64, "after": 99}
    plain = codec_for(world.identity, choice, ProfileFolder(path))
    with site(path) as there_:
        codec, failing = there_.codec(world, choice), {"seen": 0, "on": False}

        def told(operation):
            there_.told.append(operation)
            failing["seen"] += operation.launches and failing["on"]
            if failing["on"] and failing["seen"] > begin:
                failing["on"] = False
                raise RuntimeError(
                    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
                )

        with there_.device.telling(told):
            for number in range(2 * DUE):
                failing["on"] = number == DUE - 1
                raw = world.block(TOKENS, seed=number, first_token=64)
                assert same(encoded(codec, raw, place), encoded(plain, raw, place))
    assert there_.spared == []
    assert set(there_.failed) <= {"memory"}


def test_stages_of_a_replay_are_one_and_recording_is_none(path):
    with site(path) as there_:
        watch = Stopwatch(lambda: 0)
        with watch.running():
            for number in range(DUE + 1):
                watch.spans.clear()
                shape_of(there_, 64, seed=number)
                names = [name for name, *_ in watch.spans]
                assert ("graph" in names) == (number == DUE)
                assert ("product" in names) == (number < DUE - 1)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_card_replays_what_it_was_told_one_by_one(path, choice):
    device, failed, world = torch.device("cuda", 0), [], WORLDS[0]
    place = {"tokens": TOKENS, "first_token": 64, "after": 99}
    accelerator = Accelerator.on(device, Residency(), unreplayed=failed.append)
    bare = Accelerator.on(device, Residency())
    bare = Accelerator(device, arithmetic=bare.arithmetic, residency=bare.residency)
    replayed, one_by_one = (
        codec_for(world.identity, choice, ProfileFolder(path, each.residency), each)
        for each in (accelerator, bare)
    )
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for number in range(3 * DUE):
            raw = world.block(TOKENS, seed=number, first_token=64)
            want, got = encoded(one_by_one, raw, place), encoded(replayed, raw, place)
            assert same(got, want), number
            blocks_ = [decoded(codec, want.blob, raw.numel()) for codec in (one_by_one, replayed)]
            torch.cuda.synchronize()
            assert np.array_equal(*blocks_), number
    assert failed == []
    assert sum(shape.graph is not None for shape in accelerator.graphs._shapes.values()) == 3 + (
        choice.name == "kvtc"
    )
