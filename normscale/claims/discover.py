"""Finds the claims of a checkout: every file of its `experiments` folder defines one CLAIM."""

import importlib.util
from pathlib import Path

import normscale
from normscale.claims.claim import Claim, ProfileName
from normscale.errors import BadInput, nearest


def experiments_folder() -> Path:
    """Returns the `experiments` folder of the checkout around the current directory, else around this package.

    Raises:
        BadInput: neither is a checkout; an installed package carries no claims.
    """
    here = Path.cwd()
    package = Path(normscale.__file__).resolve().parent.parent
    for folder in (here, *here.parents, package):
        if (folder / "experiments").is_dir() and (folder / "normscale" / "claims").is_dir():
            return folder / "experiments"
    raise BadInput(
        f"experiments: no checkout of normscale at {here} or above; claims are not part of the installed package, "
        "so clone the repository and run this inside it"
    )


def list_claims(folder: Path | None = None) -> list[Claim]:
    """Returns the claims of the checkout, by file name.

    Raises:
        BadInput: there is no checkout, a file does not define CLAIM, or two files share an id.
    """
    claims: dict[str, Claim] = {}
    for path in sorted((folder or experiments_folder()).glob("[!_]*.py")):
        claim = _load(path)
        if claim.id in claims:
            raise BadInput(f"{path}: the id {claim.id!r} is taken by another file; give each claim its own")
        claims[claim.id] = claim
    return list(claims.values())


def select(ids: list[str], claims: list[Claim], profile: ProfileName | None = None) -> list[Claim]:
    """Returns the claims asked for, each once; `core` stands for every core claim, `all` for every claim there is.

    With a profile, the two stand for those of them that have it; a claim that is named is returned either way.

    Raises:
        BadInput: an id is not that of a claim, or none of those that it stands for has the profile.
    """
    known = {claim.id: claim for claim in claims}
    chosen: dict[str, Claim] = {}
    for name in ids or ["core"]:
        if name in ("core", "all"):
            found = [claim for claim in claims if claim.core or name == "all"]
            fit = [claim for claim in found if profile is None or profile in claim.profiles]
            if found and not fit:
                raise BadInput(f"--profile: no claim of {name!r} has a profile {profile!r}; name claims that have it")
            chosen.update({claim.id: claim for claim in fit})
        elif name in known:
            chosen[name] = known[name]
        else:
            allowed = ", ".join(["core", "all", *known])
            raise BadInput(f"claim {name!r}: there is no such claim{nearest(name, list(known))}; one of: {allowed}")
    return list(chosen.values())


def _load(path: Path) -> Claim:
    spec = importlib.util.spec_from_file_location(f"normscale_experiments_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a claim is a file that people edit: say which one and what
        raise BadInput(f"{path}: {type(error).__name__}: {error}; mend the claim") from None
    claim = getattr(module, "CLAIM", None)
    if not isinstance(claim, Claim):
        raise BadInput(f"{path}: it defines no CLAIM; define one, or start the file name with an underscore")
    return claim
