"""What modules cost in an engine by how many units they keep: measured, kept in a file, interpolated."""
