"""Kill a training run at random moments, resume from the disk, and end where an undisturbed run ends, bit for bit.

    python tests/chaos.py [--kills 20] [--ranks 1] [--seed 0]
    python tests/chaos.py --full_disk 20 [--ranks 1]           nobody is killed, but the disk is full now and then

Every update cycle, of two steps, writes a checkpoint. Most kills wait for a random step, then for the next checkpoint
to be begun, and then up to 20 milliseconds; some hit a run that is only starting. All processes of the run are killed
with SIGKILL. A full disk is a limit to the size of files (RLIMIT_FSIZE) that is set on running processes, of random
size, for a random time: checkpoints, log and screen fail in the midst of a write. The exit status is 1 where anything
is lost.
"""
from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from conftest import ROOT, TINY, markov_tokens, write_shard
from train_gpt import UserError, file_entry, read_manifest

FLAGS = [*TINY, "--batch_tokens=512", "--ngram_update_every=2", "--val_tokens=512", "--val_every=7",
         "--sample_tokens=0", "--checkpoint_every=1"]
TRAINER = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
train_gpt.LOG_EVERY = 1
train_gpt.run_command(train_gpt.main)
"""
LIMIT_S = 300  # for anything awaited


class Lost(Exception):
    """Something that a kill must not cost was lost."""


class Attempt:
    """The trainer as a user starts it, but with a line for every step: on the latest checkpoint that lies in `out`, or
    from the start where there is none."""

    def __init__(self, data: Path, out: Path, steps: int, ranks: int):
        launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        flags = [*FLAGS, f"--data={data}", f"--out={out}", f"--steps={steps}"]
        if (out / "checkpoints/latest").exists():
            flags.append("--resume=latest")
        self.screen, script = data / "screen.txt", data / "trainer.py"
        script.write_text(TRAINER)
        with open(self.screen, "w") as screen:
            self.process = subprocess.Popen([sys.executable, *launch, str(script), *flags], stdout=screen,
                                            stderr=screen, env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def shown(self) -> str:
        return self.screen.read_text()

    def until(self, holds, what: str) -> None:
        """Wait until holds(), or the run ends."""
        deadline = time.perf_counter() + LIMIT_S
        while self.process.poll() is None and not holds():
            if time.perf_counter() > deadline:
                self.kill(random.Random(0))
                raise Lost(f"time: no {what} within {LIMIT_S} s:\n{self.shown[-2000:]}")
            time.sleep(0.0005)

    def until_step(self, step: int) -> None:
        self.until(lambda: f"\nstep:{step}/" in self.shown, f"step {step}")

    def until_end(self) -> str:
        """Returns what the run printed."""
        self.until(lambda: False, "end")
        if self.process.returncode:
            raise Lost(f"a run, which ended with exit status {self.process.returncode}:\n{self.shown[-2000:]}")
        return self.shown

    def kill(self, shuffle: random.Random) -> None:
        """SIGKILL to the whole family, in any order; returns when none of it runs any more."""
        pids = family(self.process.pid)
        for pid in shuffle.sample(pids, len(pids)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(is_running(pid) for pid in pids):
            time.sleep(0.001)


def family(pid: int) -> list[int]:
    """A process and all that descend from it; torchrun puts each rank into a session of its own."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return [pid]
    return [pid, *(one for child in children for one in family(int(child)))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # which a process has lost that only waits to be reaped
    except OSError:
        return False


def values(text: str) -> dict[tuple[str, str], str]:
    """(step, kind of loss) -> the loss as printed."""
    return {(step, kind): loss for step, kind, loss in re.findall(r"^step:(\d+)/\d+ (\w+):(\S+) ", text, re.MULTILINE)}


def half_written(out: Path) -> set[str]:
    return {path.name for path in out.glob("checkpoints/.*.part")}


def inspect(out: Path) -> tuple[int, list[str]]:
    """Check that each checkpoint with a name is whole. Returns the latest one's step, and what is half-written."""
    folder, latest = out / "checkpoints", 0
    for path in folder.glob("[!.]*_step*"):
        try:
            files = {"manifest.json": None} | read_manifest(path)["files"]
        except UserError as error:
            raise Lost(f"a checkpoint that is not whole: {error}") from None
        found = {part.name: file_entry(part) for part in path.iterdir()}
        if found | {"manifest.json": None} != files:
            raise Lost(f"a checkpoint that is not whole: {path} has {found}, its manifest {files}")
    if (folder / "latest").exists():
        named = folder / (folder / "latest").read_text()
        if not named.is_dir():
            raise Lost(f"`latest` names {named}, which is not there")
        latest = read_manifest(named)["step"]
    return latest, sorted(half_written(out))


def final_tensors(out: Path) -> dict[str, torch.Tensor]:
    """What the last checkpoint holds, by file and name."""
    folder = out / "checkpoints" / (out / "checkpoints/latest").read_text()

    def flat(name: str, value) -> dict:
        parts = value.items() if isinstance(value, dict) else ()
        return dict(item for key, part in parts for item in flat(f"{name} {key}", part).items()) or {name: value}

    return flat("", {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.pt")})


def final_loss(shown: str) -> str:
    """As printed; empty for a run that did not get there."""
    return "".join(re.findall(r"^final step:\S+ val_loss:(\S+)", shown, re.MULTILINE))


def compare(out: Path, undisturbed: Path, shown: str, expected: str) -> int:
    """Raise Lost unless both runs end alike and leave nothing half-written. Returns how many tensors were compared."""
    if not final_loss(shown) == final_loss(expected) != "":
        raise Lost(f"the final loss, which is {final_loss(shown) or 'not there'}, not {final_loss(expected)}")
    mine, others = final_tensors(out), final_tensors(undisturbed)
    if mine.keys() != others.keys() or not all(torch.equal(mine[name], others[name]) for name in mine):
        raise Lost("the final tensors, which differ from those of the undisturbed run")
    if left := half_written(out):
        raise Lost(f"room on the disk: nobody swept {left}")
    return len(mine)


def chaos(folder: Path, kills: int, ranks: int, shuffle: random.Random) -> None:
    """Raises Lost."""
    steps = 20 + 3 * kills
    write_shard(folder / "chaos_train_1.bin", markov_tokens(steps * 512 + 1, 2))
    write_shard(folder / "chaos_val_1.bin", markov_tokens(600, 3))
    began = time.perf_counter()
    expected = Attempt(folder, folder / "undisturbed", steps, ranks).until_end()
    run_s, reference = time.perf_counter() - began, values(expected)
    print(f"{steps} steps, ranks: {ranks}; undisturbed, the final loss is {final_loss(expected)}", flush=True)
    out, reached, seen_left, tally, killed_after = folder / "disturbed", 0, set(), Counter(), []
    for number in range(kills + 1):
        resumed_at, attempt = reached, Attempt(folder, out, steps, ranks)
        early = number < kills and shuffle.random() < 0.15
        if number == kills:
            attempt.until_end()
            what = "runs to its end"
        elif early:
            time.sleep(shuffle.uniform(0, run_s / 2))
            what = "killed some time after its start"
        else:
            furthest = max(1, 2 * (steps - reached) // (kills - number + 1))  # so that kills lie about evenly
            killed_after.append(min(steps - 2, reached + shuffle.randint(1, furthest)))
            attempt.until_step(killed_after[-1])
            before = half_written(out)
            if shuffle.random() < 0.7:
                attempt.until(lambda: half_written(out) - before, "checkpoint")
            time.sleep(shuffle.uniform(0, 0.02))
            what = f"killed after step {killed_after[-1]}"
        if number < kills:
            attempt.kill(shuffle)
        shown = attempt.shown
        reached, left = inspect(out)
        if resumed_at and not early and f"_step{resumed_at:06d} at step {resumed_at}\n" not in shown:
            raise Lost(f"the checkpoint of step {resumed_at}: it was there, but the run did not resume it")
        if reached < resumed_at:
            raise Lost(f"the checkpoint of step {resumed_at}: the latest is now of step {reached}")
        if wrong := {key: loss for key, loss in values(shown).items() if reference[key] != loss}:
            raise Lost(f"the losses {wrong}, which differ from those of the undisturbed run")
        tally.update(early=early, resumed=resumed_at > 0, interrupted=bool(set(left) - seen_left))
        seen_left = set(left)
        print(f"{number + 1:3} from step {resumed_at:3}: {what}; latest checkpoint: step {reached}"
              + (f"; left: {', '.join(left)}" if left else ""), flush=True)
    tensors = compare(out, folder / "undisturbed", shown, expected)
    whole = len(list(out.glob("checkpoints/[!.]*_step*")))
    print(f"{kills} kills, {tally['early']} of them some time after a start and the others after steps {killed_after}; "
          f"{tally['interrupted']} left something half-written, all of it swept; {tally['resumed']} resumes; {whole} "
          f"whole checkpoints at the end; final loss {final_loss(shown)}; all {len(reference)} losses and all "
          f"{tensors} tensors of the last checkpoint are equal bit for bit")


def full_disk(folder: Path, times: int, ranks: int, shuffle: random.Random) -> None:
    """Raises Lost."""
    steps = 40 + 4 * times
    write_shard(folder / "chaos_train_1.bin", markov_tokens(steps * 512 + 1, 2))
    write_shard(folder / "chaos_val_1.bin", markov_tokens(600, 3))
    expected = Attempt(folder, folder / "undisturbed", steps, ranks).until_end()
    out, filled = folder / "disturbed", 0
    attempt = Attempt(folder, out, steps, ranks)
    attempt.until_step(1)
    log = next(path for path in out.glob("*.txt"))

    def limit(size: int) -> None:
        for pid in family(attempt.process.pid):
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def last_step() -> int:
        return max(map(int, re.findall(r"^step:(\d+)/", log.read_text(), re.MULTILINE)))

    while filled < times and attempt.process.poll() is None and last_step() < steps - 15:
        limit(shuffle.randint(100, 30_000))
        time.sleep(shuffle.uniform(0.01, 0.2))
        limit(resource.RLIM_INFINITY)
        filled += 1
        time.sleep(shuffle.uniform(0.01, 0.2))
    attempt.until_end()
    shown = log.read_text()
    inspect(out)
    tensors, reference, mine = compare(out, folder / "undisturbed", shown, expected), values(expected), values(shown)
    if wrong := {key: loss for key, loss in mine.items() if reference[key] != loss} or reference.keys() - mine.keys():
        raise Lost(f"the losses {wrong}, which differ from those of the undisturbed run, or lack")
    refused = len(re.findall(r"^warning: no checkpoint at step", shown, re.MULTILINE))
    print(f"{steps} steps, ranks: {ranks}; the disk was full {filled} times; {refused} checkpoints were not written; "
          f"all {len(reference)} losses stand in the log in the end, and they and all {tensors} tensors of the last "
          f"checkpoint are equal bit for bit")
    if not refused:
        raise Lost("the point of it: no checkpoint met a full disk; take another --seed")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--full_disk", type=int, default=0, metavar="TIMES")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            act, count = (full_disk, args.full_disk) if args.full_disk else (chaos, args.kills)
            act(Path(folder), count, args.ranks, random.Random(args.seed))
        except Lost as lost:
            print(f"error: {lost}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
