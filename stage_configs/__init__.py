"""Stage configs that ship with the package; README.md in this folder explains every key."""
