"""What is gathered of windows, against sums over their rows and a rotation in complex numbers."""

import torch
from support.calibration import tiny_model
from support.codec_world import rotated

from kvtcd.codec.rope import inverse_frequencies
from kvtcd.core.layout import Dtype
from kvtcd.lab.capture import kv_rows
from kvtcd.lab.gather import Gathered, Taker, gather
from kvtcd.lab.models import identity
from kvtcd.lab.parts import Part
from kvtcd.lab.phases import Phases
from kvtcd.lab.reading import SINKS, plan_reading


def test_moments_are_of_the_fitted_windows_and_samples_of_the_others(tmp_path) -> None:
    loaded = tiny_model(tmp_path)
    named = identity(loaded, Dtype.F32)
    reading = plan_reading([range(60), range(3, 63)], 96, seed=0, window=16)
    gathered, kept = Gathered(), []
    gather(
        loaded, named, reading, [Taker(Part.whole(named), gathered, lambda now: kept.append(now.read))],
        phases=Phases(),
    )  # fmt: skip
    assert kept == list(range(1, 7))
    frequencies, _ = inverse_frequencies(named.rope)
    rows = {"k": [], "v": []}
    for window in reading.windows:
        for name, x in kv_rows(loaded, window).items():
            by_head = x.movedim(1, 0)  # [L, T, H, D]
            undone = rotated(by_head, named.rope, -frequencies, 1.0, 0) if name == "k" else by_head.double()
            rows[name].append(undone.movedim(0, 1).flatten(1)[SINKS:])
    for name, windows in rows.items():
        fitted = torch.cat(windows[reading.held_out :])
        moments = gathered.moments[name]
        assert int(moments.count) == reading.fitted_tokens == len(fitted)
        assert torch.allclose(moments.mean.double(), fitted.mean(dim=0), atol=1e-5)
        assert torch.allclose(moments.covariance().double(), torch.cov(fitted.t(), correction=0), atol=1e-4)
        sample = torch.cat(windows[: reading.held_out])  # all of it: less than SAMPLE rows
        assert torch.allclose(gathered.samples[name].double(), sample, atol=1e-5)
