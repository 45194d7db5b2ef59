"""A report as text for the terminal, Markdown, JSON or CSV. All four show the same warnings."""
from __future__ import annotations

import csv
import io
import json
import textwrap

WIDTH = 120
NAME_WIDTH = 36      # longer names are shortened in the middle, further where a table would exceed WIDTH
NONE = "–"
LEGEND = (
    "loss: mean of the final validation losses in nats/token (mn: thousandths of it), sd: sample deviation between "
    "runs. p: chance of a mean this low or lower if the true mean were the target (one-sided one-sample t-test); a "
    "word in its place says why there is none. met: runs that reached the target, with the mean step and training time "
    "of the first evaluation at or below it. time: training time, comparable only between runs interleaved on one "
    "machine.")
LEGEND_COMPARISON = (
    "difference: arm minus baseline, with 95% interval and p by Welch's two-sided t-test. by seed: p of the "
    "losses paired by seed, where both arms ran the same seeds. at equal loss: difference of "
    "the times at which the two mean curves first reach the worse arm's final mean loss (straight lines between "
    "evaluations).")
LEGEND_OUTLIERS = "*: outlier by loss (modified z-score above 3.5, in samples of 5 or more); it counts all the same."


def number(value: float | None, decimals: int, scale: float = 1.0, sign: bool = False) -> str:
    return NONE if value is None else f"{value * scale:{'+' if sign else ''}.{decimals}f}"


def p_text(p: float | None, why_not: str | None) -> str:
    if p is None:
        return why_not or NONE
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.0e}"


def interval(bounds: list[float] | None, decimals: int, scale: float) -> str:
    if bounds is None:
        return NONE
    low, high = (number(bound, decimals, scale, sign=True) for bound in bounds)
    return f"[{low}, {high}]"


def tokens_text(tokens: float | None) -> str:
    if tokens is None:
        return NONE
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.4g}{suffix}"
    return f"{tokens:.0f}"


def steps_text(arm: dict) -> str:
    """The step where the runs ended, with /TOTAL where that is another number; ranges where runs differ."""
    ends, totals = (_range(arm[key]) for key in ("steps", "total_steps"))
    return ends if totals in (ends, NONE) else f"{ends}/{totals}"


def _range(values: list[int]) -> str:
    if not values:
        return NONE
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


# ---- rows, shared by text and Markdown ------------------------------------------------------------------------------

def arm_rows(group: dict) -> list[list[str]]:
    """A header and one row an arm."""
    target = "target" if group["target_loss"] is None else f"{group['target_loss']:g}"
    rows = [[", ".join(group["by"]) or "arm", "n", "failed", "loss", "sd", f"p(<={target})", "time [s]", "sd [s]",
             "steps", "tokens", "met", "at step", "at [s]"]]
    for arm in group["arms"]:
        met = f"{arm['met_target']}/{arm['n']}" if group["target_loss"] is not None and arm["n"] else NONE
        rows.append([_label(arm["name"], group), str(arm["n"]), str(len(arm["failed"])), number(arm["loss_mean"], 5),
                     number(arm["loss_sd"], 5), p_text(arm["p_at_or_below_target"], arm["no_p_because"]),
                     number(arm["time_mean_ms"], 4, 1e-3), number(arm["time_sd_ms"], 4, 1e-3), steps_text(arm),
                     tokens_text(arm["tokens_mean"]), met, number(arm["met_step_mean"], 0),
                     number(arm["met_time_mean_ms"], 2, 1e-3)])
    return rows


def comparison_rows(group: dict) -> list[list[str]]:
    """A header and one row an arm other than the baseline."""
    rows = [[f"minus {_label(group.get('baseline', ''), group)}", "loss [mn]", "95%", "p", "by seed", "time [s]", "95%",
             "p", "at equal loss [s]"]]
    for row in group["comparisons"]:
        equal, seeds = row["equal_loss"], row["loss_by_seed"]
        at_equal = NONE
        if equal:
            share = f" ({equal['difference_ms'] / equal['baseline_time_ms']:+.1%})" if equal["baseline_time_ms"] else ""
            at_equal = f"{number(equal['difference_ms'], 3, 1e-3, sign=True)}{share} at {equal['loss']:.5f}"
        rows.append([_label(row["arm"], group),
                     number(row["loss_difference"], 2, 1e3, sign=True), interval(row["loss_ci95"], 2, 1e3),
                     p_text(row["loss_p"], row["loss_no_p_because"]),
                     p_text(seeds.get("p"), None),
                     number(row["time_difference_ms"], 3, 1e-3, sign=True), interval(row["time_ci95_ms"], 3, 1e-3),
                     p_text(row["time_p"], row["time_no_p_because"]), at_equal])
    return rows


def _label(name: str, group: dict) -> str:
    """With --by, the values alone: their keys stand at the column's head."""
    for key in group["by"]:
        name = name.replace(f"{key}=", "", 1)
    return name


def group_title(group: dict) -> str:
    key = group["key"]
    world = f"{key['world_size']} x " if key["world_size"] != "unknown" else ""
    target = "" if group["target_loss"] is None else f"{group['target_loss']:g} "
    data = " or ".join("/".join(part.rpartition(":")[2][:12] for part in fingerprint.split("/"))
                       for fingerprint in key["data"].split(" or "))
    return (f"group {group['number']}: {world}{key['device']} | torch {key['torch']} | clock {key['clock']} "
            f"| data {data} | target {target}({group['target_from']})")


def value_lines(group: dict) -> list[tuple[str, str]]:
    """(arm, its final losses in the order of its files), outliers starred."""
    lines = []
    for arm in group["arms"]:
        if arm["n"]:
            decimals = 4 if all(round(run["loss"], 4) == run["loss"] for run in arm["runs"]) else 5
            values = [f"{run['loss']:.{decimals}f}" + ("*" if i in arm["outlier_losses"] else "")
                      for i, run in enumerate(arm["runs"])]
            lines.append((_label(arm["name"], group), " ".join(values)))
    return lines


def fit_lines(group: dict) -> list[str]:
    lines = []
    for fit in group["fits"]:
        error = f" +- {fit['slope_standard_error']:.2f}" if fit["slope_standard_error"] is not None else ""
        series = f" ({fit['series']})" if fit["series"] else ""
        lines.append(f"loss changes by {fit['slope_millinats_per_doubling']:+.2f}{error} millinats a doubling of "
                     f"{fit['key']}{series}: straight line through {fit['n']} runs of {fit['sizes']} sizes, "
                     f"r2 {fit['r_squared']:.3f}")
    return lines


def notes_of(group: dict) -> list[str]:
    return [f"{arm['name']}: {note}" for arm in group["arms"] for note in arm["notes"]] + group["notes"]


def closing_lines(report: dict) -> list[str]:
    lines = [f"skipped {row['path']}: {row['reason']}" for row in report["skipped"]]
    return lines + [f"counted once: {row['path']} is the same run as {row['same_as']}" for row in report["duplicates"]]


def legend_lines(report: dict) -> list[str]:
    starred = any(arm["outlier_losses"] for group in report["groups"] for arm in group["arms"])
    compared = any(group["comparisons"] for group in report["groups"])
    return [LEGEND] + [LEGEND_COMPARISON] * compared + [LEGEND_OUTLIERS] * starred


# ---- text -----------------------------------------------------------------------------------------------------------

def to_text(report: dict) -> str:
    """For a terminal of 120 columns."""
    lines = [_wrap(f"WARNING {warning}", "  ") for warning in report["warnings"]]
    for group in report["groups"]:
        lines += ["", _wrap(group_title(group), "  "), "", *_aligned(arm_rows(group))]
        if group["comparisons"]:
            lines += ["", *_aligned(comparison_rows(group))]
        lines += ["", *(_wrap(line, "  ") for line in fit_lines(group))] if group["fits"] else []
        if values := value_lines(group):
            width = max(len(_short(name)) for name, _ in values)
            lines += ["", "final losses"]
            lines += [_wrap(f"  {_short(name):<{width}}  {text}", " " * (width + 4)) for name, text in values]
        if notes := notes_of(group):
            lines += ["", *(_wrap(f"! {note}", "  ") for note in notes)]
    if closing := closing_lines(report):
        lines += ["", *(_wrap(line, "  ") for line in closing)]
    lines += ["", *(_wrap(line, "  ") for line in legend_lines(report))]
    return "\n".join(lines).lstrip("\n") + "\n"


def _short(name: str, width: int = NAME_WIDTH) -> str:
    if len(name) <= width:
        return name
    return name[:width // 2] + "…" + name[len(name) - (width - width // 2 - 1):]


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _aligned(rows: list[list[str]]) -> list[str]:
    """First column to the left, the others to the right; names are shortened until the table fits the terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    room = WIDTH - sum(widths[1:]) - len(gap) * (len(widths) - 1)
    name_width = max(12, min(widths[0], room, NAME_WIDTH))
    return [gap.join([_short(row[0], name_width).ljust(name_width),
                      *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip() for row in rows]


# ---- Markdown, JSON, CSV --------------------------------------------------------------------------------------------

def markdown_table(rows: list[list[str]]) -> list[str]:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = "|---|" + "---:|" * (len(rows[0]) - 1)
    return ["| " + " | ".join(rows[0]) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows[1:])]


def to_markdown(report: dict) -> str:
    lines = [f"**Warning:** {warning}\n" for warning in report["warnings"]]
    for group in report["groups"]:
        lines += [f"{group_title(group)}", "", *markdown_table(arm_rows(group)), ""]
        if group["comparisons"]:
            lines += [*markdown_table(comparison_rows(group)), ""]
        losses = [f"final losses of {name}: {values}" for name, values in value_lines(group)]
        bullets = [*fit_lines(group), *losses, *notes_of(group)]
        lines += [*(f"- {bullet}" for bullet in bullets), ""]
    if closing := closing_lines(report):
        lines += [*(f"- {line}" for line in closing), ""]
    return "\n".join([*lines, *(f"{line}\n" for line in legend_lines(report))]).rstrip() + "\n"


def without_private(value: object) -> object:
    """The report without what only the program needs (keys that begin with an underscore)."""
    if isinstance(value, dict):
        return {key: without_private(item) for key, item in value.items() if not key.startswith("_")}
    return [without_private(item) for item in value] if isinstance(value, list) else value


def to_json(report: dict) -> str:
    return json.dumps(without_private(report), indent=2, allow_nan=False) + "\n"


def to_csv(report: dict) -> str:
    """One row an arm, in full precision and base units; warnings stand first as comment lines."""
    out = io.StringIO()
    for warning in report["warnings"]:
        out.write(f"# WARNING {warning}\n")
    rows = [_csv_row(group, arm) for group in report["groups"] for arm in group["arms"]]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    for line in [note for group in report["groups"] for note in notes_of(group)] + closing_lines(report):
        out.write(f"# {line}\n")
    return out.getvalue()


def _csv_row(group: dict, arm: dict) -> dict:
    row = {"group": group["number"], "arm": arm["name"], "n": arm["n"], "failed": len(arm["failed"])}
    row |= {key: arm[key] for key in ("loss_mean", "loss_sd", "p_at_or_below_target", "no_p_because", "time_mean_ms",
                                      "time_sd_ms", "tokens_mean", "met_target", "met_step_mean", "met_time_mean_ms")}
    row |= {"steps": " ".join(map(str, arm["steps"])), "total_steps": " ".join(map(str, arm["total_steps"])),
            "losses": " ".join(repr(run["loss"]) for run in arm["runs"]), "target_loss": group["target_loss"]}
    compared = next((item for item in group["comparisons"] if item["arm"] == arm["name"]), {})
    row["baseline"] = compared.get("baseline")
    for kind, unit in (("loss", ""), ("time", "_ms")):
        low, high = compared.get(f"{kind}_ci95{unit}") or (None, None)
        row |= {f"{kind}_difference{unit}": compared.get(f"{kind}_difference{unit}"), f"{kind}_ci95_low{unit}": low,
                f"{kind}_ci95_high{unit}": high, f"{kind}_p": compared.get(f"{kind}_p")}
    equal = compared.get("equal_loss") or {}
    row |= {"equal_loss": equal.get("loss"), "equal_loss_time_difference_ms": equal.get("difference_ms")}
    return row | group["key"]
