"""Which tokens a model minds most: a linear predictor of sensitivity from a token's own keys and values.

Per token, the energy of the gradients differs by a factor of seven either way (SmolLM2: the logarithm has a
standard deviation of 2). What later tokens will look at is not known when a block is stored, but a third of
that variance follows from the token itself, on texts of other kinds too. The predictor is linear in the
leading components, hence linear in the features: one more row of the encoding product for each stream.
Decoders do not need it, since the class of each token is stored.

Tokens are weighed before the basis is fitted, too: with the step of a token going with some power of its
sensitivity, what counts is the moment of its gradients *divided* by that power, and its coefficients
*multiplied*. Otherwise the few tokens that matter most decide for all others which directions do: with it,
SmolLM2 takes a third less at equal divergence. Each window is weighed by what the windows before it have
taught, so predictions are as good as they will be on new text.

Targets are logarithms of ``g^T M^-1 g`` summed over layers and heads, by stream; features the leading
components of all streams in a pilot basis, fitted to the held-out rows, which are read first. Ridge
regression keeps ``1025 x 1025`` numbers, however many tokens there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtcd.codec.weighted import by_head, root

_COMPONENTS = 512
"""Components of each stream that are features."""
_RIDGE = 0.3
"""Of the regression, as a share of the tokens seen: features have unit variance."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Pilot:
    """A first basis of all streams, good enough to say which tokens matter.

    Attributes:
        means: by stream, ``[p]``.
        rows: by stream, ``[n, p]``: a feature is a row times a token's features about their mean.
        whiten: by stream, ``M^(-1/2)``, ``[L, H, D, D]``.
    """

    means: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    whiten: Mapping[str, Tensor]

    @classmethod
    def of(cls, samples: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> Pilot:
        """Fit to sample rows ``[n, p]`` and second moments of gradients ``[L, H, D, D]`` of each stream."""
        means, projections, whiten = {}, {}, {}
        for name, sample in samples.items():
            half = root(moments[name])
            means[name] = sample.mean(dim=0)
            y = by_head(sample - means[name], half)
            _, deviations, axes = torch.linalg.svd(y, full_matrices=False)
            kept = min(_COMPONENTS, len(y) // 4)
            scale = (deviations[:kept] / len(y) ** 0.5).clamp_min(_TINY)
            projections[name] = by_head(axes[:kept] / scale[:, None], half)
            whiten[name] = torch.linalg.inv(half)
        return cls(means, projections, whiten)

    def features(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the features of tokens ``[n, p]`` of each stream, of unit variance: ``[n, f]``."""
        return torch.cat(
            [(rows[name] - self.means[name]) @ self.rows[name].t() for name in self.means], dim=1
        )

    def sensitivities(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return log energies of gradients ``[L, n, H, D]`` of each stream: ``[n, streams]``."""
        found = []
        for name in self.means:
            g = gradients[name].transpose(0, 1).flatten(1)
            found.append(by_head(g, self.whiten[name]).square().sum(dim=1).clamp_min(_TINY).log())
        return torch.stack(found, dim=1)


@dataclass(slots=True)
class Regression:
    """Normal equations of the predictor.

    Attributes:
        gram: of features and a one, float64 ``[f + 1, f + 1]``.
        target: their products with the log sensitivities, float64 ``[f + 1, streams]``.
    """

    gram: Tensor
    target: Tensor

    @classmethod
    def of(cls, features: Tensor, sensitivities: Tensor) -> Regression:
        """Begin with some tokens: ``[n, f]`` and ``[n, streams]``."""
        wide = torch.cat((features, torch.ones_like(features[:, :1])), dim=1).to(torch.float64)
        return cls(wide.t() @ wide, wide.t() @ sensitivities.to(torch.float64))

    def add(self, other: Regression) -> None:
        """Take in what another has seen."""
        self.gram += other.gram
        self.target += other.target

    def offsets(self, features: Tensor) -> Tensor:
        """Predict log sensitivities of tokens ``[n, f]`` up to a constant: ``[n, streams]``."""
        return features @ self._solved().to(features.dtype)

    def rows(self, pilot: Pilot) -> dict[str, Tensor]:
        """Return the predictor: by stream, what its features add to each log sensitivity, ``[streams, p]``.

        Constants are left out: they depend on what features are taken about.
        """
        weights = self._solved()
        found, used = {}, 0
        for name, projection in pilot.rows.items():
            own = weights[used : used + len(projection)].to(projection.dtype)
            found[name] = own.t() @ projection
            used += len(projection)
        return found

    def _solved(self) -> Tensor:
        """Return the weights of the features, ``[f, streams]``."""
        penalty = torch.full((len(self.gram),), _RIDGE, dtype=torch.float64, device=self.gram.device)
        penalty[-1] = 0.0
        solved: Tensor = torch.linalg.solve(self.gram + self.gram[-1, -1] * torch.diag(penalty), self.target)
        return solved[:-1]
