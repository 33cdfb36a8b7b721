"""An ABNN as a module, and its predictions."""

import copy
import io
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import abnn
from nets import cnn, mlp

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def moved(**kwargs: Any) -> abnn.ABNN:
    """An ABNN whose modes differ, as after a fit."""
    bnn = abnn.convert(mlp(), **{"modes": 3, "alpha": 0.1, **kwargs})
    torch.manual_seed(5)
    for layer in bnn.bayes_layers.values():
        for tensor in layer.bank.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.2 * torch.rand_like(tensor))
    return bnn


# Prediction


def test_the_prediction_is_the_mean_of_the_plain_networks_of_its_draws() -> None:
    bnn = moved()
    nets = [bnn.draw(mode, seed=4, index=i) for mode in range(3) for i in range(5)]
    expected = torch.stack([net(X).softmax(1) for net in nets])
    pred = bnn.predict(X, samples=5, seed=4, keep_members=True)
    torch.testing.assert_close(pred.members, expected)
    torch.testing.assert_close(pred.probs, expected.mean(0))
    torch.testing.assert_close(pred.total, torch.special.entr(expected.mean(0)).sum(1))
    torch.testing.assert_close(pred.aleatoric, torch.special.entr(expected).sum(2).mean(0))
    torch.testing.assert_close(pred.epistemic, pred.total - pred.aleatoric)
    assert pred.samples_used == 15


@pytest.mark.parametrize("noise", ["channel", "example", "element"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_chunks_change_no_draw(noise: str, chunk: int) -> None:
    bnn = moved(noise=noise)
    expected = bnn.predict(X, samples=4, seed=2, keep_members=True).members
    assert expected is not None
    chunked = bnn.predict(
        X, samples=4, seed=2, keep_members=True, plan=abnn.Plan(draws=chunk)
    ).members
    torch.testing.assert_close(chunked, expected)


def test_the_batch_size_changes_no_draw() -> None:
    bnn = moved()
    whole = bnn.predict(X, seed=2).probs
    parts = torch.cat([bnn.predict(part, seed=2).probs for part in X.split(1)])
    torch.testing.assert_close(parts, whole)


def test_seeds_repeat_and_differ() -> None:
    bnn = moved()
    assert torch.equal(bnn.predict(X, seed=3).probs, bnn.predict(X, seed=3).probs)
    assert not torch.allclose(bnn.predict(X, seed=3).probs, bnn.predict(X, seed=4).probs)
    assert torch.isfinite(bnn.predict(X, seed=-1).probs).all()


def test_numpy_numbers_are_numbers() -> None:
    bnn = moved(modes=np.int64(3), alpha=np.float32(0.1))
    one: Any = np.int64(1)
    expected = moved(alpha=float(np.float32(0.1))).predict(X, 1, seed=1, modes=[1]).probs
    assert torch.equal(bnn.predict(X, one, seed=one, modes=np.array([1])).probs, expected)


def test_more_samples_contain_the_fewer() -> None:
    few, many = (moved().predict(X, samples=s, keep_members=True).members for s in (2, 3))
    assert few is not None
    assert many is not None
    torch.testing.assert_close(many[[0, 1, 3, 4, 6, 7]], few)


def test_modes_can_be_chosen() -> None:
    bnn = moved()
    whole = bnn.predict(X, keep_members=True).members
    assert whole is not None
    torch.testing.assert_close(bnn.predict(X, modes=[1], keep_members=True).members, whole[8:16])


def test_calling_it_gives_the_log_of_the_mean_probabilities() -> None:
    bnn = moved()
    torch.testing.assert_close(bnn(X), bnn.predict(X, samples=8, seed=0).probs.log())


def test_its_output_has_the_layout_of_the_logits() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    bnn = abnn.convert(net, class_dim=-1)
    tokens = torch.randn(2, 5, 4)
    assert bnn(tokens).shape == net(tokens).shape
    assert bnn.predict(tokens).probs.shape == (2, 6, 5)
    torch.testing.assert_close(bnn(tokens).exp().sum(-1), torch.ones(2, 5))


def test_training_mode_does_not_reach_predict() -> None:
    bnn = moved()
    expected = bnn.predict(X).probs
    bnn.train()
    assert torch.equal(bnn.predict(X).probs, expected)
    assert bnn.training


def test_predict_needs_no_gradients_and_leaves_none() -> None:
    assert not moved().predict(X).probs.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples=0"),
        ({"samples": 2.0}, "samples=2.0"),
        ({"samples": True}, "samples=True"),
        ({"plan": 4}, "plan=4 is not an abnn.Plan"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"modes": [3]}, "0 to 2"),
        ({"modes": []}, "0 to 2"),
        ({"modes": 1}, r"as modes=\[0\]"),
        ({"x": torch.empty(0, 4)}, "no example"),
        ({"x": "image.png"}, "no tensor"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        moved().predict(**{"x": X, **arguments})


def test_threads_do_not_mix_their_draws() -> None:
    bnn = abnn.convert(cnn(), alpha=0.5, modes=2)
    x = torch.randn(4, 3, 8, 8)
    expected = [bnn.predict(x, seed=s).probs for s in range(4)]
    results: dict[int, Tensor] = {}

    def work(seed: int) -> None:
        for _ in range(5):
            results[seed] = bnn.predict(x, seed=seed).probs

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        torch.testing.assert_close(results[seed], expected[seed])


def test_an_input_that_is_not_finite_says_nothing_of_the_network() -> None:
    bnn = moved()
    assert bnn.predict(torch.full((2, 4), torch.nan)).probs.isnan().all()
    assert bnn.is_foldable(X)


# The networks inside


def test_a_draw_is_a_plain_network_of_the_original_architecture() -> None:
    bnn, net = moved(), mlp()
    plain = bnn.draw(mode=1, seed=3)
    assert [(n, type(m)) for n, m in plain.named_modules()] == [
        (n, type(m)) for n, m in net.named_modules()
    ]
    assert list(plain.state_dict()) == list(net.state_dict())
    assert torch.equal(plain(X), plain(X))
    net.load_state_dict(plain.state_dict())
    assert torch.equal(net(X), plain(X))


def test_a_draw_does_not_change_with_its_origin() -> None:
    bnn = moved()
    plain = bnn.draw(mode=0)
    expected = plain(X)
    for parameter in bnn.trainable_parameters():
        parameter.data.zero_()
    assert torch.equal(plain(X), expected)


def test_a_draw_of_a_norm_without_affine_has_one() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3, elementwise_affine=False))
    bnn = abnn.convert(net, alpha=0.2)
    plain = bnn.draw(mode=0)
    expected = bnn.predict(X, samples=1, modes=[0]).probs
    torch.testing.assert_close(plain(X).softmax(1), expected)


def test_there_is_no_plain_network_of_noise_per_example() -> None:
    with pytest.raises(ValueError, match="noise='channel'"):
        moved(noise="example").draw(0)
    with pytest.raises(ValueError, match="0 to 2"):
        moved().draw(3)


def test_restoring_gives_the_network_as_it_was() -> None:
    net = mlp()
    net[0].weight.requires_grad_(False)
    net[2].train()
    restored = abnn.convert(net).restore()
    assert [type(m) for m in restored.modules()] == [type(m) for m in net.modules()]
    assert [m.training for m in restored.modules()] == [m.training for m in net.modules()]
    assert [p.requires_grad for p in restored.parameters()] == [
        p.requires_grad for p in net.parameters()
    ]
    pairs = zip(restored.state_dict().items(), net.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(t, u) for (a, t), (b, u) in pairs)


def test_disabled_is_the_original_and_comes_back() -> None:
    bnn = moved()
    expected = bnn(X)
    with bnn.disabled():
        assert torch.equal(bnn(X), mlp()(X))
    assert torch.equal(bnn(X), expected)


# A well-behaved module


def test_noise_stays_on_in_both_modes_and_only_statistics_follow_the_data() -> None:
    bnn = abnn.convert(mlp(), alpha=0.3)
    bnn.train()
    assert not torch.allclose(bnn(X), bnn(X))  # fresh draws
    mean = bnn.bayes_layers["1"].bank.mean
    assert mean is not None
    assert not torch.equal(mean[0], mlp().state_dict()["1.running_mean"])
    bnn.eval()
    before = mean.clone()
    assert torch.equal(bnn(X), bnn(X))
    assert torch.equal(mean, before)


def test_the_backbone_is_never_in_train_mode() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    bnn = abnn.convert(net, alpha=0)
    bnn.train()
    draws = [abnn.Draw(0, 0, 0)]
    assert torch.equal(bnn.logits(X, draws), bnn.logits(X, draws))
    assert not bnn.backbone[2].training  # type: ignore[index]


def test_state_dict_round_trip() -> None:
    bnn, other = moved(), abnn.convert(mlp(), modes=3, alpha=0.1)
    other.load_state_dict(bnn.state_dict())
    assert torch.equal(other.predict(X).probs, bnn.predict(X).probs)


def test_loading_another_state_never_writes_the_shared_network() -> None:
    net = mlp()
    before = copy.deepcopy(net.state_dict())
    bnn = abnn.convert(net, modes=3)
    state = {k: v + 1 for k, v in moved().state_dict().items()}
    bnn.load_state_dict(state)
    assert all(torch.equal(t, before[k]) for k, t in net.state_dict().items())
    assert all(torch.equal(t, state[k]) for k, t in bnn.state_dict().items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_are_independent(copied: Any) -> None:
    bnn = moved()
    other = copied(bnn)
    assert torch.equal(other.predict(X).probs, bnn.predict(X).probs)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert not torch.allclose(other.predict(X).probs, bnn.predict(X).probs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 0.05)])
def test_it_moves_to_another_dtype_and_leaves_the_network(
    dtype: torch.dtype, tolerance: float
) -> None:
    net = mlp()
    bnn = abnn.convert(net, alpha=0.1)
    expected = bnn.predict(X).probs
    probs = bnn.to(dtype).predict(X.to(dtype)).probs
    torch.testing.assert_close(probs.float(), expected, rtol=tolerance, atol=tolerance)
    assert net[0].weight.dtype == torch.float32


def test_it_moves_to_another_device() -> None:
    bnn = abnn.convert(mlp()).to("meta")
    assert all(t.is_meta for t in bnn.state_dict().values())


def test_half_networks_keep_their_banks_in_full_precision() -> None:
    bnn = abnn.convert(mlp().bfloat16())
    assert all(p.dtype == torch.float32 for p in bnn.trainable_parameters())
    assert bnn.predict(X.bfloat16()).probs.dtype == torch.float32


def test_it_compiles() -> None:
    torch.compiler.reset()
    bnn = moved()
    compiled = torch.compile(bnn, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), bnn(X))
        torch.testing.assert_close(compiled(X[:3]), bnn(X[:3]))


def test_torch_save_of_its_state_loads_without_pickled_code() -> None:
    file = io.BytesIO()
    torch.save(moved().state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = abnn.convert(mlp(), modes=3)
    other.load_state_dict(state)
    assert torch.equal(next(other.trainable_parameters()), next(moved().trainable_parameters()))


def test_it_describes_itself() -> None:
    text = repr(abnn.convert(cnn(), modes=4))
    assert text == ("ABNN(Sequential, modes=4, alpha=0.01, 2 Bayesian norms, 128 added parameters)")


def test_gradients_flow_through_a_call() -> None:
    bnn = moved()
    bnn(X)[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in bnn.trainable_parameters())
    assert all(p.grad is None for p in bnn.parameters() if not p.requires_grad)


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    """The largest number of tensor elements alive at once is the same for 8 and 64 draws."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    bnn, sizes = abnn.convert(cnn(), modes=1), []
    for samples in (8, 64):
        with Largest() as largest:
            bnn.predict(torch.randn(4, 3, 8, 8), samples=samples, plan=abnn.Plan(draws=4))
        sizes.append(largest.elements)
    assert sizes[0] == sizes[1]
