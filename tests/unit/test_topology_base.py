"""Base-(k+1) graphs are exact in finite time for every n, with at most k peers per round (arXiv 2305.11420)."""

import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.topology import Layout, build


def check(n: int, k: int) -> None:
    topology = build("base", Layout.flat(n), k=k)
    product = np.eye(n)
    for made in topology.rounds:
        matrix = made.matrix()
        product = matrix @ product
        assert (matrix > 0).sum(axis=1).max() - 1 <= k, f"n={n}: more than {k} peers"
    np.testing.assert_allclose(product, 1 / n, rtol=0, atol=1e-14, err_msg=f"n={n}, k={k}")


@pytest.mark.parametrize("first", range(1, 129, 16))
def test_exact_for_every_n(first: int) -> None:
    for n in range(first, first + 16):
        check(n, 1)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_exact_with_more_peers(k: int) -> None:
    for n in [*range(1, 40), 45, 49, 63, 64, 77, 81, 97, 100, 121, 127, 128]:
        check(n, k)


def test_lengths() -> None:
    # The hyper-hypercube where it fits; 5 = 4 + 1 takes 2 + 1 + 2; 6 = 2 * 3 takes 1 + 3 rather than 2 + 1 + 2.
    lengths = {n: build("base", Layout.flat(n)).period for n in (2, 3, 4, 5, 6, 8, 64)}
    assert lengths == {2: 1, 3: 3, 4: 2, 5: 5, 6: 4, 8: 3, 64: 6}
    assert build("base(k=2)", Layout.flat(6)).period == 2


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "two"])
def test_bad_k(k: object) -> None:
    with pytest.raises(InputError, match="integer k >= 1"):
        build("base", Layout.flat(4), k=k)
