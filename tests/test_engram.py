"""The variant records/studies/2026-11-30_engram_arms/engram.py: several hashes an order, slices instead of sums, gate
by context, chosen blocks, canonical ids, a second moment an element. Each against a slow reference."""
from __future__ import annotations

import base64
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F

import train_gpt
from conftest import DOC_START, ROOT, TINY, VOCAB, markov_tokens, on_ranks, write_shard
from train_gpt import TOKENIZER_FILE, UserError, join_world, make_batch, ngram_addresses

SCRIPT = ROOT / "records" / "studies" / "2026-11-30_engram_arms" / "engram.py"
sys.path.insert(0, str(SCRIPT.parent))
from engram import EngramConfig, EngramGPT, EngramTable, canonical_ids, channel_hash

SLICES = ["--ngram_heads=2", "--ngram_combine=concat"]
ARMS = {"heads": ["--ngram_heads=3"], "context": ["--ngram_gate=context"], "one block": ["--ngram_layers=1"],
        "concat": [*SLICES, "--ngram_signs=0"], "element": ["--ngram_second_moment=element"]}
ENGRAM = ["--ngram_heads=4", "--ngram_combine=concat", "--ngram_gate=context", "--ngram_layers=0",
          "--ngram_orders=2,3,4", "--ngram_second_moment=element"]
OF_ARMS = ["--ngram_update_every=2", "--micro_batch_tokens=384", "--ngram_dtype=float32", "--sample_tokens=0",
           "--val_every=0"]


def config_of(*flags: str) -> EngramConfig:
    return train_gpt.parse_args([*TINY, *flags], EngramConfig)


def train(flags: list[str]) -> float:
    return train_gpt.main(flags, EngramConfig, EngramGPT, EngramTable)


@pytest.fixture
def tiny(tiny_data, tmp_path):
    return [*TINY, f"--data={tiny_data}", f"--out={tmp_path / 'logs'}"]


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, n) if d * d <= n)


# ---- addressing ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows, heads", [(4, 2), (1000, 2), (84_602, 8)])
def test_moduli_are_the_largest_primes_that_fit_and_multipliers_differ(rows, heads):
    seen = set()
    for order in (2, 3, 4):
        for head in range(heads):
            modulus, row_factors, sign_factors = channel_hash(order, head, heads, rows)
            assert is_prime(modulus) and sum(is_prime(n) for n in range(modulus + 1, rows + 1)) == head
            assert len(row_factors) == len(sign_factors) == order
            assert all(factor % 2 and 0 < factor < 2**16 for factor in row_factors + sign_factors)
            seen |= {row_factors, sign_factors}
    assert len(seen) == 3 * heads * 2


def test_a_modulus_at_full_size_is_prime():
    modulus, *_ = channel_hash(2, 7, 8, 84_602_880 // 16 - 1)
    assert is_prime(modulus) and modulus > 84_602_880 // 16 - 1000


@pytest.mark.parametrize("seed", range(6))
def test_addresses_of_several_heads_equal_the_slow_rule(seed):
    rng = np.random.default_rng(seed)
    heads, orders, length = int(rng.integers(2, 6)), [(2, 3), (2, 3, 4), (4,)][seed % 3], int(rng.integers(1, 60))
    tokens, starts = rng.integers(0, rng.choice([3, 60_000]), length), rng.random(length) < 0.1
    num_rows = int(rng.choice([100, 12_347, 84_602_880]))
    config = EngramConfig(ngram_rows=num_rows, ngram_orders=orders, ngram_heads=heads, ngram_signs=16)
    rows, signs = ngram_addresses(torch.from_numpy(tokens), torch.from_numpy(starts), config)
    bounds = [(c.low, c.high) for c in config.channels]
    assert len(bounds) == len(orders) * heads and bounds[0][0] == 0 and bounds[-1][1] == num_rows
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
    for c, (low, high) in enumerate(bounds):
        order = orders[c // heads]
        modulus, row_factors, sign_factors = channel_hash(order, c % heads, heads, high - low - 1)
        for t in range(length):
            first = max((s for s in range(t + 1) if starts[s] or s == 0), default=0)
            if t - first < order - 1:
                assert (rows[c, t], signs[c, t]) == (high - 1, 0)
                continue
            row_hash = sign_hash = 0
            for back in range(order):
                row_hash ^= row_factors[back] * int(tokens[t - back])
                sign_hash ^= sign_factors[back] * int(tokens[t - back])
            assert (rows[c, t], signs[c, t]) == (low + row_hash % modulus, sign_hash % 16)


# ---- rows: slices, and the rule with a second moment an element ------------------------------------------------------

@pytest.mark.parametrize("compiled", [True, False])
def test_slices_equal_a_look_up_in_plain_torch(compiled):
    config = config_of(*SLICES, "--ngram_dtype=float32")
    assert config.ngram_row_dim == 6
    batch = make_batch(torch.randint(0, VOCAB, (4, 33)), 4, 4, DOC_START)
    with join_world(config) as world:
        table = EngramTable(config, world)
        table.loops = table.loops if compiled else None
        table.rows.copy_(torch.randn(table.rows.shape))
        cycle = table.plan([batch])
        memory = table.read(table.fetch(cycle), cycle.reads[0], cycle.signs[0]).view(4 * 32, -1)
        rows, signs = ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
        weights = table.rows.clone().requires_grad_()
        expected = torch.cat([weights[row] * table.pool[sign] for row, sign in zip(rows, signs)], dim=1)
        torch.testing.assert_close(memory, expected)
        grad, grads = torch.randn(expected.shape), torch.empty(cycle.asked, 6)
        expected.backward(grad)
        table.add_grad(grads, cycle.slots[0], cycle.signs[0], grad.view(-1, 6), fresh=True)
    torch.testing.assert_close(grads, weights.grad[cycle.owned])
    assert grads.count_nonzero() > 0


def test_an_element_each_has_its_second_moment_and_equals_the_eager_rule():
    """Against Adam (beta1 = 0) over the whole table, where a row without a gradient does not move."""
    lr, beta2, wd = 0.3, 0.9, 0.1
    config = config_of("--ngram_second_moment=element", "--ngram_dtype=float32", f"--ngram_beta2={beta2}",
                       f"--ngram_wd={wd}", "--ngram_rows=40")
    with join_world(config) as world:
        table = EngramTable(config, world)
        table.block = 7  # so that an update takes several
        weights, second = torch.zeros(40, 24, dtype=torch.float64), torch.zeros(40, 24, dtype=torch.float64)
        for update in range(1, 9):
            ids, grads = torch.randperm(40)[:11].sort().values, torch.randn(11, 24)
            table.update_rows(ids, grads, update, lr)
            whole = torch.zeros_like(weights).index_copy_(0, ids, grads.double())
            second = beta2 * second + (1 - beta2) * whole**2
            change = lr * whole / ((second / (1 - beta2**update)).sqrt() + 1e-10)
            weights -= change + lr * wd * weights * (change * weights > 0)
        table.update_rows(ids[:0], grads[:0], 9, lr)  # a rank whose rows nobody read
    torch.testing.assert_close(table.rows.double(), weights, rtol=1e-4, atol=1e-5)


# ---- gate and blocks -------------------------------------------------------------------------------------------------

def test_context_gate_equals_the_formula_and_can_close():
    model = train_gpt.build_model(config_of("--ngram_gate=context"), VOCAB, EngramGPT)
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 5, 24)
    for b in range(2):
        for t in range(5):
            key, value = model.ngram_keys[1] @ memory[b, t], model.ngram_values[1] @ memory[b, t]
            fit = F.rms_norm(x[b, t], (32,)) @ F.rms_norm(key, (32,)) / math.sqrt(32)
            expected = x[b, t] + 0.05 / (1 + torch.exp(-fit)) * value
            torch.testing.assert_close(model.add_memory(x, memory, 1)[b, t], expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # a key that points against the stream closes the gate, one along it opens it
        key = F.linear(memory, model.ngram_keys[1])
        closed, opened = ((model.add_memory(sign * key, memory, 1) - sign * key).norm() for sign in (-1, 1))
    assert closed < 0.005 * opened
    plain = train_gpt.build_model(config_of(), VOCAB)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in plain.named_parameters())  # its draws come last
    more = model.flops_per_token((32, 32)) - plain.flops_per_token((32, 32))
    assert more == 6 * 2 * 2 * 32 * 24  # keys and values of 2 blocks


def test_only_the_chosen_blocks_take_the_memory_in():
    config = config_of("--ngram_layers=1", "--layers=3")
    model = train_gpt.build_model(config, VOCAB, EngramGPT)
    assert model.ngram_scales.shape == (1,)
    batch, inputs = make_batch(torch.randint(0, VOCAB, (2, 33)), 2, 2, DOC_START), {}
    masks = (train_gpt.attention_mask(batch.starts[0], 32, False),) * 2
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.1)
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, i=i: inputs.setdefault(i, []).append(args[0]))
    for memory in (torch.zeros(2, 32, 24), torch.randn(2, 32, 24)):
        model.hidden(batch.tokens[0], batch.starts[0], memory, masks, train_gpt.rotary_table(config, 0))
    assert [torch.equal(*inputs[i]) for i in range(3)] == [True, False, False]


# ---- whole runs ------------------------------------------------------------------------------------------------------

def final_losses(_, world, flags_of_arms: list[list[str]]) -> list[float]:
    """Train each arm with its micro-batches and update cycles, and evaluate it."""
    losses = []
    for flags in flags_of_arms:
        config = train_gpt.parse_args(flags, EngramConfig)
        trainer = train_gpt.Trainer(config, world, train_gpt.open_dataset(config), EngramGPT, EngramTable)
        for cycle in range(config.steps // config.ngram_update_every):
            batches, plan = trainer.prepare(cycle)
            for step, batch in zip(config.cycle_steps(cycle), batches):
                trainer.train_step(step, batch, plan)
        losses.append(trainer.evaluate(config.steps))
    return losses


def test_every_arm_learns_and_two_ranks_equal_one(tiny):
    """Two ranks for the sum over heads and for the gate of every block; the next test has the other arms together."""
    flags = [[*tiny, *OF_ARMS, *arm] for arm in (*ARMS.values(), ["--ngram_rows=0"])]
    with join_world(config_of()) as world:
        alone = final_losses(None, world, flags)
    for two in on_ranks(2, final_losses, flags[:2], flags=tiny):
        assert two == pytest.approx(alone[:2], abs=2e-4)
    *arms, without = alone
    assert len(set(arms)) == len(ARMS) and max(arms) < without - 0.02


def test_engram_launched_on_two_ranks_equals_one_and_its_checkpoint_resumes_on_one(tiny, tmp_path):
    """Everything together, as a user starts it; the second moments of elements go through the checkpoint."""
    flags = [*tiny, *OF_ARMS, *ENGRAM, "--steps=10"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    done = subprocess.run([*launch, *flags, "--run_id=two", "--checkpoint_every=6"], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    two = float(re.search(r"^final .*val_loss:(\S+)", (tmp_path / "logs/two.txt").read_text(), re.MULTILINE)[1])
    resumed = train([f"--resume={tmp_path / 'logs/checkpoints/two_step000006'}"])
    assert [two, resumed] == pytest.approx([train(flags)] * 2, abs=2e-4)


def test_without_its_flags_or_its_table_it_is_the_trainer(tiny):
    """What shapes a table that is not there is nothing to refuse a baseline for."""
    flags = [*tiny, "--steps=6", "--val_every=0"]
    assert train(flags) == train_gpt.main(flags)
    without = [*flags, "--ngram_rows=0", "--steps=2"]
    assert train([*without, *ENGRAM, "--ngram_heads=5", "--ngram_canonical"]) == train_gpt.main(without)


def test_the_plan_lists_the_hashes_and_counts_the_state(tiny, capsys):
    train([*tiny, "--ngram_heads=2", "--ngram_second_moment=element", "--dry_run"])
    text = capsys.readouterr().out
    listed = re.findall(r"order (\d): rows ([\d,]+) to ([\d,]+), modulus ([\d,]+)", text)
    assert [row[0] for row in listed] == ["2", "2", "3", "3"]
    assert listed[0][1] == "0" and listed[-1][2] == "4,000"
    assert all(is_prime(int(row[3].replace(",", ""))) for row in listed)
    assert re.search(rf"table state +{4001 * (4 + 4 * 24) / 2**20:.1f} MiB", text)


@pytest.mark.parametrize("flags, message", [
    (["--ngram_heads=5", "--ngram_combine=concat"], "--ngram_dim: found 24, expected a multiple of the 10 slices"),
    (["--ngram_rows=9", "--ngram_heads=3"], "--ngram_rows: found 9, expected at least 2 rows a hash"),
    (["--ngram_layers=2"], "--ngram_layers: found (2,), expected blocks from 0 to 1, each once"),
    (["--ngram_layers=1,1"], "--ngram_layers: found (1, 1), expected blocks from 0 to 1, each once"),
    (["--ngram_gate=maybe"], "--ngram_gate: found 'maybe', expected scale or context"),
    (["--ngram_combine=mean"], "--ngram_combine: found 'mean', expected sum or concat"),
    (["--ngram_second_moment=none"], "--ngram_second_moment: found 'none', expected row or element"),
    (["--ngram_heads=0"], "--ngram_heads: found 0, expected at least 1")])
def test_what_cannot_be_is_refused(flags, message):
    with pytest.raises(UserError, match=re.escape(message)):
        config_of(*flags)


# ---- canonical ids ---------------------------------------------------------------------------------------------------

WORDS = ["the", "The", "THE", " the", " The", "  the", "\tthe", "\u00e9", "e", "\u00c9", "E\u0301", "\ufb01", "fi",
         "\u00df", "ss", "\n\n", "\n", " ", "\u0301", "\u2460", "1"]


def tokenizer_file(folder, tokens: list[bytes]):
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)]
    (folder / TOKENIZER_FILE).write_bytes(b"".join(lines))


def test_canonical_ids_are_the_classes_of_plain_text(tmp_path):
    tokens = [word.encode() for word in WORDS] + [b"\xff", b"\xe2\x96", b"\xfe"]
    tokenizer_file(tmp_path, tokens)
    ids = canonical_ids(tmp_path, len(tokens) + 1)
    assert len(ids) == len(tokens) + 1 and ids.dtype == np.int64
    text = [token.decode(errors="replace") for token in tokens]
    same = {(text[i], text[int(ids[i])]) for i in range(len(tokens)) if ids[i] != i}
    assert same == {("The", "the"), ("THE", "the"), (" the", "the"), (" The", "the"), ("  the", "the"),
                    ("\tthe", "the"), ("e", "\u00e9"), ("\u00c9", "\u00e9"), ("E\u0301", "\u00e9"), ("fi", "\ufb01"),
                    ("\n", "\n\n"), (" ", "\n\n"), ("1", "\u2460")}
    assert np.array_equal(ids[ids], ids) and (ids <= np.arange(len(ids))).all()  # idempotent, total, by the smallest id
    for alone in (len(tokens), *range(len(WORDS), len(tokens)), WORDS.index("\u0301")):  # no text, nothing left
        assert ids[alone] == alone and (ids == alone).sum() == 1


def test_canonical_ids_of_gpt2_are_as_many_as_were_published(tmp_path):
    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except (OSError, ValueError):
        pytest.skip("GPT-2's vocabulary is not at hand")
    tokenizer_file(tmp_path, sorted(ranks, key=ranks.get))
    assert abs(len(np.unique(canonical_ids(tmp_path, 50257))) - 32_980) < 10  # Engram's count


def test_canonical_table_reads_the_same_rows_for_either_case(tmp_path):
    for split, seed in (("train", 1), ("val", 2)):
        write_shard(tmp_path / f"x_{split}_000000.bin", markov_tokens(40_000, seed), vocab_size=257, doc_start=256)
    flags = [*TINY, f"--data={tmp_path}", f"--out={tmp_path}", "--ngram_canonical", "--steps=2"]
    with pytest.raises(UserError, match="found no tokenizer.tiktoken, expected .* for --ngram_canonical"):
        train(flags)
    tokenizer_file(tmp_path, [bytes([byte]) for byte in range(256)])
    ids = canonical_ids(tmp_path, 257)
    folded = {chr(i): chr(int(ids[i])) for i in range(256) if ids[i] != i}  # case alone, and white space
    upper, white = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "\n\v\f\r \x1c\x1d\x1e\x1f"
    assert folded == dict(zip(upper.lower(), upper)) | dict.fromkeys(white, "\t")
    config = train_gpt.parse_args(flags, EngramConfig)
    with join_world(config) as world:
        table, plans = EngramTable(config, world), []
        for text in (b"To be, or NOT\tto be", b"to Be, oR not to bE", b"to be; or not to be"):
            plans.append(table.plan([make_batch(torch.tensor([256, *text])[None], 1, 1, 256)]))
    assert torch.equal(plans[0].reads, plans[1].reads) and torch.equal(plans[0].signs, plans[1].signs)
    assert not torch.equal(plans[0].reads, plans[2].reads)
    assert math.isfinite(train(flags))
