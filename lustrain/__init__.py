"""The ground floor: what every room stands on. Nothing in it knows another room."""
