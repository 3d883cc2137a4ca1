"""Views of a plan: in time, by part of a layer, on other devices, beside published runs. No torch."""
