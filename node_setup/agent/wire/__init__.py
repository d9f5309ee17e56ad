"""What the agent's caller sends and gets back."""
