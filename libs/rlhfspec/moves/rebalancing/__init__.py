"""Pure numpy planner of moves between generators."""
