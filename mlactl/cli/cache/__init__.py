"""`mlactl cache`: list, explain, verify, audit, prune and carry compiled kernels."""

import typer

from mlactl.cli.cache.audit import audit
from mlactl.cli.cache.bring_in import import_
from mlactl.cli.cache.check import verify
from mlactl.cli.cache.explain import show, why
from mlactl.cli.cache.export import export
from mlactl.cli.cache.overview import directory, ls, stats
from mlactl.cli.cache.remove import prune, rm

app = typer.Typer(help="List, explain, verify, audit, prune and carry compiled kernels", no_args_is_help=True, rich_markup_mode=None)

app.command()(ls)
app.command()(show)
app.command()(stats)
app.command("dir")(directory)
app.command()(why)
app.command()(verify)
app.command()(audit)
app.command()(prune)
app.command()(rm)
app.command()(export)
app.command("import")(import_)
