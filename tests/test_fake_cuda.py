"""What a GPU would refuse or wait for, found without one; and that no graph is compiled once the clock runs."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

import train_gpt
from conftest import ROOT, TINY, markov_tokens, write_shard

TORCH = Path(torch.__file__).parent
HOOKS = TORCH / "include/ATen/detail/CUDAHooksInterface.h"
BUILD = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", ROOT / "tests/fake_cuda_guard.cpp",
         f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA: tests/test_gpu.py is for it")
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler, `c++`")
@pytest.mark.skipif(not HOOKS.exists(), reason="this torch has no headers")
def test_a_rank_of_8_mixes_no_devices_and_never_waits_for_its_gpu(tmp_path):
    """Shapes, types and devices of a whole run, with the table on the GPU and in host memory; see fake_cuda.py.

    The two faults that are planted must be found: a value read from the device, and a tensor left on the host.
    """
    for name, seed in (("t_train_000001.bin", 2), ("t_val_000000.bin", 4)):
        write_shard(tmp_path / name, markov_tokens(20_000, seed))
    subprocess.run([*BUILD, "-o", tmp_path / "guard.so"], check=True)
    done = subprocess.run([sys.executable, ROOT / "tests/fake_cuda.py", tmp_path / "guard.so", tmp_path], timeout=120,
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    on_gpu, in_host_memory, waits, mixes = done.stdout.splitlines()
    assert on_gpu == "table on cuda, 3 updates" and in_host_memory == "table on cpu, 3 updates"
    assert waits.startswith("wait_for_the_device: DataDependentOutputException: aten._local_scalar_dense")
    assert mixes.startswith("leave_on_the_host: FakeTensorDeviceMismatchError: ")


@dataclass(frozen=True)
class TwoStages(train_gpt.Config):
    """The batch, the windows and the length change half way; the head parts from the embedding later."""
    stages: tuple = (dict(until=0.5, batch=0.5, windows=(8, 16), length=16), dict(until=1.0, windows=(16, 32)))
    skips: bool = True


class Lines(list):
    """A log as a list."""
    total = 20

    def line(self, text, screen=True):
        self.append(text)

    def step(self, step, train_time_s, key, loss, *_):
        self.append(f"{key} {step}")

    def progress(self, *_):
        pass


def test_all_graphs_are_compiled_in_the_warm_up(tiny_data):
    """Counts graphs as torch.compile cuts them (which no backend changes; "eager" runs them uncompiled, in no time).

    All are there after the warm-up; 20 steps through two stages and a head that parts from the embedding, and the
    evaluations between, add none. On the CPU: flex_attention's masks, which only a GPU has, are not among them.
    """
    flags = [*TINY, f"--data={tiny_data}", "--compile", "--tie_until=0.8", "--val_every=4"]
    config, compiler = train_gpt.parse_args(flags, TwoStages), torch.compile
    torch._dynamo.reset()
    before = train_gpt.compiled_graphs()
    with train_gpt.join_world(config) as world, \
            mock.patch.object(torch, "compile", lambda *_, **options: compiler(*_, backend="eager", **options)):
        trainer, log = train_gpt.Trainer(config, world, train_gpt.open_dataset(config)), Lines()
        trainer.warm_up()
        warm = train_gpt.compiled_graphs()
        train_gpt.train(trainer, log, train_gpt.Progress(), None, train_gpt.StopSignal())
        trainer.evaluate(config.steps)
    assert warm - before == 5  # trained: half a batch, a whole one, and untied; evaluated: tied and untied
    assert train_gpt.compiled_graphs() == warm and not any("compiled on the clock" in line for line in log)
    assert [line for line in log if line.startswith("val_loss")] == [f"val_loss {step}" for step in range(0, 20, 4)]
    torch._dynamo.reset()
