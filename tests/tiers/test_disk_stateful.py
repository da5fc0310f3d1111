"""An environment against a dict: any sequence of calls leaves both the same."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.crash.sealed import key_of, seal

from kvtcd.tiers.disk import CHUNK_BYTES, MAX_ENVELOPE, Environment, Put, footprint

KEYS = st.integers(0, 7).map(key_of)
SIZES = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([1900, 2038, 4080, 4081, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]),
)
ENVELOPES = st.one_of(
    st.binary(max_size=400),
    st.sampled_from([0, 1980, 2000, MAX_ENVELOPE]).map(lambda nbytes: b"e" * nbytes),
)
RECORDS = st.lists(st.tuples(KEYS, ENVELOPES, SIZES), max_size=4)
NAMES = st.sampled_from(["one", "two", "three"])


class EnvironmentMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtcd-test-"))
        self.environment = self.open()
        self.records = {}
        self.namespaces = {}
        self.version = 0

    def open(self):
        return Environment(self.folder / "environment", quota=1 << 22)

    def teardown(self):
        self.environment.close()
        shutil.rmtree(self.folder)

    @rule(records=RECORDS, drops=st.lists(KEYS, max_size=3))
    def write(self, records, drops):
        puts = []
        for key, envelope, nbytes in records:
            self.version += 1
            puts.append(Put(key, envelope, seal(key, self.version, nbytes).blob))
        self.environment.write(puts, drops)
        for key in drops:
            self.records.pop(key, None)
        self.records |= {put.key: (put.envelope, put.blob) for put in puts}

    @rule(key=KEYS)
    def read(self, key):
        found = self.environment.read(key)
        if found is not None:
            found = (found[0], found[1].tobytes())
        assert found == self.records.get(key)

    @rule(name=NAMES, identity=st.binary(min_size=1, max_size=3000))
    def put_namespace(self, name, identity):
        self.environment.put_namespace(name, identity)
        self.namespaces[name] = identity

    @rule(bit=st.sampled_from([0, 1]), name=NAMES)
    def rewrite(self, bit, name):
        self.namespaces.pop(name, None)
        self.environment.rewrite(lambda envelope: len(envelope) % 2 == bit, self.namespaces)
        self.records = {key: record for key, record in self.records.items() if len(record[0]) % 2 == bit}

    @rule()
    def reopen(self):
        self.environment.close()
        self.environment = self.open()
        assert not self.environment.recovered

    @rule()
    def reopen_as_after_a_kill(self):
        self.environment.close()
        [marker] = (self.folder / "environment").glob("*/condition")
        marker.write_bytes(b"open")
        self.environment = self.open()
        assert self.environment.recovered
        assert not self.environment.quarantined

    @rule()
    def sync(self):
        self.environment.sync()
        assert self.environment.check_readers() == 0
        assert self.environment.drop_orphans() == 0

    @invariant()
    def scan_equals_the_model(self):
        expected = [
            (key, envelope, footprint(len(envelope), len(blob)))
            for key, (envelope, blob) in sorted(self.records.items())
        ]
        found = [
            row
            for page in self.environment.scan()
            for row in zip(page.keys, page.envelopes, page.footprints, strict=True)
        ]
        assert found == expected
        assert self.environment.namespaces() == self.namespaces

    @invariant()
    def used_equals_a_recount(self):
        recount = sum(footprint(len(envelope), len(blob)) for envelope, blob in self.records.values())
        assert self.environment.used == recount


EnvironmentMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
test_any_sequence_of_calls_leaves_what_a_dict_would_hold = EnvironmentMachine.TestCase


@pytest.mark.slow
def test_many_sequences_of_calls_leave_what_a_dict_would_hold():
    from hypothesis.stateful import run_state_machine_as_test  # noqa: PLC0415 - next to its use

    run_state_machine_as_test(
        EnvironmentMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
