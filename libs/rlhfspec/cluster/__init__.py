"""What operator, pods, plugin, dashboard and chart agree upon, and how they ask the API server."""
