"""The table in host memory: held, bit for bit, against the table beside the model, whatever the order in which threads come by."""
from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
import torch

import harness
import train_gpt
from conftest import TINY, on_ranks, run_trainer
from harness import InOrder, UserError, World, check_fits, staging_buffer
from train_gpt import NgramTable, join_world, make_plan, parse_args

FLAGS = ["--device=cpu", "--ngram_rows=1003", "--ngram_dim=6", "--ngram_signs=64"]
PLACES = {"auto": "--ngram_device=auto", "host": "--ngram_device=cpu"}


@pytest.fixture
def tiny(tiny_data, tmp_path):
    return [*TINY, f"--data={tiny_data}", f"--out={tmp_path / 'logs'}"]


# ---- the table alone ------------------------------------------------------------------------------------------------------------

def routes(table: NgramTable, world: World, count: int, seed: int):
    """Cycles of one step of 40 tokens a rank; of the rows about half come back in the next cycle."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank)
    for _ in range(count):
        rows = torch.randint(0, 1003, (1, 2, 40), generator=generator) % torch.randint(2, 1004, (1, 2, 1), generator=generator)
        yield table.route(rows, torch.randint(0, 64, (1, 2, 40), generator=generator), world.loader_group)


def walk(config, world: World, count: int, looks_ahead: bool, late_s: float):
    """Rows and state after `count` cycles, and everything that was read; `late_s` holds the host's thread up, now and then."""
    table, generator, read = NgramTable(config, world), torch.Generator().manual_seed(world.rank), []
    if table.host:
        table.host.staged_rows, table.host.staged_grads = table.host.staged_rows[:7], table.host.staged_grads[:5]  # many parts
        for name in ("to_device", "change"):
            def held_up(*arguments, act=getattr(table.host, name)):
                time.sleep(late_s * float(np.random.random() < 0.3))
                act(*arguments)
            setattr(table.host, name, held_up)
    cycles = list(routes(table, world, count, seed=5))
    for cycle, upcoming in zip(cycles, [*cycles[1:], None]):
        fetched = table.fetch(cycle)
        if table.host and upcoming and looks_ahead:
            table.host.look_ahead(cycle, upcoming)
        read.append(table.read(fetched, cycle.reads[0], cycle.signs[0]))
        grads = torch.empty(len(cycle.asked), config.ngram_row_dim)
        table.add_grad(grads, cycle.slots[0], cycle.signs[0], torch.randn(40, config.ngram_row_dim, generator=generator), fresh=True)
        table.update(cycle, grads, 0.3)
        if len(read) % 7 == 0:  # an evaluation in between reads other rows, and must not disturb what is on its way
            read.append(table.fetch(cycles[0])[cycles[0].reads[0]])
    table.settle()
    return [t.float().numpy() for t in (table.rows, table.second, table.last, *read)]


def walk_on_rank(config, world, *arguments):
    return walk(config, world, *arguments)


@pytest.mark.parametrize("kernel", ["--ngram_kernel", "--no_ngram_kernel"])
@pytest.mark.parametrize("more", [[], ["--ngram_dtype=float32", "--ngram_second_moment=element"]], ids=["record", "float32"])
def test_one_rank_reads_and_updates_the_same(kernel, more):
    results = []
    for place, looks_ahead, late_s in (("auto", False, 0), ("host", False, 0), ("host", True, 0), ("host", True, 0.004)):
        with join_world(parse_args(FLAGS)) as world:
            results.append(walk(parse_args([*FLAGS, PLACES[place], kernel, *more]), world, 40, looks_ahead, late_s))
    assert np.abs(results[0][0]).max() > 0.1
    for result in results[1:]:
        assert len(result) == len(results[0]) and all(np.array_equal(ours, theirs) for ours, theirs in zip(result, results[0]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_and_update_the_same(ranks):
    """Each rank's thread is held up at moments of its own."""
    results = [on_ranks(ranks, walk_on_rank, 30, True, late_s, flags=[*FLAGS, PLACES[place]]) for place, late_s in (("auto", 0), ("host", 0.004))]
    for rank in range(ranks):
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(*(result[rank] for result in results), strict=True))


def test_rows_read_for_another_order_of_cycles_are_dropped():
    """Looked ahead to b behind a; then c is updated, which changes b's rows, or nothing is, or a twice."""
    with join_world(parse_args(FLAGS)) as world:
        table = NgramTable(parse_args([*FLAGS, PLACES["host"]]), world)
        numbers = torch.arange(40).expand(1, 2, 40)
        a, b, c = (table.route(numbers + first, numbers % 64) for first in (0, 20, 30))

        def update(cycle):
            table.update(cycle, torch.ones(len(cycle.asked), 6), 0.3)

        def fetch_b():
            return table.fetch(b).clone(), table.rows[b.owned]

        for updates in ([a], [c], [], [a, a], [a, c]):
            update(b)
            table.fetch(a)
            table.host.look_ahead(a, b)
            for cycle in updates:
                update(cycle)
            assert torch.equal(*fetch_b()), [len(cycle.asked) for cycle in updates]


# ---- whole runs -------------------------------------------------------------------------------------------------------------------

RUNS = {"cycles of two": ["--ngram_update_every=2", "--micro_batch_tokens=384"], "engram": [
    "--ngram_heads=2", "--ngram_combine=concat", "--ngram_gate=context", "--ngram_orders=2,3,4"], "elements": [
    "--ngram_second_moment=element", "--ngram_dtype=float32", "--stages=1/2:1/2:8-16:0.7,1:1:16-32:1", "--val_every=3"]}


def last_checkpoint(out):
    tensors = {}
    for path in sorted(out.glob("checkpoints/*_step000020/*.pt")):
        for name, value in torch.load(path).items():
            tensors |= {f"{path.name} {name} {key}": tensor for key, tensor in value.items()} if isinstance(value, dict) else {f"{path.name} {name}": value}
    return tensors


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_a_run_ends_bit_for_bit_where_it_does_beside_the_model(flags, tiny, tmp_path):
    losses, results = [], []
    for place, flag in PLACES.items():
        out = tmp_path / place
        train_gpt.main([*tiny, *flags, flag, f"--out={out}", "--run_id=r", "--checkpoint"])
        losses.append(re.findall(r"^step:\S+ (?:val|train)_loss:\S+|^sample:.*(?:\n  \|.*)*", (out / "r.txt").read_text(), re.MULTILINE))
        results.append(last_checkpoint(out))
    assert len(losses[0]) > 4 and losses[0] == losses[1]
    assert results[0].keys() == results[1].keys() and any("rows" in name for name in results[0])
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_two_ranks_equal_each_other_and_a_run_goes_on_in_the_other_place(tiny, tmp_path):
    """Stopped inside a cycle, on two ranks with the table on the host; resumed with it beside the model, on one."""
    flags = [*tiny, "--ngram_update_every=2", "--checkpoint_every=5", "--checkpoint_keep=9"]
    for place, flag in PLACES.items():
        done = run_trainer(*flags, flag, f"--out={tmp_path / place}", "--run_id=r", ranks=2)
        assert done.returncode == 0, done.stderr
    logs = [re.findall(r"^step:\S+ \S+_loss:\S+", (tmp_path / place / "r.txt").read_text(), re.MULTILINE) for place in PLACES]
    assert len(logs[0]) > 4 and logs[0] == logs[1]
    whole = train_gpt.main([*flags, "--run_id=whole"])
    for place, other in (("host", "auto"), ("auto", "cpu")):
        folder = tmp_path / place / "checkpoints" / "r_step000005"
        resumed = train_gpt.main([f"--resume={folder}", f"--ngram_device={other}", f"--out={tmp_path / 'again'}", f"--run_id={place}"])
        assert resumed == pytest.approx(whole, abs=2e-5)


def test_the_log_tells_what_the_host_costs(tiny, tmp_path):
    for place, flag in PLACES.items():
        train_gpt.main([*tiny, flag, f"--run_id={place}"])
    found = re.search(r"^waited for rows in host memory (\S+) s \((\S+)% of the time\)$", (tmp_path / "logs/host.txt").read_text(), re.MULTILINE)
    assert 0 <= float(found[1]) < 60 and 0 < float(found[2]) < 100
    assert "host memory" not in (tmp_path / "logs/auto.txt").read_text()


# ---- what can go wrong ------------------------------------------------------------------------------------------------------------

def test_a_failure_in_the_thread_ends_the_run(tiny, monkeypatch):
    def fail(self, *arguments):
        raise MemoryError("no more rows")
    monkeypatch.setattr(NgramTable, "update_rows", fail)
    with pytest.raises(MemoryError, match="no more rows"):
        train_gpt.main([*tiny, PLACES["host"]])


def test_calls_follow_each_other_and_stop_at_a_failure():
    calls, done, begun = InOrder("test"), [], threading.Event()
    calls(begun.wait, 5)
    for i in range(3):
        calls(done.append, i)
    assert done == []
    begun.set()
    calls.settle()
    assert done == [0, 1, 2]
    calls(lambda: 1 / 0)
    later = calls(done.append, 3)
    for wait in (later.result, calls.settle):
        with pytest.raises(ZeroDivisionError):
            wait()
    assert done == [0, 1, 2]


def test_page_locked_memory_that_is_not_to_be_had_is_told():
    with pytest.raises(UserError, match=r"--ngram_device=cpu: found no page-locked memory \(.+\), expected 32 MiB a buffer, two a rank; raise"):
        staging_buffer(768, torch.float32, torch.device("cuda"))
    buffer = staging_buffer(768, torch.float32, torch.device("cpu"))
    assert 0 <= (32 << 20) - buffer.nbytes < 768 * 4 and staging_buffer(1 << 24, torch.float32, torch.device("cpu")).shape == (1, 1 << 24)


def test_the_plan_holds_host_and_device_apart(monkeypatch):
    rows = 84_602_880 // 8
    plans = {}
    for place, flag in PLACES.items():
        config = parse_args(["--track=fineweb", "--device=cuda", flag, "--ngram_rows=84602880", "--micro_batch_tokens=8192"])
        world = World(0, 8, 8, torch.device("cuda", 0), None, None)
        plans[place] = make_plan(config, world, 50_257, 10**10)
    auto, host = plans["auto"], plans["host"]
    assert auto["table_rows_bytes"] == host["host_table_rows_bytes"] == rows * 768 * 2 and auto["table_state_bytes"] == host["host_table_state_bytes"]
    assert "table_rows_bytes" not in host and not any(name.startswith("host_") for name in auto)
    assert host["host_bytes_per_rank"] == host["host_table_rows_bytes"] + host["host_table_state_bytes"] + (64 << 20)
    more = sum(host[name] - auto[name] for name in ("table_cache_bytes", "table_gradients_bytes"))  # of the cycle that is on its way
    assert 0 < more < 2**31 and auto["bytes_per_rank"] - host["bytes_per_rank"] == rows * (768 * 2 + 8) - more
    memory = {"": 80 << 30, "host_": 10 << 30}
    monkeypatch.setattr(harness, "available_bytes", lambda world, place: memory[place])
    check_fits(auto, world)
    with pytest.raises(UserError, match=r"host memory: found 10.00 GiB .* expected 15\.\d\d GiB by the plan, of which table_rows takes 15.13; lower --ngram_rows"):
        check_fits(host, world)
    memory |= {"": 20 << 30, "host_": 20 << 30}
    check_fits(host, world)
    with pytest.raises(UserError, match="of which table_rows takes 15.13; lower --ngram_rows, or keep the table in host memory with --ngram_device=cpu"):
        check_fits(auto, world)


def test_a_place_that_is_none_is_refused():
    with pytest.raises(UserError, match="--ngram_device: found 'disk', expected auto or cpu"):
        parse_args(["--device=cpu", "--ngram_device=disk"])
