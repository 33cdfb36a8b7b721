"""Turn a network into an ABNN, and tell beforehand what that would do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from abnn.draws import whole_number
from abnn.families import GAMMA_NAMES, Form, LeftAlone, form_of, is_norm, registered_name
from abnn.model import ABNN, Stats
from abnn.norm import BayesNorm, Noise, make_bayes
from abnn.outputs import Output
from abnn.surgery import check_network, twin


def convert(
    net: nn.Module,
    *,
    modes: int = 4,
    alpha: float = 0.01,
    noise: Noise = "channel",
    stats: Stats = "per_mode",
    layers: str | Sequence[str] | None = None,
    class_dim: int = 1,
    output: Output | None = None,
) -> ABNN:
    """Make a pre-trained network Bayesian: every norm becomes a Bayesian norm.

    The network itself stays as it is and usable. The ABNN shares its tensors and never writes
    them; the result is in eval mode, and its modes all start at the network's own values.

    Args:
        net: any network with normalisation layers.
        modes: number of modes M, each with its own gamma, beta and statistics.
        alpha: scale of the noise on gamma; 0.01 in the paper, 0.00035 for its ImageNet ViT.
        noise: what shares one noise value: a "channel" of the whole draw (the paper's formula),
            of one "example", or a single "element" of the activations.
        stats: "per_mode" lets every mode follow the batch statistics of its fit; "frozen" keeps
            those of the network.
        layers: names or patterns (`"layer4"`, `"*.norm2"`) of the norms to convert, or of blocks
            that hold them; or `"last:8"`, the last ones in the order of the network, before which
            everything runs once for all draws. Default: all.
        class_dim: dimension of the network's output that holds the classes.
        output: finds the logits in what the network returns, where that is neither a tensor, a
            tuple that starts with one, nor a mapping with "logits" or "out".

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> bnn = convert(net, modes=2)
    >>> bnn.predict(torch.randn(5, 4)).probs.shape
    torch.Size([5, 3])
    """
    _check(net, modes, alpha, noise, stats)
    net = getattr(net, "_orig_mod", net)  # the network inside a compiled one
    forms = _select(net, layers)
    if noise != "channel":
        rigid = [name for name, form in forms.items() if form.axis is None]
        if rigid:
            raise ValueError(
                f"noise={noise!r} needs norms whose output is linear in gamma, which "
                f"{_some(rigid)} is not; use noise='channel', or leave it out with layers=."
            )
    with torch.inference_mode(False):  # tensors that are made under it could never be trained
        backbone = _twin(net)
        floats = (t for _, t in _tensors(net) if t.is_floating_point())
        like = next(floats, torch.empty(0))
        copies = dict(backbone.named_modules())
        for index, (name, form) in enumerate(forms.items()):
            make_bayes(copies[name], form, modes, stats == "per_mode", index, like)
    return ABNN(
        backbone,
        alpha=alpha,
        noise=noise,
        stats=stats,
        class_dim=class_dim,
        output=output,
        trainable=[name for name, p in net.named_parameters() if p.requires_grad],
        training=[name for name, m in net.named_modules() if m.training],
    )


def _twin(net: nn.Module) -> nn.Module:
    try:
        return twin(net)
    except Exception as error:
        raise TypeError(
            f"The structure of {type(net).__name__} could not be copied ({error}); convert the "
            "plain network, before it is compiled, scripted or wrapped for parallel training."
        ) from error


@dataclass(frozen=True)
class NormLayer:
    """One norm of a network, and what `convert` does with it.

    Args:
        name: its name in the network.
        kind: name of its class.
        family: batch, layer, instance, group, rms, or general.
        converts: whether it becomes Bayesian.
        parameters: parameters that a mode adds for it.
        note: how it converts, or why it is left alone.
    """

    name: str
    kind: str
    family: str
    converts: bool
    parameters: int
    note: str


@dataclass(frozen=True)
class Inspection:
    """Every norm of a network; printed, it is a table.

    >>> inspection = inspect(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
    >>> [layer.name for layer in inspection.converted], inspection.parameters_per_mode
    (['1'], 16)
    """

    layers: tuple[NormLayer, ...]

    @property
    def converted(self) -> tuple[NormLayer, ...]:
        """The norms that become Bayesian."""
        return tuple(layer for layer in self.layers if layer.converts)

    @property
    def parameters_per_mode(self) -> int:
        """Parameters that one mode adds."""
        return sum(layer.parameters for layer in self.layers)

    def __str__(self) -> str:
        header = ("layer", "class", "family", "Bayesian", "parameters", "note")
        rows = [
            (
                layer.name or "(root)",
                layer.kind,
                layer.family,
                "yes" if layer.converts else "no",
                str(layer.parameters),
                layer.note,
            )
            for layer in self.layers
        ]
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (header, *rows)
        ]
        summary = (
            f"{len(self.converted)} of {len(self.layers)} norms become Bayesian; "
            f"a mode adds {self.parameters_per_mode:,} parameters."
        )
        return "\n".join((*lines, "", summary))


def inspect(net: nn.Module) -> Inspection:
    """List every norm of a network and what `convert` would do with it; nothing is changed.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LocalResponseNorm(2))
    >>> print(inspect(net))
    layer  class              family   Bayesian  parameters  note
    1      BatchNorm2d        batch    yes       16          a bank for every mode
    2      LocalResponseNorm  general  no        0           left alone: it has no weight to sample
    <BLANKLINE>
    1 of 2 norms become Bayesian; a mode adds 16 parameters.
    """
    _check_network(net)
    return Inspection(tuple(_describe(n, m) for n, m in net.named_modules() if is_norm(m)))


def _describe(name: str, layer: nn.Module) -> NormLayer:
    form = form_of(layer)
    kind = type(layer).__name__
    if isinstance(form, LeftAlone):
        return NormLayer(name, kind, "general", False, 0, f"left alone: {form.reason}")
    parameters = form.shape.numel() * (1 if form.beta is None else 2)
    notes = ["a bank for every mode"]
    if form.offset:
        notes.append("scales by 1 + weight")
    if not isinstance(getattr(layer, form.gamma), Tensor):
        notes.append("gets a gamma of 1 and a beta of 0" if form.beta else "gets a gamma of 1")
    if form.beta is None:
        notes.append("has no beta")
    if form.tail:
        notes.append(f"keeps its {' and '.join(form.tail)}")
    if form.axis is None:
        notes.append("runs a sample at a time")
    return NormLayer(name, kind, form.family, True, parameters, "; ".join(notes))


def _select(net: nn.Module, layers: str | Sequence[str] | None) -> dict[str, Form]:
    """The layers to convert, by name, in the order of the network."""
    modules = dict(net.named_modules())
    norms = [name for name, module in modules.items() if is_norm(module)]
    if layers is not None:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        if not patterns:
            raise ValueError("layers=[] names no layer; leave it out to convert all norms.")
        # A layer that is named in full need not look like a norm.
        chosen = {p for p in patterns if p in modules and registered_name(modules[p], GAMMA_NAMES)}
        for pattern in patterns:
            if pattern.startswith("last:"):
                chosen |= set(_last(pattern, modules, norms))
                continue
            matches = {n for n in norms if fnmatchcase(n, pattern) or n.startswith(f"{pattern}.")}
            matches |= chosen & {pattern}
            if not matches:
                raise ValueError(_unknown_pattern(pattern, norms))
            chosen |= matches
        norms = [name for name in modules if name in chosen]
    found = {name: form_of(modules[name]) for name in norms}
    forms = {name: form for name, form in found.items() if isinstance(form, Form)}
    refused = {name: form for name, form in found.items() if isinstance(form, LeftAlone)}
    if refused and (layers is not None or not forms):
        name, left = next(iter(refused.items()))
        raise ValueError(
            f"Layer {name!r} ({type(modules[name]).__name__}) can't be made Bayesian: "
            f"{left.reason}. Choose other layers; abnn.inspect(net) lists them."
        )
    if not forms:
        raise ValueError(
            f"No normalisation layer was found in {type(net).__name__}, and ABNN works on those; "
            "if it has one under another name, pass layers=[its name]."
        )
    return forms


def _last(pattern: str, modules: Mapping[str, nn.Module], norms: list[str]) -> list[str]:
    """The last norms that can be converted, as many as "last:k" says."""
    able = [name for name in norms if isinstance(form_of(modules[name]), Form)]
    count = pattern.removeprefix("last:")
    if not count.isdigit() or not 1 <= int(count) <= len(able):
        raise ValueError(
            f"layers={pattern!r} must be last:1 to last:{len(able)}, as many norms as there are."
        )
    return able[-int(count) :]


def _unknown_pattern(pattern: str, norms: list[str]) -> str:
    near = difflib.get_close_matches(pattern, norms, n=3, cutoff=0.5) or norms[:3]
    hint = f"; did you mean {_some(near)}?" if near else "; the network has none."
    return f"No norm matches layers={pattern!r}{hint}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")


def _check(net: nn.Module, modes: int, alpha: float, noise: str, stats: str) -> None:
    _check_network(net)
    whole_number("modes", modes, least=1)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float, np.floating)):
        raise TypeError(f"alpha={alpha!r} is not a number.")
    if not math.isfinite(alpha) or alpha < 0:
        raise ValueError(f"alpha={alpha} is not a finite number of at least 0; 0.01 is usual.")
    _check_choice("noise", noise, Noise)
    _check_choice("stats", stats, Stats)
    if any(isinstance(module, (BayesNorm, ABNN)) for module in net.modules()):
        raise ValueError(
            "The network is Bayesian already; convert the original, or bnn.restore() of this one."
        )


def _check_choice(name: str, value: str, choices: object) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}.")


def _check_network(net: nn.Module) -> None:
    check_network(net)
    if isinstance(net, torch.jit.ScriptModule):
        raise TypeError("A scripted network can't be changed; convert the one it was made from.")


def _tensors(net: nn.Module) -> list[tuple[str, Tensor]]:
    return [*net.named_parameters(), *net.named_buffers()]
