"""ABNN: one frozen backbone, M modes of its norms, and predictions that know what they know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from abnn.anytime import predict_auto
from abnn.curve import samples_curve
from abnn.draws import Draw, all_draws, whole_number
from abnn.loader import predict_loader
from abnn.norm import BayesNorm, Noise, make_plain
from abnn.outputs import Inputs, Output, call
from abnn.passes import Network
from abnn.plan import Plan
from abnn.prediction import Prediction
from abnn.sampling import Known, Sampler
from abnn.surgery import twin

Stats = Literal["per_mode", "frozen"]
DrawKind = Literal["independent", "antithetic"]


class ABNN(nn.Module):
    """A Bayesian network made by `abnn.convert`; see there for its arguments.

    Only gamma and beta of its modes are trainable. The backbone stays in eval mode always, and
    in `train()` mode only the batch statistics of the modes follow the data.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> bnn = abnn.convert(net, modes=2)
    >>> pred = bnn.predict(torch.randn(5, 4), samples=3, seed=0)
    >>> pred.samples_used, pred.label.shape, pred.epistemic.shape
    (6, torch.Size([5]), torch.Size([5]))
    >>> bnn
    ABNN(Sequential, modes=2, alpha=0.01, 1 Bayesian norm, 32 added parameters)
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        alpha: float,
        noise: Noise,
        stats: Stats,
        class_dim: int,
        output: Output | None,
        trainable: Sequence[str],
        training: Sequence[str],
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.alpha = float(alpha)
        self.noise: Noise = noise
        self.stats: Stats = stats
        self.class_dim = class_dim
        self.output = output
        self.fitted: dict[str, Any] | None = None
        # The fingerprint of a backbone that `abnn.distributed.shard` has spread over processes.
        self.sharded: dict[str, str] | None = None
        self._trainable = frozenset(trainable)
        self._training = frozenset(training)
        self._known = Known()
        self._layers = {n: m for n, m in backbone.named_modules() if isinstance(m, BayesNorm)}
        self._disabled = False
        # Walking through a network takes longer than looking at its modules.
        self._parts = [self, *backbone.modules()]
        self.eval()

    # What it is made of

    @property
    def bayes_layers(self) -> dict[str, BayesNorm]:
        """The Bayesian norms by their name in the network."""
        return dict(self._layers)

    @property
    def modes(self) -> int:
        """Number of modes, M."""
        return len(next(iter(self.bayes_layers.values())).bank.gamma)

    @property
    def num_added_parameters(self) -> int:
        """Parameters of all modes together."""
        return sum(p.numel() for p in self.trainable_parameters())

    @property
    def num_added_bytes(self) -> int:
        """What all modes together take on disk, but for the few bytes that describe them."""
        from abnn.artifact import bank_tensors

        return sum(tensor.nbytes for tensor in bank_tensors(self).values())

    @property
    def fit_seconds(self) -> float | None:
        """How long the fit of the modes took, if they were fitted."""
        return None if self.fitted is None else float(self.fitted["seconds"])

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Gamma and beta of every Bayesian norm, stacked over the modes."""
        for layer in self.bayes_layers.values():
            yield layer.bank.gamma
            if layer.bank.beta is not None:
                yield layer.bank.beta

    # Prediction

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log of the mean probabilities: a drop-in for the network's logits.

        In eval mode 8 draws of every mode with seed 0, as `predict`; in train mode one fresh draw
        of every mode, seeded by `torch.manual_seed`.
        """
        if args and kwargs:
            raise TypeError("Pass all inputs by position or all by keyword.")
        bundle = len(args) == 1 and isinstance(args[0], (tuple, list, Mapping))
        inputs: Inputs = args[0] if bundle else args or kwargs
        if self._disabled:
            result: Tensor = call(self.backbone, inputs)
            return result
        seed = int(torch.randint(2**62, ())) if self.training else 0
        draws = all_draws(range(self.modes), 1 if self.training else 8, seed)
        prediction = self._sampler().predict(inputs, draws, Plan(), False)
        return prediction.log_probs.movedim(1, self.class_dim)

    def predict(
        self,
        x: Inputs,
        samples: int | Literal["auto"] = 8,
        *,
        seed: int = 0,
        modes: Iterable[int] | None = None,
        keep_members: bool = False,
        plan: Plan | None = None,
        draws: DrawKind | None = None,
        tolerance: float = 0.05,
        max_samples: int = 16,
    ) -> Prediction:
        """Predict with `samples` draws of every mode: the mean over all, and their disagreement.

        Args:
            x: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            samples: draws of the noise per mode, L. With "auto" every input gets as many as it
                needs, and `Prediction.samples_used` says how many: draws are added to all modes
                alike until a 95 % confidence interval of the mean probability of every class, and
                of the total and the epistemic uncertainty as shares of log K, is at most
                `tolerance` to either side; see `abnn.anytime` for the mathematics. An image of
                many pixels stops as a whole, by the root mean square over its pixels.
            seed: the same seed gives the same draws, whatever the batch size and the chunks.
            modes: the modes to use; default: all.
            keep_members: keep the probabilities of every draw as `Prediction.members`, mode by
                mode; otherwise memory does not grow with the number of draws.
            plan: what runs together, if you know better than the default; see `abnn.Plan`.
            draws: "independent", the default for a number of samples; or "antithetic", that for
                "auto": pairs of draws whose noise is of opposite sign, by which the mean
                probabilities are known far better from as many draws.
            tolerance, max_samples: of samples="auto": when an input stops, and after how many
                draws of every mode at the latest, whatever is known of it by then.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        >>> bnn, x = abnn.convert(net, modes=2), torch.randn(5, 4)
        >>> bnn.predict(x, samples=4, keep_members=True).members.shape
        torch.Size([8, 5, 3])
        >>> bnn.predict(x, samples="auto").samples_used
        tensor([8, 8, 8, 8, 8])
        """
        auto = isinstance(samples, str)
        if auto and samples != "auto":
            raise ValueError(
                f"samples={samples!r} must be a whole number of at least 1, or 'auto'."
            )
        draws = draws or ("antithetic" if auto else "independent")
        if draws not in get_args(DrawKind):
            raise ValueError(f"draws={draws!r} must be 'independent' or 'antithetic'.")
        chosen, seed = self._chosen(modes), whole_number("seed", seed)
        stream = "antithetic" if draws == "antithetic" else "predict"
        plan = Plan() if plan is None else plan
        with torch.no_grad(), self._evaluating():
            if auto:
                return predict_auto(
                    self,
                    x,
                    chosen,
                    plan,
                    keep_members=keep_members,
                    seed=seed,
                    stream=stream,
                    tolerance=tolerance,
                    max_samples=max_samples,
                )
            samples = whole_number("samples", samples, least=1)
            members = all_draws(chosen, samples, seed, stream)
            return self._sampler().predict(x, members, plan, keep_members)

    predict_loader = predict_loader
    samples_curve = samples_curve

    def plan(self, x: Inputs, samples: int = 8, plan: Plan | None = None) -> Plan:
        """How `predict` would run on these inputs; what a given plan fixes stays.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        >>> abnn.convert(net, modes=2).plan(torch.randn(5, 4), samples=4)
        Plan(draws=8, examples=5, channels_last=False, trunk=True)
        """
        samples = whole_number("samples", samples, least=1)
        with torch.no_grad(), self._evaluating():
            return self._sampler().plan(x, samples * self.modes, Plan() if plan is None else plan)

    def _chosen(self, modes: Iterable[int] | None) -> list[int]:
        if modes is None:
            return list(range(self.modes))
        chosen = list(modes) if isinstance(modes, Iterable) else []
        if not chosen or not all(mode in range(self.modes) for mode in chosen):
            raise ValueError(
                f"modes={modes!r} must be some of 0 to {self.modes - 1}, as modes=[0]."
            )
        return [int(mode) for mode in chosen]

    def logits(self, inputs: Inputs, draws: Sequence[Draw]) -> Tensor:
        """Logits of the given draws, `[S, B, K, ...]`, with the classes at dimension 2.

        Several draws run folded into the batch where the network allows it, else one by one.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> bnn = abnn.convert(net, alpha=0, modes=1)
        >>> x = torch.randn(5, 4)
        >>> bool((bnn.logits(x, [Draw(seed=0, mode=0, index=0)])[0] == net(x)).all())
        True
        """
        return self._sampler().logits(inputs, draws)

    def is_foldable(self, inputs: Inputs) -> bool:
        """Whether several draws of this network can run as one larger batch.

        Tried once for every kind of input, on its first examples and with strong noise: a folded
        pass must equal one pass after the other. It does not where the batch is not the leading
        dimension, where examples are mixed, or where a norm's weight is used without calling it.
        """
        return self._sampler().is_foldable(inputs)

    def _sampler(self) -> Sampler:
        net = Network(
            self.backbone,
            self._layers,
            self.alpha,
            self.noise,
            self.class_dim,
            self.output,
            self._known.channels_last,
        )
        return Sampler(net, self._known)

    # The networks inside

    def draw(self, mode: int, seed: int = 0, index: int = 0) -> nn.Module:
        """The plain network of one draw, of the original architecture and without noise.

        Its norms hold copies of their own; every other tensor is shared with the backbone.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> abnn.convert(net).draw(mode=2, seed=7)
        Sequential(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True)
          (2): Linear(in_features=8, out_features=3, bias=True)
        )
        """
        mode = whole_number("mode", mode, least=0)
        if mode >= self.modes:
            raise ValueError(f"mode={mode} must be one of 0 to {self.modes - 1}.")
        seed, index = whole_number("seed", seed), whole_number("index", index, least=0)
        if self.noise != "channel":
            raise ValueError(
                f"A draw of noise={self.noise!r} is not a plain network; only with "
                "noise='channel' it is."
            )
        draws = [Draw(seed, mode, index)]
        net = self._twin()
        sampler = net._sampler()
        with torch.no_grad():
            actives = sampler.net.weights(draws).of(range(1), batch=1)
        for layer, active in zip(net.bayes_layers.values(), actives, strict=True):
            layer.bank.active = active
            make_plain(layer, draw=True)
        return self._as_before(net.backbone).eval()

    def restore(self) -> nn.Module:
        """The network as it was before `convert`, on the same tensors.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> x = torch.randn(2, 4)
        >>> bool((abnn.convert(net).restore()(x) == net(x)).all())
        True
        """
        net = self._twin()
        for layer in net.bayes_layers.values():
            make_plain(layer, draw=False)
        plain = self._as_before(net.backbone)
        for name, module in plain.named_modules():
            module.training = name in self._training
        return plain

    def _twin(self) -> ABNN:
        if self.sharded is not None:
            raise RuntimeError(
                "The backbone is spread over processes, so no plain network can be taken from it; "
                "save this ABNN, and load it onto the original network."
            )
        net = twin(self)
        assert isinstance(net, ABNN)
        return net

    def _as_before(self, net: nn.Module) -> nn.Module:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name in self._trainable)
        return net

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Call the original network: its own output, no modes and no noise.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> bnn, x = abnn.convert(net), torch.randn(2, 4)
        >>> with bnn.disabled():
        ...     bool((bnn(x) == net(x)).all())
        True
        """
        before, self._disabled = self._disabled, True
        try:
            yield
        finally:
            self._disabled = before

    def save(self, path: str | PathLike[str]) -> None:
        """Write the modes to a directory: `modes.safetensors` and `abnn.json`.

        The backbone is not written; `abnn.load` needs the original network.

        >>> import tempfile
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> with tempfile.TemporaryDirectory() as run:
        ...     abnn.convert(net, modes=2).save(run)
        ...     abnn.load(run, net).modes
        2
        """
        from abnn.artifact import save

        save(self, path)

    # A well-behaved module

    def train(self, mode: bool = True) -> ABNN:
        """Let batch statistics follow the data or not; noise stays on, the backbone in eval."""
        self.training = mode
        self.backbone.eval()
        for layer in self.bayes_layers.values():
            layer.training = mode and layer.bank.mean is not None
        return self

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As every module, but what differs from the shared backbone gets memory of its own."""
        if not assign:
            for name, tensor in self.state_dict(keep_vars=True).items():
                other = state_dict.get(name)
                if other is not None and not torch.equal(tensor, other.to(tensor)):
                    tensor.data = tensor.data.clone()
        return super().load_state_dict(state_dict, strict, assign)

    def __repr__(self) -> str:
        norms = len(self.bayes_layers)
        return (
            f"ABNN({type(self.backbone).__name__}, modes={self.modes}, alpha={self.alpha:g}, "
            f"{norms} Bayesian norm{'s' if norms > 1 else ''}, "
            f"{self.num_added_parameters:,} added parameters)"
        )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        before = self.training
        if any(module.training for module in self._parts):
            self.eval()
        try:
            yield
        finally:
            if before:
                self.train()
