"""What a node shows of itself to Prometheus, as text for node_exporter's textfile collector."""
