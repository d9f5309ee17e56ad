"""Plans of interruption notices, alarms, dashboard and budget, and the alert rules of Prometheus."""
