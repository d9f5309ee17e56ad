"""Files that the agent owns: lines of many settings, units, whole files."""
