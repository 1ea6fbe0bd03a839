"""What an operator asks: doctor, explain, overview, policies."""
