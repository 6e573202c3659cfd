"""Print the Lloyd-Max levels of N(0, 1) for 1 to 8 bits: the literals of `tq_offload/codebook.py`.

For a symmetric density the quantizer of 2n levels is that of n levels on the half line (Lloyd 1982, Max 1960):
thresholds are midpoints, levels are centroids. Newton's method on the centroid condition, float64.

usage: python tools/make_codebook.py
"""

from __future__ import annotations

import numpy as np
from scipy.stats import norm


def centroids(levels: np.ndarray) -> np.ndarray:
    """Centroid of each cell of the half line, for positive ascending levels [n]; returns [n]."""
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    mass = norm.sf(edges[:-1]) - norm.sf(edges[1:])
    return (norm.pdf(edges[:-1]) - norm.pdf(edges[1:])) / mass


def solve(bits: int) -> np.ndarray:
    """Positive levels [2**(bits-1)], ascending, to about 1e-13."""
    n = 2 ** (bits - 1)
    levels = norm.isf(0.5 - (np.arange(n) + 0.5) / (2 * n)) * 1.2 if n > 1 else np.array([0.8])
    for _ in range(3000):
        levels = centroids(levels)
    for _ in range(50):
        residual = centroids(levels) - levels
        if np.abs(residual).max() < 1e-13:
            break
        step = 1e-6
        jacobian = np.stack(
            [(centroids(levels + step * e) - centroids(levels - step * e)) / (2 * step) for e in np.eye(n)], axis=1
        )
        levels = levels - np.linalg.solve(jacobian - np.eye(n), residual)
    return levels


def relative_mse(levels: np.ndarray) -> float:
    """Expected squared error over variance, `1 - sum p_i c_i^2`, for positive levels."""
    edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    mass = norm.sf(edges[:-1]) - norm.sf(edges[1:])
    return float(1 - 2 * (mass * levels**2).sum())


def main() -> None:
    """Print the table."""
    for bits in range(1, 9):
        levels = solve(bits)
        print(f"    {bits}: (  # relative MSE {relative_mse(levels):.6g}")
        text = [f"{np.float32(v):.9g}" for v in levels]
        for i in range(0, len(text), 8):
            print("        " + ", ".join(text[i : i + 8]) + ",")
        print("    ),")


if __name__ == "__main__":
    main()
