"""Dumps of caches: what comes back, and what is refused, with the place that is wrong."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Rope, RopeKind
from kvtcd.lab.dump import Document, Dump, Source, load, write

ROPE = Rope(RopeKind.DEFAULT, 10_000.0, 8)
SHAPES = ((9, 3, 2, 8), (14, 3, 2, 8), (5, 3, 2, 8))


def made() -> Dump:
    draw = torch.Generator().manual_seed(0)
    documents = tuple(
        Document(*(torch.randn(shape, generator=draw).bfloat16() for _ in "kv"), torch.ones((2 + n, 3, 6, 8)))
        for n, shape in enumerate(SHAPES)
    )
    return Dump("toy", ROPE, documents, "0a" * 32, "none", (Source("a.txt", "1b" * 32, ("2c" * 8,)),))


def changed(path, change) -> None:
    """Write a dump whose tensors, or metadata, are changed."""
    write(path, made())
    tensors, about = load_file(path), json.loads(metadata(path)["kvtcd"])
    change(tensors, about)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"kvtcd": json.dumps(about)}
    )


def metadata(path) -> dict[str, str]:
    header = path.read_bytes()
    return json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]


def test_a_dump_comes_back_as_it_was(tmp_path):
    write(tmp_path / "d", made())
    again = load(tmp_path / "d")
    about = ("model", "rope", "weights", "adapter", "texts")
    assert [getattr(again, name) for name in about] == [getattr(made(), name) for name in about]
    for one, other in zip(again.documents, made().documents, strict=True):
        assert all(
            torch.equal(getattr(one, part), getattr(other, part)) for part in ("keys", "values", "queries")
        )


def test_a_dump_need_not_say_what_was_not_asked_once(tmp_path):
    changed(tmp_path / "d", lambda _, about: [about.pop(name) for name in ("weights", "adapter", "texts")])
    again = load(tmp_path / "d")
    assert (again.weights, again.adapter, again.texts) == (None, "none", ())
    changed(tmp_path / "d", lambda _, about: [text.pop("runs") for text in about["texts"]])
    assert [text.runs for text in load(tmp_path / "d").texts] == [()]


def dropped(*names):
    return lambda tensors, _: [tensors.pop(name) for name in names]


def put(name, make):
    return lambda tensors, _: tensors.update({name: make(tensors.get(name))})


def both(number, make):
    def change(tensors, _):
        for part in "kv":
            tensors[f"{number}.{part}"] = make(tensors[f"{number}.{part}"])

    return change


def poisoned(value):
    def make(tensor):
        tensor[3, 1, 0, 2] = value
        return tensor

    return make


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("1.k", poisoned(float("nan"))), r"1\.k: .* \(1 values\), first at token 3, layer 1, head 0"),
        (put("2.v", poisoned(float("inf"))), r"2\.v: holds NaN or infinity"),
        (put("0.q", lambda q: q * torch.nan), r"0\.q: holds NaN"),
        (put("1.v", lambda v: v[:5]), r"1\.v: is of shape"),
        (both(1, lambda x: x[:, :, :1]), r"1\.k: has 1 heads, 0\.k has 2"),
        (both(2, lambda x: x[..., :4]), r"2\.k: has 4 head dimension"),
        (both(2, lambda x: x[:, :2]), r"2\.k: has 2 layers"),
        (put("1.q", lambda q: q[:, :, :5]), r"1\.q: has 5 query heads"),
        (put("1.q", lambda q: q[..., :4]), r"1\.q: has 4 head dimension"),
        (put("1.k", lambda k: k[0]), r"1\.k: is torch.bfloat16 of shape"),
        (put("1.k", lambda k: k[:0]), r"1\.k: is torch.bfloat16 of shape \[0"),
        (put("1.v", lambda v: v.to(torch.int8)), r"1\.v: is torch.int8"),
        (dropped("1.k", "1.v", "1.q"), r"1\.k: is missing, but there is a document 2"),
        (dropped("1.v"), r"1\.v: is missing"),
        (dropped("0.k"), r"0\.k: is missing"),
        (put("x", lambda _: torch.ones(1)), "x: is no tensor of a dump"),
        (put("01.k", lambda _: torch.ones(1)), r"01\.k: is no tensor"),
        (lambda _, about: about.update(rope="yes"), "Rope: is not"),
        (lambda _, about: about.update(weights=3), "weights: is not a string"),
        (lambda _, about: about.update(texts=[3]), "texts: is not a JSON object"),
        (lambda _, about: about["texts"][0].update(runs=[3]), "texts.*runs are not a list of strings"),
        (lambda _, about: about["rope"].update(rotary_dim=16), "has 8 dimensions of a head, RoPE rotates 16"),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_refused_by_its_place(tmp_path, change, words):
    changed(tmp_path / "d", change)
    with pytest.raises(ConfigError, match=words) as refused:
        load(tmp_path / "d")
    assert str(tmp_path / "d") in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 40, b"\x10\0\0\0\0\0\0\0[1, 2, 3, 4, 5] "])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "d").write_bytes(content)
    with pytest.raises(ConfigError, match="is no dump of caches"):
        load(tmp_path / "d")


@pytest.mark.parametrize("about", ["[]", "{", '"x"', '{"model": "m"}', '{"rope": NaN}'])
def test_metadata_that_are_none_are_refused(tmp_path, about):
    save_file({"0.k": torch.ones((1, 1, 1, 1))}, tmp_path / "d", {"kvtcd": about})
    with pytest.raises(ConfigError, match="is no dump of caches"):
        load(tmp_path / "d")


def test_a_file_of_no_documents_and_a_cut_one_are_refused(tmp_path):
    write(tmp_path / "none", replace(made(), documents=()))
    with pytest.raises(ConfigError, match="there are no documents"):
        load(tmp_path / "none")
    write(tmp_path / "d", made())
    whole = (tmp_path / "d").read_bytes()
    (tmp_path / "d").write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match="is no dump of caches"):
        load(tmp_path / "d")
