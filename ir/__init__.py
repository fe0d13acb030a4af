"""The IR: types, ops, text, and what a person declares. Pure Python; imports neither torch nor a driver."""
