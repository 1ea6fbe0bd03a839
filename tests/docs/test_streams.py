"""The guide to streams says what is true: its example."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from thunderagent.testing import ChaosServer, run_stream

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "streams.md").read_text()


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
