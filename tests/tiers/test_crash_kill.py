"""SIGKILL at random times and at every change: what was acknowledged is there, and nothing is half done."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import time

import pytest
from support.crash import workload
from support.crash.killing import kept
from support.crash.sealed import key_of, version_of
from support.crash.zygote import Zygote
from support.patience import PATIENCE_S

from kvtcd.tiers.disk import Environment
from kvtcd.tiers.state import StateDirectory

SEED = 11


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as started:
        yield started


@pytest.fixture
def filled(tmp_path):
    """An environment that was closed in order, and its state."""
    path = tmp_path / "filled"
    environment = Environment(path, quota=workload.QUOTA)
    for name in ("kept", "purged"):
        environment.put_namespace(name, b"identity of " + name.encode())
    workload.run(environment, SEED, iter(range(12)), lambda *_: None)
    environment.close()
    *_, state = workload.states(SEED, {}, 0, 12)
    return path, state


def reported(log, count):
    """Wait until a child has reported so often: that it is open, then what it begins and what is there."""
    deadline = time.monotonic() + PATIENCE_S
    while count and (not log.exists() or log.read_text().count("\n") < count):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kill_cycles(zygote, tmp_path, cycles, seed):
    path = tmp_path / "environment"
    draw = random.Random(seed)
    possible = [{}]
    first = 0
    written = 0
    for cycle in range(cycles):
        log = tmp_path / f"{cycle}.log"
        steps = {"log": str(log), "seed": seed, "first": first}
        child = os.pidfd_open(zygote.start("write_until_killed", path=str(path), **steps))
        reported(log, draw.randrange(12))
        time.sleep(draw.uniform(0, 0.02))
        signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        outcome = zygote.finish()
        assert outcome.signal == signal.SIGKILL, outcome
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        assert not any(word == "quarantined" for word, _ in lines)
        acknowledged = [int(number) for word, number in lines if word == "ack"]
        begun = [int(number) for word, number in lines if word == "begin"]
        for number in acknowledged:
            possible = [workload.step(seed, number).applied(state) for state in possible]
        for number in set(begun) - set(acknowledged):
            possible += [workload.step(seed, number).applied(state) for state in possible]
        first = max(begun, default=first - 1) + 1
        written += len(acknowledged)
        if cycle % 2:
            # In between, the next child meets what the killed one left.
            environment = Environment(path, quota=workload.QUOTA)
            assert environment.recovered
            assert not environment.quarantined
            found = workload.observed(environment)
            assert found in possible, f"seed {seed}, cycle {cycle}"
            assert environment.used == workload.footprint_of(found)
            assert environment.drop_orphans() == 0
            environment.close()
            possible = [found]
    return written


def test_a_few_killed_writers_lose_nothing_they_acknowledged(zygote, tmp_path):
    assert kill_cycles(zygote, tmp_path, cycles=8, seed=3) > 0


@pytest.mark.slow
def test_two_hundred_killed_writers_lose_nothing_they_acknowledged(zygote, tmp_path):
    assert kill_cycles(zygote, tmp_path, cycles=200, seed=random.randrange(1 << 32)) > 200


def killed_copies(zygote, tmp_path, source, operation):
    """Yield a copy of `source` for each point at which `operation` can die."""
    for call in itertools.count(1):
        path = tmp_path / f"{operation}-{call}"
        if source.exists():
            shutil.copytree(source, path)
        outcome = zygote.call("die_at", call=call, operation=operation, path=str(path))
        if not outcome.signal:
            assert outcome.checked() == "survived"
            assert call > 4, "nothing was interrupted"
            return
        assert outcome.signal == signal.SIGKILL
        yield path
        shutil.rmtree(path, ignore_errors=True)


def test_an_interrupted_opening_or_closing_costs_nothing(zygote, tmp_path, filled):
    source, state = filled
    for operation in ("open", "close"):
        for path in killed_copies(zygote, tmp_path, source, operation):
            environment = Environment(path, quota=workload.QUOTA)
            assert not environment.quarantined
            assert workload.observed(environment) == state
            environment.close()


def test_an_interrupted_creation_is_begun_again(zygote, tmp_path):
    for path in killed_copies(zygote, tmp_path, tmp_path / "nothing", "open"):
        environment = Environment(path, quota=workload.QUOTA)
        assert not environment.quarantined
        assert workload.observed(environment) == {}
        environment.close()
        assert len(list(path.iterdir())) == 1


def test_an_interrupted_rewrite_leaves_the_old_or_the_new_file_whole(zygote, tmp_path, filled):
    source, state = filled
    environment = Environment(source, quota=workload.QUOTA)
    survivors = {index: record for index, record in state.items() if kept(environment.read(key_of(index))[0])}
    environment.close()
    assert 0 < len(survivors) < len(state)
    seen = []
    for path in killed_copies(zygote, tmp_path, source, "rewrite"):
        environment = Environment(path, quota=workload.QUOTA)
        assert not environment.quarantined
        found = workload.observed(environment)
        assert found in (state, survivors)
        assert set(environment.namespaces()) == ({"kept", "purged"} if found == state else {"kept"})
        environment.close()
        assert len(list(path.iterdir())) == 1, "something unfinished was left"
        seen.append(found == state)
    assert seen == sorted(seen, reverse=True), "once the new file is there, the old one does not come back"
    assert len(set(seen)) == 2


def test_an_interrupted_rewrite_without_room_leaves_all_or_nothing(zygote, tmp_path, filled):
    source, state = filled
    seen = []
    for path in killed_copies(zygote, tmp_path, source, "rewrite without room"):
        environment = Environment(path, quota=workload.QUOTA)
        assert not environment.quarantined
        found = workload.observed(environment)
        assert found in (state, {})
        assert set(environment.namespaces()) in (({"kept", "purged"},) if found else (set(), {"kept"}))
        environment.close()
        assert len(list(path.iterdir())) == 1, "something unfinished was left"
        seen.append(bool(found))
    assert seen == sorted(seen, reverse=True), "what was unlinked does not come back"
    assert len(set(seen)) == 2


def test_what_was_set_aside_is_there_whole_or_gone_when_its_removal_is_interrupted(zygote, tmp_path, filled):
    source, state = filled
    (generation,) = source.iterdir()
    shutil.copytree(generation, source / "00000000.bad-1764000000")
    seen = []
    for path in killed_copies(zygote, tmp_path, source, "drop what was set aside"):
        environment = Environment(path, quota=workload.QUOTA)
        assert workload.observed(environment) == state, "what is in use is left alone"
        seen.append(len(environment.set_aside))
        environment.close()
        assert len(list(path.iterdir())) == 1 + seen[-1], "no part of it is left"
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {0, 1}


def test_an_interrupted_master_key_is_whole_and_stays(zygote, tmp_path):
    for path in killed_copies(zygote, tmp_path, tmp_path / "nothing", "master_key"):
        with contextlib.closing(StateDirectory(path)) as directory:
            key = directory.master_key()
            assert len(key) == 32
            assert directory.master_key() == key


def test_a_file_that_ends_the_process_twice_while_opening_is_set_aside(filled):
    source, state = filled
    [marker] = source.glob("*/condition")
    marker.write_bytes(b"opening")
    environment = Environment(source, quota=workload.QUOTA)
    assert workload.observed(environment) == state
    environment.close()
    marker.write_bytes(b"opening again")
    environment = Environment(source, quota=workload.QUOTA)
    assert environment.quarantined
    assert workload.observed(environment) == {}
    environment.close()


def test_the_checker_of_these_tests_refuses_other_bytes(filled):
    source, state = filled
    environment = Environment(source, quota=workload.QUOTA)
    index = next(iter(state))
    envelope, blob = environment.read(key_of(index))
    environment.close()
    assert version_of(key_of(index), envelope, blob) == state[index][0]
    assert version_of(key_of(index + 1), envelope, blob) is None
    blob[-1] ^= 1
    assert version_of(key_of(index), envelope, blob) is None
