"""The settings as the tables declare them."""
