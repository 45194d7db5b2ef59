"""The n-gram table: addresses, sharding, exchange and row-sparse Adam against slow references over the whole table."""
from __future__ import annotations

import math
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from conftest import ROOT, TINY, on_ranks, write_shard
from train_gpt import (Batch, Config, NgramTable, TableLoops, UserError, World, channel_bounds, join_world,
                       ngram_addresses,
                       parse_args, sign_pool, sort_unique, zeros_where_touched)

ROW = {2: [36313, 27191], 3: [17351, 60961, 45259]}
SIGN = {2: [48271, 30011], 3: [58699, 39779, 26801]}


# ---- addressing -----------------------------------------------------------------------------------------------------

def slow_addresses(tokens, starts, num_rows, orders, num_signs, row_factors=ROW, sign_factors=SIGN):
    """The rule of the design in plain Python integers."""
    rows, signs = [], []
    for c, order in enumerate(orders):
        low, high = c * num_rows // len(orders), (c + 1) * num_rows // len(orders)
        rows.append([]), signs.append([])
        for t in range(len(tokens)):
            history = [tokens[t]]
            while len(history) < order and t - len(history) >= 0 and not starts[t - len(history) + 1]:
                history.append(tokens[t - len(history)])
            if len(history) < order:
                rows[c].append(high - 1), signs[c].append(0)
                continue
            row_hash = sign_hash = 0
            for token, m, s in zip(history, row_factors[order], sign_factors[order]):
                row_hash, sign_hash = row_hash ^ m * token, sign_hash ^ s * token
            rows[c].append(low + row_hash % (high - low - 1))
            signs[c].append(sign_hash % num_signs if num_signs else 0)
    return rows, signs


@pytest.mark.parametrize("seed", range(30))
def test_addresses_equal_the_slow_rule(seed):
    rng = np.random.default_rng(seed)
    orders = [(2, 3), (2,), (3,), (3, 2)][seed % 4]
    num_rows = int(rng.choice([2 * len(orders), 7, 1000, 251_520, 84_602_880, 2**31 - 1]))
    num_signs = int(rng.choice([0, 1, 8192]))
    length = int(rng.integers(1, 80))
    tokens = rng.integers(0, rng.choice([3, 256, 65_536]), length)
    starts = rng.random(length) < rng.choice([0.0, 0.1, 0.9])
    config = Config(ngram_rows=num_rows, ngram_orders=orders, ngram_signs=num_signs)
    rows, signs = ngram_addresses(torch.from_numpy(tokens), torch.from_numpy(starts), config)
    expected_rows, expected_signs = slow_addresses(tokens.tolist(), starts.tolist(), num_rows, orders, num_signs)
    assert rows.dtype == signs.dtype == torch.int64
    assert rows.tolist() == expected_rows and signs.tolist() == expected_signs
    for (low, high), row in zip(channel_bounds(config), rows):
        assert low <= row.min() and row.max() < high


def test_known_addresses():
    """36313 * 65535 overflows 32 bits; the true remainder is 194908."""
    config = Config(ngram_rows=251_520, ngram_orders=(2,))
    tokens, starts = torch.tensor([65535, 65535]), torch.tensor([True, False])
    rows, _ = ngram_addresses(tokens, starts, config)
    assert rows.tolist() == [[251_519, 194_908]]


def test_addresses_do_not_change_their_arguments_and_take_no_tokens():
    tokens, starts = torch.tensor([5, 6, 7]), torch.tensor([False, False, True])
    ngram_addresses(tokens, starts, Config())
    assert tokens.tolist() == [5, 6, 7] and starts.tolist() == [False, False, True]
    rows, signs = ngram_addresses(tokens[:0], starts[:0], Config())
    assert rows.shape == signs.shape == (2, 0)


def test_order_matters_to_rows_and_signs():
    rows, signs = ngram_addresses(torch.tensor([3, 9, 3]), torch.zeros(3, dtype=torch.bool), Config(ngram_rows=100_000))
    assert rows[0, 1] != rows[0, 2] and signs[0, 1] != signs[0, 2]


def test_split_gives_each_order_its_share():
    config = Config(ngram_rows=1000, ngram_split=(1, 3))
    assert channel_bounds(config) == [(0, 250), (250, 1000)]


@pytest.mark.parametrize("rows, orders", [(3, (2, 3)), (1, (2,)), (2**31, (2, 3))])
def test_tables_that_cannot_be_addressed_are_refused(rows, orders):
    with pytest.raises(UserError, match="--ngram_rows"):
        Config(ngram_rows=rows, ngram_orders=orders)


@pytest.mark.parametrize("seed", range(5))
def test_sort_unique_equals_numpy(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, rng.choice([1, 10, 2**31 - 1]), int(rng.integers(0, 500)))
    unique, slots = sort_unique(ids)
    expected, inverse = np.unique(ids, return_inverse=True)
    assert np.array_equal(unique, expected) and np.array_equal(slots, inverse)


# ---- sign pool and storage -------------------------------------------------------------------------------------------

def pool_of(config, world):
    return sign_pool(config, torch.float32).numpy()


def test_sign_pool_is_the_same_everywhere():
    pool = sign_pool(parse_args(["--device=cpu"]), torch.float32)
    assert set(pool.unique().tolist()) == {-1.0, 1.0} and pool.shape == (8192, 128)
    assert abs(pool.mean()) < 0.01 and abs((pool[:-1] * pool[1:]).mean()) < 0.01
    for other in on_ranks(2, pool_of, flags=["--device=cpu", "--seed=5"]):
        assert np.array_equal(other, pool.numpy())
    assert torch.equal(sign_pool(Config(ngram_signs=0), torch.float32), torch.ones(1, 128))


@pytest.mark.parametrize("shape, dtype", [((84_602_880, 768), torch.bfloat16), ((2**31 - 1, 2), torch.float32)])
def test_storage_beyond_the_machine_reads_and_writes_its_last_row(shape, dtype):
    before = resident_bytes()
    rows = zeros_where_touched(shape, dtype, torch.device("cpu"))
    assert rows.numel() > 2**31 and not rows[-1].any() and not rows[shape[0] // 2].any()
    ids = torch.tensor([0, shape[0] - 1])
    rows.index_copy_(0, ids, torch.ones(2, shape[1], dtype=dtype))
    assert torch.equal(rows.index_select(0, ids), torch.ones(2, shape[1], dtype=dtype)) and not rows[-2].any()
    assert resident_bytes() - before < 50e6


def resident_bytes() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()


# ---- update against the eager rule over the whole table --------------------------------------------------------------

BETA2, WD, EPS = 0.95, 0.014, 1e-10
SEQ, ROWS_A_STEP = 8, 8


def make_steps(kind: str, steps: int, seed: int):
    """Per step: tokens [ROWS_A_STEP, SEQ], starts, d loss / d e [ROWS_A_STEP, SEQ, dim], lr; with gaps and repeats."""
    rng = np.random.default_rng(seed)
    result = []
    for step in range(steps):
        vocabulary = {"equal": 1, "gaps": 3, "mixed": 40}[kind]
        tokens = rng.integers(0, vocabulary, (ROWS_A_STEP, SEQ))
        if kind == "gaps" and step not in (0, 1, 49):
            tokens += 100 + 7 * step  # the first n-grams are touched at updates 1, 2 and 50 alone
        starts = rng.random((ROWS_A_STEP, SEQ)) < 0.1
        starts[:, 0] = True
        result.append((tokens, starts, rng.standard_normal((ROWS_A_STEP, SEQ, 6)).astype(np.float32), 0.5 * 0.99**step))
    return result


def eager_table(num_rows: int, steps, update_every: int, signs: int):
    """Dense gradients by autograd, and the rule applied to every row at every update, in float64."""
    config = Config(ngram_rows=num_rows, ngram_dim=6, ngram_signs=signs)
    pool = sign_pool(config, torch.float64)
    table = torch.zeros(num_rows, 6, dtype=torch.float64)
    second = torch.zeros(num_rows, 1, dtype=torch.float64)
    update = 0
    for first in range(0, len(steps), update_every):
        leaf = table.clone().requires_grad_()
        cycle = steps[first:first + update_every]
        for tokens, starts, grad, lr in cycle:
            rows, sign = slow_addresses(tokens.ravel().tolist(), starts.ravel().tolist(), num_rows, (2, 3), signs)
            read = sum(leaf[torch.tensor(r)] * pool[torch.tensor(s)] for r, s in zip(rows, sign))
            (read * torch.from_numpy(grad).view(-1, 6).double()).sum().backward()
        update, g = update + 1, leaf.grad
        second = BETA2 * second + (1 - BETA2) * g.square().mean(1, keepdim=True)
        u = cycle[-1][3] * math.sqrt(1 - BETA2**update) * g / (second.sqrt() + EPS)
        table = table - torch.where(u * table > 0, u + cycle[-1][3] * WD * table, u)
    return table, second.squeeze(1)


def table_of(config: Config, world: World, compiled: bool = True) -> NgramTable:
    """With its compiled loops, or as where there is no compiler."""
    table = NgramTable(config, world)
    assert table.loops or not shutil.which("c++"), table.slow_because
    if not compiled:
        table.loops = None
    return table


def sharded_table(config: Config, world: World, steps, message_bytes: int, compiled: bool):
    """Run the real table over the steps, each rank with its rows of each step; returns this rank's shard and state."""
    table = table_of(config, world, compiled)
    table.max_message_bytes, table.block = message_bytes, 16  # several blocks a step
    reads = []
    low, high = world.part(ROWS_A_STEP)
    for first in range(0, len(steps), config.ngram_update_every):
        cycle_steps = steps[first:first + config.ngram_update_every]
        batches = [Batch(torch.from_numpy(tokens[low:high])[None], None, torch.from_numpy(starts[low:high])[None])
                   for tokens, starts, _, _ in cycle_steps]
        cycle = table.plan(batches, world.loader_group)
        fetched = table.fetch(cycle)
        grads = torch.full((cycle.asked, config.ngram_dim), torch.nan)
        for i, (_, _, grad, lr) in enumerate(cycle_steps):
            reads.append(table.read(fetched, cycle.reads[i], cycle.signs[i]).double().sum().item())
            table.add_grad(grads, cycle.slots[i], cycle.signs[i], torch.from_numpy(grad[low:high]).flatten(0, 1),
                           i == 0)
        table.update(cycle, grads, lr)
    return table.rows.float().numpy(), table.second.numpy(), table.last.numpy(), reads


def table_flags(num_rows=1003, update_every=1, dtype="float32", signs=64) -> list[str]:
    return ["--device=cpu", f"--ngram_rows={num_rows}", "--ngram_dim=6", f"--ngram_signs={signs}",
            f"--ngram_dtype={dtype}",
            f"--ngram_update_every={update_every}"]


def run_sharded(_, world, runs):
    """One result (this rank's part of it) for each (flags, steps, message_bytes, compiled)."""
    return [sharded_table(parse_args(flags), world, *run) for flags, *run in runs]


def on_world(world_size, runs) -> list:
    """For each run the whole table: rows, second moments, last updates."""
    if world_size == 1:
        with join_world(parse_args(["--device=cpu"])) as world:
            ranks = [run_sharded(None, world, runs)]
    else:
        ranks = on_ranks(world_size, run_sharded, runs, flags=["--device=cpu"])
    return [tuple(np.concatenate(parts) for parts in list(zip(*shards))[:3]) for shards in zip(*ranks)]


WHOLE = 1 << 30  # bytes of a message
CASES = {
    "200 updates with repeats and decay": ("mixed", 200, dict()),
    "touched at updates 1, 2 and 50": ("gaps", 60, dict(num_rows=5000)),
    "fewer rows than ranks": ("mixed", 30, dict(num_rows=5)),
    "all tokens equal, most owners idle": ("equal", 20, dict(num_rows=997)),
    "two steps an update": ("mixed", 50, dict(update_every=2)),
    "four steps an update, the last cycle short": ("mixed", 50, dict(update_every=4)),
    "no signs": ("mixed", 20, dict(signs=0)),
}


@pytest.fixture(scope="module")
def results():
    """(world size, whether loops are compiled) -> case -> whole table; each world is started once."""
    found = {}
    for size, ways in {1: (True, False), 2: (True,), 3: (True, False), 5: (True,)}.items():
        runs = [(table_flags(**flags), make_steps(kind, steps, seed=7), WHOLE, compiled)
                for compiled in ways for kind, steps, flags in CASES.values()]
        tables = iter(on_world(size, runs))
        found |= {(size, compiled): dict(zip(CASES, tables)) for compiled in ways}
    return found


@pytest.fixture(scope="module")
def expected():
    return {case: eager_table(flags.get("num_rows", 1003), make_steps(kind, steps, seed=7),
                              flags.get("update_every", 1),
                              flags.get("signs", 64)) for case, (kind, steps, flags) in CASES.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size, compiled", [(1, True), (2, True), (3, True), (5, True), (1, False), (3, False)])
def test_sharded_table_equals_the_eager_rule(results, expected, case, world_size, compiled):
    rows, second, last = results[world_size, compiled][case]
    table, eager_second = expected[case]
    assert np.abs(table.numpy()).max() > 0.1
    np.testing.assert_allclose(rows, table, rtol=2e-4, atol=2e-5)
    touched = last > 0
    assert touched.any() and not rows[~touched].any() and not second[~touched].any()
    # What an idle row's moment owes is paid when the row is touched again: pay it here to compare with the eager one.
    owed = BETA2 ** (last.max() - last[touched])
    np.testing.assert_allclose(second[touched] * owed, eager_second[torch.from_numpy(touched)], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_world_sizes_agree(results, case, world_size):
    for ours, one in zip(results[world_size, True][case], results[1, True][case]):
        np.testing.assert_allclose(ours, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_bf16_rows_round_the_float32_rule_and_repeat_bit_for_bit(compiled):
    short, longer = make_steps("mixed", 1, seed=3), make_steps("mixed", 50, seed=3)
    flags = table_flags(dtype="bfloat16")
    once, first, again = on_world(1, [(flags, steps, WHOLE, compiled) for steps in (short, longer, longer)])
    exact, _ = eager_table(1003, short, 1, 64)
    assert np.array_equal(once[0], exact.float().bfloat16().float().numpy())
    assert all(np.array_equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_long_second_moment_keeps_its_digits(compiled):
    """1 - beta2 and the powers of beta2 in double: rounded to float32 first, they would be off by 1e-3 here."""
    beta2, generator = 0.99999, torch.Generator().manual_seed(0)
    config = parse_args([*table_flags(), f"--ngram_beta2={beta2}"])
    second = torch.zeros(1003, dtype=torch.float64)
    with join_world(config) as world:
        table = table_of(config, world, compiled)
        for update in (1, 2, 3, 4, 5, 2000, 2001):
            ids = torch.randperm(1003, generator=generator)[:1003 if update == 2001 else 500].sort().values
            grads = torch.randn(len(ids), 6, generator=generator)
            second *= beta2 ** (update - (table.updates or update))
            table.updates = update
            table.update_rows(ids, grads, update, 0.1)
            second[ids] += (1 - beta2) * grads.double().square().mean(1)
        torch.testing.assert_close(table.second.double(), second, rtol=1e-6, atol=0)


# ---- the compiled loops ----------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A function that puts a c++ before the real one, which it is with one more option."""
    def put(option: str) -> None:
        folder = tmp_path / option
        folder.mkdir()
        (folder / "c++").write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@" {option}\n')
        (folder / "c++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return put


@needs_compiler
def test_a_library_serves_one_source_type_option_and_processor_alone(compiler, monkeypatch):
    """Options and processor show in what the compiler defines: another definition, another library."""
    def name(dtype="float32"):
        return Path(TableLoops(dtype).library._name)
    plain, made = name(), []
    assert name() == plain
    before = plain.stat().st_mtime_ns
    made += [name("bfloat16")]
    compiler("-D__ANOTHER_FEATURE__=1")
    made += [name()]
    monkeypatch.undo()
    monkeypatch.setattr(train_gpt, "TABLE_LOOPS", train_gpt.TABLE_LOOPS + "// changed\n")
    made += [name()]
    assert len({plain, *made}) == 4 and plain.stat().st_mtime_ns == before
    assert not list(plain.parent.glob("*.part"))
    for path in made[1:]:
        path.unlink()


@needs_compiler
def test_a_compiler_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(train_gpt, "TABLE_LOOPS", "int main( {")
    with join_world(parse_args(table_flags())) as world:
        table = NgramTable(parse_args(table_flags()), world)
    assert table.loops is None and re.match("c[+][+] failed: .*error: ", table.slow_because)


def test_without_a_compiler_the_run_continues_and_says_so(monkeypatch, tmp_path, tiny_data):
    flags = [*TINY, f"--data={tiny_data}", f"--out={tmp_path}", "--ngram_dtype=float32"]
    fast = train_gpt.main(flags)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert train_gpt.main([*flags, "--run_id=slow"]) == pytest.approx(fast, abs=1e-5)
    line = r"^the table.s loops are not compiled \(there is no C\+\+ compiler, `c\+\+`\)"
    assert re.search(line, (tmp_path / "slow.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [1, 6, 37, 128])
def test_loops_read_and_sum_as_the_tensor_operations_do(dtype, dim):
    """Bit for bit where the order of summation is the same: rows, signs of many magnitudes, NaN among them."""
    generator = torch.Generator().manual_seed(dim)
    rows, signs = (torch.randint(0, high, (1, 2, 300), generator=generator) for high in (500, 8192))
    grad, results = torch.randn(300, dim, generator=generator), []
    values = torch.randn(1003, dim, generator=generator)
    values *= 10.0 ** torch.randint(-30, 30, (1003, 1), generator=generator)
    values[8, 0] = torch.nan
    config = parse_args([*table_flags(dtype=dtype, signs=8192), f"--ngram_dim={dim}"])
    for compiled in (True, False):
        with join_world(config) as world:
            table = table_of(config, world, compiled)
            table.rows.copy_(values)
            cycle, grads = table.route(rows, signs), torch.full((len(rows.unique()), dim), torch.nan)
            read = table.read(table.fetch(cycle), cycle.reads[0], cycle.signs[0])
            for part in (slice(0, 100), slice(100, 300)):  # two micro-batches
                table.add_grad(grads, cycle.slots[0][:, part], cycle.signs[0][:, part], grad[part],
                               fresh=part.start == 0)
            table.update(cycle, grads, 0.3)
            results.append((read, grads, table.rows.float(), table.second))
    for (ours, plain), tolerance in zip(zip(*results), (0, 0, 1e-2 if dtype == "bfloat16" else 1e-3, 1e-5)):
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=0, equal_nan=True)


def test_sums_do_not_depend_on_the_number_of_threads():
    """Many reads of few rows, long enough for torch's parallel index_add_."""
    config = parse_args(["--device=cpu", "--ngram_rows=1003", "--ngram_dim=64"])
    generator = torch.Generator().manual_seed(0)
    rows, signs = (torch.randint(0, high, (1, 2, 20_000), generator=generator) for high in (400, 8192))
    grad, results = torch.randn(20_000, 64, generator=generator), []
    for compiled in (True, False):
        results.clear()
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            with join_world(config) as world:
                table = table_of(config, world, compiled)
                cycle = table.route(rows, signs)
                grads = torch.empty(cycle.asked, 64)
                table.add_grad(grads, cycle.slots[0], cycle.signs[0], grad, fresh=True)
                results.append(grads)
        assert all(torch.equal(results[0], other) for other in results[1:])
    torch.set_num_threads(1)


def test_large_exchanges_go_in_pieces_and_change_nothing():
    steps = make_steps("mixed", 10, seed=5)
    whole, pieces = on_world(2, [(table_flags(), steps, size, True) for size in (WHOLE, 500)])
    assert all(np.array_equal(a, b) for a, b in zip(whole, pieces))


def test_untouched_rows_stay_bit_identical():
    config = parse_args(["--device=cpu", "--ngram_rows=1003", "--ngram_dim=6"])
    with join_world(config) as world:
        table = NgramTable(config, world)
        table.rows.normal_(generator=torch.Generator().manual_seed(0))
        before = table.rows.clone()
        batch = Batch(torch.randint(0, 9, (1, 2, 16)), None, torch.zeros(1, 2, 16, dtype=torch.bool))
        for _ in range(5):
            cycle = table.plan([batch])
            table.update(cycle, torch.randn(cycle.asked, 6), 0.3)
        touched = torch.zeros(1003, dtype=torch.bool)
        touched[cycle.owned] = True
        assert torch.equal(before[~touched], table.rows[~touched])
        assert (before[touched] != table.rows[touched]).any(1).all()
        assert (table.last[touched] == 5).all() and not table.last[~touched].any() and not table.second[~touched].any()


def test_forgotten_rows_are_as_before_the_first_update():
    config = parse_args(table_flags())
    with join_world(config) as world:
        table = NgramTable(config, world)
        batch = Batch(torch.randint(0, 9, (1, 2, 16)), None, torch.zeros(1, 2, 16, dtype=torch.bool))
        cycle = table.plan([batch])
        table.update(cycle, torch.randn(cycle.asked, 6), 0.3)
        assert table.updates == 1 and table.rows.any() and table.second.any() and table.last.any()
        table.forget(cycle.owned)
    assert table.updates == 0 and not table.rows.any() and not table.second.any() and not table.last.any()


# ---- cost ------------------------------------------------------------------------------------------------------------

class LargestResult(TorchDispatchMode):
    """Remembers the largest tensor that any operation made anew, that is, in a storage other than the ones given."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.largest = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, t.numel())
        return result


def test_a_step_makes_nothing_of_the_tables_size():
    config = parse_args(["--device=cpu", "--ngram_rows=3000000", "--ngram_dim=8", "--ngram_signs=16"])
    with join_world(config) as world:
        table = NgramTable(config, world)
        batch = Batch(torch.randint(0, 900, (1, 4, 32)), None, torch.zeros(1, 4, 32, dtype=torch.bool))
        with LargestResult(table.rows, table.second, table.last) as watch:
            cycle = table.plan([batch])
            read = table.read(table.fetch(cycle), cycle.reads[0], cycle.signs[0])
            grads = torch.empty(cycle.asked, 8)
            table.add_grad(grads, cycle.slots[0], cycle.signs[0], read, fresh=True)
            table.update(cycle, grads, 0.1)
            table.forget(cycle.owned)
        assert 0 < watch.largest <= 2 * 128 * 8 * 2


def test_full_size_table_trains_in_little_memory(tmp_path):
    """84,602,880 x 768 rows are 121 GiB of addresses; 4 steps of it run in less than 3 GiB."""
    tokens = np.random.default_rng(0).integers(0, 5000, 60_000)
    write_shard(tmp_path / "r_train_1.bin", tokens, 5001, 5000)
    write_shard(tmp_path / "r_val_0.bin", tokens[:2000], 5001, 5000)
    script = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
loss = train_gpt.main(sys.argv[1:])
print("peak_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    sizes = ["--ngram_rows=84602880", "--model_dim=768", "--heads=6", "--ngram_dim=768", "--layers=1", "--steps=4",
             "--batch_tokens=512", "--val_tokens=512", "--val_every=0", "--tie_until=1", "--sample_tokens=0"]
    done = subprocess.run([sys.executable, "-c", script, *TINY, f"--data={tmp_path}", f"--out={tmp_path}", *sizes],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step:4/4 val_loss" in done.stdout
    assert int(re.search(r"peak_bytes (\d+)", done.stdout)[1]) < 3 << 30
