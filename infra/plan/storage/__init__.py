"""Plans of file systems, buckets and the image repository."""
