"""What a prediction says: the mean over modes and draws, and how far its members disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from abnn.metrics.diversity import disagreement_of_votes

# The tensors of a prediction that have a row for every input, in the order of its arguments.
PER_INPUT = (
    "log_probs",
    "aleatoric",
    "variation_ratio",
    "disagreement",
    "max_logit",
    "energy",
)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predictive distribution of S members, and its uncertainty.

    With `p_s` the probabilities of member s and `H` the entropy, in nats,

        total = H(mean_s p_s),   aleatoric = mean_s H(p_s),   epistemic = total - aleatoric.

    Classes are always dimension 1; `...` stands for pixels or tokens, if there are any.

    Args:
        log_probs: log of the mean probabilities, `[B, K, ...]`.
        aleatoric: mean entropy of the members, `[B, ...]`.
        variation_ratio: share of members that do not vote for the most voted class, `[B, ...]`.
        disagreement: share of the pairs of members that vote for different classes, `[B, ...]`.
        max_logit: largest logit, averaged over the members, `[B, ...]`.
        energy: minus the log-sum-exp of the logits, averaged over the members, `[B, ...]`.
        samples_used: number of members, S; of every input, `[B]`, where they differ.
        members: probabilities of every member, `[S, B, K, ...]`, if they were asked for.
        sets: which classes are in the prediction set, `[B, K, ...]`, if something makes sets, as
            `abnn.baselines.Conformal` does.

    >>> import torch
    >>> agree = Prediction.from_logits(torch.tensor([[[4.0, 0.0]], [[4.0, 0.0]]]))
    >>> clash = Prediction.from_logits(torch.tensor([[[4.0, 0.0]], [[0.0, 4.0]]]))
    >>> agree.epistemic.item() < 1e-6 < clash.epistemic.item()
    True
    >>> clash.probs
    tensor([[0.5000, 0.5000]])
    >>> clash
    Prediction(inputs=1, classes=2, samples_used=2, mean confidence 0.500, total 0.693, \
epistemic 0.603)
    """

    log_probs: Tensor
    aleatoric: Tensor
    variation_ratio: Tensor
    disagreement: Tensor
    max_logit: Tensor
    energy: Tensor
    samples_used: int | Tensor
    members: Tensor | None = None
    sets: Tensor | None = None

    def __repr__(self) -> str:
        B, K, *rest = self.log_probs.shape
        each = f" of {' x '.join(map(str, rest))}" if rest else ""
        used: object = self.samples_used
        if isinstance(used, Tensor):
            used = f"{used.double().mean():.1f} on average"
        size = "" if self.sets is None else f", mean set size {self.sets.sum(1).float().mean():.2f}"
        return (
            f"Prediction(inputs={B}{each}, classes={K}, samples_used={used}, "
            f"mean confidence {self.confidence.mean():.3f}, total {self.total.mean():.3f}, "
            f"epistemic {self.epistemic.mean():.3f}{size})"
        )

    @cached_property
    def probs(self) -> Tensor:
        """Mean probabilities of the members, `[B, K, ...]`."""
        return self.log_probs.exp()

    @cached_property
    def label(self) -> Tensor:
        """The most probable class, `[B, ...]`."""
        return self.log_probs.argmax(1)

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the most probable class (the maximum softmax probability)."""
        return self.probs.amax(1)

    @cached_property
    def total(self) -> Tensor:
        """Entropy of the mean probabilities: aleatoric plus epistemic."""
        entropy: Tensor = torch.special.entr(self.probs).sum(1)
        return entropy

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information of the label and the weights: what more knowledge could remove."""
        # The difference is never negative in exact arithmetic.
        return (self.total - self.aleatoric).clamp_min(0)

    def __getitem__(self, rows: Tensor | slice) -> Prediction:
        """The prediction of some of the inputs: a slice, indices or a mask.

        >>> whole = Prediction.from_logits(torch.randn(3, 8, 2))
        >>> whole[whole.confidence > 0].log_probs.shape, whole[:5].label.shape
        (torch.Size([8, 2]), torch.Size([5]))
        """
        if not isinstance(rows, (Tensor, slice)):
            raise TypeError(
                f"Index a Prediction by a slice or a tensor, as pred[:1], not {rows!r}."
            )
        return self._each(lambda values: values[rows], lambda members: members[:, rows])

    def cpu(self) -> Prediction:
        """The prediction in main memory, where a data set of them has room.

        >>> Prediction.from_logits(torch.zeros(3, 2, 5)).cpu().probs.device
        device(type='cpu')
        """
        return self._each(Tensor.cpu, Tensor.cpu)

    def flat(self) -> Prediction:
        """Every pixel or token as an input of its own: classes last of two dimensions.

        >>> Prediction.from_logits(torch.zeros(3, 2, 5, 4, 4)).flat().log_probs.shape
        torch.Size([32, 5])
        """
        if self.log_probs.ndim == 2:
            return self
        rows, K = self.label.numel(), self.log_probs.shape[1]

        def flatten(values: Tensor) -> Tensor:
            if values.shape == self.log_probs.shape:
                return values.movedim(1, -1).reshape(-1, K)
            each = values[(..., *[None] * (self.label.ndim - values.ndim))]
            return each.expand_as(self.label).flatten()

        return self._each(flatten, lambda members: members.movedim(2, -1).reshape(-1, rows, K))

    def _each(
        self, change: Callable[[Tensor], Tensor], change_members: Callable[[Tensor], Tensor]
    ) -> Prediction:
        """The prediction with every tensor changed; those of the members start with S, not B."""
        used, members, sets = self.samples_used, self.members, self.sets
        return Prediction(
            **{name: change(getattr(self, name)) for name in PER_INPUT},
            samples_used=change(used) if isinstance(used, Tensor) else used,
            members=None if members is None else change_members(members),
            sets=None if sets is None else change(sets),
        )

    @classmethod
    def cat(cls, parts: Sequence[Prediction]) -> Prediction:
        """The predictions of several batches as one; members stay where all have as many.

        >>> a, b = (Prediction.from_logits(torch.randn(3, n, 2)) for n in (4, 5))
        >>> Prediction.cat([a, b])[:4].energy.equal(a.energy)
        True
        """
        if not parts:
            raise ValueError("There is no prediction to join; give at least one.")
        used: int | Tensor = parts[0].samples_used
        if any(
            isinstance(part.samples_used, Tensor) or part.samples_used != used for part in parts
        ):
            used = torch.cat([part.used_by_input() for part in parts])
        members = [part.members for part in parts if part.members is not None]
        alike = len(members) == len(parts) and len({len(each) for each in members}) == 1
        sets = [part.sets for part in parts if part.sets is not None]
        return cls(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in PER_INPUT},
            samples_used=used,
            members=torch.cat(members, 1) if alike else None,
            sets=torch.cat(sets) if len(sets) == len(parts) else None,
        )

    def used_by_input(self) -> Tensor:
        """Number of members of every input, `[B]`, whether they differ or not.

        >>> Prediction.from_logits(torch.zeros(3, 2, 5)).used_by_input()
        tensor([3, 3])
        """
        if isinstance(self.samples_used, Tensor):
            return self.samples_used
        B, device = len(self.log_probs), self.log_probs.device
        return torch.full((B,), self.samples_used, device=device)

    @classmethod
    def from_logits(cls, logits: Tensor, keep_members: bool = False) -> Prediction:
        """Combine the logits of all members, `[S, B, K, ...]`, at once.

        >>> Prediction.from_logits(torch.zeros(3, 1, 2)).probs
        tensor([[0.5000, 0.5000]])
        """
        stream = PredictionStream(keep_members)
        stream.update(logits)
        return stream.result()


class PredictionStream:
    """Builds a `Prediction` from members that arrive in chunks; memory does not grow with S.

    >>> stream = PredictionStream()
    >>> for _ in range(5):
    ...     stream.update(torch.randn(4, 2, 3))  # 4 members, 2 inputs, 3 classes
    >>> stream.result().samples_used
    20
    """

    def __init__(self, keep_members: bool = False) -> None:
        self.keep_members = keep_members
        self.count = 0
        self._members: list[Tensor] = []

    def update(self, logits: Tensor) -> None:
        """Add the members whose logits are given, `[s, B, K, ...]`."""
        # Half precision is too coarse to accumulate in.
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_probs = logits.log_softmax(2)
        probs = log_probs.exp()
        # The mean is kept as a logarithm: a class all members find impossible stays finite.
        log_sum = log_probs.logsumexp(0)
        aleatoric = torch.special.entr(probs).sum(2).sum(0)
        max_logit = logits.amax(2).sum(0)
        energy = -logits.logsumexp(2).sum(0)
        if self.count == 0:
            self._log_sum, self._aleatoric = log_sum, aleatoric
            self._max_logit, self._energy = max_logit, energy
            self._votes = torch.zeros_like(log_sum)
        else:
            self._log_sum = torch.logaddexp(self._log_sum, log_sum)
            self._aleatoric = self._aleatoric + aleatoric
            self._max_logit = self._max_logit + max_logit
            self._energy = self._energy + energy
        labels = log_probs.argmax(2).movedim(0, 1)
        self._votes.scatter_add_(1, labels, torch.ones_like(labels, dtype=self._votes.dtype))
        if self.keep_members:
            self._members.append(probs)
        self.count += len(logits)

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the inputs only: those at the given indices."""
        for name in ("_log_sum", "_aleatoric", "_max_logit", "_energy", "_votes"):
            setattr(self, name, getattr(self, name)[rows])
        self._members = [members[:, rows] for members in self._members]

    def result(self) -> Prediction:
        """The prediction of all members seen so far."""
        if self.count == 0:
            raise ValueError("No member was added yet; call update(logits) first.")
        S = self.count
        return Prediction(
            log_probs=self._log_sum - math.log(S),
            aleatoric=self._aleatoric / S,
            variation_ratio=1 - self._votes.amax(1) / S,
            disagreement=disagreement_of_votes(self._votes, S),
            max_logit=self._max_logit / S,
            energy=self._energy / S,
            samples_used=S,
            members=torch.cat(self._members) if self.keep_members else None,
        )
