"""Members as a batch dimension: who owns which row, and when one pass is not to be trusted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.baselines import BatchEnsemble
from abnn.baselines.members import Members, change_first
from abnn.norm import NotFoldable
from nets import cnn, mlp
from networks import ODD_NETWORKS, build


class Windows(nn.Module):
    """A layer on four windows of every example: [B, 4 * D] -> [B * 4, D], or [4 * B, D]."""

    def __init__(self, example_major: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 5), nn.Linear(5, 3)
        self.example_major = example_major

    def forward(self, x: Tensor) -> Tensor:
        B = len(x)
        windows = x.view(B, 4, 3)
        if not self.example_major:
            windows = windows.transpose(0, 1)
        y: Tensor = self.layer(windows.reshape(B * 4, 3)).tanh()
        y = y.view(B, 4, 5) if self.example_major else y.view(4, B, 5).transpose(0, 1)
        return self.head(y.mean(1))  # type: ignore[no-any-return]


class Mixing(nn.Module):
    """Every example sees the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x).tanh()
        return self.head(y - y.mean(0))  # type: ignore[no-any-return]


class Table(nn.Module):
    """A layer on numbers of the network's own, which have no batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, 12))
        self.layer, self.head = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x) @ self.layer(self.table).T
        return y


class Lonely(nn.Module):
    """A layer on a vector, without a batch dimension at all."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(4))
        self.layer, self.head = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.layer(self.vector)
        assert scale.shape == (12,)
        y: Tensor = self.head(x * scale)
        return y


UNFOLDABLE: dict[str, Callable[[], nn.Module]] = {
    "windows first": lambda: Windows(example_major=False),
    "mixing": Mixing,
    "table of 8": lambda: Table(8),
    "table of 1": lambda: Table(2),
    "no batch": Lonely,
}


def apart(ensemble: BatchEnsemble) -> BatchEnsemble:
    for name, parameter in ensemble.named_parameters():
        if "ensemble" in name:
            parameter.data.normal_(1, 0.5)
    return ensemble.eval()


def one_by_one(ensemble: BatchEnsemble, x: Tensor) -> Tensor:
    """The members, each from a copy of the ensemble in which all are that one."""
    logits = []
    for m in range(ensemble.members):
        alone = copy.deepcopy(ensemble)
        for name, parameter in alone.named_parameters():
            if "ensemble" in name:
                parameter.data.copy_(parameter.data[m].expand_as(parameter))
        alone._members._folds.clear()
        with torch.no_grad(), alone._members.rows_of(0):
            logits.append(alone.network_logits(x))
    return torch.stack(logits)


def together(ensemble: BatchEnsemble, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(ensemble.member_logits(x)))


@pytest.mark.parametrize("make", [mlp, lambda: Windows(example_major=True), cnn])
@pytest.mark.parametrize("B", [1, 3])
def test_one_pass_equals_one_pass_a_member(make: Callable[[], nn.Module], B: int) -> None:
    net = make().eval()
    first = next(net.parameters())
    shape = (3, 8, 8) if first.ndim > 2 else (12,) if isinstance(net, Windows) else (4,)
    ensemble, x = apart(BatchEnsemble(net, members=4)), torch.randn(B, *shape)
    torch.testing.assert_close(together(ensemble, x), one_by_one(ensemble, x))
    assert list(ensemble._members._folds.values()) == [True]


@pytest.mark.parametrize("kind", UNFOLDABLE)
@pytest.mark.parametrize("B", [1, 2, 5])
def test_networks_that_do_not_fold_run_one_by_one_with_a_warning(kind: str, B: int) -> None:
    ensemble, x = apart(BatchEnsemble(UNFOLDABLE[kind](), members=2)), torch.randn(B, 12)
    with pytest.warns(UserWarning, match="BatchEnsemble can't run in one pass"):
        logits = together(ensemble, x)
    torch.testing.assert_close(logits, one_by_one(ensemble, x))
    torch.testing.assert_close(together(ensemble, x), logits)  # and it is said only once


def test_a_batch_in_the_second_dimension_runs_one_by_one() -> None:
    (network,) = ODD_NETWORKS
    ensemble, x = apart(BatchEnsemble(build(network), members=3)), network.inputs(4)
    with pytest.warns(UserWarning, match="one after another"):
        logits = together(ensemble, x)
    assert logits.shape == (3, 4, 10)
    torch.testing.assert_close(logits, one_by_one(ensemble, x))
    assert ensemble.training_logits(x).shape == (4, 10)


@pytest.mark.parametrize("kind", ["windows first", "mixing", "table of 8"])
def test_members_that_are_still_alike_do_not_hide_what_mixes_them(kind: str) -> None:
    """What is found out before a training, when all agree, has to hold after it."""
    ensemble, x = BatchEnsemble(UNFOLDABLE[kind](), 2, factors="ones").eval(), torch.randn(3, 12)
    with pytest.warns(UserWarning, match="one after another"):
        together(ensemble, x)
    apart(ensemble)
    torch.testing.assert_close(together(ensemble, x), one_by_one(ensemble, x))


def test_the_trial_changes_no_number() -> None:
    ensemble, x = BatchEnsemble(mlp(), members=2).train(), torch.randn(4, 4)
    before, random = copy.deepcopy(ensemble.state_dict()), torch.get_rng_state()
    assert ensemble._members.folds(ensemble, x)
    assert all(torch.equal(before[name], value) for name, value in ensemble.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert ensemble.training


def test_a_network_that_stops_folding_runs_one_by_one() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            few: Tensor = self.layer(x if len(x) < 10 else x[:7])
            return few if len(x) < 10 else few[:1].expand(len(x), -1)

    ensemble = apart(BatchEnsemble(Odd(), members=2))
    together(ensemble, torch.randn(2, 4))
    x = torch.randn(10, 4)
    with pytest.warns(UserWarning, match="one after another"):
        logits = together(ensemble, x)
    torch.testing.assert_close(logits, one_by_one(ensemble, x))


def owners(members: int, B: int) -> Tensor:
    """Which member each row of a training batch belonged to."""
    net = nn.Linear(1, 2, bias=False)
    nn.init.ones_(net.weight)
    ensemble = BatchEnsemble(net, members, factors="ones")
    ensemble.net.ensemble_s.data.copy_(torch.arange(float(members))[:, None].expand(-1, 2))
    return ensemble.training_logits(torch.ones(B, 1))[:, 0].long()


@pytest.mark.parametrize(("members", "B"), [(4, 16), (3, 8), (4, 4), (1, 5), (4, 3)])
def test_every_member_gets_an_equal_share_of_a_batch(members: int, B: int) -> None:
    counts = owners(members, B).bincount(minlength=members)
    assert counts.sum() == B
    assert counts.max() - counts.min() <= 1


def test_no_member_is_left_out_by_small_batches() -> None:
    seen = torch.cat([owners(4, 2) for _ in range(50)])
    assert (seen.bincount(minlength=4) >= 10).all()


def test_training_without_folding_trains_one_member_at_a_time_on_all_rows() -> None:
    ensemble, x = BatchEnsemble(Mixing(), members=3).train(), torch.randn(4, 12)
    expected = one_by_one(ensemble, x)
    chosen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30):
            logits = ensemble.training_logits(x)
            close = [torch.allclose(logits, each, atol=1e-6) for each in expected]
            assert sum(close) == 1
            chosen.add(close.index(True))
    assert chosen == {0, 1, 2}


@pytest.mark.filterwarnings("ignore:The members")
def test_a_network_that_can_not_fold_is_trained_all_the_same() -> None:
    ensemble = BatchEnsemble(Mixing(), members=2)
    torch.manual_seed(0)
    x = torch.randn(32, 12)
    loader = [(x, x[:, 0].gt(0).long())] * 10
    losses = abnn.train(ensemble, loader, epochs=8, lr=0.1).losses
    assert losses[-10:].mean() < 0.7 * losses[:10].mean()


def test_a_single_member_is_the_network_whatever_that_does() -> None:
    (network,) = ODD_NETWORKS
    net, x = build(network), network.inputs(4)
    ensemble = BatchEnsemble(net, members=1, factors="ones").eval()
    torch.testing.assert_close(ensemble.training_logits(x), net(x))
    torch.testing.assert_close(together(ensemble, x)[0], net(x))


def test_rows_that_can_not_be_told_apart_are_refused() -> None:
    members, bank = Members(2), torch.ones(2, 3)
    with members.rows_of(torch.tensor([0, 0, 1, 1])):
        for rows in (1, 3, 6):
            with pytest.raises(NotFoldable):
                members.select(bank, rows)
        with pytest.raises(NotFoldable):
            members.spread(torch.ones(2, 4), nn.Linear(4, 4), torch.zeros(4))


def test_the_first_argument_is_found_by_any_name() -> None:
    one = torch.ones(1)
    assert change_first(torch.neg, (one, 2), {"a": 3}) == ((-one, 2), {"a": 3})
    assert change_first(torch.neg, (), {"x": one, "a": 3}) == ((), {"x": -one, "a": 3})


def test_a_large_batch_runs_in_passes_of_a_few_hundred_rows() -> None:
    ensemble, x = apart(BatchEnsemble(mlp(), members=4)), torch.randn(301, 4)
    rows: list[int] = []
    first = ensemble.net[0]
    handle = first.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
    logits = together(ensemble, x)
    handle.remove()
    assert len(rows) > 2
    assert 256 <= max(rows) <= 512
    torch.testing.assert_close(logits, one_by_one(ensemble, x))
