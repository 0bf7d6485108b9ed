"""The small work of a layer beside its matrix products and its recurrence."""
