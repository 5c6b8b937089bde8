"""Pictures as SVG that stand alone in an issue or a paper."""
