"""Facts about AWS that a plan needs before it asks AWS: dated snapshots with their source."""
