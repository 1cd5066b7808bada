import sys

from fcoll.cli import main

sys.exit(main())
