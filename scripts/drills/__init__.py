"""Drills: what is promised for bad days, played on one machine, with a verdict.

__main__     the command line
regionloss   the loss of a region, and the way back: the story
world        two regions: tables that replicate, an arbiter, gateways, agents
fabric       what of it can be cut, and what is counted on the way
ledger       who ran which task when, and which message of a stream was handled where
workloads    the jobs of the drill, and the steady load
names        a stand-in for DNS with health checks
crowd        the clients, from the side of the drill
people       the clients: a process of its own
pace         how much faster time runs
timeline     what happened when, told as it happens and as a table
findings     what was found, and whether it is what is promised
"""
