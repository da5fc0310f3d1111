"""`kvtcd eval eviction` with a scripted interpreter, and with kvpress against attention masked by hand."""

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from support.calibration import TEXTS, Tokenizer, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.lab import models, rd
from kvtcd.lab.eviction import command as lab
from kvtcd.lab.eviction.command import Method
from kvtcd.lab.figures import write_json
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.rd_points import Means, Point

CONTEXT, CONTINUATION, WINDOWS = 200, 20, 3
CODED = CONTEXT - 4 - 128
RIVALS = os.environ.get("KVTCD_RIVALS", "")

SCRIPTED = """#!{python}
import json, sys
import torch
from safetensors.torch import save_file

job = json.load(open(sys.argv[2]))
for number, tokens in enumerate(job["documents"]):
    rows = len(tokens) - job["context"]
    logits = {{"whole": torch.zeros(rows, 64)}}
    for name, (method, kept) in job["methods"].items():
        logits[name] = torch.zeros(rows, 64)
        logits[name][:, 0] = kept * (number + 1) / 100
    save_file(logits, f"{{job['out']}}/{{number}}.safetensors")
    print(number, flush=True)
    if number == {stop}:
        sys.exit("line before\\nRuntimeError: enough")
"""


def scripted(folder: Path, stop: int = 99) -> Path:
    path = folder / "python"
    path.write_text(SCRIPTED.format(python=sys.executable, stop=stop))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def world(loaded, tmp_path, monkeypatch):
    """Texts on disk, figures of `eval rd` of them, and the model that stands for any."""
    monkeypatch.setattr(models, "resolve", lambda *_: loaded.folder)
    monkeypatch.setattr(models, "load", lambda _: loaded)
    files = [tmp_path / "long.txt", tmp_path / "short.txt"]
    for file, text in zip(files, TEXTS, strict=False):
        file.write_text(text.text)
    documents = rd.cut(loaded, TEXTS[:2], CONTEXT, CONTINUATION, WINDOWS)
    groups = tuple(document.file for document in documents)
    point = Point(
        "kvtc2", 16.0, bits_per_token=1, ratio=16, ratio_all=8, kl=1e-6, kl_lo=0, kl_hi=1, dnll=0, top1=1,
        err_k=0, err_v=0, finer=0, refused=0, kl_of_documents=(1e-6,) * len(documents),
    )  # fmt: skip
    figures = rd.Figures(
        "toy", None, ("long", "short"), CONTEXT, CONTINUATION, WINDOWS, len(documents), groups,
        rd.digest(documents), Means(0, 0, 0, 0, 1), (point,), (),
    )  # fmt: skip
    write_json(tmp_path / "rd.json", "eval rd", dataclasses.asdict(figures))
    return tmp_path, files, documents


def run(world, python: Path, *methods: str, files=None, **more) -> None:
    folder, own, _ = world
    lab.command(
        beside=folder / "rd.json", model="toy", methods=methods, files=files or own, python=python, threads=1,
        json=folder / "out.json", plot=None, **more,
    )  # fmt: skip


def test_points_are_those_of_the_logits_and_stand_beside_the_codecs(world, capsys) -> None:
    folder, _, documents = world
    run(world, scripted(folder), "h2o:4", "tova:2")
    found = json.loads((folder / "out.json").read_text())
    codec, h2o, tova = found["points"]
    assert (codec["codec"], h2o["codec"], tova["codec"]) == ("kvtc2", "h2o", "tova")
    assert (h2o["ratio"], tova["ratio"]) == (CODED / 17, CODED / 34)
    assert h2o["ratio_all"] == CONTEXT / (4 + 17 + 128)
    plain = torch.zeros(64).log_softmax(0)
    for point, kept in ((h2o, 17), (tova, 34)):
        for number in range(len(documents)):
            logits = torch.zeros(64)
            logits[0] = kept * (number + 1) / 100
            kl = float((plain.exp() * (plain - logits.log_softmax(0))).sum())
            assert point["kl_of_documents"][number] == pytest.approx(kl, rel=1e-4)
    assert {(one["of"], one["by"]) for one in found["surpassed"]} == {
        ("h2o:4", "kvtc2:16"),
        ("tova:2", "kvtc2:16"),
    }
    assert "h2o:4" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["h2o", "h2o:0.5", "snapkv:4", "tova:nan", "tova:inf", "h2o:x"])
def test_a_method_that_is_none_is_refused_before_anything_is_read(method) -> None:
    with pytest.raises(ConfigError, match="is not one of h2o, tova with a ratio"):
        lab.command(
            beside=Path("none.json"), model="none", methods=[method], files=[], python=Path("none"),
            threads=1, json=None, plot=None,
        )  # fmt: skip


def test_figures_of_other_documents_are_refused(world) -> None:
    folder, files, _ = world
    with pytest.raises(ConfigError, match="is of other documents"):
        run(world, scripted(folder), "h2o:4", files=files[:1])
    assert not (folder / "out.json").exists()


def test_an_interpreter_that_fails_says_what_it_said(world) -> None:
    folder = world[0]
    with pytest.raises(Unavailable, match=r"gave up: RuntimeError: enough; python3 -m venv rivals"):
        run(world, scripted(folder, stop=1), "h2o:4")
    with pytest.raises(Unavailable, match="cannot be started: No such file"):
        run(world, folder / "nowhere", "h2o:4")
    with pytest.raises(Unavailable, match="No module named 'kvpress'"):
        run(world, Path(sys.executable), "h2o:4")


def one_head(folder: Path) -> LoadedModel:
    """A layer with one KV head, so that what H2O and TOVA keep is one set of tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.4,
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype="bfloat16", attn_implementation="eager").eval()
    return LoadedModel(model, Tokenizer(), folder)


@pytest.mark.skipif(not RIVALS, reason="needs KVTCD_RIVALS, an interpreter with kvpress (make test-peers)")
def test_kvpress_keeps_what_masks_by_hand_keep(tmp_path) -> None:
    """Attention that cannot see a token is that of a cache without it."""
    loaded = one_head(tmp_path / "model")
    tokens = tuple(torch.randint(0, 64, (CONTEXT + CONTINUATION,), generator=torch.manual_seed(6)).tolist())
    methods = [Method("h2o", 4), Method("tova", 4), Method("tova", 1)]
    (logits,) = lab._runs(
        Path(RIVALS), loaded.folder, methods, [rd.Document(0, tokens)], context=CONTEXT, threads=1
    )
    assert torch.equal(logits["tova:1"], logits["whole"])
    ids = torch.tensor([tokens])
    with torch.no_grad():
        (weights,) = loaded.model(ids[:, :CONTEXT], output_attentions=True).attentions
    weights = weights[0].float().mean(0)
    scores = {"h2o:4": weights.sum(0) / torch.arange(CONTEXT, 0, -1), "tova:4": weights[-1]}
    for name, score in scores.items():
        best = 4 + score[4 : CONTEXT - 128].topk(17).indices
        gone = torch.ones(CONTEXT, dtype=torch.bool)
        gone[:4] = gone[CONTEXT - 128 :] = gone[best] = False
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
        mask[CONTEXT:, :CONTEXT].masked_fill_(gone, -torch.inf)
        with torch.no_grad():
            want = loaded.model(ids, attention_mask=mask[None, None].to(torch.bfloat16)).logits[0, CONTEXT:]
        near, far = ((logits[other] - want.float()).square().mean() for other in (name, "whole"))
        assert near < far / 50, name
