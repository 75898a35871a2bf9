"""What the dashboard is told, live."""
