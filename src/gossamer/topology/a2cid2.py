"""The constants of asynchronous gossip on a graph: χ1 and χ2, and A2CiD2's η and α̃.

χ1 is the time that the slowest mode of the graph needs to decay, χ2 half of the largest effective resistance of an edge
(both at one exchange per worker and time unit). A2CiD2 keeps a second copy x̃ of the parameters x: η is the rate at
which x and x̃ are mixed, α̃ the weight with which an exchange changes x̃.

Nabli, Belilovsky, Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning" (NeurIPS
2023). With edge rates λ_ij = (1/deg_i + 1/deg_j) / 2 on the union graph of all rounds (1/deg where all degrees are
equal; a double edge counts twice) and the Laplacian Λ = sum of λ_ij (e_i - e_j)(e_i - e_j)^T:

    χ1 = 1 / λ_2(Λ),        χ2 = max over edges of (e_i - e_j)^T Λ^+ (e_i - e_j) / 2,
    η = 1 / (2 √(χ1 χ2)),   α̃ = √(χ1 / χ2) / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as sla

from gossamer.topology.core import Topology

DENSE = 1024  # workers up to which dense algebra is used; its time grows with the cube of n
CHAINLIKE = 4.5  # mean degree up to which a sparse factorization stays sparse (rings, grids, trees)
DENSE_LIMIT = 8192  # a larger dense inverse takes gigabytes
MODES = 16  # slowest modes to return


@dataclass(frozen=True)
class Rates:
    """χ1, χ2, η and α̃ at one exchange per worker and time unit; None for one worker, which has no edge."""

    chi1: float | None
    chi2: float | None

    @property
    def eta(self) -> float | None:
        return 0.5 / math.sqrt(self.chi1 * self.chi2) if self.chi1 and self.chi2 else None

    @property
    def alpha_tilde(self) -> float | None:
        return 0.5 * math.sqrt(self.chi1 / self.chi2) if self.chi1 and self.chi2 else None


def laplacian(n: int, edges: np.ndarray) -> sp.csc_array:
    """Return the Laplacian Λ at rate 1."""
    i, j = edges.T
    degree = np.bincount(edges.ravel(), minlength=n)
    rate = 0.5 * (1.0 / degree[i] + 1.0 / degree[j])
    off = sp.coo_array((np.r_[rate, rate], (np.r_[i, j], np.r_[j, i])), shape=(n, n)).tocsc()  # sums double edges
    return sp.csc_array(sp.diags_array(np.asarray(off.sum(axis=0)).ravel()) - off)


def slow_modes(matrix: sp.csc_array) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest non-zero eigenvalues of a connected graph's Laplacian, ascending, and their vectors."""
    n = matrix.shape[0]
    start = np.random.default_rng(0).standard_normal(n)
    if n <= DENSE:
        values, vectors = scipy.linalg.eigh(matrix.toarray())
    elif _chainlike(matrix):
        # The shift is just below zero, where the matrix is definite and the zero eigenvalue comes out first.
        values, vectors = sla.eigsh(matrix, k=MODES + 1, sigma=-1e-9, which="LM", v0=start)
    else:

        def flipped(x: np.ndarray) -> np.ndarray:  # the largest eigenvalue is then 2 - lambda_2
            x = x.ravel() - x.mean()
            return np.asarray(2.0 * x - matrix @ x)

        top, vectors = sla.eigsh(sla.LinearOperator((n, n), matvec=flipped, dtype=float), k=1, which="LA", v0=start)
        return 2.0 - top, vectors
    order = np.argsort(values)[1 : MODES + 1]
    return values[order], vectors[:, order]


def rates(matrix: sp.csc_array, lambda2: float) -> Rates:
    """Return the constants: χ1 from λ_2, χ2 from the effective resistance of every edge."""
    n = matrix.shape[0]
    upper = sp.triu(matrix, 1).tocoo()
    i, j = upper.row, upper.col
    if n <= DENSE or (n <= DENSE_LIMIT and len(i) > 1.25 * n):  # otherwise a ring or a tree: few edges, no fill-in
        full = matrix.toarray() + 1.0 / n  # definite, with the pseudo-inverse's differences
        factor, info = scipy.linalg.lapack.dpotrf(full, lower=0, overwrite_a=1)
        inverse, info = scipy.linalg.lapack.dpotri(factor, lower=0, overwrite_c=1)
        assert info == 0
        diagonal = inverse.diagonal()
        resistance = float((diagonal[i] + diagonal[j] - 2.0 * inverse[i, j]).max())
    elif _chainlike(matrix):
        resistance = _sparse_resistance(matrix, i, j)
    else:
        return Rates(1.0 / lambda2, None)
    return Rates(1.0 / lambda2, 0.5 * resistance)


def _sparse_resistance(matrix: sp.csc_array, i: np.ndarray, j: np.ndarray) -> float:
    """Return the largest effective resistance of an edge: one solve per edge, worker 0 grounded."""
    n = matrix.shape[0]
    solver = sla.splu(sp.csc_array(matrix[1:, 1:]), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    largest = 0.0
    for a in range(0, len(i), 256):
        tail, head = i[a : a + 256], j[a : a + 256]
        at = np.arange(len(tail))
        right = np.zeros((n, len(tail)))
        right[tail, at], right[head, at] = 1.0, -1.0
        potential = np.vstack([np.zeros(len(tail)), solver.solve(right[1:])])
        largest = max(largest, float((potential[tail, at] - potential[head, at]).max()))
    return largest


def _chainlike(matrix: sp.csc_array) -> bool:
    return bool((matrix.nnz / matrix.shape[0]) - 1 <= CHAINLIKE)


def rates_of(topology: Topology) -> Rates:
    """Return the constants of a topology's union graph."""
    if topology.n == 1:
        return Rates(None, None)
    matrix = laplacian(topology.n, topology.union_edges())
    values, _ = slow_modes(matrix)
    return rates(matrix, float(values[0]))
