"""A network with other weights than its own: what methods that draw whole networks share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.func import functional_call

from abnn.baselines.method import Method
from abnn.draws import Draw, channel_noise
from abnn.folding import clone, no_fused_encoder
from abnn.outputs import Inputs, arguments, logits_of


def logits_with(method: Method, x: Inputs, tensors: Mapping[str, Tensor]) -> Tensor:
    """The logits of a method's network with other parameters and buffers, `[B, K, ...]`.

    Those without another value keep their own. Where the network is in training mode, the
    statistics of its norms are updated in the tensors that are given, or in its own.

    >>> from abnn.baselines import Single
    >>> single, x = Single(nn.Linear(2, 3)), torch.ones(1, 2)
    >>> logits_with(single, x, {"weight": torch.zeros(3, 2), "bias": torch.arange(3.0)})
    tensor([[0., 1., 2.]])
    """
    # A network that writes to its input would hand the next draw what it left.
    args, kwargs = arguments(clone(x))
    with no_fused_encoder():
        result = functional_call(method.net, dict(tensors), args, kwargs)
    return logits_of(result, method.output, method.class_dim)


def noise_like(
    tensors: Mapping[str, Tensor], seed: int, member: int, draw: int, stream: str = "predict"
) -> dict[str, Tensor]:
    """Standard normal noise for tensors by their names: a function of (seed, member, draw) alone.

    >>> eps = noise_like({"weight": torch.zeros(3, 2)}, seed=0, member=0, draw=5)
    >>> eps["weight"].shape
    torch.Size([3, 2])
    """
    sizes = [tensor.numel() for tensor in tensors.values()]
    noise = channel_noise(Draw(seed, member, draw, stream), sizes)
    return {
        name: eps.view(tensor.shape).to(tensor.device, tensor.dtype)
        for (name, tensor), eps in zip(tensors.items(), noise, strict=True)
    }
