"""For tests: a clock moved by hand, engines and WebSocket servers that fail on request, agents that run until idle."""

from thunderagent.testing.chaos import ChaosServer as ChaosServer
from thunderagent.testing.fast_loop import FastLoop as FastLoop
from thunderagent.testing.fast_loop import run_fast as run_fast
from thunderagent.testing.faulty_engine import ANY as ANY
from thunderagent.testing.faulty_engine import Fault as Fault
from thunderagent.testing.faulty_engine import FaultyEngine as FaultyEngine
from thunderagent.testing.global_table.table import GlobalTableSim as GlobalTableSim
from thunderagent.testing.helpers import MOST_RUNS as MOST_RUNS
from thunderagent.testing.helpers import FakeClock as FakeClock
from thunderagent.testing.helpers import Recorder as Recorder
from thunderagent.testing.helpers import make_lease as make_lease
from thunderagent.testing.helpers import memory_client as memory_client
from thunderagent.testing.helpers import memory_store as memory_store
from thunderagent.testing.helpers import run_stream as run_stream
from thunderagent.testing.helpers import run_until_idle as run_until_idle
