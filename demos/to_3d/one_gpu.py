from model import batch, build

AXES = ("gpu",)


def parallelize(model, mesh):
    return model
