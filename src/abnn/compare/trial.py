"""What methods are compared on, and the trainings of one seed that several of them share."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from abnn.baselines import Method, load
from abnn.batches import split
from abnn.draws import generator, whole_number
from abnn.files import write
from abnn.images import Statistic
from abnn.order import random_states, randomness_kept, seed_all, set_random_states
from abnn.outputs import Output
from abnn.recipe import Recipe
from abnn.store import CONFIG
from abnn.train import WEIGHTS, train


@dataclass(frozen=True)
class Setting:
    """What methods are compared on.

    Args:
        build: makes the network with new random weights.
        train: the training data, as of `abnn.train`.
        validation: held-out data, which temperatures are fitted on.
        test: what is evaluated; nothing is fitted on it.
        ood: out-of-distribution data by name.
        recipe: of every training from scratch.
        fit: of ABNN's modes.
        members: of every ensemble, the modes of ABNN among them.
        samples: forward passes for an input, where the members are drawn at random.
        output, class_dim: where the network's logits are, as of `abnn.convert`.
        ignore_index: label of what does not count.
        classes, mean, std: for the report, as of `Record`.

    >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
    >>> Setting(lambda: nn.Linear(3, 2), data, data, data).members
    4
    """

    build: Callable[[], nn.Module]
    train: Iterable[Any]
    validation: Iterable[Any]
    test: Iterable[Any]
    ood: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    recipe: Recipe = field(
        default_factory=lambda: Recipe(epochs=30, lr=0.1, schedule="polynomial", prior=None)
    )
    fit: Recipe = field(default_factory=Recipe)
    members: int = 4
    samples: int = 16
    output: Output | None = None
    class_dim: int = 1
    ignore_index: int = -100
    classes: Sequence[str] | None = None
    mean: Statistic | None = None
    std: Statistic | None = None

    def __post_init__(self) -> None:
        whole_number("members", self.members, least=1)
        whole_number("samples", self.samples, least=1)
        if not isinstance(self.ood, Mapping):
            raise ValueError('ood must map names to loaders; give ood={"name": loader}.')

    @property
    def samples_each(self) -> int:
        """Draws of every member, where each of the members is drawn several times."""
        return math.ceil(self.samples / self.members)

    @property
    def network(self) -> dict[str, Any]:
        """The arguments by which methods find the logits of the network."""
        return {"output": self.output, "class_dim": self.class_dim}


@dataclass(frozen=True)
class Trial:
    """The trainings of one seed, each of which is done once, in a directory of its own."""

    setting: Setting
    seed: int
    folder: Path

    def fresh(self, member: int = 0) -> nn.Module:
        """A network with random weights, a function of the seed and the member alone.

        >>> trial = Trial(Setting(lambda: nn.Linear(3, 2), [], [], []), 5, Path("run"))
        >>> bool((trial.fresh().weight == trial.fresh().weight).all())
        True
        """
        with self._seeded(member):
            return self.setting.build()

    def recipe(self, member: int = 0, **overrides: Any) -> Recipe:
        """The recipe of a training, with a seed of its own."""
        seed = int(generator("train", self.seed, member).integers(2**31))
        return self.setting.recipe.with_(**{"seed": seed, **overrides})

    def base(self, member: int = 0) -> nn.Module:
        """A network that was trained as it is; trained now, if it was not yet."""
        net, folder = self.fresh(member), self._base(member)
        if not (folder / _SECONDS).is_file():
            result = train(
                net,
                self.setting.train,
                self.recipe(member),
                run=folder,
                ignore_index=self.setting.ignore_index,
                label=f"seed {self.seed}, network {member}",
                **self.setting.network,
            )
            write(folder / _SECONDS, json.dumps(result.seconds).encode())
        net.load_state_dict(load_file(folder / WEIGHTS), strict=False)
        return net.eval()

    def base_seconds(self, members: int = 1) -> float:
        """How long the training of the first so many networks took."""
        files = (self._base(member) / _SECONDS for member in range(members))
        return sum(float(json.loads(file.read_bytes())) for file in files)

    def trained(
        self, name: str, build: Callable[[], Method], member: int = 0, **overrides: Any
    ) -> Method:
        """A method, trained by the recipe as a whole, or as it was trained before."""
        folder = self.method(name)
        if (folder / CONFIG).is_file():
            return load(folder, self.fresh(member), output=self.setting.output)
        with self._seeded(member):
            method = build()
        train(
            method,
            self.setting.train,
            self.recipe(member, **overrides),
            run=folder,
            ignore_index=self.setting.ignore_index,
            label=f"seed {self.seed}, {name}",
        )
        return method

    def method(self, name: str) -> Path:
        """Where a method of this seed is kept."""
        return self.folder / "methods" / name

    def keep(self, name: str, method: Method) -> Method:
        """Save a method that is not trained by the recipe."""
        if not (self.method(name) / CONFIG).is_file():
            method.save(self.method(name))
        return method

    @contextmanager
    def _seeded(self, member: int) -> Iterator[None]:
        """Random numbers for what is built, which no others depend on."""
        states = random_states()
        seed_all(generator("init", self.seed, member))
        try:
            yield
        finally:
            set_random_states(states)

    def _base(self, member: int) -> Path:
        return self.folder / f"network-{member}"


def count_of(loader: Iterable[Any], ignore_index: int) -> int:
    """How many labels of a data set count.

    >>> count_of([(torch.zeros(3, 1), torch.tensor([0, -100, 1]))], -100)
    2
    """
    with randomness_kept(loader):
        return sum(int((split(batch)[1] != ignore_index).sum()) for batch in loader)


_SECONDS = "seconds.json"
