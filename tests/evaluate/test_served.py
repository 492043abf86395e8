import dataclasses
import json
import re

import pytest

from ace_learn.cli.stream import main
from ace_learn.engines.answer_reader import ServedOutput
from ace_learn.engines.server_metrics import ServerState, metrics_url, parse_metrics
from ace_learn.evaluate.served import StreamConfig, stream
from ace_learn.evaluate.served_report import Arm, ServedRun, compare
from ace_learn.tasks import TaskConfig, build_task
from tests.helpers.loopback import Loopback, tokens_of

TASK = TaskConfig()
TAIL = " and so on" * 20


def answers(count, seed):
    """The right answer to each of the task's problems, in the words of its contract, and a tail behind it."""
    by_question = {}
    for example in build_task(TASK).examples(count, seed):
        gold = json.dumps(example.gold) if isinstance(example.gold, dict) else str(example.gold)
        kind = example.contract.kind
        text = {"json": gold, "choice": f"The answer is {gold}."}.get(kind, f"The answer is \\boxed{{{gold}}}")
        by_question[example.messages[-1]["content"]] = tokens_of(f"<think>\nSo {gold}.\n</think>\n\n{text}\n\n{TAIL}")
    return by_question.get


def config(server, **fields):
    return StreamConfig(base_url=server.base_url, task=TASK, **{"problems": 20, "concurrency": 3, **fields})


def test_a_run_with_and_without_the_exit(tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    with Loopback(script=answers(20, 3), delay_s=0.001) as server:
        run = stream(
            config(
                server,
                output=output,
                report=tmp_path / "page.html",
                seed=3,
                surplus_problems=4,
                count="continuous_usage",
            )
        )
        assert server.running == 0
    assert set(run.exit.outputs) == set(run.full.outputs) == set(range(20))
    assert all(run.exit.correct.values())
    assert all(run.full.correct.values())
    assert {o.finish_reason for o in run.exit.outputs.values()} == {"contract"}
    assert {o.finish_reason for o in run.full.outputs.values()} == {"stop"}
    assert all(run.exit.outputs[key].answer == run.full.outputs[key].answer for key in range(20))
    assert all(run.exit.outputs[key].tokens < run.full.outputs[key].tokens for key in range(20))
    assert len(run.past_commit) == 4
    assert all(0 <= surplus < 40 for surplus in run.past_commit), "the tail has 60 tokens"
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted((line["key"], line["contract_exit"]) for line in lines) == [
        (key, exits) for key in range(20) for exits in (False, True)
    ]
    assert all(line["correct"] for line in lines)
    shown = capsys.readouterr().out
    assert "with the contract exit: 20 problems, 100.0% valid, 100.0% correct" in shown
    assert "read to the end: 20 problems" in shown
    assert "the same answer both ways: 20 of 20" in shown
    measured, predicted = map(float, re.search(r"([\d.]+)x faster measured, ([\d.]+)x predicted", shown).groups())
    assert measured > 1.2
    assert predicted > 1.2
    page = (tmp_path / "page.html").read_text()
    assert f"{predicted:.2f}x" in page
    assert f"{measured:.2f}x" in page
    assert re.search(r"tokens generated past the commit: median \S+, max \d+ \(4 requests", shown)


def test_the_command_and_its_recipe(capsys):
    with Loopback(script=answers(4, 77), metrics=False) as server:
        main(["--base-url", server.base_url, "--problems", "4", "--compare", "false", "inference/stream.yaml"])
        assert all(body["skip_special_tokens"] is False for body in server.bodies)
        assert len(server.bodies) == 4
    shown = capsys.readouterr().out
    assert "4 problems, 100.0% valid, 100.0% correct" in shown
    assert "tokens generated past the commit: unknown" in shown
    assert "read to the end" not in shown


def test_one_failed_request_is_written_down_and_the_others_count(tmp_path, capsys):
    with Loopback(script=answers(6, 0), statuses=[400]) as server:
        run = stream(config(server, problems=6, concurrency=1, compare=False, surplus_problems=0, count="logprobs"))
    failed = [output for output in run.exit.outputs.values() if output.error]
    assert [output.key for output in failed] == [0]
    assert sum(run.exit.correct.values()) == 5
    shown = capsys.readouterr().out
    assert "6 problems, 83.3% valid" in shown
    assert "1 failed" in shown
    assert "counted by logprobs)" in shown


def test_a_server_that_answers_nothing_ends_the_run_and_leaves_no_file(tmp_path):
    output = tmp_path / "out.jsonl"
    with (
        Loopback(statuses=[500] * 99) as server,
        pytest.raises(ValueError, match=r"none of the first 4 .*scripted 500"),
    ):
        stream(config(server, problems=9, concurrency=1, retries=0, output=output))
    assert not list(tmp_path.iterdir())


def test_an_output_that_exists_is_not_replaced(tmp_path):
    (tmp_path / "out.jsonl").write_text("kept")
    with pytest.raises(ValueError, match="exists already"):
        stream(StreamConfig(output=tmp_path / "out.jsonl"))


def test_a_missing_client_is_named(monkeypatch):
    monkeypatch.setattr("ace_learn.evaluate.served.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'ace-learn\[stream\]'"):
        stream(StreamConfig())


@pytest.mark.parametrize("fields", [{"problems": 0}, {"problems": 10**6}, {"max_new_tokens": 0}, {"concurrency": 0}])
def test_a_run_that_makes_no_sense_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        StreamConfig(**fields)


def served(key, *, tokens, kept, seconds, error=None):
    return ServedOutput(
        key=key, text="", thinking="", answer=key, finish_reason="stop", tokens=tokens, kept_tokens=kept,
        think_tokens=0, counted_by="usage", seconds=seconds, first_token_s=0.0, calls=1, attempts=1, error=error,
    )  # fmt: skip


def test_speed_ups_by_hand():
    # To the end: 1 s + 0.1 s per token. With the exit at 10 tokens, 2 of them late: 1 + 0.1 (8 + 2) = 2 s.
    full = Arm(
        exits=False, outputs={k: served(k, tokens=t, kept=t, seconds=1 + t / 10) for k, t in enumerate((20, 40, 30))}
    )
    short = Arm(exits=True, outputs={k: served(k, tokens=10, kept=8, seconds=2.5) for k in range(3)})
    short.outputs[2] = served(2, tokens=0, kept=0, seconds=9.0, error="broken")
    comparison = compare(ServedRun(short, full, ("a", "b", "b"), None))
    assert comparison.latency == pytest.approx((1.0, 0.1))
    assert [(row.name, row.n) for row in comparison.rows] == [("all", 2), ("a", 1), ("b", 1)]
    whole, first, second = comparison.rows
    assert (whole.full_s, whole.exit_s, whole.predicted_exit_s) == pytest.approx((4.0, 2.5, 2.0))
    assert (whole.measured, whole.predicted) == pytest.approx((4 / 2.5, 2.0))
    assert (first.predicted, second.predicted) == pytest.approx((1.5, 2.5))
    assert whole.same == 2


def test_no_comparison_without_pairs():
    arm = Arm(exits=True, outputs={0: served(0, tokens=1, kept=1, seconds=1.0, error="broken")})
    assert compare(ServedRun(arm, None, ("a",), None)) is None
    assert compare(ServedRun(arm, arm, ("a",), None)) is None


def test_metrics_are_summed_over_engines():
    text = (
        "# HELP vllm:num_requests_running Number of requests\n"
        'vllm:num_requests_running{engine="0",model_name="a}{b"} 2.0\n'
        'vllm:num_requests_running{engine="1"} 1.0 1796002545\n'
        "vllm:generation_tokens_total 1.5e+03\n"
        'vllm:generation_tokens_created{engine="0"} 9.0\n'
    )
    assert parse_metrics(text) == ServerState(running=3.0, generated=1500.0)
    assert parse_metrics("process_cpu_seconds_total 3.0\n") is None


@pytest.mark.parametrize(
    ("base_url", "metrics"),
    [
        ("http://a:1/v1", "http://a:1/metrics"),
        ("http://a/v1/", "http://a/metrics"),
        ("https://a/x", "https://a/x/metrics"),
    ],
)
def test_where_the_metrics_are(base_url, metrics):
    assert metrics_url(base_url) == metrics


def test_every_field_of_the_recipe_is_documented(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    for entry in dataclasses.fields(StreamConfig):
        assert re.search(rf"--{entry.name}\b", shown), entry.name
    assert "Where the server is" in shown, "fields of the class above have their texts, too"
