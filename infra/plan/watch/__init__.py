"""Plans of interruption notices, alarms, dashboard and budget."""
