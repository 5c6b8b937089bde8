"""Pictures: one drawing model of a tensor, a mesh and findings, and one module per format."""
