"""``python -m struprune_plugin.cli``."""

import sys

from struprune_plugin.cli.main import main

sys.exit(main())
