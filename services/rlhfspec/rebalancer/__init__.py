"""The rebalancing stage: advises moves of samples between generators, from their signals."""
