"""`tq`, `tq-prod` and the sketch: what the papers prove of them, on vectors of the unit sphere."""

import hashlib
import math

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as sylvester
from support.codec_world import World
from support.rivals import decode, encode

from kvtcd.codec.rivals.codebook import beta
from kvtcd.codec.rivals.draws import Draw
from kvtcd.codec.rivals.method import Site
from kvtcd.codec.rivals.rotation import haar
from kvtcd.codec.rivals.setting import Setting
from kvtcd.codec.rivals.sketch import Sketch
from kvtcd.codec.rivals.tq import Tq, rotation
from kvtcd.codec.rivals.tq_prod import TqProd
from kvtcd.core.blob import parse
from kvtcd.core.identity import Rope, RopeKind
from kvtcd.core.layout import Dtype, kv_layout

DISTORTION = {
    64: [0.358387, 0.114526, 0.033391, 0.009132],
    128: [0.360889, 0.116000, 0.033966, 0.009315],
    256: [0.362136, 0.116740, 0.034256, 0.009408],
}
LIMIT = [0.3634, 0.1175, 0.03454, 0.009497]


def sphere(count: int, dim: int, seed: int) -> torch.Tensor:
    x = torch.randn((count, dim), generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=1, keepdim=True)


def site(dim: int) -> Site:
    return Site(layers=1, heads=1, dim=dim, key=True)


def through(method, x):
    vectors = x[None, :, None]
    return method.decode(method.encode(vectors), len(x))[0, :, 0]


def tq(bits, dim, scale="", options=()):
    return Tq(site(dim), bits, rotation(Setting("tq", bits, frozenset(options)), site(dim)), scale)


@pytest.mark.parametrize("dim", DISTORTION)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [(), ("haar",)])
def test_distortion_on_the_sphere_is_exact_within_two_percent(dim, bits, options):
    x = sphere(4096, dim, seed=bits)
    error = (through(tq(bits, dim, options=options), x) - x).square().sum(dim=1).mean()
    assert float(error) == pytest.approx(DISTORTION[dim][bits - 1], rel=0.02)


@pytest.mark.parametrize(
    ("dim", "bits"),
    [(dim, bits) for dim in (16, 24, 64, 80, 96, 128, 192, 256) for bits in range(1, 9 if dim == 128 else 6)],
)
def test_every_width_and_dimension_is_at_its_codebooks_distortion(dim, bits):
    x = sphere(1500, dim, seed=bits)
    error = (through(tq(bits, dim), x) - x).square().sum(dim=1).mean()
    assert float(error) == pytest.approx(beta(bits, dim).distortion, rel=0.05)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_distortion_tends_to_that_of_a_normal_coordinate(bits):
    dim = 1024
    x = sphere(1024, dim, seed=3)
    error = (through(tq(bits, dim), x) - x).square().sum(dim=1).mean()
    assert float(error) == pytest.approx(LIMIT[bits - 1], rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_lengths_are_those_that_centroids_have(bits):
    """A codebook off by a factor would show here first: the square of the length is 1 - D."""
    x = sphere(4096, 128, seed=4)
    book = beta(bits, 128)
    length = through(tq(bits, 128), x).square().sum(dim=1).mean()
    assert float(length) == pytest.approx(1 - book.distortion, rel=0.01)


def test_the_error_is_divided_by_almost_four_with_each_bit():
    x = sphere(2048, 128, seed=5)
    errors = [math.log2(float((through(tq(b, 128), x) - x).square().sum(dim=1).mean())) for b in range(1, 9)]
    slope = np.polyfit(range(3, 9), errors[2:], 1)[0]
    assert -2.05 < slope < -1.85


@pytest.mark.parametrize("bits", [2, 4])
def test_norm_keeps_lengths_and_unbiased_keeps_inner_products(bits):
    x, y = sphere(1, 128, seed=6)[0], sphere(1, 128, seed=7)[0]
    y = 0.6 * x + 0.8 * (y - (x @ y) * x) / (y - (x @ y) * x).norm()
    found = {"": [], "norm": [], "unbiased": []}
    for seed in range(400):
        turn = haar(128, Draw(seed, 0))
        for scale, values in found.items():
            decoded = through(Tq(site(128), bits, turn, scale), x[None])[0]
            values.append(float(decoded @ y))
            if scale == "norm":
                assert float(decoded.norm()) == pytest.approx(1, abs=1e-3)
    kept = 1 - beta(bits, 128).distortion
    wanted = {"": 0.6 * kept, "norm": 0.6 * kept**0.5, "unbiased": 0.6}
    for scale, values in found.items():
        error = np.std(values) / len(values) ** 0.5
        assert abs(np.mean(values) - wanted[scale]) < 3 * error + 2e-4, scale
    published = {
        2: {"": 0.136, "unbiased": 0.174, "norm": 0.078},
        4: {"": 0.016, "unbiased": 0.017, "norm": 0.006},
    }
    for scale, variance in published[bits].items():
        assert 128 * np.var(found[scale]) == pytest.approx(variance, rel=0.25)


@pytest.mark.parametrize("kind", [Sketch.normal, Sketch.orthogonal])
def test_inner_products_by_a_sketch_are_right_on_average(kind):
    """Within three standard errors, and with the variance that the paper proves for normal rows."""
    k, q = 3 * sphere(1, 128, seed=8)[0], sphere(1, 128, seed=9)[0]
    q = 0.5 * k / k.norm() + 0.75**0.5 * (q - (q @ k) / (k @ k) * k) / (q - (q @ k) / (k @ k) * k).norm()
    estimates = []
    for seed in range(300):
        sketch = kind(128, 128, Draw(seed, 1))
        estimates.append(float(sketch.decode(sketch.encode(k[None]))[0] @ q))
    error = np.std(estimates) / len(estimates) ** 0.5
    assert abs(np.mean(estimates) - 1.5) < 3 * error
    if kind == Sketch.normal:
        assert np.var(estimates) == pytest.approx((math.pi / 2 * 9 - 1.5**2) / 128, rel=0.2)
    else:
        assert np.var(estimates) < 0.5 * (math.pi / 2 * 9 - 1.5**2) / 128


@pytest.mark.parametrize(("bits", "variance"), [(1, 1.571), (2, 0.567), (3, 0.182), (4, 0.0534)])
def test_prod_is_right_on_average_and_as_wrong_as_proved(bits, variance):
    """D variance of inner products: pi/2 times the distortion of one bit less."""
    dim, errors, slopes = 128, [], []
    y = sphere(256, dim, seed=10)
    x = 0.6 * y + 0.8 * sphere(256, dim, seed=11)
    x = x / x.norm(dim=1, keepdim=True)
    for seed in range(24):
        coarse = Tq(site(dim), bits - 1, haar(dim, Draw(seed, 0))) if bits > 1 else None
        method = TqProd(site(dim), coarse, Sketch.normal(dim, dim, Draw(seed, 1)))
        found = (through(method, x) * y).sum(dim=1)
        truth = (x * y).sum(dim=1)
        errors.append(found - truth)
        slopes.append(float((found @ truth) / (truth @ truth)))
    off = torch.cat(errors)
    assert np.mean(slopes) == pytest.approx(1, abs=0.02)
    # At one bit <x, y>^2 is no longer small beside pi/2.
    known = variance - (0.6**2 if bits == 1 else 0)
    assert dim * float(off.square().mean()) == pytest.approx(known, rel=0.15)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_what_was_decoded_is_coded_the_same_again(bits):
    """No loss from generation to generation: all that changes is the norm, by what centroids take."""
    x = sphere(512, 128, seed=12)[None, :, None]
    method = tq(bits, 128, "norm")
    *codes, norms = method.encode(x)
    *again, lengths = method.encode(method.decode([*codes, norms], 512))
    for first, second in zip(codes, again, strict=True):
        assert torch.equal(first, second)
    assert torch.allclose(norms.float(), lengths.float(), rtol=2e-3)


def test_a_blob_is_read_by_hand():
    """Two bits of 64 dimensions, by NumPy and SciPy alone but for the signs and the codebook."""
    rope = Rope(RopeKind.DEFAULT, 10_000.0, 64)
    world = World(kv_layout(layers=2, kv_heads=3, head_dim=64, dtype=Dtype.F32), rope)
    raw = world.block(20, seed=1, first_token=64)
    data = encode(world, Setting("tq", 2, seed=9), raw, tokens=20).blob
    blob = parse(memoryview(data))
    arrays = {
        (s.stream, s.part): np.frombuffer(blob.payload(s)[: s.raw_bytes], np.uint8) for s in blob.sections
    }
    vectors, levels = 2 * 20 * 3, np.array([-1.499975, -0.452119, 0.452119, 1.499975]) / 8
    got = world.values(decode(world, data, 20), 20)
    for stream, name in enumerate(("k", "v")):
        packed, norms = arrays[stream, 0], arrays[stream, 1].view(np.float16).astype(np.float64)
        assert (len(packed), len(norms)) == (vectors * 64 // 4, vectors)
        codes = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)])
        signs = Draw(9, 4 * stream).signs(1, 64).numpy()[0]
        turned = levels[codes].reshape(vectors, 64) * norms[:, None]
        want = (turned @ (sylvester(64) / 8)) * signs
        assert np.abs(got[name].reshape(vectors, 64).numpy() - want).max() < 1e-4 * np.abs(want).max()


def test_the_codes_of_a_blob_do_not_change():
    """What a seed turns and a codebook cuts, for ever."""
    codes = torch.cat(tq(3, 32).encode(torch.linspace(-1, 1, 64 * 32).view(1, 64, 1, 32))[:-1])
    assert hashlib.sha256(codes.numpy().tobytes()).hexdigest()[:16] == "c093c104b32753af"
