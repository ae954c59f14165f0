"""Planner of moves between generators: numpy only, pure."""
