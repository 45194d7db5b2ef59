"""The table in host memory: bit for bit as beside the model, whatever the order in which threads come by."""
from __future__ import annotations

import re
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import train_gpt
from conftest import TINY, main_on_ranks, on_ranks
from staged import Staged
from train_gpt import (Config, InOrder, NgramTable, UserError, World, check_fits, join_world, make_plan, parse_args,
                       plan_lines, staging_buffer,
                       to_device)

FLAGS = ["--device=cpu", "--ngram_rows=1003", "--ngram_dim=6", "--ngram_signs=64"]
PLACES = {"auto": "--ngram_device=auto", "host": "--ngram_device=cpu"}


@pytest.fixture
def tiny(tiny_data, tmp_path):
    return [*TINY, f"--data={tiny_data}", f"--out={tmp_path / 'logs'}"]


# ---- the table alone -------------------------------------------------------------------------------------------------

def walk(config, world: World, count: int, looks_ahead: bool, late_s: float = 0.0, highest: int = 1003,
         compiled: bool = True):
    """Rows and state after `count` cycles, and all that was read; `late_s` holds the host's thread up, now and then.

    Cycles of 40 positions a rank; of their rows, below `highest`, about half come back in the next. On a GPU gradients
    come late.
    """
    table, generator, read = NgramTable(config, world), torch.Generator().manual_seed(world.rank), []
    table.loops = table.loops if compiled else None
    if table.host:
        # many parts
        table.host.staged_rows, table.host.staged_grads = table.host.staged_rows[:7], table.host.staged_grads[:5]
        for name in ("bring", "change"):
            def held_up(*arguments, act=getattr(table.host, name)):
                time.sleep(late_s * float(np.random.random() < 0.3))
                act(*arguments)
            setattr(table.host, name, held_up)
    cycles = []
    for _ in range(count):
        rows = torch.randint(0, highest, (1, 2, 40), generator=generator)
        rows %= torch.randint(2, highest + 1, (1, 2, 1), generator=generator)
        cycles.append(to_device(table.route(rows, torch.randint(0, 64, (1, 2, 40), generator=generator),
                                            world.loader_group), world.device))
    for cycle, upcoming in zip(cycles, [*cycles[1:], None]):
        fetched = table.fetch(cycle)
        if looks_ahead and upcoming:
            table.host.look_ahead(cycle, upcoming)
        read.append(table.read(fetched, cycle.reads[0], cycle.signs[0]))
        grads = torch.randn(cycle.asked, config.ngram_row_dim, generator=generator).to(world.device)
        if world.device.type == "cuda":
            late, grads = grads, torch.zeros_like(grads)
            torch.cuda._sleep(3_000_000)
            grads.copy_(late)
        table.update(cycle, grads, 0.3)
        if len(read) % 7 == 0:  # an evaluation in between reads other rows, and must not disturb what is on its way
            read.append(table.fetch(cycles[0])[cycles[0].reads[0]])
    table.wait()
    return [t.float().cpu().numpy() for t in (table.rows, table.second, table.last, *read)]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_rank_reads_and_updates_the_same(compiled, dtype):
    results = []
    for place, looks_ahead, late_s in (("auto", False, 0), ("host", False, 0), ("host", True, 0),
                                       ("host", True, 0.004)):
        with join_world(parse_args(FLAGS)) as world:
            config = parse_args([*FLAGS, PLACES[place], f"--ngram_dtype={dtype}"])
            results.append(walk(config, world, 40, looks_ahead, late_s, compiled=compiled))
    assert np.abs(results[0][0]).max() > 0.1
    for result in results[1:]:
        assert len(result) == len(results[0]) and all(np.array_equal(ours, theirs) for ours,
                                                      theirs in zip(result, results[0]))


@pytest.mark.parametrize("ranks, highest", [(2, 1003), (3, 300)], ids=["2", "3, two of them without rows"])
def test_ranks_read_and_update_the_same(ranks, highest):
    """Each rank's thread is held up at moments of its own."""
    auto, host = (on_ranks(ranks, walk, 30, place == "host", 0.004, highest, flags=[*FLAGS, PLACES[place]])
                  for place in PLACES)
    for ours, theirs in zip(auto, host, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert [bool(rows[2].any()) for rows in host] == [True, highest == 1003, False][:ranks]


@pytest.fixture
def tables():
    """A table on the host, two cycles that share 20 of their 40 rows, and a call that updates one, gradients all 1."""
    with join_world(parse_args(FLAGS)) as world:
        table = NgramTable(parse_args([*FLAGS, PLACES["host"]]), world)
        numbers = torch.arange(40).expand(1, 2, 40)
        a, b = (table.route(numbers + first, numbers % 64) for first in (0, 20))
        yield table, a, b, lambda cycle: table.update(cycle, torch.ones(cycle.asked, 6), 0.3)


def test_only_what_an_update_changes_is_brought_after_it_and_the_rest_of_it_is_not_waited_for(tables):
    table, a, b, update = tables
    go_on, calls = threading.Event(), []
    for name in ("bring", "change"):
        def noted(of, places, *more, name=name, act=getattr(table.host, name)):
            owned = of.owned if name == "bring" else of
            calls.append((name, owned[places].tolist()))
            if calls[-1] == ("change", list(range(20))):  # rows of a alone
                assert go_on.wait(20)
            act(of, places, *more)
        setattr(table.host, name, noted)
    table.fetch(a)
    table.host.look_ahead(a, b)
    update(a)
    fetched = table.fetch(b)
    assert not go_on.is_set() and torch.equal(fetched,
                                              table.rows[20:60]) and fetched[:20].any() and not table.rows[:20].any()
    go_on.set()
    table.wait()
    assert table.rows[:20].any(1).all()
    assert calls == [("bring", list(range(40))), ("bring", list(range(40, 60))), ("change", list(range(20, 40))),
                     ("bring", list(range(20, 40))),
                     ("change", list(range(20)))]


def test_rows_read_for_another_order_of_cycles_are_dropped(tables):
    """Looked ahead to b behind a; then c is updated, which changes b's rows, or nothing is, or a twice."""
    table, a, b, update = tables
    c = table.route(torch.arange(30, 70).expand(1, 2, 40), torch.zeros(1, 2, 40, dtype=torch.int64))
    for updates in ([a], [c], [], [a, a], [a, c]):
        update(b)
        table.fetch(a)
        table.host.look_ahead(a, b)
        for cycle in updates:
            update(cycle)
        fetched = table.fetch(b)
        table.wait()
        assert torch.equal(fetched, table.rows[b.owned]), len(updates)


def test_gradients_are_let_go_once_they_are_used(tables):
    table, a, b, update = tables
    grads = torch.ones(40, 6)
    gone = weakref.ref(grads)
    table.update(a, grads, 0.3)
    del grads
    table.wait()
    table.host.thread(lambda: None).result()  # the thread lets go of a call when it takes the next
    assert gone() is None


# ---- whole runs ------------------------------------------------------------------------------------------------------

RUNS = {"cycles of two": (["--ngram_update_every=2", "--micro_batch_tokens=384"], Config),
        "stages, float32": (["--ngram_dtype=float32", "--ngram_orders=2,3,4", "--val_every=3"], Staged)}


def last_checkpoint(out):
    tensors = {}
    for path in sorted(out.glob("checkpoints/*_step000020/*.pt")):
        for name, value in torch.load(path).items():
            named = value if isinstance(value, dict) else {"": value}
            tensors |= {f"{path.name} {name} {key}": tensor for key, tensor in named.items()}
    return tensors


@pytest.mark.parametrize("flags, config_class", RUNS.values(), ids=RUNS)
def test_a_run_ends_bit_for_bit_where_it_does_beside_the_model(flags, config_class, tiny, tmp_path):
    losses, results = [], []
    for place, flag in PLACES.items():
        out = tmp_path / place
        train_gpt.main([*tiny, *flags, flag, f"--out={out}", "--run_id=r", "--checkpoint"], config_class)
        losses.append(re.findall(r"^step:\S+ (?:val|train)_loss:\S+|^sample:.*(?:\n  \|.*)*",
                                 (out / "r.txt").read_text(), re.MULTILINE))
        results.append(last_checkpoint(out))
    assert len(losses[0]) > 4 and losses[0] == losses[1]
    assert results[0].keys() == results[1].keys() and any("rows" in name for name in results[0])
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_two_ranks_equal_each_other_and_a_run_resumes_in_the_other_place(tiny, tmp_path):
    """On two ranks with the table on the host; resumed with it beside the model, on one; and the other way round."""
    flags = [*tiny, "--ngram_update_every=2", "--checkpoint_every=5", "--checkpoint_keep=9"]
    ends = {place: main_on_ranks(2, [*flags, flag, f"--out={tmp_path / place}", "--run_id=r"]) for place,
            flag in PLACES.items()}
    logs = [re.findall(r"^step:\S+ \S+_loss:\S+", (tmp_path / place / "r.txt").read_text(), re.MULTILINE)
            for place in PLACES]
    assert len(logs[0]) > 4 and logs[0] == logs[1] and len({*ends["auto"], *ends["host"]}) == 1
    for place, other in (("host", "auto"), ("auto", "cpu")):
        folder = tmp_path / place / "checkpoints" / "r_step000006"
        resumed = train_gpt.main([f"--resume={folder}", f"--ngram_device={other}", f"--out={tmp_path / 'again'}",
                                  f"--run_id={place}"])
        assert resumed == pytest.approx(ends["auto"][0], abs=2e-5)


def test_the_log_tells_what_the_host_costs(tiny, tmp_path):
    for place, flag in PLACES.items():
        train_gpt.main([*tiny, flag, f"--run_id={place}"])
    found = re.search(r"^waited for rows in host memory (\S+) s \((\S+)% of the time\); the host's thread worked "
                      r"(\S+) s, evaluations included$", (tmp_path / "logs/host.txt").read_text(), re.MULTILINE)
    assert 0 <= float(found[1]) < 60 and 0 <= float(found[2]) < 100 and 0 < float(found[3]) < 60
    assert "host memory" not in (tmp_path / "logs/auto.txt").read_text()


# ---- what can go wrong -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("update", [3, 20])
def test_a_failure_in_the_thread_ends_the_run(update, tiny, tmp_path, monkeypatch):
    """In the middle, and at the last update, behind which no cycle's rows are fetched."""
    def fail(self, ids, grads, number, lr, act=NgramTable.update_rows):
        if number == update:
            raise MemoryError("no more rows")
        act(self, ids, grads, number, lr)
    monkeypatch.setattr(NgramTable, "update_rows", fail)
    monkeypatch.setattr(train_gpt, "WARMUP_STEPS", 0)
    with pytest.raises(MemoryError, match="no more rows"):
        train_gpt.main([*tiny, PLACES["host"], "--run_id=r"])
    log = (tmp_path / "logs/r.txt").read_text()
    assert "error: MemoryError: no more rows" in log and "final step" not in log


def test_what_the_host_still_does_is_on_the_clock(tiny, tmp_path, monkeypatch):
    def slow(self, ids, grads, number, lr, act=NgramTable.update_rows):
        time.sleep(0.4 * (number == 20))
        act(self, ids, grads, number, lr)
    monkeypatch.setattr(NgramTable, "update_rows", slow)
    monkeypatch.setattr(train_gpt, "WARMUP_STEPS", 0)
    train_gpt.main([*tiny, PLACES["host"], "--run_id=r"])
    before, after = (float(re.search(rf"^step:20/20 {kind}_loss:\S+ train_time:(\d+)ms",
                                     (tmp_path / "logs/r.txt").read_text(), re.MULTILINE)[1])
                     for kind in ("train", "val"))
    assert after - before >= 395


def test_calls_follow_each_other_and_stop_at_a_failure():
    calls, done, begun = InOrder("test"), [], threading.Event()
    calls(begun.wait, 5)
    for i in range(3):
        calls(done.append, i)
    assert done == []
    begun.set()
    calls.wait()
    assert done == [0, 1, 2]
    calls(lambda: 1 / 0)
    later = calls(done.append, 3)
    for wait in (later.result, calls.wait):
        with pytest.raises(ZeroDivisionError):
            wait()
    assert done == [0, 1, 2]


def test_page_locked_memory_that_is_not_to_be_had_is_told(monkeypatch):
    if torch.cuda.is_available():
        def refuse(*_, pin_memory, **__):
            raise RuntimeError("CUDA error: out of memory\nand so on")
        monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(UserError,
                       match=r"--ngram_device=cpu: found no page-locked memory \(.+\), expected 32 MiB a buffer"):
        staging_buffer(768, torch.float32, torch.device("cuda"))
    monkeypatch.undo()
    buffer = staging_buffer(768, torch.float32, torch.device("cpu"))
    assert 0 <= (32 << 20) - buffer.nbytes < 768 * 4
    assert staging_buffer(1 << 24, torch.float32, torch.device("cpu")).shape == (1, 1 << 24)


def test_the_plan_holds_host_and_device_apart(monkeypatch):
    rows = 84_602_880 // 8
    plans = {}
    for place, flag in PLACES.items():
        config = parse_args(["--track=fineweb", "--device=cuda", flag, "--ngram_rows=84602880",
                             "--micro_batch_tokens=8192"])
        world = World(0, 8, 8, torch.device("cuda", 0), None, None)
        plans[place] = make_plan(config, world, 50_257, 10**10)
    auto, host = plans["auto"], plans["host"]
    assert auto["table_rows_bytes"] == host["host_table_rows_bytes"] == rows * 768 * 2
    assert auto["table_state_bytes"] == host["host_table_state_bytes"]
    assert "table_rows_bytes" not in host and not any(name.startswith("host_") for name in auto)
    assert host["host_bytes_per_rank"] == sum(host[f"host_{name}_bytes"]
                                              for name in ("table_rows", "table_state", "staging"))
    assert host["host_staging_bytes"] == 64 << 20
    assert "  host bytes per rank   " in "\n".join(plan_lines(host, config, world))
    # what is on its way
    more = sum(host[name] - auto.get(name, 0)
               for name in ("table_cache_bytes", "table_gradients_bytes", "table_parts_bytes"))
    assert 0 < more < 2**31 and auto["bytes_per_rank"] - host["bytes_per_rank"] == rows * (768 * 2 + 8) - more
    memory = {"": 80 << 30, "host_": 10 << 30}
    monkeypatch.setattr(train_gpt, "available_bytes", lambda world, place: memory[place])
    check_fits(auto, world)
    with pytest.raises(UserError, match=r"host memory: found 10.00 GiB .* expected 1\d\.\d\d GiB by the plan, of which "
                                        r"table_rows takes 15.13; lower --ngram_rows"):
        check_fits(host, world)
    memory |= {"": 20 << 30, "host_": 20 << 30}
    check_fits(host, world)
    with pytest.raises(UserError,
                       match="table_rows takes 15.13; lower --ngram_rows, or keep .* --ngram_device=cpu"):
        check_fits(auto, world)
