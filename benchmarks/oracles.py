"""Our methods against torch-uncertainty: do the same numbers and inputs give the same outputs?

    python benchmarks/oracles.py

Needs the packages of benchmarks/requirements.txt; `make bench` installs them. A method is built
from a network, and the network once more of their layers, which get our parameters one by one. Then
both get the same inputs, and the same noise where there is any. "Logits" are those of every member
in evaluation mode; a "step" is the loss of a batch in training mode, all its gradients, and the
running statistics after it. All is in double precision, so that rounding hides nothing, and it
fails if anything differs by more than 1e-6 of its size. Where they compute something else, they are
set up, or their result is scaled, such that the same is compared; the table says how.

Last, with torch-uncertainty 0.13.0 and torch 2.15.0, the largest of 74 were 2e-8 of the size, where
they count pairs in single precision; 1e-9, where they search for a temperature; 3e-10 for gradients
that are 0 but for rounding; and 1e-14 for everything else.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_uncertainty import layers, losses, methods, metrics, models, post_processing
from torch_uncertainty.models import mlp
from torch_uncertainty.post_processing.abnn import _replace_bn_layers
from torch_uncertainty.transforms.batch import MIMOBatchFormat

import abnn
from abnn.baselines import (
    LPBNN,
    MIMO,
    SWAG,
    VIBNN,
    BatchEnsemble,
    Conformal,
    DeepEnsemble,
    Masksembles,
    MCDropout,
    PackedEnsembles,
    Single,
    TemperatureScaling,
    mc_dropout,
)
from abnn.baselines.sampled import noise_like
from abnn.draws import Draw, local_noise, noise_matrix
from abnn.metrics import aurc, brier, fpr_at_recall, nll
from abnn.surgery import weighted_layers
from abnn.table import aligned
from harness import versions
from mirrored import (
    ENDS,
    RESNET,
    B,
    Check,
    K,
    M,
    filled,
    in_shares,
    logits,
    network,
    noise,
    rebuilt,
    resnet,
    step,
    stirred,
    tensors,
)

TOLERANCE = 1e-6

WEIGHTS = {f"{own}.weight": "weight" for own in ("linear", "conv", "conv_transpose")}
BIASES = {f"{own}.bias": "bias" for own in ("linear", "conv", "conv_transpose")}
BATCH = WEIGHTS | {"r_group": "ensemble_r", "s_group": "ensemble_s", "bias": "ensemble_b"}
LATENT = WEIGHTS | {"alpha": "ensemble_r", "gamma": "ensemble_s", "bias": "ensemble_b"}
BAYES = {"weight_mu": "weight", "bias_mu": "bias"}
BAYES |= {"weight_sigma": "weight_rho", "bias_sigma": "bias_rho"}


def batch_ensembles() -> Iterator[Check]:
    for kind in ("Linear", "Conv1d", "Conv2d", "ConvTranspose2d"):
        net, x, y = network(kind)
        ours = stirred(BatchEnsemble(net, M))
        theirs = methods.batch_ensemble(rebuilt(net, "Batch", num_estimators=M), M)
        pairs = filled(theirs.core_model, tensors(ours.net), BATCH, without=("bias",))
        about = "BatchEnsemble", f"Batch{kind}"
        yield Check(*about, "logits", logits(ours, theirs.eval()(x), x))
        loss, rows, labels = in_shares(ours, x, y)
        other = F.cross_entropy(theirs.train()(rows), labels)
        yield Check(*about, "step; members share the batch", step(loss, other, pairs))
    net, x, _ = resnet()
    ours = stirred(BatchEnsemble(net, M))
    factors = [f"shortcut.0.ensemble_{factor}" for factor in "rs"]
    for name, tensor in ours.net.named_parameters():
        if name.endswith(tuple(factors)):
            nn.init.ones_(tensor)
    theirs = models.batched_resnet(num_estimators=M, **RESNET)
    filled(theirs, tensors(ours.net), BATCH, without=("bias", *factors))
    what = "logits; without factors in shortcuts"
    yield Check("BatchEnsemble", "batched_resnet", what, logits(ours, theirs.eval()(x), x))


def packed_ensembles() -> Iterator[Check]:
    names = WEIGHTS | BIASES
    plain = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d")
    for kind, gamma in (*((kind, 1) for kind in plain), ("Linear", 2), ("Conv2d", 2)):
        net, x, y = network(kind)
        ours = stirred(PackedEnsembles(net, M, alpha=2, gamma=gamma))
        theirs = rebuilt(net, "Packed", alpha=2, num_estimators=M, gamma=gamma)
        pairs = filled(theirs, tensors(ours.net), names)
        about = "PackedEnsembles", f"Packed{kind}" + f", gamma={gamma}" * (gamma > 1)
        yield Check(*about, "logits", logits(ours, theirs.eval()(x), x))
        loss = ours.train().training_loss(x, y)
        other = F.cross_entropy(theirs.train()(x), y.repeat(M))
        yield Check(*about, "step", step(loss, other, pairs))
    net, x, _ = resnet()
    ours = stirred(PackedEnsembles(net, M, alpha=2))
    theirs = models.packed_resnet(num_estimators=M, alpha=2, gamma=1, **RESNET)
    filled(theirs, tensors(ours.net), names)
    yield Check("PackedEnsembles", "packed_resnet", "logits", logits(ours, theirs.eval()(x), x))
    x = torch.randn(B, 12)
    ours = stirred(PackedEnsembles(mlp.mlp(12, K, [24, 24]), M, alpha=2, **ENDS))
    theirs = mlp.packed_mlp(12, K, [24, 24], M, alpha=2)
    filled(theirs, tensors(ours.net), names)
    yield Check("PackedEnsembles", "packed_mlp", "logits", logits(ours, theirs.eval()(x), x))
    yield packed_attention()


class Attending(nn.Module):
    """Self-attention, on tokens."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.enter, self.attention, self.norm, self.leave = parts

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[B, N, 12]` -> logits `[B, K]`."""
        x = self.enter(x)
        y: Tensor = self.leave(self.norm(x + self.attention(x, x, x)[0]).mean(1))
        return y


def packed_attention() -> Check:
    """Theirs mixes members where query, key and value have one matrix, and so does their norm."""
    attention = nn.MultiheadAttention(24, 3, batch_first=True)
    net = Attending(nn.Linear(12, 24), attention, nn.LayerNorm(24), nn.Linear(24, K))
    ours, x = stirred(PackedEnsembles(net, M, alpha=M)), torch.randn(B, 6, 12)
    packed: dict[str, Any] = {"alpha": M, "num_estimators": M}
    own = layers.PackedMultiheadAttention(24, 3, **packed, batch_first=True)
    own._qkv_same_embed_dim, own.in_proj_weight = False, None
    found = tensors(ours.net)
    weights = found.pop("attention.in_proj_weight").chunk(3, 1)
    for name, weight in zip("qkv", weights, strict=True):
        setattr(own, f"{name}_proj_weight", nn.Parameter(torch.empty(weight.shape)))
        found[f"attention.{name}_proj_weight"] = weight
    biases = found["attention.in_proj_bias"].unflatten(1, (3, -1))
    found["attention.in_proj_bias"] = biases.transpose(0, 1)
    theirs = Attending(
        layers.PackedLinear(12, 24, **packed, first=True),
        own,
        layers.PackedLayerNorm(24, **packed, first=True),
        layers.PackedLinear(24, K, **packed, last=True),
    )
    names = {f"out_proj_{end}": f"out_proj.{end}" for end in ("weight", "bias")}
    filled(theirs, found, names)
    what = "logits; q, k, v from a matrix each, norm with first=True"
    about = "PackedEnsembles", "PackedMultiheadAttention, LayerNorm"
    return Check(*about, what, logits(ours, theirs.eval()(x), x))


def masksembles() -> Iterator[Check]:
    names = WEIGHTS | BIASES | {"mask.masks": "ensemble_masks"}
    for kind in ("Linear", "Conv2d", "ConvTranspose2d"):
        net, x, y = network(kind)
        ours = stirred(Masksembles(net, M))
        theirs = rebuilt(net, "Masked", skip=[0], num_estimators=M, scale=2.0)
        pairs = filled(theirs, tensors(ours.net), names)
        other = theirs.eval()(x.repeat(M, *[1] * (x.ndim - 1)))
        about = "Masksembles", f"Masked{kind}"
        yield Check(*about, "logits; first layer not masked", logits(ours, other, x))
        loss, rows, labels = in_shares(ours, x, y)
        other = F.cross_entropy(theirs.train()(rows), labels)
        yield Check(*about, "step; members share the batch", step(loss, other, pairs))
    net, x, _ = resnet()
    ours = stirred(Masksembles(net, M))
    theirs = models.masked_resnet(num_estimators=M, scale=2.0, **RESNET)
    filled(theirs, tensors(ours.net), names)
    yield Check("Masksembles", "masked_resnet", "logits", logits(ours, theirs.eval()(x), x))


def lp_bnns() -> Iterator[Check]:
    for kind in ("Linear", "Conv2d"):
        net, x, y = network(kind)
        ours = stirred(LPBNN(net, M, latent=6, latent_weight=0.5))
        theirs = rebuilt(net, "LPBNN", num_estimators=M, hidden_size=6, std_factor=1.0)
        found, names = tensors(ours.net), list(weighted_layers(ours.net))
        for name in names:
            theirs.get_submodule(f"{name}.decoder").register_forward_pre_hook(scaled_down)
        keys = {"encoder": "hidden", "decoder": "decoder"}
        keys |= {"latent_mean": "mean", "latent_logvar": "log_var"}
        for name, part in zip(names, ours.auto_encoders, strict=True):
            for key, own in keys.items():
                inner = part.get_submodule(own).named_parameters()
                found |= {f"{name}.{key}.{end}": tensor for end, tensor in inner}
        pairs = filled(theirs, found, LATENT, without=("bias",))
        about = "LPBNN", f"LPBNN{kind}"
        # The rows of their layers belong to members 0 to M - 1, and again.
        eps = noise_matrix([Draw(0, m, 0) for m in range(M)], 6 * len(names)).split(6, 1)
        with noise(eps):
            other = theirs.eval()(x.repeat_interleave(M, 0))
        other = other.unflatten(0, (B, M)).transpose(0, 1).flatten(0, 1)
        yield Check(
            *about,
            "logits of a draw; std_factor=1, decoder of z / sqrt(latent)",
            logits(ours, other, x),
        )
        eps = tuple(torch.randn(M, 6) for _ in names)
        with noise(eps):
            loss, x, y = in_shares(ours, x, y)
        x, y = (t.unflatten(0, (M, -1)).transpose(0, 1).flatten(0, 1) for t in (x, y))
        with noise(eps):
            other = F.cross_entropy(theirs.train()(x), y)
        other = other + 0.5 * losses.bayesian.KLDiv(theirs)()
        yield Check(*about, "step; members share the batch", step(loss, other, pairs))


def scaled_down(_: nn.Module, args: tuple[Tensor]) -> Tensor:
    """What the decoder takes in ours."""
    return args[0] / math.sqrt(args[0].shape[-1])


def variational() -> Iterator[Check]:
    for kind in ("Linear", "Conv1d", "Conv2d", "Conv3d"):
        net, x, y = network(kind)
        ours = VIBNN(net, prior_std=0.7, init_std=0.3, kl_weight=0.2, examples=50)
        ours.rho.apply(stirred)
        # A second component of the prior counts in the tails, whatever its weight.
        prior: dict[str, Any] = {"prior_sigma_1": 0.7, "prior_sigma_2": 0.7}
        theirs = methods.StochasticModel(rebuilt(net, "Bayes", **prior), num_samples=2)
        found = tensors(ours.net)
        found |= {f"{name}_rho": rho for name, rho in zip(ours.mu, ours.rho, strict=True)}
        pairs = filled(theirs.core_model, found, BAYES)
        about = "VIBNN", f"Bayes{kind}"
        draws = [noise_like(ours.mu, 3, 0, index) for index in range(2)]
        with noise([eps for draw in draws for eps in draw.values()]):
            other = theirs.eval()(x)
        yield Check(*about, "logits of draws", logits(ours, other, x, samples=2, seed=3))
        # Their log posterior is 1/2 too small for every weight, and theirs is a mean over layers.
        # Noise of 1 and of -1 gives the mean over all noise, which is ours.
        kl = torch.tensor(sum(mu.numel() for mu in ours.mu.values()) / 2)
        for sign in (1.0, -1.0):
            with noise([torch.full(mu.shape, sign) for mu in ours.mu.values()]):
                theirs.core_model.eval()(x)
            kl = kl + len(weighted_layers(net)) * losses.bayesian.KLDiv(theirs)() / 2
        what = "KL and gradients; times layers, 1/2 more a weight"
        yield Check(*about, what, step(ours.kl(), kl, pairs))
        eps = [torch.randn(mu.shape) for mu in ours.mu.values()]
        with noise(eps):
            loss = ours.train().training_loss(x, y) - 0.2 / 50 * ours.kl()
        with noise(eps):
            other = F.cross_entropy(theirs.train()(x), y)
        yield Check(*about, "step without the KL", step(loss, other, pairs))


def mc_dropouts() -> Iterator[Check]:
    samples = 6  # more than run in one pass
    for kind, drop in (("Linear", nn.Dropout), ("Conv2d", nn.Dropout2d)):
        net, x, y = network(kind)
        relus = [place for place, module in enumerate(net) if isinstance(module, nn.ReLU)]
        for place, p in zip(relus, (0.3, 0.6), strict=True):
            net[place] = nn.Sequential(nn.ReLU(), drop(p))
        ours, about = MCDropout(net), ("MCDropout", f"mc_dropout, {drop.__name__}")
        theirs = methods.mc_dropout(copy.deepcopy(net), samples, on_batch=False)
        masks = Masks(drop.__name__.lower())
        with mock.patch.object(F, masks.name, masks.drop):
            other = theirs.eval()(x)
        with mock.patch.object(mc_dropout, "generator", masks.generator):
            found = logits(ours, other, x, samples=samples)
        yield Check(*about, "logits of draws; a draw has one mask", found)
        pairs = list(zip(ours.net.parameters(), theirs.core_model.parameters(), strict=True))
        torch.manual_seed(1)
        loss = ours.train().training_loss(x, y)
        torch.manual_seed(1)
        other = F.cross_entropy(theirs.train()(x), y)
        yield Check(*about, "step", step(loss, other, pairs))


class Masks:
    """What torch drops in their draws, from all examples the same; and the numbers for ours."""

    def __init__(self, name: str) -> None:
        self.name, self.kept, self.torchs = name, list[Tensor](), getattr(F, name)

    def drop(self, x: Tensor, p: float, *_: Any) -> Tensor:
        scaled: Tensor = self.torchs(torch.ones_like(x[:1]), p, True)
        kept = (scaled[0] != 0).double()
        self.kept.append(kept[:, :1, :1] if self.name == "dropout2d" else kept)
        return x * scaled

    def generator(self, *key: Any) -> Any:
        _, _, _, draw, place, _ = key

        def random(shape: Sequence[int], dtype: Any) -> Any:
            return self.kept[2 * draw + place].view(*shape).numpy().astype(dtype)

        return SimpleNamespace(random=random)


def mimos() -> Iterator[Check]:
    for name in ("mimo_mlp", "mimo_resnet"):
        net, x, y = resnet()
        theirs = models.mimo_resnet(num_estimators=M, **RESNET)
        if name == "mimo_mlp":
            net, x = mlp.mlp(12, K, [24, 24]), torch.randn(B, 12)
            theirs = mlp.mimo_mlp(12, K, [24, 24], M)
        ours = stirred(MIMO(net, M, **(ENDS if name == "mimo_mlp" else {})))
        pairs = filled(theirs, tensors(ours.net), {})
        yield Check("MIMO", name, "logits", logits(ours, theirs.eval()(x), x))
        torch.manual_seed(1)
        loss = ours.train().training_loss(x, y)
        torch.manual_seed(1)
        rows = ours.training_rows(B).flatten()
        other = M * F.cross_entropy(theirs.train()(x[rows]), y[rows])
        yield Check("MIMO", name, "step; times members", step(loss, other, pairs))
    ours, numbers = MIMO(net, M, rho=0.25, batch_repetition=3), torch.arange(B)
    torch.manual_seed(1)
    rows = ours.training_rows(B)
    torch.manual_seed(1)
    other = MIMOBatchFormat(M, rho=0.25, batch_repeat=3)((numbers, numbers))[0]
    what = "rows of a batch, rho=0.25, batch_repetition=3"
    yield Check("MIMO", "MIMOBatchFormat", what, [(rows, other.view(M, -1))])


def swags() -> Iterator[Check]:
    rank, steps, members = 5, 8, 3
    net, x, _ = network("Conv2d")
    ours = SWAG(net, rank=rank, snapshots=steps, start=0.0, members=members)
    theirs = methods.SWAG(copy.deepcopy(net), 0, 1, max_num_models=rank, var_clamp=0.0)
    own = list(ours.net.parameters())
    for number in range(1, steps + 1):
        for tensor, other in zip(own, theirs.core_model.parameters(), strict=True):
            tensor.data.add_(0.1 * torch.randn_like(tensor))
            other.data.copy_(tensor)
        ours.after_step(number, steps)
        theirs.update_wrapper(number)
    names = [f"{theirs.prfx}{name}_" for name, _ in ours.net.named_parameters()]
    mean, squared, rows = (
        torch.cat([theirs.swag_stats[name + key].flatten(from_dim) for name in names], -1)
        for key, from_dim in (("mean", 0), ("sq_mean", 0), ("covariance_sqrt", 1))
    )
    youngest_last = -(steps % rank)
    pairs = [(ours.mean, mean), (ours.variance, squared - mean**2)]
    pairs += [(ours.deviations.roll(youngest_last, 0), rows)]
    yield Check("SWAG", "SWAG", "mean, variance, deviations", pairs)
    batches = [torch.randn(B, *x.shape[1:]) for _ in range(3)]
    ours.after_training(batches)
    theirs.samples = []
    for member in range(members):
        z = noise_like({"diagonal": mean, "low_rank": rows[:, 0]}, 0, 0, member)
        parts = z["diagonal"].split([tensor.numel() for tensor in own])
        low_rank = z["low_rank"].roll(youngest_last, 0)
        eps = [(part.view(p.shape), low_rank) for part, p in zip(parts, own, strict=True)]
        with noise([each for both in eps for each in both]):
            theirs.samples.append(theirs.sample(scale=0.5))
    theirs.bn_update(batches, "cpu")
    for sample in theirs.samples:
        sample.eval()
    what = "logits after bn_update; scale=1/2, one z2 for all"
    yield Check("SWAG", "SWAG", what, logits(ours, theirs.eval()(x), x))


def ensembles() -> Iterator[Check]:
    nets = [nn.Linear(12, K) for _ in range(M)]
    ours, theirs, x = DeepEnsemble(nets), methods.deep_ensembles(nets), 9 * torch.randn(64, 12)
    yield Check("DeepEnsemble", "deep_ensembles", "logits", logits(ours, theirs(x), x))
    prediction = ours.predict(x)
    members = theirs(x).detach().softmax(-1).unflatten(0, (M, -1)).transpose(0, 1)
    for name, metric, probs in (
        ("total", metrics.Entropy, members.mean(1)),
        ("aleatoric", metrics.Entropy, members),
        ("epistemic", metrics.MutualInformation, members),
        ("disagreement", metrics.Disagreement, members),
    ):
        found = metric(reduction="none")
        found.update(probs)
        pair = getattr(prediction, name), found.compute()
        yield Check("Prediction", metric.__name__, name, [pair])
    probs, y = prediction.probs, torch.randint(K, (64,))
    sure, right, ood = prediction.confidence, prediction.label == y, torch.arange(64) % 3 == 0
    curve = metrics.AURC()
    curve.compute = lambda: curve.partial_compute().mean()  # without trapezoids between examples
    for value, metric, inputs in (
        (brier(probs, y), metrics.BrierScore(K), (probs, y)),
        (nll(probs.log(), y), metrics.CategoricalNLL(), (probs, y)),
        (fpr_at_recall(-sure[~ood], -sure[ood]), metrics.FPR95(1), (-sure, ood.long())),
        (aurc(sure, right), curve, (probs, y)),
    ):
        metric.update(*inputs)
        pair = torch.tensor(value), metric.compute()
        what = "mean of the risks" if metric is curve else "value"
        yield Check("metrics", type(metric).__name__, what, [pair])


def post_hoc() -> Iterator[Check]:
    n, coverage, identity = 500, 0.8, nn.Identity()
    scores, x = 3 * torch.randn(n, K), 3 * torch.randn(300, K)
    held_out = [(scores, torch.distributions.Categorical(logits=scores / 2.5).sample())]
    ours = TemperatureScaling(identity).fit(held_out)
    theirs = post_processing.TemperatureScaler(identity, lr=1, max_iter=200)
    by_sum = nn.CrossEntropyLoss(reduction="sum")  # one fit by the mean stops 1e-4 away
    with mock.patch.object(type(theirs), "criterion", by_sum):
        for _ in range(2):
            theirs.fit(held_out, progress=False)
    pairs = [(ours.temperature.reshape(1), theirs.temperature[0].detach())]
    pairs += [(ours.predict(x).probs, theirs(x).softmax(1))]
    yield Check(
        "TemperatureScaling", "TemperatureScaler", "temperature, probabilities; fitted twice", pairs
    )
    # Their quantile is that among n scores, and not among n and a new one.
    alpha = 1 - (math.ceil((n + 1) * coverage) - 1) / (n - 1)
    plain = {"model": identity, "enable_ts": False, "alpha": alpha}
    thr = post_processing.ConformalClsTHR(**plain)
    aps = post_processing.ConformalClsAPS(**plain, randomized=False)
    for conformal, other in (
        (Conformal(Single(identity), coverage), thr),
        (Conformal(Single(identity), coverage, score="aps"), aps),
    ):
        conformal.fit(held_out)
        other.fit(held_out)
        prediction = conformal.predict(x)
        top = prediction.probs == prediction.probs.amax(1, True)
        sets = cast(Tensor, prediction.sets) | top
        pairs = [(sets.double(), (other(x) > 0).double())]
        pairs += [(-torch.expm1(-conformal.threshold[0]), other.q_hat)]
        what = "sets, quantile; alpha for n + 1 scores, top class in"
        yield Check("Conformal", type(other).__name__, what, pairs)


def bayesian_norms() -> Iterator[Check]:
    net, x, _ = network("Conv2d")
    theirs = copy.deepcopy(net)
    _replace_bn_layers(theirs, 0.3)
    theirs.eval()
    draws, shapes = [Draw(0, 0, index) for index in range(2)], [(B, 24, 7, 7), (B, 48, 4, 4)]
    by_channel = [noise_matrix([draw], 24 + 48)[0].split([24, 48]) for draw in draws]
    wide = [
        [eps.view(-1, 1, 1).expand(shape) for eps, shape in zip(own, shapes, strict=True)]
        for own in by_channel
    ]
    elements = [[local_noise(draw, *place) for place in enumerate(shapes)] for draw in draws]
    channel = abnn.convert(net, modes=1, alpha=0.3)
    element = abnn.convert(net, modes=1, alpha=0.3, noise="element")
    for bnn, eps in ((channel, wide), (element, elements)):
        with torch.no_grad(), noise([each for own in eps for each in own]):
            other = torch.stack([theirs(x) for _ in draws])
        what = f"logits of draws, noise={bnn.noise!r}"
        yield Check("ABNN", "BatchNormAdapter2d", what, [(bnn.logits(x, draws).detach(), other)])


COMPARISONS: tuple[Callable[[], Iterator[Check]], ...] = (
    batch_ensembles,
    packed_ensembles,
    masksembles,
    lp_bnns,
    variational,
    mc_dropouts,
    mimos,
    swags,
    ensembles,
    post_hoc,
    bayesian_norms,
)


def main() -> None:
    logging.disable()  # importing it has set up lightning's own ways
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    checks = [check for compare in COMPARISONS for check in compare()]
    print(f"{versions('torch_uncertainty')}\n")
    names = [["method", "theirs", "what is compared"], *(list(check[:3]) for check in checks)]
    widths = [max(map(len, column)) for column in zip(*names, strict=True)]
    header, *rows = [[t.ljust(n) for t, n in zip(row, widths, strict=True)] for row in names]
    differences = [check.difference() for check in checks]
    for row, numbers in zip(rows, differences, strict=True):
        row += [f"{number:.1e}" for number in numbers]
    print(aligned([*header, "difference", "of size"], *rows))
    wrong = sum(share > TOLERANCE for _, share in differences)
    if wrong:
        sys.exit(f"{wrong} of {len(checks)} differ by more than {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
