"""records/look.py and data/report.py: what they print, against slow counts and a model fed by hand."""
from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from conftest import DOC_START, ROOT, TINY, VOCAB, on_ranks, write_shard
from train_gpt import (GPT, Config, TokenStream, Trainer, UserError, attention_mask, join_world, make_batch,
                       manifest_digest, ngram_addresses, open_dataset, open_shard, parse_args, rotary_table, sign_pool,
                       tokenizer_encoding)

sys.path.insert(0, str(ROOT / "records"))
import look
from data import report

LETTERS = [bytes([i]) for i in range(63, 63 + VOCAB - 1)]  # one for each id but the document start
STAGED = """
import sys
from dataclasses import dataclass
sys.path.insert(0, {root!r})
import train_gpt

@dataclass(frozen=True)
class Base(train_gpt.Config):
    louder: float = train_gpt.flag(1.0, "what the memory is multiplied by")

class Staged(Base):
    pass

class Loud(train_gpt.GPT):
    def add_memory(self, x, memory, i):
        return super().add_memory(x, self.config.louder * memory, i)

if __name__ == "__main__":
    train_gpt.run_command(train_gpt.main, config_class=Staged, model_class=Loud)
"""


@dataclasses.dataclass(frozen=True)
class TwoStages(Config):
    """Segments are short in the first half, so that they hold fewer n-grams."""
    stages: tuple = (dict(until=1 / 2, length=8), dict(until=1.0))


def output(*argv) -> str:
    """What look.py prints."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        look.main([str(argument) for argument in argv])
    return screen.getvalue()


def look_on_a_rank(config, world, argv):
    """look.py's parts where a process group is there already; returns what each rank would print."""
    chosen, _, classes = look.choose(argv)
    trainer, step = look.open_trainer(chosen, world, classes)
    return trainer.evaluate(step), look.held_out(trainer, step), trainer.sample(step, 20)


@pytest.fixture(scope="module")
def lettered(tiny_data, tmp_path_factory) -> Path:
    """The tiny data with a tokenizer of single letters beside it."""
    folder = shutil.copytree(tiny_data, tmp_path_factory.mktemp("letters") / "data")
    lines = [base64.b64encode(letter) + b" %d\n" % i for i, letter in enumerate(LETTERS)]
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(lines))
    return folder


@pytest.fixture(scope="module")
def learned(lettered, tmp_path_factory) -> tuple[Path, float]:
    """A checkpoint after steps enough for the table to have a say in what is drawn, and the loss of its run."""
    out = tmp_path_factory.mktemp("learned")
    loss = train_gpt.main([*TINY, f"--data={lettered}", f"--out={out}", "--run_id=r", "--steps=30", "--val_tokens=512",
                           "--sample_tokens=0", "--checkpoint"])
    return out / "checkpoints/r_step000030", loss


# ---- held-out lines -------------------------------------------------------------------------------------------------

def slow_ngrams(tokens: list[int], order: int) -> list[tuple | None]:
    """At each position of a row the n-gram that ends there, None where its document began too late for it."""
    found, begins = [], 0
    for t, token in enumerate(tokens):
        begins = t if token == DOC_START else begins
        found.append(tuple(tokens[t - order + 1:t + 1]) if t - order + 1 >= begins else None)
    return found


def stage_inputs(config, starts):
    mask = attention_mask(starts, 32, flex=False)
    return dict(masks=(mask, mask), rotary=rotary_table(config, 0))


def slow_scores(trainer, rows) -> torch.Tensor:
    """[4, rows, 32]: loss and whether right, with the table and with zeros, a row at a time."""
    config, model, scores = trainer.config, trainer.model, []
    for row in rows:
        batch = make_batch(row[None], 1, 1, DOC_START)
        numbers, signs = ngram_addresses(batch.tokens.flatten(), batch.starts.flatten(), config)
        memory = trainer.table.read(trainer.table.rows, numbers, signs)[None]
        for read in (memory, torch.zeros_like(memory)):
            with torch.no_grad():
                x = model.hidden(batch.tokens[0], batch.starts[0], read, **stage_inputs(config, batch.starts[0]))
                logits = 23 * torch.sigmoid((F.linear(x[0], model.embed) + 5) / 7.5)
            scores += [F.cross_entropy(logits, row[1:], reduction="none"), (logits.argmax(1) == row[1:]).float()]
    return torch.stack(scores).view(len(rows), 4, 32).transpose(0, 1)


def test_held_out_scores_split_by_how_often_training_met_an_ngram(tiny_data):
    """Against a count of n-grams as tuples and a loss a row at a time; with a stage of short segments."""
    flags = [*TINY, f"--data={tiny_data}", "--val_tokens=512", "--micro_batch_tokens=256", "--tie_until=1"]
    config = parse_args(flags, TwoStages)
    with join_world(config) as world:
        trainer = Trainer(config, world, open_dataset(config))
        for step in range(15):
            batches, cycle = trainer.prepare(step)
            trainer.train_step(step, batches[0], cycle)
            if step == 5:
                assert len(look.held_out(trainer, 5)) > 8  # with a stage that has not begun
        lines, evaluated = look.held_out(trainer, 15), trainer.evaluate(15)
        rows = {"train": trainer.dataset.train.read(0, 15 * 48), "val": trainer.dataset.val.read(0, 16)}
        scores = slow_scores(trainer, rows["val"])
    pattern = r"(\d+) tokens, loss (\S+) \(off (\S+)\), accuracy (\S+) \(off (\S+)\)"
    whole = re.fullmatch(f"held out: {pattern}; by the n-gram's count in training:", lines[0]).groups()
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
        for name, here in {"cut short by its segment's start": times < 0, "count 0": times == 0, "count 1": times == 1,
                           "count 2 to 9": (times > 1) & (times < 10), "count 10 to 99": (times > 9) & (times < 100),
                           "count 100 or more": times > 99}.items():
            if not here.any():
                continue
            line = next(found)
            got = re.fullmatch(f"  order {order}, {name}: {pattern}", line).groups()
            means = [scores[i][here].mean().item() for i in (0, 2, 1, 3)]
            assert [float(number) for number in got] == pytest.approx([here.sum().item(), *means], abs=6e-5), line
            seen.add(name)
    assert next(found, None) is None and len(seen) >= 5


def test_without_a_table_there_is_nothing_to_switch_off(tiny_data):
    """And in bfloat16 the loss is the evaluation's too."""
    config = parse_args([*TINY, f"--data={tiny_data}", "--val_tokens=512", "--ngram_rows=0", "--dtype=bfloat16"])
    with join_world(config) as world:
        trainer = Trainer(config, world, open_dataset(config))
        lines, evaluated = look.held_out(trainer, 3), trainer.evaluate(3)
    assert float(re.search(r"loss ([\d.]+)", lines[0])[1]) == pytest.approx(evaluated, abs=1.1e-5)
    assert not any("off" in line for line in lines) and len(lines) > 4


# ---- checkpoints ----------------------------------------------------------------------------------------------------

def tree(folder: Path) -> dict[str, tuple]:
    """Every file under a folder, with what changes when it is written."""
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
            for path in sorted(folder.rglob("*"))}


def test_a_checkpoint_is_read_in_any_world_and_left_as_it_was(learned, lettered, tmp_path, monkeypatch):
    """In one process, while a run holds the folder's lock, and on two ranks: the loss of the run, the same lines."""
    path, loss = learned
    out, before = path.parent.parent, tree(path.parent.parent)
    monkeypatch.chdir(tmp_path)
    with train_gpt.lock_folder(path.parent, "training"):
        locked = tree(out)
        printed = output("latest", f"--out={out}")
        assert tree(out) == locked and locked.keys() >= before.keys() and not list(tmp_path.iterdir())
    assert printed.splitlines()[:2] == [str(path), f"step:30/30 val_loss:{loss:.5f}"] and "sample" not in printed
    assert f"held out: 512 tokens, loss {loss:.5f} (off " in printed
    flags = [*TINY, f"--data={lettered}"]
    (evaluated, lines, sample), other = on_ranks(2, look_on_a_rank, [str(path), "--micro_batch_tokens=64"], flags=flags)
    assert other == (evaluated, lines, sample) and len(sample) == 20
    assert evaluated == pytest.approx(loss, abs=1e-5)
    here, there = ([re.split(r"(\d+\.\d+)", line) for line in text] for text in (lines, printed.splitlines()[2:]))
    assert [line[::2] for line in here] == [line[::2] for line in there]  # the words, and the numbers of tokens
    for line, expected in zip(here, there):
        assert [float(x) for x in line[1::2]] == pytest.approx([float(x) for x in expected[1::2]], abs=2e-5)


def contents(path: Path) -> tuple[Config, dict, dict]:
    """A checkpoint's configuration, its weights, and the touched rows of its table by number."""
    manifest = json.loads((path / "manifest.json").read_text())
    kept = {name: tuple(value) if isinstance(value, list) else value for name, value in manifest["config"].items()}
    rows = {}
    for name in manifest["files"]:
        if name.startswith("table"):
            part = torch.load(path / name, weights_only=True)
            rows |= dict(zip(part["ids"].tolist(), part["rows"].float()))
    return Config(**kept), torch.load(path / "dense.pt", weights_only=True)["weights"], rows


def continued(path: Path, prompt: list[int], count: int, zeroed: bool = False) -> list[int]:
    """The prompt and `count` tokens more, from a checkpoint's tensors alone: memory summed read by read."""
    config, weights, rows = contents(path)
    model, pool = GPT(config, VOCAB), sign_pool(config, torch.float32)
    model.load_state_dict(weights)
    generator, ids = torch.Generator().manual_seed(config.seed), [DOC_START, *prompt]
    for _ in range(count):
        context = torch.tensor(ids[-config.seq_len:])
        starts = context == DOC_START
        starts[0] = True
        numbers, signs = ngram_addresses(context, starts, config)
        memory = torch.zeros(len(context), config.ngram_dim)
        for t in range(len(context)):
            for c in range(len(numbers) if not zeroed else 0):
                memory[t] += rows.get(int(numbers[c, t]), torch.zeros(config.ngram_dim)) * pool[signs[c, t]]
        with torch.no_grad():
            x = model.hidden(context[None], starts[None], memory[None], **stage_inputs(config, starts[None]))
            logits = 23 * torch.sigmoid((x[0, -1] @ model.head.T + 5) / 7.5)[:VOCAB]
        ids.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
    return ids[1:]


@pytest.mark.parametrize("prompt", ["", "hello", "abcdefghijklmnopqrstuvwxyzabcdefghijklmn"])
def test_a_sample_sees_the_running_context(learned, prompt):
    """A prompt shorter and longer than a row; what the memory adds is read anew for every token drawn."""
    path, encoding = learned[0], tokenizer_encoding(LETTERS)
    ids = encoding.encode_ordinary(prompt)
    expected, without = (continued(path, ids, 40, zeroed) for zeroed in (False, True))
    printed = output(path, f"--prompt={prompt}", "--sample_tokens=40")
    sample = re.search(r"^sample:\n  \| (.*)$", printed, re.MULTILINE)[1]
    assert sample == encoding.decode(expected) and sample.startswith(prompt) and expected != without


def test_a_prompt_is_answered_even_where_the_run_printed_no_samples(learned):
    assert re.search(r"^sample:\n  \| hello.", output(learned[0], "--prompt", "hello"), re.MULTILINE)


def rewritten(path: Path, to: Path, **changes) -> Path:
    """A copy of a checkpoint with another manifest, signed as the trainer would."""
    shutil.copytree(path, to)
    manifest = json.loads((to / "manifest.json").read_text())
    del manifest["sha256"]
    manifest |= changes
    (to / "manifest.json").write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}))
    return to


def test_what_a_resumed_run_refuses_is_refused(learned, tiny_data, tmp_path):
    path = learned[0]
    damaged = shutil.copytree(path, tmp_path / "damaged")
    content = bytearray((damaged / "dense.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "dense.pt").write_bytes(content)
    other = shutil.copytree(tiny_data, tmp_path / "other")
    write_shard(other / "tiny_train_000002.bin", np.zeros(20_001))
    foreign = rewritten(path, tmp_path / "foreign", variant=["engram.py: EngramConfig", "engram.py: Engram"])
    for arguments, message in (
            ([damaged], "dense.pt: found .* checkpoint is damaged"),
            ([path, f"--data={other}"], "found another data set"),
            ([path, "--ngram_lr=3"], "contradict the checkpoint: --ngram_lr=3.0"),
            ([path, "--valtokens=3"], "no such flag"), (["--prompt=x", path], "a flag first"),
            ([foreign], "a checkpoint of engram.py: EngramConfig, engram.py: Engram, expected .* with --variant"),
            ([path, "--variant=none.py"], "--variant=none.py: found no such file"),
            ([path, "--prompt=x", f"--data={tiny_data}"], "found no tokenizer.tiktoken")):
        with pytest.raises(UserError, match=message):
            output(*arguments)


def test_a_variants_checkpoint_is_read_with_its_classes(tiny_data, tmp_path):
    """Its own flag is the checkpoint's, its model adds the memory its own way; a base class stands for nothing."""
    script = tmp_path / "staged.py"
    script.write_text(STAGED.format(root=str(ROOT)))
    classes = look.load_variant(script)
    assert [c.__name__ for c in classes] == ["Staged", "Loud", "NgramTable"]
    flags = [*TINY, f"--data={tiny_data}", f"--out={tmp_path}", "--steps=4", "--sample_tokens=0", "--checkpoint",
             "--louder=3"]
    loss = train_gpt.main(flags, *classes)
    with pytest.raises(UserError, match="a checkpoint of staged.py: Staged, staged.py: Loud, .* with --variant"):
        output("latest", f"--out={tmp_path}")
    assert f"step:4/4 val_loss:{loss:.5f}" in output("latest", f"--out={tmp_path}", f"--variant={script}")
    script.write_text(script.read_text() + "\nclass Quiet(train_gpt.GPT):\n    pass\n")
    with pytest.raises(UserError, match=r"found 2 classes that stand in for GPT \(Loud, Quiet\)"):
        look.load_variant(script)


# ---- data/report.py -------------------------------------------------------------------------------------------------

def test_table_report_counts_exactly(tmp_path):
    tokens = np.array([9, 1, 2, 1, 2, 3, 1, 2, 9, 1, 2, 3, 3])
    shard = open_shard(write_shard(tmp_path / "r_train_1.bin", tokens, 10, 9))
    config = Config(seq_len=12, batch_tokens=12, val_tokens=12, steps=1, ngram_rows=2_000_000)
    dataset = train_gpt.Dataset(TokenStream([shard], 12, False), None, 10, 9)
    lines = report.table_report(config, dataset, 2)
    # Pairs inside segments: 91 12 21 12 23 31 12 | 91 12 23 -> 91 12 21 23 31;
    # triples: 912 121 212 123 231 312 | 912 123.
    assert "order 2: 5 distinct n-grams in 10 reads; 5 of 1,000,000 rows used (0.0%); 0.0% of reads share" in lines[1]
    assert "order 3: 6 distinct n-grams in 8 reads; 6 of" in lines[2]
    assert "used rows by owner: 5 to 6" in lines[3]
    crowded = report.table_report(dataclasses.replace(config, ngram_rows=4), dataset, 1)
    assert "1 of 2 rows used (50.0%); 100.0% of reads share" in crowded[1]


def test_report_takes_the_trainers_flags(tiny_data, capsys):
    report.main([*TINY, f"--data={tiny_data}", "--ranks=3"])
    first, order_2, order_3, owners = capsys.readouterr().out.splitlines()
    assert first == "table report over 30,720 of the run's 30,720 tokens: 4,001 rows, 3 ranks"
    assert order_2.startswith("  order 2: ") and order_3.startswith("  order 3: ") and "used rows by owner" in owners
    with pytest.raises(UserError, match="--ngram_rows: found 0, expected a table"):
        report.main([*TINY, f"--data={tiny_data}", "--ngram_rows=0"])
