"""The curvature that `Laplace` keeps, as eigenvalues and eigenvectors, and powers of it.

A block of parameters has one factor, or two whose Kronecker product it is. "diag" and "full" are
one block of one factor; "kron" has a block for every parameter, of two factors where it has more
than one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Factor = tuple[Tensor, Tensor | None]  # eigenvalues; eigenvectors, None where it is diagonal
Block = list[Factor]


def blocks(
    structure: str, shapes: Sequence[Sequence[int]], values: Tensor, vectors: Tensor
) -> list[Block]:
    """The blocks whose eigenvalues and eigenvectors are given one after the other.

    Args:
        structure: "kron", "diag" or "full".
        shapes: of the parameters.
        values, vectors: of all factors, flat.

    >>> [[block]] = blocks("diag", [(2, 3), (3,)], torch.ones(9), torch.empty(0))
    >>> block[0].shape, block[1]
    (torch.Size([9]), None)
    >>> found = blocks("kron", [(2, 3), (2,)], torch.ones(7), torch.ones(4 + 9 + 4))
    >>> [[len(l) for l, _ in block] for block in found]
    [[2, 3], [2]]
    """
    if structure == "diag":
        return [[(values, None)]]
    if structure == "full":
        return [[(values, vectors.view(len(values), len(values)))]]
    found = []
    for shape in shapes:
        block: Block = []
        for n in (shape[0], math.prod(shape[1:]))[: len(shape)]:
            block.append((values[:n], vectors[: n * n].view(n, n)))
            values, vectors = values[n:], vectors[n * n :]
        found.append(block)
    return found


def powered(rows: Tensor, H: Sequence[Block], prior: Tensor, exponent: float) -> Tensor:
    """The rows `[R, P]` times a power of `H + prior I`, which is symmetric.

    >>> H = blocks("diag", [(3,)], torch.tensor([3.0, 8.0, 15.0]), torch.empty(0))
    >>> powered(torch.ones(1, 3), H, torch.tensor([1.0]), -0.5)
    tensor([[0.5000, 0.3333, 0.2500]])
    """
    sizes = [math.prod(len(values) for values, _ in block) for block in H]
    parts = []
    for block, part in zip(H, rows.split(sizes, 1), strict=True):
        (first, Q), *more = block
        if not more:
            scale = (first + prior) ** exponent
            parts.append(part * scale if Q is None else part @ Q * scale @ Q.T)
            continue
        [(second, R)] = more
        assert Q is not None
        assert R is not None
        whole = part.view(-1, len(first), len(second))
        scaled = Q.T @ whole @ R * (first.outer(second) + prior) ** exponent
        parts.append((Q @ scaled @ R.T).flatten(1))
    return torch.cat(parts, 1)


def variance_of_linear(
    rows: Tensor, shapes: Sequence[Sequence[int]], H: Sequence[Block], prior: Tensor
) -> Tensor:
    """The variances of the outputs of a linear layer for inputs `[R, D]`, as `[R, K]`.

    They are the diagonal of `J (H + prior I)^-1 J^T`, without the Jacobian J, whose `K * K * D`
    numbers for every row are almost all 0.

    Args:
        rows: the inputs.
        shapes: of the weight, `(K, D)`, and of the bias, `(K,)`, if there is one.
        H, prior: the curvature and the precision of the prior.

    >>> H = blocks("diag", [(1, 2), (1,)], torch.tensor([1.0, 3.0, 7.0]), torch.empty(0))
    >>> variance_of_linear(torch.tensor([[1.0, 2.0]]), [(1, 2), (1,)], H, torch.tensor([1.0]))
    tensor([[1.6250]])
    """
    K, D = shapes[0]
    (values, vectors), *more = H[0]
    variance: Tensor
    if more:  # "kron"
        [(second, R)] = more
        assert vectors is not None
        assert R is not None
        variance = (rows @ R).square() @ (1 / (values.outer(second) + prior)).T
        variance = variance @ vectors.square().T
        for [(of_bias, Q)] in H[1:]:
            assert Q is not None
            variance = variance + Q.square() @ (1 / (of_bias + prior))
        return variance
    if vectors is None:  # "diag"
        weight, *bias = (1 / (values + prior)).split([math.prod(shape) for shape in shapes])
        variance = rows.square() @ weight.view(K, D).T
        return variance + bias[0] if bias else variance
    covariance = vectors / (values + prior) @ vectors.T
    # For every class, the places of its own weights, and of its bias.
    places = torch.arange(K * D, device=rows.device).view(K, D)
    if len(shapes) > 1:
        places = torch.cat([places, torch.arange(K, device=rows.device).view(K, 1) + K * D], 1)
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    own = covariance[places.unsqueeze(2), places.unsqueeze(1)]
    variance = torch.einsum("rd,kde,re->rk", rows, own, rows)
    return variance
