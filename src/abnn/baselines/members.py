"""Members as a batch dimension: which member of an ensemble each row of a batch belongs to.

Layers of one network that hold numbers for every member (BatchEnsemble, Masksembles, MC dropout)
ask here for the numbers of the rows that they are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from abnn.baselines.method import Method
from abnn.draws import generator, whole_number
from abnn.folding import (
    agree,
    any_half,
    clone,
    first_tensor,
    head,
    no_fused_encoder,
    pieces,
    repeat,
    signature,
)
from abnn.inference import inference
from abnn.norm import NotFoldable
from abnn.order import random_states, set_random_states
from abnn.outputs import Inputs
from abnn.plan import rows_of
from abnn.surgery import channel_dim
from abnn.survey import Survey


class Members:
    """The members of a network whose layers hold numbers for every member.

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
        self._trying = False
        self._folds: dict[Any, bool] = {}
        self._at_once: dict[Any, int] = {}  # rows in a pass, for every kind of input

    def select(self, bank: Tensor, rows: int) -> Tensor:
        """The rows of a bank `[M, ...]` for a tensor with so many rows, or one for all of them.

        A layer may see every example several times in a row, as windows or tokens.
        """
        if self._rows is None:
            raise RuntimeError(
                "This network runs as the members of an ensemble; call predict(x) of the method, "
                "not the network inside."
            )
        if self._trying:
            bank = _apart(bank)
        if isinstance(self._rows, int):
            return bank[self._rows : self._rows + 1]
        times, rest = divmod(rows, len(self._rows))
        if rest or not times:
            raise NotFoldable
        index = self._rows.to(bank.device)
        return bank[index if times == 1 else index.repeat_interleave(times)]

    def spread(self, bank: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
        """Numbers `[M, C]` of a layer's channels, for the rows of its input or output.

        >>> members, x = Members(2), torch.zeros(4, 3, 5, 5)
        >>> with members.rows_of(torch.tensor([0, 0, 1, 1])):
        ...     members.spread(torch.ones(2, 3), nn.Conv2d(3, 1, 1), x).shape
        torch.Size([4, 3, 1, 1])
        """
        behind = -1 - channel_dim(layer)  # dimensions behind the channels
        between = x.ndim - 2 - behind
        rows = self.select(bank, len(x)).to(x.dtype)
        if between < 0:  # no dimension is left for a batch
            if len(rows) > 1:
                raise NotFoldable
            return rows.reshape(-1, *[1] * behind)
        return rows.reshape(len(rows), *[1] * between, -1, *[1] * behind)

    @contextmanager
    def rows_of(self, rows: Tensor | int) -> Iterator[None]:
        """Run the network with rows `[B]` of these members, or all rows of one."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    def logits(self, method: Method, x: Inputs, count: int | None = None) -> Iterator[Tensor]:
        """The logits of all members for all examples, `[s, B, K, ...]`, some members at a time.

        Args:
            method: whose network they are.
            x: the examples.
            count: how many members there are for now.
        """
        count = self.count if count is None else count
        if count > 1 and self.folds(method, x):
            examples = max(1, self._rows_at_once(method, x) // count)
            try:
                parts = [self._together(method, some, count) for some in pieces(x, examples)]
            except NotFoldable:  # inputs of this kind were fine so far, these are not
                self._refuse(method, signature(x))
            else:
                yield torch.cat(parts, 1)
                return
        for member in range(count):
            yield self._alone(method, x, member).unsqueeze(0)

    def training_logits(self, method: Method, x: Inputs) -> Tensor:
        """The logits of a batch, an equal share of whose rows belongs to every member.

        Chance decides which members get the rows that are left over. Where the members can't run
        in one pass, rows can't be told apart either: a whole batch belongs to one, by chance.
        """
        if self.count > 1 and self.folds(method, x):
            B = len(first_tensor(x))
            owners = torch.randperm(self.count)[torch.arange(B) * self.count // B]
            try:
                with self.rows_of(owners.to(first_tensor(x).device)), no_fused_encoder():
                    return method.network_logits(x)
            except NotFoldable:
                self._refuse(method, signature(x))
        return self._alone(method, x, int(torch.randint(self.count, ())))

    def folds(self, method: Method, x: Inputs) -> bool:
        """Whether all members can run in one pass; found out once for every kind of input."""
        kind = signature(x)
        if kind not in self._folds:
            if self._trial(method, head(x, 2)):
                self._folds[kind] = True
            else:
                self._refuse(method, kind)
        return self._folds[kind]

    def _rows_at_once(self, method: Method, x: Inputs) -> int:
        """How many rows a pass should have, by what its modules are given; as of `rows_of`."""
        kind = signature(x), first_tensor(x).shape[1:]
        if kind not in self._at_once:
            few, seen = head(x, 2), list[Tensor]()

            def look(module: nn.Module, args: Any) -> None:
                seen.extend(arg for arg in args[:1] if isinstance(arg, Tensor))

            with ExitStack() as stack:
                for module in method.net.modules():
                    if next(module.children(), None) is None:
                        stack.callback(module.register_forward_pre_hook(look).remove)
                self._alone(method, few, 0)
            B = len(first_tensor(few))
            found = Survey(
                row_bytes=max((t.nbytes // B for t in seen), default=1) or 1,
                row_elements=sum(t.numel() // B for t in seen) or 1,
                weights=sum(parameter.numel() for parameter in method.net.parameters()),
            )
            self._at_once[kind] = rows_of(found, first_tensor(x))
        return self._at_once[kind]

    def _refuse(self, method: Method, kind: Any) -> None:
        self._folds[kind] = False
        warnings.warn(
            f"The members of the {type(method).__name__} can't run in one pass (the network mixes "
            "rows, or its batch is not the leading dimension), so they run one after another.",
            stacklevel=2,
        )

    def _trial(self, method: Method, x: Inputs) -> bool:
        """Whether one pass equals many, with members that are far apart even if these are not."""
        before, self._trying = self._trying, True
        states = random_states()  # a network may draw, and a resumed training makes no trial twice
        try:
            with inference(method):
                alone = torch.stack([self._alone(method, x, m) for m in range(self.count)])
                try:
                    together = self._together(method, x, self.count)
                except Exception:  # whatever the network does with more rows
                    return False
        finally:
            self._trying = before
            set_random_states(states)
        return agree(together, alone, any_half([alone]))

    def _together(self, method: Method, x: Inputs, count: int) -> Tensor:
        B = len(first_tensor(x))
        with self.rows_of(torch.arange(count).repeat_interleave(B)), no_fused_encoder():
            logits = method.network_logits(repeat(x, count))
        if logits.shape[0] != count * B:
            raise NotFoldable
        return logits.reshape(count, B, *logits.shape[1:])

    def _alone(self, method: Method, x: Inputs, member: int) -> Tensor:
        with self.rows_of(member), no_fused_encoder():
            return method.network_logits(clone(x))


def _apart(bank: Tensor) -> Tensor:
    """A bank whose rows differ strongly, whatever they are."""
    noise = generator("probe", 0, len(bank)).standard_normal(tuple(bank.shape), dtype="float32")
    eps = torch.from_numpy(noise).to(bank.device)
    wide = bank if bank.is_floating_point() else bank.float()
    return wide + (0.5 * eps).to(wide.dtype)


def change_first(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer, the first of which is changed, by whatever name it is given.

    >>> change_first(torch.neg, (), {"input": torch.ones(2)})
    ((), {'input': tensor([-1., -1.])})
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: change(kwargs[name])}
