"""Where the dashboard's jobs come from: folders of runs, or the API server."""
