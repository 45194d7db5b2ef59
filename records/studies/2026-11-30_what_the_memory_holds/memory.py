"""What the memory holds: loss and next-token accuracy with it, with zeros in its place, and of a model trained without it.

    ./run.sh arms --seeds 5 --arm table='--dtype=float32 --checkpoint --val_every=0 --sample_tokens=0' \\
        --arm no_table='--ngram_rows=0 --dtype=float32 --checkpoint --val_every=0 --sample_tokens=0' --out logs/memory
    .venv/bin/python records/studies/2026-11-30_what_the_memory_holds/memory.py logs/memory

evaluates the checkpoint of each run with records/look.py, keeps its lines as ARM/RUN.md beside this file, and makes the tables
in README.md and figure.png from all that is kept. Without an argument it only makes the tables and the figure. The lines kept
now are those of `train_gpt.py --eval_only`, which look.py has replaced.
"""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BEGIN, END = "<!-- tables: made by memory.py -->\n", "<!-- end of tables -->"
LINE = re.compile(r"(?:held out|order (\d), (.+)): ([\d,]+) tokens, loss ([\d.]+)(?: \(off ([\d.]+)\))?, "
                  r"(?:right|accuracy) ([\d.]+)(?: \(off ([\d.]+)\))?")


def evaluate(logs: Path) -> None:
    for path in sorted(logs.glob("*/checkpoints/*/")):
        arm, run = path.parent.parent.name, path.name.rpartition("_step")[0]
        command = [sys.executable, str(ROOT / "records" / "look.py"), str(path), "--sample_tokens=0"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        (HERE / arm).mkdir(exist_ok=True)
        (HERE / arm / f"{run}.md").write_text(f"```\n{shown[shown.index('held out:'):]}```\n")
        print(f"evaluated {path}")


def read_kept(arm: str) -> dict[tuple, np.ndarray]:
    """(order, class) -> [seeds, 5]: tokens, loss, loss without, right, right without. Order 0 is all tokens."""
    found = {}
    for path in sorted((HERE / arm).glob("*.md")):
        for order, name, *numbers in LINE.findall(path.read_text()):
            row = [float(number.replace(",", "") or "nan") for number in numbers]
            found.setdefault((int(order or 0), name or "all tokens"), []).append(row)
    return {key: np.array(rows) for key, rows in found.items()}


def cell(values: np.ndarray, digits: int) -> str:
    return f"{values.mean():.{digits}f} ({values.std(ddof=1):.{digits}f})"


def main(arguments: list[str]) -> None:
    if arguments:
        evaluate(Path(arguments[0]).resolve())
    table, without = read_kept("table"), read_kept("no_table")
    lines = ["| n-gram at the position | share of tokens | loss | zeroed | trained without | right | zeroed | trained without |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    all_tokens = table[0, "all tokens"][0, 0]
    for (order, name), numbers in table.items():
        other, what = without[order, name], name if order == 0 else f"order {order}: {name}"
        cells = [cell(numbers[:, 1], 3), cell(numbers[:, 2], 3), cell(other[:, 1], 3), cell(numbers[:, 3], 4), cell(numbers[:, 4], 4), cell(other[:, 3], 4)]
        lines.append(f"| {what} | {numbers[0, 0] / all_tokens:.1%} | " + " | ".join(cells) + " |")
    readme = HERE / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    readme.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")
    print("\n".join(lines))
    draw(table, without)


def draw(table: dict, without: dict) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), sharex="col", layout="constrained")
    for column, order in enumerate((2, 3)):
        names = [name for key, name in table if key == order]
        for row, (at, what, sign) in enumerate(((1, "loss saved [nats a token]", -1), (3, "next token right more often", 1))):
            axes = panels[row, column]
            for shift, label, other in ((-0.2, "against zeros", [table[order, name][:, at + 1] for name in names]),
                                        (0.2, "against training without", [without[order, name][:, at] for name in names])):
                gains = [sign * (table[order, name][:, at] - off) for name, off in zip(names, other)]
                axes.bar(np.arange(len(names)) + shift, [g.mean() for g in gains], 0.38, yerr=[g.std(ddof=1) for g in gains], label=label)
            axes.axhline(0, color="black", linewidth=0.6)
            axes.set_ylabel(what)
        panels[0, column].set_title(f"by how often the n-gram of order {order} was trained on", fontsize=10)
        panels[1, column].set_xticks(range(len(names)), [name.replace(" times", "").replace(" or more", "+") for name in names], rotation=20, fontsize=8)
    panels[0, 0].legend(fontsize=8)
    figure.savefig(HERE / "figure.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main(sys.argv[1:])
