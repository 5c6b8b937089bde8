"""Where claims come from: one module for each library that splits a model's tensors.

A source is a module here, and a line in `SOURCES` of `registry`. It has whichever of these functions it needs:

    inner(model)                          the model inside a wrapper that adds to names; None for any other module
    of_model(model, mesh)                 tensors that the model's own parameters do not show, such as FSDP1's flat ones
    of_tensor(name, role, tensor, mesh)   one tensor, if this library made it; None for any other
    numbers(model)                        the numbers in the whole model of modules that each rank numbers for itself
    marks(tensor)                         whether this library split a tensor: then the model is one to capture
    mesh_of(model)                        the largest device mesh that the model's tensors are on
    groups_of(model)                      or the groups that it is split and copied over, by axis, outermost first
    fragments(engine, model)              this rank's fragments of the master copies and moments in flat buffers
    stand_ins(parameter)                  what an optimizer steps in a parameter's place, or the optimizer itself
    gradients(weights, stepper, stepped)  the gradients of stand-ins while an inner optimizer steps them
    checkpoint(model, reference)          the reference under the model's names, if the library renames or merges

A source imports its library only if the job has imported it. Of a tensor that it does not understand it returns
`not_understood(...)`, with a reason that names the class or the library: that tensor is never called wrong.
"""
