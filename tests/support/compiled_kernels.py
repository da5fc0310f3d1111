"""Compiles the codec's kernels for a card that is not here: ``python -m support.compiled_kernels 90``.

Prints, as JSON, what arithmetic is in the code of each.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtcd.codec import kernels

FLOATS, NUMBERS = {"coefficients", "steps", "lost", "out"}, {"order", "components", "before", "counts"}
BYTES = {"codes", "escapes"}
LOOKED_FOR = (
    "div.rn.f32",
    "mul.rn.f32",
    "add.rn.f32",
    "div.full",
    "approx",
    "ftz",
    "fma",
    "mul.f32",
    "add.f32",
)


def kind(name: str) -> str:
    """Return what Triton calls the type of an argument."""
    if name.isupper():
        return "constexpr"
    return "*fp32" if name in FLOATS else "*i64" if name in NUMBERS else "*u8" if name in BYTES else "i32"


def arithmetic(kernel: object, capability: int) -> dict[str, int]:
    """Compile a kernel, and count the operations of interest in it."""
    built_in = {"ROWS": kernels.ROWS, "BLOCK": kernels.BLOCK}
    source = ASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, built_in)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernels.OPTIONS)
    assert compiled.asm["cubin"]
    return {each: compiled.asm["ptx"].count(each) for each in LOOKED_FOR}


if __name__ == "__main__":
    names = ("_pack", "_escape", "_count", "_unpack")
    found = {name: arithmetic(getattr(kernels, name), int(sys.argv[1])) for name in names}
    print(json.dumps(found))  # noqa: T201 - a script
