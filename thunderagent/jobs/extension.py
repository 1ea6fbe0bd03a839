"""Extensions: functions of other packages, found by entry points of the group `thunderagent.extensions`.

| entry point | what it is called with | what it returns |
|---|---|---|
| `canary.jobs` | settings, store, bus, `who`, `doorbell` | jobs that each agent adds to its own |
| `canary.watch` | settings, bus, `who`, `facts`, `now`, `monotonic` | a background thread that judges regions |
| `canary.findings` | the account that `doctor --aws` examines | findings about the tokens of canaries |
| `canary.permissions` | the resources of `iam` | statements of a policy |
| `push` | the two settings for pushes | an object with `push(user, message)` and `close()` |
| `push.permissions` | the resources of `iam` | statements of a policy |

Settings decide which of them are needed. Without such settings no entry point is read.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from thunderagent.model.errors import ConfigurationError

GROUP: Final = "thunderagent.extensions"


@cache
def extension(name: str) -> Any:
    """The function of an entry point.

    Raises:
        ConfigurationError: no installed package has it, several have it, or it does not import.
    """
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not found:
        raise ConfigurationError(
            f"the settings need the extension {name!r}, which no installed package has: install ThunderAgent again "
            "(in its source tree: pip install -e .)"
        )
    if len(found) > 1:
        raise ConfigurationError(f"several packages have the extension {name!r}: {', '.join(sorted(found))}; keep one")
    [entry] = found.values()
    try:
        return entry.load()
    except Exception as error:
        raise ConfigurationError(
            f"the extension {name!r} ({entry.value}) does not import: {type(error).__name__}: {error}"
        ) from error
