"""The media that weights travel through."""
