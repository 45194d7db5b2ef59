"""Measure how long the comparison of many logs takes and how much memory: python tests/bench_compare.py [LOGS]

Makes logs of about 200 kB in a temporary folder: a source of 100 kB, separators, 1,500 progress lines, 13 evaluations.
"""
from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1] / "records"
BAR = "=" * 100
RUN = """import resource, sys
import compare
status = compare.main(sys.argv[1:])
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


def make_log(path: Path, rng: random.Random) -> None:
    source = [f"    value_{i} = compute(value_{i - 1}, scale={i}, mode='step:{i}')" for i in range(1600)]
    environment = "Running PyTorch 2.10.0 compiled for CUDA 12.8 on NVIDIA Test with world_size 8"
    lines = [BAR, "import sys", *source, BAR, environment, BAR]
    final, step_ms = rng.gauss(3.278, 0.0013), rng.gauss(57, 0.05)
    for step in range(1501):
        time_text = f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms:.2f}ms"
        if step % 125 == 0:
            lines.append(f"step:{step}/1500 val_loss:{final + 7 * (1 - step / 1500) ** 3:.4f} {time_text}")
        if step < 1500:
            lines.append(f"step:{step}/1500 train_loss:{final + 0.1:.4f} {time_text}")
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(0)
        for index in range(count):
            path = Path(folder, f"arm{index % 4}", f"run{index}.txt")
            path.parent.mkdir(exist_ok=True)
            make_log(path, rng)
        print(f"{count} logs of {path.stat().st_size / 1e3:.0f} kB")
        for part in (f"{folder}/arm0", folder):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", RUN, part, "--json"], cwd=RECORDS, capture_output=True,
                                  text=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            peak_kib = int(done.stderr.split("PEAK ")[1].split()[0])
            print(f"{len(list(Path(part).rglob('*.txt'))):5d} logs: {time.perf_counter() - start:.2f} s wall, "
                  f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.2f} s of processor, "
                  f"peak {peak_kib / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
