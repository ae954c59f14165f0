"""What operator, pods, plugin, dashboard and chart agree upon; no process of a cluster lives here."""
