"""Preallocated, donated arenas and the only code that writes into them."""
