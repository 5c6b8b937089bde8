"""What the unsharded model's step is, where ranks see parts of the batch that the whole is no mean of."""

from tests.live.probing import checked


def test_every_part_starts_from_the_buffers_that_a_rank_starts_from(tmp_path):
    norm = """
def build():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), {more}nn.Linear(8, 6))
"""
    report = checked(norm.format(more=""), "dp=3", tmp_path / "rows")
    assert (report.findings, report.not_checked) == ((), ())
    report = checked(norm.format(more="nn.BatchNorm1d(8), "), "dp=3", tmp_path / "parts")
    assert report.findings == ()
    assert len(report.not_checked) == 1
    own = (
        norm.format(more="")
        + """
def step(model, rows, mesh):
    with torch.no_grad(): model(rows)
    loss = model(rows).square().mean()
    loss.backward()
    return loss
"""
    )
    assert {found.kind for found in checked(own, "dp=3", tmp_path / "twice").findings}
