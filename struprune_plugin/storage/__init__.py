"""What lies on disk: manifest, output folder, digests, resume store, the source checkpoint."""
