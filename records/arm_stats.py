"""Arms and their statistics: which runs belong together, what they show, and the report that every output prints.

`collect(paths)` reads logs into arms; `build_report(collected, ...)` makes one dict of plain values from them.
"""
from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_gpt.py has what all command lines share
from read_logs import UNKNOWN, LogError, Run, read_log
from train_gpt import UserError

FIELD_TARGET_LOSS = 3.28     # logs of other trainers do not name their target; it was this one
OUTLIER_SCORE = 3.5          # modified z-score, Iglewicz and Hoaglin (1993)
OUTLIER_MIN_RUNS = 5         # of fewer values the median absolute deviation is of no use
LOG_SUFFIXES = (".txt", ".log")
NOT_CONFIG_DIFFERENCES = {"seed", "run_id", "out", "resume"}


# ---- arms: which runs belong together -------------------------------------------------------------------------------

@dataclass
class Collected:
    """`arms`: display name to runs; `skipped`: (path, reason); `duplicates`: (run, the file in which it counts)."""
    arms: dict[str, list[Run]]
    skipped: list[tuple[str, str]]
    duplicates: list[tuple[str, str]]


def collect(paths: list[str]) -> Collected:
    """Read every log under `paths`. Raises UserError for a path that does not exist or when no run is found."""
    files_by_arm: dict[Path, list[Path]] = {}
    skipped: list[tuple[str, str]] = []
    for text in paths:
        for arm, files in _arms_of_path(text, skipped):
            files_by_arm[arm] = list(dict.fromkeys([*files_by_arm.get(arm, []), *files]))
    logs = read_files([file for files in files_by_arm.values() for file in files])
    files_by_arm = {arm: [file for file in files if file in logs] for arm, files in files_by_arm.items()}
    files_by_arm = {arm: files for arm, files in files_by_arm.items() if files}
    names = _short_names(list(files_by_arm))
    collected = Collected({}, skipped, [])
    seen: dict[object, list[Run]] = {}
    arm_of_file: dict[Path, Path] = {}
    for arm, files in files_by_arm.items():
        runs = collected.arms.setdefault(names[arm], [])
        for file in files:
            holder = arm_of_file.setdefault(file.resolve(), arm)
            if holder is arm:
                _add_runs(runs, file, logs[file], collected, seen)
            elif holder.resolve() != arm.resolve():
                collected.duplicates.append((str(file), f"one in the arm {names[holder]}"))
    for name in collected.arms:
        collected.arms[name] = _join_resumed(collected.arms[name], collected)
    collected.arms = {name: runs for name, runs in collected.arms.items() if runs}
    if not collected.arms:
        named = "".join(f"\n  {path}: {reason}" for path, reason in skipped)
        raise UserError(f"no run found in {', '.join(paths)}; expected logs with step: lines (.txt or .log){named}")
    return collected


def _arms_of_path(text: str, skipped: list[tuple[str, str]]) -> list[tuple[Path, list[Path]]]:
    """(arm, log files) for each arm that one argument names."""
    path = Path(text)
    if path.is_dir():
        return _arms_of_folder(path, skipped)
    if path.exists():
        return [(path, [path])]
    matches = [Path(match) for match in sorted(glob.glob(text, recursive=True))]
    if not matches:
        raise UserError(f"{text}: no such file or folder; expected a log, a folder of logs, or a glob that matches")
    arms = [arm for match in matches if match.is_dir() for arm in _arms_of_folder(match, skipped)]
    files = [match for match in matches if match.is_file()]
    return arms + ([(Path(text), _only_logs(files, skipped))] if files else [])


def _arms_of_folder(folder: Path, skipped: list[tuple[str, str]]) -> list[tuple[Path, list[Path]]]:
    """Each folder at or below `folder` that holds logs is an arm."""
    arms = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "checkpoints")
        if files := _only_logs([Path(place, name) for name in sorted(names)], skipped):
            arms.append((Path(place), files))
    return arms


def _only_logs(files: list[Path], skipped: list[tuple[str, str]]) -> list[Path]:
    """The files with a log's suffix. Others are noted as skipped, but for a record's sources, texts and figures."""
    logs = []
    for file in files:
        if file.suffix in LOG_SUFFIXES:
            logs.append(file)
        elif file.suffix not in (".py", ".cpp", ".md", ".png") and not file.name.startswith("."):
            skipped.append((str(file), "not a log by its name (.txt or .log)"))
    return logs


def expand_logs(paths: list[str]) -> list[Path]:
    """Every log that `paths` name, once. Raises UserError for a file that is no log by its name."""
    skipped: list[tuple[str, str]] = []
    logs = dict.fromkeys(file for text in paths for _, files in _arms_of_path(text, skipped) for file in files)
    for path, reason in skipped:
        raise UserError(f"{path}: {reason}; name the logs themselves, or move it away")
    return list(logs)


def read_files(files: list[Path]) -> dict[Path, list[Run] | str]:
    """The runs of each file, or why it holds none. Sources that the runs were made by, kept as text, are left out."""
    found: dict[Path, list[Run] | str] = {}
    for file in dict.fromkeys(files):
        try:
            found[file] = read_log(file)
        except (LogError, OSError) as error:
            found[file] = str(isinstance(error, OSError) and error.strerror or error)
    runs = [run for read in found.values() if not isinstance(read, str) for run in read]
    sources = {digest for run in runs for digest in run.sources.values()}
    return {file: read for file, read in found.items() if not (sources and _is_source(file, read, sources))}


def _is_source(file: Path, read: list[Run] | str, sources: set[str]) -> bool:
    """Whether the file is one of `sources` by its sha256. Not read again where it is a log of this trainer."""
    if not isinstance(read, str) and any(run.header for run in read):
        return False
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() in sources
    except OSError:
        return False


def _add_runs(runs: list[Run], file: Path, found: list[Run] | str, collected: Collected,
              seen: dict[object, list[Run]]) -> None:
    """Add what the file holds to an arm's runs; what holds no run and what is there already is noted."""
    if isinstance(found, str):
        collected.skipped.append((str(file), found))
        return
    for run in found:
        same = seen.setdefault(json.dumps(run.header, sort_keys=True) if run.header else run.curve_digest(), [])
        twin = next((other for other in same if _is_same_run(run, other)), None)
        if twin is None:
            runs.append(run)
            same.append(run)
            continue
        kept, other = (twin, run)
        if len(run.steps) > len(twin.steps):       # the copy read first was cut: the longer one takes its place
            holder = next(held for held in collected.arms.values() if any(r is twin for r in held))
            holder[next(i for i, r in enumerate(holder) if r is twin)] = run
            same[same.index(twin)] = run
            kept, other = run, twin
        collected.duplicates.append((f"{other.path}{other.name[len(other.path.name):]}", str(kept.path)))


def _is_same_run(run: Run, other: Run) -> bool:
    """Same header (already equal) or same curve; with a header, one curve may be a cut copy of the other."""
    if not run.header:
        return len(run.steps) > 0 and run.final_step > 0
    length = min(len(run.steps), len(other.steps))
    return all(a[:length] == b[:length] for a, b in
               ((run.steps, other.steps), (run.losses, other.losses), (run.times_ms, other.times_ms)))


def _join_resumed(runs: list[Run], collected: Collected) -> list[Run]:
    """An arm's runs; a stopped run and the one that resumed it are one: the latter, with the evaluations before it.

    A run that resumed a finished one is no second sample, and is left out.
    """
    by_id = {run.header["run_id"]: run for run in runs if "run_id" in run.header}
    repeats: dict[str, Run] = {}     # run_id of one that resumed a finished run -> that run
    for run in sorted((run for run in runs if run.resumed), key=lambda run: len(run.resumed["run_ids"])):
        before, step = run.resumed["run_ids"][-1], run.resumed["step"]
        earlier = by_id.get(before)
        if earlier is None or earlier is run:
            run.resumed_from = f"{before} at step {step}"
            continue
        whole = repeats.get(before) or (earlier if earlier.failure is None else None)
        if whole:
            repeats[run.header["run_id"]] = whole
        else:
            count = sum(at <= step and at not in run.steps for at in earlier.steps)
            for name in ("steps", "losses", "times_ms"):
                setattr(run, name, getattr(earlier, name)[:count] + getattr(run, name))
            for name in ("world_size", "device", "torch"):     # so that it is pooled with no run of one of them alone
                if getattr(earlier, name) != getattr(run, name):
                    setattr(run, name, f"{getattr(earlier, name)}, then {getattr(run, name)}")
        left_out, kept = (run, whole) if whole else (earlier, run)
        if any(other is left_out for other in runs):
            runs = [other for other in runs if other is not left_out]
            collected.duplicates.append((str(left_out.path), str(kept.path)))
    return runs


def _short_names(arms: list[Path]) -> dict[Path, str]:
    """For each arm's path, the fewest last parts that no other arm's path ends with."""
    parts = {arm: arm.with_suffix("").parts if arm.suffix in LOG_SUFFIXES else arm.resolve().parts for arm in arms}
    names = {}
    for arm in arms:
        depth = 1
        others = [parts[other] for other in arms if other != arm]
        while depth < len(parts[arm]) and any(other[-depth:] == parts[arm][-depth:] for other in others):
            depth += 1
        names[arm] = "/".join(parts[arm][-depth:])
    return names


def regroup_by(arms: dict[str, list[Run]], keys: list[str]) -> dict[str, list[Run]]:
    """New arms, one for each combination of values of the config `keys`. Raises UserError for a key that no run has."""
    runs = [run for runs in arms.values() for run in runs]
    for key in keys:
        if not any(key in run.config for run in runs):
            known = sorted({name for run in runs for name in run.config})
            raise UserError(f"--by {key}: found in no run's config; expected one of: {', '.join(known) or 'none, as '}"
                            f"{'' if known else 'these logs have no run: line'}")
    regrouped: dict[tuple, list[Run]] = {}
    for run in runs:
        regrouped.setdefault(tuple(_hashable(run.config.get(key, UNKNOWN)) for key in keys), []).append(run)
    ordered = sorted(regrouped, key=lambda values: [(isinstance(value, str), value) for value in values])
    return {", ".join(f"{key}={value}" for key, value in zip(keys, values)): regrouped[values] for values in ordered}


def _hashable(value: object) -> object:
    return value if isinstance(value, (int, float, str)) and not isinstance(value, bool) else json.dumps(value)


# ---- statistics -----------------------------------------------------------------------------------------------------

def mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def deviation(values: list[float]) -> float | None:
    """Sample standard deviation (n - 1), or None for fewer than two values. Exactly 0 where all values are equal."""
    if len(values) < 2:
        return None
    return 0.0 if min(values) == max(values) else float(np.std(values, ddof=1))


def why_no_test(values: list[float], seeds: list = ()) -> str | None:
    """Why `values` cannot be tested, in a word that fits a table cell, or None if they can."""
    known = [seed for seed in seeds if seed is not None]
    if len(known) != len(set(known)):
        return "eq. seeds"
    if len(values) < 2:
        return f"n={len(values)}"
    return "sd=0" if deviation(values) == 0.0 else None


def p_at_or_below(values: list[float], target: float) -> float:
    """One-sided one-sample t-test: the chance of a mean this low or lower if the true mean were `target`."""
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)


def welch(values: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """(p, low, high): Welch's two-sided test, and the 95% interval of mean(values) - mean(baseline)."""
    result = stats.ttest_ind(values, baseline, equal_var=False)
    interval = result.confidence_interval(0.95)
    return float(result.pvalue), float(interval.low), float(interval.high)


def paired_by_seed(arm: list[Run], base: list[Run]) -> dict:
    """Paired two-sided t-test of arm - base over the seeds that both ran once.

    {} where there are fewer than two such seeds, or where all differences are equal.
    Runs of one seed begin with the same weights and read the same tokens: much of the difference between seeds cancels.
    """
    losses = [{run.seed: run.final_loss for run in side if run.seed is not None} for side in (arm, base)]
    if any(len(known) < len(side) for known, side in zip(losses, (arm, base))):
        return {}
    differences = [losses[0][seed] - losses[1][seed] for seed in sorted(losses[0].keys() & losses[1].keys())]
    if why_no_test(differences):
        return {}
    result = stats.ttest_1samp(differences, 0.0)
    interval = result.confidence_interval(0.95)
    return {"n": len(differences), "difference": mean(differences), "p": float(result.pvalue),
            "ci95": [float(interval.low), float(interval.high)]}


def outliers(values: list[float]) -> list[int]:
    """Indices of values with a modified z-score above 3.5: 0.6745 |x - median| / MAD, or |x - median| / (1.2533 x mean
    absolute deviation) where over half of the values are equal. None below five values."""
    if len(values) < OUTLIER_MIN_RUNS:
        return []
    distance = np.abs(np.asarray(values) - np.median(values))
    scale = np.median(distance) / 0.6745 or np.mean(distance) * 1.253314
    return [int(i) for i in np.flatnonzero(distance > OUTLIER_SCORE * scale)] if scale > 0 else []


def mean_curve(runs: list[Run]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(steps, losses, times_ms), each float64 [E], averaged over the runs at the steps that all evaluated.

    None where the runs do not end at one step: then no point of the mean is the final loss.
    """
    if not runs or len({run.final_step for run in runs}) != 1:
        return None
    common = np.asarray(sorted(set(runs[0].steps).intersection(*(run.steps for run in runs[1:]))), dtype=np.int64)
    at = [np.searchsorted(run.steps, common) for run in runs]
    losses = np.mean([np.asarray(run.losses)[places] for run, places in zip(runs, at)], axis=0)
    times_ms = np.mean([np.asarray(run.times_ms)[places] for run, places in zip(runs, at)], axis=0)
    times_ms = np.minimum.accumulate(times_ms[::-1])[::-1]     # a clock that restarts at step 10 runs ahead before it
    return common.astype(np.float64), losses, times_ms


def first_reach(curve: tuple[np.ndarray, np.ndarray, np.ndarray], level: float) -> tuple[float, float] | None:
    """(step, time_ms) at which the curve first is at or below `level`, by straight lines between evaluations."""
    steps, losses, times_ms = curve
    at = np.flatnonzero(losses <= level + 1e-12)
    if not len(at):
        return None
    i = int(at[0])
    if i == 0:
        return float(steps[0]), float(times_ms[0])
    part = min(1.0, (losses[i - 1] - level) / (losses[i - 1] - losses[i]))
    return tuple(float(axis[i - 1] + part * (axis[i] - axis[i - 1])) for axis in (steps, times_ms))


def fit_per_doubling(sizes: list[float], losses: list[float]) -> dict | None:
    """Least squares of loss on log2(size) over runs; slopes in millinats a doubling. None for fewer than two sizes."""
    if len(set(sizes)) < 2:
        return None
    fit = stats.linregress(np.log2(sizes), losses)
    return {"slope_millinats_per_doubling": 1000 * float(fit.slope),
            "slope_standard_error": 1000 * float(fit.stderr) if len(sizes) > 2 else None,
            "intercept": float(fit.intercept), "r_squared": float(fit.rvalue) ** 2,
            "sizes": len(set(sizes)), "n": len(sizes)}


# ---- report: everything that the outputs show, as plain values ------------------------------------------------------

def build_report(collected: Collected, target: float | None = None, baseline: str | None = None, mix: bool = False,
                 by: list[str] = ()) -> dict:
    """The whole comparison as JSON-ready values. Lists of Run stand under "_runs" keys, which outputs leave out."""
    arms = regroup_by(collected.arms, list(by)) if by else collected.arms
    warnings: list[str] = []
    groups = _split_into_groups(arms, mix, warnings)
    report = {"warnings": warnings, "groups": [], "by": list(by),
              "skipped": [{"path": path, "reason": reason} for path, reason in collected.skipped],
              "duplicates": [{"path": path, "same_as": kept} for path, kept in collected.duplicates]}
    for index, (key, members) in enumerate(groups):
        report["groups"].append(_describe_group(index + 1, key, members, target, baseline, list(by)))
    if len(groups) > 1:
        differing = [name for name in groups[0][0] if len({key[name] for key, _ in groups}) > 1]
        warnings.append(f"not comparable: the runs differ in {', '.join(differing)}, so they stand in {len(groups)} "
                        f"groups; nothing is pooled or compared across them (--mix does it anyway)")
    return report


def _split_into_groups(arms: dict[str, list[Run]], mix: bool,
                       warnings: list[str]) -> list[tuple[dict, dict[str, list[Run]]]]:
    """[(what its runs agree in, {arm: runs})]. A failed run pools nothing, so it stays with its arm's finished runs."""
    groups: dict[tuple, dict[str, list[Run]]] = {}
    for name, runs in arms.items():
        finished = {tuple(run.comparable().items()): None for run in runs if not run.failure}
        for run in runs:
            key = tuple(run.comparable().items())
            key = next(iter(finished)) if run.failure and finished and key not in finished else key
            groups.setdefault(key, {}).setdefault(name, []).append(run)
    split = [(dict(key), members) for key, members in groups.items()]
    if not mix or len(split) < 2:
        return split
    merged_key, mixed = {}, []
    for field in split[0][0]:
        values = list(dict.fromkeys(key[field] for key, _ in split))
        merged_key[field] = " or ".join(values)
        if len(values) > 1:
            mixed.append(f"{field} ({', '.join(values)})")
    warnings.append("mixed by --mix: runs that are not comparable are pooled and compared; they differ in "
                    + "; ".join(mixed))
    return [(merged_key, arms)]


def _target_of(runs: list[Run], given: float | None) -> tuple[float | None, str]:
    """(the loss to reach, where it comes from); None where the logs disagree."""
    named = {run.target_loss for run in runs if run.target_loss is not None}
    if given is not None:
        return given, "by --target"
    if len(named) > 1:
        return None, "several in the logs: give --target"
    return (named.pop(), "from the logs") if named else (FIELD_TARGET_LOSS, "assumed: the logs name none")


def _describe_group(number: int, key: dict, arms: dict[str, list[Run]], target: float | None, baseline: str | None,
                    by: list[str]) -> dict:
    target, target_from = _target_of([run for members in arms.values() for run in members], target)
    described = [describe_arm(name, members, target) for name, members in arms.items()]
    group = {"number": number, "key": key, "target_loss": target, "target_from": target_from, "by": by,
             "arms": described, "comparisons": [], "fits": [], "notes": []}
    if key["device"] == UNKNOWN:
        group["notes"].append("these logs name no hardware, so it is unknown whether their times compare")
    base = next((arm for arm in described if arm["name"] == baseline), None) if baseline else described[0]
    if base is None and len(described) > 1:
        group["notes"].append(f"nothing is compared here: the baseline {baseline} is in another group")
    elif base is not None:
        group["baseline"] = base["name"]
        group["comparisons"] = [compare_arms(arm, base) for arm in described if arm is not base]
        group["notes"] += _notes_between(described, base, by)
    if by:
        group["fits"] = _fits(arms, by)
    return group


def describe_arm(name: str, runs: list[Run], target: float | None) -> dict:
    """An arm's statistics: over its finished runs, with the failed ones counted and named."""
    good = [run for run in runs if not run.failure]
    losses = [run.final_loss for run in good]
    times_ms = [run.train_time_ms for run in good if math.isfinite(run.train_time_ms)]
    no_p = why_no_test(losses, [run.seed for run in good]) or (None if target is not None else "no target")
    met = [run.first_met(target) for run in good] if target is not None else []
    met = [point for point in met if point]
    met_times_ms = [time_ms for _, time_ms in met if math.isfinite(time_ms)]
    tokens = [run.final_step * run.config["batch_tokens"] for run in good
              if isinstance(run.config.get("batch_tokens"), int)]
    arm = {"name": name, "n": len(good),
           "failed": [{"run": run.name, "path": str(run.path), "reason": run.failure} for run in runs if run.failure],
           "loss_mean": mean(losses), "loss_sd": deviation(losses),
           "p_at_or_below_target": None if no_p else p_at_or_below(losses, target), "no_p_because": no_p,
           "time_mean_ms": mean(times_ms), "time_sd_ms": deviation(times_ms),
           "steps": sorted({run.final_step for run in good}),
           "total_steps": sorted({run.total for run in good if run.total is not None}),
           "tokens_mean": mean(tokens) if len(tokens) == len(good) else None,
           "met_target": len(met), "met_step_mean": mean([step for step, _ in met]),
           "met_time_mean_ms": mean(met_times_ms) if len(met_times_ms) == len(met) else None,
           "outlier_losses": outliers(losses),
           "outlier_times": outliers(times_ms) if len(times_ms) == len(good) else [],
           "runs": [{"run": run.name, "path": str(run.path), "seed": run.seed, "loss": run.final_loss,
                     "time_ms": run.train_time_ms if math.isfinite(run.train_time_ms) else None,
                     "step": run.final_step, "total": run.total} for run in good],
           "_runs": runs}
    arm["notes"] = _notes_on_arm(arm, good)
    return arm


def _notes_on_arm(arm: dict, good: list[Run]) -> list[str]:
    notes = [f"failed: {failed['run']}: {failed['reason']}" for failed in arm["failed"]]
    notes += [f"{run.name} resumed {run.resumed_from}, whose log is not here"
              for run in arm["_runs"] if run.resumed_from]
    early = [run for run in good if run.ended_early]
    if early:
        ends = _count_list([f"{run.final_step} of {run.total}" for run in early])
        notes.append(f"{len(early)} of {len(good)} ended before TOTAL: {ends} (steps chosen after the fact?)")
    if len(arm["steps"]) > 1:
        notes.append(f"runs end at different steps: {_count_list([run.final_step for run in good])}")
    if len(arm["total_steps"]) > 1:
        notes.append(f"runs planned different numbers of steps: {_count_list([run.total for run in good])}")
    for run in good:
        planned = run.config.get("steps")
        if planned is not None and run.total is not None and planned != run.total:
            notes.append(f"{run.name}: its config asks for {planned} steps, its lines say TOTAL {run.total}")
        if run.repeated_step is not None:
            notes.append(f"{run.name}: evaluated step {run.repeated_step} more than once; the last one counts")
    if arm["no_p_because"] == "eq. seeds":
        seeds = [run.seed for run in good]
        again = sorted({seed for seed in seeds if seed is not None and seeds.count(seed) > 1})
        notes.append(f"no test of the loss: seed {', '.join(map(str, again))} occurs more than once, and such runs are "
                     f"not independent draws")
    elif len(good) > 1 and all(run.seed is None for run in good):
        notes.append("seeds unknown: taken to be distinct")
    varied = {key: values for key, values in config_values(good).items() if len(values) > 1}
    if varied:
        shown = "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in varied.items())
        notes.append(f"pools different configs: {shown} (--by {next(iter(varied))} separates them)")
    if len({frozenset(run.sources.items()) for run in good}) > 1:
        notes.append("pools runs of different sources")
    for kind, places in (("loss", "outlier_losses"), ("time", "outlier_times")):
        flagged = [f"{good[i].name} ({good[i].final_loss})" if kind == "loss" else
                   f"{good[i].name} ({good[i].train_time_ms / 1000:.3f} s)" for i in arm[places]]
        if flagged:
            notes.append(f"outlier by {kind}, kept: {', '.join(flagged)}")
    return notes


def _count_list(values: list) -> str:
    return ", ".join(f"{value} ({count}x)" if count > 1 else str(value) for value, count in Counter(values).items())


def config_values(runs: list[Run]) -> dict[str, list]:
    """{config key: its different values over the runs}, without keys that differ by design (seed, run_id, out)."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NOT_CONFIG_DIFFERENCES)
    return {key: list(dict.fromkeys(_hashable(run.config.get(key, UNKNOWN)) for run in runs)) for key in keys}


def compare_arms(arm: dict, base: dict) -> dict:
    """Differences arm - base in loss and time with Welch's p and 95% interval, and the times at equal loss."""
    pair = [[run for run in side["_runs"] if not run.failure] for side in (arm, base)]
    result = {"arm": arm["name"], "baseline": base["name"]}
    for kind, unit in (("loss", ""), ("time", "_ms")):
        if kind == "loss":
            values = [[run.final_loss for run in side] for side in pair]
            why = [why_no_test(side, [run.seed for run in runs]) for side, runs in zip(values, pair)]
        else:
            values = [[run.train_time_ms for run in side if math.isfinite(run.train_time_ms)] for side in pair]
            why = [why_no_test(side) for side in values]     # equal seeds do not tie the times together
        no_p = why[0] or why[1]
        p, low, high = (None, None, None) if no_p else welch(*values)
        difference = mean(values[0]) - mean(values[1]) if values[0] and values[1] else None
        result |= {f"{kind}_difference{unit}": difference, f"{kind}_ci95{unit}": None if no_p else [low, high],
                   f"{kind}_p": p, f"{kind}_no_p_because": no_p}
    result["loss_by_seed"] = paired_by_seed(*pair)
    result["equal_loss"] = _time_at_equal_loss(*pair)
    return result


def _time_at_equal_loss(arm: list[Run], base: list[Run]) -> dict | None:
    """When each arm's mean curve first reaches the worse arm's final mean loss. None without curves or times."""
    curves = [mean_curve(arm), mean_curve(base)]
    if any(curve is None for curve in curves):
        return None
    level = max(float(curve[1][-1]) for curve in curves)
    if any(steps[0] > 0 and losses[0] < level - 1e-12 for steps, losses, _ in curves):     # before the first evaluation
        return None
    reached = [first_reach(curve, level) for curve in curves]
    if any(point is None or not math.isfinite(point[1]) for point in reached):
        return None
    (step, time_ms), (base_step, base_time_ms) = reached
    return {"loss": level, "time_ms": time_ms, "baseline_time_ms": base_time_ms,
            "difference_ms": time_ms - base_time_ms, "step": step, "baseline_step": base_step}


def _notes_between(arms: list[dict], base: dict, by: list[str]) -> list[str]:
    """What else differs between the arms, and so may explain a difference of loss."""
    notes = []
    if len({tuple(arm["steps"]) for arm in arms if arm["n"]}) > 1:
        notes.append("arms differ in their number of steps: read the time at equal loss, not the final losses alone")
    base_config = config_values(base["_runs"])
    for arm in arms:
        config = config_values(arm["_runs"])
        if arm is base or not base_config or not config:
            continue
        changes = [f"{key} {_join(config.get(key, [UNKNOWN]))} ({_join(base_config.get(key, [UNKNOWN]))})"
                   for key in dict.fromkeys([*base_config, *config])
                   if key not in by and config.get(key) != base_config.get(key)]
        sources = [{frozenset(run.sources.items()) for run in side["_runs"]} for side in (arm, base)]
        changes += ["its source"] if sources[0] != sources[1] else []
        if changes or not by:
            notes.append(f"{arm['name']} differs from {base['name']} in " + ("; ".join(changes) or "nothing but seeds"))
    return notes


def _join(values: list) -> str:
    return "/".join(map(str, values))


def _fits(arms: dict[str, list[Run]], by: list[str]) -> list[dict]:
    """One straight line through loss against log2 of the first key for each combination of the other keys."""
    series: dict[str, list[tuple[float, float]]] = {}
    for runs in arms.values():
        for run in runs:
            size = run.config.get(by[0])
            if not run.failure and isinstance(size, (int, float)) and not isinstance(size, bool) and size > 0:
                name = ", ".join(f"{key}={_hashable(run.config.get(key, UNKNOWN))}" for key in by[1:])
                series.setdefault(name, []).append((float(size), run.final_loss))
    fits = []
    for name, points in series.items():
        fit = fit_per_doubling([size for size, _ in points], [loss for _, loss in points])
        if fit:
            fits.append({"series": name, "key": by[0], **fit})
    return fits
