"""Moves of running sequences between generators: `rebalancing` plans them, `migration` executes them."""
