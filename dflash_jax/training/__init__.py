"""Training drafters for a target: corpus, features, blocks, losses, trainer, export."""
