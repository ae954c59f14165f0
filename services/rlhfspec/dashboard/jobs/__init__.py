"""Sources of the dashboard's jobs: run folders or the API server."""
