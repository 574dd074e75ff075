"""The removable structure of a class, measured on a tiny random instance."""
