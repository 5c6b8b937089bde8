"""Single faults with a known place, in models of several layers: the module that is named first is the faulty one."""
