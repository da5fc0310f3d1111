"""Power loss: what a disk may hold then opens, and the check is shown to find a missing sync."""

import collections
import random
import shutil

import pytest
from support.crash import workload
from support.crash.replay import build_shim, events
from support.crash.zygote import Zygote

from kvtcd.tiers.disk import Environment

FIRST, LAST = 20, 60


class Recorded:
    """A base image, and what writing steps FIRST to LAST did to the device."""

    def __init__(self, folder, seed, *, synced):
        self.folder = folder
        self.seed = seed
        written = folder / "written"
        self.base = folder / "base"
        self.recording = folder / "recording"
        environment = Environment(self.base, quota=workload.QUOTA)
        workload.run(environment, seed, iter(range(FIRST)), lambda *_: None)
        environment.close()
        shutil.copytree(self.base, written)
        shim = {"LD_PRELOAD": str(build_shim(folder)), "RECORDING": str(self.recording)}
        with Zygote(shim) as writer:
            steps = {"seed": seed, "first": FIRST, "last": LAST}
            writer.call("write_recorded", path=str(written), synced=synced, **steps).checked()
        self.kinds = collections.Counter(event.kind for event in events(self.recording.read_bytes()))

    def verdicts(self, draws, *, lost):
        """Return what opening each image was like: images by verdict."""
        verdicts = collections.defaultdict(list)
        with Zygote() as zygote:
            for draw in draws:
                outcome = zygote.call(
                    "open_image",
                    base=str(self.base),
                    scratch=str(self.folder),
                    recording=str(self.recording),
                    seed=self.seed,
                    first=FIRST,
                    last=LAST,
                    draw=draw,
                    lost=lost,
                )
                verdict = f"signal {outcome.signal}" if outcome.signal else outcome.error or outcome.result
                verdicts[verdict].append(draw)
        return dict(verdicts)


def test_power_loss_costs_at_most_the_last_commit(tmp_path):
    recorded = Recorded(tmp_path, seed=5, synced=True)
    assert recorded.kinds["s"] >= LAST - FIRST, "the recorder saw no syncs"
    assert recorded.kinds["w"] > 100, "the recorder saw no writes"
    verdicts = recorded.verdicts(range(25), lost=1)
    assert set(verdicts) <= {"exact", "lost"}, verdicts
    assert len(verdicts) == 2, "losing the last commit was never tried"


def test_the_images_show_that_syncing_is_missing(tmp_path):
    recorded = Recorded(tmp_path, seed=5, synced=False)
    verdicts = recorded.verdicts(range(10), lost=LAST)
    assert set(verdicts) - {"exact", "lost"}, "a writer that does not sync was not found out"


@pytest.mark.slow
def test_power_loss_costs_at_most_the_last_commit_in_many_images(tmp_path):
    seed = random.randrange(1 << 32)
    recorded = Recorded(tmp_path, seed=seed, synced=True)
    verdicts = recorded.verdicts(range(250), lost=1)
    assert set(verdicts) == {"exact", "lost"}, f"seed {seed}: {verdicts}"
