"""A WebSocket feed for tests that fails by script: `async with ChaosServer(Refuse(), Feed()) as server`.

    server        ChaosServer: listens, hands out the behaviours, answers the handshake
    behaviours    the behaviours of a connection, as values
    connection    one WebSocket that is fed
    history       the messages of the feed, by epoch and sequence number
    observations  what the server saw, and waits for it
    frames        RFC 6455: frames and handshake, right and wrong ones
    certificates  TLS for 127.0.0.1

`python -m thunderagent.testing.chaos` is a feed in a process of its own, to be stopped and killed.
"""

from thunderagent.testing.chaos.behaviours import Behaviour as Behaviour
from thunderagent.testing.chaos.behaviours import BrokenTls as BrokenTls
from thunderagent.testing.chaos.behaviours import Close as Close
from thunderagent.testing.chaos.behaviours import Cut as Cut
from thunderagent.testing.chaos.behaviours import Ending as Ending
from thunderagent.testing.chaos.behaviours import Feed as Feed
from thunderagent.testing.chaos.behaviours import Garbage as Garbage
from thunderagent.testing.chaos.behaviours import HangUp as HangUp
from thunderagent.testing.chaos.behaviours import Redirect as Redirect
from thunderagent.testing.chaos.behaviours import Refuse as Refuse
from thunderagent.testing.chaos.behaviours import Silence as Silence
from thunderagent.testing.chaos.behaviours import TlsFault as TlsFault
from thunderagent.testing.chaos.behaviours import Unanswered as Unanswered
from thunderagent.testing.chaos.behaviours import Violate as Violate
from thunderagent.testing.chaos.frames import Violation as Violation
from thunderagent.testing.chaos.observations import Attempt as Attempt
from thunderagent.testing.chaos.observations import Received as Received
from thunderagent.testing.chaos.observations import Subscription as Subscription
from thunderagent.testing.chaos.server import ChaosServer as ChaosServer
