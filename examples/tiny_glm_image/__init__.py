"""A small trained GLM-Image: the world it draws, how it was trained, and how well it draws."""
