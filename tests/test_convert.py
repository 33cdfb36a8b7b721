"""Converting any network: what is found, what is shared, what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import abnn
from abnn.norm import BayesNorm
from abnn.outputs import Output
from nets import Answers, Bypassing, Containers, Shared, TimeFirst, cnn, mlp

DRAWS = [abnn.Draw(seed=0, mode=m, index=i) for m in (0, 1) for i in (0, 1)]


def fold_and_loop(bnn: abnn.ABNN, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return bnn.logits(x, DRAWS), torch.cat([bnn.logits(x, [draw]) for draw in DRAWS])


def test_the_network_stays_as_it_is_and_shares_its_tensors() -> None:
    net = mlp().train()
    modules, state = list(net.modules()), copy.deepcopy(net.state_dict())
    bnn = abnn.convert(net)
    bnn.predict(torch.randn(2, 4))
    assert list(net.modules()) == modules
    assert not any(isinstance(m, BayesNorm) for m in modules)
    assert all(m.training for m in modules)
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert all(torch.equal(t, state[k]) for k, t in net.state_dict().items())
    own = {t.data_ptr() for t in net.state_dict().values()}
    shared = {t.data_ptr() for k, t in bnn.backbone.state_dict().items() if ".bank." not in k}
    assert shared == own


def test_modes_cost_only_their_norm_parameters() -> None:
    net = cnn()
    one, many = (
        sum(t.numel() for t in abnn.convert(net, modes=m).state_dict().values()) for m in (1, 16)
    )
    norms = 4 * 8 + 4 * 8 + 2  # gamma, beta, mean and variance of two norms, and their counters
    assert many - one == 15 * norms


def test_only_gamma_and_beta_are_trainable() -> None:
    bnn = abnn.convert(cnn(), modes=3)
    trainable = {id(p) for p in bnn.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in bnn.trainable_parameters()}
    assert bnn.num_added_parameters == 3 * 2 * (8 + 8)


def test_a_norm_at_the_root_is_converted() -> None:
    bnn = abnn.convert(nn.LayerNorm(5))
    folded, looped = fold_and_loop(bnn, torch.randn(2, 5))
    torch.testing.assert_close(folded, looped)
    assert list(bnn.bayes_layers) == [""]


def test_a_norm_with_two_parents_is_converted_once() -> None:
    bnn = abnn.convert(Shared(), modes=2, alpha=0.2)
    assert list(bnn.bayes_layers) == ["first.1"]
    assert bnn.backbone.first[1] is bnn.backbone.second[1]  # type: ignore[index]
    folded, looped = fold_and_loop(bnn, torch.randn(2, 4))
    torch.testing.assert_close(folded, looped)
    plain = bnn.draw(0)
    assert plain.first[1] is plain.second[1]  # type: ignore[index]


def test_norms_in_containers_and_lists_are_converted() -> None:
    bnn = abnn.convert(Containers().eval(), modes=2, alpha=0.2)
    assert list(bnn.bayes_layers) == ["listed.0", "listed.1", "named.norm"]
    folded, looped = fold_and_loop(bnn, torch.randn(3, 4))
    torch.testing.assert_close(folded, looped)


@pytest.mark.parametrize("net", [TimeFirst(), Bypassing()], ids=["time first", "bypassed"])
def test_a_network_that_can_not_fold_is_noticed_and_still_right(net: nn.Module) -> None:
    net.eval()
    bnn = abnn.convert(net, modes=2, alpha=0.2)
    x = torch.randn(3, 6, 4)
    with pytest.warns(UserWarning, match="one draw at a time"):
        pred = bnn.predict(x, samples=2, keep_members=True)
    plain = [bnn.draw(m, seed=0, index=i)(x).softmax(1) for m in (0, 1) for i in (0, 1)]
    torch.testing.assert_close(pred.members, torch.stack(plain))
    bnn.predict(x, samples=2)  # warned once, not every time


def test_noise_per_example_needs_the_batch_to_lead() -> None:
    bnn = abnn.convert(TimeFirst(), noise="example")
    for samples in (1, 2):
        with pytest.raises(ValueError, match="use noise='channel'"):
            bnn.predict(torch.randn(3, 6, 4), samples=samples, modes=[0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_the_fused_encoder_does_not_bypass_the_noise(norm_first: bool, nested: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    net: nn.Module = layer
    if nested:
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    bnn = abnn.convert(net.eval(), modes=2, alpha=0.3)
    x = torch.randn(3, 5, 8)
    folded, looped = fold_and_loop(bnn, x)
    assert bnn.is_foldable(x)
    torch.testing.assert_close(folded, looped, rtol=1e-4, atol=1e-5)
    assert (folded[0] - folded[1]).abs().max() > 1e-2
    with torch.no_grad():
        expected = abnn.convert(net, alpha=0).logits(x, DRAWS[:1])[0]
        assert torch.equal(expected, net(x).movedim(1, 1))


def test_an_encoder_with_padding_is_right() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    bnn = abnn.convert(net, modes=2, alpha=0.3)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = {"src": torch.randn(2, 5, 8), "src_key_padding_mask": padding}
    folded, looped = fold_and_loop(bnn, x)
    torch.testing.assert_close(folded[:, :, :3], looped[:, :, :3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "nested", "out", "logits", "model_output"])
def test_logits_are_found_in_what_the_network_returns(kind: str) -> None:
    x, net = torch.randn(2, 4), Answers(kind).eval()
    expected = abnn.convert(net.net).predict(x).probs
    torch.testing.assert_close(abnn.convert(net).predict(x).probs, expected)


def test_an_output_function_finds_any_other_logits() -> None:
    x, net = torch.randn(2, 4), Answers("odd").eval()
    output: Output = lambda result: result["prediction"]  # noqa: E731
    probs = abnn.convert(net, output=output).predict(x).probs
    torch.testing.assert_close(probs, abnn.convert(net.net).predict(x).probs)
    with pytest.raises(TypeError, match="no logits were found.*output="):
        abnn.convert(net).predict(x)
    with pytest.raises(TypeError, match="returned a str"):
        abnn.convert(net, output=lambda result: "x").predict(x)  # type: ignore[arg-type,return-value]


def test_inputs_may_be_a_tensor_a_tuple_or_a_mapping() -> None:
    bnn, x = abnn.convert(mlp()), torch.randn(2, 4)
    expected = bnn.predict(x).probs
    assert torch.equal(bnn.predict((x,)).probs, expected)
    assert torch.equal(bnn.predict({"input": x}).probs, expected)
    assert torch.equal(bnn(x), bnn(input=x))
    assert torch.equal(bnn(x), bnn({"input": x}))
    with pytest.raises(TypeError, match="all by keyword"):
        bnn(x, input=x)


def test_only_the_layers_that_are_asked_for_are_converted() -> None:
    assert list(abnn.convert(cnn(), layers="4").bayes_layers) == ["4"]
    assert list(abnn.convert(cnn(), layers=["1", "4"]).bayes_layers) == ["1", "4"]
    blocks = nn.Sequential(cnn(), mlp())
    assert list(abnn.convert(blocks, layers="0").bayes_layers) == ["0.1", "0.4"]
    assert list(abnn.convert(Containers(), layers="listed.*").bayes_layers) == [
        "listed.0",
        "listed.1",
    ]


def test_a_norm_that_is_not_converted_is_never_written() -> None:
    net = cnn()
    before = copy.deepcopy(net.state_dict())
    data = [(torch.randn(4, 3, 8, 8), torch.randint(3, (4,))) for _ in range(3)]
    abnn.fit(abnn.convert(net, layers="4"), data, epochs=1)
    assert all(torch.equal(t, before[k]) for k, t in net.state_dict().items())


def test_channels_last_stays_channels_last() -> None:
    seen = []
    net = cnn().to(memory_format=torch.channels_last)
    net[5].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    bnn = abnn.convert(net, modes=2, alpha=0.2)
    folded, looped = fold_and_loop(bnn, x)
    torch.testing.assert_close(folded, looped)
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in seen)


def test_a_frozen_network_stays_frozen_and_its_modes_train() -> None:
    net = mlp().requires_grad_(False)
    bnn = abnn.convert(net)
    assert all(p.requires_grad for p in bnn.trainable_parameters())
    assert not any(p.requires_grad for p in bnn.restore().parameters())


def test_a_compiled_network_is_unwrapped() -> None:
    net = mlp()
    bnn = abnn.convert(torch.compile(net))  # type: ignore[arg-type]
    assert type(bnn.restore()) is nn.Sequential


class GlobalResponseNorm(nn.Module):
    """y = x + weight * something: its weight does not multiply a normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight * x * x.square().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.LocalResponseNorm(2), "no weight"),
        (GlobalResponseNorm(), "not a normalised input times its weight"),
        (parametrizations.weight_norm(nn.LayerNorm(4)), "remove_parametrizations"),
    ],
)
def test_what_can_not_be_converted_is_left_alone_with_the_reason(
    layer: nn.Module, reason: str
) -> None:
    net = nn.Sequential(nn.LayerNorm(4), layer)
    rows = abnn.inspect(net).layers
    assert [row.converts for row in rows] == [True, False]
    assert reason in rows[1].note
    assert list(abnn.convert(net).bayes_layers) == ["0"]
    with pytest.raises(ValueError, match=reason):
        abnn.convert(net, layers="1")


def test_inspection_counts_what_a_mode_adds() -> None:
    inspection = abnn.inspect(cnn())
    assert inspection.parameters_per_mode == 32
    assert len(inspection.converted) == 2
    assert abnn.convert(cnn(), modes=5).num_added_parameters == 5 * 32
    assert "2 of 2 norms become Bayesian" in str(inspection)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modes": 0}, "modes=0"),
        ({"modes": 2.5}, "modes=2.5"),
        ({"modes": True}, "modes=True"),
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"alpha": "0.1"}, "alpha='0.1'"),
        ({"noise": "pixel"}, "channel, example, element"),
        ({"stats": "batch"}, "per_mode, frozen"),
        ({"layers": "layer9.*"}, "No norm matches layers='layer9.*'"),
        ({"layers": ["1", "11"]}, "did you mean '1'"),
        ({"layers": "0"}, "'0'.*can't be made Bayesian"),
        ({"layers": []}, "names no layer"),
    ],
)
def test_bad_arguments_are_refused_and_the_network_is_untouched(
    arguments: dict[str, Any], message: str
) -> None:
    net = mlp()
    before = [(name, type(m)) for name, m in net.named_modules()]
    with pytest.raises((ValueError, TypeError), match=message):
        abnn.convert(net, **arguments)
    assert [(name, type(m)) for name, m in net.named_modules()] == before


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(4, 3), "No normalisation layer was found in Linear"),
        (nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), "run the network once"),
        (nn.Sequential(nn.LazyBatchNorm1d()), "run the network once"),
        (nn.LayerNorm(4, device="meta"), "load the weights first"),
        ("resnet50", "torch.nn.Module"),
        (nn.LocalResponseNorm(2), "no weight"),
    ],
)
def test_networks_that_can_not_be_converted_say_why(net: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        abnn.convert(net)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:FutureWarning")
def test_a_scripted_network_is_refused() -> None:
    with pytest.raises(TypeError, match="scripted network"):
        abnn.convert(torch.jit.trace(nn.LayerNorm(4), torch.zeros(1, 4)))


def test_a_bayesian_network_is_not_converted_twice() -> None:
    bnn = abnn.convert(mlp())
    with pytest.raises(ValueError, match="Bayesian already"):
        abnn.convert(bnn)
    with pytest.raises(ValueError, match="Bayesian already"):
        abnn.convert(bnn.backbone)
    assert abnn.convert(bnn.restore()).modes == 4


def test_a_network_that_can_not_be_copied_says_so() -> None:
    net = mlp()
    net.lock = (i for i in range(3))  # type: ignore[assignment]
    with pytest.raises(TypeError, match="could not be copied"):
        abnn.convert(net)


@pytest.mark.parametrize(
    ("net", "x", "message"),
    [
        (nn.LayerNorm(4), torch.randn(4), "no class dimension 1"),
        (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)), torch.randn(2, 4), "at least two"),
    ],
)
def test_outputs_without_classes_are_refused(net: nn.Module, x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abnn.convert(net).predict(x)
