"""Commands for operators: of a daemon that runs, and of what one left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtcd import config
from kvtcd.cli_options import JsonOption, number_option, output_option
from kvtcd.core import access
from kvtcd.core.errors import BadRequest, ConfigError, Unavailable, UnknownNamespace

app = typer.Typer()

AddressArgument = Annotated[
    str | None,
    typer.Argument(help="Socket or http(s)://host:port; default: $KVTCD_SOCKET, else the usual one."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="config.toml of the daemon, which must not run; without it, the defaults."
    ),
]
RunningOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="config.toml of the daemon: its socket is asked, and its TCP tried."),
]
FileKeyOption = Annotated[
    Path,
    typer.Option(help="File of 32 random bytes that the export is encrypted and authenticated with."),
]
MasterOption = Annotated[
    Path | None, typer.Option(help="File of the daemon's master key; default: its own, master.key.")
]


@app.command()
def doctor(
    address: AddressArgument = None,
    *,
    path: RunningOption = None,
    json: JsonOption = None,
) -> None:
    """Look at a running daemon: is it there, how are blocks packed, does every way in and out work?

    With its configuration file TCP is one of the ways, with the token in KVTCD_TOKEN, and TLS by KVTCD_CA.
    """
    from kvtcd.admin import doctor as admin  # noqa: PLC0415 - numpy

    known = config.load(path) if path else None
    asked = address or (str(known.daemon.socket) if known else None)
    if not admin.command(address=asked, tcp=known.tcp if known else None, json=json):
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A state directory, a tenant's in it, an export, or a file with a blob.")
    ],
    *,
    records: Annotated[int, typer.Option(min=0, help="List so many records of each tenant.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every blob and compare it with its MAC and checksums.")
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option(
            help="File of the key of an export, or of the master key where that is a credential: what is "
            "read is compared."
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Show what lies on disk without a daemon, and whether it is sound; nothing is changed."""
    if not path.exists():
        raise ConfigError(path, "", "does not exist")
    if path.is_file():
        from kvtcd.admin import blob_view, export_view  # noqa: PLC0415 - rich, lmdb

        if export_view.is_export(path):
            export_view.command(path, key=key, json=json)
        elif blob_view.is_blob(path):
            blob_view.command(path, json=json)
        else:
            raise ConfigError(
                path, "", "is neither an export nor a blob (`kvtcd profile show` shows profiles)"
            )
        return
    from kvtcd.admin import store_view  # noqa: PLC0415 - lmdb, numpy

    if not store_view.command(path, shown=records, verify=verify, key=key, json=json):
        raise typer.Exit(1)


@app.command()
def rekey(
    path: Annotated[Path, typer.Argument(help="The state directory; no daemon may use it.")],
    *,
    old_key: Annotated[
        Path | None, typer.Option(help="File of the key it is under; default: its own, master.key.")
    ] = None,
    new_key: Annotated[
        Path | None, typer.Option(help="File of the key to put it under; default: one that is made up.")
    ] = None,
) -> None:
    """Put all that is stored under another master key; needs room for a second copy. Killed, run it again."""
    from kvtcd.admin import rekey as admin  # noqa: PLC0415 - lmdb, numpy

    if not admin.command(path, old=old_key, new=new_key):
        raise typer.Exit(1)


@app.command()
def token(
    *,
    tenant: Annotated[str, typer.Option(help="Whom it stands for; uid:1000 is that user of this host.")],
    scope: Annotated[list[access.Scope] | None, typer.Option(help="Several allowed; default: data.")] = None,
) -> None:
    """Make a token for TCP: shown once, and an entry for the file of tokens on standard output."""
    try:
        config.tenant_name(tenant)
    except ValueError as error:
        raise ConfigError("--tenant", "", str(error)) from None
    secret = access.new_token()
    typer.echo(f"the token, for KVTCD_TOKEN of the client: {secret}", err=True)
    scopes = ", ".join(f'"{each}"' for each in scope or [access.Scope.DATA])
    digest = access.digest(secret.encode()).hex()
    typer.echo(f'[[token]]\nsha256 = "{digest}"\ntenant = "{tenant}"\nscopes = [{scopes}]')


@app.command()
def purge(
    name: Annotated[str, typer.Argument(help="The namespace; any name where all was damaged and set aside.")],
    address: AddressArgument = None,
    *,
    tenant: Annotated[
        str | None, typer.Option(help="Whose it is, for operators (scope admin); default: yours.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    deadline: Annotated[
        float, number_option(min=1, help="Seconds to wait; the purge goes on behind it.")
    ] = 600,
) -> None:
    """Remove a namespace and all its bytes from a running daemon, and what was set aside of its tenant."""
    from kvtcd.client import Client  # noqa: PLC0415 - the commands that ask no daemon start without it

    with Client(address) as client:
        whose = "yours" if tenant is None else f"tenant {tenant}"
        if tenant is None:
            known = [info.name for info in client.namespaces()]
        else:  # of a tenant who is left out nothing is listed, and the purge itself says so
            known = [
                other for each in client.tenants() if each["tenant"] == tenant for other in each["namespaces"]
            ]
        there = f"there are {', '.join(sorted(known))}" if known else "there is none at all"
        unknown = BadRequest("namespace", f"{name!r} is none of {whose} on {client.address}; {there}")
        asked = f"Remove namespace {name} of {whose} and all its blocks from {client.address}?"
        if name not in known:
            if not {"left-out", "set-aside"} & {*client.stats()["degraded"]}:
                raise unknown
            asked = f"{unknown.why}. Remove what of {whose} was set aside as damaged, if anything was?"
        yes or typer.confirm(asked, abort=True)
        try:
            removed = client.purge(name, tenant=tenant, deadline=deadline)
        except UnknownNamespace:
            raise unknown from None
        except Unavailable as error:
            why = f"whether {name} is gone is not known: run this again once the daemon is there"
            raise Unavailable(f"{error}; {why}, until it says so") from None
    typer.echo(f"{removed.removed:,} blocks of {name} are gone")
    if removed.set_aside:
        typer.echo(f"what of {whose} had been set aside as damaged is gone as well")
    if removed.remote == "pending":
        typer.echo(
            "the remote store could not be asked yet; it is until it has forgotten them, see `kvtcd doctor`"
        )
    if removed.remote:
        typer.echo(f"other daemons that share it forget them within {removed.others_s:g} s from then on")


@app.command()
def compact(
    path: Annotated[Path, typer.Argument(help="The state directory; no daemon may use it.")],
    *,
    key: Annotated[
        Path | None, typer.Option(help="File of the master key if that is a credential: MACs are compared.")
    ] = None,
) -> None:
    """Give back the room that records left behind; what is kept is read and checked, and damage is named."""
    from kvtcd.admin import compact as admin  # noqa: PLC0415 - lmdb, numpy

    if not admin.command(path, key=key):
        raise typer.Exit(1)


@app.command()
def export(
    name: Annotated[str, typer.Argument(help="The namespace.")],
    *,
    out: Annotated[Path, output_option("--out", help="The file to write.")],
    key: FileKeyOption,
    tenant: Annotated[
        str | None, typer.Option(help="Whose it is; default: of the only one who has it.")
    ] = None,
    path: ConfigOption = None,
    master_key: MasterOption = None,
) -> None:
    """Write a namespace with its blocks and profiles into a file, for another daemon or for later."""
    from kvtcd.admin import exports  # noqa: PLC0415 - torch, lmdb

    if not exports.command(name, config.load(path), tenant=tenant, out=out, key=key, master=master_key):
        raise typer.Exit(1)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `kvtcd export` wrote.")],
    *,
    key: FileKeyOption,
    tenant: Annotated[
        str | None, typer.Option(help="Whose it becomes; default: of the same name as before.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the namespace; default: as before.")] = None,
    path: ConfigOption = None,
    master_key: MasterOption = None,
) -> None:
    """Store what is in such a file; nothing is stored of a file that is not intact to its end."""
    from kvtcd.admin import imports  # noqa: PLC0415 - torch, lmdb

    imports.command(file, config.load(path), key=key, tenant=tenant, name=name, master=master_key)


@app.command()
def top(
    address: AddressArgument = None,
    *,
    every: Annotated[float, number_option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, for a log or a pipe.")] = False,
    json: JsonOption = None,
) -> None:
    """Watch a running daemon: tiers, hits, moves, namespaces, prefixes, and for its operator all tenants."""
    from kvtcd.admin import top as admin  # noqa: PLC0415 - rich

    admin.command(address=address, every_s=every, once=once, json=json)
