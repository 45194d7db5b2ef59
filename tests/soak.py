"""Thousands of small steps on several ranks: does any rank's memory, threads or open files grow? Not run by the tests.

    python tests/soak.py [--steps 2000] [--ranks 2] [--ngram_device=cpu ...]

Further flags go to the trainer. Each rank is looked at in /proc whenever the trainer prints a step line. The table is
small enough for every page of it to be touched early. Evaluations and checkpoints are part of the run. The exit status
is 1 where threads, open files or memory grow.
Memory rises a little and ever less, as allocations come to lie on pages of the heap that nothing has touched before.
"""
from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from conftest import ROOT, TINY, markov_tokens, write_shard

LARGEST_SLOPE = 2000  # KiB per 1,000 steps over the second half


def start(folder: Path, steps: int, ranks: int, more: list[str]) -> subprocess.Popen:
    """torchrun with a run of `steps` on shards made in `folder`, and more flags."""
    write_shard(folder / "soak_train_1.bin", markov_tokens(200_000, 2))
    write_shard(folder / "soak_val_1.bin", markov_tokens(5_000, 3))
    flags = [*TINY, f"--steps={steps}", "--batch_tokens=512", f"--data={folder}", f"--out={folder}",
             f"--epochs={steps * 512 // 199_000 + 1}", "--val_every=50", "--checkpoint_every=100", "--target_loss=0.1",
             *more]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.Popen([*launch, str(ROOT / "train_gpt.py"), *flags], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def ranks_of(launcher: int) -> list[int]:
    """Process ids of torchrun's children, in the order of their start."""
    return sorted(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


def usage(pid: int) -> tuple[int, int, int]:
    """Resident KiB (counted page by page: /proc/PID/status may lag), threads and open files of a process."""
    process = Path(f"/proc/{pid}")
    resident = int(re.search(r"^Rss:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)[1])
    return resident, len(os.listdir(process / "task")), len(os.listdir(process / "fd"))


def watch(process: subprocess.Popen) -> tuple[list[int], np.ndarray]:
    """Steps at which samples were taken, and int [samples, ranks, 3] of usage."""
    steps, samples = [], []
    for line in process.stdout:
        if found := re.match(r"step:(\d+)/(\d+) train_loss", line):
            if int(found[1]) == int(found[2]):
                continue
            steps.append(int(found[1]))
            samples.append([usage(pid) for pid in ranks_of(process.pid)])
        elif "val_loss" in line or line.startswith("error"):
            print(line, end="", flush=True)
    return steps, np.array(samples)


def slope(steps: np.ndarray, resident: np.ndarray) -> float:
    """KiB per 1,000 steps, by least squares."""
    return 1000 * float(np.polyfit(steps, resident, 1)[0])


def report(steps: np.ndarray, samples: np.ndarray) -> list[str]:
    """Print what each rank used; returns what grew. A leak raises the least count; files open for a moment do not."""
    grown, half = [], len(steps) // 2
    for rank, (resident, threads, files) in enumerate(samples.transpose(1, 2, 0)):
        whole, second = slope(steps, resident), slope(steps[half:], resident[half:])
        print(f"rank {rank}: resident {resident[0]:,} KiB at step {steps[0]}, {resident[half]:,} at {steps[half]}, "
              f"{resident[-1]:,} at {steps[-1]}; slope {whole:+,.1f} KiB per 1,000 steps, {second:+,.1f} late; "
              f"threads {threads.min()} to {threads.max()}, files {files.min()} to {files.max()}")
        grown += [f"rank {rank}: {what}" for what, counts in (("threads", threads), ("files", files))
                  if counts[half:].min() > counts[:half].min()]
        grown += [f"rank {rank}: memory"] if second > LARGEST_SLOPE else []
    return grown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    args, more = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), args.steps, args.ranks, more) as process:
        steps, samples = watch(process)
    if process.returncode:
        return process.returncode
    grown = report(np.array(steps), samples)
    found = f"grown: {', '.join(grown)}" if grown else "nothing grows"
    print(f"{len(steps)} samples over {args.steps:,} steps: {found}")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
