"""Laplace approximation (Daxberger et al., NeurIPS 2021, arXiv:2106.14806)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from abnn.baselines.curvature import Block, blocks, powered, variance_of_linear
from abnn.baselines.laplace_torch import Batches, check_factors, curvature, package
from abnn.baselines.last_layer import no_last_layer, through_last_layer
from abnn.baselines.linearised import Logits, linearised, moments, wide
from abnn.baselines.method import Method
from abnn.baselines.sampled import logits_with, noise_like
from abnn.batches import device_of, split, to_device
from abnn.draws import number, whole_number
from abnn.folding import clone
from abnn.inference import inference
from abnn.order import randomness_kept
from abnn.outputs import Inputs, Output
from abnn.steps import check_labels
from abnn.surgery import copied, weighted_layers

Subset = Literal["last_layer", "all"]
Structure = Literal["kron", "diag", "full"]
Predictive = Literal["probit", "sampling", "nn"]

HALF = (torch.float16, torch.bfloat16)  # in which no matrix can be decomposed
KEPT = ("prior", "values", "vectors")
JACOBIAN_NUMBERS = 2**26  # as many as are held at once
FULL_PARAMETERS = 20_000


class Laplace(Method):
    """A Gaussian around the weights of a trained network, the wider the flatter its loss is there.

        w ~ N(w_MAP, (H + delta I)^-1),   H = sum_i J_i^T (diag(p_i) - p_i p_i^T) J_i

    with p_i the probabilities and J_i the Jacobian of the logits f for training input i. H and the
    precision delta of the prior are the work of the package laplace-torch. A prediction is

        probit:    softmax(f / sqrt(1 + pi / 8 diag(J (H + delta I)^-1 J^T))),
        sampling:  softmax(f + J (w - w_MAP)) for every draw of w, or
        nn:        softmax(f(x; w)) for every draw of w.

    The first has one member, so that nothing is epistemic. H goes well with the second; of the last
    layer alone, the third is the same.

    Args:
        net: the trained network; shared, not copied.
        subset: the weights that are uncertain: "last_layer", a linear one whose outputs are the
            logits; or "all" convolutions and linear layers, for inputs of one tensor and one label.
        structure: what is kept of H: "kron", a Kronecker product for every layer; "diag"; "full".
        predictive: "probit", "sampling" or "nn".
        prior_precision: delta; None: the one with the highest marginal likelihood.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 4)
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,)))]
    >>> laplace = Laplace(net, predictive="sampling").fit(loader)
    >>> laplace.predict(x, samples=4).samples_used
    4
    >>> probit = Laplace(net, prior_precision=1.0).fit(loader).predict(x)
    >>> bool((probit.confidence < abnn.baselines.Single(net).predict(x).confidence).all())
    True
    """

    shared = "net"
    prior: Tensor
    values: Tensor
    vectors: Tensor

    def __init__(
        self,
        net: nn.Module,
        subset: Subset = "last_layer",
        structure: Structure = "kron",
        predictive: Predictive = "probit",
        prior_precision: float | None = None,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self._seconds = None
        for name, value, choices in (
            ("subset", subset, get_args(Subset)),
            ("structure", structure, get_args(Structure)),
            ("predictive", predictive, get_args(Predictive)),
        ):
            if value not in choices:
                known = ", ".join(map(repr, choices[:-1]))
                raise ValueError(f"{name}={value!r} must be {known} or {choices[-1]!r}.")
        if prior_precision is not None:
            prior_precision = number("prior_precision", prior_precision, above=0)
        self.subset, self.structure, self.predictive = subset, structure, predictive
        self.prior_precision = prior_precision
        layers = weighted_layers(net)
        if subset == "last_layer" and not any(isinstance(m, nn.Linear) for m in layers.values()):
            raise no_last_layer(net)
        if subset == "all" and structure == "kron":
            check_factors(layers)
        self.net = net
        self._last: str | None = None  # the name of the last layer, once it was seen to run
        # What a fit finds; nothing before it.
        for name in KEPT:
            self.register_buffer(name, torch.empty(0))

    @property
    def num_added_parameters(self) -> int:
        """Numbers beyond those of the network: the prior precision, and what is kept of H."""
        return sum(getattr(self, name).numel() for name in KEPT)

    @property
    def num_added_bytes(self) -> int:
        """What has to be stored beyond the network."""
        return sum(getattr(self, name).nbytes for name in KEPT)

    def fit(self, loader: Iterable[Any], ignore_index: int = -100) -> Self:
        """Compute H at the weights that the network has, and choose the prior precision.

        Args:
            loader: the training data: batches `(x, y)`, `(x1, x2, ..., y)` or mappings with
                "labels". With "all" it is gone through several times, which has to give the same.
            ignore_index: the label of what is left out.
        """
        started = time.perf_counter()
        package()
        with randomness_kept(loader):
            if isinstance(loader, Iterator):
                loader = list(loader)
            data = self._last_layer_data if self.subset == "last_layer" else self._all_data
            model, batches, count = data(loader, ignore_index)
            size = self._size
            if self.structure == "full" and size > FULL_PARAMETERS:
                raise ValueError(
                    f"structure='full' would need a matrix of {size} x {size} numbers; take "
                    "'kron' or 'diag'."
                )
            found = curvature(model, batches, count, self.structure, self.prior_precision)
        for name, tensor in zip(KEPT, found, strict=True):
            setattr(self, name, tensor)
        self._seconds = time.perf_counter() - started
        return self

    def member_logits(self, x: Inputs, samples: int = 16, seed: int = 0) -> Iterator[Tensor]:
        """The logits of the members, one at a time, `[1, B, K, ...]`; "probit" has only one."""
        if self.values.numel() == 0:
            raise RuntimeError(
                "The Laplace approximation is not fitted yet; call fit(loader) with training data."
            )
        samples = whole_number("samples", samples, least=1)
        last = self._with_features(x) if self.subset == "last_layer" else None
        if self.predictive == "probit":
            mean, variance = self._moments(x, last)
            yield (mean / (1 + math.pi / 8 * variance).sqrt()).unsqueeze(0)
            return
        for index in range(samples):
            change = self._change(seed, index)
            if last is None:
                yield self._changed(x, change).unsqueeze(0)
            else:
                logits, features = last
                moved = nn.functional.linear(features, *change.values())
                yield (logits + moved.movedim(-1, 1)).unsqueeze(0)

    # The last layer alone

    def _last_layer_data(
        self, loader: Iterable[Any], ignore_index: int
    ) -> tuple[nn.Module, Batches, int]:
        """The last layer as a network of its own, and what goes into it, with labels."""
        kept, labels = [], []
        with inference(self):
            for inputs, y in self._batches(loader):
                logits, features = self._with_features(inputs)
                _check(logits, y, ignore_index)
                counts = y.flatten() != ignore_index
                kept.append(features.flatten(0, -2)[counts].cpu())
                labels.append(y.flatten()[counts].cpu())
        count = _counted(sum(map(len, labels)))
        rows, y = torch.cat(kept), torch.cat(labels)
        own = {name: wide(tensor.detach()) for name, tensor in self._uncertain().items()}
        K, D = own["weight"].shape
        device, size = own["weight"].device, self._rows_at_once(K)
        head = nn.Linear(D, K, bias="bias" in own, device=device, dtype=rows.dtype)
        head.load_state_dict(own)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for some, labels in zip(rows.split(size), y.split(size), strict=True):
                yield some.to(device), labels.to(device)

        return nn.Sequential(head), batches, count

    def _with_features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        self._last, logits, features = through_last_layer(self, x, self._last)
        return wide(logits), wide(features)

    # All layers

    def _all_data(self, loader: Iterable[Any], ignore_index: int) -> tuple[nn.Module, Batches, int]:
        """A copy of the network in which the subset alone wants a gradient, and the data."""
        count, size = 0, 1
        with inference(self):
            for inputs, y in self._batches(loader):
                logits = self.network_logits(inputs)
                _check(logits, y, ignore_index)
                if logits.ndim != 2 or not isinstance(inputs, Tensor):
                    raise ValueError(
                        "subset='all' takes inputs of one tensor, each with one label; "
                        "subset='last_layer' takes others, of networks that end in an nn.Linear."
                    )
                count += int((y != ignore_index).sum())
                size = self._rows_at_once(logits.shape[1])

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for inputs, y in self._batches(loader):
                kept = y != ignore_index
                if kept.any():
                    x = inputs[kept].float() if inputs.dtype in HALF else inputs[kept]
                    yield from zip(x.split(size), y[kept].split(size), strict=True)

        model = Logits(copied(self.net), self.output, self.class_dim)
        if any(p.dtype in HALF for p in model.parameters()):
            model.float()
        names = self._uncertain()
        for name, parameter in model.net.named_parameters():
            parameter.requires_grad_(name in names)
        return model, batches, _counted(count)

    def _changed(self, x: Inputs, change: dict[str, Tensor]) -> Tensor:
        own = {name: p.detach() for name, p in self._uncertain().items()}
        change = {name: change[name].to(p.dtype) for name, p in own.items()}
        if self.predictive == "sampling":
            return linearised(self, x, own, change)
        return logits_with(self, x, {name: p + change[name] for name, p in own.items()})

    # What both share

    def _moments(self, x: Inputs, last: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """The logits and their variances, `[B, K, ...]`."""
        own, H = self._uncertain(), self._blocks()
        if last is None:
            rows = self._rows_at_once(self.network_logits(clone(x)).shape[1], jacobian=True)
            return moments(self, x, own, H, self.prior, rows)
        logits, features = last
        shapes = [tensor.shape for tensor in own.values()]
        variance = variance_of_linear(features.flatten(0, -2), shapes, H, self.prior)
        return logits, variance.view(*features.shape[:-1], -1).movedim(-1, 1)

    def _uncertain(self) -> dict[str, Tensor]:
        """The weights that are uncertain, by their names in the last layer or in the network."""
        if self.subset == "last_layer":
            assert self._last is not None
            last = self.net.get_submodule(self._last)
            own = {"weight": last.weight, "bias": last.bias}
            return {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}
        ids = {id(p) for layer in weighted_layers(self.net).values() for p in layer.parameters()}
        return {name: p for name, p in self.net.named_parameters() if id(p) in ids}

    @property
    def _size(self) -> int:
        return sum(p.numel() for p in self._uncertain().values())

    def _blocks(self) -> list[Block]:
        shapes = [p.shape for p in self._uncertain().values()]
        return blocks(self.structure, shapes, self.values, self.vectors)

    def _change(self, seed: int, index: int) -> dict[str, Tensor]:
        """What a draw adds to the weights."""
        own = {name: wide(p.detach()) for name, p in self._uncertain().items()}
        noise = noise_like(own, whole_number("seed", seed), 0, index)
        flat = torch.cat([eps.flatten() for eps in noise.values()]).unsqueeze(0)
        change = powered(flat, self._blocks(), self.prior, -0.5).squeeze(0)
        parts = change.split([p.numel() for p in own.values()])
        return {name: part.view(own[name].shape) for name, part in zip(own, parts, strict=True)}

    def _rows_at_once(self, K: int, jacobian: bool = False) -> int:
        if self.structure == "kron" and not jacobian:  # is computed without it
            return 512
        return max(1, min(512, JACOBIAN_NUMBERS // (K * self._size)))

    def _batches(self, loader: Iterable[Any]) -> Iterator[tuple[Inputs, Tensor]]:
        device = device_of(self)
        for batch in loader:
            inputs, labels = split(batch)
            yield to_device(inputs, device), labels.to(device)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in KEPT:  # how many numbers there are is known only once it is fitted
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, torch.empty_like(saved, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check(logits: Tensor, labels: Tensor, ignore_index: int) -> None:
    check_labels(labels, logits, ignore_index)
    if not logits.isfinite().all():
        raise ValueError(
            "The logits contain NaN or infinity; check the inputs and the network's weights."
        )


def _counted(count: int) -> int:
    if count == 0:
        raise ValueError("The loader has no labelled examples to fit on; give training data.")
    return count
