"""The trainer: flags, stream, model, update rules, and whole runs on one and several ranks."""
from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from conftest import DOC_START, RECIPE, ROOT, TINY, VOCAB, markov_tokens, on_ranks, run_trainer, write_shard
from harness import UserError, World, check_fits, join_world
from train_gpt import (GPT, Config, NgramTable, RMSNorm, Rotate, SoftcappedLoss, SquaredReLU, Trainer, adam_update, attend,
                       attention_mask, channels, lr_scale, muon_momentum, muon_update, ngram_addresses, orthogonalize, parse_args,
                       rotary_table, rule_of)
from tokens import Dataset, TokenStream, golden_stride, make_batch, open_dataset, open_shard, rank_batch, table_report


def world_of(rank: int, size: int) -> World:
    return World(rank, size, size, torch.device("cpu"), None, None)


@pytest.fixture
def tiny(tiny_data, tmp_path):
    return [*TINY, f"--data={tiny_data}", f"--out={tmp_path / 'logs'}"]


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^step:\S+ (?:train|val)_loss:(\S+)", text, re.MULTILINE)]


# ---- import and flags ---------------------------------------------------------------------------------------------------

def test_import_has_no_effect(tmp_path):
    """No file written, no socket, no process, no device, no process group, no change of torch's settings."""
    script = f"""
import sys
import numpy, torch, torch.distributed as dist
before = (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), torch.are_deterministic_algorithms_enabled())
events = []
def watch(name, arguments):
    writes = name == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes and "__pycache__" not in str(arguments[0]) or name.startswith(("socket.", "subprocess.", "os.mkdir", "urllib.")):
        events.append((name, arguments))
sys.addaudithook(watch)
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
assert not events, events
assert not dist.is_initialized() and not torch.cuda.is_initialized()
assert before == (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), torch.are_deterministic_algorithms_enabled())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_every_field_is_a_flag_with_its_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    flags = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", text) if not name.startswith("no-")} - {"help"}
    assert flags == {f.name for f in dataclasses.fields(Config)}
    for f in dataclasses.fields(Config):
        assert " ".join(f.metadata["help"].split()) in text


@pytest.mark.parametrize("arguments, field, value", [
    (["--ngram_rows=5000"], "ngram_rows", 5000), (["--ngram-rows=5000"], "ngram_rows", 5000), (["--ngram-rows", "5000"], "ngram_rows", 5000),
    (["--compile"], "compile", True), (["--compile", "--no_compile"], "compile", False), (["--no-compile"], "compile", False), (["--no_spread_rows"], "spread_rows", False),
    (["--ngram_orders=2,3,4"], "ngram_orders", (2, 3, 4)), (["--ngram_split=1,3"], "ngram_split", (1, 3)),
    (["--track=fineweb"], "model_dim", 768), (["--track=fineweb", "--layers=2"], "layers", 2), (["--sample=a-b"], "sample", "a-b"),
    ([], "track", "cpu"), ([], "device", "cpu"),
])
def test_flags(arguments, field, value):
    assert getattr(parse_args(["--device=cpu", *arguments]), field) == value


@pytest.mark.parametrize("arguments, message", [
    (["--layer=3"], "--layer=3"), (["--nonsense=1"], "--nonsense"), (["--layers=two"], "--layers"), (["--layers=0"], "--layers"),
    (["--batch_tokens=1000"], "--batch_tokens"), (["--heads=3"], "--heads"), (["--compile=maybe"], "--compile"), (["--device=tpu"], "--device"), (["--adam_lr=nan"], "--adam_lr"), (["--adam_beta1=1.5"], "--adam_beta1"), (["--seed=-1"], "--seed"),
    (["--run_id=a/b"], "--run_id"), (["--table_report", "--ngram_rows=0"], "--ngram_rows"), (["--compile", "--warmup_steps=0"], "--warmup_steps"),
    (["--ngram_orders=2,9"], "--ngram_orders"), (["--ngram_dim=999"], "--ngram_dim"), (["--track=moon"], "--track"),
    (["--ngram_rows=3"], "--ngram_rows"), (["--val_tokens=100"], "--val_tokens"),
])
def test_bad_flags_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        parse_args(["--device=cpu", *arguments])


def test_a_bad_flag_ends_all_ranks_with_one_line():
    done = run_trainer("--layer=3", ranks=2)
    assert done.returncode == 1 and done.stderr.count("error: unrecognized arguments: --layer=3") == 1
    done = run_trainer("--layer=3")
    assert done.returncode == 1 and done.stderr.strip() == "error: unrecognized arguments: --layer=3 (--help lists all flags)"


@pytest.mark.parametrize("track", train_gpt.TRACKS)
def test_presets_are_valid(track):
    assert parse_args(["--device=cpu", f"--track={track}"]).track == track


# ---- stream -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def stream_of(tmp_path):
    def make(lengths, seq_len, spread=False):
        tokens = np.arange(sum(lengths)) % 50_000
        cuts = np.cumsum([0, *lengths])
        shards = [open_shard(write_shard(tmp_path / f"s_train_{i}.bin", tokens[a:b], 50_257, 50_256))
                  for i, (a, b) in enumerate(zip(cuts, cuts[1:]))]
        return TokenStream(shards, seq_len, spread)
    return make


@pytest.mark.parametrize("lengths", [[100], [33, 1, 66], [5] * 20])
def test_rows_are_the_shards_laid_end_to_end(stream_of, lengths):
    stream = stream_of(lengths, 8)
    assert stream.num_rows == 12  # 96 inputs and targets up to 97 of the 100 tokens
    rows = stream.read(0, 12)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, torch.arange(12)[:, None] * 8 + torch.arange(9))
    assert torch.equal(stream.read(12, 2), rows[:2])  # it starts over at row ends, never inside one


def test_a_last_row_needs_its_target(stream_of):
    assert stream_of([96], 8).num_rows == 11 and stream_of([97], 8).num_rows == 12


@pytest.mark.parametrize("num_rows", [1, 2, 3, 10, 97, 997, 1000, 48_597])
def test_spread_order_visits_each_row_once_and_evenly(num_rows):
    stride = golden_stride(num_rows)
    order = np.arange(num_rows) * stride % num_rows
    assert len(set(order.tolist())) == num_rows
    if num_rows > 500:
        gaps = np.diff(np.sort(order[:100]))
        assert gaps.max() < 2 * num_rows / 100


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_rows", [1, 3, 7])
def test_slices_of_all_ranks_are_the_same_tokens(stream_of, size, micro_rows):
    stream = stream_of([1000], 8, spread=True)
    batches = [rank_batch(stream, 20, 7, micro_rows, 50_256, world_of(rank, size)) for rank in range(size)]
    assert len({batch.tokens.shape for batch in batches}) == 1
    real = [batch.targets.flatten(0, 1)[:, 0] >= 0 for batch in batches]
    tokens = torch.cat([batch.tokens.flatten(0, 1)[keep] for batch, keep in zip(batches, real)])
    targets = torch.cat([batch.targets.flatten(0, 1)[keep] for batch, keep in zip(batches, real)])
    expected = stream.read(20, 7)
    assert torch.equal(tokens, expected[:, :-1]) and torch.equal(targets, expected[:, 1:])


def test_segments_begin_at_documents_and_rows():
    batch = make_batch(torch.tensor([[5, 9, 6, 7, 9], [7, 7, 7, 7, 7]]), 3, 3, 9)
    assert batch.starts.tolist() == [[[True, True, False, False], [True, False, False, False], [True] * 4]]
    assert batch.targets.tolist() == [[[9, 6, 7, 9], [7] * 4, [-1] * 4]]


# ---- model ----------------------------------------------------------------------------------------------------------------

def turned(x, base):
    """Rotary positions by complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).double()[:, None] * base ** -(torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize("function, reference, shape", [
    (RMSNorm.apply, lambda x: F.rms_norm(x, (x.shape[-1],), eps=1e-6), (3, 5, 16)),
    (SquaredReLU.apply, lambda x: F.relu(x).square(), (3, 5, 16)),
    (lambda x: Rotate.apply(x, rotary_table(Config(seq_len=6, batch_tokens=6, val_tokens=6, model_dim=32, heads=2, rotary_base=100.0), 0).double()),
     lambda x: turned(x, 100.0), (3, 5, 16)),
])
def test_layers_equal_torchs(function, reference, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    grad = torch.randn(shape, dtype=torch.float64)
    function(a).backward(grad), reference(b).backward(grad)
    torch.testing.assert_close(function(x), reference(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_loss_equals_cross_entropy_of_softcapped_logits(chunk):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 8, generator=generator), 3 * torch.randn(13, 8, generator=generator)
    targets = torch.randint(-1, 13, (20,), generator=generator)
    a, wa, b, wb = (t.clone().requires_grad_() for t in (x, weight, x, weight))
    loss = SoftcappedLoss.apply(a, wa, targets, chunk, False)
    expected = F.cross_entropy(23 * torch.sigmoid((b @ wb.T + 5) / 7.5), targets, ignore_index=-1, reduction="sum")
    (2 * loss).backward(), (2 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wa.grad, wb.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 5, 16])
def test_attention_sees_its_window_of_its_segment(window, dtype):
    generator = torch.Generator().manual_seed(window)
    starts = torch.rand(3, 16, generator=generator) < 0.2
    starts[:, 0] = True
    q, k, v = torch.randn(3, 3, 2, 16, 8, generator=generator).to(dtype).float()
    mask, segment = attention_mask(starts, window, flex=False), starts.cumsum(-1).tolist()
    found = attend(*(x.to(dtype) for x in (q, k, v)), mask).float()
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    for b in range(3):
        for t in range(16):
            seen = [j for j in range(t + 1) if t - j < window and segment[b][j] == segment[b][t]]
            for head in range(2):
                weights = torch.stack([q[b, head, t] @ k[b, head, j] for j in seen]).div(8**0.5).softmax(0)
                torch.testing.assert_close(found[b, head, t], weights @ v[b, head, seen], **tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_the_same_mask():
    """Uncompiled, on the CPU; tests/test_gpu.py has it compiled on a GPU."""
    starts = torch.rand(2, 128, generator=torch.Generator().manual_seed(0)) < 0.05
    starts[:, 0] = True
    q, k, v = torch.randn(3, 2, 2, 128, 16)
    dense, flex = (attend(q, k, v, attention_mask(starts, 40, flex)) for flex in (False, True))
    torch.testing.assert_close(flex, dense, rtol=1e-4, atol=1e-5)


def test_yarn_slows_what_has_not_turned_and_keeps_what_has():
    sizes = dict(seq_len=1024, batch_tokens=1024, val_tokens=1024, model_dim=128, heads=1, steps=10)
    grown = Config(**sizes, stages="0.5:1:64-128:1,1:1:64-512:1")
    before, after = rotary_table(grown, 0), rotary_table(grown, 1)
    assert torch.equal(before, rotary_table(Config(**sizes), 0))
    sharper = 1 + 0.1 * math.log(4)
    torch.testing.assert_close(after.square().sum(0), torch.full((1024, 64), sharper))
    angle = [torch.atan2(*table[:, 1].flip(0)) for table in (before, after)]  # after one position
    ratio, turns = angle[1] / angle[0], 128 * angle[0] / (2 * math.pi)
    assert (ratio[turns < 1] == pytest.approx(0.25, rel=1e-3)) and 0 < (turns > 1).sum() < 64
    assert (ratio.diff() <= 1e-6).all() and ratio[0] > 0.6


def lively_model(config: Config):
    """A model and a table in which nothing is zero, so that whatever could leak does."""
    generator = torch.Generator().manual_seed(0)
    model = GPT(config, VOCAB)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.5 if p.dim() < 2 else p.shape[-1] ** -0.5))
    table = NgramTable(config, world_of(0, 1))
    table.rows.normal_(generator=generator)
    return model, table


def stage_inputs(config, starts, stage=0):
    """What Trainer.stage_inputs gives the model, without a trainer."""
    return dict(masks=tuple(attention_mask(starts, window, flex=False) for window in config.stage_list[stage].windows),
                rotary=rotary_table(config, stage))


def hidden_states(model, table, tokens, config):
    batch = make_batch(torch.cat((tokens, tokens[:, :1]), 1), len(tokens), len(tokens), DOC_START)
    rows, signs = train_gpt.ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
    memory = table.read(table.rows, rows, signs).view(*tokens.shape, -1)
    with torch.no_grad():
        return model.hidden(batch.tokens[0], batch.starts[0], memory, **stage_inputs(config, batch.starts[0]))


@pytest.fixture(scope="module", params=[[], RECIPE, [*RECIPE, "--dtype=bfloat16"]], ids=["plain", "recipe", "bfloat16"])
def alive(request):
    config = parse_args(["--device=cpu", *TINY[2:], "--ngram_orders=2,3,4", *request.param])
    return (*lively_model(config), config)


def test_a_token_changes_nothing_before_it(alive):
    *parts, config = alive
    tokens = torch.randint(0, VOCAB - 1, (2, 32))
    before = hidden_states(*parts, tokens, config)
    for t in (1, 15, 31):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % (VOCAB - 1)
        after = hidden_states(*parts, changed, config)
        assert torch.equal(after[0, :t], before[0, :t]) and not torch.equal(after[0, t], before[0, t])
        assert torch.equal(after[1], before[1])  # nor in another row


def test_a_segment_changes_nothing_in_another(alive):
    *parts, config = alive
    tokens = torch.randint(0, VOCAB - 1, (1, 32))
    tokens[0, 11] = tokens[0, 20] = DOC_START
    before = hidden_states(*parts, tokens, config)
    changed = tokens.clone()
    changed[0, 12:20] = (changed[0, 12:20] + 1) % (VOCAB - 1)
    after = hidden_states(*parts, changed, config)
    same = (after == before).all(-1)[0]
    assert same[:12].all() and same[20:].all() and not same[12:20].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_model_is_one_graph_and_equals_the_eager_one(dtype):
    """Traced for training and for evaluation, without a code generator, so that it needs no compiler."""
    config = parse_args(["--device=cpu", *TINY[2:], *RECIPE])
    batch = make_batch(torch.randint(0, VOCAB, (4, 33)), 4, 4, DOC_START)
    part, results = (batch.tokens[0], batch.starts[0]), []
    inputs = stage_inputs(config, batch.starts[0]) | {"tied": False}
    for compiled in (False, True):
        model, _ = lively_model(config)
        model.dtype = dtype
        forward = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else model
        memory = torch.randn(4, 32, 24, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        loss = forward(*part, memory, batch.targets[0], **inputs)
        loss.backward()
        with torch.no_grad():
            evaluated = forward(*part, memory, batch.targets[0], **inputs)
        results.append([loss.detach(), evaluated, memory.grad.float(), model.embed.grad, model.blocks[0].qkv.grad])
    scale = 1e-5 if dtype == torch.float32 else 3e-2
    for eager, traced in zip(*results):
        assert (eager - traced).norm() <= scale * eager.norm() and eager.norm() > 0


def test_weights_depend_on_the_seed_alone():
    a, b, c = (GPT(parse_args(["--device=cpu", *TINY[2:], f"--seed={seed}"]), VOCAB) for seed in (1, 1, 2))
    assert torch.equal(a.blocks[1].qkv, b.blocks[1].qkv) and not torch.equal(a.embed, c.embed)


# ---- update rules and schedules ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 64, 16), (1, 16, 64)])
def test_orthogonalized_singular_values_are_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert (values > 0.7).all() and (values < 1.3).all()
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert (orthogonalize(matrices) * (u @ v)).sum() / math.prod(shape) * max(shape[1:]) > 0.9


def test_muon_moves_along_the_orthogonalized_momentum():
    weights, grads = torch.zeros(2, 8, 32), torch.randn(2, 8, 32)
    momentum = torch.zeros_like(weights)
    muon_update(weights, grads.clone(), momentum, None, lr=0.1, beta=0.9, beta2=0.0, wd=0.0)
    torch.testing.assert_close(momentum, 0.1 * grads)
    torch.testing.assert_close(weights, -0.1 * orthogonalize(grads))
    tall = torch.zeros(2, 32, 8)
    muon_update(tall, grads.mT.clone(), torch.zeros_like(tall), None, lr=0.1, beta=0.9, beta2=0.0, wd=0.0)
    torch.testing.assert_close(tall, 2 * weights.mT)


def test_normuon_evens_rows_out_and_keeps_the_norm():
    generator = torch.Generator().manual_seed(0)
    weights, momentum, row_moment = torch.zeros(2, 8, 6), torch.zeros(2, 8, 6), torch.zeros(2, 8, 1)
    expected, mean = torch.zeros(2, 8, 6), torch.zeros(2, 8)
    for _ in range(3):
        grads = torch.randn(2, 8, 6, generator=generator)
        muon_update(weights, grads.clone(), momentum, row_moment, lr=0.1, beta=0.0, beta2=0.9, wd=0.0)
        for n in range(2):
            plain = orthogonalize(grads[n:n + 1])[0]
            for row in range(8):
                mean[n, row] = 0.9 * mean[n, row] + 0.1 * (plain[row] ** 2).mean()
            scaled = torch.stack([plain[row] / mean[n, row].sqrt() for row in range(8)])
            expected[n] -= 0.1 * (8 / 6) ** 0.5 * scaled * plain.norm() / scaled.norm()
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_decay_acts_where_update_and_weight_agree():
    start, grads = torch.randn(1, 8, 8), torch.randn(1, 8, 8)
    moved = []
    for wd in (0.0, 0.5):
        weights = start.clone()
        muon_update(weights, grads.clone(), torch.zeros(1, 8, 8), None, lr=0.1, beta=0.0, beta2=0.0, wd=wd)
        moved.append(weights - start)
    agree = -moved[0] * start > 0
    torch.testing.assert_close(moved[1] - moved[0], torch.where(agree, -0.1 * 0.5 * start, 0.0))
    assert agree.any() and not agree.all()


def test_adam_equals_torchs_adamw():
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(50, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.95), eps=train_gpt.ADAM_EPS, weight_decay=0.1)
    first, second = torch.zeros(50), torch.zeros(50)
    for update in range(1, 30):
        theirs.grad = torch.randn(50, generator=generator)
        adam_update(ours, theirs.grad, first, second, update, 0.01, 0.8, 0.95, 0.1)
        reference.step()
    torch.testing.assert_close(ours, theirs.detach())


def test_every_parameter_has_exactly_one_rule():
    for name, _ in GPT(Config(), 300).named_parameters():
        rule_of(name)
    with pytest.raises(AssertionError, match="surprise"):
        rule_of("surprise")


def test_buckets_hold_every_parameter_once_for_any_world_size():
    for size in (1, 2, 3, 8):  # 8 square matrices (qkv, out) and 4 of the MLP: none a multiple of 3
        model = GPT(parse_args(["--device=cpu", *TINY[2:]]), VOCAB)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        buckets = train_gpt.Optimizer(model, Config(), world_of(0, size)).buckets
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name])
            p.grad.add_(1), p.data.add_(1)
        for values in ("weights", "grads"):
            total = sum(getattr(bucket, values).sum() for bucket in buckets)
            size_of_all = sum(p.numel() for p in model.parameters())
            expected = size_of_all + (sum(b.sum() for b in before.values()) if values == "weights" else 0)
            torch.testing.assert_close(total, torch.as_tensor(expected, dtype=torch.float32), rtol=1e-4, atol=0.1)
        assert all(len(bucket.weights) == size * bucket.share_size for bucket in buckets)


def test_schedules():
    config = Config(steps=100, cooldown=0.4, final_lr=0.1, muon_momentum_steps=50)
    assert lr_scale(0, config) == lr_scale(59, config) == 1.0
    assert lr_scale(80, config) == pytest.approx(0.55) and lr_scale(100, config) == pytest.approx(0.1)
    assert muon_momentum(0, config) == 0.85 and muon_momentum(25, config) == pytest.approx(0.9)
    assert muon_momentum(99, config) == 0.95
    falling = dataclasses.replace(config, muon_momentum_cooldown=10)
    assert muon_momentum(90, falling) == 0.95 and muon_momentum(95, falling) == pytest.approx(0.9)


def test_stages_say_batch_position_and_learning_rate():
    config = parse_args(["--device=cpu", *TINY[2:], "--ngram_update_every=2", "--stages=1/3:1/2:8-16:0.5,1:1:16-32:1", "--cooldown=0"])
    assert [(stage.first, stage.end) for stage in config.stage_list] == [(0, 6), (6, 20)]  # 20 / 3, on an update's border
    batches = [config.stage(step).batch_tokens for step in range(20)]
    assert batches == [768] * 6 + [1536] * 14
    assert [config.tokens_before(step) for step in range(21)] == [sum(batches[:step]) for step in range(21)]
    assert (lr_scale(5, config), lr_scale(6, config)) == (0.5, 1.0)


# ---- whole runs -----------------------------------------------------------------------------------------------------------

GOLDEN = 3.33084


def test_golden_run(tiny):
    """20 steps of a tiny config end where they always did; a change that moves them must say why."""
    final = train_gpt.main(tiny)
    assert final == pytest.approx(GOLDEN, abs=5e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_repeats_bit_for_bit(tiny, dtype):
    flags = [*tiny, f"--dtype={dtype}"]
    assert train_gpt.main(flags) == train_gpt.main(flags)


def test_bfloat16_ends_near_float32(tiny):
    """On any CPU, with units for it or without; orthogonalization runs in it too."""
    final = train_gpt.main([*tiny, "--dtype=bfloat16"])
    assert final != GOLDEN and final == pytest.approx(GOLDEN, abs=2e-2)


def test_dtype_goes_by_the_device():
    units = {name for name, has in torch.cpu.get_capabilities().items() if has is True} & {"amx_bf16", "avx512_bf16"}
    assert parse_args(["--device=cpu", "--track=cpu"]).dtype == ("bfloat16" if units else "float32")
    assert parse_args(["--device=cuda"]).dtype == "bfloat16"
    with pytest.raises(UserError, match="--dtype: found 'half', expected bfloat16 or float32"):
        parse_args(["--dtype=half"])


@pytest.mark.parametrize("ranks, recipe", [(2, []), (3, RECIPE)])
def test_ranks_agree_with_one_process(tiny, ranks, recipe):
    flags = [*tiny, "--ngram_update_every=2", "--ngram_dtype=float32", *recipe]  # bf16 rows would round the last bits into view
    one, several = run_trainer(*flags), run_trainer(*flags, ranks=ranks)
    assert one.returncode == several.returncode == 0, several.stderr
    assert len(losses(one.stdout)) == 5 and losses(one.stdout)[-1] < losses(one.stdout)[0] - 0.3
    np.testing.assert_allclose(losses(several.stdout), losses(one.stdout), rtol=0, atol=1.1e-5)  # five digits are printed


def test_micro_batches_change_memory_alone(tiny):
    whole, micro = (train_gpt.main([*tiny, "--ngram_dtype=float32", f"--micro_batch_tokens={tokens}"]) for tokens in (0, 160))
    assert micro == pytest.approx(whole, abs=2e-5)


@pytest.mark.parametrize("flag", ["--ngram_rows=0", "--ngram_signs=0", "--ngram_dtype=float32", "--ngram_orders=2", "--sample_tokens=0"])
def test_ablations_run(tiny, flag):
    assert math.isfinite(train_gpt.main([*tiny, flag, "--steps=3"]))


def test_table_helps_on_text_that_n_grams_predict(tiny):
    assert train_gpt.main(tiny) < train_gpt.main([*tiny, "--ngram_rows=0"]) - 0.02


@pytest.mark.parametrize("recipe", [[], RECIPE], ids=["plain", "recipe"])
def test_warm_up_leaves_everything_bit_identical(tiny, recipe):
    config = parse_args([*tiny, "--ngram_update_every=2", *recipe])
    with join_world(config) as world:
        dataset = open_dataset(config)

        def state(trainer):
            table = trainer.table
            return [t.clone() for t in (*trainer.optimizer.tensors(), table.rows, table.second, table.last)] + [
                torch.tensor([trainer.optimizer.updates, table.updates]), torch.random.get_rng_state(),
                *[b.grads.clone() for b in trainer.optimizer.buckets]]
        trainer = Trainer(config, world, dataset)
        batches, cycle = trainer.prepare(0)
        trainer.train_step(0, batches[0], cycle), trainer.train_step(1, batches[1], cycle)
        before = state(trainer)
        trainer.warm_up()
        assert all(torch.equal(a, b) for a, b in zip(before, state(trainer)))
        fresh, warmed = Trainer(config, world, dataset), Trainer(config, world, dataset)
        warmed.warm_up()
        assert all(torch.equal(a, b) for a, b in zip(state(fresh), state(warmed)))
    assert train_gpt.main([*tiny, *recipe, "--warmup_steps=0"]) == train_gpt.main([*tiny, *recipe, "--warmup_steps=3"])


def evaluate_on(config, world, seed):
    dataset = open_dataset(config)
    trainer = Trainer(config, world, dataset)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(config.ngram_rows, config.ngram_dim, generator=generator)
    low, high = world.share(config.ngram_rows)
    trainer.table.rows.copy_(table[low:high])
    with torch.no_grad():
        trainer.model.head.copy_(torch.randn(trainer.model.head.shape, generator=generator) * 0.3)
    return trainer.evaluate(0)


def test_validation_loss_is_the_same_for_any_world_size_and_micro_batch(tiny):
    values = [value for size, micro in ((2, 0), (3, 96), (4, 32))
              for value in on_ranks(size, evaluate_on, 1, flags=[*tiny, f"--micro_batch_tokens={micro}"])]
    config = parse_args(tiny)
    with join_world(config) as world:
        expected = evaluate_on(config, world, 1)
    assert values == pytest.approx([expected] * len(values), abs=1e-5) and expected > 1


def test_log_holds_what_made_the_run(tiny, tmp_path):
    final = train_gpt.main([*tiny, "--run_id=abc", "--target_loss=3.9", "--seed=4"])
    text = (tmp_path / "logs/abc.txt").read_text()
    header = json.loads(re.match(r"run:(\{.*\})\n", text)[1])
    assert header["config"]["seed"] == 4 and header["world_size"] == 1 and header["device_name"] == "cpu"
    assert header["target_loss"] == 3.9 and header["clock"] == "train-only" and header["torch"] == torch.__version__
    assert header["source_sha256"] == header["sources"]["train_gpt.py"]
    for name in ("train_gpt.py", "tokens.py", "harness.py", "host_rows.py", "table_kernel.cpp"):
        stem, suffix = name.split(".")
        copy = tmp_path / f"logs/{stem}_{header['sources'][name][:16]}.{suffix}"
        assert copy.read_bytes() == (ROOT / name).read_bytes()
    values = re.findall(r"^step:(\d+)/20 val_loss:(\S+) train_time:(\d+)ms step_avg:(\S+)ms$", text, re.MULTILINE)
    assert [int(step) for step, *_ in values] == [0, 10, 20] and values[0][2:] == ("0", "nan")
    assert re.search(rf"^final step:20/20 val_loss:{final:.5f} train_time:{values[-1][2]}ms$", text, re.MULTILINE)
    assert re.search(r"\ntarget val_loss:3.9 met at step:(10|20) train_time:\d+ms\n$", text)
    with pytest.raises(UserError, match="abc.txt: found a log of that name"):
        train_gpt.main([*tiny, "--run_id=abc"])
    train_gpt.main([*tiny, "--run_id=other", "--target_loss=0.1"])
    assert (tmp_path / "logs/other.txt").read_text().endswith("target val_loss:0.1 not met\n")
    assert len(list((tmp_path / "logs").glob("*.py"))) == 4 and text == (tmp_path / "logs/abc.txt").read_text()


def test_a_terminal_shows_one_live_line(tiny, tmp_path):
    """In a pipe every step line is printed; on a terminal the training steps overwrite one line. The file has them all."""
    terminal, inner = os.openpty()
    process = subprocess.Popen([sys.executable, str(ROOT / "train_gpt.py"), *tiny, "--run_id=t"], stdout=inner, env={**os.environ, "OMP_NUM_THREADS": "1"})
    os.close(inner)
    shown = b""
    try:
        while part := os.read(terminal, 1 << 16):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait() == 0
    shown = shown.decode()
    assert len(re.findall(r"\r\x1b\[Kstep \d+/20  loss \d\.\d{3}  [\d,]+ tokens/s  \d+:\d\d left", shown)) == 20
    assert "train_loss" not in shown and "step:10/20 val_loss" in shown and "final step:20/20" in shown
    assert len(re.findall(r"^step:\d+/20 train_loss", (tmp_path / "logs/t.txt").read_text(), re.MULTILINE)) == 2


def test_the_log_ends_with_where_the_time_went(tiny, tmp_path):
    train_gpt.main([*tiny, "--run_id=r", "--peak_tflops=1"])
    log = (tmp_path / "logs/r.txt").read_text()
    waited, table, whole = map(float, re.search(r"^waited for data (\S+) s, table (\S+) s of (\S+) s$", log, re.MULTILINE).groups())
    assert 0 < table < whole and waited < whole
    reached, share = map(float, re.search(r"^(\S+) TFLOP/s a rank, MFU (\S+)% of 1$", log, re.MULTILINE).groups())
    assert 0 < reached < 1 and share == pytest.approx(100 * reached, abs=0.1)
    assert "compiled on the clock" not in log


def slow_ngrams(tokens: list[int], order: int) -> list[tuple | None]:
    """At each position of a row the n-gram that ends there, None where its document began too late for it."""
    found, begins = [], 0
    for t, token in enumerate(tokens):
        begins = t if token == DOC_START else begins
        found.append(tuple(tokens[t - order + 1:t + 1]) if t - order + 1 >= begins else None)
    return found


def test_held_out_scores_split_by_how_often_an_ngram_was_trained_on(tiny):
    """Against a count of n-grams as tuples and a loss a row at a time; with a stage of short segments, which hold fewer n-grams."""
    config = parse_args([*tiny, "--val_tokens=512", "--micro_batch_tokens=256", "--tie_until=1", "--stages=1/2:1:32-32:1:8,1:1:32-32:1"])
    with join_world(config) as world:
        trainer = Trainer(config, world, open_dataset(config))
        for step in range(15):
            batches, cycle = trainer.prepare(step)
            trainer.train_step(step, batches[0], cycle)
            if step == 5:
                assert len(trainer.held_out(5)) > 8  # with a stage that has not begun
        lines, evaluated = trainer.held_out(15), trainer.evaluate(15)
        rows = {"train": trainer.dataset.train.read(0, 15 * 48), "val": trainer.dataset.val.read(0, 16)}
        scores = []
        for row in rows["val"]:
            batch = make_batch(row[None], 1, 1, DOC_START)
            numbers, signs = train_gpt.ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
            memory = trainer.table.read(trainer.table.rows, numbers, signs)[None]
            for said in (memory, torch.zeros_like(memory)):
                with torch.no_grad():
                    x = trainer.model.hidden(batch.tokens[0], batch.starts[0], said, **stage_inputs(config, batch.starts[0]))
                    logits = 23 * torch.sigmoid((F.linear(x[0], trainer.model.embed) + 5) / 7.5)
                scores += [F.cross_entropy(logits, row[1:], reduction="none"), (logits.argmax(1) == row[1:]).float()]
    scores = torch.stack(scores).view(16, 4, 32).transpose(0, 1)
    pattern = r"(\d+) tokens, loss (\S+) \(off (\S+)\), right (\S+) \(off (\S+)\)"
    whole = re.fullmatch(f"held out: {pattern}; where the n-gram was", lines[0]).groups()
    loss, right, loss_off, right_off = scores.mean((1, 2)).tolist()
    assert [float(number) for number in whole] == pytest.approx([512, loss, loss_off, right, right_off], abs=6e-5)
    assert float(whole[1]) == pytest.approx(evaluated, abs=1e-5)
    assert loss != loss_off and right != right_off
    found, seen = iter(lines[1:]), set()
    for order in (2, 3):
        trained = collections.Counter()
        for number, row in enumerate(rows["train"].tolist()):
            width = 8 if number < 10 * 48 else 32
            for first in range(0, 32, width):
                trained.update(slow_ngrams(row[first:first + width], order))
        ngrams = [slow_ngrams(row[:-1].tolist(), order) for row in rows["val"]]
        times = torch.tensor([[-1 if ngram is None else trained[ngram] for ngram in row] for row in ngrams])
        for name, here in {"cut short by its segment's start": times < 0, "never met": times == 0, "met once": times == 1, "met 2 to 9 times": (times > 1) & (times < 10),
                           "met 10 to 99 times": (times > 9) & (times < 100), "met 100 times or more": times > 99}.items():
            if not here.any():
                continue
            line = next(found)
            got = re.fullmatch(f"  order {order}, {name}: {pattern}", line).groups()
            means = [scores[i][here].mean().item() for i in (0, 2, 1, 3)]
            assert [float(number) for number in got] == pytest.approx([here.sum().item(), *means], abs=6e-5), line
            seen.add(name)
    assert next(found, None) is None and len(seen) >= 5


@pytest.mark.parametrize("flags", [["--ngram_rows=0"], ["--ngram_rows=0", "--dtype=bfloat16"], ["--fp8_head", "--model_dim=64", "--heads=4"]])
def test_held_out_scores_are_of_the_loss_that_is_evaluated(flags, tiny):
    """In any type; and a run without a table has nothing to switch off."""
    config = parse_args([*tiny, "--val_tokens=512", *flags])
    with join_world(config) as world:
        trainer = Trainer(config, world, open_dataset(config))
        for step in range(3):
            batches, cycle = trainer.prepare(step)
            trainer.train_step(step, batches[0], cycle)
        lines, evaluated = trainer.held_out(3), trainer.evaluate(3)
    assert float(re.search(r"loss ([\d.]+)", lines[0])[1]) == pytest.approx(evaluated, abs=1.1e-5)
    assert all(("off" in line) == ("--fp8_head" in flags) for line in lines) and len(lines) > 4


def test_a_loss_that_is_not_finite_ends_the_run(tiny, tmp_path):
    done = run_trainer(*tiny, "--muon_lr=1e38", "--run_id=bad")
    assert done.returncode == 1
    assert re.search(r"error: training loss: found (nan|inf|-inf) after step \d+, expected a finite number", done.stderr)
    assert re.search(r"^error: ", (tmp_path / "logs/bad.txt").read_text(), re.MULTILINE)


# ---- bad input and plans ----------------------------------------------------------------------------------------------------

def copy_data(tiny_data, tmp_path):
    for path in tiny_data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def cut_train(folder):
    path = folder / "tiny_train_000002.bin"
    path.write_bytes(path.read_bytes()[:-100])


FAULTS = {
    "no shards": (lambda folder: [path.unlink() for path in folder.glob("*")], r"found no \*_train_\*\.bin, expected token shards"),
    "no validation": (lambda folder: (folder / "tiny_val_000000.bin").unlink(), r"found no \*_val_\*\.bin"),
    "cut short": (cut_train, r"tiny_train_000002\.bin: found 40926 bytes, expected 41026"),
    "foreign file": (lambda folder: (folder / "x_train_1.bin").write_bytes(b"x" * 3000), r"x_train_1\.bin: found magic"),
    "id too large": (lambda folder: write_shard(folder / "tiny_train_000002.bin", [1, 2, VOCAB] * 9000),
                     r"tiny_train_000002\.bin: found token id 61, expected ids below its vocabulary size 61"),
    "two vocabularies": (lambda folder: write_shard(folder / "tiny_train_000002.bin", [1] * 9000, 99),
                         r"tiny_train_000002\.bin: found vocabulary size 99"),
    "too few tokens": (lambda folder: [(folder / f"tiny_train_00000{i}.bin").unlink() for i in (1,)],
                       r"found 20,001 train tokens, expected 30,721 for 20 steps;.*--epochs=2"),
    "too little validation": (lambda folder: write_shard(folder / "tiny_val_000000.bin", [1] * 1000), r"--val_tokens=992"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_data_ends_in_one_clear_error(tiny, tiny_data, tmp_path, fault):
    make, message = FAULTS[fault]
    folder = copy_data(tiny_data, tmp_path)
    make(folder)
    with pytest.raises(UserError, match=message):
        train_gpt.main([*tiny, f"--data={folder}"])


def test_bad_data_ends_every_rank(tiny, tiny_data, tmp_path):
    """The bad id lies in a shard that only rank 1 checks."""
    folder = copy_data(tiny_data, tmp_path)
    FAULTS["id too large"][0](folder)
    done = run_trainer(*tiny, f"--data={folder}", ranks=3)
    assert done.returncode == 1 and "error: " in done.stderr
    assert re.search(FAULTS["id too large"][1], done.stderr) and "Traceback" not in done.stderr.split("error: ")[0]


def test_epochs_read_the_data_again(tiny, tmp_path):
    write_shard(tmp_path / "t_train_1.bin", markov_tokens(9000, 1)), write_shard(tmp_path / "t_val_1.bin", markov_tokens(3000, 2))
    assert math.isfinite(train_gpt.main([*tiny, f"--data={tmp_path}", "--epochs=4"]))


@pytest.mark.parametrize("ranks", [1, 3])
def test_dry_run_plans_without_training(tiny, tmp_path, ranks):
    out = run_trainer(*tiny, "--dry_run", ranks=ranks).stdout
    assert f"plan for {ranks} rank" in out and "train tokens on disk" in out and "50,001" in out and "table rows" in out
    assert "step:" not in out and not (tmp_path / "logs").exists()


def test_flops_are_what_torch_counts():
    """Products by torch's own counter; of attention, which it counts without the mask, the pairs that a mask lets through."""
    config = parse_args(["--device=cpu", *TINY[2:], "--stages=1:1:5-16:1", "--layers=4"])
    model, table_rows = GPT(config, VOCAB), torch.randn(8, 32, 24)
    batch = make_batch(torch.randint(0, DOC_START, (8, 33)), 8, 8, DOC_START)
    with FlopCounterMode(display=False) as counter:
        loss = model(batch.tokens[0], batch.starts[0], table_rows, batch.targets[0], tied=False, **stage_inputs(config, batch.starts[0]))
        loss.backward()
    products = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    seen = [int(attention_mask(batch.starts[0, :1], window, flex=False).sum()) for window in (5, 5, 5, 16)]
    attention = 3 * sum(4 * config.model_dim * pairs for pairs in seen) / 32
    found = train_gpt.flops_per_token(config, model.head.shape[0], (5, 16))
    assert found == pytest.approx(products / 256 + attention, rel=5e-3)  # gates are left out


@pytest.mark.parametrize("track, size, gigabytes", [("fineweb", 8, 80), ("fineweb80", 1, 80), ("fineweb24", 1, 24)])
def test_presets_fit_their_cards(track, size, gigabytes):
    config = parse_args([f"--track={track}", "--device=cuda", "--dry_run", f"--ranks={size}"])
    plan = train_gpt.make_plan(config, World(0, size, size, torch.device("cuda"), None, None), 50257, 0)
    assert 0.5 * gigabytes * 1e9 < plan["bytes_per_rank"] < 0.95 * gigabytes * 1e9


def test_ranks_that_are_not_here_can_be_planned_for(capsys):
    assert math.isnan(train_gpt.main(["--track=fineweb", "--device=cuda", "--dry_run", "--ranks=4", "--peak_tflops=1000", "--link_gbs=400"]))
    lines = dict(re.findall(r"^  (\S.*?) {2,}([\d,.]+)", capsys.readouterr().out, re.MULTILINE))
    tokens, flops = 393_216, float(lines["flops per token"].replace(",", ""))
    assert float(lines["least compute ms per step"]) == pytest.approx(tokens * flops / 4 / 1e12, rel=1e-3)
    sent = sum(float(lines[f"{what} exchange per step"].replace(",", "")) for what in ("dense", "table"))
    assert float(lines["least exchange ms per step"]) == pytest.approx(sent * 2**20 / 400e9 * 1e3, rel=1e-2)


def test_record_size_plans_under_16_gib_a_rank(tiny_data):
    config = parse_args(["--device=cpu", "--track=fineweb", f"--data={tiny_data}"])
    gpu_world = World(0, 8, 8, torch.device("cuda"), None, None)
    dataset = open_dataset(parse_args([*TINY, f"--data={tiny_data}"]))
    plan = train_gpt.make_plan(config, gpu_world, dataset.vocab_size, dataset.train.num_tokens)
    table = plan["table_rows_bytes"] + plan["table_state_bytes"]
    assert 84_602_880 * (768 * 2 + 8) / 8 <= table < 16 << 30


def test_a_run_that_cannot_fit_is_refused_before_it_allocates(tiny):
    with pytest.raises(UserError, match=r"memory: found .* GiB available .*; lower --model_dim"):
        train_gpt.main([*tiny, "--model_dim=400000", "--ngram_rows=0", "--head_chunk_tokens=1"])
    plan = {"bytes_per_rank": 1 << 60, "table_rows_bytes": 1 << 59, "optimizer_bytes": 1 << 40}
    with pytest.raises(UserError, match=r"of which table_rows takes 536870912.00; lower --ngram_rows"):
        check_fits(plan, world_of(0, 1))


def test_table_report_counts_exactly(stream_of, tmp_path):
    tokens = np.array([9, 1, 2, 1, 2, 3, 1, 2, 9, 1, 2, 3, 3])
    shard = open_shard(write_shard(tmp_path / "r_train_1.bin", tokens, 10, 9))
    config = Config(seq_len=12, batch_tokens=12, val_tokens=12, steps=1, ngram_rows=2_000_000)
    dataset = Dataset(TokenStream([shard], 12, False), None, 10, 9, None)
    lines = table_report(config, dataset, 2, ngram_addresses, channels(config))
    # Pairs inside segments: 91 12 21 12 23 31 12 | 91 12 23 -> 91 12 21 23 31; triples: 912 121 212 123 231 312 | 912 123.
    assert "order 2: 5 distinct n-grams in 10 reads; 5 of 1,000,000 rows used (0.0%); 0.0% of reads share" in lines[1]
    assert "order 3: 6 distinct n-grams in 8 reads; 6 of" in lines[2]
    assert "used rows by owner: 5 to 6" in lines[3]
    config = dataclasses.replace(config, ngram_rows=4)
    crowded = table_report(config, dataset, 1, ngram_addresses, channels(config))
    assert "1 of 2 rows used (50.0%); 100.0% of reads share" in crowded[1]


def test_table_report_flag(tiny):
    out = run_trainer(*tiny, "--table_report").stdout
    assert "order 3:" in out and "step:" not in out


def test_sample_continues_a_prompt(tiny, tiny_data, tmp_path, capsys):
    folder = copy_data(tiny_data, tmp_path)
    tokens = [bytes([i]) for i in range(97, 97 + 26)] + [bytes([i]) for i in range(65, 65 + 34)]
    import base64
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    train_gpt.main([*tiny, f"--data={folder}", "--sample=hello"])
    assert re.search(r"^sample:\n  \| hello", capsys.readouterr().out, re.MULTILINE)
