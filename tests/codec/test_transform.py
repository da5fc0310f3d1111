"""Against a float64 product of rows gathered one element at a time."""

from types import SimpleNamespace

import pytest
import torch
from support.codec_world import DEFAULT, World, kv, mla

from kvtcd.codec import transform as transform_module
from kvtcd.codec.rope import Rotation
from kvtcd.codec.transform import Transform, _product, product_dtype, rows, views
from kvtcd.core.layout import Dtype

L, T, H, D, R = 5, 37, 2, 16, 40


@pytest.fixture
def affine():
    p = L * H * D
    mean = 10 * torch.randn(p)
    basis = torch.linalg.qr(torch.randn(p, R)).Q.t().contiguous()
    return mean, basis, Transform(mean, basis, basis, L)


def test_views_are_the_bytes_of_the_block_in_layout_order():
    layout = mla(Dtype.F32)
    raw = torch.randint(0, 60, (layout.nbytes(6),), dtype=torch.uint8)
    latent, k_pe = views(raw, layout, 6)
    assert (latent.shape, k_pe.shape) == ((3, 6, 1, 40), (3, 6, 1, 16))
    assert latent.data_ptr() == raw.data_ptr()
    offset = 4 * 3 * 6 * 40
    assert torch.equal(k_pe[1, 2, 0, :1].view(torch.uint8), raw[offset + 4 * (6 + 2) * 16 :][:4])


def test_a_row_holds_layer_then_head_then_dimension():
    x = torch.arange(L * T * H * D, dtype=torch.float32).view(L, T, H, D)
    got = rows(x, None)
    for layer, t, h, d in [(0, 0, 0, 0), (1, 2, 1, 3), (4, 36, 1, 15)]:
        assert got[t, (layer * H + h) * D + d] == x[layer, t, h, d]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotating", [True, False])
def test_coefficients_are_the_centred_product(affine, dtype, rotating):
    mean, basis, transform = affine
    x = (torch.randn(L, T, H, D) + mean.view(L, 1, H, D)).to(dtype)
    undo = Rotation(DEFAULT, 50, T, inverse=True) if rotating else None
    want = (rows(x, undo).double() - mean.double()) @ basis.double().t()
    for rank in (R, 17, 1, 0):
        got = transform.forward(transform.centred(x, undo), rank)
        assert got.dtype == torch.float32
        assert got.shape == (rank, T)
        assert (got.t().double() - want[:, :rank]).norm() <= 0.01 * want[:, :rank].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("further", [0, 7])
def test_a_gpu_gives_out_the_float32_in_which_it_has_summed_up(further):
    """Of the very numbers that it multiplies, so that only sums could lose anything."""
    device, p = torch.device("cuda", 0), L * H * D
    transform = Transform(torch.zeros(p), torch.randn(R, p), torch.randn(R, p), L, device)
    centred = transform.centred(torch.randn(L, T, H, D, device=device), None)
    more = torch.randn(further, p, device=device).to(centred.dtype)
    got = transform.forward(centred, R, more if further else None)
    exact = torch.cat((transform._encode, more)).double() @ centred.double().t()
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert float((got - exact).abs().max() / exact.abs().max()) < 1e-5, "bfloat16 would be off by 2e-3"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e-5])
def test_products_of_a_float16_cache_do_not_depend_on_the_unit_of_weights(monkeypatch, dtype, unit):
    """Weights of layers differ by 62 times, a feature by hundreds; float16 products are 18 dB off, or NaN."""
    monkeypatch.setattr(transform_module, "product_dtype", lambda _: dtype)
    draw = torch.Generator().manual_seed(0)
    root = unit * torch.logspace(0, -1.8, L).repeat_interleave(H * D)
    basis = torch.linalg.qr(torch.randn(L * H * D, R, generator=draw))[0].t()
    encode, decode = basis * root, basis / root
    kept = (torch.randn(T, R, generator=draw) * unit) @ decode
    kept[:, 7] += 300 * torch.randn(T, generator=draw)
    view = kept.view(T, L, H, D).transpose(0, 1).half()
    transform = Transform(torch.zeros(L * H * D), encode, decode, L)
    coefficients = transform.forward(transform.centred(view, None), R)
    want = rows(view, None).double() @ encode.double().t()
    assert (coefficients.t().double() - want).norm() <= 10 ** (-45 / 20) * want.norm()
    out = torch.empty_like(view, dtype=torch.float32)
    transform.inverse(coefficients, None, out)
    back = coefficients.t().double() @ decode.double()
    assert (rows(out, None).double() - back).norm() <= 10 ** (-45 / 20) * back.norm()


def test_a_mean_ten_times_the_signal_costs_no_accuracy(affine):
    """Products may run in bfloat16; the mean must not go through them."""
    mean, basis, _ = affine
    x = torch.randn(L, T, H, D) + 1000 * mean.view(L, 1, H, D)
    transform = Transform(1000 * mean, basis, basis, L)
    got = transform.forward(transform.centred(x, None), R)
    want = (rows(x, None).double() - 1000 * mean.double()) @ basis.double().t()
    assert (got.t().double() - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("rotating", [True, False])
def test_the_inverse_of_coefficients_is_mean_plus_components(affine, rotating):
    mean, basis, transform = affine
    c = torch.randn(R, T)
    redo = Rotation(DEFAULT, 50, T, inverse=False) if rotating else None
    want = (c.t().double() @ basis.double() + mean.double()).view(T, L, H, D).transpose(0, 1).float()
    want = redo(want) if redo else want
    out = torch.zeros(L, T, H, D)
    transform.inverse(c, redo, out)
    assert (out - want).abs().max() < 0.1
    assert (out - want).norm() / (want - mean.view(L, 1, H, D)).norm() < 0.01


def test_the_inverse_writes_its_tokens_and_no_others(affine):
    _, _, transform = affine
    block = torch.full((L, T + 9, H, D), 7.0, dtype=torch.bfloat16)
    transform.inverse(torch.randn(3, T), None, block[:, 4 : 4 + T])
    assert (block[:, :4] == 7).all()
    assert (block[:, 4 + T :] == 7).all()
    assert not (block[:, 4 : 4 + T] == 7).all()


def test_no_component_at_all_decodes_to_the_mean(affine):
    mean, _, transform = affine
    out = torch.empty(L, T, H, D)
    transform.inverse(torch.empty(0, T), None, out)
    assert torch.equal(out, mean.view(L, 1, H, D).expand(L, T, H, D))


def test_float16_output_is_clamped_to_its_range(affine):
    _, _, transform = affine
    out = torch.empty(L, T, H, D, dtype=torch.float16)
    transform.inverse(torch.full((R, T), 6e5), None, out)
    assert out.abs().max() == 65504


def test_blocks_larger_than_a_cache_are_cut_without_a_seam():
    """Layers are handled a few at a time: with 300 tokens of wide layers, one or two."""
    world = World(kv(layers=7))
    x = torch.randn(7, 300, 32, 32)
    mean, basis = torch.randn(7 * 1024), torch.linalg.qr(torch.randn(7 * 1024, 8)).Q.t().contiguous()
    transform = Transform(mean, basis, basis, world.layout.layers)
    got = transform.forward(transform.centred(x, None), 8)
    want = (rows(x, None) - mean) @ basis.t()
    assert torch.allclose(got.t(), want, atol=0.5, rtol=0.02)


def test_the_product_type_of_a_cpu_is_bfloat16_exactly_where_it_is_native():
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert product_dtype(torch.device("cpu")) is (torch.bfloat16 if native else torch.float32)


def test_the_product_type_is_that_of_the_device_which_multiplies(monkeypatch):
    capability = {0: (7, 5), 1: (8, 0), 2: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    found = [product_dtype(torch.device("cuda", index)) for index in capability]
    assert found == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "given"),
    [
        (True, torch.bfloat16, {"out_dtype": torch.float32}),
        (True, torch.float32, {}),
        (False, torch.bfloat16, {}),
    ],
)
def test_a_gpu_gives_out_the_sums_as_they_are(monkeypatch, is_cuda, dtype, given):
    monkeypatch.setattr(torch, "mm", lambda _left, _right, **told: told)
    assert _product(SimpleNamespace(is_cuda=is_cuda, dtype=dtype), None) == given
