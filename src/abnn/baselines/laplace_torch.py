"""What `Laplace` asks of the package laplace-torch, an extra: `pip install "abnn[laplace]"`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from abnn.baselines.linearised import differentiable

Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def curvature(
    model: nn.Module, batches: Batches, count: int, structure: str, prior_precision: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The prior precision, and the eigenvalues and eigenvectors of the curvature, each flat.

    Args:
        model: gives logits `[B, K]`; the curvature is that of the parameters that want a gradient.
        batches: goes through the training data, with labels.
        count: how many examples that are.
        structure: "kron", "diag" or "full".
        prior_precision: that of the prior; None: the one with the highest marginal likelihood.
    """
    with _quiet():
        found = package().Laplace(
            model, "classification", subset_of_weights="all", hessian_structure=structure
        )
        with torch.enable_grad(), differentiable():
            if structure == "kron":
                _check_used(model, batches)
            try:
                found.fit(_Data(batches, count))
            except SystemExit as error:  # it would end the program, without a word
                raise RuntimeError(
                    "The curvature has no eigenvalues that can be computed; check the network's "
                    "weights, or take structure='diag'."
                ) from error
            if prior_precision is None:
                found.optimize_prior_precision(method="marglik")
            else:
                found.prior_precision = prior_precision
    if structure == "diag":
        values, vectors = [found.H], []
    elif structure == "full":
        whole = torch.linalg.eigh(found.H)
        values, vectors = [whole.eigenvalues], [whole.eigenvectors]
    else:
        values = [each for block in found.H.eigenvalues for each in block]
        vectors = [each.flatten() for block in found.H.eigenvectors for each in block]
    flat = torch.cat(vectors or [values[0].new_empty(0)]).flatten()
    # Rounding makes an eigenvalue of 0 a negative one.
    return found.prior_precision.detach(), torch.cat(values).detach().clamp_min(0), flat.detach()


def check_factors(layers: dict[str, nn.Module]) -> None:
    """Refuse layers that the package has no Kronecker factors of."""
    seen: set[int] = set()
    for name, layer in layers.items():
        own = {id(parameter) for parameter in layer.parameters()}
        known = isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
        plain = own == {id(p) for p in layer.parameters(recurse=False)}  # not parametrised
        if not (known and plain) or own & seen:
            raise ValueError(
                "structure='kron' of all layers is for linear layers and 2d convolutions without "
                f"groups, parametrisation or shared weights, but {name!r} is {layer}; take "
                "structure='diag', or subset='last_layer'."
            )
        seen |= own


def _check_used(model: nn.Module, batches: Batches) -> None:
    for x, _ in batches():
        named = {name: p for name, p in model.eval().named_parameters() if p.requires_grad}
        found = torch.autograd.grad(model(x).sum(), list(named.values()), allow_unused=True)
        unused = [name for name, slope in zip(named, found, strict=True) if slope is None]
        if unused:
            raise ValueError(
                f"structure='kron' needs layers that run, but {unused[0].removeprefix('net.')!r} "
                "does nothing; take structure='diag', or subset='last_layer'."
            )
        return


def package() -> Any:
    """The package, or an error that says how to get it."""
    try:
        with _quiet():
            return importlib.import_module("laplace")
    except ImportError as error:
        raise ImportError(
            'Laplace needs the package laplace-torch; install it by pip install "abnn[laplace]".'
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warnings that are not about what the user does."""
    with warnings.catch_warnings():
        # It is compiled where newer versions of torch would have it done otherwise.
        warnings.filterwarnings("ignore", ".*torch\\.jit\\.script")
        # It says so whenever the prior is tuned, even where nothing depends on it.
        warnings.filterwarnings("ignore", "By default `link_approx` is `probit`")
        yield


class _Data:
    """Batches in the shape of a `DataLoader`."""

    def __init__(self, batches: Batches, count: int) -> None:
        self.batches, self.dataset = batches, range(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        for inputs, labels in self.batches():
            seen += len(labels)
            yield inputs, labels
        if seen != len(self.dataset):
            raise ValueError(
                f"The loader gave {len(self.dataset)} labelled examples, and then {seen}; give one "
                "that can be gone through several times."
            )
