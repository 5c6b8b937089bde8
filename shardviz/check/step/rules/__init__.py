"""The rules that explain a wrong result of a step, one family per module; `check.step.run` tries them in turn."""
