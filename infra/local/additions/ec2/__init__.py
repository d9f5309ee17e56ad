"""EC2: networks, launches, reservations, placement and images."""
