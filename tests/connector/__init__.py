"""In a folder of its own, whose engines are there alone: three at a time are enough for a small machine."""
