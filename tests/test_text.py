"""data/text.py: its shards decode to the text it read, split as documented; faults leave nothing that looks whole."""
import base64
import functools
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tiktoken.load

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from data import text
from train_gpt import UserError, load_tokenizer, open_shard, tokenizer_encoding

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"      # as published
# CRLF, runs of spaces, no newline at the end, letters of one to four bytes, the document start's own name, a NUL.
NASTY = "def f(x):\r\n\treturn  x\n\n\n   été 中文 🙂 <|endoftext|> it's\u2003'll 123 \0 end"


@functools.cache
def vocabulary() -> list[str]:
    rng = np.random.default_rng(7)
    return ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(1, 9))) for _ in range(2000)]


def words(num_chars: int, seed: int = 0) -> str:
    """Lines of made-up words, whose frequencies fall off as in real text; at most num_chars long."""
    picks = np.minimum(np.random.default_rng(seed).zipf(1.3, num_chars // 2), 2000) - 1
    return "".join(vocabulary()[i] + ("\n" if n % 12 == 11 else " ") for n, i in enumerate(picks))[:num_chars]


def run(*arguments, out: Path) -> Path:
    text.main([*map(str, arguments), f"--out={out}", "--name=t"])
    return out


def refused(*arguments) -> str:
    """The words with which a run is refused."""
    with pytest.raises(UserError) as error:
        text.main([*map(str, arguments)])
    return str(error.value)


def read(out: Path, part: str) -> np.ndarray:
    """All tokens of a part, of shards that open and hold only ids of their vocabulary."""
    shards = [open_shard(path) for path in sorted(out.glob(f"t_{part}_*.bin"))]
    assert shards
    for shard in shards:
        shard.hash()
    return np.concatenate([shard.read() for shard in shards])


def documents(out: Path, part: str) -> list[str]:
    """The decoded documents of a part; every one begins with the document-start token."""
    doc_start = open_shard(next(out.glob("t_val_*.bin"))).doc_start
    tokens = read(out, part)
    assert tokens[0] == doc_start
    encoding = load_tokenizer(out, doc_start + 1)
    return [encoding.decode(ids[1:].tolist()) for ids in np.split(tokens, np.flatnonzero(tokens == doc_start)[1:])]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in folder but the lock and the hashes, which hold times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", "shards.json")}


@pytest.fixture
def jsonl(tmp_path):
    def write(texts):
        file = tmp_path / "documents.jsonl"
        file.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
        return file
    return write


# ---- tokenizers -----------------------------------------------------------------------------------------------------

def gpt2_at_hand() -> bool:
    try:
        tiktoken.get_encoding("gpt2")
    except (OSError, ValueError):
        return False
    return True


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "gpt2"])
def test_round_trip(jsonl, tmp_path, tokenizer):
    if tokenizer == "gpt2" and not gpt2_at_hand():
        pytest.skip("tiktoken has no GPT-2 vocabulary here and cannot fetch it")
    texts = [f"{i} {NASTY}{words(500, i)}" for i in range(40)]
    out = run(jsonl(texts), f"--tokenizer={tokenizer}", *(["--vocab_size=600"] if tokenizer == "bpe" else []),
              out=tmp_path / "out")
    assert documents(out, "train") == [t for i, t in enumerate(texts) if i % 10 != 9]
    assert documents(out, "val") == texts[9::10]
    shard = open_shard(out / "t_train_000001.bin")
    vocab_size = {"bytes": 257, "bpe": 600, "gpt2": 50257}[tokenizer]
    assert (shard.vocab_size, shard.doc_start) == (vocab_size, vocab_size - 1)
    if tokenizer == "bytes":
        assert bytes(i for i in read(out, "val").tolist() if i < 256) == "".join(texts[9::10]).encode()
    if tokenizer == "gpt2":
        reference = tiktoken.get_encoding("gpt2")
        assert read(out, "val").tolist() == [i for t in texts[9::10] for i in (50256, *reference.encode_ordinary(t))]


def merges_by_the_book(texts: list[str], num_merges: int) -> list[bytes]:
    """Byte-pair encoding as defined: count pairs anew for each merge; the most frequent wins, ties go to low ids."""
    import regex
    tokens = [bytes([i]) for i in range(256)]
    chunks = [list(chunk.encode()) for t in texts for chunk in regex.findall(GPT2_PATTERN, t)]
    for _ in range(num_merges):
        counts: dict[tuple[int, int], int] = {}
        for chunk in chunks:
            for pair in zip(chunk, chunk[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        tokens.append(tokens[best[0]] + tokens[best[1]])
        for chunk in chunks:
            i = 0
            while i < len(chunk) - 1:
                if (chunk[i], chunk[i + 1]) == best:
                    chunk[i:i + 2] = [len(tokens) - 1]
                i += 1
    return tokens


def test_bpe_is_the_definition():
    texts = [NASTY, words(3000)]
    assert text.train_bpe(texts, 256 + 120 + 1) == merges_by_the_book(texts, 120)


def test_bpe_learns_from_training_documents_alone(jsonl, tmp_path):
    texts = [words(400, i) for i in range(40)]
    first = contents(run(jsonl(texts), "--vocab_size=500", out=tmp_path / "a"))
    texts[9::10] = [t.upper() for t in texts[9::10]]
    second = contents(run(jsonl(texts), "--vocab_size=500", out=tmp_path / "b"))
    assert first["tokenizer.tiktoken"] == second["tokenizer.tiktoken"]
    assert first["t_train_000001.bin"] == second["t_train_000001.bin"]
    assert first["t_val_000000.bin"] != second["t_val_000000.bin"]


def test_vocabulary_that_the_text_cannot_fill(jsonl, tmp_path, capsys):
    out = run(jsonl(["low lower lowest"] * 20), "--vocab_size=5000", out=tmp_path / "out")
    shard = open_shard(out / "t_train_000001.bin")
    # "low", " lower" and " lowest" become one token each: l+o, lo+w, then the ways to the other two
    assert shard.vocab_size == len((out / "tokenizer.tiktoken").read_bytes().splitlines()) + 1 < 280
    assert shard.doc_start == shard.vocab_size - 1
    assert read(out, "train").size == 18 * (1 + 3)
    assert f"vocabulary of {shard.vocab_size} only, 5,000 were asked for" in capsys.readouterr().out


def test_tokenizer_file_is_tiktokens_own(jsonl, tmp_path, monkeypatch):
    out = run(jsonl([words(300, i) for i in range(20)]), "--vocab_size=400", out=tmp_path / "out")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")            # tiktoken caches even local files
    ranks = tiktoken.load.load_tiktoken_bpe(str(out / "tokenizer.tiktoken"))
    assert sorted(ranks.values()) == list(range(399))
    encoding = load_tokenizer(out, 400)
    assert encoding.n_vocab == 400 and encoding.decode([399]) == "<|endoftext|>"
    assert all(encoding.decode_single_token_bytes(rank) == token for token, rank in ranks.items())


@pytest.mark.parametrize("line", [b"!!!! 1", b"YQ== 7", b"YQ==", b"YQ== x"])
def test_damaged_tokenizer_file(tmp_path, line):
    (tmp_path / "tokenizer.tiktoken").write_bytes(base64.b64encode(b"z") + b" 0\n" + line + b"\n")
    with pytest.raises(UserError, match="tokenizer.tiktoken: found a damaged line .* expected"):
        load_tokenizer(tmp_path, 3)


def test_gpt2_offline_names_the_files_that_tiktoken_looks_for(tmp_path):
    (tmp_path / "a.txt").write_text(words(1000))
    cache, out = tmp_path / "cache", tmp_path / "out"
    cache.mkdir()
    environment = {**os.environ, "TIKTOKEN_CACHE_DIR": str(cache), "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    script = [sys.executable, str(ROOT / "data/text.py"), str(tmp_path / "a.txt"), "--tokenizer=gpt2", f"--out={out}"]
    result = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert str(cache) in result.stderr and not out.exists()
    named = dict(re.findall(r"^  (\S+)  as  ([0-9a-f]{40})$", result.stderr, re.MULTILINE))
    assert set(named) == {"vocab.bpe", "encoder.json"}
    # tiktoken deletes a file of the right name whose content is wrong, and leaves any other.
    (cache / named["vocab.bpe"]).write_text("wrong")
    (cache / "vocab.bpe").write_text("wrong")
    assert subprocess.run(script, env=environment, capture_output=True, timeout=120).returncode == 1
    assert [path.name for path in cache.iterdir()] == ["vocab.bpe"]


# ---- split ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flag, expected", [
    (None, [9, 19, 29]), ("--val_fraction=0.1", [9, 19, 29]), ("--val_fraction=1/4", [3, 7, 11, 15, 19, 23, 27]),
    ("--val_fraction=0.4", [2, 4, 7, 9, 12, 14, 17, 19, 22, 24, 27, 29]), ("--val_every=7", [6, 13, 20, 27])])
def test_split_by_document(jsonl, tmp_path, flag, expected):
    file = jsonl([f"document {i}" for i in range(30)])
    out = run(file, "--tokenizer=bytes", *([flag] if flag else []), out=tmp_path / "out")
    assert documents(out, "val") == [f"document {i}" for i in expected]
    assert documents(out, "train") == [f"document {i}" for i in range(30) if i not in expected]


def test_twenty_documents_are_split_by_document_and_nineteen_within_the_text(jsonl, tmp_path):
    texts = [f"{i:04}" for i in range(20)]
    assert documents(run(jsonl(texts), "--tokenizer=bytes", out=tmp_path / "a"), "val") == ["0009", "0019"]
    # 19 x 4 = 76 characters: the last 7 are for validation, and no newline is near
    out = run(jsonl(texts[:19]), "--tokenizer=bytes", out=tmp_path / "b")
    assert documents(out, "train") == [*texts[:17], "0"]
    assert documents(out, "val") == ["017", "0018"]


def test_one_document_is_cut_at_the_start_of_a_line(tmp_path):
    lines = [f"line {i} {'x' * (i % 50)}\n" for i in range(2000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    out = run(tmp_path / "a.txt", "--tokenizer=bytes", out=tmp_path / "out")
    (train,), (val,) = documents(out, "train"), documents(out, "val")
    assert train + val == "".join(lines)
    tenth = len(train + val) // 10
    assert train.endswith("\n") and tenth - 60 < len(val) <= tenth      # the first line to start in the last tenth


@pytest.mark.parametrize("content, num_val", [
    ("x" * 5000, 500), ("x" * 4990 + "\n" + "x" * 9, 9), ("x" * 4999 + "\n", 500), ("x" * 4499 + "\n" + "x" * 500, 500),
    ("x" * 4498 + "\n" + "x" * 501, 500), ("x" * 4500 + "\n" + "x" * 499, 499),
    ("x" * 18999 + "\n" + "x" * 1000, 1000), ("x" * 19000 + "\n" + "x" * 999, 2000)])
def test_where_one_document_is_cut(tmp_path, content, num_val):
    (tmp_path / "a.txt").write_text(content)
    out = run(tmp_path / "a.txt", "--tokenizer=bytes", out=tmp_path / "out")
    (train,), (val,) = documents(out, "train"), documents(out, "val")
    assert train + val == content
    assert len(val) == num_val


@pytest.mark.parametrize("fraction", ["1/2", "1/10"])
def test_cut_holds_across_pieces(tmp_path, monkeypatch, fraction):
    """The same split whatever the size of the pieces that the text is read in."""
    first, second = words(4000), "é" * 3000
    (tmp_path / "a.txt").write_text(first)
    (tmp_path / "b.txt").write_text(second)
    made = []
    for size in (1 << 18, 64, 7):
        monkeypatch.setattr(text, "PIECE_BYTES", size)
        out = run(tmp_path / "a.txt", tmp_path / "b.txt", "--tokenizer=bytes", f"--val_fraction={fraction}",
                  out=tmp_path / str(size))
        made.append((documents(out, "train"), documents(out, "val")))
    assert made[0] == made[1] == made[2]
    num_val = int(7000 * Fraction(fraction))
    cut = 7000 - num_val
    if fraction == "1/2":       # in the first document, among lines
        cut = first.index("\n", cut - 1) + 1
        assert made[0] == ([first[:cut]], [first[cut:], second])
    else:                       # in the second, without lines
        assert made[0] == ([first, second[:cut - 4000]], [second[cut - 4000:]])


@pytest.mark.parametrize("content, message", [("", "found no document"), ("\n \n", "found no document"),
                                              ('{"text": ""}\n', "found no document"),
                                              ('{"text": "abc"}\n', "found 3 characters in 1 documents")])
def test_too_little_text(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    assert message in refused(tmp_path / "a.jsonl", f"--out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


# ---- reading --------------------------------------------------------------------------------------------------------

def test_folders_are_read_in_order_without_hidden_files(tmp_path):
    for name in ("b/2.md", "b/10.txt", "a.py", "c.JSONL", ".git/x.txt", "b/__pycache__/y.py", "b/.z.txt", "b/z.bin"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = text.find_files([tmp_path / "in", tmp_path / "in/a.py"])
    assert [path.relative_to(tmp_path / "in").as_posix() for path in found] == ["a.py", "b/10.txt", "b/2.md", "c.JSONL"]
    found = text.find_files([tmp_path / "in/b/2.md", tmp_path / "in"])
    assert [path.name for path in found] == ["2.md", "a.py", "10.txt", "c.JSONL"]


def test_bytes_that_are_not_utf8(tmp_path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 " * 10)
    (tmp_path / "good.txt").write_text("caf\ufffd " * 10)       # the replacement character itself is no fault
    lone = tmp_path / "lone.jsonl"
    lone.write_text('\ufeff{"text": "half a pair: \\ud83d."}\n\n')
    out = run(tmp_path / "bad.txt", tmp_path / "good.txt", lone, "--tokenizer=bytes", out=tmp_path / "out")
    assert "".join(documents(out, "train") + documents(out, "val")) == (
        "caf\ufffd " * 20 + "half a pair: \ufffd\ufffd\ufffd.")
    said = capsys.readouterr().out
    assert "2 files are not all UTF-8" in said and "bad.txt" in said and "lone.jsonl" in said and "good.txt" not in said


def test_pieces_encode_as_the_whole(tmp_path, monkeypatch):
    content = words(20000).replace("a", "\n\n  a")
    (tmp_path / "a.txt").write_text(content)
    monkeypatch.setattr(text, "PIECE_BYTES", 512)
    pieces = [piece for _, piece in text.Corpus([tmp_path / "a.txt"]).pieces("")]
    assert len(pieces) > 30 and "".join(pieces) == content
    encoding = tokenizer_encoding(text.train_bpe([content], 500))
    assert [i for piece in pieces for i in encoding.encode_ordinary(piece)] == encoding.encode_ordinary(content)


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 64, "é中🙂".encode() * 50, b"\n" * 200, b"a\n" * 100,
                                  b"\x80" * 99])
def test_cut_pieces_keeps_bytes_and_characters(data, monkeypatch):
    monkeypatch.setattr(text, "PIECE_BYTES", 16)
    pieces = list(text.cut_pieces(io.BytesIO(data)))
    assert b"".join(pieces) == data and max(map(len, pieces)) <= 16 and (len(pieces) > 1) == (len(data) >= 16)
    if data != b"\x80" * 99:
        assert "".join(piece.decode() for piece in pieces) == data.decode()


@pytest.mark.parametrize("line, message", [
    ('{"text": "a"', "line 3: found no JSON"), ('{"txt": "a"}', r"line 3: found the fields ['txt']"),
    ('["a"]', "line 3: found a list"), ('{"text": 7}', "line 3: found \"text\": 7")])
def test_bad_jsonl_names_the_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n\n' + line + "\n")
    err = refused(tmp_path / "a.jsonl", f"--out={tmp_path / 'out'}")
    assert f"a.jsonl, {message}" in err and "expected an object" in err
    assert not (tmp_path / "out").exists()


MEASURE = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from data import text
text.main(sys.argv[2:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("suffix, tokenizer", [(".txt", "bytes"), (".jsonl", "bpe")])
def test_memory_does_not_grow_with_the_text(tmp_path, suffix, tokenizer):
    """Peak memory, in MiB, of a long text against that of a short one: far less apart than the long text's tokens."""
    block = words(1 << 20)
    line = (json.dumps({"text": block[:50000]}) + "\n") if suffix == ".jsonl" else block
    peaks = []
    for total_mib in (4, {".txt": 96, ".jsonl": 20}[suffix]):
        file = tmp_path / f"{total_mib}{suffix}"
        with open(file, "w") as stream:
            for _ in range((total_mib << 20) // len(line)):
                stream.write(line)
        size = ["--vocab_size=1000"] if tokenizer == "bpe" else []
        result = subprocess.run([sys.executable, "-c", MEASURE, str(ROOT), str(file), f"--tokenizer={tokenizer}",
                                 f"--out={tmp_path / file.stem}", *size], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout.split()[-1]))
    # 96 MiB of bytes are 192 MiB of uint16; 20 MiB of text are over 5 M Python integers in lists, 200 MiB or so
    assert peaks[1] - peaks[0] < 60, peaks


# ---- shards ---------------------------------------------------------------------------------------------------------

def test_header_as_documented(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    raw = (run(tmp_path / "a.txt", "--tokenizer=bytes", out=tmp_path / "out") / "t_train_000001.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 10, 257, 256] + [0] * 251
    assert np.frombuffer(raw[1024:], "<u2").tolist() == [256, *b"abcdefghi"]


@pytest.mark.parametrize("shard_tokens", [1, 7, 100, 270, 1000])
def test_shards_of_limited_size(jsonl, tmp_path, shard_tokens):
    texts = [f"document {i}." for i in range(30)]
    out = run(jsonl(texts), "--tokenizer=bytes", f"--shard_tokens={shard_tokens}", out=tmp_path / "out")
    for part, first in (("train", 1), ("val", 0)):
        names = sorted(path.name for path in out.glob(f"t_{part}_*.bin"))
        sizes = [open_shard(out / name).num_tokens for name in names]
        assert names == [f"t_{part}_{first + i:06d}.bin" for i in range(len(names))]
        assert all(size == shard_tokens for size in sizes[:-1]) and 1 <= sizes[-1] <= shard_tokens
    assert documents(out, "train") + documents(out, "val") == (
        [t for i, t in enumerate(texts) if i % 10 != 9] + texts[9::10])


def test_the_same_bytes_from_any_number_of_threads(tmp_path, jsonl):
    texts = [words(1500, i) for i in range(40)] + ["ab ba ab ba cd dc"] * 5     # with many ties
    file, made = jsonl(texts), []
    for threads in (1, 5):
        out = tmp_path / str(threads)
        subprocess.run([sys.executable, str(ROOT / "data/text.py"), str(file), "--vocab_size=1500", "--name=t",
                        f"--out={out}"], env={**os.environ, "RAYON_NUM_THREADS": str(threads)}, check=True)
        made.append(contents(out))
    assert made[0] == made[1] == contents(run(file, "--vocab_size=1500", out=tmp_path / "here"))
    assert set(made[0]) == {"t_train_000001.bin", "t_val_000000.bin", "tokenizer.tiktoken"}


def test_no_stale_shard_survives_and_no_other_is_touched(jsonl, tmp_path):
    out = tmp_path / "out"
    run(jsonl([f"document {i}" for i in range(100)]), "--tokenizer=bytes", "--shard_tokens=50", out=out)
    assert len(list(out.glob("*.bin"))) > 10
    (out / "t_train_000001.bin.partial").write_text("left by a killed run")
    (out / "notes.txt").write_text("mine")
    other = "t_train_x_val_000000.bin"      # of a set named t_train_x
    (out / other).write_bytes((out / "t_val_000000.bin").read_bytes())
    run(jsonl([f"document {i}" for i in range(20)]), "--tokenizer=bytes", out=out)
    assert set(contents(out)) == {"t_train_000001.bin", "t_val_000000.bin", "tokenizer.tiktoken", "notes.txt", other}


def test_another_sets_tokenizer_is_not_overwritten(jsonl, tmp_path):
    file = jsonl([words(300, i) for i in range(20)])
    before = contents(run(file, "--tokenizer=bytes", out=tmp_path / "out"))
    assert "shards of another tokenizer here (t_train_000001.bin)" in \
        refused(file, f"--out={tmp_path / 'out'}", "--name=u", "--vocab_size=300")
    assert contents(tmp_path / "out") == before


def test_hashes_are_kept_beside_the_shards(jsonl, tmp_path):
    """Of size, time of change, and all tokens; of another set's too, and of none that is gone."""
    out = tmp_path / "out"
    run(jsonl([f"document {i}" for i in range(40)]), "--tokenizer=bytes", "--shard_tokens=200", out=out)
    text.main([str(jsonl(["more"] * 40)), "--tokenizer=bytes", f"--out={out}", "--name=u"])
    run(jsonl([f"document {i}" for i in range(20)]), "--tokenizer=bytes", "--shard_tokens=200", out=out)
    kept, shards = json.loads((out / "shards.json").read_text()), {path.name: path for path in out.glob("*.bin")}
    assert kept.keys() == shards.keys() and len(kept) == 5
    for name, (size, changed_ns, digest) in kept.items():
        raw = shards[name].read_bytes()
        assert (size, changed_ns) == (len(raw), shards[name].stat().st_mtime_ns)
        assert digest == hashlib.sha256(f"{(size - 1024) // 2} 257 256".encode() + raw[1024:]).hexdigest()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("No space left on device")])
def test_interrupted_run_keeps_what_was_there(jsonl, tmp_path, monkeypatch, interruption):
    file, out = jsonl([words(2000, i) for i in range(40)]), tmp_path / "out"
    before = contents(run(file, "--tokenizer=bytes", "--shard_tokens=9000", out=out))
    written = text.ShardWriter.write

    def write(writer, ids):
        written(writer, ids)
        assert list(out.glob("t_train_*.partial"))
        raise interruption
    monkeypatch.setattr(text.ShardWriter, "write", write)
    with pytest.raises(interruption if isinstance(interruption, type) else OSError):
        run(file, "--vocab_size=300", "--shard_tokens=9000", out=out)
    assert contents(out) == before


def test_killed_run_leaves_nothing_that_looks_whole(jsonl, tmp_path):
    """SIGKILL after shards are full: no *.bin, and no header on the one being written."""
    out = tmp_path / "out"
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from data import text
finish = text.ShardWriter.finish
def last_finish(writer):
    if len(writer.partials) == 3:
        writer._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    finish(writer)
text.ShardWriter.finish = last_finish
text.main({[str(jsonl([words(2000, i) for i in range(40)])), '--tokenizer=bytes', f'--out={out}', '--name=t',
            '--shard_tokens=9000']!r})
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert len(list(out.glob("*.partial"))) == 3 and not list(out.glob("*.bin"))
    with pytest.raises(UserError, match="not a token shard"):
        open_shard(out / "t_train_000003.bin.partial")
    run(jsonl(["abc"] * 20), "--tokenizer=bytes", out=out)      # the next run clears up
    assert set(contents(out)) == {"t_train_000001.bin", "t_val_000000.bin", "tokenizer.tiktoken"}


def test_swap_cut_short_leaves_no_validation_shard(jsonl, tmp_path, monkeypatch):
    out = run(jsonl(["old"] * 20), "--tokenizer=bytes", out=tmp_path / "out")
    publish = text.ShardWriter.publish

    def publish_train_only(writer):
        publish(writer)
        raise KeyboardInterrupt
    monkeypatch.setattr(text.ShardWriter, "publish", publish_train_only)
    with pytest.raises(KeyboardInterrupt):
        run(jsonl(["new"] * 20), "--tokenizer=bytes", out=out)
    assert set(contents(out)) == {"t_train_000001.bin", "tokenizer.tiktoken"}
    assert not (out / "shards.json").exists()       # it knew the old ones


@pytest.mark.parametrize("ids", [[0, 257], [-1, 3], [65536]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, ids):
    writer = text.ShardWriter(tmp_path, "t_train", 1, vocab_size=257, doc_start=256, shard_tokens=10)
    with pytest.raises(UserError, match="found token ids"):
        writer.write(np.array(ids))
    assert not list(tmp_path.iterdir())


def change(position: int, value: int):
    def damage(raw: bytes) -> bytes:
        header = np.frombuffer(raw[:1024], "<i4").copy()
        header[position] = value
        return header.tobytes() + raw[1024:]
    return damage


@pytest.mark.parametrize("damage, message", [
    (lambda raw: b"", "found 0 bytes"), (lambda raw: raw[:1000], "found 1000 bytes"),
    (lambda raw: raw[:-2], "cut short"), (lambda raw: raw[:-1], "cut short"),
    (lambda raw: raw + b"\0\0", "expected 1044"),
    (change(0, 20240521), "magic 20240521"), (change(1, 2), "version 2"), (change(2, 0), "0 tokens"),
    (change(2, -10), "-10 tokens"), (change(3, 70000), "vocabulary size 70000"), (change(3, -1), "vocabulary size -1"),
    (change(4, 257), "document-start token 257"), (change(4, -1), "document-start token -1"),
    (lambda raw: raw[:-2] + b"\x01\x01", "found token id 257"),
])
def test_damaged_shards_are_refused(tmp_path, damage, message):
    (tmp_path / "a.txt").write_text("abcdefghij")
    path = run(tmp_path / "a.txt", "--tokenizer=bytes", out=tmp_path / "out") / "t_train_000001.bin"
    open_shard(path).hash()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as error:
        open_shard(path).hash()
    assert str(path) in str(error.value) and message in str(error.value) and "expected" in str(error.value)


# ---- command line ---------------------------------------------------------------------------------------------------

def test_without_a_path_the_torch_package_is_read(tmp_path, monkeypatch, capsys):
    package = tmp_path / "torch"
    names = [f"m{i % 7}/file_{i}.py" for i in range(60)]
    for seed, name in enumerate((*names, "m0/__pycache__/x.py", "m0/readme.txt")):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(f"# {name}\n" + words(300, seed))
    monkeypatch.setattr(text.importlib.util, "find_spec",
                        lambda name: type("Spec", (), {"submodule_search_locations": [str(tmp_path / name)]}))
    out = run("--vocab_size=400", out=tmp_path / "out")
    firsts = {part: [t.splitlines()[0][2:] for t in documents(out, part)] for part in ("train", "val")}
    assert firsts["val"] == sorted(names)[19::20]
    assert firsts["train"] == [name for i, name in enumerate(sorted(names)) if i % 20 != 19]
    args = text.parse_args([])
    text.check_args(args)
    assert (args.name, args.out, args.vocab_size) == ("torch_source", ROOT / "data/torch_source", 4096)


def test_torch_is_found_where_it_is_installed():
    import torch
    files = text.torch_files()
    assert Path(torch.__file__) in files and all(file.suffix == ".py" for file in files)


@pytest.mark.parametrize("arguments, message", [
    (["nowhere.txt"], "nowhere.txt: found no such file"), (["image.png"], "found no document in 1 files"),
    (["empty"], "empty: found no text"), (["a.txt", "--vocab_size=256"], "--vocab_size=256: expected 257"),
    (["a.txt", "--vocab_size=65537"], "--vocab_size=65537"), (["a.txt", "--vocab_size=0"], "--vocab_size=0"),
    (["a.txt", "--tokenizer=bytes", "--vocab_size=300"], "--tokenizer=bytes is fixed"),
    (["a.txt", "--val_fraction=0"], "--val_fraction=0: expected more than 0"),
    (["a.txt", "--val_fraction=1"], "--val_fraction=1: expected more than 0 and less than 1"),
    (["a.txt", "--val_fraction=1/0"], "--val_fraction=1/0"), (["a.txt", "--val_every=1"], "--val_every=1"),
    (["a.txt", "--shard_tokens=0"], "--shard_tokens=0"),
    (["a.txt", f"--shard_tokens={1 << 31}"], "--shard_tokens=2147483648: expected 1 to 2147483647"),
    (["a.txt", "--name=a/b"], "--name=a/b"), (["a.txt", "--name="], "--name="),
])
def test_bad_arguments(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(words(1000))
    (tmp_path / "image.png").write_text("")
    (tmp_path / "empty").mkdir()
    assert message in refused(*arguments, "--out=out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["a.txt", "--vocabsize=3"], ["a.txt", "--val_fraction=x"],
                                       ["a.txt", "--tokenizer=w"], ["a.txt", "--val_fraction=0.1", "--val_every=10"]])
def test_arguments_that_do_not_parse(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        text.main(arguments)
    assert exit.value.code == 2 and arguments[1].split("=")[0] in capsys.readouterr().err


def test_second_run_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(words(1000))
    with text.exclusive(tmp_path, "t"):
        said = refused(tmp_path / "a.txt", "--tokenizer=bytes", f"--out={tmp_path}", "--name=t")
    assert "found another process making shards there" in said and set(contents(tmp_path)) == {"a.txt"}


def test_summary_counts(jsonl, tmp_path, capsys):
    run(jsonl(["abcd"] * 20), "--tokenizer=bytes", "--shard_tokens=60", out=tmp_path / "out")
    out = capsys.readouterr().out
    assert "train: 90 tokens, 18 documents, 2 shards" in out and "val: 10 tokens, 2 documents, 1 shards" in out
    assert "0.800 characters a token, vocabulary 257 (bytes, document start 256)" in out
