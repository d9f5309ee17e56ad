"""Rules that need nothing but the spec and what is known of its place, a module for each topic."""
