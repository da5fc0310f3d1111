"""Files that nobody wrote: real ones with changes, and whatever values a format can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

EDGES = tuple(
    sign * (1 << bits) + off
    for bits in (0, 7, 8, 15, 16, 31, 32, 53, 63, 64)
    for sign in (1, -1)
    for off in (0, -1, 1)
)
HUGE = 10**400
"""More than a float holds."""
WORDS = (
    "", "0", "-1", "nan", "inf", "1e999", "9" * 400 + " TiB", "9" * 30 + "d", "1.5 GiB", "٣ GiB", "7d", "0.5",
    "auto", "~", "~nobody-at-all/x", "\0", "a\0b", "/" * 300, "../..", "none", "*", "uid:1",
    "uid:99999999999", "127.0.0.1:7337", "[::1]:" + "1" * 5000, "[:", "http://", "tcp://:1", "f" * 64,
    "g" * 64, "kvtc2", "tq",
)  # fmt: skip

SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.sampled_from((*EDGES, HUGE, -HUGE)),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(WORDS),
)
VALUES = st.recursive(
    st.none() | SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, originals: Sequence[bytes]) -> bytes:
    """Return one of some files after up to four of: flips, other bytes, other lengths, cuts, splices."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from((0, 1, 2, 4, 8, 16, 64, 1024)))
        match draw(st.sampled_from(("flip", "write", "number", "end", "remove", "repeat", "splice"))):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "write":
                data[at : at + size] = (
                    draw(st.binary(min_size=size, max_size=size)) if size < 64 else bytes(size)
                )
            case "number":
                width = draw(st.sampled_from((1, 2, 4, 8)))
                number = draw(st.sampled_from(EDGES)) % (1 << 8 * width)
                data[at : at + width] = number.to_bytes(width, draw(st.sampled_from(("little", "big"))))
            case "end":
                del data[at:]
            case "remove":
                del data[at : at + size]
            case "repeat":
                data[at:at] = data[at : at + size]
            case "splice":
                other = draw(st.sampled_from(originals))
                start = draw(st.integers(0, len(other)))
                data[at : at + size] = other[start : start + size]
            case _:
                pass
    return bytes(data)


@st.composite
def changed(draw: st.DrawFn, original: Any) -> Any:
    """Return a value with something in it replaced, left out, or added."""
    if isinstance(original, dict) and original and draw(st.integers(0, 5)):
        name = draw(st.sampled_from(sorted(original)))
        return {**original, name: draw(changed(original[name]))}
    if isinstance(original, list) and original and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(original) - 1))
        return [*original[:at], draw(changed(original[at])), *original[at + 1 :]]
    match draw(st.sampled_from(("replace", "remove", "add", "nest"))):
        case "remove" if isinstance(original, dict) and original:
            gone = draw(st.sampled_from(sorted(original)))
            return {name: value for name, value in original.items() if name != gone}
        case "add" if isinstance(original, dict):
            return {**original, draw(st.text(max_size=8)): draw(VALUES)}
        case "nest":
            return [original]
        case _:
            return draw(VALUES)


def toml(value: Any) -> str:
    """Write a value in TOML, tables inline; null, which there is none of, as a date."""
    match value:
        case None:
            return "1979-05-27T07:32:00Z"
        case bool():
            return str(value).lower()
        case int():
            return hex(value) if value > 1 << 64 else str(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{toml(name)} = {toml(each)}" for name, each in value.items()) + "}"
        case _:
            return str(value)


def toml_file(tables: dict[str, Any]) -> bytes:
    """Write a whole file."""
    return "".join(f"{toml(name)} = {toml(value)}\n" for name, value in tables.items()).encode()
