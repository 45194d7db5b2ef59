"""The sign trick as a least-squares problem, without a language model: how well can one row serve n n-grams?

    python records/studies/2026-11-30_sign_trick/fit.py

n n-grams share a row r of width d. N-gram i wants the k numbers y_i (random, of unit variance), and is read as P^T (s_i * r): through the
d x k matrix P, the same for all, with a pattern s_i of +-1 of its own, or without one. Its weight is that of Zipf's law, 1 / i. Printed
and drawn: the least weighted error that any row reaches, as a part of the error of r = 0; mean and deviation of 10 random problems.
Writes figure.png and the table in README.md.
"""
from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

WIDTH, SUBSPACE, TRIALS = 192, 8, 10
SHARERS = (1, 2, 4, 8, 16, 24, 32, 48, 96, 192)
READS = {  # name -> the d x k matrix that a sharer is read through
    "random 8 of 192": lambda rng: np.linalg.qr(rng.standard_normal((WIDTH, SUBSPACE)))[0],
    "8 coordinates": lambda rng: np.eye(WIDTH)[:, rng.permutation(WIDTH)[:SUBSPACE]],
    "all 192": lambda rng: np.eye(WIDTH),
}
BEGIN, END = "<!-- table: made by fit.py -->\n", "<!-- end of table -->"


def least_error(projection: np.ndarray, sharers: int, signed: bool, rng: np.random.Generator) -> float:
    """The smallest weighted mean of squared errors over sharers, as a part of that of an empty row."""
    d, k = projection.shape
    targets, root_weights = rng.standard_normal((sharers, k)), np.arange(1, sharers + 1) ** -0.5
    signs = rng.choice((-1.0, 1.0), (sharers, d)) if signed else np.ones((sharers, d))
    equations = (root_weights[:, None, None] * signs[:, None, :] * projection.T).reshape(sharers * k, d)
    wanted = (root_weights[:, None] * targets).ravel()
    # Normal equations; a trace of regularization stands in for the pseudo-inverse where sharers leave the row free.
    if sharers * k > d:
        row = np.linalg.solve(equations.T @ equations + 1e-10 * np.eye(d), equations.T @ wanted)
    else:
        row = equations.T @ np.linalg.solve(equations @ equations.T + 1e-10 * np.eye(sharers * k), wanted)
    return float(((equations @ row - wanted) ** 2).sum() / (wanted**2).sum())


def main() -> None:
    results = {}
    for read, make in READS.items():
        for signed in (False, True):
            rngs = [np.random.default_rng(trial) for trial in range(TRIALS)]
            results[read, signed] = [[least_error(make(rng), n, signed, rng) for rng in rngs] for n in SHARERS]
    here = Path(__file__).resolve().parent
    lines = ["| read through | signs | " + " | ".join(f"n = {n}" for n in SHARERS) + " |", "|---|---|" + "---:|" * len(SHARERS)]
    for (read, signed), errors in results.items():
        cells = " | ".join(f"{np.mean(e):.3f} ({np.std(e, ddof=1):.3f})" for e in errors)
        lines.append(f"| {read} | {'yes' if signed else 'no'} | {cells} |")
    readme = here / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    readme.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")
    print("\n".join(lines))
    draw(results, here / "figure.png")


def draw(results: dict, path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for color, read in zip(("tab:blue", "tab:orange", "tab:green"), READS):
        for signed in (False, True):
            means = [np.mean(errors) for errors in results[read, signed]]
            axes.plot(SHARERS, means, "o-" if signed else "x--", color=color, label=f"{read}, {'signs' if signed else 'no signs'}")
    axes.axvline(WIDTH / SUBSPACE, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="n-grams that share the row", ylabel="least error (empty row: 1)",
             title=f"one row of width {WIDTH}; gray: {WIDTH} / {SUBSPACE}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
