"""One file per command of `dflash-jax`."""
