"""`auto` on SmolLM2-135M: chosen on some passages, held against every fixed codec on others."""

from pathlib import Path

import numpy as np
import pytest
from support.models import real_model

from kvtcd.codec.choose import codec_for
from kvtcd.codec.profile import load, store
from kvtcd.codec.profiles import ProfileFolder
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import evaluate
from kvtcd.lab.calibrate import profile_for
from kvtcd.lab.capture import windows
from kvtcd.lab.choose import choose, eligible, sample, stands, with_choices
from kvtcd.lab.codec_source import ProfileSource, open_codecs
from kvtcd.lab.codec_spec import Spec
from kvtcd.lab.models import identity, tokenize

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

TEXT = Path(__file__).parents[1] / "data" / "encyclopedia.txt"
CONTEXT, CONTINUATION, RATIO = 384, 48, 4.0
CODECS = ("kvtc2", "kvtc", "tq,mean,norm", "sq,norm", "cachegen")


def test_auto_is_no_worse_than_the_best_fixed_codec(tmp_path):
    loaded = real_model("smollm2")
    named = identity(loaded)
    path = profile_for(loaded)
    profile = load(path)
    cut = windows([tokenize(loaded, TEXT.read_text("utf-8"))], CONTEXT + CONTINUATION, 10)
    documents = [evaluate.read(loaded, named, tokens, CONTEXT) for _, tokens in cut]
    seen, fresh = documents[::2], documents[1::2]
    asked = [Spec.parse(codec) for codec in CODECS]
    codecs = open_codecs(named, stands(asked, (RATIO,), profile), ProfileSource(path, named))
    (pool,) = eligible(codecs, seen[0].blocks, named, (RATIO,)).values()

    def measured(some):
        return {spec: [sample(loaded, named, profile, one, codecs[spec]) for one in some] for spec in pool}

    made = choose(RATIO, measured(seen), [0] * len(seen))
    store(with_choices(profile, [made]), tmp_path)
    auto = codec_for(named, CodecChoice("auto", RATIO), ProfileFolder(tmp_path))
    assert auto.name == f"{made.chosen.name} (auto 4)"
    own = np.log([sample(loaded, named, profile, one, auto).kl for one in fresh])
    for spec, others in measured(fresh).items():
        differences = own - np.log([one.kl for one in others])
        error = differences.std(ddof=1) / len(differences) ** 0.5
        assert differences.mean() <= 3 * error + 1e-9, f"auto, {made.chosen.name}, is worse than {spec}"
