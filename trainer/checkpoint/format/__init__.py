"""Records of a checkpoint, names of its objects, and which rows of which tensor lie where: pure and torch-free."""
