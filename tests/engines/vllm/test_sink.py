"""The audit log: private, rotating, and never in a request's way."""

import json
import multiprocessing
import stat

import pytest

from ace_learn.engines.vllm.sink import AuditSink


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_of_a_file_that_only_its_owner_reads(tmp_path):
    path = tmp_path / "logs" / "audit.jsonl"
    sink = AuditSink(path, max_bytes=1 << 20, num_files=2)
    assert not path.exists()
    sink.write({"request_id": "a", "answer": "5\n€"})
    sink.write({"request_id": "b", "answer": None})
    sink.close()
    assert lines(path) == [{"request_id": "a", "answer": "5\n€"}, {"request_id": "b", "answer": None}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text('{"request_id":"old"}\n')
    path.chmod(0o644)
    sink = AuditSink(path, max_bytes=1 << 20, num_files=2)
    sink.write({"request_id": "new"})
    sink.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [line["request_id"] for line in lines(path)] == ["old", "new"]


def test_it_rotates_and_keeps_so_many_files(tmp_path):
    """Lines of 9 bytes, files of at most 20: two lines each; of ten lines the newest six are kept."""
    path = tmp_path / "audit.jsonl"
    sink = AuditSink(path, max_bytes=20, num_files=3)
    for i in range(10):
        sink.write({"i": i, "x": 0} if i < 0 else {"iii": i})
    sink.close()
    assert sorted(p.name for p in tmp_path.glob("audit.jsonl*") if p.suffix != ".lock") == [
        "audit.jsonl",
        "audit.jsonl.1",
        "audit.jsonl.2",
    ]
    kept = [line["iii"] for name in (".2", ".1", "") for line in lines(path.with_name(f"audit.jsonl{name}"))]
    assert kept == [4, 5, 6, 7, 8, 9]
    assert all(p.stat().st_size <= 20 for p in tmp_path.glob("audit.jsonl*"))
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in tmp_path.glob("audit.jsonl.?"))


def test_one_file_is_simply_begun_again(tmp_path):
    path = tmp_path / "audit.jsonl"
    sink = AuditSink(path, max_bytes=20, num_files=1)
    for i in range(5):
        sink.write({"iii": i})
    sink.close()
    assert [line["iii"] for line in lines(path)] == [4]


def test_what_cannot_be_written_is_counted_and_logged_once(tmp_path, caplog):
    (tmp_path / "folder").write_text("a file where the folder should be")
    lost = []
    sink = AuditSink(tmp_path / "folder" / "audit.jsonl", max_bytes=1 << 20, num_files=2, on_error=lost.append)
    for i in range(3):
        sink.write({"i": i})
        sink.close()
    assert sum(lost) == 3
    assert caplog.text.count("audit records are lost") == 1


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    lost = []
    sink = AuditSink(tmp_path / "audit.jsonl", max_bytes=1 << 20, num_files=2, on_error=lost.append)
    sink.write({"i": 0})
    sink.close()
    assert lost == [1]
    assert (tmp_path / "elsewhere").read_text() == ""


def _write_many(path, name):
    sink = AuditSink(path, max_bytes=4000, num_files=50)
    for i in range(200):
        sink.write({"name": name, "i": i})
    sink.close()


@pytest.mark.slow
def test_processes_share_a_file(tmp_path):
    path = tmp_path / "audit.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = [
        (line["name"], line["i"])
        for file in tmp_path.glob("audit.jsonl*")
        if file.suffix != ".lock"
        for line in lines(file)
    ]
    assert sorted(found) == [(name, i) for name in "ab" for i in range(200)]
