"""The entropy coder of many lanes: what goes in comes out, at the rate that entropy allows."""

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtcd.codec.rivals import narrow, rans
from kvtcd.codec.rivals.waterfill import MOST, water_fill
from kvtcd.core.errors import BadField


def drawn(steps, alphabet, seed, skew=1.0):
    draw = torch.Generator().manual_seed(seed)
    uniform = torch.rand((steps, len(alphabet)), generator=draw) ** skew
    return (uniform * torch.tensor(alphabet)).to(torch.int64)


def coded(symbols, alphabet):
    cumulative = rans.table(symbols, torch.tensor(alphabet), max(alphabet))
    return cumulative, *rans.encode(symbols, cumulative)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(0, 90),
    alphabet=st.lists(st.integers(1, 31), min_size=1, max_size=20),
    seed=st.integers(0, 99),
    skew=st.sampled_from([0.2, 1.0, 5.0, 40.0]),
)
def test_symbols_come_back(steps, alphabet, seed, skew):
    symbols = drawn(steps, alphabet, seed, skew)
    cumulative, words, states = coded(symbols, alphabet)
    assert torch.equal(rans.decode(words, states, cumulative, steps), symbols)
    assert (cumulative[:, 0] == 0).all()
    assert (cumulative[:, -1] == 1 << 16).all()


def test_hardly_a_changed_word_goes_unnoticed():
    """Most leave a lane in another state than it began with; a few are other symbols, as good as any."""
    symbols = drawn(50, [7] * 5, seed=2)
    cumulative, words, states = coded(symbols, [7] * 5)
    unnoticed = 0
    for number in range(len(words)):
        flipped = words.clone()
        flipped[number] ^= 1
        try:
            rans.decode(flipped, states, cumulative, 50)
        except BadField:
            continue
        unnoticed += 1
    assert unnoticed < 0.2 * len(words)


@pytest.mark.parametrize("skew", [1.0, 3.0, 20.0])
def test_the_rate_is_the_entropy(skew):
    """Of each lane's own distribution; states are five bytes a lane beside that."""
    symbols = drawn(4096, [15] * 8, seed=1, skew=skew)
    _, words, states = coded(symbols, [15] * 8)
    counts = torch.stack([torch.bincount(lane, minlength=15) for lane in symbols.t()]).double()
    share = counts / 4096
    entropy = float(-(counts * share.clamp_min(1e-12).log2()).sum())
    assert states.shape == (8, 5)
    assert entropy - 40 * 8 < 16 * len(words) < entropy * 1.01


def test_words_that_do_not_fit_are_refused():
    symbols = drawn(50, [7] * 5, seed=2)
    cumulative, words, states = coded(symbols, [7] * 5)
    for changed in (words[:-1], torch.cat((words, words[:1])), words.flip(0)):
        with pytest.raises(BadField):
            rans.decode(changed, states, cumulative, 50)
    with pytest.raises(BadField):
        rans.decode(words, states.roll(1, 0), cumulative, 50)
    with pytest.raises(BadField):
        rans.decode(words[:0], states, cumulative, 0)  # a state that symbols are left in
    falling = cumulative.clone()
    falling[2, 3] = 60000
    with pytest.raises(BadField, match="fall"):
        rans.decode(words, states, falling, 50)


@given(bits=st.integers(1, 8), count=st.integers(1, 200), seed=st.integers(0, 99))
def test_codes_of_any_width_come_back_and_take_their_bits(bits, count, seed):
    codes = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(seed))
    arrays = narrow.split(codes.to(torch.uint8), bits)
    assert torch.equal(narrow.join(arrays, bits, count).to(torch.int64), codes)
    assert [tuple(a.shape) for a in arrays] == [f.shape for f in narrow.fields(count, bits)]
    assert sum(map(len, arrays)) <= count * bits / 8 + len(arrays)


def test_a_code_of_eight_values_takes_three_bits():
    codes = torch.arange(8, dtype=torch.uint8).repeat(100)
    assert sum(map(len, narrow.split(codes, 3))) == 300


@settings(deadline=None)
@given(variances=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20), total=st.integers(0, 100))
def test_bits_go_one_by_one_to_the_largest_error(variances, total):
    total = min(total, MOST * len(variances))
    heap = [(-v, n) for n, v in enumerate(variances)]
    heapq.heapify(heap)
    wanted = [0] * len(variances)
    for _ in range(total):
        error, place = heapq.heappop(heap)
        wanted[place] += 1
        if wanted[place] < MOST:
            heapq.heappush(heap, (error / 4, place))
    assert water_fill(torch.tensor(variances, dtype=torch.float64), total).tolist() == wanted


@pytest.mark.parametrize("k", [1, 2, 3])
def test_four_to_the_k_times_the_variance_is_k_bits_more(k):
    """What the published allocation of SpectralQuant does not do at whole budgets."""
    low, high = water_fill(torch.tensor([1.0, 1.01 * 4.0**k]), 4 + k).tolist()
    assert high - low == k
    assert water_fill(torch.ones(3, 8), 16).tolist() == [[2] * 8] * 3
