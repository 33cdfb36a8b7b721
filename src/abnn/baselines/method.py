"""What all methods share: how they are asked, what they cost, how they are saved and loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from abnn.draws import whole_number
from abnn.inference import inference
from abnn.layout import keep_freed_memory
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.prediction import Prediction, PredictionStream
from abnn.store import network_fingerprint, structure_of, write_artifact
from abnn.surgery import check_network
from abnn.train import cross_entropy

KIND, TENSORS = "abnn method", "method.safetensors"


class Method(nn.Module):
    """A way from inputs to a `Prediction`, built from a network.

    A subclass says in `member_logits` what its members are. If it is trained otherwise than by the
    cross-entropy of `training_logits`, it says so in `training_loss`, `parameter_groups`,
    `after_step` and `after_training`, which `abnn.train` calls. Every argument of its constructor
    but the network and `output` is kept as an attribute of the same name, and is a plain value.

    Args:
        net: the network that it is built from, as the measure of what it adds.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.
    """

    # The name under which a subclass keeps a network that is not its own: it shares the weights,
    # trains none of them, and does not save them. None: the network is its own copy.
    shared: ClassVar[str | None] = None
    net: Any

    def __init__(self, net: object, output: Output | None = None, class_dim: int = 1) -> None:
        super().__init__()
        if isinstance(net, nn.Module) or not hasattr(net, "predict"):
            check_network(net)
        if output is not None and not callable(output):
            raise TypeError(
                f"output={output!r} is no function; give one that takes what the network returns, "
                "and returns the logits."
            )
        self.output, self.class_dim = output, whole_number("class_dim", class_dim)
        self._seconds: float | None = None if self.shared is None else 0.0
        self._given, self._structure = (0, 0), ""
        if isinstance(net, nn.Module):
            self._given = _size(net), _bytes(net)
            self._structure = structure_of(net)

    def forward(self, x: Inputs) -> Tensor:
        """Log of the mean probabilities, `[B, K, ...]`."""
        return self.predict(x).log_probs

    def predict(self, x: Inputs, keep_members: bool = False, **members: Any) -> Prediction:
        """The prediction of all members.

        Args:
            x: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            keep_members: keep the members' probabilities.
            members: what `member_logits` takes, such as `samples=8, seed=0`, where it draws them.
        """
        stream = PredictionStream(keep_members)
        keep_freed_memory()
        with inference(self):
            for logits in self.member_logits(x, **members):
                stream.update(logits)
        return stream.result()

    def member_logits(self, x: Inputs) -> Iterator[Tensor]:
        """The logits of the members, some at a time, `[s, B, K, ...]`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its members are.")

    # What it costs

    @property
    def num_added_parameters(self) -> int:
        """Learned numbers beyond those of the one network."""
        return _size(self) - self._given[0]

    @property
    def num_added_bytes(self) -> int:
        """What has to be stored beyond the one network."""
        return _bytes(self) - self._given[1]

    @property
    def fit_seconds(self) -> float | None:
        """How long its training took; `None` if that is not known."""
        return self._seconds

    @fit_seconds.setter
    def fit_seconds(self, seconds: float | None) -> None:
        self._seconds = seconds

    # How it is trained by `abnn.train`

    def training_logits(self, inputs: Inputs) -> Tensor:
        """The logits that the labels of a batch are compared with, `[B, K, ...]`."""
        return self.network_logits(inputs)

    def network_logits(self, inputs: Inputs) -> Tensor:
        """The logits of one pass of the network inside, `self.net`."""
        return logits_of(call(self.net, inputs), self.output, self.class_dim)

    def training_loss(self, inputs: Inputs, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """The loss of a batch: the mean cross-entropy."""
        return cross_entropy(self.training_logits(inputs), labels, ignore_index)

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """What is trained, in groups as `torch.optim` takes them."""
        own = [parameter for parameter in self.parameters() if not self._is_shared(parameter)]
        return [{"params": own}]

    def after_step(self, step: int, steps: int) -> None:
        """What follows a step of the optimiser, counted from 1: nothing."""

    def after_training(self, batches: Iterable[Inputs]) -> None:
        """What follows the last step; `batches` goes through the training data: nothing."""

    # How it is saved

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that it was built with, but for the network and `output`."""
        names = list(inspect.signature(type(self)).parameters)[1:]
        return {name: getattr(self, name) for name in names if name != "output"}

    @classmethod
    def rebuild(cls, net: Any, output: Output | None, arguments: dict[str, Any]) -> Self:
        """The method as it was built, before any training."""
        more: dict[str, Any] = {} if output is None else {"output": output}
        return cls(net, **arguments, **more)

    def own_state(self) -> dict[str, Tensor]:
        """All its tensors but those of a shared network, each with its own memory."""
        found, seen = {}, set()
        for name, tensor in self.state_dict().items():
            place = (tensor.data_ptr(), tensor.shape)
            if (self.shared and name.startswith(f"{self.shared}.")) or place in seen:
                continue
            found[name] = tensor.detach().contiguous()
            if tensor.numel():
                seen.add(place)
        return found

    def network_state(self) -> dict[str, str]:
        """What identifies the network that it needs when it is loaded."""
        if self.shared is None:
            return {"structure": self._structure}
        held = getattr(self, self.shared)
        return network_fingerprint(held) if isinstance(held, nn.Module) else {}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the method to a directory, from which `abnn.baselines.load` brings it back.

        A shared network is not in it; it has to be given again.
        """
        config = {
            "method": type(self).__name__,
            "arguments": self.arguments,
            "custom_output": self.output is not None,
            "network": self.network_state(),
            "fit_seconds": self._seconds,
        }
        write_artifact(Path(path), KIND, TENSORS, self.own_state(), config)

    def _is_shared(self, parameter: Tensor) -> bool:
        held = getattr(self, self.shared) if self.shared else None
        return isinstance(held, nn.Module) and any(parameter is p for p in held.parameters())


def several(what: str, things: Any) -> list[Any]:
    """What an ensemble is made of, as a list; one module alone is refused, even if it has parts.

    >>> several("networks", nn.Sequential(nn.Linear(3, 2)))
    Traceback (most recent call last):
    TypeError: A list of networks is needed, not a Sequential.
    """
    alone = isinstance(things, nn.Module) and not isinstance(things, nn.ModuleList)
    if alone or not isinstance(things, Iterable):
        raise TypeError(f"A list of {what} is needed, not a {type(things).__name__}.")
    return list(things)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
