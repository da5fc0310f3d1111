"""The predictor of sensitive tokens, on tokens whose sensitivity is known."""

import pytest
import torch

from kvtcd.lab.token_weights import Pilot, Regression

LAYERS, HEADS, DIM = 2, 2, 4
P = LAYERS * HEADS * DIM


def tokens(count, seed):
    """Rows of two streams; the log energy of gradients is linear in one direction of each."""
    draw = torch.Generator().manual_seed(seed)
    rows = {name: torch.randn(count, P, generator=draw) * torch.linspace(2, 0.5, P) + 3 for name in "kv"}
    level = {"k": 0.8 * (rows["k"][:, 0] - 3), "v": 0.5 * (rows["k"][:, 1] - 3) - 0.7 * (rows["v"][:, 2] - 3)}
    gradients = {
        name: torch.randn(LAYERS, count, HEADS, DIM, generator=draw) * (x / 2).exp()[None, :, None, None]
        for name, x in level.items()
    }
    return rows, gradients, torch.stack(list(level.values()), dim=1)


def moments(gradients):
    return {name: (g.transpose(1, 2).mT @ g.transpose(1, 2)) / g.shape[1] for name, g in gradients.items()}


@pytest.fixture(scope="module")
def pilot():
    rows, gradients, _ = tokens(600, seed=0)
    return Pilot.of(rows, moments(gradients))


def test_features_are_uncorrelated_and_of_unit_variance(pilot):
    features = pilot.features(tokens(600, seed=0)[0])
    assert features.shape == (600, 2 * P)
    for part in (features[:, :P], features[:, P:]):
        assert torch.allclose(part.t() @ part / 600, torch.eye(P), atol=1e-3)


def test_sensitivities_are_log_energies_of_whitened_gradients(pilot):
    _, gradients, level = tokens(400, seed=1)
    got = pilot.sensitivities(gradients)
    for stream in range(2):
        assert torch.corrcoef(torch.stack((got[:, stream], level[:, stream])))[0, 1] > 0.8


def test_what_was_learned_from_some_tokens_holds_for_others(pilot):
    first, second = tokens(1500, seed=2), tokens(1500, seed=3)
    learned = Regression.of(pilot.features(first[0]), pilot.sensitivities(first[1]))
    learned.add(Regression.of(pilot.features(second[0]), pilot.sensitivities(second[1])))
    both = Regression.of(
        torch.cat([pilot.features(x[0]) for x in (first, second)]),
        torch.cat([pilot.sensitivities(x[1]) for x in (first, second)]),
    )
    assert torch.allclose(learned.gram, both.gram, rtol=1e-5)
    rows, _, level = tokens(500, seed=4)
    predicted = learned.offsets(pilot.features(rows))
    for stream in range(2):
        assert torch.corrcoef(torch.stack((predicted[:, stream], level[:, stream])))[0, 1] > 0.97


def test_rows_of_the_predictor_say_what_its_features_say(pilot):
    rows, gradients, _ = tokens(800, seed=5)
    learned = Regression.of(pilot.features(rows), pilot.sensitivities(gradients))
    direct = sum((rows[name] - pilot.means[name]) @ row.t() for name, row in learned.rows(pilot).items())
    assert torch.allclose(direct, learned.offsets(pilot.features(rows)), atol=1e-4)
