"""Names, schema and API client that the operator, pods, plugin, dashboard and chart share."""
