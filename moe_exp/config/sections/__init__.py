"""Settings by section, with the values that follow from them and the rules between them. No torch."""
