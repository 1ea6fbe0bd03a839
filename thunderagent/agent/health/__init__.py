"""How an agent is: what is seen of it, the judgement, and the ways in which that is told."""
