"""Draw a report: loss against time and steps, differences between arms, or loss against log2 of a config value."""
from __future__ import annotations

import math
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from arm_stats import first_reach, mean_curve
from tables import tokens_text
from train_gpt import UserError, written_whole

# Okabe and Ito's palette, distinct in every common form of colour blindness. Yellow is left out: too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
WARNING_COLOUR = "#B00020"


def plot_report(report: dict, path: Path) -> None:
    """Write a PNG, replacing the file only when it is whole. Raises UserError where there is nothing to draw."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--plot {path}: found the suffix {path.suffix or 'none'}, expected .png")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: its folder does not exist; make it first")
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
                                "axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False}):
        good = [run for group in report["groups"] for arm in group["arms"] for run in arm["_runs"] if not run.failure]
        compared = [c for group in report["groups"] for c in group["comparisons"] if c["loss_difference"] is not None]
        no_curves = compared and all(len(run.steps) == 1 for run in good)
        figure = _draw_by(report) if report["by"] else _draw_differences(report) if no_curves else _draw_curves(report)
        with written_whole(path) as part:
            figure.savefig(part, format="png", dpi=130)


def _new_figure(width: float, height: float, panels: int, report: dict) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    FigureCanvasAgg(figure)
    warning = "\n".join(textwrap.fill(f"WARNING {text}", int(15 * width)) for text in report["warnings"])
    if warning:
        bottom = (0.16 * (warning.count("\n") + 1) + 0.1) / height      # 0.16 inch a line
        figure.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))
        figure.text(0.01, 0.01, warning, fontsize=8, color=WARNING_COLOUR, va="bottom")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _style(index: int) -> dict:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]}


def _targets(report: dict) -> list[float]:
    return sorted({group["target_loss"] for group in report["groups"] if group["target_loss"] is not None})


def _draw_target(axes, report: dict) -> None:
    low, high = axes.get_ylim()
    for target in _targets(report):
        if not low - 0.5 * (high - low) < target < high + 0.5 * (high - low):
            continue     # so far away that drawing it would press the runs together
        axes.axhline(target, color="0.35", linewidth=1, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(f"target {target:g}", (0, target), xycoords=("axes fraction", "data"), xytext=(4, 3),
                      textcoords="offset points", fontsize=8.5, color="0.35", annotation_clip=True)


# ---- curves ---------------------------------------------------------------------------------------------------------

def _draw_curves(report: dict) -> Figure:
    arms = [(group["number"], arm) for group in report["groups"] for arm in group["arms"] if arm["n"]]
    if not arms:
        raise UserError("--plot: no finished run to draw")
    figure, (by_time, by_step) = _new_figure(12, 4.9, 2, report)
    many_groups = len(report["groups"]) > 1
    any_time = False
    for index, (number, arm) in enumerate(arms):
        good = [run for run in arm["_runs"] if not run.failure]
        label = f"{arm['name']} (n={arm['n']})" + (f", group {number}" if many_groups else "")
        for axes, of_curve in ((by_time, 2), (by_step, 0)):
            any_time |= _draw_arm(axes, good, of_curve, label, _style(index)) and of_curve == 2
    for axes, of_curve in ((by_time, 2), (by_step, 0)):
        _zoom(axes, arms, of_curve, report)
        _draw_target(axes, report)
        axes.set_ylabel("validation loss [nats/token]")
    by_time.set_xlabel("training time [s]")
    by_step.set_xlabel("step")
    by_step.legend(loc="upper right", fontsize=8.5)
    if not any_time:
        by_time.text(0.5, 0.5, "these logs hold no times", ha="center", transform=by_time.transAxes, color="0.35")
    return figure


def _draw_arm(axes, runs: list, of_curve: int, label: str, style: dict) -> bool:
    """Runs thin, their mean thick, over steps (`of_curve` 0) or times (2). Returns whether there was one to draw."""
    curves = [(curve[of_curve] / (1000 if of_curve == 2 else 1), curve[1])
              for curve in (mean_curve([run]) for run in runs)]
    curves = [(x, losses) for x, losses in curves if np.isfinite(x).any()]
    mean = mean_curve(runs)
    for x, losses in curves:
        axes.plot(x, losses, linewidth=0.6, alpha=1.0 if mean is None else 0.45 if len(curves) < 12 else 0.25, **style)
        axes.plot(x[-1:], losses[-1:], marker="o", markersize=2.5, color=style["color"], alpha=0.6, linestyle="none")
    if mean is not None and np.isfinite(mean[of_curve]).any():
        axes.plot(mean[of_curve] / (1000 if of_curve == 2 else 1), mean[1], linewidth=2.2, label=label, **style)
    elif curves:
        axes.plot([], [], linewidth=1, label=f"{label}: no mean, ends differ", **style)
    return bool(curves)


def _zoom(axes, arms: list, of_curve: int, report: dict) -> None:
    """Show the second half of training: the first fall of the loss would press all of interest into one line."""
    curves = [mean_curve([run]) for _, arm in arms for run in arm["_runs"] if not run.failure]
    top = max(losses[steps >= 0.5 * steps[-1]].max() for steps, losses, _ in curves)
    low = min(losses.min() for _, losses, _ in curves)
    near = [target for target in _targets(report) if low - 0.3 < target < top + 0.3]
    low, top = min([low, *near]), max([top, *near])
    span = max(top - low, 0.02)
    axes.set_ylim(low - 0.08 * span, top + 0.05 * span)
    entries = [first_reach(curve, top + 0.05 * span) for curve in curves]
    starts = [entry[0 if of_curve == 0 else 1] / (1 if of_curve == 0 else 1000) for entry in entries]
    ends = [curve[of_curve][-1] / (1 if of_curve == 0 else 1000) for curve in curves]
    starts, ends = [[x for x in xs if math.isfinite(x)] for xs in (starts, ends)]
    if ends:
        width = max(ends) - min(starts) or 1.0
        axes.set_xlim(min(starts) - 0.04 * width, max(ends) + 0.04 * width)


# ---- differences: for runs that were evaluated at their end alone, so that there is no curve ------------------------

def _draw_differences(report: dict) -> Figure:
    """Each arm's final losses minus the baseline's, by seed where both ran the same, with mean and 95% interval."""
    rows = [(group, comparison) for group in report["groups"] for comparison in group["comparisons"]
            if comparison["loss_difference"] is not None]
    figure, (axes,) = _new_figure(9, 1.2 + 0.32 * len(rows), 1, report)
    for place, (group, comparison) in enumerate(rows):
        arm, base = ([(run.seed, run.final_loss) for run in member["_runs"] if not run.failure]
                     for name in (comparison["arm"], comparison["baseline"])
                     for member in group["arms"] if member["name"] == name)
        paired, level = comparison["loss_by_seed"], np.mean([loss for _, loss in base])
        of_seed = dict(base) if paired else {seed: level for seed, _ in arm}
        mean = paired.get("difference", comparison["loss_difference"])
        interval = paired.get("ci95") or comparison["loss_ci95"]
        differences = [1000 * (loss - of_seed[seed]) for seed, loss in arm if seed in of_seed]
        axes.plot(differences, [place] * len(differences), "o", color=COLOURS[0], alpha=0.5, markersize=4)
        axes.plot([1000 * mean], [place], "D", color=COLOURS[1], markersize=6, zorder=3)
        if interval:
            axes.plot([1000 * end for end in interval], [place, place], "-", color=COLOURS[1], linewidth=1.5)
    axes.axvline(0, color="0.35", linewidth=1)
    axes.set_yticks(range(len(rows)), [comparison["arm"] for _, comparison in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"final validation loss minus that of {rows[0][1]['baseline']} [millinats/token]; "
                    f"dots: runs, bars: 95%")
    return figure


# ---- loss against a config value ------------------------------------------------------------------------------------

def _draw_by(report: dict) -> Figure:
    key = report["by"][0]
    runs = [run for group in report["groups"] for arm in group["arms"] for run in arm["_runs"] if not run.failure]
    values = [run.config.get(key) for run in runs]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 for value in values)
    places = {value: value for value in values if value} if numeric else \
        {str(value): place for place, value in enumerate(dict.fromkeys(map(str, values)))}
    if not places:
        raise UserError(f"--plot with --by {key}: found no finished run with a {key} above 0, expected at least one")
    figure, (axes,) = _new_figure(10, 5.0, 1, report)
    styles: dict[str, dict] = {}
    for group in report["groups"]:
        for arm in group["arms"]:
            if good := [run for run in arm["_runs"] if not run.failure]:
                series = _series_name(good[0], group, report)
                style = styles.setdefault(series, {"color": COLOURS[len(styles) % len(COLOURS)]})
                value = good[0].config.get(key)
                place = places.get(value if numeric else str(value))
                _draw_size(axes, good, place, style, f"{series}: {key}=0".removeprefix(": "))
        if numeric:
            _draw_fits(axes, group, report, styles)
    _label_by_axes(axes, key, numeric, places)
    _draw_target(axes, report)
    axes.set_ylabel("final validation loss [nats/token]")
    for series, style in styles.items():
        if series and not any(label.startswith(f"{series}:") for label in axes.get_legend_handles_labels()[1]):
            axes.plot([], [], "D", color=style["color"], label=series)
    axes.plot([], [], "o", color="0.4", markersize=4, label="run")
    axes.plot([], [], "D", color="0.4", markersize=8, markerfacecolor="white", label="mean of runs")
    axes.legend(fontsize=8.5, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _series_name(run, group: dict, report: dict) -> str:
    """What a line of the size plot stands for: values of the further --by keys, and the group if there are several."""
    parts = [f"{key}={run.config.get(key, 'unknown')}" for key in report["by"][1:]]
    return ", ".join(parts + [f"group {group['number']}"] * (len(report["groups"]) > 1))


def _draw_size(axes, runs: list, x: float | None, style: dict, zero_label: str) -> None:
    """The runs of one size and their mean; size 0 has no place on a logarithmic axis and becomes a level."""
    losses = [run.final_loss for run in runs]
    if x is None:
        axes.axhline(np.mean(losses), linewidth=1.5, linestyle=":", label=f"{zero_label} (n={len(runs)})", **style)
        return
    axes.plot([x], [np.mean(losses)], "D", markersize=8, markerfacecolor="white", zorder=3, **style)
    axes.plot([x] * len(losses), losses, "o", markersize=4, zorder=4, **style)


def _draw_fits(axes, group: dict, report: dict, styles: dict) -> None:
    for fit in group["fits"]:
        members = [run for arm in group["arms"] for run in arm["_runs"]
                   if not run.failure and run.config.get(fit["key"])]
        named = {_series_name(run, group, report): run for run in members}
        series = next(name for name in named if name.startswith(fit["series"]))
        sizes = [run.config[fit["key"]] for run in members if _series_name(run, group, report) == series]
        ends = np.array([min(sizes), max(sizes)], dtype=np.float64)
        error = f" ± {fit['slope_standard_error']:.2f}" if fit["slope_standard_error"] is not None else ""
        slope = f"{fit['slope_millinats_per_doubling']:+.2f}{error} millinats a doubling"
        axes.plot(ends, fit["intercept"] + fit["slope_millinats_per_doubling"] / 1000 * np.log2(ends), linewidth=1.6,
                  label=f"{series}: {slope}".removeprefix(": "), **styles[series])


def _label_by_axes(axes, key: str, numeric: bool, places: dict) -> None:
    if not numeric:
        axes.set_xticks(list(places.values()), list(places))
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xlabel(key)
        return
    axes.set_xscale("log", base=2)
    if len(places) <= 8:
        axes.set_xticks(sorted(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(value) if value >= 1 else f"{value:g}"))
    axes.set_xlabel(f"{key} (log scale)")
    axes.set_xlim(min(places) / math.sqrt(2), max(places) * math.sqrt(2))
