"""run.sh in a copy of the project whose environment is already set up."""
from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TINY


@pytest.fixture
def clone(tmp_path, tiny_data) -> Path:
    folder = tmp_path / "a clone"
    (folder / ".venv/bin").mkdir(parents=True)
    for name in ("run.sh", "train_gpt.py", "requirements.txt"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("data", "records"):
        shutil.copytree(ROOT / name, folder / name, ignore=lambda path,
                        names: [n for n in names if not n.endswith(".py")])
    python = folder / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    shutil.copy(ROOT / "requirements.txt", folder / ".venv/installed")
    return folder


def run(clone: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run([str(clone / "run.sh"), *arguments], capture_output=True, text=True, cwd=cwd or clone,
                          timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def test_flags_reach_the_trainer_and_the_log_lies_in_the_project(clone, tiny_data, tmp_path):
    shutil.copytree(tiny_data, clone / "data/torch_source")
    done = run(clone, *TINY[2:], "--steps=2", "--ngram_rows=0", "--seed=3", "--run_id=r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"seed": 3' in (clone / "logs/r.txt").read_text() and "final step:2/2" in done.stdout
    assert "table rows" not in done.stdout


def test_a_failing_trainer_fails_the_script(clone):
    done = run(clone, "--data=nowhere")
    assert done.returncode == 1 and "/a clone/nowhere: found no" in done.stderr
    assert not (clone / "data/torch_source").exists()


def test_missing_embedded_data_is_made_first(clone, tmp_path):
    """The data script stands in for 7 s of work; what it must do is told apart by what it prints."""
    (clone / "data/text.py").write_text("import sys\nprint('made the data', sys.argv[1:])\n")
    done = run(clone)
    assert "made the data []" in done.stdout and "data/torch_source: found no" in done.stderr


@pytest.mark.parametrize("flags", [["--track", "fineweb"], ["--track=fineweb24"]])
def test_other_tracks_do_not_make_it(flags, clone):
    (clone / "data/text.py").write_text("print('made the data')\n")
    done = run(clone, *flags, "--device=cuda", "--ranks=1", "--dry_run")
    assert done.returncode == 0 and "made the data" not in done.stdout and "plan for 1 rank on cuda" in done.stdout


def test_test_runs_pytest(clone):
    (clone / "test_one.py").write_text("def test_one():\n    pass\n")
    done = run(clone, "test", "test_one.py")
    assert done.returncode == 0 and "1 passed" in done.stdout


def test_arms_alternate(clone):
    done = run(clone, "arms", "--dry_run", "--seeds=2", "--arm", "a=", "--arm", "b=--ngram_rows=0", "--out=logs/x")
    commands = [line for line in done.stdout.splitlines() if "run.sh" in line]
    assert done.returncode == 0 and ["--ngram_rows=0" in line for line in commands] == [False, True, False, True]
    assert ["--seed=1" in line for line in commands] == [True, True, False, False]
