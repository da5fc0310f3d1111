"""`kvtcd validate`: profiles that are good, made of too little, or held against other caches."""

import json
from dataclasses import replace

import pytest
import torch
from support.calibration import TEXTS, run, tiny_model
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.codec.profile import StreamProfile, store
from kvtcd.lab.dump import Document, Dump, load, read, write
from kvtcd.lab.validation.checks import of_profile, of_rows
from kvtcd.lab.validation.verdict import judge

LAYERS, HEADS, DIM = 3, 2, 8
P = LAYERS * HEADS * DIM


def law(seed: int = 0) -> torch.Tensor:
    """A map from independent coordinates to features with variances that fall off."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn((P, P), generator=draw)).Q
    return q * (2.0 ** -(torch.arange(P) / 6))


def rows(count: int, seed: int, mapped: torch.Tensor | None = None) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((count, P), generator=draw) @ (law() if mapped is None else mapped).T + 3.0


def profile(sample: torch.Tensor, rank: int = P) -> StreamProfile:
    mean = sample.mean(dim=0)
    values, vectors = torch.linalg.eigh((sample - mean).T @ (sample - mean) / len(sample))
    spectrum = values.flip(0).clamp_min(0)[:rank]
    return StreamProfile(mean, vectors.flip(1).T[:rank].half(), spectrum, float(values.sum()), {})


def judged(own: StreamProfile, held: torch.Tensor, tokens: int):
    seen = of_rows(own, held.view(-1, LAYERS, HEADS, DIM))
    checks = [*of_profile(own, LAYERS, HEADS, tokens), *seen.checks]
    return judge(checks, tokens), {check.name: check for check in checks}


def test_a_basis_of_enough_rows_is_safe():
    verdict, checks = judged(profile(rows(4000, 1)), rows(2000, 2), 4000)
    assert (verdict.word, verdict.text) == ("safe", "eigenbasis safe"), checks
    assert checks["energy of all layers"].value == pytest.approx(1, abs=0.15)
    assert checks["drift"].value == pytest.approx(1, abs=0.1)
    assert checks["kurtosis"].value == pytest.approx(3, abs=0.3)


def test_a_basis_of_few_rows_wants_more_tokens():
    verdict, checks = judged(profile(rows(20, 1)), rows(2000, 2), 20)
    assert verdict.word == "collect"
    assert "more tokens" in verdict.text
    assert checks["energy of all layers"].value > 2
    assert not checks["rows of a head"].holds
    assert "more tokens" in verdict.heads


def test_the_energy_that_is_missed_is_that_of_plain_arithmetic():
    own, held = profile(rows(200, 1)), rows(500, 2)
    _, checks = judged(own, held, 200)
    centred = held - own.mean
    promised = (1 - own.spectrum.cumsum(0) / own.total).tolist()
    rank = next(n for n, share in enumerate(promised) if share <= 0.1)
    kept = centred @ own.basis[: rank + 1].float().T
    missed = 1 - float(kept.square().sum() / centred.square().sum())
    assert checks["energy of all layers"].value == pytest.approx(missed / promised[rank], rel=1e-3)


def test_heavy_tails_ask_for_tq():
    draw = torch.distributions.StudentT(2.2)
    torch.manual_seed(0)
    held = draw.sample((3000, P)) + 3.0
    verdict, checks = judged(profile(held[:1500]), held[1500:], 1500)
    assert verdict.word == "tq"
    assert "heavy tails" in verdict.text
    assert not checks["kurtosis"].holds
    assert not checks["Hill index"].holds


def test_a_large_mean_or_unequal_variances_are_no_tails():
    mapped = torch.diag(torch.logspace(0, 3, P))
    _, checks = judged(profile(rows(4000, 1, mapped)), rows(2000, 2, mapped) + 1000, 4000)
    assert checks["kurtosis"].holds
    assert checks["Hill index"].holds
    assert not checks["drift"].holds


def test_rows_alike_in_all_directions_have_nothing_to_gain():
    same = torch.eye(P)
    verdict, checks = judged(profile(rows(20_000, 1, same)), rows(4000, 2, same), 20_000)
    assert verdict.word == "tq"
    assert checks["gain of all layers"].value < 0.5
    assert checks["gain of a head"].value < 0.5
    assert "gain" in verdict.heads


def test_the_gain_is_that_of_arithmetic_over_geometric_mean():
    mapped = torch.diag(2.0 ** -(torch.arange(P) / 12))
    own = profile(rows(20_000, 1, mapped))
    _, checks = judged(own, rows(20_000, 2, mapped), 20_000)
    variances = (2.0 ** -(torch.arange(P) / 12)).square()
    want = 10 * (variances.mean().log10() - variances.log10().mean())
    assert checks["gain of all layers"].value == pytest.approx(float(want), rel=0.05)


def test_other_texts_are_seen_by_their_energy():
    verdict, checks = judged(profile(rows(4000, 1)), (rows(2000, 2) - 3) * 2 + 3, 4000)
    assert verdict.word == "collect"
    assert "texts like these" in verdict.text
    assert checks["drift"].value == pytest.approx(4, rel=0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "checkpoints").mkdir()
    loaded = tiny_model(folder / "model")
    data = run(loaded, folder / "checkpoints").data
    tokens = [[(7 * n + 3 * m) % 60 for n in range(140)] for m in range(4)]
    from kvtcd.lab import models  # noqa: PLC0415 - its identity is that of the tiny model

    rope = models.identity(loaded).rope
    caches = tuple(read(loaded, own, 136) for own in tokens)
    return loaded, store(data, folder), Dump("tiny", rope, caches)


def test_a_dump_comes_back_as_it_was(made, tmp_path):
    _, _, dump = made
    write(tmp_path / "d", dump)
    again = load(tmp_path / "d")
    assert (again.model, again.rope) == (dump.model, dump.rope)
    for one, other in zip(again.documents, dump.documents, strict=True):
        assert all(
            torch.equal(getattr(one, part), getattr(other, part)) for part in ("keys", "values", "queries")
        )


def test_queries_are_those_that_the_model_attends_with(made):
    """Attention by hand, of the queries and keys of a dump, against the weights that the model tells."""
    loaded, _, dump = made
    tokens = [(7 * n) % 60 for n in range(140)]
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        told = loaded.model(torch.tensor([tokens]), output_attentions=True).attentions
    loaded.model.set_attn_implementation("sdpa")
    document = dump.documents[0]
    for layer, weights in enumerate(told):
        groups = document.queries.shape[2] // document.keys.shape[2]
        keys = document.keys[:, layer].repeat_interleave(groups, dim=1)
        logits = (
            torch.einsum("qhd,thd->hqt", document.queries[:, layer], keys) / document.keys.shape[3] ** 0.5
        )
        want = weights[0, :, 136:, :136]
        assert torch.allclose(logits.softmax(-1), want / want.sum(-1, keepdim=True), atol=1e-4)


def test_the_command_says_it_and_ends_accordingly(made, tmp_path):
    _, path, dump = made
    write(tmp_path / "d", dump)
    options = [
        "--dump",
        str(tmp_path / "d"),
        "--json",
        str(tmp_path / "j"),
        "--plot",
        str(tmp_path / "p.png"),
    ]
    result = CliRunner().invoke(app, ["validate", str(path), *options])
    found = json.loads((tmp_path / "j").read_text())
    assert [stream["name"] for stream in found["streams"]] == ["k", "v"]
    words = {stream["verdict"] for stream in found["streams"]}
    assert result.exit_code == (0 if words == {"safe"} else 1), result.exception
    assert {check["kind"] for stream in found["streams"] for check in stream["checks"]} == {
        "budget", "tails", "gain", "drift",
    }  # fmt: skip
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_a_profile_alone_is_judged_by_its_rows(made, tmp_path):
    _, path, _ = made
    result = CliRunner().invoke(app, ["validate", str(path), "--json", str(tmp_path / "j")])
    found = json.loads((tmp_path / "j").read_text())
    assert result.exit_code == 0
    assert [check["name"] for check in found["streams"][0]["checks"]] == ["rows of a head"]
    assert "held-out" in result.stdout


def test_a_model_reads_texts_of_ones_own(made, tmp_path, monkeypatch):
    loaded, path, _ = made
    (tmp_path / "t.txt").write_text(TEXTS[0].text)
    monkeypatch.setattr("kvtcd.lab.models.load", lambda _: loaded)
    monkeypatch.setattr("kvtcd.lab.models.resolve", lambda *_: loaded.folder)
    options = ["--model", "tiny", "--text", str(tmp_path / "t.txt"), "--context", "256", "--windows", "3"]
    result = CliRunner().invoke(app, ["validate", str(path), *options, "--json", str(tmp_path / "j")])
    assert result.exit_code in {0, 1}, result.exception
    assert json.loads((tmp_path / "j").read_text())["documents"] == 3


@pytest.mark.parametrize("fault", ["shape", "rope", "text"])
def test_caches_of_another_model_are_refused(made, tmp_path, fault):
    _, path, dump = made
    document = dump.documents[0]
    if fault == "shape":
        dump = replace(dump, documents=(Document(document.keys[:, :2], document.values[:, :2]),))
    elif fault == "rope":
        dump = replace(dump, rope=None)
    write(tmp_path / "d", dump)
    options = ["--model", "tiny"] if fault == "text" else ["--dump", str(tmp_path / "d")]
    result = CliRunner().invoke(app, ["validate", str(path), *options])
    assert result.exit_code == 1
    assert {"shape": "streams", "rope": "rope", "text": "--text"}[fault] in str(result.exception)
