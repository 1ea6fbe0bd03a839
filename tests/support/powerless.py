"""Runs the command line as somebody for whom the permissions of files count, as they do not for root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

_CAPABILITIES: Final = "-dac_override,-dac_read_search"
_DROP: Final = ("setpriv", f"--bounding-set={_CAPABILITIES}", f"--inh-caps={_CAPABILITIES}")

needs_powerless: Final = pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root needs setpriv to give up its capabilities"
)


def powerless(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What `thunderagent` answers in a folder to a user whom permissions bind."""
    return subprocess.run(
        [*(_DROP if os.geteuid() == 0 else ()), sys.executable, "-m", "thunderagent", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
