"""The guide to streams says what is true: its options and its example."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from thunderagent.streams.connection import options
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.testing import ChaosServer, run_stream

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "streams.md").read_text()


def option_docs() -> dict[str, str]:
    """The text below each field of the class."""
    [shape] = [
        node
        for node in ast.parse(inspect.getsource(options)).body
        if isinstance(node, ast.ClassDef) and node.name == "StreamOptions"
    ]
    found = {}
    for field, text in zip(shape.body, shape.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def options_table() -> str:
    """The table as the guide must have it, made from the options themselves."""
    docs = option_docs()
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for field in fields(StreamOptions):
        assert field.default is not MISSING
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        lines.append(f"| `{field.name}` | `{default}` | {docs[field.name]} |")
    return "\n".join(lines)


def test_the_table_of_options_is_the_options() -> None:
    found = re.search(r"<!-- options: .*? -->\n(.*?)\n<!-- end of options -->", GUIDE, flags=re.DOTALL)
    assert found and found.group(1) == options_table()


def test_the_stream_of_the_guide_has_twenty_lines_and_runs_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)[0]
    assert len([line for line in block.splitlines() if line.strip() and not line.startswith("#")]) <= 20
    (tmp_path / "mystreams").mkdir()
    (tmp_path / "mystreams" / "__init__.py").touch()
    (tmp_path / "mystreams" / "ticks.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def follow_three() -> None:
        from mystreams.ticks import Feed, follow  # type: ignore[import-not-found]

        async with ChaosServer() as server:
            server.publish_many(5)
            await run_stream(
                follow,
                Feed(url=server.url),
                until=lambda ctx: ctx.cursor and ctx.cursor.seq == 5,
                last_seq={"seq": 2},
            )

    try:
        asyncio.run(follow_three())
    finally:
        for name in ("mystreams", "mystreams.ticks"):
            sys.modules.pop(name, None)
    assert capsys.readouterr().out == "3 3\n4 4\n5 5\n"
