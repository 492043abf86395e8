"""The page's example runs against a server, and its command is the command."""

import re
from pathlib import Path

from ace_learn.cli.common import build_parser, parse_config
from ace_learn.evaluate.served import StreamConfig
from tests.helpers.loopback import Loopback, tokens_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "streaming.md").read_text()


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with Loopback(script=tokens_of("<think>\n62 + 35\n</think>\n\n\\boxed{83}. Well")) as server:
        assert "http://127.0.0.1:8000/v1" in example
        exec(compile(example.replace("http://127.0.0.1:8000/v1", server.base_url), "streaming.md", "exec"), {})
    answer, reason, *_ = capsys.readouterr().out.split()
    assert (answer, reason) == ("83", "contract")


def test_its_command_and_flags_are_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^    python -m ace_learn\.stream (.*)$", PAGE, re.MULTILINE)
    parser = build_parser(StreamConfig, description="")
    assert isinstance(parse_config(parser, StreamConfig, command.split()), StreamConfig)
    for flag in re.findall(r"`--(\w+)", PAGE):
        assert flag in StreamConfig.__dataclass_fields__, flag
