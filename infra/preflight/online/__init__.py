"""Rules that ask AWS, and only ask: nothing is made, changed or ended."""
