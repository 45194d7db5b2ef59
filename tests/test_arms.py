"""The table's other forms: several hashes an order, slices instead of sums, gate by context, chosen blocks, canonical ids; and the
head in float8. Each against a slow reference."""
from __future__ import annotations

import base64
import math
import re
import unicodedata

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from conftest import DOC_START, TINY, VOCAB, markov_tokens, run_trainer, write_shard
from harness import UserError
from tokens import TOKENIZER_FILE, canonical_ids
from train_gpt import (GPT, Config, NgramTable, SoftcappedLoss, attention_mask, channel_bounds, channel_hash, join_world, make_batch,
                       ngram_addresses, parse_args, rotary_table)

ARMS = {"heads": ["--ngram_heads=3"], "concat": ["--ngram_heads=2", "--ngram_combine=concat", "--ngram_signs=0"],
        "context": ["--ngram_gate=context"], "one block": ["--ngram_layers=1"],
        "engram": ["--ngram_heads=4", "--ngram_combine=concat", "--ngram_gate=context", "--ngram_layers=0", "--ngram_orders=2,3,4"]}


@pytest.fixture
def tiny(tiny_data, tmp_path):
    return [*TINY, f"--data={tiny_data}", f"--out={tmp_path / 'logs'}"]


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, n) if d * d <= n)


# ---- addressing -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows, heads", [(4, 2), (1000, 2), (99_991, 3), (84_602, 8)])
def test_moduli_are_the_largest_primes_that_fit_and_multipliers_differ(rows, heads):
    seen = set()
    for order in (2, 3, 4):
        for head in range(heads):
            row_factors, sign_factors, modulus = channel_hash(order, head, heads, rows)
            assert is_prime(modulus) and sum(is_prime(n) for n in range(modulus + 1, rows + 1)) == head
            assert len(row_factors) == len(sign_factors) == order
            assert all(factor % 2 and 0 < factor < 2**16 for factor in row_factors + sign_factors)
            seen |= {row_factors, sign_factors}
    assert len(seen) == 3 * heads * 2


def test_a_modulus_at_full_size_is_prime():
    (_, _, modulus) = channel_hash(2, 7, 8, 84_602_880 // 16 - 1)
    assert is_prime(modulus) and modulus > 84_602_880 // 16 - 1000


@pytest.mark.parametrize("seed", range(10))
def test_addresses_of_several_heads_equal_the_slow_rule(seed):
    rng = np.random.default_rng(seed)
    heads, orders, length = int(rng.integers(2, 6)), [(2, 3), (2, 3, 4), (4,)][seed % 3], int(rng.integers(1, 60))
    tokens, starts = rng.integers(0, rng.choice([3, 60_000]), length), rng.random(length) < 0.1
    config = Config(ngram_rows=int(rng.choice([100, 12_347, 84_602_880])), ngram_orders=orders, ngram_heads=heads, ngram_signs=16)
    rows, signs = ngram_addresses(torch.from_numpy(tokens), torch.from_numpy(starts), config)
    bounds = channel_bounds(config)
    assert bounds[0][0] == 0 and bounds[-1][1] == config.ngram_rows and all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
    for c, (low, high) in enumerate(bounds):
        order = orders[c // heads]
        row_factors, sign_factors, modulus = channel_hash(order, c % heads, heads, high - low - 1)
        for t in range(length):
            first = max((s for s in range(t + 1) if starts[s] or s == 0), default=0)
            if t - first < order - 1:
                assert (rows[c, t], signs[c, t]) == (high - 1, 0)
                continue
            row_hash = sign_hash = 0
            for back in range(order):
                row_hash, sign_hash = row_hash ^ row_factors[back] * int(tokens[t - back]), sign_hash ^ sign_factors[back] * int(tokens[t - back])
            assert (rows[c, t], signs[c, t]) == (low + row_hash % modulus, sign_hash % 16)


# ---- read and gradient of slices --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kernel", ["--ngram_kernel", "--no_ngram_kernel"])
def test_slices_equal_a_look_up_in_plain_torch(kernel):
    config = parse_args(["--track=cpu", "--device=cpu", *TINY[2:], "--ngram_heads=2", "--ngram_combine=concat", "--ngram_dtype=float32", kernel])
    assert config.ngram_row_dim == 6
    batch = make_batch(torch.randint(0, VOCAB, (4, 33)), 4, 4, DOC_START)
    with join_world(config) as world:
        table = NgramTable(config, world)
        table.rows.copy_(torch.randn(table.rows.shape))
        cycle = table.plan([batch])
        memory = table.read(table.fetch(cycle), cycle.reads[0], cycle.signs[0]).view(4 * 32, -1)
        rows, signs = ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
        weights = table.rows.clone().requires_grad_()
        expected = torch.cat([weights[row] * table.pool[sign] for row, sign in zip(rows, signs)], dim=1)
        torch.testing.assert_close(memory, expected)
        grad, grads = torch.randn(expected.shape), torch.empty(len(cycle.asked), 6)
        expected.backward(grad)
        table.add_grad(grads, cycle.slots[0], cycle.signs[0], grad.view(-1, 6), fresh=True)
    torch.testing.assert_close(grads, weights.grad[cycle.asked])
    assert grads.count_nonzero() > 0


# ---- gate and blocks ----------------------------------------------------------------------------------------------------------

def model_of(*flags: str) -> tuple[GPT, Config]:
    config = parse_args(["--track=cpu", "--device=cpu", *TINY[2:], *flags])
    return GPT(config, VOCAB), config


def test_context_gate_equals_the_formula_and_can_close():
    model, config = model_of("--ngram_gate=context")
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 5, 24)
    for b in range(2):
        for t in range(5):
            key, value = model.ngram_keys[1] @ memory[b, t], model.ngram_values[1] @ memory[b, t]
            fit = F.rms_norm(x[b, t], (32,)) @ F.rms_norm(key, (32,)) / math.sqrt(32)
            expected = x[b, t] + 0.05 / (1 + torch.exp(-fit)) * value
            torch.testing.assert_close(model.take_in(x, memory, 1)[b, t], expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # a key that points against the stream closes the gate, one along it opens it
        key = F.linear(memory, model.ngram_keys[1])
        closed, opened = ((model.take_in(sign * key, memory, 1) - sign * key).norm() for sign in (-1, 1))
    assert closed < 0.005 * opened


def test_only_the_chosen_blocks_take_the_memory_in():
    model, config = model_of("--ngram_layers=1", "--layers=3")
    assert model.ngram_scales.shape == (1,)
    batch, inputs = make_batch(torch.randint(0, VOCAB, (2, 33)), 2, 2, DOC_START), {}
    masks = (attention_mask(batch.starts[0], 32, False),) * 2
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.1)
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, i=i: inputs.setdefault(i, []).append(args[0]))
    for memory in (torch.zeros(2, 32, 24), torch.randn(2, 32, 24)):
        model.hidden(batch.tokens[0], batch.starts[0], memory, masks, rotary_table(config, 0))
    same = [torch.equal(*inputs[i]) for i in range(3)]
    assert same == [True, False, False]


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_learns_and_two_ranks_equal_one(arm, tiny, tmp_path):
    """Whole runs through the table's exchange; with micro-batches, cycles of two steps, and a table that matters."""
    flags = [*tiny, *ARMS[arm], "--ngram_update_every=2", "--micro_batch_tokens=384", "--ngram_dtype=float32", "--sample_tokens=0"]
    alone = train_gpt.main([*flags, "--run_id=alone"])
    done = run_trainer(*flags, "--run_id=two", ranks=2)
    assert done.returncode == 0, done.stderr
    two = float(re.search(r"^final .*val_loss:(\S+)", (tmp_path / "logs/two.txt").read_text(), re.MULTILINE)[1])
    assert two == pytest.approx(alone, abs=2e-4)
    assert alone < train_gpt.main([*flags, "--ngram_rows=0", "--run_id=without"]) - 0.02


def test_the_plan_lists_the_hashes(tiny, capsys):
    train_gpt.main([*tiny, "--ngram_heads=2", "--dry_run"])
    listed = re.findall(r"order (\d), head (\d): rows ([\d,]+) to ([\d,]+), modulus ([\d,]+)", capsys.readouterr().out)
    assert [row[:2] for row in listed] == [("2", "0"), ("2", "1"), ("3", "0"), ("3", "1")]
    assert listed[0][2] == "0" and listed[-1][3] == "4,000" and all(is_prime(int(row[4].replace(",", ""))) for row in listed)


@pytest.mark.parametrize("flags, message", [
    (["--ngram_heads=5", "--ngram_combine=concat"], "--ngram_dim: found 24, expected a multiple of the 10 slices"),
    (["--ngram_layers=2"], "--ngram_layers: found (2,), expected blocks from 0 to 1"),
    (["--ngram_layers=1,1"], "--ngram_layers: found (1, 1), expected each block once"),
    (["--value_embeds=0,0"], "--value_embeds: found (0, 0), expected each block once"),
    (["--ngram_gate=maybe"], "--ngram_gate: found 'maybe', expected scale or context"),
    (["--ngram_combine=mean"], "--ngram_combine: found 'mean', expected sum or concat"),
    (["--ngram_heads=0"], "--ngram_heads: found 0, expected at least 1")])
def test_what_cannot_be_is_refused(flags, message, tiny):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_args([*tiny, *flags])


def test_an_arm_without_its_table_is_an_arm(tiny):
    """What shapes a table that is not there is nothing to refuse a baseline for."""
    flags = [*tiny, "--ngram_rows=0", "--ngram_heads=5", "--ngram_combine=concat", "--ngram_canonical", "--steps=2"]
    assert train_gpt.main(flags) == train_gpt.main([*tiny, "--ngram_rows=0", "--steps=2"])


# ---- canonical ids -------------------------------------------------------------------------------------------------------------

WORDS = ["the", "The", "THE", " the", " The", "  the", "\tthe", "\u00e9", "e", "\u00c9", "E\u0301", "\ufb01", "fi", "\u00df", "ss", "\n\n", "\n", " ",
         "\u0301", "\u2460", "1"]


def tokenizer_file(folder, tokens: list[bytes]):
    (folder / TOKENIZER_FILE).write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))


def test_canonical_ids_are_the_classes_of_plain_text(tmp_path):
    tokens = [word.encode() for word in WORDS] + [b"\xff", b"\xe2\x96", b"\xfe"]
    tokenizer_file(tmp_path, tokens)
    ids = canonical_ids(tmp_path, len(tokens) + 1)
    assert len(ids) == len(tokens) + 1 and ids.dtype == np.int64
    text = [token.decode(errors="replace") for token in tokens]
    same = {(text[i], text[int(ids[i])]) for i in range(len(tokens)) if ids[i] != i}
    assert same == {("The", "the"), ("THE", "the"), (" the", "the"), (" The", "the"), ("  the", "the"), ("\tthe", "the"), ("e", "\u00e9"),
                    ("\u00c9", "\u00e9"), ("E\u0301", "\u00e9"), ("fi", "\ufb01"), ("\n", "\n\n"), (" ", "\n\n"), ("1", "\u2460")}
    assert np.array_equal(ids[ids], ids) and (ids <= np.arange(len(ids))).all()  # idempotent, total, by the smallest id
    for alone in (len(tokens), *range(len(WORDS), len(tokens)), WORDS.index("\u0301")):  # document start, no text, nothing left
        assert ids[alone] == alone and (ids == alone).sum() == 1


def test_canonical_ids_of_bytes_fold_case_alone(tmp_path):
    tokenizer_file(tmp_path, [bytes([byte]) for byte in range(256)])
    ids = canonical_ids(tmp_path, 257)
    folded = {chr(i): chr(int(ids[i])) for i in range(256) if ids[i] != i}
    white = {c: "\t" for c in "\n\v\f\r \x1c\x1d\x1e\x1f"}
    assert folded == {c.lower(): c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"} | white
    assert all(unicodedata.normalize("NFKC", c.lower()) == c for c in folded if c.isalpha())


def test_canonical_table_reads_the_same_rows_for_either_case(tmp_path):
    for split, seed in (("train", 1), ("val", 2)):
        write_shard(tmp_path / f"x_{split}_000000.bin", markov_tokens(40_000, seed), vocab_size=257, doc_start=256)
    flags = [*TINY, f"--data={tmp_path}", f"--out={tmp_path}", "--ngram_canonical"]
    with pytest.raises(UserError, match="found no tokenizer.tiktoken, expected the one of the shards for --ngram_canonical"):
        train_gpt.main(flags)
    tokenizer_file(tmp_path, [bytes([byte]) for byte in range(256)])
    config = parse_args(flags)
    with join_world(config) as world:
        table = NgramTable(config, world, train_gpt.open_dataset(config).classes)
        plans = []
        for text in (b"To be, or NOT\tto be", b"to Be, oR not to bE", b"to be; or not to be"):
            tokens = torch.tensor([256, *text])[None]
            plans.append(table.plan([make_batch(tokens, 1, 1, 256)]))
    assert torch.equal(plans[0].reads, plans[1].reads) and torch.equal(plans[0].signs, plans[1].signs)
    assert not torch.equal(plans[0].reads, plans[2].reads)
    assert math.isfinite(train_gpt.main(flags))
    (log,) = tmp_path.glob("*.txt")
    assert "canonical ids: 222 classes of 257 tokens" in log.read_text()


# ---- float8 head, segments of a stage -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_head_is_near_the_exact_one(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 128, generator=generator).to(dtype), torch.randn(192, 128, generator=generator)
    targets, results = torch.randint(0, 192, (64,), generator=generator), []
    for fp8 in (False, True):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = SoftcappedLoss.apply(a, w, targets, 32, fp8)
        loss.backward()
        results.append((loss.detach(), a.grad.float(), w.grad))
    for exact, rounded in zip(*results):
        assert 0 < (exact - rounded).norm() < 0.1 * exact.norm()


def test_a_run_with_a_float8_head_ends_near_the_exact_one(tiny):
    flags = [*tiny, "--model_dim=64", "--heads=4", "--sample_tokens=0"]
    exact, rounded = (train_gpt.main([*flags, *more]) for more in ([], ["--fp8_head"]))
    assert exact != rounded and rounded == pytest.approx(exact, abs=0.03)


def test_a_stage_of_short_sequences_closes_segments_and_changes_no_shape(tiny, tmp_path):
    config = parse_args([*tiny, "--stages=1/2:1:16-32:1:8,1:1:32-32:1"])
    assert [stage.length for stage in config.stage_list] == [8, 32]
    rows = torch.randint(0, DOC_START, (3, 33))
    rows[1, 13] = DOC_START
    short, whole = (make_batch(rows, 3, 3, DOC_START, stage.length) for stage in config.stage_list)
    expected = torch.zeros(3, 32, dtype=torch.bool)
    expected[:, [0, 8, 16, 24]] = expected[1, 13] = True
    assert torch.equal(short.starts[0], expected) and torch.equal(short.tokens, whole.tokens) and whole.starts.sum() == 4
    changed = train_gpt.main([*tiny, "--stages=1/2:1:32-32:1:8,1:1:32-32:1"])
    assert changed != train_gpt.main([*tiny, "--stages=1/2:1:32-32:1,1:1:32-32:1"])
    with pytest.raises(UserError, match="--stages: .* expected segments from 1 token to --seq_len=32"):
        parse_args([*tiny, "--stages=1:1:32-32:1:64"])
