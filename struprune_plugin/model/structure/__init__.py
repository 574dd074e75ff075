"""What can be cut, measured on a tiny random instance of a class."""
