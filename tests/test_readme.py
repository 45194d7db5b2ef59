"""The READMEs promise nothing that the project does not have."""
from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from conftest import ROOT, TINY
from train_gpt import Config

READMES = {str(path.relative_to(ROOT)): re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"))
           for path in (ROOT / "README.md", ROOT / "records" / "README.md")}
LAUNCHER_FLAGS = {"standalone", "nproc_per_node", "help"}


def test_last_lines_are_a_real_runs():
    logs = [path.read_text().splitlines() for path in ROOT.glob("records/*/*/*/*.txt")]
    final, target = (re.search(rf"^    ({word} .*)$", READMES["README.md"], re.MULTILINE)[1]
                     for word in ("final", "target"))
    assert any(final in log and target in log for log in logs)


@pytest.mark.parametrize("name", READMES)
def test_flags_exist(name):
    """Each --flag that stands there is one of the trainer's, or of a script in this repository."""
    flags = {f.name for f in dataclasses.fields(Config) if f.metadata}
    assert {"seed", "ngram_rows"} <= flags and "stages" not in flags
    for script in [*ROOT.glob("data/*.py"), *ROOT.glob("records/**/*.py")]:
        found = re.findall(r'"--([\w-]+)"|^    (\w+): .* = (?:train_gpt\.)?flag\(', script.read_text(), re.MULTILINE)
        flags |= {word.replace("-", "_") for words in found for word in words}
    flags |= LAUNCHER_FLAGS | {"markdown", "json", "csv"}     # these three compare.py makes of a list
    unknown = {word for word in re.findall(r"--(\w[\w-]*)", READMES[name]) if word.replace("-", "_") not in flags}
    assert unknown == set()


@pytest.mark.parametrize("name", READMES)
def test_files_and_links_exist(name):
    folder = (ROOT / name).parent
    for path in re.findall(r"(?<![\w/.[-])[\w-]+(?:/[\w-]+)*\.(?:py|sh)\b", READMES[name]):
        assert path.startswith("PATH") or any((place / path).exists() for place in (ROOT, folder)), path
    for target, _, anchor in re.findall(r"\]\(([^)#:]+)(#?)([^)]*)\)", READMES[name]):
        assert (folder / target).exists(), target
        headings = re.findall(r"^#+ (.+)$", (folder / target).read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], f"{target}#{anchor}"


def test_the_benchmark_of_a_step_runs(tiny_data):
    """Its times are not tested, only that it still fits the trainer."""
    command = [sys.executable, ROOT / "tests/bench_step.py", "--rounds=1", *TINY, f"--data={tiny_data}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Muon and Adam +\S+ ms +\S+% of the step", done.stdout)
    assert "of its own products' speed" in done.stdout
