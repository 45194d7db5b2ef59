"""The n-gram table in host memory beside the device that trains (--ngram_device=cpu): rows are brought ahead, and updated where they lie.

It decides no number of a run: what the device reads is, bit for bit, what it would read from a table of its own. `table` is
train_gpt.py's NgramTable and `cycle` its Cycle, handed in.
"""
from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness import STAGING_BYTES, UserError


def staging_buffer(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, columns] of host memory, at most STAGING_BYTES or a row; page-locked for a GPU, which then reads and writes it by itself."""
    shape = max(1, STAGING_BYTES // (columns * dtype.itemsize)), columns
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype)
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise UserError(f"--ngram_device=cpu: found no page-locked memory ({str(error).splitlines()[0]}), expected {STAGING_BYTES >> 20} MiB a "
                        f"buffer, two a rank; raise the limit on locked memory (`ulimit -l`, or the container's), or leave the table on the GPU") from None


class InOrder:
    """One thread for calls that must follow each other. After a call that failed none is made, and whoever waits for one is told why."""

    def __init__(self, name: str, prepare=None):
        self.pool, self.latest = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=prepare), None
        self.worked_s = 0.0

    def __call__(self, action, *arguments) -> Future:
        before = self.latest

        def act():
            if before:
                before.result()
            began = time.perf_counter()
            action(*arguments)
            self.worked_s += time.perf_counter() - began

        self.latest = self.pool.submit(act)
        return self.latest

    def settle(self) -> None:
        """Wait for all calls so far."""
        if self.latest:
            self.latest.result()


@dataclass
class Ahead:
    """A cycle's rows on their way to the device. `rows`, `late` and `changing` are the host thread's until `ready` is done."""
    owned: np.ndarray  # int64 [u], the cycle's
    before: np.ndarray | None = None  # `owned` of the cycle whose update comes first, where somebody looked ahead
    late: np.ndarray | None = None  # places in `owned` of the rows that this update changes
    pending: bool = True  # whether these are still to be brought
    changing: np.ndarray | None = None  # places of the same rows in `before`
    rows: Tensor | None = None  # [u, dim] on the device
    ready: Future | None = None


class HostRows:
    """The way between a table in host memory and the device that trains: one thread, which does everything in order.

    While a cycle computes, the rows of the next that it leaves alone go to the device. When its gradients come back, the rows that both
    read are updated first, and follow; the others are updated beside the next cycle's computing. So no row is read before its update. All
    passes through two page-locked buffers, and each row lies with the one rank that owns it.
    """

    def __init__(self, table):
        self.table, self.device, dim = table, table.world.device, table.rows.shape[1]
        self.staged_rows = staging_buffer(dim, table.rows.dtype, self.device)
        self.staged_grads = staging_buffer(dim, torch.float32, self.device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.thread = InOrder("host rows", lambda: self.stream and torch.cuda.set_stream(self.stream))
        self.ahead = None

    def look_ahead(self, current, upcoming) -> None:
        """Begin to bring the rows of the cycle that follows the current one's update."""
        ahead, changed = Ahead(upcoming.owned, current.owned), current.owned

        def bring_early():
            _, ahead.late, ahead.changing = np.intersect1d(ahead.owned, changed, assume_unique=True, return_indices=True)
            self.bring(ahead, np.delete(np.arange(len(ahead.owned)), ahead.late))

        self.ahead, ahead.ready = ahead, self.thread(bring_early)

    def fetch(self, cycle, waiting: AbstractContextManager) -> Tensor:
        """[u, dim] on the device: the cycle's `owned` rows as the last update left them."""
        ahead = self.ahead
        if ahead and ahead.owned is cycle.owned:
            self.ahead = None
        else:  # nobody looked ahead
            ahead = Ahead(cycle.owned, late=np.arange(len(cycle.owned)))
        if ahead.pending:
            ahead.ready = self.thread(lambda: self.bring(ahead, ahead.late))
        with waiting:
            ahead.ready.result()
        if self.stream:
            ahead.rows.record_stream(torch.cuda.current_stream())
        return ahead.rows

    def update(self, owned: np.ndarray, grads: Tensor, update: int, lr: float) -> None:
        """Begin to update the rows `owned` with the gradients of their losses, float32 [u, dim] on the device."""
        ahead = self.ahead
        if ahead and not (ahead.pending and ahead.before is owned):  # what was brought is stale now
            ahead = self.ahead = None
        done = self.stream and torch.cuda.current_stream().record_event()

        def update_shared():
            self.change(owned, ahead.changing, grads, done, update, lr)
            self.bring(ahead, ahead.late)

        def update_others():
            places = np.arange(len(owned))
            self.change(owned, np.delete(places, ahead.changing) if ahead else places, grads, done, update, lr)

        if ahead:
            ahead.pending, ahead.ready = False, self.thread(update_shared)
        self.thread(update_others)

    def bring(self, ahead: Ahead, places: np.ndarray) -> None:
        """Copy the rows at these places of `owned` to the device. In the thread; they are there when it returns."""
        if ahead.rows is None:  # of few sizes, so that the allocator finds a block of its own again
            size, step = len(ahead.owned), 1 << max(0, len(ahead.owned).bit_length() - 4)
            ahead.rows = self.staged_rows.new_empty(-(-size // step) * step, self.staged_rows.shape[1], device=self.device)[:size]
        for part in torch.from_numpy(places).split(len(self.staged_rows)):
            ids = torch.from_numpy(ahead.owned)[part]
            rows = torch.index_select(self.table.rows, 0, ids, out=self.staged_rows[:len(part)])
            ahead.rows.index_copy_(0, part.to(self.device), rows.to(self.device))
        if self.stream:
            self.stream.synchronize()

    def change(self, owned: np.ndarray, places: np.ndarray, grads: Tensor, done: torch.cuda.Event | None, update: int, lr: float) -> None:
        """Update the rows at these places of `owned` once `grads` are `done`. In the thread."""
        if self.stream:
            self.stream.wait_event(done)
        for part in torch.from_numpy(places).split(len(self.staged_grads)):
            part_grads = self.staged_grads[:len(part)].copy_(grads.index_select(0, part.to(self.device)))
            self.table.update_rows(torch.from_numpy(owned)[part], part_grads, update, lr)
