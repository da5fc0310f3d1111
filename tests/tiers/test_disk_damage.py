"""Damaged files: never a wrong record accepted, never the end of the process."""

import collections

import pytest
from support.crash import workload
from support.crash.damage import DAMAGES
from support.crash.sealed import key_of
from support.crash.zygote import Zygote

from kvtcd.tiers.disk import Environment

SEED = 21
STEPS = 25


class Filled:
    """An environment that was closed in order, and a process that opens damaged copies of it."""

    def __init__(self, folder, zygote):
        self.folder = folder
        self.zygote = zygote
        environment = Environment(folder / "filled", quota=workload.QUOTA)
        workload.run(environment, SEED, iter(range(STEPS)), lambda *_: None)
        environment.close()
        # Every (key, version) that was ever stored: an old one is stale, not wrong.
        steps = {number: workload.step(SEED, number) for number in range(STEPS)}
        self.versions = {
            (key_of(index).hex(), number) for number, step in steps.items() for index in step.puts
        }

    def damaged(self, damage, condition, draws):
        """Open copies with one random damage each; return how often each thing was seen."""
        seen = collections.Counter()
        for draw in draws:
            case = {"damage": damage, "condition": condition, "draw": draw}
            places = {"base": str(self.folder / "filled"), "scratch": str(self.folder)}
            found = self.zygote.call("inspect_damaged", **places, **case).checked()
            assert {tuple(record) for record in found["accepted"]} <= self.versions, case
            seen["accepted"] += len(found["accepted"])
            for what in ("quarantined", "refused", "missing", "failed"):
                seen[what] += bool(found[what])
        return seen


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    with Zygote() as zygote:
        yield Filled(tmp_path_factory.mktemp("damage"), zygote)


@pytest.mark.parametrize("condition", ["clean", "open"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_ends_the_process_or_passes_as_a_record(filled, damage, condition):
    seen = filled.damaged(damage, condition, range(15))
    if damage == "cut":
        assert seen["quarantined"] == 15
    else:
        assert seen["quarantined"] + seen["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["clean", "open"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_much_damage_neither(filled, damage, condition):
    filled.damaged(damage, condition, range(100, 250))


def test_without_a_digest_the_same_damage_would_pass(filled):
    seen = filled.damaged("bit", "clean", range(15))
    assert seen["refused"], "flipped bits were never read, so nothing was tested"


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
    assert [entry.name for entry in path.iterdir()] == ["00000007"], "a purge leaves no damaged file"
    environment.close()
    assert not Environment(path, quota=workload.QUOTA).quarantined


def test_a_file_of_the_other_engine_is_set_aside(tmp_path):
    import lmdb  # noqa: PLC0415 - only here does a test speak to LMDB itself

    path = tmp_path / "environment"
    Environment(path, quota=workload.QUOTA).close()
    [data] = path.glob("*/data.mdb")
    data.unlink()
    lmdb.open(str(data.parent), lib_version=1, create=False).close()
    assert Environment(path, quota=workload.QUOTA).quarantined
