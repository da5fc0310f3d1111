"""Entropy coding of many lanes at once, each with its own distribution: rANS (Duda, arXiv 1311.2540).

A lane is a row of symbols that share a distribution, given as cumulative counts out of 2^16. All lanes take
one step after the other together, so a step is a few operations on vectors of lanes. The state of a lane is
between 2^24 and 2^40; 16 bits go to the words whenever it would grow beyond, in the order in which the
decoder asks for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtcd.core.errors import BadField

SCALE = 16
_LOW = 1 << 24
_WORD = 16
_MASK = (1 << _WORD) - 1
STATE_BYTES = 5


def table(symbols: Tensor, alphabet: Tensor, most: int) -> Tensor:
    """Return cumulative counts of every lane, int64 ``[lanes, most + 1]``, every symbol at least 1 of 2^16.

    Args:
        symbols: ``[T, lanes]``, each below the alphabet of its lane.
        alphabet: how many symbols each lane has, at most `most`.
        most: length of the longest alphabet.
    """
    steps, lanes = symbols.shape
    counts = torch.zeros((lanes, most), dtype=torch.int64, device=symbols.device)
    counts.scatter_add_(1, symbols.t(), torch.ones_like(symbols.t()))
    summed = torch.cat((torch.zeros_like(counts[:, :1]), counts.cumsum(dim=1)), dim=1)
    number = torch.arange(most + 1, device=symbols.device)
    room = (1 << SCALE) - alphabet[:, None]
    found: Tensor = summed * room // max(steps, 1) + torch.minimum(number, alphabet[:, None])
    return found if steps else torch.where(number >= alphabet[:, None], 1 << SCALE, found)


def encode(symbols: Tensor, cumulative: Tensor) -> tuple[Tensor, Tensor]:
    """Return words, int16, and the last state of each lane, uint8 ``[lanes, 5]``.

    Args:
        symbols: int64 ``[T, lanes]``.
        cumulative: as `table` returns it.
    """
    lows = cumulative.gather(1, symbols.t()).t()
    widths = cumulative.gather(1, symbols.t() + 1).t() - lows
    state = torch.full_like(cumulative[:, 0], _LOW)
    words = [state[:0]]
    for low, width in zip(lows.flip(0), widths.flip(0), strict=True):
        full = state >= width * _LOW
        words.append(state[full] & _MASK)
        state = torch.where(full, state >> _WORD, state)
        state = (state // width << SCALE) + state % width + low
    shifts = 8 * torch.arange(STATE_BYTES, device=state.device)
    return torch.cat(words[::-1]).to(torch.int16), (state[:, None] >> shifts).to(torch.uint8)


def decode(words: Tensor, states: Tensor, cumulative: Tensor, steps: int) -> Tensor:
    """Return the symbols, int64 ``[steps, lanes]``.

    Raises:
        BadField: words or states are not those of any symbols.
    """
    if bool((cumulative.diff(dim=1) < 0).any()):
        raise BadField("blob", "counts of symbols that fall")
    shifts = 8 * torch.arange(STATE_BYTES, device=states.device)
    state = (states.to(torch.int64) << shifts).sum(dim=1)
    read, symbols = words.to(torch.int64) & _MASK, torch.empty((steps, len(state)), dtype=torch.int64)
    symbols, used = symbols.to(state.device), 0
    for step in range(steps):
        slot = state & _MASK
        symbol = torch.searchsorted(cumulative, slot[:, None], right=True)[:, 0] - 1
        low = cumulative.gather(1, symbol[:, None])[:, 0]
        width = cumulative.gather(1, symbol[:, None] + 1)[:, 0] - low
        state = width * (state >> SCALE) + slot - low
        empty = state < _LOW
        count = int(empty.sum())
        if used + count > len(read):
            raise BadField("blob", "codes end before their symbols do")
        state[empty] = state[empty] << _WORD | read[used : used + count]
        symbols[step] = symbol
        used += count
    if used != len(read) or bool((state != _LOW).any()):
        raise BadField("blob", "codes go on behind their symbols")
    return symbols
