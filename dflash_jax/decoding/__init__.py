"""The round: draft, verify, accept, as pure functions and compiled programs."""
