"""Members as a batch dimension: which member of an ensemble each row of a batch belongs to.

Layers of one network that hold a row of numbers for every member (BatchEnsemble, Masksembles) ask
here for the numbers of the rows that they are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from abnn.baselines.inference import inference
from abnn.baselines.method import Method
from abnn.draws import whole_number
from abnn.folding import (
    agree,
    any_half,
    first_tensor,
    head,
    no_fused_encoder,
    repeat,
    signature,
    take,
)
from abnn.norm import NotFoldable
from abnn.outputs import Inputs


class Members:
    """The members of a network whose layers hold a row of numbers for every member.

    All run in one pass, each with its share of the rows. Where a trial on two examples shows that
    this does not equal one pass a member, because the network mixes rows or has its batch
    elsewhere, they run one after another, with a warning.

    Args:
        count: how many there are.

    >>> members = Members(3)
    >>> bank = torch.tensor([[1.0], [2.0], [3.0]])
    >>> with members.rows_of(torch.tensor([0, 0, 2])):
    ...     members.select(bank, rows=6).flatten()
    tensor([1., 1., 1., 1., 3., 3.])
    """

    def __init__(self, count: int) -> None:
        self.count = whole_number("members", count, least=1)
        self._rows: Tensor | int | None = None
        self._folds: dict[Any, bool] = {}

    def select(self, bank: Tensor, rows: int) -> Tensor:
        """The rows of a bank `[M, ...]` for a tensor with so many rows, or one for all of them.

        A layer may see every example several times in a row, as windows or tokens.
        """
        if self._rows is None:
            raise RuntimeError(
                "This network runs as the members of an ensemble; call predict(x) of the method, "
                "not the network inside."
            )
        if isinstance(self._rows, int):
            return bank[self._rows : self._rows + 1]
        times, rest = divmod(rows, len(self._rows))
        if rest or not times:
            raise NotFoldable
        index = self._rows.to(bank.device)
        return bank[index if times == 1 else index.repeat_interleave(times)]

    @contextmanager
    def rows_of(self, rows: Tensor | int) -> Iterator[None]:
        """Run the network with rows `[B]` of these members, or all rows of one."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    def logits(self, method: Method, x: Inputs) -> Iterator[Tensor]:
        """The logits of all members for all examples, `[s, B, K, ...]`, some members at a time."""
        if self.folds(method, x):
            yield self._together(method, x)
        else:
            for member in range(self.count):
                yield self._alone(method, x, member).unsqueeze(0)

    def training_logits(self, method: Method, x: Inputs) -> Tensor:
        """The logits of a batch, an equal share of whose rows belongs to every member."""
        B = len(first_tensor(x))
        owner = torch.arange(B) * self.count // B
        if self.folds(method, x):
            with self.rows_of(owner), no_fused_encoder():
                return method.network_logits(x)
        shares = [(owner == member).nonzero().flatten() for member in range(self.count)]
        parts = [
            self._alone(method, take(x, share), member)
            for member, share in enumerate(shares)
            if len(share)
        ]
        return torch.cat(parts)

    def folds(self, method: Method, x: Inputs) -> bool:
        """Whether all members can run in one pass; found out once for every kind of input."""
        if self.count == 1:
            return True
        kind = signature(x)
        if kind not in self._folds:
            with inference(method):
                self._folds[kind] = self._trial(method, head(x, 2))
            if not self._folds[kind]:
                warnings.warn(
                    f"The members of the {type(method).__name__} can't run in one pass (the "
                    "network mixes rows, or its batch is not the leading dimension), so they run "
                    "one after another.",
                    stacklevel=2,
                )
        return self._folds[kind]

    def _trial(self, method: Method, x: Inputs) -> bool:
        alone = torch.stack([self._alone(method, x, member) for member in range(self.count)])
        try:
            together = self._together(method, x)
        except (NotFoldable, RuntimeError):  # whatever the network does with more rows
            return False
        return agree(together, alone, any_half([alone]))

    def _together(self, method: Method, x: Inputs) -> Tensor:
        B = len(first_tensor(x))
        with self.rows_of(torch.arange(self.count).repeat_interleave(B)), no_fused_encoder():
            logits = method.network_logits(repeat(x, self.count))
        if logits.shape[0] != self.count * B:
            raise NotFoldable
        return logits.reshape(self.count, B, *logits.shape[1:])

    def _alone(self, method: Method, x: Inputs, member: int) -> Tensor:
        with self.rows_of(member), no_fused_encoder():
            return method.network_logits(x)
