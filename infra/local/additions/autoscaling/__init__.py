"""Auto Scaling groups and the end of their instances."""
