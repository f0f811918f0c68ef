"""Lanczos quadrature: x' f(G) x for any f from a few products with G."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

#: part of the first products below which what is new is rounding
_ROUNDING = 1e-10


class Quadrature(NamedTuple):
    """A sum for x' f(G) x: ``weights @ f(nodes)``.

    Attributes:
        nodes: float64[k], ascending, between the least and the largest eigenvalue of G.
        weights: float64[k], not negative; their sum is ||x||^2.
    """

    nodes: NDArray[np.float64]
    weights: NDArray[np.float64]


def quadrature(
    product: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64], steps: int = 15
) -> Quadrature:
    """Gauss quadrature by Lanczos (Golub and Meurant 2010, chapter 4; Ubaru, Chen and Saad 2017).

    k products make the sum exact for polynomials f up to degree 2 k - 1. One quadrature serves any number of functions.
    Every vector is made orthogonal to all before it, twice, so no eigenvalue comes up again.

    Args:
        product: v -> G v for a symmetric G, float64[d] to float64[d].
        start: float64[d], x.
        steps: the most products; fewer if they leave nothing new, and then the sum is exact.

    Returns:
        Nodes and weights; none for x = 0.
    """
    size = float(np.linalg.norm(start))
    if size == 0:
        return Quadrature(np.empty(0), np.empty(0))
    basis = np.empty((min(steps, start.size), start.size))
    diagonal, beside = list[float](), list[float]()
    vector, largest = start / size, 0.0
    for k in range(len(basis)):
        basis[k] = vector
        vector = product(vector)
        diagonal.append(float(basis[k] @ vector))
        for _ in range(2):
            vector = vector - (basis[: k + 1] @ vector) @ basis[: k + 1]
        left = float(np.linalg.norm(vector))
        largest = max(largest, abs(diagonal[-1]), left)
        if k + 1 == len(basis) or left <= _ROUNDING * largest:
            break
        beside.append(left)
        vector /= left
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return Quadrature(nodes, size**2 * vectors[0] ** 2)
