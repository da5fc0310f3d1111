from pathlib import Path

import pytest

from kvtcd.core.errors import ConfigError
from kvtcd.lab import texts
from kvtcd.lab.texts import OWN, Text, read, recipe


def test_recipe_is_four_kinds_of_text_within_a_megabyte() -> None:
    first = recipe()
    assert [text.kind for text in first] == ["prose", "chat", "maths", "code"]
    assert recipe() == first
    sizes = [len(text.text.encode()) for text in first]
    assert sum(sizes) <= 1_000_000
    assert min(sizes) >= 190_000


def test_each_recipe_text_is_what_it_is_said_to_be() -> None:
    prose, chat, maths, code = (text.text for text in recipe())
    assert prose.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert "CHAPTER 33. " in prose
    assert "CHAPTER 34. " not in prose
    assert chat.count("### Human:") > 2 * 87
    assert maths.count("\n#### ") == 378
    for module in ("table", "segment", "markdown", "layout"):
        assert f"# rich/{module}.py of rich " in code
    compile(code.replace("from __future__", "# from __future__"), "code.txt", "exec")


def test_every_recipe_file_is_named_with_its_licence_in_the_readme() -> None:
    readme = Path(texts.__file__).with_name("README.md").read_text("utf-8")
    for text in recipe():
        assert f"| `{text.name}` |" in readme
    for licence in ("public domain", "Apache-2.0", "MIT, Copyright (c) 2021 OpenAI", "Will McGugan"):
        assert licence in readme


def test_own_text_file_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("  première ligne\n\tdeux\n", "utf-8")
    assert read([tmp_path / "a.txt"]) == [Text("a.txt", OWN, "  première ligne\n\tdeux\n")]


def test_own_json_lines_join_the_fields_of_a_row_and_the_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": " one\u2028same row "}\n'
        "\n"
        '{"question": "2+2?", "answer": "4", "id": 7}\n'
        '{"input": "Human: hi", "output": "hello"}\n',
        "utf-8",
    )
    (own,) = read([str(tmp_path / "a.jsonl")])
    assert own.text == "one\u2028same row\n\n2+2?\n4\n\nHuman: hi hello"


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"prompt": "x"}', r"a\.jsonl: line 2: has no text: .*question and"),
        ("a.jsonl", b'{"question": "x"}', "line 1: has no text"),
        ("a.jsonl", b'{"text": 3}', "line 1: has no text"),
        ("a.jsonl", b'["text"]', "line 1: has no text"),
        ("a.jsonl", b'{"text": "x"', "line 1: is not JSON"),
        ("a.jsonl", b"\n\n", "holds no text"),
        ("a.txt", b" \n", "holds no text"),
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
        ("a.pdf", b"%PDF", r"is neither \.txt nor \.jsonl"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(
    tmp_path: Path, name: str, body: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(ConfigError, match=message):
        read([tmp_path / name])


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.txt: cannot be read"):
        read([tmp_path / "gone.txt"])
