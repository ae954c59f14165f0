"""From watch events to serialized reconciles of single jobs."""
