"""records/: each form of log with its exact numbers, statistics against formulas, outputs, plots, records, launches."""
from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from conftest import ROOT, TINY

sys.path.insert(0, str(ROOT / "records"))
import arm_stats
import arms
import compare
import leaderboard
from arm_stats import build_report, collect
from read_logs import LogError, read_log
from train_gpt import UserError

LOGS = Path(__file__).parent / "fixtures" / "logs"
FIELD_LOGS = Path(os.environ.get("FIELD_LOGS", "no such folder"))     # logs of the speedrun's records, where at hand
SOURCE = b"# the source of a run\n"
SOURCE_SHA256 = hashlib.sha256(SOURCE).hexdigest()


def header(seed: int = 1, **changes) -> dict:
    """A run: line's object; `changes` go into it, or into its config where they name a config key."""
    config = {"track": "cpu", "steps": 200, "batch_tokens": 1000, "seed": seed, "ngram_rows": 5000, "ngram_signs": 8192,
              "ngram_orders": [2, 3], "target_loss": 3.45}
    top = {"format": 1, "run_id": f"run{seed}", "date": "2026-10-05T10:00:00", "config": config, "world_size": 1,
           "device_name": "cpu", "cpu_name": "Example CPU", "cpu_threads": 2, "torch": "2.13.0", "target_loss": 3.45,
           "data": {"train": "aaaa", "val": "bbbb", "vocab_size": 4096}, "clock": "train-only",
           "source_sha256": SOURCE_SHA256}
    for key, value in changes.items():
        (config if key in config and key != "target_loss" else top)[key] = value
    return top


def own_log(curve: list[tuple[int, float, float]], total: int = 200, head: dict | None = None) -> str:
    lines = ["run:" + json.dumps(head or header())]
    for step, loss, time_ms in curve:
        times = f"train_time:{time_ms:.0f}ms step_avg:{time_ms / max(step, 1):.2f}ms"
        lines.append(f"step:{step}/{total} val_loss:{loss:.5f} {times}")
    return "\n".join(lines) + "\n"


def write_runs(folder: Path, losses: list[float], time_ms: float = 20_000, first_seed: int = 1, **changes) -> Path:
    """An arm of one run a loss; each run's time is a little longer than the one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, loss in enumerate(losses):
        head = header(first_seed + index, **{"run_id": f"{folder.name}{first_seed + index}", **changes})
        final_ms = time_ms + 10 * index
        curve = [(0, 8.3, 0), (100, loss + 0.5, final_ms / 2), (200, loss, final_ms)]
        (folder / f"{head['run_id']}.txt").write_text(own_log(curve, head=head))
    (folder / f"train_gpt_{SOURCE_SHA256[:16]}.py").write_bytes(SOURCE)
    return folder


def report_of(*paths: Path, **options) -> dict:
    return build_report(collect([str(path) for path in paths]), **options)


def only_arm(report: dict) -> dict:
    (group,) = report["groups"]
    (arm,) = group["arms"]
    return arm


def curve_of(run) -> list[tuple[int, float, float]]:
    return list(zip(run.steps, run.losses, run.times_ms))


# ---- reading: the forms ---------------------------------------------------------------------------------------------

def test_source_between_two_separators():
    (run,) = read_log(LOGS / "two_separators.txt")
    assert curve_of(run) == [(0, 10.9, 300), (20, 6.0, 1001), (40, 4.5, 3002), (60, 3.275, 5003)]
    assert run.failure is None and not run.ended_early
    assert run.comparable() == {"data": "unknown", "target": "unknown", "world_size": "2", "device": "NVIDIA Test 40GB",
                                "torch": "2.4.0+cu121", "clock": "from step 10"}


def test_source_before_one_separator_and_early_end():
    (run,) = read_log(LOGS / "one_separator_early.txt")
    assert curve_of(run) == [(0, 10.8, 0), (50, 4.0, 1010), (80, 3.2791, 1616)]
    assert run.failure is None and run.ended_early and run.total == 100
    assert (run.world_size, run.torch, run.clock) == ("4", "2.9.0", "all steps")
    arm = only_arm(report_of(LOGS / "one_separator_early.txt"))
    assert any("ended before TOTAL: 80 of 100" in note for note in arm["notes"])


def test_source_without_separators():
    (run,) = read_log(LOGS / "bare_source.txt")
    assert curve_of(run) == [(0, 9.5, 0), (2, 5.0, 20), (4, 3.9, 40)]


@pytest.mark.parametrize("name, steps, losses", [
    ("tel.txt", [0, 100, 200, 250], [10.98, 4.12, 3.31, 3.27]),
    ("tel_norm.txt", [0, 100, 190], [11.01, 4.2, 3.299])])
def test_logs_of_2024(name, steps, losses):
    (run,) = read_log(LOGS / name)
    assert (list(run.steps), list(run.losses)) == (steps, losses)
    assert all(math.isnan(time_ms) for time_ms in run.times_ms) and run.failure is None


def test_many_runs_in_one_file():
    runs = read_log(LOGS / "many_runs.txt")
    assert [run.name for run in runs] == [f"many_runs.txt#{i}" for i in (1, 2, 3, 4)]
    assert [run.final_loss for run in runs[:3]] == [3.2781, 3.2769, 3.2811]
    assert [run.train_time_ms for run in runs[:3]] == pytest.approx([3002, 3010, 4105])
    assert [run.total for run in runs] == [30, 30, 40, 30]
    assert runs[3].failure == "loss not finite at step 15"
    assert {(run.device, run.world_size, run.torch) for run in runs} == {("NVIDIA Test 80GB", "8", "2.11.0")}
    arm = only_arm(report_of(LOGS / "many_runs.txt"))
    assert (arm["n"], len(arm["failed"])) == (3, 1)
    assert any("runs planned different numbers of steps: 30 (2x), 40" in note for note in arm["notes"])


def test_joined_files_with_two_sources():
    first, second = read_log(LOGS / "joined.txt")
    assert (first.final_loss, first.torch) == (3.3, "2.4.0")
    assert (second.final_loss, second.torch) == (3.29, "2.5.0")


def test_killed_run():
    (run,) = read_log(LOGS / "killed.txt")
    assert run.failure == "no final evaluation: stopped at step 30 of 40, last evaluated at 20"


def test_own_log_with_sample_text_that_looks_like_a_result():
    (run,) = read_log(LOGS / "own" / "table" / "table_seed1.txt")
    assert curve_of(run) == [(0, 8.318, 0), (100, 3.91, 28000), (200, 3.521, 56000), (300, 3.4412, 84000)]
    assert (run.seed, run.config["ngram_rows"], run.first_met(3.45)) == (1, 1000000, (300, 84000))
    data = "sha256:1111aaaa2222bbbb3333/sha256:4444cccc5555dddd6666/4096"
    assert run.comparable() == {"data": data, "target": "3.45", "world_size": "1", "device": "Example CPU, 2 threads",
                                "torch": "2.13.0+cpu", "clock": "train-only"}


def test_own_failed_runs_are_counted():
    report = report_of(LOGS / "own" / "table")
    assert [(item["run"], item["reason"]) for item in only_arm(report)["failed"]] == [
        ("table_seed4.txt", "loss not finite at step 130"),
        ("table_seed5.txt", "no final evaluation: stopped at step 150 of 300, last evaluated at 100")]


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.glob("*.txt")))
def test_crlf_and_byte_order_mark_change_nothing(name, tmp_path):
    text = (LOGS / name).read_bytes()
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    for run, twin in zip(read_log(LOGS / name), read_log(tmp_path / name), strict=True):
        assert run.curve_digest() == twin.curve_digest()
        assert (run.failure, run.comparable()) == (twin.failure, twin.comparable())


def test_a_written_log_is_read_back(tmp_path):
    """Random curves in the grammar of step: lines, with random forms of time, progress lines and extra keys."""
    rng = random.Random(0)
    for case in range(200):
        total, seconds, path = rng.randrange(20, 5000), rng.random() < 0.5, tmp_path / f"{case}.txt"
        steps = sorted({0, total, *(rng.randrange(total) for _ in range(rng.randrange(6)))})
        curve = [(step, round(rng.uniform(2, 11), rng.randrange(3, 6)), float(rng.randrange(10**7))) for step in steps]
        extra = "".join(f" key{i}:{rng.choice(['1', '0.25', 'a/b', '3MiB'])}" for i in range(rng.randrange(3)))
        source = ["=" * 100, "import torch", "step:5/9 val_loss:0.5 train_time:1ms", "=" * 100]
        lines = source if rng.random() < 0.5 else []
        for step, loss, time_ms in curve:
            time = f"{time_ms / 1000:.3f}s" if seconds else f"{time_ms:.0f}ms"
            if rng.random() < 0.5:
                lines.append(f"step:{step}/{total} train_loss:{loss + 1:.4f} train_time:{time}")
            lines.append(f"step:{step}/{total} val_loss:{loss} train_time:{time}{extra}")
        path.write_text("\n".join(lines) + "\n")
        (run,) = read_log(path)
        assert list(run.steps) == steps and list(run.losses) == [loss for _, loss, _ in curve] and run.total == total
        assert list(run.times_ms) == pytest.approx([time_ms for _, _, time_ms in curve])
        assert run.failure is None


@pytest.mark.parametrize("path", [LOGS / "own" / "table" / "table_seed1.txt", LOGS / "two_separators.txt",
                                  LOGS / "tel.txt", LOGS / "one_separator_early.txt"], ids=lambda path: path.name)
def test_a_log_cut_at_any_byte_never_yields_a_wrong_number(path, tmp_path):
    whole, (true,) = path.read_bytes(), read_log(path)
    last_line = whole.rindex(b"val_loss" if b"val_loss" in whole else b"tel:") if not true.header else \
        whole.index(b"step:300/300 val_loss")
    (tmp_path / "cut.txt").write_bytes(whole)
    for length in reversed(range(len(whole))):
        os.truncate(tmp_path / "cut.txt", length)
        try:
            runs = read_log(tmp_path / "cut.txt")
        except LogError:
            continue
        assert len(runs) == 1
        (run,) = runs
        assert curve_of(run) == curve_of(true)[:len(run.steps)] or all(map(math.isnan, run.times_ms))
        assert list(run.losses) == list(true.losses)[:len(run.losses)]
        if true.header and length <= last_line:
            assert run.failure, f"cut at byte {length}"
        if not true.header and len(run.steps) < len(true.steps) and not run.failure:
            assert whole[:length].rstrip(b"\n").rpartition(b"\n")[2].startswith(b"s"), f"cut at byte {length}"


def test_cut_lines(tmp_path):
    head = ("step:0/60 val_loss:10.9000 train_time:0ms step_avg:nanms\n"
            "step:30/60 val_loss:4.5000 train_time:3000ms step_avg:100.00ms\n")
    for tail, failed in [("st", True), ("step:4", True), ("step:60/6", True), ("step:60/60 val_loss:3.2", True),
                         ("step:60/60 val_loss:3.2750 train_time:60", True),
                         ("step:60/60 val_loss:3.2750 train_time:6000ms step_avg:10", False),
                         ("step:60/60 val_loss:3.2750 train_time:6000ms step_avg:100.00ms", False)]:
        (tmp_path / "a.txt").write_text(head + tail)
        (run,) = read_log(tmp_path / "a.txt")
        assert bool(run.failure) == failed, tail
        assert run.final_loss == (4.5 if failed else 3.275), tail


@pytest.mark.parametrize("line", ['run:{"format": 1, "conf', "run:{}x", 'run:{"format": 2}', 'run:{"config": [1]}',
                                  'run:{"target_loss": "low"}', 'run:{"source_sha256": []}'])
def test_a_damaged_header_is_a_failed_run(line, tmp_path):
    results = "step:0/2 val_loss:9.0 train_time:0ms\nstep:2/2 val_loss:3.0 train_time:5ms\n"
    (tmp_path / "a.txt").write_text(f"{line}\n{results}")
    (run,) = read_log(tmp_path / "a.txt")
    assert run.failure.startswith("its run: line")


def test_error_line_makes_a_failed_run(tmp_path):
    (tmp_path / "a.txt").write_text(own_log([(0, 8.3, 0), (200, 3.4, 20000)]) + "error: rank 1 died\n")
    (run,) = read_log(tmp_path / "a.txt")
    assert run.failure == "error: rank 1 died"


def test_own_run_that_stops_at_an_evaluation_is_failed(tmp_path):
    (tmp_path / "a.txt").write_text(own_log([(0, 8.3, 0), (100, 3.4, 20000)]))
    (run,) = read_log(tmp_path / "a.txt")
    assert run.failure == "stopped at step 100 of 200"


# ---- arms -----------------------------------------------------------------------------------------------------------

def test_unknown_files_are_named(tmp_path):
    write_runs(tmp_path / "arm", [3.44, 3.43])
    (tmp_path / "arm" / "notes.txt").write_text("nothing of use\n")
    (tmp_path / "arm" / "empty.txt").write_text("")
    (tmp_path / "arm" / "binary.log").write_bytes(b"\0\1\2")
    (tmp_path / "arm" / "weights.pt").write_bytes(b"x")
    report = report_of(tmp_path / "arm")
    unknown = {"notes.txt", "empty.txt", "binary.log", "weights.pt"}
    assert {Path(row["path"]).name for row in report["skipped"]} == unknown
    assert only_arm(report)["n"] == 2
    text = compare.to_text(report)
    assert all(name in text for name in unknown)


def test_same_run_in_two_files_counts_once(tmp_path):
    write_runs(tmp_path / "arm", [3.44, 3.43])
    (tmp_path / "arm" / "copy.txt").write_bytes((tmp_path / "arm" / "arm1.txt").read_bytes())
    for name in ("a", "b"):
        (tmp_path / "arm" / f"old_{name}.txt").write_bytes((LOGS / "two_separators.txt").read_bytes())
    report = report_of(tmp_path / "arm")
    assert {Path(row["path"]).name for row in report["duplicates"]} == {"copy.txt", "old_b.txt"}
    assert sum(arm["n"] for group in report["groups"] for arm in group["arms"]) == 3
    assert "counted once" in compare.to_text(report)


def part(folder: Path, run_id: str, steps: list[int], after: list[str] = (), at: int = 0, seed: int = 1, ms: int = 100,
         **more) -> None:
    head = header(seed, run_id=run_id, **({"resumed": {"run_ids": list(after), "step": at}} if after else {}), **more)
    (folder / f"{run_id}.txt").write_text(own_log([(step, 8 - step / 40, ms * step) for step in steps], head=head))


def test_a_run_and_those_that_resumed_it_are_one_run(tmp_path):
    """Stopped at 120 with a checkpoint of 110, again at 170, finished; beside a run that was stopped for good."""
    part(tmp_path, "z_first", [0, 50, 100, 120])
    part(tmp_path, "m_second", [120, 150, 160], ["z_first"], at=110)
    part(tmp_path, "a_third", [200], ["z_first", "m_second"], at=160)
    part(tmp_path, "other", [0, 100], seed=2)
    report = report_of(tmp_path)
    arm = only_arm(report)
    assert (arm["n"], len(arm["failed"])) == (1, 1)
    (run,) = [run for run in collect([str(tmp_path)]).arms[tmp_path.name] if run.failure is None]
    assert curve_of(run) == [(step, 8 - step / 40, 100 * step) for step in (0, 50, 100, 120, 150, 160, 200)]
    assert {Path(row["path"]).name: Path(row["same_as"]).name for row in report["duplicates"]} == {
        "z_first.txt": "m_second.txt", "m_second.txt": "a_third.txt"}


def test_a_resumed_run_that_was_given_up_adds_nothing(tmp_path):
    """k2 resumed k1 and was killed; k3 resumed a later checkpoint of k1, on other hardware, and finished."""
    part(tmp_path, "k1", [0, 50, 100, 150])
    part(tmp_path, "k2", [60, 110, 160], ["k1"], at=55, ms=90)
    part(tmp_path, "k3", [200], ["k1"], at=120, world_size=2)
    report = report_of(tmp_path, mix=True)
    runs = {run.path.stem: run for run in collect([str(tmp_path)]).arms[tmp_path.name]}
    assert runs.keys() == {"k2", "k3"} and runs["k3"].failure is None and "stopped" in runs["k2"].failure
    assert curve_of(runs["k3"]) == [(step, 8 - step / 40, 100 * step) for step in (0, 50, 100, 200)]
    assert runs["k3"].world_size == "1, then 2"
    assert [Path(row["path"]).name for row in report["duplicates"]] == ["k1.txt"]


def test_a_folder_of_checkpoints_holds_no_logs(tmp_path):
    part(tmp_path, "r", [0, 200])
    (tmp_path / "checkpoints" / "r_step000200").mkdir(parents=True)
    (tmp_path / "checkpoints" / "r_step000200" / "dense.pt").write_bytes(b"x")
    (tmp_path / "checkpoints" / "latest").write_text("r_step000200")
    assert report_of(tmp_path)["skipped"] == []


def test_a_loss_reached_before_the_first_evaluation_has_no_time(tmp_path):
    for arm, loss in (("a", 3.4), ("b", 3.5)):
        (tmp_path / arm).mkdir()
        for seed in (1, 2):
            log = own_log([(200, loss + seed / 100, 20_000 + seed)], head=header(seed))
            (tmp_path / arm / f"{seed}.txt").write_text(log)
    (comparison,) = report_of(tmp_path / "a", tmp_path / "b")["groups"][0]["comparisons"]
    assert comparison["equal_loss"] is None and comparison["loss_difference"] == pytest.approx(0.1)


def test_resuming_a_finished_run_makes_no_second_sample(tmp_path):
    part(tmp_path, "whole", [0, 100, 200])
    part(tmp_path, "again", [150, 200], ["whole"], at=120)
    part(tmp_path, "orphan", [150, 200], ["gone"], at=120, seed=3)
    part(tmp_path, "once_more", [190, 200], ["whole", "again"], at=180)
    report = report_of(tmp_path)
    assert only_arm(report)["n"] == 2
    assert "orphan.txt resumed gone at step 120, whose log is not here" in only_arm(report)["notes"]
    assert [(Path(row["path"]).name, Path(row["same_as"]).name) for row in report["duplicates"]] == [
        ("again.txt", "whole.txt"), ("once_more.txt", "whole.txt")]


def test_a_whole_run_counts_in_place_of_its_cut_copy(tmp_path):
    write_runs(tmp_path / "arm", [3.44])
    whole = (tmp_path / "arm" / "arm1.txt").read_text()
    (tmp_path / "arm" / "a_cut.txt").write_text(whole[:whole.rindex("step:200")])
    arm = only_arm(report_of(tmp_path / "arm"))
    assert (arm["n"], arm["failed"], arm["loss_mean"]) == (1, [], 3.44)


def test_a_file_named_in_two_arms_counts_in_the_first_and_is_noted(tmp_path):
    write_runs(tmp_path / "a", [3.44, 3.43])
    report = report_of(tmp_path / "a", tmp_path / "a" / "a2.txt")
    assert only_arm(report)["n"] == 2
    (row,) = report["duplicates"]
    assert (Path(row["path"]).name, row["same_as"]) == ("a2.txt", "one in the arm a")


def test_folders_globs_and_files_are_arms(tmp_path, monkeypatch):
    write_runs(tmp_path / "x" / "a", [3.44, 3.43])
    write_runs(tmp_path / "y" / "a", [3.42, 3.41])
    monkeypatch.chdir(tmp_path)
    assert list(collect(["x", "y"]).arms) == ["x/a", "y/a"]
    assert {name: len(runs) for name, runs in collect(["x/a/*1.txt", "y/a/a?.txt"]).arms.items()} == {"*1": 1, "a?": 2}
    assert list(collect(["x/a/a1.txt", "x/a/a2.txt"]).arms) == ["a1", "a2"]
    for missing in ("nowhere", "x/*.nothing"):
        with pytest.raises(UserError, match="no such file"):
            collect([missing])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run found"):
        collect(["empty"])


@pytest.mark.parametrize("change", [{"data": {"train": "aaaa", "val": "cccc", "vocab_size": 4096}},
                                    {"target_loss": 3.5}, {"world_size": 2}, {"device_name": "NVIDIA X"},
                                    {"cpu_name": "Other CPU"}, {"torch": "2.12.0"}, {"clock": "all"}],
                         ids=lambda change: next(iter(change)))
def test_runs_that_are_not_comparable_are_kept_apart(change, tmp_path):
    write_runs(tmp_path / "a", [3.44, 3.43])
    write_runs(tmp_path / "b", [3.42, 3.41])
    write_runs(tmp_path / "b", [3.40, 3.39], first_seed=3, **change)
    apart = report_of(tmp_path / "a", tmp_path / "b")
    assert [[(arm["name"], arm["n"]) for arm in group["arms"]] for group in apart["groups"]] == [
        [("a", 2), ("b", 2)], [("b", 2)]]
    assert apart["groups"][1]["comparisons"] == []
    assert "not comparable" in compare.to_text(apart).splitlines()[0]
    mixed = report_of(tmp_path / "a", tmp_path / "b", mix=True, target=3.45)
    (group,) = mixed["groups"]
    assert [arm["n"] for arm in group["arms"]] == [2, 4] and len(group["comparisons"]) == 1
    for write in compare.FORMATS.values():
        assert "mixed by --mix" in write(mixed)


def test_mixed_targets_give_no_p(tmp_path):
    write_runs(tmp_path / "a", [3.44, 3.43])
    write_runs(tmp_path / "a", [3.42], first_seed=3, target_loss=3.5)
    assert only_arm(report_of(tmp_path / "a", mix=True))["no_p_because"] == "no target"


# ---- statistics -----------------------------------------------------------------------------------------------------

def student_cdf(t: float, freedom: float) -> float:
    """Student's distribution through the incomplete beta function."""
    tail = 0.5 * special.betainc(freedom / 2, 0.5, freedom / (freedom + t * t))
    return float(tail if t < 0 else 1 - tail)


def test_statistics_of_an_arm(tmp_path):
    losses = [3.441, 3.4475, 3.4502, 3.4431]
    arm = only_arm(report_of(write_runs(tmp_path / "a", losses)))
    average = sum(losses) / 4
    sd = math.sqrt(sum((loss - average) ** 2 for loss in losses) / 3)
    assert arm["loss_mean"] == pytest.approx(average) and arm["loss_sd"] == pytest.approx(sd)
    assert arm["p_at_or_below_target"] == pytest.approx(student_cdf((average - 3.45) / (sd / 2), 3))
    assert arm["p_at_or_below_target"] == pytest.approx(stats.ttest_1samp(losses, 3.45, alternative="less").pvalue)
    assert (arm["time_mean_ms"], arm["tokens_mean"], arm["steps"]) == (20015, 200_000, [200])
    assert arm["time_sd_ms"] == pytest.approx(np.std([0, 10, 20, 30], ddof=1))
    assert (arm["met_target"], arm["met_step_mean"]) == (3, 200)
    assert arm["met_time_mean_ms"] == pytest.approx((20000 + 20010 + 20030) / 3)


def test_losses_are_paired_by_seed(tmp_path):
    """Seeds 2, 3, 4 in common, in another order; the others count for the unpaired test alone."""
    write_runs(tmp_path / "base", [3.47, 3.41, 3.52, 3.44])
    write_runs(tmp_path / "new", [3.40, 3.51, 3.431, 3.6], first_seed=2)
    (row,) = report_of(tmp_path / "base", tmp_path / "new")["groups"][0]["comparisons"]
    differences = [3.40 - 3.41, 3.51 - 3.52, 3.431 - 3.44]
    error, paired = np.std(differences, ddof=1) / math.sqrt(3), row["loss_by_seed"]
    assert paired["n"] == 3 and paired["difference"] == pytest.approx(np.mean(differences))
    assert paired["p"] == pytest.approx(2 * student_cdf(-abs(np.mean(differences)) / error, 2), rel=1e-6)
    assert paired["p"] < 0.01 < row["loss_p"]
    half = stats.t.ppf(0.975, 2) * error
    assert paired["ci95"] == pytest.approx([np.mean(differences) - half, np.mean(differences) + half])
    write_runs(tmp_path / "apart", [3.4, 3.5], first_seed=8)
    write_runs(tmp_path / "twice", [3.4])
    again = own_log([(0, 8.3, 0), (200, 3.5, 9e3)], head=header(1, run_id="again"))
    (tmp_path / "twice" / "again.txt").write_text(again)
    for other in ("apart", "twice"):
        assert report_of(tmp_path / "base", tmp_path / other)["groups"][0]["comparisons"][0]["loss_by_seed"] == {}


def test_difference_between_arms(tmp_path):
    base, new = [3.47, 3.4725, 3.469, 3.475], [3.4402, 3.446, 3.443]
    report = report_of(write_runs(tmp_path / "new", new, 18_000), write_runs(tmp_path / "base", base), baseline="base")
    (row,) = report["groups"][0]["comparisons"]
    difference = np.mean(new) - np.mean(base)
    parts = [np.var(values, ddof=1) / len(values) for values in (new, base)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    assert row["loss_difference"] == pytest.approx(difference)
    assert row["loss_p"] == pytest.approx(2 * student_cdf(-abs(difference) / error, freedom), rel=1e-6)
    half = stats.t.ppf(0.975, freedom) * error
    assert row["loss_ci95"] == pytest.approx([difference - half, difference + half])
    assert row["time_difference_ms"] == pytest.approx(18_010 - 20_015)
    # the arm new falls from its mean at step 100 (9005 ms) to its final mean at step 200 (18010 ms)
    level = np.mean(base)
    part = (np.mean(new) + 0.5 - level) / 0.5
    assert row["equal_loss"]["loss"] == pytest.approx(level)
    assert row["equal_loss"]["time_ms"] == pytest.approx(9005 + part * 9005)
    assert row["equal_loss"]["step"] == pytest.approx(100 + part * 100)
    assert row["equal_loss"]["baseline_time_ms"] == pytest.approx(20_015)


@pytest.mark.parametrize("losses, reason", [([3.44], "n=1"), ([3.44, 3.44, 3.44], "sd=0")])
def test_no_p_value_and_why(losses, reason, tmp_path):
    report = report_of(write_runs(tmp_path / "a", losses), write_runs(tmp_path / "b", [3.41, 3.42, 3.43]))
    arm = report["groups"][0]["arms"][0]
    assert (arm["p_at_or_below_target"], arm["no_p_because"]) == (None, reason)
    row = report["groups"][0]["comparisons"][0]
    assert (row["loss_p"], row["loss_ci95"], row["loss_no_p_because"]) == (None, None, reason)
    assert row["loss_difference"] is not None
    assert reason in compare.to_text(report)


def test_equal_seeds_are_no_sample(tmp_path):
    for seed, loss in ((1, 3.44), (2, 3.43), (1, 3.41)):
        write_runs(tmp_path / "a", [loss], first_seed=seed, run_id=f"{seed}_{loss}")
    report = report_of(tmp_path / "a", write_runs(tmp_path / "b", [3.41, 3.42]))
    arm = report["groups"][0]["arms"][0]
    assert (arm["n"], arm["p_at_or_below_target"], arm["no_p_because"]) == (3, None, "eq. seeds")
    assert any("seed 1 occurs more than once" in note for note in arm["notes"])
    assert report["groups"][0]["comparisons"][0]["loss_p"] is None


def test_unknown_seeds_are_noted():
    assert any("seeds unknown" in note for note in only_arm(report_of(LOGS / "many_runs.txt"))["notes"])


def test_outliers_are_flagged_and_kept(tmp_path):
    losses = [3.44, 3.441, 3.442, 3.443, 3.5]
    arm = only_arm(report_of(write_runs(tmp_path / "a", losses)))
    assert arm["outlier_losses"] == [4] and arm["n"] == 5 and arm["loss_mean"] == pytest.approx(np.mean(losses))
    assert "3.5000*" in compare.to_text(report_of(tmp_path / "a"))
    assert arm_stats.outliers([1.0, 1.0, 1.0, 1.0, 2.0]) == [4]
    assert arm_stats.outliers([1.0, 1.0, 1.0, 2.0]) == [] and arm_stats.outliers([1.0] * 9) == []


def test_steps_chosen_after_the_fact_are_visible(tmp_path):
    write_runs(tmp_path / "a", [3.44, 3.43], steps=300)
    notes = only_arm(report_of(tmp_path / "a"))["notes"]
    assert "a1.txt: its config asks for 300 steps, its lines say TOTAL 200" in notes
    (tmp_path / "b").mkdir()
    for end in (60, 80):
        text = "".join(f"step:{n}/100 val_loss:{9 - n / 20:.4f} train_time:{n}ms\n" for n in range(0, end + 1, 20))
        (tmp_path / "b" / f"{end}.txt").write_text(text)
    notes = only_arm(report_of(tmp_path / "b"))["notes"]
    assert "runs end at different steps: 60, 80" in notes
    assert any(note.startswith("2 of 2 ended before TOTAL: 60 of 100, 80 of 100") for note in notes)


def test_differing_configs_are_noted(tmp_path):
    write_runs(tmp_path / "a", [3.44, 3.43])
    write_runs(tmp_path / "b", [3.42, 3.41], ngram_rows=0)
    write_runs(tmp_path / "c", [3.42], ngram_rows=0)
    write_runs(tmp_path / "c", [3.42], first_seed=2, ngram_rows=9)
    (group,) = report_of(tmp_path / "a", tmp_path / "b", tmp_path / "c")["groups"]
    assert "b differs from a in ngram_rows 0 (5000)" in group["notes"]
    assert any(note.startswith("pools different configs: ngram_rows 0, 9") for note in group["arms"][2]["notes"])


def write_sweep(folder: Path) -> list[tuple[int, int, float]]:
    points = [(rows, seed, 4 - 0.02 * math.log2(rows) + 0.003 * (-1) ** seed + 0.001 * (rows == 4000))
              for rows in (1000, 4000, 64000) for seed in (1, 2)]
    for rows, seed, loss in points:
        write_runs(folder, [loss], first_seed=seed, ngram_rows=rows, run_id=f"{rows}_{seed}")
    write_runs(folder, [4.1], first_seed=3, ngram_rows=0, run_id="0_3")
    return [(rows, seed, round(loss, 5)) for rows, seed, loss in points]


def test_by_fits_a_line_against_the_logarithm(tmp_path):
    points = write_sweep(tmp_path / "sweep")
    (group,) = report_of(tmp_path / "sweep", by=["ngram_rows"])["groups"]
    assert [arm["name"] for arm in group["arms"]] == [f"ngram_rows={rows}" for rows in (0, 1000, 4000, 64000)]
    (fit,) = group["fits"]
    slope, intercept = np.polyfit([math.log2(rows) for rows, _, _ in points], [loss for _, _, loss in points], 1)
    assert fit["slope_millinats_per_doubling"] == pytest.approx(1000 * slope)
    assert fit["intercept"] == pytest.approx(intercept)
    assert (fit["sizes"], fit["n"]) == (3, 6)
    (group,) = report_of(tmp_path / "sweep", by=["ngram_rows", "ngram_signs"])["groups"]
    assert [fit["series"] for fit in group["fits"]] == ["ngram_signs=8192"]
    with pytest.raises(UserError, match="--by ngram_row: .*ngram_rows"):
        report_of(tmp_path / "sweep", by=["ngram_row"])


# ---- outputs --------------------------------------------------------------------------------------------------------

def test_text_fits_the_terminal(tmp_path):
    write_sweep(tmp_path / "a_long_name_of_an_arm_that_is_longer_than_its_column")
    for report in (report_of(LOGS), report_of(LOGS, mix=True, target=3.28), report_of(tmp_path),
                   report_of(tmp_path, by=["ngram_rows", "ngram_signs"])):
        assert max(map(len, compare.to_text(report).splitlines())) <= 120


def test_outputs_agree(capsys):
    paths = [str(LOGS / "own" / arm) for arm in ("no_table", "table")]
    compare.main([*paths, "--json"])
    report = json.loads(capsys.readouterr().out)
    arms_in_json = report["groups"][0]["arms"]
    counts = [(arm["name"], arm["n"], len(arm["failed"])) for arm in arms_in_json]
    assert counts == [("no_table", 3, 0), ("table", 3, 2)]
    assert arms_in_json[1]["loss_mean"] == pytest.approx((3.4412 + 3.4398 + 3.4437) / 3)
    compare.main([*paths, "--csv"])
    rows = list(csv.DictReader(line for line in io.StringIO(capsys.readouterr().out) if not line.startswith("#")))
    assert [float(row["loss_mean"]) for row in rows] == [arm["loss_mean"] for arm in arms_in_json]
    assert float(rows[1]["loss_p"]) == report["groups"][0]["comparisons"][0]["loss_p"]
    for output in ("--markdown", None):
        compare.main([*paths, *([output] if output else [])])
        text = capsys.readouterr().out
        assert all(value in text for value in ("3.44157", "3.56107", "84.0533", "-119.50", "table_seed4.txt"))


def test_baseline_by_path_and_by_name(capsys):
    paths = [str(LOGS / "own" / arm) for arm in ("no_table", "table")]
    for baseline in ("table", paths[1]):
        compare.main([*paths, "--baseline", baseline, "--json"])
        (row,) = json.loads(capsys.readouterr().out)["groups"][0]["comparisons"]
        assert (row["arm"], row["baseline"]) == ("no_table", "table")
    with pytest.raises(UserError, match="--baseline tabel: .* expected one of: no_table, table"):
        compare.main([*paths, "--baseline", "tabel"])


@pytest.mark.parametrize("arguments", [[], ["--check", "x"], ["x", "--leaderboard"], ["x", "--unknown"],
                                       ["--archive", "n", "--leaderboard"], ["x", "--json", "--csv"]])
def test_bad_arguments(arguments):
    with pytest.raises(SystemExit) as stop:
        compare.main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize("arguments, message", [
    (["compare.py", "nowhere"], "error: nowhere: no such file"),
    (["arms.py", "--out=x", "--arm=a"], "error: --arm a: expected")])
def test_a_command_line_reports_an_error_in_one_line(arguments, message, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "records" / arguments[0]), run_name="__main__")
    shown = capfd.readouterr()
    assert (stop.value.code, shown.out) == (1, "") and shown.err.strip().startswith(message)
    assert len(shown.err.strip().splitlines()) == 1


def read_image(path: Path) -> np.ndarray:
    import matplotlib.image
    return matplotlib.image.imread(path)


def has_colour(image: np.ndarray, colour: str) -> bool:
    wanted = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((np.abs(image[..., :3] - wanted).max(axis=-1) < 0.02).sum() > 30)


@pytest.mark.parametrize("arguments, colours", [
    ([str(LOGS / "own")], 2), ([str(LOGS / "own"), str(LOGS / "many_runs.txt"), "--mix"], 3), ([str(LOGS)], 5),
    ([str(LOGS / "tel.txt")], 1), (["SWEEP", "--by", "ngram_rows"], 1), (["SWEEP", "--by", "ngram_orders"], 1),
    (["SWEEP", "--by", "ngram_signs,ngram_rows"], 4)])
def test_plots_are_images(arguments, colours, tmp_path, capsys):
    from plots import COLOURS
    write_sweep(tmp_path / "sweep")
    arguments = [str(tmp_path / "sweep") if word == "SWEEP" else word for word in arguments]
    compare.main([*arguments, "--plot", str(tmp_path / "plot.png")])
    image = read_image(tmp_path / "plot.png")
    assert 600 <= image.shape[0] <= 1200 and 900 <= image.shape[1] <= 2000
    assert 0.7 < image[..., :3].mean() < 0.999
    assert [has_colour(image, colour) for colour in COLOURS[:colours]] == [True] * colours
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("shared_seeds", ["shared", "different", "repeated"])
def test_runs_evaluated_at_their_end_alone_are_drawn_as_differences(shared_seeds, tmp_path):
    """Seed by seed where the seeds are the same, else from the baseline's mean; the interval is the report's."""
    from plots import _draw_differences, plot_report
    losses = {"baseline": [3.40, 3.44, 3.45], "idea": [3.38, 3.43, 3.40]}
    for arm, values in losses.items():
        (tmp_path / arm).mkdir()
        for i, loss in enumerate(values):
            own_seed = i + 10 * (arm == "idea" and shared_seeds == "different")
            head = header(1 if shared_seeds == "repeated" else own_seed)
            (tmp_path / arm / f"{i}.txt").write_text(own_log([(200, loss, 20_000 + i)], head=head))
    report = report_of(tmp_path / "baseline", tmp_path / "idea")
    (axes,) = _draw_differences(report).axes
    dots, (mean,), interval = (line.get_xdata() for line in axes.lines[:3])
    expected = [-20, -10, -50] if shared_seeds == "shared" else [-50, 0, -30]
    assert list(dots) == pytest.approx(expected) and mean == pytest.approx(sum(expected) / 3)
    if shared_seeds == "repeated":  # no sample, hence no interval: the line at 0 comes next
        assert list(interval) == [0, 0]
        return
    welch = stats.ttest_ind(losses["idea"], losses["baseline"], equal_var=False)
    test, scale = (stats.ttest_1samp(expected, 0), 1) if shared_seeds == "shared" else (welch, 1000)
    assert list(interval) == pytest.approx([scale * end for end in test.confidence_interval(0.95)])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["idea"]
    plot_report(report, tmp_path / "plot.png")
    assert read_image(tmp_path / "plot.png").shape[0] < 300  # differences, not curves


def test_plot_refuses_what_it_cannot_draw(tmp_path):
    for arm in "bc":
        (tmp_path / arm).mkdir()
        part(tmp_path / arm, arm, [100])
    for paths, plot, message in [
            ([LOGS / "own"], "a.jpg", "expected .png"), ([LOGS / "own"], "no/a.png", "does not exist"),
            ([LOGS / "killed.txt"], "a.png", "no finished run"),
            ([tmp_path / "b", tmp_path / "c"], "a.png", "no finished run")]:
        with pytest.raises(UserError, match=message):
            compare.main([*map(str, paths), "--plot", str(tmp_path / plot)])
    assert not list(tmp_path.glob("*.png")) and not list(tmp_path.glob(".*"))


# ---- records --------------------------------------------------------------------------------------------------------

@pytest.fixture
def records(tmp_path) -> Path:
    root = tmp_path / "records"
    root.mkdir()
    begin, end = leaderboard.BEGIN.format("leaderboard"), leaderboard.END.format("leaderboard")
    (root / "README.md").write_text(f"# Rules\n\n{begin}\nstale\n{end}\n\nafter\n")
    return root


def test_records_of_this_repository_are_up_to_date():
    for path, text in leaderboard.render_records(ROOT / "records").items():
        assert path.read_bytes() == text.encode(), f"{path} is out of date: run compare.py --leaderboard"


def test_archive_and_leaderboard(records, tmp_path):
    write_runs(tmp_path / "logs" / "baseline", [3.441, 3.443, 3.442], 20_000)
    write_runs(tmp_path / "logs" / "idea", [3.44, 3.443, 3.441], 18_000, ngram_rows=9)
    write_runs(tmp_path / "logs" / "worse", [3.45, 3.46, 3.44], 9_000, ngram_rows=0)
    command = ["--records", str(records)]
    compare.main([*command, "--archive", "my_idea", str(tmp_path / "logs")])
    record = records / "cpu" / "2026-10-05_my_idea"
    assert len(list(record.glob("*/*.txt"))) == 9
    assert (record / "train_gpt.txt").read_bytes() == SOURCE and not list(record.rglob("*.py"))
    assert not list(tmp_path.glob("logs/*/*"))
    with pytest.raises(UserError, match="README.md: found out of date"):
        compare.main([*command, "--leaderboard", "--check"])
    compare.main([*command, "--leaderboard"])
    compare.main([*command, "--leaderboard", "--check"])
    board = (records / "README.md").read_text()
    assert board.startswith("# Rules\n") and board.endswith("\nafter\n") and "stale" not in board
    ranks = [[cell.strip() for cell in line.split("|")[2:4]] for line in board.splitlines() if "my_idea" in line]
    assert ranks == [["1", "idea"], ["2", "baseline"], ["–", "worse"]]
    assert "### fineweb\n\nNo records yet." in board
    statistics = (record / "README.md").read_text()
    assert "minus baseline" in statistics and "3.44133" in statistics and str(tmp_path) not in statistics
    assert "train_gpt.txt" not in statistics
    for path, text in leaderboard.render_records(records).items():
        assert path.read_bytes() == text.encode()
    (record / "idea" / "idea1.txt").unlink()
    with pytest.raises(UserError, match="found out of date"):
        compare.main([*command, "--leaderboard", "--check"])


def test_a_study_has_statistics_and_stands_on_no_leaderboard(records, tmp_path):
    write_runs(tmp_path / "logs" / "baseline", [3.441, 3.443], 20_000)
    write_runs(tmp_path / "logs" / "part", [3.43, 3.44], 18_000, ngram_rows=9)
    command = ["--records", str(records)]
    compare.main([*command, "--archive", "parts", "--track", "studies", str(tmp_path / "logs")])
    compare.main([*command, "--leaderboard"])
    board = (records / "README.md").read_text()
    assert board.count("_parts") == 2
    assert re.search(r"### studies\n\n- \[[-0-9]+_parts\]\(studies/[-0-9]+_parts/README\.md\)\n", board)
    (record,) = (records / "studies").iterdir()
    assert "minus baseline" in (record / "README.md").read_text()


def test_a_study_without_runs_is_linked_and_left_alone(records):
    study = records / "studies" / "2026-10-05_by_script"
    study.mkdir(parents=True)
    (study / "README.md").write_text("# No statistics here\n")
    compare.main(["--records", str(records), "--leaderboard"])
    assert "- [2026-10-05_by_script](studies/2026-10-05_by_script/README.md)\n" in (records / "README.md").read_text()
    assert (study / "README.md").read_text() == "# No statistics here\n"


def test_archive_adds_to_a_record_and_never_overwrites(records, tmp_path):
    command = ["--records", str(records), "--archive", "x"]
    write_runs(tmp_path / "a", [3.44])
    compare.main([*command, str(tmp_path / "a" / "a1.txt"), "--arm", "one"])
    write_runs(tmp_path / "a", [3.42], date="2026-11-01T00:00:00")
    with pytest.raises(UserError, match="does not overwrite"):
        compare.main([*command, str(tmp_path / "a"), "--arm", "one"])
    assert read_log(records / "cpu" / "2026-10-05_x" / "one" / "a1.txt")[0].final_loss == 3.44
    assert (tmp_path / "a" / "a1.txt").exists()
    compare.main([*command, str(tmp_path / "a"), "--arm", "two"])
    assert read_log(records / "cpu" / "2026-10-05_x" / "two" / "a1.txt")[0].final_loss == 3.42


def test_archive_keeps_every_source_of_a_run(records, tmp_path):
    more, folder = b"// a kernel\n", tmp_path / "logs" / "a"
    digest = hashlib.sha256(more).hexdigest()
    write_runs(folder, [3.44, 3.43], sources={"train_gpt.py": SOURCE_SHA256, "table_kernel.cpp": digest})
    command = ["--records", str(records), "--archive", "x", str(folder)]
    with pytest.raises(UserError, match=f"found no source table_kernel_{digest[:16]}.cpp"):
        compare.main(command)
    (folder / f"table_kernel_{digest[:16]}.cpp").write_bytes(more)
    compare.main(command)
    (record,) = records.glob("cpu/*_x")
    assert {path.name: path.read_bytes() for path in record.glob("*.txt")} == {
        "table_kernel.txt": more, "train_gpt.txt": SOURCE}
    assert not folder.exists()


def test_archive_finds_sources_in_both_forms_and_keeps_two_trainers(records, tmp_path):
    """A variant's run and one of another trainer; then a further run whose source is in the record alone."""
    variant, other = b"# a variant\n", b"# another trainer\n"
    sha256 = {content: hashlib.sha256(content).hexdigest() for content in (variant, other)}
    folder, second = tmp_path / "logs", f"train_gpt_{sha256[other][:16]}.txt"
    write_runs(folder / "a", [3.44], sources={"train_gpt.py": SOURCE_SHA256, "engram.py": sha256[variant]})
    (folder / "a" / f"train_gpt_{SOURCE_SHA256[:16]}.py").rename(folder / "train_gpt.txt")     # as a record keeps it
    (folder / f"engram_{sha256[variant][:16]}.py").write_bytes(variant)
    write_runs(folder / "b", [3.43], sources={"train_gpt.py": sha256[other]})
    (folder / "b" / f"train_gpt_{SOURCE_SHA256[:16]}.py").unlink()
    (folder / "b" / f"train_gpt_{sha256[other][:16]}.py").write_bytes(other)
    command = ["--records", str(records), "--archive", "x"]
    compare.main([*command, str(folder)])
    (record,) = records.glob("cpu/*_x")
    kept = {"train_gpt.txt": SOURCE, "engram.txt": variant, second: other}
    assert {path.name: path.read_bytes() for path in record.glob("*.*") if path.name != "README.md"} == kept
    assert sorted(path.name for path in record.glob("*/*")) == ["a1.txt", "b1.txt"]
    assert not [path for path in folder.rglob("*") if path.is_file()]
    write_runs(folder / "c", [3.45], first_seed=2, sources={"train_gpt.py": sha256[other]})
    (folder / "c" / f"train_gpt_{SOURCE_SHA256[:16]}.py").unlink()
    compare.main([*command, str(folder)])
    assert len(list(record.glob("*.txt"))) == 3 and (record / "c" / "c2.txt").exists()


def test_sources_kept_as_text_are_no_logs(tmp_path):
    """Beside the logs and above them, even where one reads like a log; any other text is named as skipped."""
    source = own_log([(0, 8.3, 0), (200, 3.1, 9_000)]).partition("\n")[2].encode()     # step: lines without a header
    write_runs(tmp_path / "record" / "arm", [3.44, 3.43], sources={"train_gpt.py": hashlib.sha256(source).hexdigest()})
    write_runs(tmp_path / "record" / "other", [3.42, 3.41])
    for place in ("record/train_gpt.txt", "record/arm/train_gpt.txt"):
        (tmp_path / place).write_bytes(source)
    (tmp_path / "record" / "harness.txt").write_bytes(SOURCE)
    (tmp_path / "record" / "notes.txt").write_text("nothing of use\n")
    report = report_of(tmp_path / "record")
    assert [Path(row["path"]).name for row in report["skipped"]] == ["notes.txt"] and report["duplicates"] == []
    counts = [(arm["name"], arm["n"]) for group in report["groups"] for arm in group["arms"]]
    assert counts == [("arm", 2), ("other", 2)]


def test_every_source_of_this_repositorys_runs_is_kept_unchanged():
    for record in (path.parent for path in ROOT.glob("records/*/*/train_gpt.txt")):
        kept = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in record.glob("*.txt")}
        runs = [run for runs in collect([str(record)]).arms.values() for run in runs]
        assert runs and {item for run in runs for item in run.sources.items()} >= {
            (name, kept[Path(name).stem]) for run in runs for name in run.sources}, record


def test_a_records_source_runs(tiny_data, tmp_path):
    """The newest record's, copied to the names that its log lists."""
    logs = [run for path in ROOT.glob("records/*/*/*/*.txt") for run in read_log(path) if run.header]
    newest = max((run for run in logs if run.path.parents[2].name != "studies"), key=lambda run: run.header["date"])
    for name in newest.sources:
        shutil.copy(newest.path.parents[1] / f"{Path(name).stem}.txt", tmp_path / name)
    flags = [*TINY, "--steps=2", f"--data={tiny_data}", f"--out={tmp_path / 'logs'}"]
    done = subprocess.run([sys.executable, tmp_path / "train_gpt.py", *flags], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    (run,) = (run for path in (tmp_path / "logs").glob("*.txt") for run in read_log(path))
    assert run.failure is None and run.final_step == 2 and run.sources == newest.sources


def test_archive_moves_nothing_when_it_refuses(records, tmp_path):
    write_runs(tmp_path / "a", [3.44, 3.43])
    source = tmp_path / "a" / f"train_gpt_{SOURCE_SHA256[:16]}.py"
    source.write_bytes(b"changed")
    command = ["--records", str(records), "--archive"]

    def refuses(name: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            compare.main([*command, name, str(tmp_path / "a")])

    refuses("x", "it was changed")
    refuses("2026-10-10_x", "without a date")
    refuses("a/b", "expected a name of letters")
    source.unlink()
    refuses("x", "found no source train_gpt_")
    (tmp_path / "a" / "notes.txt").write_text("no run\n")
    source.write_bytes(SOURCE)
    refuses("x", "notes.txt")
    assert len(list((tmp_path / "a").glob("a?.txt"))) == 2 and not (records / "cpu").exists()


def test_archive_of_a_foreign_log_asks_for_track_and_date(records, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.txt").write_bytes((LOGS / "two_separators.txt").read_bytes())
    command = ["--records", str(records), "--archive", "x", str(tmp_path / "old")]
    for more, message in ([], "give --track"), (["--track", "fineweb"], "give --date"):
        with pytest.raises(UserError, match=message):
            compare.main([*command, *more])
    compare.main([*command, "--track", "fineweb", "--date", "2024-10-10"])
    assert (records / "fineweb" / "2024-10-10_x" / "old" / "run.txt").exists()


def test_a_readme_without_markers_is_refused(records):
    (records / "README.md").write_text("# Rules\n")
    with pytest.raises(UserError, match="markers"):
        compare.main(["--records", str(records), "--leaderboard"])


# ---- launching ------------------------------------------------------------------------------------------------------

TRAINER = '''
import json, sys
from pathlib import Path
flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
seed, rows, out = int(flags["seed"]), int(flags.get("ngram_rows", 5000)), Path(flags["out"])
with open({order!r}, "a") as file:
    file.write(f"{{out.name}}{{seed}} ")
head = json.loads({header!r}) | {{"run_id": flags["run_id"]}}
head["config"] |= {{"seed": seed, "ngram_rows": rows}}
lines = ["run:" + json.dumps(head), "step:0/200 val_loss:8.30000 train_time:0ms"]
failing = flags.get("fail") == str(seed)
if not failing:
    lines.append(f"step:200/200 val_loss:{{3.4 + 0.01 * seed + 0.1 * (rows == 0):.5f}} train_time:{{20000 + seed}}ms")
out.mkdir(parents=True, exist_ok=True)
with open(out / (flags["run_id"] + ".txt"), "x") as file:
    file.write("\\n".join(lines) + "\\n")
sys.exit(3 if failing else 0)
'''


@pytest.fixture
def launch(tmp_path) -> list[str]:
    """Arguments that make arms.py start a stand-in for the trainer, which notes the order of its launches."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.format(order=str(tmp_path / "order"), header=json.dumps(header())))
    return ["--launch", f"{sys.executable} -S {script}", "--out", str(tmp_path / "out")]


def test_arms_run_interleaved_and_are_compared(launch, tmp_path, capsys):
    arms.main([*launch, "--seeds", "3", "--arm", "table=", "--arm", "no_table=--ngram_rows=0"])
    order = ["table1", "no_table1", "table2", "no_table2", "table3", "no_table3"]
    assert (tmp_path / "order").read_text().split() == order
    assert (tmp_path / "out" / "no_table" / "no_table_seed3.txt").exists()
    shown = capsys.readouterr().out
    assert "minus table" in shown and "3.42000" in shown and "3.52000" in shown
    with pytest.raises(UserError, match="never overwritten"):
        arms.main([*launch, "--seeds", "3", "--arm", "table="])
    arms.main([*launch, "--seeds", "4", "--arm", "table=", "--resume"])
    assert (tmp_path / "order").read_text().split()[6:] == ["table4"]


@pytest.mark.parametrize("stop, order", [(False, ["a1", "b1", "a2", "b2"]), (True, ["a1", "b1"])])
def test_failing_launches_are_reported(stop, order, launch, tmp_path, capsys):
    command = [*launch, "--seeds", "2", "--arm", "a=", "--arm", "b=--fail=1"]
    with pytest.raises(UserError, match="b seed 1: exit status 3"):
        arms.main([*command, *(["--stop_on_failure"] if stop else [])])
    assert (tmp_path / "order").read_text().split() == order
    assert "b: failed: b_seed1.txt" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments, message", [
    (["--arm", "a"], "NAME='FLAGS'"), (["--arm", "a=--seed=3"], "--seed=3"), (["--arm", "a=--run-id=x"], "run-id"),
    (["--arm", "a='"], "quotes"), (["--arm", "a=", "--arm", "a=--x=1"], "one name for each"),
    (["--arm", "a=", "--seeds", "two"], "--seeds two"), (["--arm", "a=", "--seeds", "3,3"], "each once"),
    (["--arm", "a=", "--seeds", "0"], "at least one"), (["--arm", "a=", "--launch", "./not_there"], "not_there")])
def test_bad_arms_are_refused(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message):
        arms.main(["--out", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


def test_dry_run_starts_nothing(launch, tmp_path, capsys):
    arms.main([*launch, "--seeds", "7,9", "--arm", "a=--layers=2 --x='1 2'", "--dry_run"])
    first, second = capsys.readouterr().out.splitlines()
    assert "--layers=2 '--x=1 2' --seed=7" in first and second.endswith("--run_id=a_seed9")
    assert not (tmp_path / "out").exists()


# ---- logs of the speedrun's own records, where FIELD_LOGS names their folder ----------------------------------------

needs_field_logs = pytest.mark.skipif(not FIELD_LOGS.is_dir(), reason="FIELD_LOGS names no folder")


@needs_field_logs
def test_published_numbers():
    report = report_of(FIELD_LOGS / "2026-05-20_sign_trick")
    base, new = report["groups"][0]["arms"]
    assert (base["name"], base["n"], new["name"], new["n"]) == ("baseline", 10, "pr299", 20)
    assert f"{base['loss_mean']:.5f}" == "3.27937" and f"{base['time_mean_ms']:.1f}" == "85394.3"
    assert f"{new['loss_mean']:.6f}" == "3.279175" and f"{new['time_mean_ms']:.1f}" == "84429.5"
    assert f"{new['p_at_or_below_target']:.4f}" == "0.0024"


@needs_field_logs
@pytest.mark.parametrize("folder, n, loss, time_ms, steps, clock", [
    ("2024-06-06_adamw", 1, 3.275959, None, 9536, "unknown"), ("2024-10-13_llmc", 1, 3.2722, None, 19560, "unknown"),
    ("2024-10-10_muon", 1, 3.2785, 1339067, 6200, "from step 10"),
    ("2024-11-03_truncated", 1, 3.2762, 648063, 4578, "from step 10"),
    ("2025-07-18_triton", 1, 3.278, 169042, 1750, "all steps"),
    ("track3_many_runs", 20, None, None, 3350, "all steps")])
def test_logs_of_the_field(folder, n, loss, time_ms, steps, clock):
    report = report_of(FIELD_LOGS / folder)
    arm = only_arm(report)
    assert (arm["n"], arm["failed"], arm["steps"], report["skipped"]) == (n, [], [steps], [])
    assert report["groups"][0]["key"]["clock"] == clock
    if loss:
        assert (arm["runs"][0]["loss"], arm["runs"][0]["time_ms"]) == (loss, time_ms)
