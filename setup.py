"""Lists the packages, which pyproject.toml can either find or map, and not both: the recipes lie beside the package."""

from setuptools import find_packages, setup

setup(
    py_modules=["struprune_cli"],
    packages=[*find_packages(include=["struprune_plugin", "struprune_plugin.*"]), "struprune_plugin.recipe_files"],
)
