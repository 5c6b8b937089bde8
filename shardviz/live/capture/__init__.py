"""Fill weights with ids, and write down what this rank holds of a model."""
