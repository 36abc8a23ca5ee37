"""The server's editor: upstream's words, and a guard for each of its known faults."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    ServerClient = Any

FILE = "def f(x):\n    return x + 1\n"


def test_view_shows_numbered_lines_and_content(server: ServerClient) -> None:
    server.write({"a.py": FILE})
    answer = server.edit("view", "a.py")
    assert answer["edit_ok"] is True
    assert answer["text"] == (
        f"Here's the result of running `cat -n` on {server.work}/a.py:\n"
        "     1\tdef f(x):\n     2\t    return x + 1\n     3\t\n"
    )
    assert answer["content"] == FILE


def test_view_of_a_range(server: ServerClient) -> None:
    server.write({"a.txt": "1\n2\n3\n4\n"})
    answer = server.edit("view", f"{server.work}/a.txt", view_range=[2, 3])
    assert answer["content"] == "2\n3\n"
    assert "     2\t2\n     3\t3\n" in answer["text"]
    assert server.edit("view", "a.txt", view_range=[3, -1])["content"] == "3\n4\n"
    for wrong in ([0, 2], [5, 6], [3, 2], [1], "1-2", [1, "x"]):
        answer = server.edit("view", "a.txt", view_range=wrong)
        assert answer["edit_ok"] is False
        assert "view_range" in answer["text"]


def test_str_replace_then_undo(server: ServerClient) -> None:
    server.write({"a.py": FILE})
    answer = server.edit("str_replace", "a.py", old_str="x + 1", new_str="x + 2")
    assert answer["edit_ok"] is True
    assert answer["content"] == FILE.replace("1", "2") == (server.work / "a.py").read_text()
    assert f"The file {server.work}/a.py has been edited." in answer["text"]
    assert "     2\t    return x + 2" in answer["text"]
    answer = server.edit("undo_edit", "a.py")
    assert answer["content"] == FILE == (server.work / "a.py").read_text()
    assert server.edit("undo_edit", "a.py")["reason"] == "no_history"


def test_reset_forgets_the_history(server: ServerClient) -> None:
    server.write({"a.py": FILE})
    server.edit("str_replace", "a.py", old_str="x + 1", new_str="x + 2")
    server.call("reset")
    server.write({"a.py": FILE})
    assert server.edit("undo_edit", "a.py")["reason"] == "no_history"


def test_str_replace_without_new_str_deletes(server: ServerClient) -> None:
    server.write({"a.py": FILE})
    assert server.edit("str_replace", "a.py", old_str=" + 1")["content"] == FILE.replace(" + 1", "")


def test_old_str_must_be_there_once(server: ServerClient) -> None:
    server.write({"a.py": "a = 1\nb = 1\nc = 11\n"})
    answer = server.edit("str_replace", "a.py", old_str="1", new_str="2")
    assert (answer["edit_ok"], answer["reason"], answer["occurrences"]) == (False, "multiple", 4)
    assert "Multiple occurrences of old_str `1` in lines [1, 2, 3]" in answer["text"]
    answer = server.edit("str_replace", "a.py", old_str="nope", new_str="2")
    assert (answer["edit_ok"], answer["reason"]) == (False, "not_found")
    assert "did not appear verbatim" in answer["text"]
    assert server.edit("str_replace", "a.py", old_str="", new_str="2")["edit_ok"] is False
    assert (server.work / "a.py").read_text() == "a = 1\nb = 1\nc = 11\n"


def test_no_second_try_with_stripped_strings(server: ServerClient) -> None:
    server.write({"a.py": "if x:\n\treturn 1\n"})
    answer = server.edit("str_replace", "a.py", old_str="    return 1\n", new_str="    return 2\n")
    assert answer["edit_ok"] is False
    assert (server.work / "a.py").read_text() == "if x:\n\treturn 1\n"


def test_insert(server: ServerClient) -> None:
    server.write({"a.txt": "1\n2\n", "open.txt": "1\n2"})
    assert server.edit("insert", "a.txt", insert_line=1, new_str="new")["content"] == "1\nnew\n2\n"
    assert server.edit("insert", "a.txt", insert_line=0, new_str="top")["content"] == "top\n1\nnew\n2\n"
    assert server.edit("insert", "open.txt", insert_line=2, new_str="3")["content"] == "1\n2\n3\n"
    assert server.edit("insert", "a.txt", insert_line=9, new_str="x")["reason"] == "bad_argument"
    assert server.edit("insert", "a.txt", insert_line="1", new_str="x")["reason"] == "bad_argument"
    assert server.edit("insert", "a.txt", new_str="x")["reason"] == "bad_argument"


def test_create_makes_folders_and_does_not_overwrite(server: ServerClient) -> None:
    answer = server.edit("create", "new/deep/a.py", file_text=FILE)
    assert answer["edit_ok"] is True
    assert (server.work / "new/deep/a.py").read_text() == FILE == answer["content"]
    answer = server.edit("create", "new/deep/a.py", file_text="")
    assert (answer["edit_ok"], answer["reason"]) == (False, "exists")
    assert (server.work / "new/deep/a.py").read_text() == FILE
    assert server.edit("create", "new/deep/a.py/b", file_text="")["edit_ok"] is False
    assert server.edit("create", "no_text.py")["reason"] == "bad_argument"


def test_missing_files_and_unknown_commands(server: ServerClient) -> None:
    answer = server.edit("view", "nothing.py")
    assert (answer["edit_ok"], answer["reason"]) == (False, "missing")
    assert "does not exist" in answer["text"]
    assert server.edit("str_replace", ".", old_str="a")["reason"] == "is_directory"
    assert server.edit("fly", ".")["edit_ok"] is False


def test_crlf_survives_edits(server: ServerClient) -> None:
    server.write({"a.txt": b"one\r\ntwo\r\nthree\r\n"})
    assert server.edit("view", "a.txt")["content"] == "one\ntwo\nthree\n"
    server.edit("str_replace", "a.txt", old_str="one\ntwo", new_str="1\n2")
    assert (server.work / "a.txt").read_bytes() == b"1\r\n2\r\nthree\r\n"
    server.edit("insert", "a.txt", insert_line=1, new_str="new")
    assert (server.work / "a.txt").read_bytes() == b"1\r\nnew\r\n2\r\nthree\r\n"
    server.edit("undo_edit", "a.txt")
    assert (server.work / "a.txt").read_bytes() == b"1\r\n2\r\nthree\r\n"


def test_mixed_line_ends_stay_where_they_are(server: ServerClient) -> None:
    server.write({"a.txt": b"one\r\ntwo\nthree\r"})
    server.edit("str_replace", "a.txt", old_str="two", new_str="2")
    assert (server.work / "a.txt").read_bytes() == b"one\r\n2\nthree\r"


@pytest.mark.parametrize("command", ["insert", "str_replace"])
def test_mode_and_symlink_survive_edits(server: ServerClient, command: str) -> None:
    server.write({"real.sh": "one\n"})
    os.chmod(server.work / "real.sh", 0o755)
    (server.work / "link.sh").symlink_to("real.sh")
    arguments = {"insert_line": 1, "new_str": "two"} if command == "insert" else {"old_str": "one", "new_str": "1"}
    assert server.edit(command, "link.sh", **arguments)["edit_ok"] is True
    assert (server.work / "link.sh").is_symlink()
    assert (server.work / "real.sh").read_text() in ("one\ntwo\n", "1\n")
    assert stat.S_IMODE((server.work / "real.sh").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "data", [b"caf\xe9\n", b"x = 'na\xefve'\n" * 3, "Grüße, 你好\n".encode(), b"\xef\xbb\xbfbom\n"]
)
def test_encodings_survive_edits(server: ServerClient, data: bytes) -> None:
    """Short latin-1 files included, which upstream takes for UTF-8 and cannot read."""
    server.write({"a.txt": data + b"change me\n"})
    assert server.edit("view", "a.txt")["edit_ok"] is True
    answer = server.edit("str_replace", "a.txt", old_str="change me", new_str="changed")
    assert answer["edit_ok"] is True
    assert (server.work / "a.txt").read_bytes() == data + b"changed\n"


def test_utf16_survives_edits(server: ServerClient) -> None:
    server.write({"a.txt": "änderung\nalt\n".encode("utf-16")})
    assert server.edit("str_replace", "a.txt", old_str="alt", new_str="neu")["content"] == "änderung\nneu\n"
    assert (server.work / "a.txt").read_bytes() == "änderung\nneu\n".encode("utf-16")


def test_what_the_encoding_cannot_hold_leaves_the_file_alone(server: ServerClient) -> None:
    server.write({"a.txt": b"caf\xe9 x\n"})
    assert server.edit("str_replace", "a.txt", old_str="x", new_str="你")["edit_ok"] is False
    assert (server.work / "a.txt").read_bytes() == b"caf\xe9 x\n"


def test_binary_large_and_special_files_are_refused(server: ServerClient) -> None:
    server.write({"a.bin": b"\x7fELF\0\0\1", "doc.pdf": "only text\n"})
    assert server.edit("view", "a.bin")["reason"] == "not_text"
    assert server.edit("str_replace", "a.bin", old_str="ELF", new_str="x")["reason"] == "not_text"
    assert server.edit("view", "doc.pdf")["content"] == "only text\n"
    with open(server.work / "big.txt", "wb") as file:
        file.truncate(11 << 20)
    assert server.edit("view", "big.txt")["reason"] == "too_large"
    os.mkfifo(server.work / "pipe")
    started = time.monotonic()
    assert server.edit("view", "pipe")["reason"] == "not_text"
    assert server.edit("view", "/dev/zero")["reason"] == "not_text"
    assert time.monotonic() - started < 10


def test_folder_view_uses_no_shell(server: ServerClient) -> None:
    name = "a; touch pwned; $(touch pwned2) `touch pwned3`"
    server.write({f"{name}/inner/deep/x.py": "", f"{name}/b.py": "", f"{name}/.hidden": "", "top.py": ""})
    answer = server.edit("view", name)
    assert answer["edit_ok"] is True
    at = f"{server.work}/{name}"
    assert answer["text"] == (
        f"Here's the files and directories up to 2 levels deep in {at}, excluding hidden items:\n"
        f"{at}/\n{at}/b.py\n{at}/inner/\n{at}/inner/deep/\n\n"
        f"1 hidden files/directories in this directory are excluded. You can use 'ls -la {at}' to see them."
    )
    assert answer["content"] is None
    assert sorted(path.name for path in server.work.iterdir()) == sorted([name, "top.py"])
    assert server.edit("view", ".", view_range=[1, 2])["reason"] == "bad_argument"


def test_folder_view_is_bounded(server: ServerClient) -> None:
    (server.work / "many").mkdir()
    for number in range(1500):
        (server.work / "many" / f"{number}.txt").touch()
    answer = server.edit("view", "many")
    assert answer["text"].count("\n") < 1100
    assert "response clipped" in answer["text"]


def test_answers_are_bounded(server: ServerClient) -> None:
    server.write({"a.txt": "line é\n" * 100_000})
    answer = server.edit("view", "a.txt")
    assert len(answer["text"]) < 200_100
    assert answer["content_cut"] is True
    assert len(answer["content"].encode()) <= 200_000
    answer = server.edit("str_replace", "a.txt", old_str="z" * 100_000, new_str="")
    assert len(answer["text"]) < 5000


def test_editor_leaves_logging_and_the_work_tree_alone(server: ServerClient) -> None:
    server.write({"a.py": FILE, "test_a.py": "import logging\ndef test(): assert logging.getLogger().level == 30\n"})
    server.edit("view", "a.py")
    assert server.run("python -m pytest -q -p no:logging")["exit_code"] == 0
    assert sorted(path.name for path in server.work.iterdir() if path.name[0] != ".") == ["a.py", "test_a.py"]
    assert [name for name in os.listdir(server.scratch) if name.startswith("oh_editor")] == []


def test_a_file_name_that_is_no_utf8_gives_an_answer_that_can_be_read(server: ServerClient) -> None:
    """The host refuses surrogates, and a sandbox whose answer it refuses is lost."""
    (server.work / os.fsdecode(b"odd\xff.txt")).write_text("x\n")
    text = server.edit("view", ".")["text"]
    assert "odd?.txt" in text
    assert text.encode().decode() == text
