"""The kernels say, bit by bit, what torch says: in Triton's interpreter, and on a card where there is one."""

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import fake_cuda
from support.codec_world import World, kv

from kvtcd.codec import fused
from kvtcd.codec.choose import Decoder
from kvtcd.codec.kvtc2 import Kvtc2
from kvtcd.codec.uniform import LIMIT, InTorch
from kvtcd.codec.widths import LEAST, Widths
from kvtcd.core.blob import Kind, parse

triton = pytest.importorskip("triton", reason="Triton is there for Linux on x86-64 alone")
from kvtcd.codec.kernels import BLOCK, ROWS, InTriton  # noqa: E402 - only where Triton is

CUDA = torch.cuda.is_available()
COUNTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
interpreted = pytest.param(
    torch.device("cpu"),
    marks=[
        pytest.mark.skipif(CUDA, reason="kernels are compiled where there is a card"),
        pytest.mark.skipif(not COUNTS, reason="before 3.7 Triton's interpreter cannot count with NumPy 2.4"),
    ],
)
devices = pytest.mark.parametrize(
    "device", [interpreted, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
)
IN_TORCH, IN_TRITON = InTorch(), InTriton()
SPREADS = {0: LEAST / 2, 1: 0.12, 2: 0.2, 4: 0.5, 8: 3.0}
"""By width, a spread in steps that gets it."""


def coefficients(draw, widths, steps, kind):
    """Make up coefficients: at ties and about them, large, tiny, or as they usually are."""
    shape = (widths.rank, len(steps))
    if kind == "ties":
        values = draw.integers(-40, 41, shape) / 2
        return np.nextafter((values * steps).astype(np.float32), draw.choice([-9e9, 9e9, 0.0], shape))
    if kind == "large":
        return draw.integers(-LIMIT, LIMIT + 1, shape) * steps
    if kind == "tiny":
        return draw.choice([0.0, -0.0, 1e-45, -1e-45, 1e-39, 1e-38], shape)
    if kind == "bfloat16":
        return torch.from_numpy(draw.normal(0, 3, shape) * steps).to(torch.bfloat16).float().numpy()
    if kind == "float16":
        return (draw.normal(0, 3, shape) * steps).astype(np.float16)
    return draw.standard_t(2, shape) * steps * 2


def compared(device, given, widths):
    """Return what both say of the same; the kernels first."""
    there = [tensor.to(device) for tensor in given]
    kernels = IN_TRITON.quantise(*there, widths.to(device))
    return kernels, IN_TORCH.quantise(*given, widths)


KINDS = ["ties", "large", "tiny", "bfloat16", "float16", "usual"]


@devices
@pytest.mark.slow
@given(
    bits=st.lists(st.sampled_from(list(SPREADS)), max_size=2 * ROWS + 1),
    tokens=st.integers(1, 40),
    kind=st.sampled_from(KINDS),
    scale=st.sampled_from([1.0, 0.1, 3e-5, 1e-40]),
    seed=st.integers(0, 2**32 - 1),
)
@example(bits=[8, 4, 2, 1, 0, 8], tokens=BLOCK, kind="usual", scale=1.0, seed=0)
@example(bits=[8, 4, 2, 1, 0, 8], tokens=2 * BLOCK + 3, kind="large", scale=0.1, seed=1)
@example(bits=[1] * (ROWS + 1), tokens=8 * BLOCK + 9, kind="usual", scale=1.0, seed=2)
@example(bits=[0, 0, 0, 0, 0, 8], tokens=9, kind="ties", scale=1.0, seed=3)
@settings(max_examples=40)
def test_kernels_say_what_torch_says(device, bits, tokens, kind, scale, seed):
    draw = np.random.default_rng(seed)
    widths = Widths.of(torch.tensor([SPREADS[each] for each in bits]), 1.0)
    steps = (2.0 ** (draw.integers(-6, 3, tokens) / 2) * scale).astype(np.float32)
    made = np.ascontiguousarray(coefficients(draw, widths, steps, kind), dtype=np.float32)
    given = [torch.from_numpy(each) for each in (made, steps, draw.permutation(tokens))]
    got, want = compared(device, given, widths)
    escapes, beyond = want.found.tolist()
    assert got.found[0].item() == escapes or beyond
    assert bool(got.found[1]) == bool(beyond)
    if beyond:  # denormal steps
        return
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.escapes[:, :escapes].cpu(), want.escapes)
    close = 1.2e-7 * float(
        np.abs(made).max(initial=0)
    )  # a product may be rounded before it is taken away, or not
    room = len(bits) * close * (float(steps.max()) + close)
    torch.testing.assert_close(got.lost.cpu(), want.lost, rtol=1e-4, atol=room)
    _, steps, order = given
    there = [each.to(device) for each in (want.codes, want.escapes, steps, order)]
    restored = IN_TRITON.restore(*there, widths.to(device)).coefficients.cpu()
    again = IN_TORCH.restore(want.codes, want.escapes, steps, order, widths).coefficients
    assert torch.equal(restored.view(torch.int32), again.view(torch.int32))


@devices
@pytest.mark.filterwarnings(
    "ignore:.* encountered in (subtract|multiply):RuntimeWarning"
)  # what IEEE 754 says
@pytest.mark.parametrize("bits", SPREADS)
@pytest.mark.parametrize(
    "multiple", [LIMIT, LIMIT + 1, -LIMIT, -LIMIT - 1, 1e30, math.inf, -math.inf, math.nan]
)
def test_what_is_too_large_is_found_whether_it_is_coded_or_not(device, bits, multiple):
    widths = Widths.of(torch.tensor([3.0, SPREADS[bits], 3.0]), 1.0)
    made = torch.zeros(3, 5)
    made[1, 4] = multiple
    got, _ = compared(device, (made, torch.ones(5), torch.arange(5)), widths)
    escapes, beyond = got.found.tolist()
    assert bool(beyond) == (not abs(multiple) <= LIMIT)
    if not beyond:
        assert escapes == bool(bits)


@devices
@pytest.mark.parametrize("change", [-2, -1, 1])
def test_codes_say_how_many_escapes_they_ask_for_whatever_is_there(device, change):
    widths = Widths.of(torch.tensor([3.0, 0.5]), 1.0)
    made = torch.zeros(2, 9)
    made[0, 3] = made[1, 2] = 1000.0
    given = (made, torch.ones(9), torch.arange(9))
    got, _ = compared(device, given, widths)
    wrong = torch.zeros(2, 2 + change, dtype=torch.uint8, device=device)
    restored = IN_TRITON.restore(
        got.codes, wrong, *(each.to(device) for each in given[1:]), widths.to(device)
    )
    assert restored.asked.item() == 2


@devices
def test_what_a_start_has_the_kernels_prove_they_can(device):
    fused.prove(IN_TRITON, device)


def test_a_proof_fails_where_one_token_is_told_wrong():
    class Wrong(InTorch):
        def quantise(self, coefficients, steps, order, widths):
            wrong = coefficients.clone()
            wrong[:, 300] *= 1.01
            return super().quantise(wrong, steps, order, widths)

    fused.prove(InTorch(), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="other codes"):
        fused.prove(Wrong(), torch.device("cpu"))


@devices
def test_a_device_gets_kernels_that_have_proved_themselves(device, monkeypatch, caplog):
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
    assert isinstance(fused.load(device), InTriton)

    def fail(*_):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(InTriton, "restore", fail)
    assert isinstance(fused.load(device), InTorch)
    assert "Failed to find C compiler." in caplog.text


def test_without_triton_torch_does_it(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "kvtcd.codec.kernels", None)
    assert isinstance(fused.load(torch.device("cuda", 0)), InTorch)
    assert "Triton is not installed" in caplog.text


def test_kernels_are_tried_on_the_device_that_they_are_for(monkeypatch):
    second, tried = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "device", fake_cuda.device)
    monkeypatch.setattr(fused, "prove", lambda _, device: tried.append((device, fake_cuda.current_device())))
    assert isinstance(fused.load(second), InTriton)
    assert tried == [(second, second)], "which Triton launches on"


@devices
@pytest.mark.slow
def test_blocks_have_the_same_blob_by_either(device):
    """On a CPU, where products are the same; on a card blobs are read by either, to the same codes."""
    world = World(kv())
    profile, _ = world.profile()
    raw = world.block(32, seed=1, first_token=0)

    def blob(arithmetic, where):
        codec = Kvtc2(
            world.layout, world.rope, profile, 0.5, sinks=4, window=16, device=where, arithmetic=arithmetic
        )
        return parse(memoryview(codec.encode(raw.to(where), tokens=32, first_token=0, after=0).blob))

    def block(blob, arithmetic, where):
        out = torch.zeros_like(raw, device=where)
        Decoder(world.layout, world.rope, lambda _: profile, where, arithmetic).decode(blob, out)
        return world.values(out.cpu(), 32)

    written = blob(IN_TRITON, device)
    kinds = {section.kind for section in written.sections}
    assert kinds >= {Kind.CODES, Kind.ESCAPES}
    if device.type == "cpu":
        assert written.data == blob(None, device).data
    one, other = block(written, IN_TRITON, device), block(written, None, device)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_code_for_a_card_has_the_arithmetic_that_was_tested(capability, tmp_path):
    """What the interpreter cannot show: that kernels compile, and divide and round as IEEE 754 says."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "support.compiled_kernels", str(capability)],
        check=True, capture_output=True, text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    found = json.loads(done.stdout)
    for counts in found.values():
        wrong = ("div.full", "approx", "ftz", "fma", "mul.f32", "add.f32")  # the last two may become one
        assert {each: counts[each] for each in wrong} == dict.fromkeys(wrong, 0)
    assert found["_pack"]["div.rn.f32"] == found["_escape"]["div.rn.f32"] > 0
    assert found["_pack"]["add.rn.f32"] > found["_escape"]["add.rn.f32"] > 0
    assert found["_unpack"]["mul.rn.f32"] > 0
