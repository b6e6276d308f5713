"""How much room there is: sizes, media, model catalogue, reserve, marks."""
