"""Run arms several times with different seeds, interleaved, and compare them.

    python records/arms.py --seeds 5 --arm table='' --arm no_table='--ngram_rows=0' --out logs/my_ablation

launches A B A B ... (times of training compare only between runs that alternate on one machine): each launch is
`./run.sh FLAGS --seed=K --out=DIR/ARM --run_id=ARM_seedK`, so DIR/ARM holds the arm's logs. At the end the arms are
compared as `records/compare.py DIR/ARM...` does.
"""
from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import compare
from read_logs import LogError, read_log
from train_gpt import UserError, run_command

RESERVED_FLAGS = ("seed", "out", "run_id")


@dataclass(frozen=True)
class Launch:
    """One run to start: `command` is its argument list, `log` the file that it writes."""
    arm: str
    seed: int
    command: list[str]
    log: Path


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="arms.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arm", action="append", required=True, metavar="NAME='FLAGS'",
        help="an arm and the trainer's flags for it; the first is the baseline")
    add("--seeds", default="5", metavar="N|K,K,...", help="how many seeds (1 to N), or which, with commas (default: 5)")
    add("--out", type=Path, required=True, metavar="DIR", help="each arm's logs go into a folder of its name in DIR")
    add("--launch", default="./run.sh", metavar="COMMAND", help="what starts the trainer (default: ./run.sh)")
    add("--resume", action="store_true", help="leave out the runs whose logs are there and finished")
    add("--stop_on_failure", "--stop-on-failure", action="store_true", help="stop at the first launch that fails")
    add("--dry_run", "--dry-run", action="store_true", help="print the commands and stop")
    add("--plot", metavar="FILE.png", help="draw the comparison as well")
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> list[Launch]:
    """All launches in their order: for each seed, every arm. Raises UserError for bad arms, seeds or existing logs."""
    arms = dict(_parse_arm(text) for text in options.arm)
    if len(arms) < len(options.arm):
        raise UserError(f"--arm: found {len(options.arm)} arms with {len(arms)} names, expected one name for each arm")
    launches = []
    for seed in _parse_seeds(options.seeds):
        for arm, flags in arms.items():
            out, run_id = options.out / arm, f"{arm}_seed{seed}"
            command = [*shlex.split(options.launch), *flags, f"--seed={seed}", f"--out={out}", f"--run_id={run_id}"]
            launches.append(Launch(arm, seed, command, out / f"{run_id}.txt"))
    existing = [launch for launch in launches if launch.log.exists()]
    if options.resume:
        unfinished = [launch.log for launch in existing if not _is_finished(launch.log)]
        if unfinished:
            raise UserError(f"{unfinished[0]}: the log of a failed run ({len(unfinished)} such), which --resume does "
                            f"not replace; a failure counts: rename it and keep it, then resume")
        return [launch for launch in launches if launch not in existing]
    if existing:
        raise UserError(f"{existing[0].log}: exists ({len(existing)} of {len(launches)} do); a log is never "
                        f"overwritten: choose another --out, other --seeds, or --resume")
    return launches


def _parse_arm(text: str) -> tuple[str, list[str]]:
    name, equals, flags = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"--arm {text}: expected NAME='FLAGS' with a name of letters, digits, '_', '-' and '.'")
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise UserError(f"--arm {text}: its flags do not parse ({error}); check the quotes") from error
    for word in words:
        if word.lstrip("-").partition("=")[0].replace("-", "_") in RESERVED_FLAGS:
            raise UserError(f"--arm {text}: found {word}; seed, out and run_id are set here: use --seeds and --out")
    return name, words


def _parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")] if "," in text else list(range(1, int(text) + 1))
    except ValueError as error:
        raise UserError(f"--seeds {text}: expected a number of seeds, or seeds with commas between") from error
    if not seeds or len(seeds) != len(set(seeds)):
        raise UserError(f"--seeds {text}: expected at least one seed, each once: runs of equal seeds are no sample")
    return seeds


def _is_finished(log: Path) -> bool:
    try:
        return not any(run.failure for run in read_log(log))
    except (LogError, OSError):
        return False


def run_all(launches: list[Launch], stop_on_failure: bool) -> list[tuple[Launch, str]]:
    """Start one launch after the other, their output unchanged. Returns the failed ones with their reasons."""
    failed = []
    for index, launch in enumerate(launches, 1):
        print(f"[{index}/{len(launches)}] {shlex.join(launch.command)}", flush=True)
        try:
            status = subprocess.run(launch.command, check=False).returncode
        except OSError as error:
            raise UserError(f"{launch.command[0]}: {error.strerror}; run this from the repository's root, or give "
                            f"--launch") from error
        if status == 0 and not launch.log.exists():
            failed.append((launch, f"exit status 0, but {launch.log} is not there"))
        elif status != 0:
            failed.append((launch, f"exit status {status}"))
        if failed and stop_on_failure:
            print(f"stopped at the first failure; {len(launches) - index} launches were not started", file=sys.stderr)
            break
    return failed


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Raises UserError, after the comparison where a launch failed."""
    options = parse_arguments(arguments)
    launches = plan(options)
    if options.dry_run:
        print("\n".join(shlex.join(launch.command) for launch in launches))
        return
    failed = run_all(launches, options.stop_on_failure)
    folders = [str(folder) for text in options.arm if (folder := options.out / text.partition("=")[0]).is_dir()]
    reasons = "".join(f"\n  {launch.arm} seed {launch.seed}: {reason}" for launch, reason in failed)
    print()
    with suppress(UserError) if failed else nullcontext():     # no run to compare: because launches failed
        compare.main([*folders, *(["--plot", options.plot] if options.plot else [])])
    if failed:
        raise UserError(f"found {len(failed)} launches that failed, expected none; see their output above:{reasons}")


if __name__ == "__main__":
    run_command(main)
