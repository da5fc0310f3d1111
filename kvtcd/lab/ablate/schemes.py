"""Schemes by name: those of the papers, and each factor on its own.

Names are those of arXiv 2607.09683: a letter before K or V is a correction on that side, Q a sketch of the
remainder for one bit less. F is its "full projection", of which it only says that it loses; here, a sketch of
the whole vector for all bits. SpectralQuant: `squ` gives all components equal bits, which is what its
published allocation comes to, `sqb` fills among the first components, `sqw` among all (corrected). `raw`
stores no norms. `shared` takes the basis of keys for values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import get_args, get_type_hints

from kvtcd.lab.ablate.sides import Side


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is done to keys, and to values."""

    keys: Side
    values: Side

    @property
    def sketches_values(self) -> bool:
        """Whether values have a sketch."""
        return self.values.correction != "none"


_TQ = Side()
_PLAIN = Side(rotation="none", levels="uniform")
_SQ = Side(rotation="eigen", levels="gauss")
_CORRECTIONS = {"": "none", "q": "qjl", "f": "full"}


def _corrected(keys: str, values: str, side: Side = _TQ) -> Scheme:
    """Return a scheme with corrections by letter."""
    known = {letter: replace(side, correction=word) for letter, word in _CORRECTIONS.items()}  # type: ignore[arg-type]  # the words of Correction
    return Scheme(known[keys], known[values])


_FILLED = replace(_SQ, allocation="fill")
_RAW = replace(_SQ, normalise="none")
NAMED: dict[str, Scheme] = {
    "plain-kv": Scheme(_PLAIN, _PLAIN),
    "tq-kv": _corrected("", ""),
    "tq-qkv": _corrected("q", ""),
    "tq-fkv": _corrected("f", ""),
    "tq-kqv": _corrected("", "q"),
    "tq-qkqv": _corrected("q", "q"),
    "tq-kfv": _corrected("", "f"),
    "tq-fkfv": _corrected("f", "f"),
    "squ-kv": Scheme(_SQ, _SQ),
    "squ-qkv": _corrected("q", "", _SQ),
    "squ-kv-raw": Scheme(_RAW, _RAW),
    "sqb-kv": Scheme(replace(_SQ, allocation="band"), replace(_SQ, allocation="band")),
    "sqw-kv": Scheme(_FILLED, _FILLED),
    "sqw-kv-raw": Scheme(replace(_FILLED, normalise="none"), replace(_FILLED, normalise="none")),
    "squ-kv-shared": Scheme(_SQ, replace(_SQ, foreign=True)),
    "sqw-kv-shared": Scheme(_FILLED, replace(_FILLED, foreign=True)),
}
"""Of the papers."""
EIGHT = tuple(NAMED)[:8]
"""The eight of TurboQuant that the paper holds against each other."""
REFERENCE = "tq-kv"
SEEDS = 4
"""Draws of the random parts of `REFERENCE`, to see what a seed does."""
_HADAMARD = {"wht", "rht1", "rht2", "rht3"}


def factors() -> dict[str, tuple[str, ...]]:
    """Return what each factor may be."""
    hints = get_type_hints(Side)
    return {field.name: get_args(hints[field.name]) for field in fields(Side) if get_args(hints[field.name])}


def transforms(dim: int) -> bool:
    """Tell whether there is a Hadamard transform of so many dimensions: of a power of two."""
    return dim & (dim - 1) == 0


def grid(dim: int = 128) -> dict[str, Scheme]:
    """Return every scheme of heads of so many dimensions: by name, by factor, by seed.

    Factors are changed one at a time about `tq-kv`, and about `sqw-kv` where its components take part;
    corrections on each side alone, all others on both. Where there is no Hadamard transform, rotations are
    uniform over all in its place, as those of the codec `tq` are, and none are compared with it.
    """
    found = _grid()
    if transforms(dim):
        return found
    left_out = {f"rotation={word}" for word in (*_HADAMARD, "haar")}
    return {
        name: Scheme(_haar(one.keys), _haar(one.values))
        for name, one in found.items()
        if name not in left_out
    }


def _haar(side: Side) -> Side:
    return replace(side, rotation="haar") if side.rotation in _HADAMARD else side


def _grid() -> dict[str, Scheme]:
    found = dict(NAMED)
    for factor, words in factors().items():
        for word in words:
            own = replace(_TQ, **{factor: word})  # type: ignore[arg-type]  # one of its words
            if factor == "correction":
                found[f"key-correction={word}"] = Scheme(own, _TQ)
                found[f"value-correction={word}"] = Scheme(_TQ, own)
            elif factor != "allocation":  # all its coordinates have the same variance
                found[f"{factor}={word}"] = Scheme(own, own)
            if factor in {"levels", "scale", "allocation", "normalise"}:
                filled = replace(_FILLED, **{factor: word})  # type: ignore[arg-type]  # the same
                found[f"eigen {factor}={word}"] = Scheme(filled, filled)
    for seed in range(1, SEEDS):
        own = replace(_TQ, seed=seed)
        found[f"seed={seed}"] = Scheme(own, own)
    return {name: scheme for name, scheme in found.items() if name in NAMED or scheme not in NAMED.values()}
