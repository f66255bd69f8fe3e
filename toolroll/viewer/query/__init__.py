"""List, filter, sort and search samples."""
