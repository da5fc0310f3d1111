"""Damaged files: never a wrong record accepted, never the end of the process."""

import collections
import os
import shutil
import signal

import pytest
from support.crash import workload
from support.crash.damage import DAMAGES, damage, hash_of
from support.crash.sealed import key_of, seal
from support.crash.zygote import Zygote

from kvtcd.tiers.disk import PAGE, Environment

SEED = 21
STEPS = 25


class Filled:
    """An environment that was closed in order, and a process that opens damaged copies of it."""

    def __init__(self, folder, zygote):
        self.folder = folder
        self.zygote = zygote
        environment = Environment(folder / "filled", quota=workload.QUOTA)
        workload.run(environment, SEED, iter(range(STEPS)), lambda *_: None)
        environment.rewrite(lambda _: True, {"name": b"identity"})  # few free pages: damage hits what is used
        environment.close()
        # Every record that was ever stored: an old one is stale, not wrong.
        records = [put for number in range(STEPS) for put in workload.step(SEED, number).records()]
        self.stored = {(put.key.hex(), hash_of(put.envelope, put.blob)) for put in records}

    def damaged(self, kind, condition, draws):
        """Open copies with one random damage each; return how often each thing was seen."""
        seen = collections.Counter()
        for draw in draws:
            path = self.folder / f"{kind}-{condition}-{draw}"
            shutil.copytree(self.folder / "filled", path)
            damage(path, kind, condition, draw)
            outcome = self.zygote.call("inspect", path=str(path))
            if outcome.signal == signal.SIGABRT and condition == "clean":
                # LMDB asserts some rules of its trees. After a clean close only the length is checked, so one
                # start may end like this; the next one must find out why.
                seen["aborted"] += 1
                outcome = self.zygote.call("inspect", path=str(path))
                assert outcome.checked()["quarantined"], path.name
            found = outcome.checked()
            shutil.rmtree(path)
            assert {tuple(record) for record in found["accepted"]} <= self.stored, path.name
            seen["accepted"] += len(found["accepted"])
            for what in ("quarantined", "refused", "missing", "failed"):
                seen[what] += bool(found[what])
        return seen


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    with Zygote() as zygote:
        yield Filled(tmp_path_factory.mktemp("damage"), zygote)


@pytest.mark.parametrize("condition", ["clean", "open"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_no_damage_passes_as_a_record_or_ends_the_process_twice(filled, kind, condition):
    filled.damaged(kind, condition, range(12))


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["clean", "open"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_much_damage_neither(filled, kind, condition):
    filled.damaged(kind, condition, range(100, 180))


def test_without_a_digest_the_same_damage_would_pass(filled):
    seen = filled.damaged("bit", "clean", range(12))
    assert seen["refused"], "flipped bits were never read, so nothing was tested"


@pytest.mark.parametrize("pages", [1, 2, 5, 30])
def test_a_missing_tail_costs_the_record_that_lay_there(filled, tmp_path, pages):
    path = tmp_path / "environment"
    environment = Environment(path, quota=workload.QUOTA)
    for index in range(6):
        environment.write([seal(key_of(index), index, 200_000)], [])
    environment.write([seal(key_of(6), 6, 700_000)], [])
    environment.put_namespace("name", b"identity")  # leaves one free page at the end, after the last blob
    environment.close()
    [data] = path.glob("*/data.mdb")
    os.truncate(data, data.stat().st_size - pages * PAGE)
    seen = filled.zygote.call("inspect", path=str(path)).checked()
    assert not seen["quarantined"]
    assert seen["refused"] == (pages > 1)
    assert len(seen["accepted"]) == 7 - seen["refused"]


def test_damaged_files_are_kept_twice_and_no_more(tmp_path):
    path = tmp_path / "environment"
    for _ in range(5):
        environment = Environment(path, quota=workload.QUOTA)
        environment.write([], [])
        environment.close()
        [data] = (found for found in path.glob("*/data.mdb") if ".bad-" not in found.parent.name)
        data.write_bytes(data.read_bytes()[:5000])
    environment = Environment(path, quota=workload.QUOTA)
    assert environment.quarantined
    names = sorted(entry.name for entry in path.iterdir())
    assert [name[:13] for name in names] == ["00000004.bad-", "00000005.bad-", "00000006"]
    environment.rewrite(lambda _: True, {})
    environment.close()
    environment = Environment(path, quota=workload.QUOTA)
    assert not environment.quarantined
    assert environment.set_aside == tuple(names[:2]), "nobody has seen to them yet"
    environment.drop_set_aside()
    assert environment.set_aside == ()
    assert [entry.name for entry in path.iterdir()] == ["00000007"]
    environment.close()


def test_a_file_of_the_other_engine_is_set_aside(tmp_path):
    import lmdb  # noqa: PLC0415 - only here does a test speak to LMDB itself

    path = tmp_path / "environment"
    Environment(path, quota=workload.QUOTA).close()
    [data] = path.glob("*/data.mdb")
    data.unlink()
    lmdb.open(str(data.parent), lib_version=1, create=False).close()
    assert Environment(path, quota=workload.QUOTA).quarantined
