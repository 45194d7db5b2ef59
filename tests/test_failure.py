"""Ranks that fail or die, signals, and kills: each run ends soon, says why, and what it saved can be resumed.

All are real processes, forked where neither torchrun nor the end of Python has a part in it.
"""
from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import chaos
import train_gpt
from conftest import ROOT, TINY

# bf16 rows would round the last bits into view
FLAGS = [*TINY, "--ngram_dtype=float32", "--ngram_update_every=2", "--sample_tokens=0", "--run_id=run"]
KEEP = ["--checkpoint"]
AT_MOST_S = 30  # from a fault to the end of the last process

# The trainer with something done at a moment that no signal from outside would hit. Warm-up has no step 5, makes no 10
# updates, and prepares no cycle 6.
DRIVER = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
import train_gpt

RANK, TORCHRUN, SELF = int(os.environ.get("RANK", 0)), os.getppid(), os.getpid()

def say(text):
    os.write(1, f"{{text}}\\n".encode())  # whole, whatever another rank writes

def before(method, when, rank, action):
    original = getattr(train_gpt.Trainer, method)
    def changed(trainer, *arguments, **more):
        if when(trainer, *arguments) and RANK == rank:
            say(f"fault at {{time.time()}}")
            action(trainer)
        return original(trainer, *arguments, **more)
    setattr(train_gpt.Trainer, method, changed)

def in_step_5(trainer, step, *rest):
    say(f"rank {{RANK}} begins step {{step}}")
    return step == 5

def in_evaluation(trainer, *rest):
    return trainer.optimizer.updates == 10

def always(trainer, *rest):
    return True

def fail(error):
    raise error

def wait_for(holds):
    while not holds():
        time.sleep(0.05)

handle, handled = train_gpt.StopSignal.handle, []
train_gpt.StopSignal.handle = lambda *arguments: (handled.append(1), handle(*arguments))

before("train_step", in_step_5, -1, None)
{fault}
train_gpt.run_command(train_gpt.main)
"""


@dataclass
class Run:
    """A run that has ended."""
    statuses: list[int]  # torchrun's, or each rank's
    shown: str
    errors: str  # of torchrun and all ranks
    out: Path
    seconds: float = 0.0  # since the fault, or since the start where there was none

    @property
    def log(self) -> str:
        return (self.out / "run.txt").read_text()

    @property
    def told(self) -> list[str]:
        return re.findall(r"^(?:error: |stopped by ).*", self.errors, re.MULTILINE)

    def last_step(self, rank: int) -> int:
        return int(re.findall(rf"^rank {rank} begins step (\d+)$", self.shown, re.MULTILINE)[-1])


def side_by_side(run, cases: dict[str, dict], folder: Path, data: Path) -> dict[str, Run]:
    """Run each case, a few at a time: they wait more than they work."""
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(run, folder / name.replace(" ", "_"), data, *case.pop("flags", ()), **case)
                for name, case in cases.items()}
        return {name: future.result() for name, future in runs.items()}


def in_step(action: str, rank: int = 1) -> str:
    return f'before("train_step", in_step_5, {rank}, lambda trainer: {action})\n'


# ---- ranks under torchrun --------------------------------------------------------------------------------------------

def still_running(out: Path) -> dict[int, str]:
    """Command lines, by id, of the processes that a run with this folder started, whoever their parent is now."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TRAINER_TEST={out}\0".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is another user's
            pass
    return found


def await_end(out: Path) -> None:
    """Of all processes of a run."""
    until = time.time() + AT_MOST_S
    while still_running(out) and time.time() < until:
        time.sleep(0.1)
    assert not still_running(out)


@contextmanager
def started(out: Path, data: Path, *more: str, fault: str):
    """Yields torchrun with two ranks; what outlives the block by more than a moment is killed, and an error."""
    out.mkdir(parents=True)
    script = out / "driver.py"
    script.write_text(DRIVER.format(root=str(ROOT), fault=fault))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen([*launch, str(script), *FLAGS, f"--data={data}", f"--out={out}", *more],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1", "TRAINER_TEST": str(out)})
    try:
        yield process
        await_end(out)
    finally:
        for pid in still_running(out):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def launched(out: Path, data: Path, *more: str, fault: str) -> Run:
    with started(out, data, *more, fault=fault) as process:
        shown, errors = process.communicate(timeout=120)
        ended = time.time()
    fault_at = float(re.search(r"^fault at (\S+)$", shown, re.MULTILINE)[1])
    return Run([process.returncode], shown, errors, out, ended - fault_at)


@pytest.fixture(scope="module")
def undisturbed(tiny_data, tmp_path_factory) -> float:
    return train_gpt.main([*FLAGS, f"--data={tiny_data}", f"--out={tmp_path_factory.mktemp('undisturbed')}"])


def resumed(out: Path) -> float:
    return train_gpt.main(["--device=cpu", "--resume=latest", f"--out={out}"])


@pytest.fixture(scope="module")
def failed(tiny_data, tmp_path_factory) -> dict[str, Run]:
    """Where memory runs out the other rank is busy, as with a GPU's collectives."""
    faults = {
        "out of memory": in_step('fail(torch.OutOfMemoryError("tried to allocate 2.00 GiB"))')
        + in_step("time.sleep(100)", rank=0),
        "killed": in_step("os.kill(SELF, signal.SIGKILL)"),
        "stopped": in_step("(os.kill(TORCHRUN, signal.SIGTERM), wait_for(lambda: handled))", rank=0),
    }
    return side_by_side(launched, {name: dict(fault=fault, flags=KEEP) for name, fault in faults.items()},
                        tmp_path_factory.mktemp("failed"), tiny_data)


def root_cause(done: Run) -> str:
    """The end of torchrun's summary, which is the end of the screen."""
    return done.errors.partition("Root Cause (first observed failure):")[2]


def test_the_first_error_ends_all_ranks_and_is_the_last_one_shown(failed):
    """Once on the screen, without another rank's traceback; again at the end of torchrun's summary; and in the log."""
    done, message = failed["out of memory"], "OutOfMemoryError: tried to allocate 2.00 GiB"
    assert done.statuses == [1] and done.seconds < AT_MOST_S
    assert len(done.told) == 1 and message in done.told[0] and message in root_cause(done)
    assert "--micro_batch_tokens" in done.told[0] and done.log.splitlines()[-1] == done.told[0]
    assert len(re.findall("^Traceback", done.errors, re.MULTILINE)) == 2  # the rank's and torchrun's


def test_a_rank_that_is_killed_ends_the_others_and_is_named_as_the_cause(failed):
    done = failed["killed"]
    assert done.statuses == [1] and done.seconds < AT_MOST_S
    assert re.search("^error: ", done.log, re.MULTILINE)
    assert "SIGKILL" in root_cause(done) and "Traceback" not in root_cause(done)


def test_torchrun_passes_a_signal_on(failed, undisturbed):
    """The update cycle under way is ended first; what is resumed from there ends where it would have ended."""
    done = failed["stopped"]
    assert done.statuses == [1] and done.seconds < AT_MOST_S  # torchrun's own, as is the traceback
    step = done.last_step(0) + 1
    assert step in (6, 8) and done.last_step(1) + 1 == step  # 6 where it reaches rank 1 between two steps
    last = f"stopped by SIGTERM after step {step}, checkpoint {done.out}/checkpoints/run_step{step:06d}"
    assert done.told == [last] == done.log.splitlines()[-1:]
    assert len(re.findall("^Traceback", done.errors, re.MULTILINE)) == 1
    assert resumed(done.out) == pytest.approx(undisturbed, abs=1e-5)  # on one rank


def test_ranks_end_by_themselves_when_torchrun_is_killed(tiny_data, undisturbed, tmp_path):
    """With their work saved; as long as they run no other may train there."""
    out = tmp_path / "out"
    released = f"os.path.exists({str(out / 'released')!r})"
    fault = in_step(f"(os.kill(TORCHRUN, signal.SIGKILL), wait_for(lambda: {released}))", rank=0)
    with started(out, tiny_data, *KEEP, fault=fault) as process:
        assert any(line.startswith("fault at") for line in process.stdout) and process.wait() == -signal.SIGKILL
        with pytest.raises(train_gpt.UserError, match=f"^{out}/checkpoints: found another process training there"):
            train_gpt.main([*FLAGS, *KEEP, f"--data={tiny_data}", f"--out={out}", "--run_id=second"])
        assert len(still_running(out)) == 2
        (out / "released").touch()
        shown, errors = process.communicate(timeout=AT_MOST_S)
    done = Run([], shown, errors, out)
    assert done.log.splitlines()[-1] == f"stopped by SIGHUP after step 8, checkpoint {out}/checkpoints/run_step000008"
    assert set(done.told) == {done.log.splitlines()[-1]} and "Traceback" not in errors
    assert resumed(out) == pytest.approx(undisturbed, abs=1e-5)


# ---- forked ranks ----------------------------------------------------------------------------------------------------

def forked(out: Path, data: Path, *more: str, fault: str, ranks: int = 1) -> Run:
    out.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_gpt"])
    argv = [*FLAGS, f"--data={data}", f"--out={out}", *more]
    processes = [context.Process(target=on_rank, args=(rank, ranks, port, out, fault, argv)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode is not None
    shown, errors = ("".join((out / f"{name}{rank}").read_text() for rank in range(ranks))
                     for name in ("shown", "errors"))
    return Run([process.exitcode for process in processes], shown, errors, out)


def on_rank(rank: int, size: int, port: int, out: Path, fault: str, argv: list[str]) -> None:
    for handle, name in ((1, "shown"), (2, "errors")):
        os.dup2(os.open(out / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), handle)
    sys.argv = ["train_gpt.py", *argv]
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train_gpt.torch.set_num_threads(1)
    exec(DRIVER.format(root=str(ROOT), fault=fault), {})


@pytest.fixture(scope="module")
def ended(tiny_data, tmp_path_factory) -> dict[str, Run]:
    def sends(method: str, when: str, signum: str, rank: int = 0) -> str:
        return f'before("{method}", {when}, {rank}, lambda trainer: os.kill(SELF, signal.{signum}))\n'

    loader = 'before("prepare", lambda trainer, cycle: cycle == 6, 1, ' \
             'lambda trainer: fail(OSError(5, "Input/output error")))'
    twice = in_step("(os.kill(SELF, signal.SIGTERM), say('waits'), os.kill(SELF, signal.SIGINT), time.sleep(9))", 0)
    return side_by_side(forked, {
        "training": dict(fault=sends("train_step", "in_step_5", "SIGTERM"), flags=KEEP),
        "evaluation": dict(fault=sends("evaluate", "in_evaluation", "SIGINT"), flags=KEEP),
        "hang-up": dict(fault=sends("train_step", "in_step_5", "SIGHUP"), flags=KEEP),
        "nohup": dict(fault="signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
                      + sends("train_step", "in_step_5", "SIGHUP")),
        "one of two ranks": dict(fault=sends("train_step", "in_step_5", "SIGTERM", rank=1), flags=KEEP, ranks=2),
        "warm-up": dict(fault=sends("warm_up", "always", "SIGTERM"), flags=KEEP),
        "twice": dict(fault=twice, flags=KEEP),
        "not kept": dict(fault=sends("train_step", "in_step_5", "SIGTERM")),
        "loader": dict(fault=loader, ranks=2),
        "raises": dict(fault=in_step('fail(RuntimeError("boom on rank 1"))'), ranks=2),
        "not finite": dict(fault=in_step("trainer.model.embed.data.fill_(torch.nan)"), ranks=2),
    }, tmp_path_factory.mktemp("ended"), tiny_data)


@pytest.mark.parametrize("case, name, step", [("training", "SIGTERM", 8), ("evaluation", "SIGINT", 12),
                                              ("hang-up", "SIGHUP", 8), ("one of two ranks", "SIGTERM", 8)])
def test_a_signal_saves_what_was_trained(ended, undisturbed, case, name, step):
    """After the update cycle under way, or the first one after an evaluation."""
    done, ranks = ended[case], 1 + (case == "one of two ranks")
    assert done.statuses == [128 + signal.Signals[name]] * ranks
    last = f"stopped by {name} after step {step}, checkpoint {done.out}/checkpoints/run_step{step:06d}"
    assert done.told == [last] and done.log.splitlines()[-1] == last and "Traceback" not in done.errors
    assert {done.last_step(rank) for rank in range(ranks)} == {step - 1}
    assert resumed(done.out) == (undisturbed if ranks == 1 else pytest.approx(undisturbed, abs=1e-5))


def test_a_hang_up_that_is_ignored_stops_nothing(ended, undisturbed):
    done = ended["nohup"]
    assert done.statuses == [0] and done.told == [] and f"final step:20/20 val_loss:{undisturbed:.5f}" in done.log


@pytest.mark.parametrize("case", ["warm-up", "twice"])
def test_a_signal_before_training_or_a_second_one_ends_the_run_at_once(ended, case):
    done = ended[case]
    assert done.statuses == [143] and done.told == ["stopped by SIGTERM"] == done.log.splitlines()[-1:]
    assert not list(done.out.glob("checkpoints/*_step*"))
    assert "step:0/" not in done.log if case == "warm-up" else done.last_step(0) == 5 and "waits" in done.shown


def test_without_checkpoints_a_signal_says_that_nothing_is_kept(ended):
    done = ended["not kept"]
    assert done.statuses == [143]
    assert done.told == ["stopped by SIGTERM after step 8, without a checkpoint (see --checkpoint)"]
    assert done.log.splitlines()[-1] == done.told[0] and not (done.out / "checkpoints").exists()


@pytest.mark.parametrize("case, error, tracebacks", [("raises", "RuntimeError: boom on rank 1", 1),
                                                     ("loader", "OSError: [Errno 5] Input/output error", 0)])
def test_a_rank_that_fails_speaks_for_the_one_that_waits_for_it(ended, case, error, tracebacks):
    """The loader fails behind an evaluation, for which its rank has all it needs; the other's loader waits for it."""
    done = ended[case]
    assert done.statuses == [1, 1] and done.told == [f"error: {error}"] == done.log.splitlines()[-1:]
    assert "Traceback" not in (done.out / "errors0").read_text() and done.errors.count("Traceback") == tracebacks


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_at_its_step(ended):
    done = ended["not finite"]
    assert done.statuses == [1, 1] and "Traceback" not in done.errors and done.last_step(0) == done.last_step(1) == 5
    assert done.told == done.log.splitlines()[-1:]
    assert done.told[0].startswith("error: training loss: found nan after step 5, expected a finite number")


# ---- kills -----------------------------------------------------------------------------------------------------------

def test_kills_at_random_moments_lose_nothing(capfd):
    assert chaos.main(["--kills=2", "--seed=1"]) == 0, capfd.readouterr().err
    assert "equal bit for bit" in capfd.readouterr().out
