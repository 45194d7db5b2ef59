"""Rank 0 of 8 trains a small fineweb model on CUDA tensors that have shape, type and device but no memory.

    python tests/fake_cuda.py LIBRARY DATA      LIBRARY is fake_cuda_guard.cpp, compiled; no GPU is needed

Torch's FakeTensorMode refuses what a GPU would refuse, tensors of two devices or types in one operation, and whatever
needs a value from the device, for which the training thread would have to wait: .item(), .tolist(), bool(), nonzero().
The loader's thread works with real tensors, as it does beside a GPU. The fake process group sends nothing: rank 0 is
served as if all ranks asked for the same rows. Prints a line for each case; the last ones have a fault planted, and
print how it was found.
"""
from __future__ import annotations

import ctypes
import sys
import threading

ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL).install()  # before torch first asks whether there is a GPU

from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt

RANKS = 8
FLAGS = ["--track=fineweb", "--device=cuda", f"--data={sys.argv[2]}", "--epochs=99", "--no-compile", "--steps=6",
         "--val_every=0", "--val_tokens=8192", "--batch_tokens=12288", "--micro_batch_tokens=1024", "--seq_len=128",
         "--head_chunk_tokens=512", "--layers=2", "--model_dim=64", "--heads=1", "--ngram_rows=4001"]
MODE = FakeTensorMode(allow_non_fake_inputs=True)


class Idle:
    """A stream or event of a GPU that has nothing to do."""

    def __init__(self, *_, **__): pass
    def synchronize(self): pass
    def wait_event(self, event): pass
    def record(self): pass
    def record_event(self): return self


class SameThread:
    """Calls at once what a thread would be given: a FakeTensorMode serves one thread."""

    def __init__(self, *_, initializer=None, **__):
        if initializer:
            initializer()

    def submit(self, action, *arguments):
        future = Future()
        future.set_result(action(*arguments))
        return future


class Silent:
    """A log that nobody reads."""
    total = 6

    def __getattr__(self, name):
        return lambda *_, **__: None


def real(function):
    """The function as the loader's thread would call it."""
    def call(*arguments):
        with unset_fake_temporarily():
            return function(*arguments)
    return call


def fake(function):
    """The function, whose tensors are fakes, while a Trainer plans its evaluation with real ones."""
    def call(*arguments):
        with MODE:
            return function(*arguments)
    return call


def moved(model, device):
    for module in model.modules():  # a fake parameter cannot take the data of another device
        for name, parameter in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(parameter.detach().to(device))
    return model


def read_on_host(tensor):
    """FakeTensor.tolist, without a fault for host memory: LossReader's loss and no rank that stops, there already."""
    return tolist(tensor) if tensor.is_cuda else [1.0, 0.0]


def gather(out, mine, group=None, async_op=False):
    if isinstance(out, FakeTensor):
        return all_gather(out, mine, group=group, async_op=async_op)
    out.view(RANKS, -1)[:] = mine


def exchange(send, send_counts, recv_counts, pieces, world, group=None):
    if isinstance(send, FakeTensor):
        return exchange_rows(send, send_counts, recv_counts, pieces, world, group)
    return send[:send_counts[0]].repeat(RANKS)


tolist, all_gather, exchange_rows = FakeTensor.tolist, dist.all_gather_single, train_gpt.exchange_rows
NO_GPU = [  # what a CPU build of torch, or the fake process group, does not have
    (torch.Tensor, "pin_memory", lambda tensor: tensor), (torch.Tensor, "record_stream", lambda *_: None),
    (FakeTensor, "tolist", read_on_host), (torch.cuda, "Stream", Idle), (torch.cuda, "Event", Idle),
    (torch.cuda, "current_stream", Idle), (torch.cuda, "set_stream", lambda stream: None),
    (torch.cuda, "synchronize", lambda: None), (torch.cuda, "_lazy_init", lambda: None),
    (dist, "all_gather_single", gather), (dist, "barrier", lambda: None),
    (train_gpt, "exchange_rows", exchange), (train_gpt, "ThreadPoolExecutor", SameThread),
    (train_gpt, "WARMUP_STEPS", 1),
    (train_gpt, "TableLoops", mock.Mock(side_effect=train_gpt.UserError("they need memory"))),
    (train_gpt.GPT, "to", moved), (train_gpt.Trainer, "prepare", real(train_gpt.Trainer.prepare)),
    *((train_gpt, name, fake(getattr(train_gpt, name))) for name in ("build_model", "Optimizer", "rotary_table")),
]


def train(*flags: str, fault=None) -> str:
    """Warm-up and training, as a run does them; a fault must be found in training alone. Returns where the table lies,
    and how often it was updated."""
    config = train_gpt.parse_args([*FLAGS, *flags])
    world = train_gpt.World(0, RANKS, RANKS, torch.device("cuda", 0), None, None)
    with ExitStack() as stack:
        for holder, name, stand_in in NO_GPU:
            stack.enter_context(mock.patch.object(holder, name, stand_in))
        dataset = train_gpt.open_dataset(config)
        trainer = train_gpt.Trainer(config, world, dataset, table_class=fake(train_gpt.NgramTable))
        stack.enter_context(MODE)
        if fault:
            fault(trainer)
        else:
            with mock.patch.object(torch.Tensor, "__float__", lambda tensor: 1.0):  # an evaluation waits for its loss
                trainer.warm_up()
        progress = train_gpt.Progress()
        train_gpt.train(trainer, Silent(), progress, None, train_gpt.StopSignal())
        assert progress.step == config.steps and all(p.is_cuda for p in trainer.model.parameters())
        return f"table on {trainer.table.rows.device.type}, {trainer.table.updates} updates"


def wait_for_the_device(trainer) -> None:
    add_grad = trainer.table.add_grad

    def add_and_wait(grads, slots, signs, read_grad, fresh):
        add_grad(grads, slots, signs, read_grad, fresh)
        read_grad.sum().item()

    trainer.table.add_grad = add_and_wait


def leave_on_the_host(trainer) -> None:
    trainer.rotary = [table.cpu() for table in trainer.rotary]


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(train())
    print(train("--ngram_device=cpu"))
    for fault in (wait_for_the_device, leave_on_the_host):
        try:
            print(f"{fault.__name__}: not found, {train(fault=fault)}")
        except Exception as error:
            print(f"{fault.__name__}: {type(error).__name__}: {error}".splitlines()[0])
        for loader in [thread for thread in threading.enumerate() if isinstance(thread, train_gpt.Loader)]:
            loader.end()  # as join_world does: one that works while Python ends makes it crash
