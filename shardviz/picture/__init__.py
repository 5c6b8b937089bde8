"""What a person sees: one drawing model of a tensor, a mesh and findings, and one module a format."""
