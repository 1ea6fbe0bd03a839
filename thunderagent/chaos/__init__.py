"""A WebSocket feed for tests that fails as it is told to: `async with ChaosServer(Refuse(), Feed()) as server`.

    server        ChaosServer: listens, deals the behaviours out, answers the handshake
    behaviours    what a connection can meet, as values
    connection    one WebSocket that is fed
    history       the messages of the feed, by epoch and sequence number
    observations  what the server saw, and waiting for it
    frames        RFC 6455: frames and handshake, right ones and wrong ones
    certificates  TLS for 127.0.0.1

`python -m thunderagent.chaos` is a feed in a process of its own, which can be stopped and killed.
"""

from thunderagent.chaos.behaviours import Behaviour as Behaviour
from thunderagent.chaos.behaviours import BrokenTls as BrokenTls
from thunderagent.chaos.behaviours import Close as Close
from thunderagent.chaos.behaviours import Cut as Cut
from thunderagent.chaos.behaviours import Ending as Ending
from thunderagent.chaos.behaviours import Feed as Feed
from thunderagent.chaos.behaviours import Garbage as Garbage
from thunderagent.chaos.behaviours import HangUp as HangUp
from thunderagent.chaos.behaviours import Redirect as Redirect
from thunderagent.chaos.behaviours import Refuse as Refuse
from thunderagent.chaos.behaviours import Silence as Silence
from thunderagent.chaos.behaviours import TlsFault as TlsFault
from thunderagent.chaos.behaviours import Unanswered as Unanswered
from thunderagent.chaos.behaviours import Violate as Violate
from thunderagent.chaos.frames import Violation as Violation
from thunderagent.chaos.observations import Attempt as Attempt
from thunderagent.chaos.observations import Received as Received
from thunderagent.chaos.observations import Subscription as Subscription
from thunderagent.chaos.server import ChaosServer as ChaosServer
