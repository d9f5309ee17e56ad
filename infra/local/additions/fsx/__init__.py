"""FSx file systems and their links to S3."""
