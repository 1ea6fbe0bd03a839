"""Health of an agent: what is seen of it, the judgement, and the outlets of the judgement."""
