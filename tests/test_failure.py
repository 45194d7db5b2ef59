"""Ranks that fail or die, signals, and kills: each run ends soon, says why, and what it saved goes on. Real processes only."""
from __future__ import annotations

import os
import re
import signal
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

FLAGS = [*TINY, "--ngram_dtype=float32", "--sample_tokens=0", "--run_id=run"]  # bf16 rows would round the last bits into view
AT_MOST_S = 30  # from a fault to the end of the last process

# The trainer with something done at a moment that no signal from outside would hit. Warm-up has no step 5 and makes no 10 updates.
DRIVER = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
import harness
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

def send(signum, pid):
    os.kill(pid, signum)
    time.sleep(1)  # until torchrun has passed it on

before("train_step", in_step_5, -1, None)
{fault}
status = harness.exit_status(train_gpt.main)
sys.stdout.flush(), sys.stderr.flush()
os._exit(status)
"""


@dataclass
class Run:
    """A run that has ended."""
    status: int
    shown: str
    errors: str
    out: Path
    seconds: float  # since the fault, or since the start where there was none

    @property
    def log(self) -> str:
        return (self.out / "run.txt").read_text()

    def last_step(self, rank: int) -> int:
        return int(re.findall(rf"^rank {rank} begins step (\d+)$", self.shown, re.MULTILINE)[-1])


def command(out: Path, data: Path, *more: str, fault: str | None = None, ranks: int = 1) -> list[str]:
    out.mkdir(parents=True)
    script = ROOT / "train_gpt.py"
    if fault is not None:
        script = out / "driver.py"
        script.write_text(DRIVER.format(root=str(ROOT), fault=fault))
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *launch, str(script), *FLAGS, f"--data={data}", f"--out={out}", *more]


def environment(out: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TRAINER_TEST": str(out), "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor")}


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


@contextmanager
def started(out: Path, data: Path, *more: str, **how):
    """Yields a run; what of it outlives the block by more than a moment, as a compiler may, is killed, and an error."""
    process = subprocess.Popen(command(out, data, *more, **how), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment(out))
    try:
        yield process
        until = time.time() + 10
        while still_running(out) and time.time() < until:
            time.sleep(0.1)
        assert not still_running(out)
    finally:
        for pid in still_running(out):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def run(out: Path, data: Path, *more: str, **how) -> Run:
    began = time.time()
    with started(out, data, *more, **how) as process:
        shown, errors = process.communicate(timeout=120)
        ended = time.time()
    when = re.search(r"^fault at (\S+)$", shown, re.MULTILINE)
    return Run(process.returncode, shown, errors, out, ended - (float(when[1]) if when else began))


def side_by_side(cases: dict[str, dict], folder: Path, data: Path) -> dict[str, Run]:
    """Run each case, a few at a time: they wait more than they work."""
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(run, folder / name.replace(" ", "_"), data, *case.pop("flags", ()), **case)
                for name, case in cases.items()}
        return {name: future.result() for name, future in runs.items()}


@pytest.fixture(scope="module")
def undisturbed(tiny_data, tmp_path_factory) -> float:
    return train_gpt.main([*FLAGS, f"--data={tiny_data}", f"--out={tmp_path_factory.mktemp('undisturbed')}"])


def resumed(out: Path) -> float:
    return train_gpt.main(["--device=cpu", "--resume=latest", f"--out={out}"])


# ---- a rank that fails ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def failed(tiny_data, tmp_path_factory) -> dict[str, Run]:
    """Rank 0 waits for the rank that fails, but where memory runs out: there it is busy, as with a GPU's collectives."""
    def in_step(action: str, rank: int = 1) -> str:
        return f'before("train_step", in_step_5, {rank}, lambda trainer: {action})\n'

    faults = {
        "raises": in_step('fail(RuntimeError("boom on rank 1"))'),
        "out of memory": in_step('fail(torch.OutOfMemoryError("tried to allocate 2.00 GiB"))') + in_step("time.sleep(100)", rank=0),
        "loader": 'before("prepare", lambda trainer, cycle: cycle == 8, 1, lambda trainer: fail(OSError(5, "Input/output error")))',
        "killed": in_step("send(signal.SIGKILL, SELF)"),
        "not finite": in_step("trainer.model.embed.data.fill_(torch.nan)"),
    }
    return side_by_side({name: dict(fault=fault, ranks=2) for name, fault in faults.items()}, tmp_path_factory.mktemp("failed"),
                        tiny_data)


def root_cause(done: Run) -> str:
    """The end of torchrun's summary, which is the end of the screen."""
    return done.errors.partition("Root Cause (first observed failure):")[2]


@pytest.mark.parametrize("case, message", [
    ("raises", "boom on rank 1"), ("out of memory", "tried to allocate 2.00 GiB"), ("loader", "[Errno 5] Input/output error"),
    ("not finite", "training loss: found nan after step 5, expected a finite number"),
])
def test_the_first_error_ends_all_ranks_and_is_the_last_one_shown(failed, case, message):
    """Once on the screen, with no traceback of another rank; once more in torchrun's summary, which ends it; and in the log."""
    done = failed[case]
    assert done.status != 0 and done.seconds < AT_MOST_S
    told = re.findall(r"^error: .*", done.errors, re.MULTILINE)
    assert len(told) == 1 and message in told[0]
    shown = re.findall(r"^Traceback.*?^(?=\S)(?!Traceback)(.*?)$", done.errors, re.MULTILINE | re.DOTALL)
    assert len(shown) == (1 if case == "not finite" else 2) and "ChildFailedError" in shown[-1]  # torchrun's own
    assert message in root_cause(done)
    last = done.log.splitlines()[-1]
    assert last.startswith("error: ") and message in last


def test_the_remedy_for_memory_is_among_the_last_lines(failed):
    done = failed["out of memory"]
    for text in (re.findall(r"^error: .*", done.errors, re.MULTILINE)[0], done.log.splitlines()[-1], root_cause(done)):
        assert "--micro_batch_tokens" in text


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_at_its_step(failed):
    assert failed["not finite"].last_step(0) == failed["not finite"].last_step(1) == 5


def test_a_rank_that_is_killed_ends_the_others_and_is_named_as_the_cause(failed):
    done = failed["killed"]
    assert done.status != 0 and done.seconds < AT_MOST_S
    assert re.search("^error: ", done.log, re.MULTILINE)
    assert "SIGKILL" in root_cause(done) and "Traceback" not in root_cause(done)


# ---- signals --------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def stopped(tiny_data, tmp_path_factory) -> dict[str, Run]:
    def sends(method: str, when: str, signum: str, pid: str, rank: int = 0) -> str:
        return f'before("{method}", {when}, {rank}, lambda trainer: send(signal.{signum}, {pid}))'

    compiling = 'import threading\n' \
                'before("warm_up", always, 0, lambda trainer: threading.Timer(1, os.kill, (SELF, signal.SIGTERM)).start())'
    keep = ["--checkpoint"]
    return side_by_side({
        "torchrun in warm-up": dict(fault=sends("warm_up", "always", "SIGTERM", "TORCHRUN"), ranks=2, flags=keep),
        "torchrun in training": dict(fault=sends("train_step", "in_step_5", "SIGTERM", "TORCHRUN"), ranks=2, flags=keep),
        "torchrun in evaluation": dict(fault=sends("evaluate", "in_evaluation", "SIGINT", "TORCHRUN"), ranks=2, flags=keep),
        "one of two ranks": dict(fault=sends("train_step", "in_step_5", "SIGTERM", "SELF", rank=1), ranks=2, flags=keep),
        "compile": dict(fault=compiling, flags=[*keep, "--compile"]),
        "warm-up": dict(fault=sends("warm_up", "always", "SIGTERM", "SELF"), flags=keep),
        "training": dict(fault=sends("train_step", "in_step_5", "SIGTERM", "SELF"), flags=keep),
        "evaluation": dict(fault=sends("evaluate", "in_evaluation", "SIGINT", "SELF"), flags=keep),
    }, tmp_path_factory.mktemp("stopped"), tiny_data)


@pytest.mark.parametrize("case, name", [("training", "SIGTERM"), ("evaluation", "SIGINT"), ("torchrun in training", "SIGTERM"),
                                        ("torchrun in evaluation", "SIGINT"), ("one of two ranks", "SIGTERM")])
def test_a_signal_saves_what_was_trained(stopped, undisturbed, case, name):
    """After the step under way, or the first one after an evaluation; what goes on from there ends where it would have ended."""
    done, many = stopped[case], "ranks" in case or "torchrun" in case
    assert done.status == (1 if many else 128 + signal.Signals[name]) and done.seconds < AT_MOST_S  # torchrun's own is always 1
    step = done.last_step(0) + 1
    assert step == 11 if "evaluation" in case else step in (6, 7)
    last = done.log.splitlines()[-1]
    assert last == f"stopped by {name} after step {step}, checkpoint {done.out}/checkpoints/run_step{step:06d}" and last in done.shown
    assert len(re.findall("^Traceback|^error: ", done.errors, re.MULTILINE)) == many  # torchrun's own
    if many:
        assert done.last_step(1) == done.last_step(0)
        assert resumed(done.out) == pytest.approx(undisturbed, abs=1e-5)  # on one rank
    else:
        assert resumed(done.out) == undisturbed


@pytest.mark.parametrize("case", ["compile", "warm-up", "torchrun in warm-up"])
def test_a_signal_before_training_ends_the_run_at_once(stopped, case):
    done = stopped[case]
    assert done.status == (1 if "torchrun" in case else 143) and done.seconds < AT_MOST_S
    assert "step:0/" not in done.log and done.log.splitlines()[-1] == "stopped by SIGTERM"
    assert done.errors.count("\nstopped by SIGTERM\n") == 1 and not (done.out / "checkpoints").exists()


def read_to(process: subprocess.Popen, start: str) -> None:
    """Wait for a line that begins so."""
    assert any(line.startswith(start) for line in process.stdout)


def test_without_checkpoints_a_signal_says_that_nothing_is_kept(tiny_data, tmp_path):
    with started(tmp_path / "out", tiny_data, "--steps=100000", "--epochs=5000") as process:
        read_to(process, "step:10/")
        process.terminate()
        process.communicate(timeout=AT_MOST_S)
    assert process.returncode == 143
    assert re.fullmatch(r"stopped by SIGTERM after step \d+, without a checkpoint \(see --checkpoint\)",
                        (tmp_path / "out/run.txt").read_text().splitlines()[-1])


def test_a_second_signal_does_not_wait_for_the_step(tiny_data, tmp_path):
    fault = 'before("train_step", in_step_5, 0, lambda trainer: time.sleep(100))'
    with started(tmp_path / "out", tiny_data, "--checkpoint", fault=fault) as process:
        read_to(process, "fault at")
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGINT)
        assert "\nstopped by SIGTERM\n" in process.communicate(timeout=10)[1] and process.returncode == 143


# ---- kills ----------------------------------------------------------------------------------------------------------------

def test_kills_at_random_moments_lose_nothing(capfd):
    assert chaos.main(["--kills=3", "--seed=1"]) == 0, capfd.readouterr().err
    assert "equal bit for bit" in capfd.readouterr().out
