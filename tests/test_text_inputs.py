"""data/text.py reads what a person would call the text, however it arrives, says what it leaves out, refuses others."""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conftest import ROOT  # noqa: F401 (puts the project in the path)
from data import text
from train_gpt import UserError, load_tokenizer, open_shard

LINES = "".join(f"line {i} of some text\n" for i in range(400))


def run(*paths, out: Path) -> None:
    text.main([*map(str, paths), f"--out={out}", "--name=t", "--tokenizer=bytes"])


def texts(out: Path) -> list[str]:
    """All documents of training and validation, decoded."""
    found = []
    for part in ("train", "val"):
        (path,) = out.glob(f"t_{part}_*.bin")
        shard = open_shard(path)
        data = bytes(min(token, 255) if token != shard.doc_start else 0 for token in shard.read().tolist())
        found += data.decode().split("\0")[1:] if data[0] == 0 else [data.decode()]
    assert load_tokenizer(out, shard.vocab_size) is not None
    return found


def folder_of(tmp_path: Path, count: int = 30) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(f"text {i}")
    return folder


def test_links_are_read_once_and_cannot_loop(tmp_path):
    folder, elsewhere = folder_of(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("from elsewhere")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (folder / "same.txt").symlink_to(folder / "00.txt")
    run(folder, out=tmp_path / "out")
    assert sorted(texts(tmp_path / "out")) == sorted([f"text {i}" for i in range(30)] + ["from elsewhere"])


def test_a_link_to_nowhere_is_named(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: found a link to nowhere"):
        run(folder, out=tmp_path / "out")
    with pytest.raises(UserError, match=r"gone\.txt: found a link to nowhere"):
        run(folder / "gone.txt", out=tmp_path / "out")


def test_empty_documents_are_left_out_and_counted(tmp_path, capsys):
    """Nine of ten empty: the others are split as if these were not there, by document."""
    lines = [json.dumps({"text": f"document {i // 10}" if i % 10 == 9 else ["", "\n", " "][i % 3]}) for i in range(400)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    (tmp_path / "e.txt").write_text(" \n\n")
    run(tmp_path / "d.jsonl", tmp_path / "e.txt", out=tmp_path / "out")
    assert "361 empty texts are left out" in capsys.readouterr().out
    found = texts(tmp_path / "out")
    assert sorted(found) == sorted(f"document {i}" for i in range(40))
    assert found[-4:] == [f"document {i}" for i in (9, 19, 29, 39)]


def test_nothing_but_empty_documents_is_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n' * 50)
    with pytest.raises(UserError, match="found no document in 1 files, .* all 50 texts are empty"):
        run(tmp_path / "d.jsonl", out=tmp_path / "out")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_byte_order_mark_is_no_text_and_tells_the_encoding(tmp_path, encoding):
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    (tmp_path / "a.txt").write_bytes((mark + LINES + "caf\u00e9").encode(encoding))
    run(tmp_path / "a.txt", out=tmp_path / "out")
    assert "".join(texts(tmp_path / "out")) == LINES + "caf\u00e9"
    lines = "".join(json.dumps({"text": f"x {i}"}) + "\n" for i in range(40))
    (tmp_path / "b.jsonl").write_bytes(lines.encode("utf-8-sig"))
    run(tmp_path / "b.jsonl", out=tmp_path / "out")
    assert len(texts(tmp_path / "out")) == 40


def test_what_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "picture.txt").write_bytes(bytes(range(256)) * 4 + bytes(1000))
    with pytest.raises(UserError, match=r"picture\.txt: found \d+ NUL bytes"):
        run(tmp_path / "picture.txt", out=tmp_path / "out")


def test_a_file_named_by_itself_needs_no_suffix(tmp_path):
    (tmp_path / "LICENSE").write_text(LINES)
    run(tmp_path / "LICENSE", out=tmp_path / "out")
    assert "".join(texts(tmp_path / "out")) == LINES


@pytest.mark.parametrize("line, message", [
    ('{"text": null}', r'd\.jsonl, line 2: found "text": null, expected'), ('{"text": 5}', 'found "text": 5, expected'),
    ('{"body": "x"}', r"found the fields \['body'\]"), ("[" * 200_000, r"d\.jsonl, line 2: found no JSON")])
def test_a_bad_line_is_told_by_what_it_holds(tmp_path, line, message):
    (tmp_path / "d.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "d.jsonl", out=tmp_path / "out")


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(text.ShardWriter, "_open", full_disk(text.ShardWriter._open))
    with pytest.raises(UserError, match=r"t_train_000001\.bin\.partial: found No space left on device, expected"):
        run(tmp_path / "a.txt", out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin*"))


def full_disk(open_shard_file):
    """Writes go to a device that is always full."""
    def opened(writer):
        open_shard_file(writer)
        writer._file.close()
        writer._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    return opened
