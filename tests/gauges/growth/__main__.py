import sys, tempfile
from pathlib import Path
from functools import partial
from tests.gauges.growth.cases import uses_of_all
from tests.gauges.growth.measure import growth_of
import traceback
pat=sys.argv[1] if len(sys.argv)>1 else ''
runs=int(sys.argv[2]) if len(sys.argv)>2 else 3
with tempfile.TemporaryDirectory() as t:
    for inp,use in uses_of_all():
        if pat in f'{inp.name}: {use}':
            try:
                g=growth_of(f'{inp.name}: {use}', partial(inp.prepared, Path(t), use), inp.size, runs)
                print('BAD' if g.is_too_fast else '   ', g, flush=True)
            except Exception as e:
                print('ERR', inp.name, use, str(e)[-600:], flush=True)
