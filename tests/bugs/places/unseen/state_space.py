"""A state-space model of three layers, its channels split over tp by hand, beside data parallel."""

from __future__ import annotations

from tests.bugs.places.fault import LAYERS_AND_HEAD, NOTHING, Fault, Program

TEXT = (
    '''
BATCH_AXES = ("dp",)
LAYERS, TOKENS, FEATURES, CHANNELS, STATES = 3, 6, 8, 12, 4


class Mixer(nn.Module):
    """A causal convolution of each channel, and a scan whose steps, inputs and outputs depend on the token."""

    group = None

    def __init__(self):
        super().__init__()
        self.x_proj, self.z_proj = (nn.Linear(FEATURES, CHANNELS, bias=False) for _ in range(2))
        self.conv = nn.Parameter(torch.randn(CHANNELS, 3) / 2)
        self.states = nn.Linear(CHANNELS, 2 * STATES + 1, bias=False)
        self.decay = nn.Parameter(torch.rand(CHANNELS, STATES) + 0.5)
        self.skip = nn.Parameter(torch.randn(CHANNELS))
        self.out_proj = nn.Linear(CHANNELS, FEATURES, bias=False)
        nn.init.normal_(self.states.weight)

    def forward(self, x):
        x = self.entered(x)
        own, gate = self.x_proj(x), self.z_proj(x)
        own = functional.silu(self.convolved(own))
        step, taken, given = self.shared(self.states(own)).split((1, STATES, STATES), -1)
        done = self.scanned(own, self.steps(step), taken, given) + self.skip * own
        return self.left(self.out_proj(done * functional.silu(gate)))

    def convolved(self, x):
        padded = functional.pad(x, (0, 0, self.conv.shape[1] - 1, 0))
        return sum(padded[:, at : at + x.shape[1]] * self.conv[:, at] for at in range(self.conv.shape[1]))

    def steps(self, x):
        return functional.softplus(x)

    def scanned(self, x, step, taken, given):
        state, found = x.new_zeros(x.shape[0], x.shape[2], STATES), []
        for at in range(x.shape[1]):
            state = self.kept(state, at) * torch.exp(-step[:, at, :, None] * self.decay)
            state = state + step[:, at, :, None] * x[:, at, :, None] * taken[:, at, None]
            found.append((state * given[:, at, None]).sum(-1))
        return torch.stack(found, 1)

    def kept(self, state, at):
        return state

    def shared(self, x):
        """What depends on all channels, and is read by each rank's own."""
        return x if self.group is None else Copy.apply(Sum.apply(x, self.group), self.group)

    def entered(self, x):
        return x if self.group is None else Copy.apply(x, self.group)

    def left(self, x):
        return x if self.group is None else Sum.apply(x, self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(FEATURES, eps=1e-5), Mixer()

    def forward(self, x):
        return x + self.mixer(self.norm(x))

'''
    + LAYERS_AND_HEAD
    + '''

def batch():
    return torch.randn(4, TOKENS, FEATURES)


def parallelize(model, mesh):
    for layer in model.layers:
        mixer = layer.mixer
        for linear in (mixer.x_proj, mixer.z_proj):
            linear.weight = own(linear.weight, mesh)
        mixer.conv, mixer.decay, mixer.skip = (own(one, mesh) for one in (mixer.conv, mixer.decay, mixer.skip))
        mixer.states.weight = own(mixer.states.weight, mesh, 1)
        mixer.out_proj.weight = own(mixer.out_proj.weight, mesh, 1)
        mixer.group = mesh.get_group("tp")
    spoil(model.layers[1].mixer, mesh)


def spoil(mixer, mesh):
    """Leave everything as it is."""


def step(model, rows, mesh):
    loss = model(rows).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    return loss.detach()

'''
)

STATE_SPACE = Program("state space, TP by hand + DP", "dp=2,tp=2", TEXT)


def _spoiled(name: str, call: str, words: tuple[str, ...], *places: str) -> Fault:
    return Fault(name, STATE_SPACE, ((NOTHING, f"    {call}\n"),), places or ("layers.1.mixer",), words)


FAULTS = (
    _spoiled(
        "steps of a scan from a rank's own channels",
        "mixer.shared = lambda x: Copy.apply(x, mixer.group)",
        ("tp", "sum"),
        "layers.1.mixer.states",
        "layers.1.mixer",
    ),
    _spoiled(
        "gradients of what all channels share not summed",
        "mixer.shared = lambda x: Sum.apply(x, mixer.group)",
        ("tp", "sum"),
    ),
    _spoiled("steps that are not positive", "mixer.steps = lambda x: x", ("mixer",)),
    _spoiled(
        "a state that is lost in the middle of a sequence",
        "mixer.kept = lambda state, at: state * (at != TOKENS // 2)",
        ("mixer",),
    ),
    _spoiled(
        "gates of another rank's channels",
        "mixer.z_proj.register_forward_hook(lambda module, inputs, output: output.flip(-1))",
        ("order",),
        "layers.1.mixer.z_proj",
    ),
    _spoiled(
        "a decay whose gradient one rank loses",
        "mixer.decay.register_hook(lambda grad: grad * (mesh.get_local_rank('tp') == 0))",
        ("tp|rank 1|ranks 1",),
        "layers.1.mixer.decay",
    ),
)
