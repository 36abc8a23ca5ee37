"""Which image a row's sandboxes start from."""

from __future__ import annotations

from agentrl.sandbox.images import BASE_IMAGE, OWN_PREFIX
from agentrl_envs.swe_gym.rows import Row

_SWE_BENCH = frozenset(
    {
        *("astropy/astropy", "django/django", "marshmallow-code/marshmallow", "matplotlib/matplotlib"),
        *("mwaskom/seaborn", "pallets/flask", "psf/requests", "pvlib/pvlib-python", "pydata/xarray"),
        *("pydicom/pydicom", "pylint-dev/astroid", "pylint-dev/pylint", "pytest-dev/pytest", "pyvista/pyvista"),
        *("scikit-learn/scikit-learn", "sphinx-doc/sphinx", "sqlfluff/sqlfluff", "sympy/sympy"),
    }
)
_LATEST = ":latest"


def image_of(row: Row, *, configured: str | None, has_bundle: bool, recipes: frozenset[str]) -> str:
    """The image's name: `configured` ({id} is the instance id), else the recipe of a bundled tree, else the row's
    own, else the base image for a bundled tree and the published name for any other. `:latest` is left out, so that
    one image has one name."""
    if configured is not None:
        return configured.replace("{id}", row.instance_id).removesuffix(_LATEST)
    recipe = recipe_name(row.repo, row.version)
    if has_bundle and recipe in recipes:
        return f"{OWN_PREFIX}{recipe}"
    if row.image is not None:
        return row.image.replace("{id}", row.instance_id).removesuffix(_LATEST)
    return BASE_IMAGE if has_bundle else published_image(row)


def recipe_name(repo: str, version: str | None) -> str:
    """`<owner>__<repo>-<version>`, as recipes of sandbox images are called."""
    return f"{repo.replace('/', '__')}-{version}".lower()


def published_image(row: Row) -> str:
    """The name under which SWE-smith, SWE-bench and SWE-Gym publish a row's image; registries know lower case only."""
    if row.bug_patch:
        owner, _, repo = row.repo.partition("/")[2].partition("__")
        return f"swebench/swesmith.x86_64.{owner}_1776_{repo}".lower()
    account, joint = ("swebench", "_1776_") if row.repo in _SWE_BENCH else ("xingyaoww", "_s_")
    return f"{account}/sweb.eval.x86_64.{row.instance_id.replace('__', joint)}".lower()
