"""shardviz's tests. What is here runs before anything of shardviz is imported by `conftest`."""

import sys

for _hook in [finder for finder in sys.meta_path if hasattr(finder, "_must_rewrite")]:
    # pytest would rewrite the asserts of all modules of a package that has a plugin, in each worker anew if a container
    # lets it keep nothing. Tests have the asserts that matter. What is compiled is kept for all workers.
    _hook._must_rewrite.discard("shardviz")
    sys.dont_write_bytecode = False
