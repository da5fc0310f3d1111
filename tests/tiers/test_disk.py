"""One environment: sizes, order, space, purges, and who may use it."""

import logging
import math
import random
import re
import threading

import lmdb
import numpy as np
import pytest
from support.crash import workload
from support.crash.sealed import key_of, seal
from support.crash.zygote import Zygote
from support.records import keys_in

from kvtcd.core.errors import Corrupt, StoreFailed, StoreFull, TooLarge, Unavailable
from kvtcd.tiers.disk import CHUNK_BYTES, PAGE, Environment, Put, directories, footprint, opening
from kvtcd.tiers.disk.inspection import Condition, write_condition

MIB = 1 << 20


@pytest.fixture
def environment(tmp_path):
    opened = Environment(tmp_path / "environment", quota=16 * MIB)
    yield opened
    opened.close()


def files(path):
    return [found for found in path.rglob("*") if found.is_file()]


def raw(environment):
    """The LMDB handles below an open environment, to break its rules."""
    generation = environment._generation
    return generation._lmdb, generation._meta, generation._blob


@pytest.mark.parametrize(
    "nbytes", [0, 1, 2000, 4080, 4081, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES]
)
@pytest.mark.parametrize(
    "as_blob", [bytes, bytearray, memoryview, lambda blob: np.frombuffer(blob, np.uint8)]
)
def test_blobs_of_every_kind_and_length_come_back(environment, nbytes, as_blob):
    content = np.random.default_rng(nbytes).bytes(nbytes)
    environment.write([Put(key_of(0), b"envelope", as_blob(content))], [])
    envelope, blob = environment.read(key_of(0))
    assert envelope == b"envelope"
    assert blob.tobytes() == content
    assert blob.flags.writeable
    assert blob.flags.owndata


def test_a_blob_is_read_into_the_memory_that_is_given(environment):
    content = np.random.default_rng(1).bytes(3 * CHUNK_BYTES + 5)
    environment.write([Put(key_of(0), b"envelope", content)], [])
    memory = np.full(len(content) + 10, 7, np.uint8)
    _, blob = environment.read(key_of(0), lambda nbytes: memory[5 : 5 + nbytes])
    assert np.shares_memory(blob, memory)
    assert memory.tobytes() == b"\7" * 5 + content + b"\7" * 5


def test_blobs_of_other_shapes_are_stored_by_their_bytes(environment):
    environment.write([Put(key_of(0), b"", np.arange(12, dtype="<u2").reshape(3, 4))], [])
    _, blob = environment.read(key_of(0))
    assert blob.tobytes() == np.arange(12, dtype="<u2").tobytes()


def test_the_last_put_of_a_key_holds_and_drops_come_first(environment):
    environment.write([Put(key_of(0), b"old", b"old")], [])
    environment.write(
        [Put(key_of(0), b"first", bytes(3 * CHUNK_BYTES)), Put(key_of(0), b"second", b"xy")], [key_of(0)]
    )
    envelope, blob = environment.read(key_of(0))
    assert (envelope, blob.tobytes()) == (b"second", b"xy")
    assert environment.used == footprint(len(b"second"), 2)


def test_a_reopened_file_that_lacks_free_pages_at_its_end_is_sound(tmp_path):
    path = tmp_path / "environment"
    environment = Environment(path, quota=16 * MIB)
    # The first of these is gone before the commit, so its pages at the end of the file are never written.
    environment.write([Put(key_of(1), b"", bytes(9 * CHUNK_BYTES)), Put(key_of(1), b"", b"xy")], [])
    environment.close()
    environment = Environment(path, quota=16 * MIB)
    assert not environment.quarantined
    assert environment.read(key_of(1))[1].tobytes() == b"xy"
    environment.close()


def test_bad_sizes_are_refused_before_anything_is_written(environment):
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        Put(bytes(31), b"", b"")
    with pytest.raises(TooLarge, match="4096 bytes; the limit is 4095"):
        Put(bytes(32), bytes(4096), b"")
    with pytest.raises(ValueError, match="not 5"):
        environment.read(b"short")
    with pytest.raises(ValueError, match="not 5"):
        environment.write([Put(key_of(0), b"", b"x")], [b"short"])
    shared = bytes(64 * MIB)
    with pytest.raises(TooLarge, match="one disk transaction"):
        environment.write([Put(key_of(index), b"", shared) for index in range(5)], [])
    assert environment.used == 0


def test_scan_is_in_key_order_and_goes_on_while_records_come_and_go(environment):
    keys = sorted(key_of(index) for index in range(2500))
    environment.write([Put(key, key, b"") for key in keys], [])
    seen = []
    for page in environment.scan():
        assert page.envelopes == page.keys
        if not seen:
            environment.write([], keys[1200:1300])
        seen += page.keys
    assert seen == keys[:1200] + keys[1300:]


@pytest.mark.parametrize(
    ("nbytes", "at_most"), [(100, 8), (1500, 2), (2100, 2), (60_000, 1.1), (700_000, 1.02)]
)
def test_footprint_covers_the_pages_that_lmdb_uses(environment, nbytes, at_most):
    draw = random.Random(nbytes)
    for step in range(20):
        environment.write(
            [
                Put(key_of(step * 20 + index), draw.randbytes(draw.randrange(150, 450)), bytes(nbytes))
                for index in range(max(1, min(20, MIB // nbytes)))
            ],
            [],
        )
    handle, *databases = raw(environment)
    with handle.begin() as transaction:
        stats = [transaction.stat(database) for database in databases]
    pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
    assert pages * PAGE <= environment.used
    assert environment.used <= at_most * pages * PAGE


def test_the_file_stays_near_its_quota_after_eight_turnovers(tmp_path):
    quota = 64 * MIB
    environment = Environment(tmp_path / "environment", quota=quota)
    draw = random.Random(8)
    held = {}
    source = memoryview(draw.randbytes(MIB))
    written = number = 0
    while written < 8 * quota:
        puts = []
        for _ in range(2):
            nbytes = int(math.exp(draw.uniform(math.log(64 << 10), math.log(MIB))))
            puts.append(Put(key_of(number), b"e" * 300, source[:nbytes]))
            number += 1
        room = quota - sum(put.footprint for put in puts)
        drops = []
        while sum(held.values()) > room:
            drops.append(draw.choice(list(held)))
            del held[drops[-1]]
        environment.write(puts, drops)
        held |= {put.key: put.footprint for put in puts}
        written += sum(put.footprint for put in puts)
    assert environment.used == sum(held.values())
    assert environment.used > 0.9 * quota
    assert environment.file_bytes <= 1.2 * quota
    environment.close()


def test_a_full_map_refuses_the_write_and_takes_it_after_drops(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtcd.tiers.disk.generation._MIN_MAP", 4 * MIB)
    environment = Environment(tmp_path / "environment", quota=1)
    written = 0
    with pytest.raises(StoreFull, match="map is full"):  # noqa: PT012 - which write it is, is not the point
        while written < 100:
            environment.write([Put(key_of(written), b"", bytes(CHUNK_BYTES))], [])
            written += 1
    assert written > 5
    assert len(keys_in(environment)) == written
    environment.write([], [key_of(0), key_of(1), key_of(2)])
    environment.write([], [key_of(3)])
    environment.write([Put(key_of(100), b"", bytes(CHUNK_BYTES))], [])
    assert environment.read(key_of(100)) is not None
    environment.close()


def test_a_lowered_quota_leaves_room_to_evict_in(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtcd.tiers.disk.generation._MIN_MAP", MIB)
    path = tmp_path / "environment"
    environment = Environment(path, quota=16 * MIB)
    environment.write([Put(key_of(index), b"", bytes(MIB)) for index in range(16)], [])
    environment.close()
    environment = Environment(path, quota=2 * MIB)
    for index in range(16):
        environment.write([Put(key_of(100), b"", bytes(MIB))], [key_of(index)])
    assert environment.used == footprint(0, MIB)
    environment.close()


def test_no_byte_of_what_a_rewrite_drops_remains(tmp_path):
    path = tmp_path / "environment"
    environment = Environment(path, quota=64 * MIB)
    records = {}
    for index in range(60):
        word = (b"KEPT-MARKER", b"GONE-MARKER")[index % 2]
        content = (word + b" %d " % index) * (40 << (index % 12))
        records[key_of(index)] = (word + b" envelope", content)
    for key, record in records.items():
        environment.write([Put(key, *record)], [])
    environment.put_namespace("kept", b"KEPT-MARKER identity")
    environment.put_namespace("gone", b"GONE-MARKER identity")
    assert any(b"GONE-MARKER" in found.read_bytes() for found in files(path))
    before = environment.used

    environment.rewrite(
        lambda envelope: envelope.startswith(b"KEPT"), {"kept": environment.namespaces()["kept"]}
    )

    assert not any(b"GONE-MARKER" in found.read_bytes() for found in files(path))
    assert environment.namespaces() == {"kept": b"KEPT-MARKER identity"}
    for key, (envelope, content) in records.items():
        found = environment.read(key)
        if envelope.startswith(b"GONE"):
            assert found is None
        else:
            assert (found[0], found[1].tobytes()) == (envelope, content)
    assert 0 < environment.used < before
    environment.close()
    reopened = Environment(path, quota=64 * MIB)
    assert len(keys_in(reopened)) == 30
    reopened.close()
    with pytest.raises(StoreFailed, match="closed"):
        reopened.read(key_of(0))


def test_a_rewrite_gives_space_back(environment):
    environment.write([Put(key_of(index), b"", bytes(MIB)) for index in range(12)], [])
    environment.write([], [key_of(index) for index in range(1, 12)])
    assert environment.file_bytes > 12 * MIB
    environment.rewrite(lambda _: True, {})
    assert environment.file_bytes < 2 * MIB


def test_a_rewrite_that_finds_no_room_keeps_what_finds_some_and_says_so(environment, monkeypatch):
    environment.write([Put(key_of(index), b"", bytes(2 * MIB)) for index in range(4)], [])
    environment.put_namespace("name", b"identity")
    environment.put_namespace("gone", b"identity")
    environment.quota = 1
    monkeypatch.setattr("kvtcd.tiers.disk.generation._MIN_MAP", 5 * MIB)
    monkeypatch.setattr("kvtcd.tiers.disk.generation._BATCH_BYTES", MIB)
    assert environment.rewrite(lambda _: True, {"name": b"identity"}) is False
    left = keys_in(environment)
    assert 1 <= len(left) < 4
    assert all(environment.read(key)[1].tobytes() == bytes(2 * MIB) for key in left)
    assert environment.namespaces() == {"name": b"identity"}
    assert [entry.name for entry in environment.path.iterdir()] == ["00000002"]


def test_without_room_for_an_empty_file_a_rewrite_unlinks_first(environment, monkeypatch):
    environment.write([Put(key_of(0), b"", b"GONE-MARKER" * 1000)], [])
    real, asked = opening.build, []

    def build(path, quota, fill):
        asked.append([entry.name for entry in path.iterdir()])
        if asked[-1]:
            raise StoreFull("rewrite", "ENOSPC")
        return real(path, quota, fill)

    monkeypatch.setattr("kvtcd.tiers.disk.opening.build", build)
    monkeypatch.setattr("kvtcd.tiers.disk.environment.build", build)
    assert environment.rewrite(lambda _: True, {"name": b"identity"}) is False
    assert asked == [["00000001"], []]
    assert (keys_in(environment), environment.used) == ([], 0)
    assert environment.namespaces() == {"name": b"identity"}
    environment.write([Put(key_of(1), b"", bytes(MIB))], [])
    assert keys_in(environment) == [key_of(1)]
    assert not any(b"GONE-MARKER" in found.read_bytes() for found in files(environment.path))


def test_where_even_that_fails_the_environment_is_out_of_use_and_empty_at_the_next_start(
    environment, monkeypatch
):
    environment.write([Put(key_of(0), b"", b"GONE-MARKER" * 1000)], [])
    with monkeypatch.context() as broken:
        for owner in ("opening", "environment"):
            broken.setattr(f"kvtcd.tiers.disk.{owner}.build", _no_room)
        with pytest.raises(StoreFull):
            environment.rewrite(lambda _: True, {})
    assert environment.failed
    assert files(environment.path) == []
    with pytest.raises(StoreFailed, match="failed before"):
        environment.read(key_of(0))
    environment.close()
    again = Environment(environment.path, quota=environment.quota)
    assert (keys_in(again), again.quarantined) == ([], False)
    again.close()


def _no_room(*_):
    raise StoreFull("rewrite", "ENOSPC")


@pytest.mark.parametrize("clean", [True, False])
def test_a_file_that_cannot_be_opened_for_now_is_there_when_it_can(environment, monkeypatch, clean):
    """A permission that is missing ends the opening, not the process: nothing speaks against the file."""
    environment.write([Put(key_of(0), b"", b"kept")], [])
    environment.close()
    if not clean:
        write_condition(directories.current(environment.path), Condition.OPEN)

    def refused(*_, **__):
        raise StoreFailed("open", "EACCES")

    with monkeypatch.context() as broken:
        broken.setattr(opening, "Generation", refused)
        for _ in range(3):
            with pytest.raises(StoreFailed, match="EACCES"):
                Environment(environment.path, quota=environment.quota)
    again = Environment(environment.path, quota=environment.quota)
    assert (again.quarantined, again.recovered, keys_in(again)) == (False, not clean, [key_of(0)])
    again.close()


@pytest.mark.parametrize("harm", ["missing", "short", "extra", "header", "short header", "magic"])
def test_a_record_with_a_wrong_part_is_corrupt_and_can_be_dropped(environment, harm):
    environment.write([seal(key_of(0), 0, 3 * CHUNK_BYTES), seal(key_of(1), 0, 3 * CHUNK_BYTES)], [])
    handle, meta, blob = raw(environment)
    with handle.begin(write=True) as transaction:
        header = transaction.get(key_of(0), db=meta)
        if harm == "missing":
            transaction.delete(key_of(0) + b"\0\0\0\1", db=blob)
        elif harm == "short":
            transaction.put(key_of(0) + b"\0\0\0\1", b"short", db=blob)
        elif harm == "extra":
            transaction.put(key_of(0) + b"\0\0\0\3", b"extra", db=blob)
        elif harm == "header":
            # A length far above any memory: it must be refused before anything is taken for it.
            transaction.put(key_of(0), header[:4] + (1 << 60).to_bytes(8, "little") + header[12:], db=meta)
        elif harm == "short header":
            transaction.put(key_of(0), header[:5], db=meta)
        else:
            transaction.put(key_of(0), b"kvR9" + header[4:], db=meta)
    with pytest.raises(Corrupt):
        environment.read(key_of(0))
    assert environment.read(key_of(1)) is not None
    environment.write([], [key_of(0)])
    assert environment.read(key_of(0)) is None
    assert environment.drop_orphans() == 0
    environment.write([seal(key_of(0), 1, 5)], [])
    assert environment.read(key_of(0)) is not None


def test_orphans_and_unreadable_headers_are_dropped(environment):
    environment.write([seal(key_of(index), 0, 3 * CHUNK_BYTES) for index in range(4)], [])
    handle, meta, blob = raw(environment)
    with handle.begin(write=True) as transaction:
        transaction.delete(key_of(0), db=meta)
        transaction.put(key_of(1), b"unreadable", db=meta)
        transaction.put(b"odd key", b"odd", db=blob)
    assert len(keys_in(environment)) == 2
    assert environment.drop_orphans() == 3
    assert environment.drop_orphans() == 0
    with handle.begin() as transaction:
        assert transaction.stat(meta)["entries"] == 2
        assert transaction.stat(blob)["entries"] == 6
    assert environment.read(key_of(2)) is not None


def test_writes_from_a_second_thread_are_refused(environment):
    environment.write([seal(key_of(0), 0, 10)], [])
    calls = [
        lambda: environment.write([], [key_of(0)]),
        lambda: environment.put_namespace("name", b"identity"),
        lambda: environment.rewrite(lambda _: True, {}),
        environment.drop_orphans,
    ]
    refused = []

    def other():
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(refused) == len(calls)
    assert re.search(r"is written by thread \d+; thread \d+ must not write", refused[0])
    assert environment.read(key_of(0)) is not None


def test_calls_after_closing_are_refused_and_closing_again_is_not(tmp_path):
    environment = Environment(tmp_path / "environment", quota=MIB)
    environment.close()
    environment.close()
    for call in (lambda: environment.read(key_of(0)), lambda: list(environment.scan()), environment.sync):
        with pytest.raises(StoreFailed, match="closed"):
            call()


def test_a_forked_child_is_refused_and_harms_nothing(tmp_path):
    with Zygote() as zygote:
        said = zygote.call("use_after_fork", path=str(tmp_path / "environment")).checked()
    refused = [f"{name}: refused" for name in ("read", "write", "scan", "sync")]
    assert said == [*refused, "close: ok", "parent: ok"]


def test_closing_and_rewriting_never_race_with_readers(tmp_path):
    path = tmp_path / "environment"
    environment = Environment(path, quota=workload.QUOTA)
    workload.run(environment, 1, iter(range(12)), lambda *_: None)
    environment.close()
    with Zygote() as zygote:
        seen = zygote.call("close_under_load", path=str(path), rounds=12).checked()
    assert seen["wrong"] == 0
    assert seen["right"] > 50


def test_an_environment_open_in_this_process_cannot_be_opened_again(environment):
    environment.write([seal(key_of(0), 0, 10)], [])
    with pytest.raises(StoreFailed, match="already open"):
        Environment(environment.path, quota=MIB)
    assert environment.read(key_of(0)) is not None, "what is in use must not be set aside"


def test_an_lmdb_without_hardening_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb, "version", lambda **_: (0, 9, 36, 0))
    with pytest.raises(Unavailable, match=r"LMDB 0\.9\.36\.0 without the bundled checks"):
        Environment(tmp_path / "environment", quota=MIB)


def test_the_engine_is_0_9_whatever_the_environment_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("LMDB_DEFAULT_LIB_VERSION", "1")
    environment = Environment(tmp_path / "environment", quota=MIB)
    handle, *_ = raw(environment)
    assert handle.lib_version()[:2] == (0, 9)
    flags = handle.flags()
    assert flags["sync"]
    assert not flags["metasync"]
    assert not flags["writemap"]
    assert not flags["map_async"]
    assert flags["meminit"]
    assert flags["readahead"]
    environment.close()


def test_setting_damaged_files_aside_is_logged_once(tmp_path, caplog):
    path = tmp_path / "environment"
    Environment(path, quota=MIB).close()
    [data] = path.glob("*/data.mdb")
    data.write_bytes(b"not a data file")
    with caplog.at_level(logging.WARNING):
        environment = Environment(path, quota=MIB)
    assert environment.quarantined
    [record] = caplog.records
    assert "is damaged and set aside; beginning empty" in record.message
    environment.close()
