"""From what the API server tells to one reconcile of one job after the other."""
