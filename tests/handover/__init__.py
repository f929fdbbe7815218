"""Apart from tests/engines, whose engines would still be there: three at a time are enough for a small machine."""
